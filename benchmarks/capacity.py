"""The fleet programme and `kvsim capacity`, held against searches of all fleets and of neighbours.

    python -m benchmarks.capacity programme        # 200 random small instances, all fleets tried
    python -m benchmarks.capacity fleet TRACE [MODEL ...]

Asked of `programme`: equal. Of `fleet` (Azure's conversation trace, llama3-8b and llama3-70b,
candidates a6000, l40s, a100-80g, h100, TTFT p99 at most 2 s, TPOT p99 at most 100 ms): a fleet in
60 s of one core, its targets met when it plays the trace, and none of 50 neighbours (one replica
less, one of another kind, one more; then two steps away) cheaper and within the targets; each
cheaper one is simulated with three divisions of the classes.
"""

import sys
import time

import numpy as np

from kvsim.errors import InfeasibleError
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.planner.fleet.answer import CapacityAnswer, make_capacity
from kvsim.planner.fleet.demand import Counts, Demand, FleetTargets, traffic_of
from kvsim.planner.fleet.milp import solve_programme, utilisation
from kvsim.planner.fleet.offers import CapacityQuestion, FleetLimits, Rentable
from kvsim.planner.fleet.play import play
from kvsim.planner.question import Admission
from kvsim.serving.rules import Rules
from kvsim.traces.read import load
from tests.support.fleets import cheapest, instance

INSTANCES, MOST = 200, 7
GPUS = ("a6000", "l40s", "a100-80g", "h100")
MODELS = ("llama3-8b", "llama3-70b")
TARGETS = FleetTargets(2.0, 0.1, 0.99)
NEIGHBOURS = 50


def programme() -> None:
    differ = infeasible = 0
    for seed in range(INSTANCES):
        offers, demand, limits = instance(seed)
        try:
            found: float | None = solve_programme(offers, demand, limits).cost
        except InfeasibleError:
            found = None
        # every fleet that is no dearer, or if there is none every small one
        most = [MOST if found is None else int(found / rent + 1e-9) for rent in offers.rent]
        best = cheapest(offers, demand, limits, most)
        infeasible += best is None
        if (best is None) != (found is None) or (best and found and abs(found / best - 1) > 1e-6):
            differ += 1
            print(f"seed {seed}: {found} instead of {best}")
    print(f"programme: {INSTANCES} instances, {infeasible} without a fleet; {differ} differ (0)")


def fleet(trace: str, models: list[str]) -> None:
    requests = load(trace).requests
    for model in models or list(MODELS):
        rentable = [
            Rentable(d, gpu, (d.hardware.price or 0.0) * tp)
            for gpu in GPUS
            for tp in (1, 2, 4, 8)
            for d in [Deployment(load_model(model), load_hardware(gpu), load_stack("fused"), tp=tp)]
        ]
        question = CapacityQuestion(
            traffic=traffic_of(requests), rentable=rentable, admission=Admission(),
            targets=TARGETS, limits=FleetLimits(late=0.01), rules=Rules(),
        )  # fmt: skip
        began = time.process_time()
        answer = make_capacity(question)
        seconds = time.process_time() - began
        reached = answer.fleet.played.reached(TARGETS.share)
        names = [x.name for x in answer.market.configurations]
        said = ", ".join(f"{answer.fleet.replicas[j]} x {names[j]}" for j in answer.used)
        print(
            f"{model}: {said}, {answer.fleet.cost:.2f} USD/h; {seconds:.1f} s of process (60); "
            f"TTFT p99 {reached.ttft:.3f} s (2), TPOT p99 {1e3 * reached.tpot:.1f} ms (100); "
            f"relaxation {answer.found.bound:.2f} USD/h, gap to it "
            f"{answer.fleet.cost / answer.found.bound - 1:.1%}"
        )
        better, near, cheaper = neighbours(question, answer)
        print(
            f"{model}: {near} neighbours, {cheaper} cheaper and simulated with three divisions of "
            f"the classes, {len(better)} of them within the targets (0) {better}"
        )


def neighbours(question: CapacityQuestion, answer: CapacityAnswer) -> tuple[list[str], int, int]:
    """Near fleets that are cheaper and meet the targets, how many are near, and are cheaper."""
    offers, traffic = answer.found.offers, question.traffic
    replicas = answer.fleet.replicas
    cost = float(offers.rent @ replicas)
    near: dict[tuple[int, ...], float] = {}
    edge = [replicas]
    while len(near) < NEIGHBOURS and edge:  # one step away, then two, until there are enough
        edge = [other for some in edge for other in _one_step(some)]
        edge = [other for other in edge if tuple(other.tolist()) not in near]
        near |= {tuple(other.tolist()): float(offers.rent @ other) for other in edge}
    near.pop(tuple(replicas.tolist()), None)
    better = []
    chosen = list(near)[:NEIGHBOURS]  # the nearest; of them the cheaper ones are simulated
    cheaper = [counts for counts in chosen if near[counts] < cost - 1e-9]
    for counts in cheaper:
        some = np.array(counts)
        if any(
            play(
                traffic, answer.market.configurations, np.tile(some, (len(traffic.demand.rate), 1)),
                np.tile(share, (len(traffic.demand.rate), 1, 1)),
            ).meets(TARGETS)
            for share in divisions(answer, traffic.demand, some)
        ):  # fmt: skip
            better.append(str(counts))
    return better, len(chosen), len(cheaper)


def _one_step(replicas: Counts) -> list[Counts]:
    """Fleets with one replica less, one of another kind, or one more."""
    unit = np.eye(len(replicas), dtype=np.int64)
    rented = np.flatnonzero(replicas)
    less = [replicas - unit[j] for j in rented]
    other = [some + unit[j] for some in less for j in range(len(replicas))]
    more = [replicas + unit[j] for j in range(len(replicas))]
    return [some for some in (*less, *other, *more) if some.any()]


def divisions(answer: CapacityAnswer, demand: Demand, replicas: Counts) -> list[np.ndarray]:
    """Shares of the classes: the programme's, by capacity, and evenly by replica. (c, j)"""
    offers = answer.found.offers
    found, share = utilisation(offers, demand, replicas, 1.0)
    by_capacity = offers.capacity * replicas
    evenly = np.tile(replicas.astype(float), (offers.classes, 1))
    some = [by_capacity + 1e-12 * evenly, evenly] + ([share] if np.isfinite(found) else [])
    return [s / s.sum(axis=1, keepdims=True) for s in some if (s.sum(axis=1) > 0).all()]


def main() -> None:
    what = sys.argv[1] if len(sys.argv) > 1 else ""
    if what == "programme":
        programme()
    elif what == "fleet" and len(sys.argv) > 2:
        fleet(sys.argv[2], sys.argv[3:])
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
