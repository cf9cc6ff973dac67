"""Small days of requests for two kinds of replica, and their cheapest schedule by trying all."""

from collections.abc import Iterator
from itertools import product

import numpy as np

from kvsim.graph import Array
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.planner.fleet.demand import Counts, Demand, FleetTargets, traffic_of
from kvsim.planner.fleet.offers import (
    CapacityQuestion,
    FleetLimits,
    Offers,
    Rentable,
    Schedule,
    Spread,
)
from kvsim.planner.fleet.play import play
from kvsim.planner.fleet.schedules import scheduled_cost
from kvsim.planner.fleet.search import CHEAPER, FleetSearch
from kvsim.planner.question import Admission
from kvsim.serving.rules import Rules
from kvsim.techniques import parse
from kvsim.traces.requests import Requests

GPUS = {"a6000": 4.0, "l40s": 7.0, "a100-80g": 12.0, "h100": 20.0}  # requests per second, roughly
MOST = 3  # replicas of a kind
HOPELESS = 3.0  # late requests of one window alone, of those allowed, beyond which no others help


def day(seed: int) -> CapacityQuestion:
    """Two to four windows of some minutes, and two GPUs that compete at prices of the day."""
    rng = np.random.default_rng(seed)
    windows, minutes = int(rng.integers(2, 5)), float(rng.uniform(0.5, 1.5))
    gpus = [str(g) for g in rng.choice(list(GPUS), 2, replace=False)]
    peak = rng.uniform(2.0, 4.5) * np.mean([GPUS[g] for g in gpus])
    rates = peak * np.append(rng.uniform(0.1, 0.9, windows - 1), 1.0)
    rng.shuffle(rates)
    width = 60.0 * minutes
    arrival = np.sort(np.concatenate([
        rng.uniform(w * width, (w + 1) * width, max(int(rate * width), 8))
        for w, rate in enumerate(rates)
    ]))  # fmt: skip
    arrival[0], arrival[-1] = 0.0, windows * width  # so that windows are where they are drawn
    longer = rng.normal(0, 0.4, windows)[np.minimum(arrival // width, windows - 1).astype(int)]
    prompt = np.clip(rng.lognormal(rng.uniform(5.5, 7.0) + longer, 0.9), 8, 7500)
    generate = np.clip(rng.lognormal(rng.uniform(3.5, 5.0), 0.6, arrival.size), 1, 800)
    requests = Requests(arrival, prompt.astype(np.int64), generate.astype(np.int64))
    targets = FleetTargets(
        float(rng.choice([0.3, 0.6, 1.5])), float(rng.choice([0.02, 0.03, 0.05, 0.1])),
        float(rng.choice([0.95, 0.99])),
    )  # fmt: skip
    rentable = []
    for gpu in gpus:
        d = Deployment(load_model("llama3-8b"), load_hardware(gpu), load_stack("vllm"))
        price = (d.hardware.price or 0.0) * float(rng.uniform(0.7, 1.4))
        committed = 0.6 * price if rng.random() < 0.25 else np.inf
        rentable.append(Rentable(d, gpu, price, committed))
    return CapacityQuestion(
        traffic=traffic_of(requests, windows),
        rentable=rentable,
        admission=Admission(techniques=(parse("full"),)),
        targets=targets,
        limits=FleetLimits(gpus_of=dict.fromkeys(gpus, MOST), late=1 - targets.share),
        rules=Rules(),
        spread=Spread(0.1, "given"),
        schedule=Schedule(float(rng.choice([0.0, 10.0, 60.0])) / 3600),
    )


def cheapest_schedule(
    search: FleetSearch, below: float = np.inf, most: int = MOST
) -> tuple[float, Counts] | None:
    """The cheapest schedule that meets the targets, and its price; None if none is below a price.

    A mix of replicas that makes far too many requests of its window late even where it begins idle
    is left out there.
    """
    assert search.schedule is not None
    windows, kinds = len(search.demand.rate), len(search.offers)
    every = [np.array(m) for m in product(range(most + 1), repeat=kinds) if any(m)]
    fit = [[m for m in every if _hopeful(search, w, m)] for w in range(windows)]
    found = []
    for mixes in product(*fit):
        running = np.array(mixes)
        cost = cheapest_cost(search.offers, search.demand, search.schedule, running)
        if cost < below * (1 - CHEAPER):
            found.append((cost, running))
    for cost, running in sorted(found, key=lambda x: x[0]):
        if any(search.keeps(running, share) is not None for share in divisions(search, running)):
            return cost, running
    return None


def cheapest_cost(offers: Offers, demand: Demand, schedule: Schedule, running: Counts) -> float:
    """What a schedule costs with as many of its replicas reserved as is cheapest. [USD/h]"""
    offered = np.isfinite(offers.reserved)
    kept = [range(int(n) + 1) if offered[j] else (0,) for j, n in enumerate(running.min(axis=0))]
    return min(
        scheduled_cost(offers, demand, schedule, running, np.array(some)) for some in product(*kept)
    )


def _hopeful(search: FleetSearch, window: int, mix: Counts) -> bool:
    alone = search.traffic.of_window(window)
    ttft, tpot = search.targets.of_each(alone.requests.prompt)
    allowed = (1 - search.targets.share) * len(search.traffic.requests)
    running = np.tile(mix, (len(search.demand.rate), 1))
    least = np.inf
    for share in divisions(search, running):
        mine = slice(window, window + 1)
        played = play(alone, search.configurations, running[mine], share[mine], search.load)
        late = (played.ttft > ttft).sum(), (played.tpot > tpot).sum()
        least = min(least, float(max(late)))
    return bool(least <= HOPELESS * max(allowed, 1.0))


def divisions(search: FleetSearch, running: Counts) -> Iterator[Array]:
    """Shares of the classes: the search's own, by capacity, and evenly by replica. (w, c, j)"""
    yield search.divided(running)
    if (np.count_nonzero(running, axis=1) > 1).any():
        offers = search.offers
        evenly = np.repeat(running[:, None, :].astype(float), offers.classes, axis=1)
        by_capacity = offers.capacity * running[:, None, :] + 1e-12 * evenly
        for some in (by_capacity, evenly):
            yield some / some.sum(axis=2, keepdims=True)
