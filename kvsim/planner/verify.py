"""A choice for a trace, simulated."""

import numpy as np

from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.planner.carry import ATTAINED, Carried, ReplicaTargets
from kvsim.planner.choose import nearest
from kvsim.planner.classes import Classes
from kvsim.planner.load import Loads
from kvsim.serving.costs import StepCosts
from kvsim.serving.lanes import Lane, simulate_lanes
from kvsim.serving.outcome import QUANTILES, Outcome, Targets
from kvsim.serving.simulate import simulate
from kvsim.techniques.technique import Technique
from kvsim.traces.requests import Requests

SEARCHED = 6  # batches tried where the TPOT target asks for a smaller one


@frozen
class Simulated:
    """Techniques on a replica, and what simulating the trace says of them."""

    lanes: tuple[StepCosts, ...]
    lane_of_class: tuple[int, ...]
    estimate: Carried
    outcome: Outcome

    @property
    def techniques(self) -> tuple[Technique, ...]:
        """The technique of each lane."""
        return tuple(costs.technique for costs in self.lanes)

    @property
    def exact(self) -> bool:
        """Whether all lanes give the tokens of full-precision KV."""
        return all(t.exact for t in self.techniques)

    @property
    def max_seqs(self) -> int:
        """Sequences in a batch at most, for the engine's settings."""
        costs = self.lanes[0]
        return -(-costs.rules.max_seqs // costs.deployment.dp)  # every rank is told its own

    def measures(self) -> dict[str, float]:
        """What limits and objectives are about, all to be small; infinite where there is none."""
        o = self.outcome
        hung_up = o.aborted & np.isnan(o.ttft_s)  # without a token
        good = float(o.good.sum())
        latency = o.latency_s[o.finished]
        usd = o.usd
        tokens = float(o.run.requests.generate[o.good].sum())
        return {
            "throughput": o.duration_s / good if good else np.inf,
            "latency": float(latency.mean()) if latency.size else np.inf,
            "cost": usd / tokens * 1e6 if usd is not None and tokens else np.inf,
            "ttft": quantile(np.where(hung_up, np.inf, o.ttft_s)[o.finished | hung_up]),
            "tpot": quantile(o.tpot_s[o.finished]),
            "refused": float(o.refused.sum()),
        }


def measured(done: list[Simulated]) -> dict[str, Array]:
    """What each of several measures, by name."""
    every = [s.measures() for s in done]
    return {name: np.array([m[name] for m in every]) for name in every[0]}


def quantile(values: np.ndarray) -> float:
    """What ``ATTAINED`` of the values are within; 0 if there are none."""
    known = values[~np.isnan(values)]
    if not known.size:
        return 0.0
    if not np.isfinite(known).all():  # between a number and infinity lies no number
        return float(np.quantile(known, QUANTILES[ATTAINED], method="higher"))
    return float(np.quantile(known, QUANTILES[ATTAINED]))


def simulated(
    requests: Requests,
    options: list[StepCosts],
    loads: Loads,
    classes: Classes,
    carried: Carried,
    targets: ReplicaTargets,
) -> Simulated:
    """Play the trace with what the programme chose.

    Where a token takes longer than its target, the batch is made smaller until it does not: the
    programme knows means, a trace has bursts. If requests then wait too long for their first token,
    the batch stays as it was where that comes nearer to both targets.
    """

    def play(max_seqs: int) -> Simulated:
        return _play(requests, options, loads, classes, carried, targets, max_seqs)

    found = play(targets.max_seqs)
    if not found.measures()["tpot"] > targets.tpot:
        return found
    low, high = 1, int(min(targets.max_seqs, np.ceil(_peak(found))))
    best = found
    for _ in range(SEARCHED):
        middle = round(np.sqrt(low * high))
        if middle in (low, high) and middle != 1:
            break
        tried = play(middle)
        if tried.measures()["tpot"] <= targets.tpot:
            low, best = middle, tried
        else:
            high = middle
            best = tried if best is found else best
        if high <= low + 1:
            break
    both = [best, found]
    return both[nearest(measured(both), targets.times)[0]]


def _peak(found: Simulated) -> float:
    """Largest mean batch of any stretch of the timeline."""
    bins = found.outcome.run.bins
    busy, running = bins.seconds[0], bins.running[0]
    return float(np.max(running[busy > 0] / busy[busy > 0], initial=2.0)) + 1


def _play(
    requests: Requests,
    options: list[StepCosts],
    loads: Loads,
    classes: Classes,
    carried: Carried,
    targets: ReplicaTargets,
    max_seqs: int,
) -> Simulated:
    used = carried.options
    lane_of_class = tuple(used.index(o) for o in carried.option_of)
    lanes = [
        Lane(options[o].with_fewer(max_seqs), share)
        for o, share in zip(used, _shares(loads, carried), strict=True)
    ]
    if requests.depends and len(lanes) == 1:
        run = simulate(requests, lanes[0].costs)
    else:
        run = simulate_lanes(requests.alone(), lanes, np.array(lane_of_class)[classes.of])
    outcome = Outcome(run, Targets(targets.ttft, targets.tpot))
    return Simulated(tuple(lane.costs for lane in lanes), lane_of_class, carried, outcome)


def _shares(loads: Loads, carried: Carried) -> list[float]:
    """Memory of each lane: its longest request, and of the rest what its sequences need."""
    used = carried.options
    if len(used) == 1:
        return [1.0]
    needs = np.array([
        sum(float(loads.gpu[c, o]) for c, o in enumerate(carried.option_of) if o == lane)
        for lane in used
    ])  # fmt: skip
    first = np.array([float(loads.longest[o] / loads.room[o]) for o in used])
    left = max(1.0 - float(first.sum()), 0.0)
    return [float(s) for s in first + left * needs / max(float(needs.sum()), 1e-300)]
