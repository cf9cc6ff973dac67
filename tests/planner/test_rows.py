"""Rows of programmes by hand: at points of chance, against what the engine plays or a count."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import numpy as np
import pulp
import pytest

from kvsim import solver
from kvsim.graph import Array, Point
from kvsim.machines.deployment import Deployment
from kvsim.planner.costs import (
    RESOURCES,
    LayersOfPass,
    Option,
    Shares,
    layers_between,
    placement_options,
    placement_technique,
)
from kvsim.planner.fleet.milp import add_shares
from kvsim.planner.fleet.offers import FleetLimits
from kvsim.planner.milp import Programme, build_programme
from kvsim.planner.placement import TOUCH_INSIDE, Coefficients, tangent_at
from kvsim.planner.question import PlanLimits, Workload
from kvsim.prediction.memory import decode_point, prefill_point
from kvsim.techniques.axes.base import LayerPass
from kvsim.techniques.steps import tile_point
from tests.planner.test_fleet_programme import DEMAND, OFFERS
from tests.planner.test_programme import small
from tests.planner.test_runs import in_turn
from tests.support.mixes import decide_streaming

FREE = PlanLimits(1e18, 1e18)
PROMPT, ROUNDS, BATCH, LAYERS = 700, 3, 12.0, 2  # every round is a stretch of its own
Values = dict[str, float]


def excess(problem: pulp.LpProblem, values: Mapping[str, float], part: str) -> Values:
    """Of the rows with a part in their names: the left side less the right one, by the values."""
    found = {}
    for row in problem.toDict()["constraints"]:
        if (row["name"] or "").startswith(part):
            left = sum(x["value"] * values[x["name"]] for x in row["coefficients"])
            found[row["name"]] = left + row["constant"]
    assert found, part
    return found


# planes below costs


def played(d: Deployment, shares: Shares, parts: int) -> np.ndarray:
    """Seconds of one layer of every resource, in reading the prompts and in each round. (q, r)"""
    t, shape = placement_technique(shares, PROMPT, parts=parts), d.shard.layout[0][0][0]
    generate, batch = ROUNDS + 1, np.array([[BATCH]])
    points: list[Point] = [prefill_point(batch, PROMPT, generate)]
    points += [decode_point(batch, PROMPT, generate, float(i)) for i in range(ROUNDS)]
    layers = [LayerPass(d, tile_point(p, t.parts[0]), shape, t.parts[0]) for p in points]
    return np.array([LayersOfPass().resources(layer)[:, 0, 0] for layer in layers])


def planes_of(p: Programme, shares: Array, corners: Array) -> Values:
    """What each row of planes says that all layers take at some shares. [s]"""
    problem = build_programme(p, whole=False).problem
    points = np.vstack([corners.T, np.ones(len(corners))])
    weight = np.linalg.lstsq(points, np.append(shares, 1.0), rcond=None)[0]
    values = dict.fromkeys((v.name for v in problem.variables()), 0.0)
    values |= {f"y_{v}_0": LAYERS * float(x) for v, x in enumerate(weight)}
    passed = excess(problem, dict.fromkeys(values, 0.0) | {"T_round0": 1.0}, "chain_round0")
    head = excess(problem, dict.fromkeys(values, 0.0), "chain_round0")
    unit = 1 / (head["chain_round0"] - passed["chain_round0"])  # of time, as rows have it
    return {name: unit * x for name, x in excess(problem, values, "plane_").items()}


@pytest.mark.parametrize("kind", ["recomputed0", "shared0", "joined0", "joined1", "halved_joined0"])
def test_rows_of_planes_touch_what_the_engine_plays_and_are_below_it(kind: str) -> None:
    d = small("llama2-7b", LAYERS, "a6000")
    option: Option = next(o for o in placement_options(d, halves=True) if o.name == kind)
    c = Coefficients(d, Workload(PROMPT, ROUNDS + 1, int(BATCH)), np.array([BATCH]), [option])
    p = c.programme(0, FREE, frozenset({option.kind}))
    random = np.random.default_rng(3)
    corners = np.array([[*vars(x).values()] for x in option.corners])
    points = random.dirichlet(np.ones(len(corners)), 4) @ corners
    points[:, 1] = np.floor(points[:, 1] * PROMPT) / PROMPT
    more = tuple(tangent_at(c, p, 0, 0, Shares(*x.tolist())) for x in points)
    p = replace(p, tangents=more)
    rows = 0
    for i, at in enumerate(points):
        inside = Shares(*at.tolist()).towards(option.middle, TOUCH_INSIDE)
        middle = np.array([inside.host, np.floor(inside.split * PROMPT) / PROMPT, inside.cpu])
        here = played(d, Shares(*middle.tolist()), option.parts) * LAYERS
        for name, seconds in planes_of(p, middle, corners).items():
            _, r, q, *_ = name.split("_")
            true = here[c.phases.index(q), RESOURCES.index(r)]
            assert seconds <= true * (1 + 1e-9), (name, at)
            if name.endswith(f"_0_{i}"):  # the plane of this point
                rows += 1
                assert seconds == pytest.approx(true, rel=1e-4), (name, at)
    assert rows > 3


# what is decided


@pytest.mark.parametrize("share", [0.25, 0.6, 1.0])
def test_decided_weights_take_as_long_as_the_engine_copies_them(share: float) -> None:
    """One sequence: copies of weights are nearly all that a token waits for."""
    d = small("llama2-7b", 6, "a6000")
    w = Workload(64, 8, 1)
    c = Coefficients(d, w, np.array([1.0]), placement_options(d, halves=False)[:1])
    p = c.programme(0, FREE, frozenset({"full"}))
    counts, streamed = p.layers[None].astype(float), share * p.layers[None]
    built = build_programme(p, counts=counts)
    decide_streaming(built, streamed)
    (name,) = excess(built.problem, dict.fromkeys(names(built.problem), 0.0), "w_full_0_decided")
    for other in (0.0, 0.5 * share, share, 1.0):
        values = dict.fromkeys(names(built.problem), 0.0) | {"w_full_0": 6 * other}
        assert excess(built.problem, values, name)[name] == pytest.approx(6 * (other - share))
    solver.solve(built.problem, 1e-9, 20.0)
    bound = float(p.weight[1:] @ [t.value() for t in built.t[1:]])
    replayed = w.predict(placement_technique(Shares(), w.prompt, share), d, c.batches)
    assert 0.9 < bound / float(replayed.decode_s[0]) <= 1 + 1e-11


def names(problem: pulp.LpProblem) -> list[str]:
    return [v.name for v in problem.variables()]


# layers in turn


def test_between_runs_of_a_shape_are_as_many_layers_of_others() -> None:
    """Six layers, ``aabaab``, in every way on the CPU and on the GPU: runs are counted."""
    order, problem = "aab" * 2, build_programme(in_turn()).problem
    assert layers_between(order).tolist() == [0, 2]
    tight: set[str] = set()
    for cpu in product((False, True), repeat=len(order)):
        values = dict.fromkeys(names(problem), 0.0)
        for k, shape in enumerate("ab"):
            mine = [x for x, s in zip(cpu, order, strict=True) if s == shape]
            values |= {f"n_cpu_{k}": float(sum(mine)), f"n_full_{k}": float(len(mine) - sum(mine))}
        for i, shape in enumerate(order):  # of a generation: the last layer is before the first
            if cpu[i] and not cpu[i - 1]:
                values[f"first_{'ab'.index(shape)}_0"] += 1
            if cpu[i - 1] and not cpu[i]:
                values[f"behind_{'ab'.index(shape)}_0"] += 1
        for name in ("first_1_others", "behind_1_others"):
            if all(cpu) or not any(cpu):
                continue
            (over,) = excess(problem, values, name).values()
            assert over <= 1e-12, (cpu, name)
            tight |= {name} if over == 0 else set()
    assert tight == {"first_1_others", "behind_1_others"}


# who serves in a fleet


def test_rows_of_who_serves_are_the_load_of_the_busiest() -> None:
    """Random shares of two classes on two kinds of replica, of which the first serves one class."""
    replicas, random = np.array([1, 2]), np.random.default_rng(0)
    problem = pulp.LpProblem("dispatch", pulp.LpMinimize)
    busiest = problem.add_variable("busiest", lowBound=0)
    room = [int(n) * busiest for n in replicas]
    limits = FleetLimits(headroom=0.25, late=1e-3)
    add_shares(problem, "0", OFFERS, limits, DEMAND.peaks, DEMAND.mean, room)
    for _ in range(20):
        part = float(random.random())
        share = np.array([[part, 1 - part], [0.0, 1.0]])
        each = np.where(OFFERS.capacity > 0, share / np.maximum(OFFERS.capacity, 1e-9), 0.0)
        load = 1.25 * (DEMAND.peaks[:, :, None] * each).sum(axis=1) / replicas  # (p, j)
        late = (DEMAND.mean[:, None] * share * OFFERS.late).sum() / DEMAND.mean.sum()
        values = {"busiest": float(load.max()), "share_0_0_0": part, "share_0_0_1": 1 - part}
        values |= {"share_0_1_1": 1.0}
        assert max(excess(problem, values, "capacity_").values()) == pytest.approx(0.0, abs=1e-12)
        assert max(np.abs([*excess(problem, values, "served_").values()])) < 1e-12
        (over,) = excess(problem, values, "late_0").values()
        assert over == pytest.approx(late - limits.late)
