"""Synthetic traces: when requests arrive, how long they are, which prefixes they share.

Arrivals: every process is a cumulative load, the requests expected up to a time, piecewise linear,
and gaps drawn in expected requests: gamma with mean 1 and a coefficient of variation (1: Poisson).
An arrival is where the load reaches the sum of the gaps before it. Only the load differs: constant,
on and off, or a day's sine. Arrivals like a trace's are drawn from it in blocks of time.

Lengths: a Gaussian copula over two marginals. Lognormal marginals are given by median and sigma;
empirical ones are a trace's percentiles, in between straight lines of log length. Of the trace
nothing else is kept, so no pair of its lengths returns other than by chance.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

import numpy as np

from kvsim.errors import InputError, unknown
from kvsim.frozen import frozen
from kvsim.traces.requests import LONGEST_REQUEST, Floats, Integers, Requests
from kvsim.traces.resample import draw_day
from kvsim.traces.statistics import leading_hits, rank_correlation

Random = np.random.Generator

DAY_STEPS = 1440  # steps that a day's sine is drawn in
MAX_DRAWN = 100_000_000


@frozen
class Arrivals(ABC):
    """An arrival process.

    Attributes
    ----------
    cv
        Standard deviation / mean of the gaps at constant load.
    """

    cv: float = 1.0

    @abstractmethod
    def load(self, random: Random, duration: float) -> tuple[Floats, Floats]:
        """Draw the cumulative load over time, of mean rate 1.

        Parameters
        ----------
        random
            Random generator.
        duration
            Time that it must cover at least. [s]

        Returns
        -------
        tuple[Floats, Floats]
            Times from 0, and the load there. [s, requests]
        """

    def draw(
        self, random: Random, rate: float, requests: int | None, duration: float | None
    ) -> Floats:
        """Draw a given number of arrivals, or those of a given duration.

        Parameters
        ----------
        random
            Random generator.
        rate
            Mean rate. [1/s]
        requests
            Number of requests; None for those of the duration.
        duration
            Length of the trace; None for that of the requests. [s]

        Returns
        -------
        Floats
            Ascending arrivals. [s]

        Raises
        ------
        InputError
            If that would be more requests than a trace may have.
        """
        span = duration if duration is not None else (requests or 0) / rate
        expected = span * rate
        if max(expected, requests or 0) > MAX_DRAWN:
            raise InputError(
                f"{expected:,.0f} requests; expected at most {MAX_DRAWN:,}; lower the rate or "
                "the duration"
            )
        margin = 10.0  # standard deviations; a second try is next to never needed
        while True:
            times, load = self.load(random, span)
            until = float(np.interp(span, times, load)) * rate
            count = requests or int(until + margin * (1 + self.cv) * (until + 1) ** 0.5)
            reached = np.cumsum(self.gaps(random, count))
            arrival: Floats = np.interp(reached / rate, load, times)
            if requests is None and reached[-1] >= until:
                return arrival[reached < until]
            if requests is not None and reached[-1] <= load[-1] * rate:
                return arrival
            margin *= 2
            span *= 1.0 if requests is None else 1.2 * reached[-1] / (load[-1] * rate)

    def gaps(self, random: Random, count: int) -> Floats:
        """Draw gaps between arrivals, in units of the mean gap at constant load.

        Parameters
        ----------
        random
            Random generator.
        count
            Number of gaps.

        Returns
        -------
        array
            Gaps of mean 1. (count,)
        """
        if self.cv == 0:
            return np.ones(count)
        return random.gamma(self.cv**-2, self.cv**2, count)


@frozen
class Steady(Arrivals):
    """Arrivals at constant load: Poisson with ``cv`` 1, burstier above, more even below."""

    def load(self, random: Random, duration: float) -> tuple[Floats, Floats]:
        """Return the cumulative load over time: a straight line.

        Parameters
        ----------
        random
            Not used: this load is the same in every trace.
        duration
            Time that it must cover at least. [s]

        Returns
        -------
        tuple[Floats, Floats]
            Times from 0, and the load there, shape (2,). [s, requests]
        """
        ends = np.array([0.0, 10.0 * duration + 1.0])
        return ends, ends


@frozen
class OnOff(Arrivals):
    """Arrivals in bursts; both states have exponentially distributed lengths.

    Attributes
    ----------
    on, off
        Mean length of the states with and without load. [s]
    """

    on: float = 10.0
    off: float = 30.0

    def load(self, random: Random, duration: float) -> tuple[Floats, Floats]:
        """Draw the cumulative load over time: ramps while on, plateaus while off.

        Parameters
        ----------
        random
            Draws how long each state lasts.
        duration
            Time that it must cover at least. [s]

        Returns
        -------
        tuple[Floats, Floats]
            Times at which the state changes, and the load there, shape (2 cycles + 1,). [s,
            requests]
        """
        cycles = int(1.2 * duration / (self.on + self.off)) + 20
        lengths = random.exponential([self.on, self.off], (cycles, 2))
        times = np.concatenate([[0.0], np.cumsum(lengths)])
        ramps = np.stack([lengths[:, 0], np.zeros(cycles)], axis=1)
        share = self.on / (self.on + self.off)
        return times, np.concatenate([[0.0], np.cumsum(ramps)]) / share


@frozen
class Diurnal(Arrivals):
    """Arrivals at a load that follows a daily sine, from its trough.

    The rate is mean rate x (1 - amplitude x cos(2 pi t / period)).

    Attributes
    ----------
    amplitude
        Swing around the mean rate, 0 to 1.
    period
        Length of a day. [s]
    """

    amplitude: float = 0.5
    period: float = 86400.0

    def load(self, random: Random, duration: float) -> tuple[Floats, Floats]:
        """Return the cumulative load over time: the integral of the sine, in small steps.

        Parameters
        ----------
        random
            Not used: this load is the same in every trace.
        duration
            Time that it must cover at least. [s]

        Returns
        -------
        tuple[Floats, Floats]
            Times from 0, and the load there, shape (DAY_STEPS days + 1,). [s, requests]
        """
        days = int(np.ceil(2.0 * duration / self.period)) + 1
        times = np.linspace(0.0, days * self.period, days * DAY_STEPS + 1)
        angle = 2 * np.pi * times / self.period
        return times, times - self.amplitude * self.period / (2 * np.pi) * np.sin(angle)


PER_BLOCK, FEWEST_BLOCKS = 200, 24  # requests of a block of time, and blocks of a trace


@frozen
class ResampledArrivals(Arrivals):
    """Arrivals resampled from a trace in blocks of time, which preserves its bursts.

    Attributes
    ----------
    times
        The trace's arrivals, from 0. [s]
    """

    times: tuple[float, ...] = (0.0,)

    def load(self, random: Random, duration: float) -> tuple[Floats, Floats]:
        """Not available: these arrivals are drawn without a load.

        Parameters
        ----------
        random, duration
            Not used.

        Raises
        ------
        NotImplementedError
            In any case.
        """
        raise NotImplementedError

    def draw(
        self, random: Random, rate: float, requests: int | None, duration: float | None
    ) -> Floats:
        """Draw arrivals of consecutive resampled days, with clients scaled to the rate.

        Parameters
        ----------
        random
            Random generator.
        rate
            Mean rate. [1/s]
        requests
            Number of requests; None for those of the duration.
        duration
            Length of the trace; None for that of the requests. [s]

        Returns
        -------
        Floats
            Ascending arrivals. [s]

        Raises
        ------
        InputError
            If there would be more requests than a trace may have.
        """
        if max(requests or 0, rate * (duration or 0.0)) > MAX_DRAWN:
            raise InputError(f"more than {MAX_DRAWN:,} requests; lower the rate or the duration")
        times = np.array(self.times)
        count, lasts = len(times), float(times[-1])
        gap = lasts / max(count - 1, 1)
        trace = Requests(times, np.ones(count, np.int64), np.ones(count, np.int64))
        blocks, clients = max(count // PER_BLOCK, FEWEST_BLOCKS), rate * gap
        wanted = np.inf if duration is None else duration
        parts: list[Floats] = []
        drawn, begin = 0, 0.0
        while begin <= wanted and drawn < (requests or np.inf):
            for part in range(int(np.ceil(clients))):
                seed = int(random.integers(2**31))
                day = draw_day(trace, seed, blocks, 0.0)[0].arrival
                kept = day[random.random(len(day)) < clients - part]
                parts.append(begin + kept)
                drawn += len(kept)
            begin += lasts + gap
        found = np.sort(np.concatenate(parts))[:requests]
        arrival: Floats = found[found <= wanted]
        return arrival


# Quantiles that a fit keeps: percentiles, and more of the longest, which carry much of the tokens.
QUANTILE_MARKS = np.sort(np.append(np.linspace(0.0, 1.0, 101), [0.9925, 0.995, 0.9975, 0.999]))


@frozen
class Lognormal:
    """A lognormal distribution of lengths.

    Attributes
    ----------
    median
        Median length. [tokens]
    sigma
        Standard deviation of the length's natural logarithm; 0 if all lengths are equal.
    """

    median: float
    sigma: float

    def quantiles(self, share: Floats, normal: Floats) -> Floats:
        """Compute the lengths at some quantiles.

        Parameters
        ----------
        share
            Probabilities from 0 to 1, not used here. (n,)
        normal
            The same quantiles as standard normal deviates. (n,)

        Returns
        -------
        Floats
            Lengths. (n,) [tokens]
        """
        return self.median * np.exp(self.sigma * normal)


@frozen
class Empirical:
    """A distribution given by its quantiles, such as those of a trace.

    Attributes
    ----------
    marks
        Natural logarithm of 1 + the value, at each probability in ``QUANTILE_MARKS``.
    """

    marks: tuple[float, ...]

    def quantiles(self, share: Floats, normal: Floats) -> Floats:
        """Interpolate the values at some quantiles.

        Parameters
        ----------
        share
            Probabilities from 0 to 1. (n,)
        normal
            The same quantiles as standard normal deviates, not used here. (n,)

        Returns
        -------
        array
            Values. (n,)
        """
        return np.expm1(np.interp(share, QUANTILE_MARKS, self.marks))


def fit_percentiles(values: Integers | Floats) -> Empirical:
    """Fit a distribution to the percentiles of values.

    Parameters
    ----------
    values
        Values of at least 0. (n,)

    Returns
    -------
    Empirical
        The distribution.
    """
    return Empirical(tuple(np.log1p(np.quantile(values, QUANTILE_MARKS)).tolist()))


class Margin(Protocol):
    """A distribution of lengths: ``Lognormal``, ``Empirical``, or one of ``traces.lengths``."""

    def quantiles(self, share: Floats, normal: Floats) -> Floats:
        """Compute the lengths at some quantiles.

        Parameters
        ----------
        share
            Probabilities from 0 to 1. (n,)
        normal
            The same quantiles as standard normal deviates, for distributions that are computed from
            those. (n,)

        Returns
        -------
        Floats
            Lengths. (n,) [tokens]
        """


@frozen
class Lengths:
    """Joint distribution of prompt and generated lengths.

    Attributes
    ----------
    prompt, generate
        Distribution of each length.
    correlation
        Correlation of the normal deviates from which both are drawn.
    """

    prompt: Margin
    generate: Margin
    correlation: float = 0.0

    def draw(self, random: "np.random.Generator", count: int) -> tuple[Integers, Integers]:
        """Draw prompt and generated tokens of some requests.

        Parameters
        ----------
        random
            Random generator.
        count
            Number of requests.

        Returns
        -------
        tuple[Integers, Integers]
            Prompt and generated tokens, at least 1 each. [tokens]
        """
        from scipy.special import ndtr

        first, second = random.standard_normal((2, count))
        second = self.correlation * first + (1 - self.correlation**2) ** 0.5 * second
        prompt, generate = (
            np.clip(np.rint(margin.quantiles(ndtr(normal), normal)), 1, LONGEST_REQUEST).astype(
                np.int64
            )
            for margin, normal in ((self.prompt, first), (self.generate, second))
        )
        return prompt, generate


def fit_lengths(requests: Requests) -> Lengths:
    """Fit the joint distribution of a trace's lengths: percentiles, and their rank correlation.

    Parameters
    ----------
    requests
        The trace.

    Returns
    -------
    Lengths
        The distribution.
    """
    spearman = rank_correlation(requests.prompt, requests.generate) or 0.0
    return Lengths(
        fit_percentiles(requests.prompt),
        fit_percentiles(requests.generate),
        2 * np.sin(np.pi * spearman / 6),  # of a bivariate normal; Kruskal (1958), section 5
    )


PROMPT_CLASSES = 8  # classes of prompt lengths, with a distribution of prefix reuse each
SEARCH_RADIUS = 64  # requests looked at on either side of the wanted distance


@frozen
class Prefixes:
    """A model of the reuse of prompt prefixes.

    Attributes
    ----------
    block_tokens
        Prompt tokens per block. [tokens]
    classes
        Prompt lengths that divide requests into classes of equal size. [tokens]
    depth
        By class, distribution of the share of a prompt's blocks that an earlier request has.
    distance
        Distribution of the number of requests since the latest one with the same prefix.
    """

    block_tokens: int
    classes: tuple[float, ...]
    depth: tuple[Empirical, ...]
    distance: Empirical

    def draw(self, random: "np.random.Generator", prompt: Integers) -> tuple[Integers, Integers]:
        """Draw the prefix blocks of requests.

        Parameters
        ----------
        random
            Random generator.
        prompt
            Prompt of each request, shape (n,). [tokens]

        Returns
        -------
        tuple[Integers, Integers]
            Block ids of all requests in a line, and where each request's begin, shape (n + 1,).
        """
        blocks = -(-prompt // self.block_tokens)
        chance = random.random((2, len(prompt)))
        depths = np.empty(len(prompt))
        kinds = np.searchsorted(self.classes, prompt, side="right")
        for kind, margin in enumerate(self.depth):
            depths[kinds == kind] = margin.quantiles(chance[0][kinds == kind], chance[0][:0])
        wanted = np.rint(np.minimum(depths, 1.0) * blocks).astype(np.int64)
        distance = np.rint(self.distance.quantiles(chance[1], chance[1])).astype(np.int64)
        return _chain(blocks, wanted, np.maximum(distance, 1))


def fit_prefixes(requests: Requests) -> Prefixes | None:
    """Fit a model of prefix reuse to a trace.

    Parameters
    ----------
    requests
        The trace.

    Returns
    -------
    Prefixes or None
        The model; None if the trace has no prefix blocks.
    """
    if requests.block_ids is None or requests.block_start is None:
        return None
    counts = np.maximum(np.diff(requests.block_start), 1)
    hits = leading_hits(requests)
    cuts = np.unique(np.quantile(requests.prompt, np.linspace(0, 1, PROMPT_CLASSES + 1)[1:-1]))
    kinds = np.searchsorted(cuts, requests.prompt, side="right")
    shares: Floats = hits / counts
    return Prefixes(
        requests.block_tokens,
        tuple(cuts.tolist()),
        tuple(fit_percentiles(_or_zero(shares[kinds == kind])) for kind in range(len(cuts) + 1)),
        fit_percentiles(_or_zero(_distances(requests, hits))),
    )


def reuse(block_tokens: int, share: float, depth: float, distance: float) -> Prefixes:
    """Build a model of prefix reuse from four numbers.

    Parameters
    ----------
    block_tokens
        Prompt tokens per block. [tokens]
    share
        Share of the requests that have a prefix in common with an earlier request, 0 to 1.
    depth
        Mean share of such a prompt that is in common, 0 to 1. The share is uniformly distributed
        around it, as widely as the limits 0 and 1 allow.
    distance
        Median number of requests since that earlier one; exponentially distributed. [requests]

    Returns
    -------
    Prefixes
        The model.
    """
    reach = min(depth, 1 - depth)
    deep = np.clip((QUANTILE_MARKS - (1 - share)) / max(share, 1e-9), 0, 1)
    depths = np.where(1 - share < QUANTILE_MARKS, depth - reach + 2 * reach * deep, 0.0)
    far = -distance / np.log(2) * np.log(np.maximum(1 - QUANTILE_MARKS, 1e-3))
    return Prefixes(
        block_tokens,
        (),
        (Empirical(tuple(np.log1p(depths).tolist())),),
        Empirical(tuple(np.log1p(far).tolist())),
    )


def _or_zero(values: Floats | Integers) -> Floats:
    return np.asarray(values if len(values) else [0.0], dtype=float)


def _distances(requests: Requests, hits: Integers) -> Integers:
    """Distance from each request with hits to the last use of its deepest hit block. [requests]"""
    latest: dict[int, int] = {}
    found = []
    for row, (ids, depth) in enumerate(zip(requests.blocks(), hits.tolist(), strict=True)):
        if depth:
            found.append(row - latest[int(ids[depth - 1])])
        latest.update(dict.fromkeys(ids.tolist(), row))
    return np.array(found, dtype=np.int64)


def _chain(blocks: Integers, wanted: Integers, distance: Integers) -> tuple[Integers, Integers]:
    """Copy the first ``wanted`` blocks of each request from an earlier one, and add new ones."""
    start = np.concatenate([[0], np.cumsum(blocks)])
    ids = np.empty(start[-1], dtype=np.int64)
    fresh, longest = 0, 0
    rows = zip(blocks.tolist(), wanted.tolist(), distance.tolist(), strict=True)
    sizes = blocks.tolist()
    for row, (size, depth, back) in enumerate(rows):
        here = int(start[row])
        depth = min(depth, size)
        if depth and row:
            parent = _parent(sizes, row, max(row - back, 0), depth, longest)
            depth = min(depth, sizes[parent])
            there = int(start[parent])
            ids[here : here + depth] = ids[there : there + depth]
        else:
            depth = 0
        ids[here + depth : here + size] = np.arange(fresh, fresh + size - depth)
        fresh += size - depth
        longest = row if size > sizes[longest] else longest
    return ids, start


def _parent(sizes: list[int], row: int, near: int, depth: int, longest: int) -> int:
    """An earlier request of at least `depth` blocks, near the wanted one; else the longest."""
    for step in range(SEARCH_RADIUS):
        for one in (near - step, near + step):
            if 0 <= one < row and sizes[one] >= depth:
                return one
    return longest


MIN_FITTED = 200  # requests


@frozen
class TrafficModel:
    """A generative model of a trace.

    Attributes
    ----------
    arrivals
        Arrival process.
    rate
        Mean rate. [requests/s]
    lengths
        Joint distribution of lengths.
    prefixes
        Prefix reuse; None for none.
    """

    arrivals: Arrivals
    rate: float
    lengths: Lengths
    prefixes: Prefixes | None = None

    def draw(self, seed: int, requests: int | None, duration: float | None) -> Requests:
        """Draw a trace.

        Parameters
        ----------
        seed
            Seed of the random numbers; equal seeds give equal traces.
        requests
            Number of requests; None for as many as arrive in ``duration``.
        duration
            Length of the trace; None for as long as ``requests`` take. [s]

        Returns
        -------
        Requests
            The trace.
        """
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


def fit_traffic(requests: Requests) -> TrafficModel:
    """Fit a traffic model to a trace: arrivals, lengths and prefix reuse.

    Parameters
    ----------
    requests
        The trace.

    Returns
    -------
    TrafficModel
        The model, from which similar traces can be drawn.

    Raises
    ------
    InputError
        If the trace is so short that drawn traces would repeat its rows.
    """
    if len(requests) < MIN_FITTED:
        raise InputError(
            f"{len(requests)} requests; expected at least {MIN_FITTED} to fit a likeness that "
            "does not repeat them"
        )
    rate = (len(requests) - 1) / requests.duration if requests.duration else 1.0
    arrivals: Arrivals = Steady(cv=1.0)
    if requests.duration:
        since = requests.arrival - requests.arrival[0]
        arrivals = ResampledArrivals(times=tuple(since.tolist()))
    return TrafficModel(arrivals, rate, fit_lengths(requests), fit_prefixes(requests))


FROM_FILE = "empirical:"


class Setting(NamedTuple):
    """A number in an option's text: its default and its range.

    Attributes
    ----------
    default
        Value if the number is not given.
    least, most
        Smallest and largest value.
    """

    default: float
    least: float
    most: float


CV = Setting(1.0, 0.0, 100.0)
DURATIONS = (1e-3, 1e9)
SIGMA = Setting(0.8, 0.0, 5.0)
UNIT_RANGE = (0.0, 1.0)

ARRIVAL_SETTINGS: dict[str, tuple[type[Arrivals], dict[str, Setting]]] = {
    "poisson": (Steady, {}),
    "gamma": (Steady, {"cv": Setting(2.0, 0.0, 100.0)}),
    "onoff": (OnOff, {"on": Setting(10.0, *DURATIONS), "off": Setting(30.0, *DURATIONS), "cv": CV}),
    "diurnal": (
        Diurnal,
        {"amplitude": Setting(0.5, *UNIT_RANGE), "period": Setting(86400.0, *DURATIONS), "cv": CV},
    ),
}
LENGTH_SETTINGS: dict[str, dict[str, Setting]] = {
    "lognormal": {
        "prompt": Setting(1024.0, 1.0, LONGEST_REQUEST),
        "prompt_sigma": SIGMA,
        "generate": Setting(160.0, 1.0, LONGEST_REQUEST),
        "generate_sigma": SIGMA,
        "correlation": Setting(0.0, -1.0, 1.0),
    }
}
PREFIX_SETTINGS: dict[str, dict[str, Setting]] = {
    "reuse": {
        "share": Setting(0.7, *UNIT_RANGE),
        "depth": Setting(0.5, *UNIT_RANGE),
        "distance": Setting(20.0, 1.0, 1e6),
        "block": Setting(512.0, 1.0, 1e6),
    }
}


def parse_arrivals(text: str) -> Arrivals:
    """Parse an arrival process, such as ``poisson``, ``gamma:cv=2`` or ``onoff:on=10,off=30``.

    Parameters
    ----------
    text
        Name of the process, and its settings after a colon.

    Returns
    -------
    Arrivals
        The process.

    Raises
    ------
    InputError
        For an unknown process or setting, or a value out of range.
    """
    known = {name: settings for name, (_, settings) in ARRIVAL_SETTINGS.items()}
    name, values = _parse("arrivals", text, known)
    return ARRIVAL_SETTINGS[name][0](**values)


def parse_lengths(text: str) -> Lengths:
    """Parse a joint distribution of lengths.

    Parameters
    ----------
    text
        ``lognormal`` with medians and sigmas after a colon, or ``empirical:FILE`` for the lengths
        of a trace.

    Returns
    -------
    Lengths
        The distribution.

    Raises
    ------
    InputError
        For an unknown distribution or setting, a value out of range, or a file that is not a trace.
    """
    if text.startswith(FROM_FILE):
        from kvsim.traces.read import load

        return fit_lengths(load(text.removeprefix(FROM_FILE)).requests)
    _, values = _parse("lengths", text, LENGTH_SETTINGS, f"or {FROM_FILE}FILE")
    return Lengths(
        Lognormal(values["prompt"], values["prompt_sigma"]),
        Lognormal(values["generate"], values["generate_sigma"]),
        values["correlation"],
    )


def parse_prefixes(text: str) -> Prefixes:
    """Parse a model of prefix reuse.

    Parameters
    ----------
    text
        ``reuse`` with its settings after a colon, as ``reuse:share=0.7,depth=0.5``.

    Returns
    -------
    Prefixes
        The model.

    Raises
    ------
    InputError
        For an unknown setting, or a value out of range.
    """
    _, values = _parse("prefixes", text, PREFIX_SETTINGS)
    return reuse(int(values["block"]), values["share"], values["depth"], values["distance"])


def _parse(
    kind: str, text: str, known: dict[str, dict[str, Setting]], mend: str = ""
) -> tuple[str, dict[str, float]]:
    name, _, rest = text.partition(":")
    if name not in known:
        raise unknown(f"--{kind}", name, known, mend)
    values = {key: setting.default for key, setting in known[name].items()}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if key not in values:
            raise unknown(f"--{kind} {name} setting", key, values)
        setting = known[name][key]
        try:
            number = float(value) if value.isascii() and "_" not in value else float("nan")
        except ValueError:
            number = float("nan")
        if not (equals and setting.least <= number <= setting.most):
            expected = f"a number from {setting.least:g} to {setting.most:g}"
            raise InputError(f"--{kind} {text[:60]!r}: {key} is {value!r}; expected {expected}")
        values[key] = number
    return name, values


DEFAULT = parse_lengths("lognormal")
