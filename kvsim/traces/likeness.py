"""A trace's likeness: a few hundred numbers fitted to it, from which another trace is drawn.

Kept are the load over time in steps of some hundred requests, the gaps' coefficient of variation,
105 quantiles of each length, one correlation, and percentiles of prefix reuse. Lengths are drawn
independently of time. No row of the trace is among them.
"""

import numpy as np

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.traces import lengths, prefixes
from kvsim.traces.arrivals import Arrivals, RepeatedLoad, Steady
from kvsim.traces.lengths import Lengths
from kvsim.traces.prefixes import Prefixes
from kvsim.traces.requests import Floats, Requests

PER_STEP = 200  # requests per step of the load, on average
MOST_STEPS = 2000
TIES = 0.005  # share of simultaneous requests from which a coarse clock is looked for
FEWEST = 200  # requests
LOWEST = 0.02  # load of a step without requests, of the mean


@frozen
class TrafficModel:
    """Everything a trace is drawn from.

    Attributes
    ----------
    arrivals
        When requests come.
    rate
        How many on average. [requests/s]
    lengths
        How long they are.
    prefixes
        Which prefixes they share; None for none.
    """

    arrivals: Arrivals
    rate: float
    lengths: Lengths
    prefixes: Prefixes | None = None

    def changed(
        self,
        arrivals: Arrivals | None = None,
        rate: float | None = None,
        lengths: Lengths | None = None,
        prefixes: Prefixes | None = None,
    ) -> "TrafficModel":
        """The same with what is given in place of its own."""
        return TrafficModel(
            arrivals or self.arrivals,
            rate or self.rate,
            lengths or self.lengths,
            prefixes or self.prefixes,
        )

    def draw(self, seed: int, requests: int | None, duration: float | None) -> Requests:
        """A trace of so many requests, or for so long [s]; the same for the same seed."""
        times, sizes, shares = (np.random.default_rng([seed, part]) for part in range(3))
        arrival = self.arrivals.draw(times, self.rate, requests, duration)
        if not len(arrival):
            return Requests(arrival, arrival.astype(np.int64), arrival.astype(np.int64))
        prompt, generate = self.lengths.draw(sizes, len(arrival))
        arrival = arrival - arrival[0]
        if self.prefixes is None:
            return Requests(arrival, prompt, generate)
        ids, start = self.prefixes.draw(shares, prompt)
        return Requests(arrival, prompt, generate, ids, start, self.prefixes.block_tokens)


def fit(requests: Requests) -> TrafficModel:
    """The likeness of a trace.

    Raises
    ------
    InputError
        If the trace is so short that its percentiles would be its rows.
    """
    if len(requests) < FEWEST:
        raise InputError(
            f"{len(requests)} requests; expected at least {FEWEST} to fit a likeness that does not "
            "repeat them"
        )
    rate = (len(requests) - 1) / requests.duration if requests.duration else 1.0
    return TrafficModel(
        fit_arrivals(requests.arrival), rate, lengths.fit(requests), prefixes.fit(requests)
    )  # fmt: skip


def fit_arrivals(arrival: Floats) -> Arrivals:
    """Load over time, variation of the gaps and the clock's grid."""
    duration = float(arrival[-1] - arrival[0]) if len(arrival) else 0.0
    if len(arrival) < 3 or not duration:
        return Steady(cv=1.0)
    tick = clock_tick(arrival)
    steps = min(max(len(arrival) // PER_STEP, 1), MOST_STEPS)
    width = duration / steps
    if tick:  # whole ticks per step, so that no step has one more than another
        width = max(round(width / tick), 1) * tick
        steps = max(round((duration + tick) / width), 1)
    since = arrival - arrival[0] + tick / 2
    halves, _ = np.histogram(since, 2 * steps, (0.0, steps * width))
    counts = halves.reshape(steps, 2).sum(axis=1)
    noise = float(np.mean(np.diff(halves.reshape(steps, 2), axis=1) ** 2))
    spread = counts.var()
    signal = max(1 - noise / spread, 0.0) if spread else 0.0
    levels = np.maximum(1 + signal * (counts / counts.mean() - 1), LOWEST)
    levels /= levels.mean()
    if tick:
        cv = (noise / counts.mean()) ** 0.5
    else:
        load = np.concatenate([[0.0], np.cumsum(levels * width)])
        gaps = np.diff(np.interp(since, width * np.arange(steps + 1), load))
        cv = float(gaps.std() / gaps.mean())
    return RepeatedLoad(cv=cv, width=width, levels=tuple(levels.tolist()), tick=tick)


def clock_tick(arrival: Floats) -> float:
    """The grid that arrivals lie on, if some coincide and all gaps are multiples of it; else 0."""
    gaps = np.diff(arrival)
    positive = gaps[gaps > 0]
    if not len(positive) or (gaps == 0).mean() < TIES:
        return 0.0
    tick = float(np.median(positive[positive < 1.5 * positive.min()]))
    off = np.abs(positive / tick - np.rint(positive / tick))
    return tick if (off < 0.05).mean() > 0.95 else 0.0
