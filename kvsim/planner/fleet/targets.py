"""What a fleet's requests must meet, all alike or by the length of their prompts."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvsim.frozen import frozen
from kvsim.graph import Array


@frozen
class ClassTarget:
    """Targets of prompts above a length, in place of those of all requests.

    Attributes
    ----------
    above
        Prompts of more tokens, up to the next class. [tokens]
    ttft, tpot
        Longest time to first token and per token; infinite where the user set nothing. [s]
    """

    above: int
    ttft: float = np.inf
    tpot: float = np.inf


@frozen
class FleetTargets:
    """What a share of all requests must meet, and of each class of prompts.

    Attributes
    ----------
    ttft, tpot
        Longest time to first token and per token; infinite where the user set nothing. [s]
    share
        Of the requests of each class, for each of the two alone.
    longer
        Classes of longer prompts with targets of their own, the shortest first.
    """

    ttft: float = np.inf
    tpot: float = np.inf
    share: float = 0.99
    longer: tuple[ClassTarget, ...] = ()

    @property
    def each(self) -> tuple[ClassTarget, ...]:
        """Every class, that of the shortest prompts first."""
        return (ClassTarget(0, self.ttft, self.tpot), *self.longer)

    @property
    def loosest(self) -> "FleetTargets":
        """The longest of each target, for all requests alike."""
        return FleetTargets(
            max(x.ttft for x in self.each), max(x.tpot for x in self.each), self.share
        )

    def of(self, prompt: NDArray[np.int64]) -> NDArray[np.int64]:
        """The class of each prompt length, as ``each`` counts them. (n,)"""
        bounds = np.array([x.above for x in self.longer], np.int64)
        return np.searchsorted(bounds, prompt, side="left")

    def of_each(self, prompt: NDArray[np.int64]) -> tuple[Array, Array]:
        """TTFT and TPOT that each request must be within. (n,) [s]"""
        mine = self.of(prompt)
        ttft = np.array([x.ttft for x in self.each])
        tpot = np.array([x.tpot for x in self.each])
        return ttft[mine], tpot[mine]

    def changed(self, to: Callable[[ClassTarget], ClassTarget]) -> "FleetTargets":
        """The same with other targets in each class."""
        first, *longer = map(to, self.each)
        return replace(self, ttft=first.ttft, tpot=first.tpot, longer=tuple(longer))

    def times(self, name: str, factor: float) -> "FleetTargets":
        """The same with TTFT or TPOT so many times as long."""
        return self.changed(lambda x: replace(x, **{name: factor * getattr(x, name)}))


def as_time(seconds: float) -> str:
    """A target or what is reached of it, in the unit that fits."""
    return f"{seconds:.4g} s" if seconds >= 1 else f"{1e3 * seconds:.4g} ms"
