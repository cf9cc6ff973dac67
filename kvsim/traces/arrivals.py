"""Arrival processes: gamma gaps in a time that runs as fast as the load.

Every process is a cumulative load, the requests expected up to a time, piecewise linear, and gaps
drawn in expected requests: gamma with mean 1 and a coefficient of variation (1: Poisson). An
arrival is where the load reaches the sum of the gaps before it. Only the load differs:
constant, on and off, a day's sine, or one fitted to a trace.
"""

from abc import ABC, abstractmethod

import numpy as np

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.traces.requests import Floats

Random = np.random.Generator

STEPS = 1440  # steps that a day's sine is drawn in
MOST_REQUESTS = 100_000_000


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
        """Times from 0 to at least `duration` [s] and the cumulative load there, of mean rate 1."""

    def draw(
        self, random: Random, rate: float, requests: int | None, duration: float | None
    ) -> Floats:
        """Arrivals of mean rate `rate` [1/s], as many as given or for as long as given. [s]

        Raises
        ------
        InputError
            If that would be more requests than a trace may have.
        """
        span = duration if duration is not None else (requests or 0) / rate
        expected = span * rate
        if max(expected, requests or 0) > MOST_REQUESTS:
            raise InputError(
                f"{expected:.3g} requests; expected at most {MOST_REQUESTS:,}; lower the rate or "
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
        """Gaps between arrivals in expected requests, mean 1."""
        if self.cv == 0:
            return np.ones(count)
        return random.gamma(self.cv**-2, self.cv**2, count)


@frozen
class Steady(Arrivals):
    """Constant load: Poisson with cv 1, burstier above, more even below."""

    def load(self, random: Random, duration: float) -> tuple[Floats, Floats]:
        """Expected requests by time: a straight line."""
        ends = np.array([0.0, 10.0 * duration + 1.0])
        return ends, ends


@frozen
class OnOff(Arrivals):
    """Bursts: load only while on; both states last exponentially long.

    Attributes
    ----------
    on, off
        Mean lengths of the states. [s]
    """

    on: float = 10.0
    off: float = 30.0

    def load(self, random: Random, duration: float) -> tuple[Floats, Floats]:
        """Expected requests by time: ramps while on, plateaus while off."""
        cycles = int(1.2 * duration / (self.on + self.off)) + 20
        lengths = random.exponential([self.on, self.off], (cycles, 2))
        times = np.concatenate([[0.0], np.cumsum(lengths)])
        ramps = np.stack([lengths[:, 0], np.zeros(cycles)], axis=1)
        share = self.on / (self.on + self.off)
        return times, np.concatenate([[0.0], np.cumsum(ramps)]) / share


@frozen
class Diurnal(Arrivals):
    """A daily sine that starts at its trough: rate x (1 - amplitude x cos(2 pi t / period)).

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
        """The integral of the sine, in small steps."""
        days = int(np.ceil(2.0 * duration / self.period)) + 1
        times = np.linspace(0.0, days * self.period, days * STEPS + 1)
        angle = 2 * np.pi * times / self.period
        return times, times - self.amplitude * self.period / (2 * np.pi) * np.sin(angle)


@frozen
class RepeatedLoad(Arrivals):
    """A load fitted to a trace, repeated where it ends.

    Attributes
    ----------
    width
        Length of a step. [s]
    levels
        Load in each step, of mean 1.
    tick
        Grid that arrivals lie on, as logs with a coarse clock have it; 0 without one. [s]
    """

    width: float = 1.0
    levels: tuple[float, ...] = (1.0,)
    tick: float = 0.0

    def load(self, random: Random, duration: float) -> tuple[Floats, Floats]:
        """The steps, over and over."""
        repeats = int(np.ceil(1.5 * duration / (self.width * len(self.levels)))) + 1
        levels = np.tile(np.array(self.levels), repeats)
        times = self.width * np.arange(len(levels) + 1, dtype=np.float64)
        return times, np.concatenate([[0.0], np.cumsum(levels * self.width)])

    def draw(
        self, random: Random, rate: float, requests: int | None, duration: float | None
    ) -> Floats:
        """As any process, then put on the grid."""
        arrival = super().draw(random, rate, requests, duration)
        return np.floor(arrival / self.tick) * self.tick if self.tick else arrival
