"""Small questions about fleets, and their answer by playing every fleet."""

from dataclasses import replace
from functools import cache
from itertools import combinations

import numpy as np

from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.planner.fleet.demand import FleetTargets, traffic_of
from kvsim.planner.fleet.offers import CapacityQuestion, FleetLimits, Rentable
from kvsim.planner.fleet.play import Fleet
from kvsim.planner.fleet.search import FleetSolver
from kvsim.planner.question import Admission
from kvsim.serving.rules import Rules
from kvsim.traces.read import load
from kvsim.traces.requests import Requests

GPUS = ("l4", "rtx4090", "a6000", "l40s", "a100-80g", "h100")
MODELS = ("llama3.1-8b", "mistral-7b-v0.2", "qwen2.5-14b")
MOST = 10  # replicas of a kind that are tried


@cache
def deployment(model: str, gpu: str, tp: int) -> Deployment:
    """Some replica."""
    return Deployment(load_model(model), load_hardware(gpu), load_stack("vllm"), "fp16", tp)


def rentable(model: str, gpus: tuple[str, ...], tps: tuple[int, ...] = (1, 2)) -> list[Rentable]:
    """Every one of some cards with some degrees of parallelism, at the prices of the profiles."""
    found = []
    for gpu in gpus:
        for tp in tps:
            d = deployment(model, gpu, tp)
            found.append(Rentable(d, gpu, (d.hardware.price or 1.0) * tp))
    return found


def question(seed: int, gpus: tuple[str, ...] = ()) -> CapacityQuestion:
    """A question of chance: some traffic, a model, cards, targets and limits."""
    random = np.random.default_rng(seed)
    some = load(f"sample:{random.choice(['chat', 'code', 'conversation'])}").requests
    first = int(random.integers(0, 200))
    requests = _plain(some[first : first + int(random.integers(80, 200))])
    requests = requests.scaled(float(np.exp(random.uniform(-0.7, 1.8))))
    model = str(random.choice(MODELS))
    chosen = tuple(random.choice(GPUS, int(random.integers(1, 4)), replace=False).tolist())
    targets = FleetTargets(
        float(random.choice([1.0, 2.0, 4.0])), float(random.choice([0.03, 0.05, 0.1])), 0.95
    )
    limits = FleetLimits(failures=int(random.random() < 0.15))
    return CapacityQuestion(
        traffic_of(requests, 1, targets),
        rentable(model, gpus or chosen, (1,) if gpus else (1, 2)),
        Admission(), targets, limits, Rules(), sure=0.0,
    )  # fmt: skip


def _plain(requests: Requests) -> Requests:
    arrival = requests.arrival - requests.arrival[0]
    return replace(requests, arrival=arrival, block_ids=None, block_start=None, block_tokens=0)


def cheapest_by_play(solver: FleetSolver, asked: CapacityQuestion) -> Fleet | None:
    """The cheapest fleet of all: every kind, budget and count, and every pair with some counts."""
    fleets = [
        solver.make_steady(asked, (x, n))
        for kind in solver.kinds
        for x in kind.choices
        for n in range(1, MOST + 1)
    ]
    for one, other in combinations([k.choices[0] for k in solver.kinds], 2):
        fleets += [
            solver.make_steady(asked, (one, n), (other, m))
            for n in range(1, 5)
            for m in range(1, 5)
        ]
    for fleet in sorted(fleets, key=lambda x: x.cost):
        if solver.keeps(fleet, asked):
            return fleet
    return None
