"""How likely a fleet meets its targets, given how far predictions of its software have been off.

All times of a stack are taken to be off by one factor, whose logarithm is normal with the spread
that was seen on rows the stack was not fitted to. The fleet plays the trace with times so many
times as long, at slowdowns that stand for parts of that distribution; the likelihood is the share
of it at which the targets are met. More slowdown does not always mean longer waits, as bursts meet
by chance, so no single slowdown says where a fleet begins to miss. Whether the trace itself comes
again is another question, which half, one and a half and twice the load speak to.
"""

from collections.abc import Iterable, Iterator, Mapping
from math import exp, inf, log
from statistics import NormalDist

import numpy as np

from kvsim.evidence.ledger import WITHIN_80, KnownError, evidence_for
from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.planner.fleet.arrays import Counts
from kvsim.planner.fleet.configurations import Configuration
from kvsim.planner.fleet.dispatch import losses_of
from kvsim.planner.fleet.play import Played
from kvsim.planner.fleet.proven import Proven
from kvsim.planner.fleet.search import FleetSearch

SURE = 0.95
KINDS = ("decode", "prefill", "request")
FASTER, SLOWER = 5, 50  # equally likely slowdowns that are played on either side of 1
ROUNDING = 1e-9


@frozen
class Spread:
    """Standard deviation of the logarithm of measured over predicted times, and its source."""

    sigma: float
    source: str

    def slowdown(self, likely: float = SURE) -> float:
        """The factor that times stay below with a likelihood."""
        return exp(self.sigma * NormalDist().inv_cdf(likely))


def known(configurations: list[Configuration]) -> Spread:
    """The widest spread that the ledger of errors has for what some replicas run.

    Times to the first token and per token count where they were measured, else whole requests.
    """
    found = []
    for x in configurations:
        each = [evidence_for(x.costs.deployment, x.technique, kind) for kind in KINDS]
        measured = [e for e in each[:-1] if e.entry is not None] or each[-1:]
        found.append(max(measured, key=_width))
    widest = max(found, key=_width)
    return Spread(_width(widest) / WITHIN_80, widest.words)


def _width(error: KnownError) -> float:
    """How far the logarithm of an 80 % interval reaches to either side."""
    return max(log(error.high), -log(error.low))


@frozen
class Slowed:
    """A fleet with longer times.

    Attributes
    ----------
    slowdown
        Everything takes so many times as long as predicted.
    weight
        Share of the distribution of slowdowns that it stands for.
    ttft, tpot
        In parts of their targets, of whatever was asked that is worst off.
    held
        Sequences that one replica of each kind held at most, in the trace, with headroom on top,
        and after every loss.
    """

    slowdown: float
    weight: float
    ttft: float
    tpot: float
    held: Mapping[int, int]

    @property
    def both(self) -> float:
        """The worse of the two."""
        return max(self.ttft, self.tpot)


@frozen
class Certainty:
    """How likely what was asked is kept: the targets, with headroom and after every loss.

    Attributes
    ----------
    slowed
        The plays that say so, the slowest first.
    """

    spread: Spread
    slowed: tuple[Slowed, ...]

    @property
    def likely(self) -> dict[str, float]:
        """Probability of each target, and of both."""
        names = ("ttft", "tpot", "both")
        return {
            name: 1 - sum(x.weight for x in self.slowed if getattr(x, name) > 1) for name in names
        }

    @property
    def sure(self) -> bool:
        """Whether both targets are kept with `SURE`."""
        return self.likely["both"] >= SURE - ROUNDING

    def met_up_to(self, name: str) -> float:
        """The longest slowdown that was played below every one that missed; 1 is known to meet."""
        missed = min((x.slowdown for x in self.slowed if getattr(x, name) > 1), default=inf)
        return max(
            (x for x in (1.0, *(y.slowdown for y in self.slowed)) if x < missed), default=0.0
        )


def certainty(search: FleetSearch, fleet: Proven, spread: Spread) -> Certainty:
    """How likely a fleet keeps what was asked."""
    return Certainty(spread, tuple(slowed(search, fleet.running, fleet.share, spread)))


def surely(search: FleetSearch, running: Counts, share: Array, spread: Spread) -> bool:
    """Whether a fleet keeps what was asked with `SURE`, without playing more than that needs."""
    seen: tuple[Slowed, ...] = ()
    for one in slowed(search, running, share, spread):
        seen = (*seen, one)
        if not Certainty(spread, seen).sure:
            return False
    return True


def slowed(search: FleetSearch, running: Counts, share: Array, spread: Spread) -> Iterator[Slowed]:
    """A fleet at the slowdowns that stand for a spread, the slowest first."""
    upper = [1 - (i + 0.5) / (2 * SLOWER) for i in range(SLOWER)]
    lower = [0.5 - (i + 0.5) / (2 * FASTER) for i in range(FASTER)]
    before = search.slowdown
    for likely in (*upper, *lower):
        search.slowdown = slowdown = spread.slowdown(likely)
        plays = tuple(_demanded(search, running, share))
        search.slowdown = before
        over = [x.over(search.targets) for x in plays]
        yield Slowed(
            slowdown,
            weight=0.5 / (SLOWER if likely > 0.5 else FASTER),
            ttft=max(x[0] for x in over),
            tpot=max(x[1] for x in over),
            held=most_held(plays),
        )


def _demanded(search: FleetSearch, running: Counts, share: Array) -> Iterator[Played]:
    """What must meet the targets: the trace, with headroom on top, and after every loss."""
    yield search.played(running, share)
    if search.limits.headroom:
        yield search.played(running, share, 1 + search.limits.headroom)
    if search.limits.failures:
        for lost in losses_of(running.max(axis=0), search.limits.failures):
            yield search.after_loss(np.maximum(running - np.array(lost), 0))


def most_held(plays: Iterable[Played]) -> dict[int, int]:
    """Sequences that one replica of each kind held at most."""
    most: dict[int, int] = {}
    for g in (g for played in plays for g in played.groups):
        most[g.kind] = max(most.get(g.kind, 0), g.most_running)
    return most
