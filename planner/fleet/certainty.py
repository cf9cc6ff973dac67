"""How likely a fleet meets its targets, given how far predictions of its software have been off.

All times of a stack are taken to be off by one factor, whose logarithm is normal with the spread
that was seen on rows the stack was not fitted to. A fleet meets its targets up to some slowdown;
the probability that the factor is below that is the answer. Whether the trace itself comes again is
another question, which half, one and a half and twice the load speak to.
"""

from dataclasses import dataclass
from math import inf, log, sqrt

from kvsim.evidence.ledger import WITHIN_80, KnownError, evidence_for, share_below
from kvsim.planner.fleet.configurations import Configuration
from kvsim.planner.fleet.play import Played
from kvsim.planner.fleet.proven import Proven
from kvsim.planner.fleet.search import FleetSearch
from kvsim.planner.fleet.targets import FleetTargets

SURE = 0.95
KINDS = ("decode", "prefill", "request")
SLOWEST, FASTEST = 4.0, 0.25
FINE = 1.01


@dataclass(frozen=True)
class Spread:
    """Standard deviation of the logarithm of measured over predicted times, and its source."""

    sigma: float
    source: str

    def below(self, factor: float) -> float:
        """Probability that times are off by less than a factor."""
        if factor in (0, inf):
            return 1.0 if factor else 0.0
        return share_below(factor, self.sigma)

    @property
    def slowdown(self) -> float:
        """The factor that times stay below with `SURE`."""
        low, high = 1.0, 100.0
        while high / low > 1 + 1e-9:
            middle = sqrt(low * high)
            low, high = (middle, high) if self.below(middle) < SURE else (low, middle)
        return high


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


@dataclass(frozen=True)
class Certainty:
    """How likely targets are met.

    Attributes
    ----------
    ttft, tpot
        Slowdown up to which each is met; infinite without a target.
    """

    spread: Spread
    ttft: float
    tpot: float

    @property
    def likely(self) -> dict[str, float]:
        """Probability of each target, and of both."""
        factors = {"ttft": self.ttft, "tpot": self.tpot, "both": min(self.ttft, self.tpot)}
        return {name: self.spread.below(factor) for name, factor in factors.items()}


def certainty(
    search: FleetSearch, fleet: Proven, targets: FleetTargets, spread: Spread
) -> Certainty:
    """Find the slowdown up to which a fleet meets each target."""

    def played(slowdown: float) -> Played:
        before, search.slowdown = search.slowdown, slowdown
        found = search.played(fleet.running, fleet.share)
        search.slowdown = before
        return found

    seen: dict[float, tuple[float, float]] = {}

    def most(which: int, name: str) -> float:
        if all(getattr(x, name) == inf for x in targets.each):
            return inf
        low, high = FASTEST, SLOWEST
        while high / low > FINE:
            middle = sqrt(low * high)
            if middle not in seen:
                seen[middle] = played(middle).over(targets)
            if seen[middle][which] <= 1:
                low = middle
            else:
                high = middle
        return low

    return Certainty(spread, most(0, "ttft"), most(1, "tpot"))
