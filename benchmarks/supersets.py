"""More cards to choose from never make a fleet dearer.

    python -m benchmarks.supersets [--count 200] [--seed 1]

Tasks are those of `benchmarks.exhaustive`. Each is answered with the first card alone, with the
second alone, and with both, each time by a search of its own at the prices of the seller that has
both: the usual seller may be another where one card is asked for. Asked: with both the fleet costs
no more than the cheaper of the other two, and is there wherever one of them is.
"""

import argparse
import contextlib
import io
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.exhaustive import draw
from kvsim.api.fleets import build_question, list_rentable
from kvsim.api.traffic import read_traffic
from kvsim.options import Inputs
from kvsim.planner.fleet.search import FleetSolver


def price(task: dict[str, Any]) -> dict[str, str]:
    """What one seller asks for each card of a task, as `--price` takes it by card."""
    rentable, _ = list_rentable(Inputs("capacity", task))
    return {x.gpu: f"{x.gpu}={x.price / x.deployment.gpus}" for x in rentable}


def cost_of(task: dict[str, Any], prices: dict[str, str]) -> float:
    """What the cheapest fleet of some cards costs; infinite where there is none. [USD/h]"""
    given = {"gpus": ",".join(prices), "price": ",".join(prices.values())}
    inputs = Inputs("capacity", task | given)
    question = replace(build_question(inputs, read_traffic(inputs)), sure=0.0)
    found = FleetSolver(question, lambda _: None).solve(question)
    return float("inf") if found is None else found.cost


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--count", type=int, default=200)
    options.add_argument("--seed", type=int, default=1)
    chosen = options.parse_args()
    random, dearer = np.random.default_rng(chosen.seed), 0
    for number in range(chosen.count):
        task = draw(random)
        with contextlib.redirect_stderr(io.StringIO()):
            prices = price(task)
            both = cost_of(task, prices)
            alone = min(cost_of(task, {gpu: said}) for gpu, said in prices.items())
        dearer += both > alone * (1 + 1e-9)
        words = " ".join(f"{k}={v}" for k, v in task.items())
        print(f"{number + 1}: {both:.3g} {alone:.3g} {words}", flush=True)
    print(f"dearer with more cards: {dearer} of {chosen.count} (asked: 0)")


if __name__ == "__main__":
    main()
