"""The fleets of `kvsim capacity` against every cheaper fleet, played.

    python -m benchmarks.exhaustive [--count 30] [--seed 1]

Small tasks are drawn: a model, two cards, traffic and targets. Of every kind of replica, with every
pass budget and batch limit that the search knows, each number of replicas is played that costs less
than the answer, and of every two kinds each pair of numbers. Asked: nothing that keeps the targets
is more than 2 % cheaper, and nothing keeps them where the answer is that nothing does.
"""

import argparse
import contextlib
import io
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import numpy as np

from kvsim.api.fleets import build_question
from kvsim.api.traffic import read_traffic
from kvsim.options import Inputs
from kvsim.planner.fleet.offers import CapacityQuestion, Configuration
from kvsim.planner.fleet.play import Fleet
from kvsim.planner.fleet.search import LOWER_BATCH_LIMITS, FleetSolver

CARDS = {"llama3.1-8b": ("l40s", "h100"), "mistral-7b": ("a6000", "a100-80g"),
         "qwen2.5-14b": ("l40s", "h200")}  # fmt: skip
CLOSE = 1.02  # times the cheapest, which an answer may cost
MOST = 12  # replicas of a kind where the answer is that nothing keeps the targets
OVERLOADED = 0.5  # of the replicas that are always busy: so few are not played


def draw(random: np.random.Generator) -> dict[str, Any]:
    """The options of one task."""
    model = str(random.choice(list(CARDS)))
    drawn = {
        name: random.choice(some).item()
        for name, some in (("prompt", (300, 1000, 3000)), ("generate", (50, 200, 500)),
                           ("rate", (1, 3, 8)), ("ttft", ("300ms", "1s", "3s")),
                           ("tpot", ("30ms", "50ms", "100ms")))
    }  # fmt: skip
    more = {"gpus": ",".join(CARDS[model]), "tp": "1,2", "hours": 0.03, "only": "full"}
    return {"model": model, **drawn, **more}


def list_fleets(solver: FleetSolver, asked: CapacityQuestion, most: float) -> Iterator[Fleet]:
    """Every fleet of one kind or two below a cost [USD/h] that is not overloaded by far."""
    plain = [x for kind in solver.kinds for x in kind.choices]
    kinds: list[tuple[Configuration, Configuration]] = []
    for x in plain:
        limits = [n for n in LOWER_BATCH_LIMITS if n < x.costs.rules.max_seqs]
        kinds += ((x, y) for y in (x, *(solver.limit_batch(x, n) for n in limits)))
    need = {id(x): solver.busy(kind) for kind in solver.kinds for x in kind.choices}
    for plainest, x in kinds:
        for n in range(1, min(int(most / x.rent), MOST) + 1):
            if n >= OVERLOADED * need[id(plainest)]:
                yield solver.make_steady(asked, (x, n))
    for x, y in combinations(plain, 2):
        if x.name == y.name:
            continue
        for n, m in product(range(1, MOST + 1), repeat=2):
            carried = n / need[id(x)] + m / need[id(y)]
            if n * x.rent + m * y.rent <= most and carried >= OVERLOADED:
                yield solver.make_steady(asked, (x, n), (y, m))


def check(task: dict[str, Any]) -> tuple[float, float]:
    """Cost of the answer, and of the cheapest fleet that keeps the targets [USD/h]."""
    inputs = Inputs("capacity", task)
    asked = replace(build_question(inputs, read_traffic(inputs)), sure=0.0)
    solver = FleetSolver(asked, lambda _: None)
    answer = solver.solve(asked)
    cost = float("inf") if answer is None else answer.cost
    least = cost
    below = cost if answer is not None else MOST * min(x.rent for x in solver.kinds)
    for fleet in sorted(list_fleets(solver, asked, below), key=lambda x: x.cost):
        if fleet.cost >= least:
            break
        if solver.keeps(fleet, asked):
            least = fleet.cost
    return cost, least


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--count", type=int, default=30)
    options.add_argument("--seed", type=int, default=1)
    chosen = options.parse_args()
    random, dear, false_no = np.random.default_rng(chosen.seed), 0, 0
    for number in range(chosen.count):
        task = draw(random)
        with contextlib.redirect_stderr(io.StringIO()):
            cost, least = check(task)
        false_no += cost == float("inf") != least
        dear += cost != float("inf") and cost > CLOSE * least
        words = " ".join(f"{k}={v}" for k, v in task.items())
        print(f"{number + 1}: {cost:.3g} {least:.3g} {words}", flush=True)
    print(f"more than 2 % too dear: {dear}; false no: {false_no}; of {chosen.count} (asked: 0; 0)")


if __name__ == "__main__":
    main()
