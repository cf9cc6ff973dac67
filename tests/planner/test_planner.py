"""The planner's choice is the best there is, within its limits, and says what holds it back."""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvsim.errors import InfeasibleError, InputError
from kvsim.evidence.ledger import UNKNOWN, known_difference
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.planner.alternatives import NoPlanError
from kvsim.planner.plan import ChosenPlan, make_plan
from kvsim.planner.question import (
    GIB,
    OBJECTIVES,
    Admission,
    PlanLimits,
    Question,
    Workload,
)
from kvsim.planner.sensitivity import (
    PRICE_STEP,
    with_faster_arithmetic,
    with_faster_links,
)
from kvsim.planner.table import (
    best_row,
    candidate_batches,
    measures,
    nearest_row,
    relax_limits,
    simplest_row,
    tabulate,
)
from kvsim.prediction.generate import Prediction
from kvsim.prediction.memory import MOST_SEQUENCES
from kvsim.report import plan as rows
from kvsim.techniques import candidates, parse
from kvsim.techniques.technique import Technique

NAMES = ("gpu_memory", "host_memory", "ttft", "tpot", "loss", "assumed")
SLACK = 1e-9  # relative


def instance(seed: int) -> tuple[NDArray[Any], dict[str, NDArray[Any]], dict[str, float]]:
    """A table with ties, odd values and scales from 1e-3 to 1e12, and limits some rows meet."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 201))

    def column() -> NDArray[Any]:
        values = rng.random(size) * 10.0 ** rng.integers(-3, 13)
        if rng.random() < 0.3:  # every magnitude in one column
            values = 10.0 ** rng.uniform(-3, 12, size)
        if rng.random() < 0.3:  # ties
            values = np.round(values, -int(np.log10(values.max())))
        values[rng.random(size) < 0.03] = rng.choice([np.nan, np.inf])
        return values

    objective = column() * rng.choice([-1.0, 1.0])
    columns = {name: column() for name in NAMES[:4]}
    columns |= {name: rng.integers(0, 2, size).astype(float) for name in NAMES[4:]}
    limits = {}
    for name in rng.permutation(NAMES)[: rng.integers(0, 7)]:
        values = columns[name][np.isfinite(columns[name])]
        if values.size:
            low = rng.random() < 0.1
            limits[str(name)] = float(values.min() / 2 if low else rng.choice(values))
    return objective, columns, limits


def brute(objective: NDArray[Any], columns: Mapping[str, Any], limits: Mapping[str, float]) -> int:
    """The first row with the smallest objective within the limits; -1 if there is none."""
    found = -1
    for i, value in enumerate(objective):
        inside = np.isfinite(value) and all(columns[k][i] <= v for k, v in limits.items())
        if inside and (found < 0 or value < objective[found]):
            found = i
    return found


@pytest.mark.parametrize("start", range(0, 200, 25))
def test_choice_is_that_of_brute_force(start: int) -> None:
    for seed in range(start, start + 25):
        objective, columns, limits = instance(seed)
        found = best_row(objective, columns, limits)
        assert (-1 if found is None else found) == brute(objective, columns, limits), seed


@pytest.mark.parametrize("seed", range(60))
def test_the_smallest_relaxation_of_one_limit_is_enough_and_needed(seed: int) -> None:
    objective, columns, limits = instance(seed)
    finite = {k: v for k, v in limits.items() if v > 0}
    columns = {k: np.where(np.isfinite(v), v, np.inf) for k, v in columns.items()}
    for name, value in relax_limits(columns, finite).items():
        if np.isfinite(value):
            zeros = np.zeros_like(objective)
            assert best_row(zeros, columns, finite | {name: value}) is not None
            assert (
                value == 0 or best_row(zeros, columns, finite | {name: value * (1 - 1e-6)}) is None
            )


def test_the_simplest_of_equals_wins() -> None:
    goal = np.array([-100.0, -98.0, -104.0, -90.0, -99.9])
    latency = np.array([1.0, 1.0, 9.0, 1.0, 0.5])
    groups, size = ["full", "a", "lossy", "b", "full"], np.array([8.0, 8, 64, 2, 7])
    ranks = [(0, 0), (0, 1), (1, 1), (0, 1), (0, 0)]
    rows = np.arange(5)

    def choice(errors: tuple[float, float], among: NDArray[Any] = rows) -> int:
        between, inside = errors
        return simplest_row(
            goal, latency, groups, ranks.__getitem__, size, among, lambda *_: between, inside
        )

    assert choice((0.0, 0.0)) == 2  # nothing is given up
    assert choice((0.05, 0.005)) == 4  # lossless, nothing moved, the smaller batch
    assert choice((0.05, 0.0)) == 0
    assert choice((0.05, 0.005), np.array([1, 2, 3])) == 2  # 6 % more than the error
    assert choice((0.07, 0.005), np.array([1, 2, 3])) == 1  # not clearly slower than b, and better


def test_a_trifle_does_not_buy_latency() -> None:
    goal, latency = np.array([-1.881, -1.869]), np.array([1700.0, 270.0])
    ranks = [(0, 1), (0, 1)]
    size = np.array([8.0, 1.0])
    two = np.arange(2)
    assert (
        simplest_row(
            goal, latency, ["x", "y"], ranks.__getitem__, size, two, lambda *_: 0.05, 0.005
        )
        == 1
    )


@pytest.mark.parametrize("start", range(0, 100, 25))
def test_nearest_has_the_least_excess(start: int) -> None:
    for seed in range(start, start + 25):
        _, columns, limits = instance(seed)
        limits = limits or {"tpot": 1e-3}
        size = range(len(columns["tpot"]))
        usable = [i for i in size if all(np.isfinite(columns[k][i]) for k in limits)]
        over = {k: [max(0.0, x - v) for x in columns[k].tolist()] for k, v in limits.items()}
        total = {i: sum(over[k][i] / (limits[k] or 1.0) for k in limits) for i in usable}
        with nullcontext() if usable else pytest.raises(InfeasibleError):
            row, missing = nearest_row(columns, limits)
            assert total[row] == pytest.approx(min(total.values()), rel=SLACK), seed
            found = {name: missing.pop(name, 0.0) for name in limits}
            assert found == pytest.approx({name: over[name][row] for name in limits}, abs=1e-12)
            assert not missing


def test_of_equals_the_first_is_taken() -> None:
    columns = {"tpot": np.array([0.3, 0.2, 0.2 - 1e-14])}
    assert nearest_row(columns, {"tpot": 0.1})[0] == 1
    assert best_row(columns["tpot"], columns, {}) == 1
    assert best_row(-columns["tpot"], columns, {"tpot": 0.25}) == 1
    among = [parse("offload"), parse("full")]
    plan = planned(deployment("llama3-8b", "h100"), among, "latency", Workload(8000, 1000))
    assert plan.choice.technique.name == "full"  # though some of the cache could move at no cost


# the whole plan

CHAT = Workload(1024, 64)
NONE: Mapping[str, float] = MappingProxyType({})
FAST = tuple(t for t in candidates() if t.name != "kvpr")  # whose balanced split is searched for
EXACT = 0.0  # error between techniques: nothing is given up for simplicity


@cache
def deployment(model: str, gpu: str, tp: int = 1, host: float = 128) -> Deployment:
    hardware = replace(load_hardware(gpu), host_memory=host * GIB)
    return Deployment(load_model(model), hardware, load_stack("fused"), tp=tp)


def planned(
    d: Deployment,
    among: Iterable[Technique] = (),
    objective: str = "throughput",
    w: Workload = CHAT,
    limits: Mapping[str, float] = NONE,
) -> ChosenPlan:
    memory = {"gpu_memory": d.hardware.gpu_memory, "host_memory": d.hardware.host_memory}
    admission = Admission(tuple(among) or FAST, unmeasured=limits.get("loss", 0) >= 1)
    return make_plan(d, w, objective, PlanLimits(**{**memory, **limits}), admission, EXACT)


def value(plan: ChosenPlan) -> float:
    return float(measures(plan.choice)[plan.objective][0])


def gained(before: ChosenPlan, after: ChosenPlan) -> float:
    return value(after) / value(before) - 1  # of throughput, which is negative in the table


MIXED = ["full", "offload", "kivi:bits=4", "specache", "zipcache", "h2o", "kvpr", "flexgen"]
CASES = [
    ("llama3-8b", "rtx4090", "throughput", {"loss": 1.0}),
    ("llama3-8b", "rtx4090", "throughput", {"loss": 1.0, "tpot": 0.027}),
    ("llama2-7b", "a6000", "cost", {"loss": 1.0, "tpot": 0.05, "ttft": 5.0}),
    ("llama2-7b", "a6000", "latency", {}),
    ("qwen2.5-7b", "t4", "throughput", {"loss": 1.0, "tpot": 0.2}),
]


@pytest.mark.parametrize(("model", "gpu", "objective", "limits"), CASES)
def test_choice_is_the_best_of_all_exact_replays(
    model: str, gpu: str, objective: str, limits: dict[str, float]
) -> None:
    d, w = deployment(model, gpu), Workload(512, 48)
    plan = planned(d, map(parse, MIXED), objective, w, limits)
    bounds = plan.limits.finite()
    exact: list[float] = []
    for t in {id(t): t for t in plan.table.technique}.values():
        same = [i for i, other in enumerate(plan.table.technique) if other is t]
        found = measures(Prediction(t, d, plan.table.batch[same], w.prompt, w.generate))
        found |= {k: plan.table.columns[k][same] for k in ("loss", "assumed")}
        inside = np.all([found[k] <= v * (1 + SLACK) for k, v in bounds.items()], axis=0)
        exact += found[objective][inside].tolist()
    assert value(plan) == pytest.approx(min(exact), rel=SLACK, abs=0)
    replay = measures(plan.choice)
    assert all(replay[k][0] <= bounds[k] * (1 + SLACK) for k in bounds.keys() & replay.keys())


def test_each_objective_is_best_at_its_own() -> None:
    d, offered = deployment("llama2-7b", "a6000"), [parse("full"), parse("flexgen")]
    plans = [planned(d, offered, name) for name in OBJECTIVES]
    for plan in plans:
        scores = [float(measures(other.choice)[plan.objective][0]) for other in plans]
        assert min(scores) == value(plan)
    assert plans[0].choice.batch[0] > plans[1].choice.batch[0] == 1


@pytest.mark.parametrize("model", ["llama3-8b", "qwen2.5-7b", "mistral-7b-v0.2"])
@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_nothing_is_recomputed_on_grouped_query_models(model: str, objective: str) -> None:
    plan = planned(deployment(model, "a6000"), [parse("kvpr")], objective)
    answer = rows.plan_fields(plan)
    assert answer["choice"]["params"]["split"] in (0, "auto")
    sharing = plan.choice.deployment.model.queries_per_kv
    (why,) = [note for note in answer["predicted"]["notes"] if note.startswith("split 0")]
    assert f"{sharing} query heads per KV head" in why and "no smaller than" in why


def test_something_is_recomputed_where_every_head_has_its_own_cache() -> None:
    d, w = deployment("llama2-7b", "a6000"), Workload(1024, 64, batch=32)
    plan = planned(d, [parse("kvpr")], w=w, limits={"gpu_memory": 18 * GIB})
    chosen = str(plan.choice.technique)
    assert "split=" in chosen and "split=0" not in chosen


LOOSER = {"loss": 1.0, "ttft": np.inf, "tpot": np.inf}


@pytest.mark.parametrize(
    "limits", [{"tpot": 0.04}, {"ttft": 1.5}, {"ttft": 1.5, "tpot": 0.045, "loss": 1.0}]
)
def test_limits_bind_where_relaxing_them_helps(limits: dict[str, float]) -> None:
    d = deployment("llama2-7b", "a6000")
    plan = planned(d, limits=limits)
    assert plan.binding and all(b.gain_without > 0 for b in plan.binding)
    for b in plan.binding:
        if b.limit in limits and b.limit != "loss":
            relaxed = planned(d, limits=limits | {b.limit: LOOSER[b.limit]})
            assert gained(plan, relaxed) == pytest.approx(b.gain_without, abs=0.01)


def test_prices_are_what_the_hardware_would_bring() -> None:
    d, some, ttft = deployment("llama2-7b", "a6000"), [parse("full"), parse("kivi:bits=4")], 6.0
    plan = planned(d, some, limits={"ttft": ttft})
    larger = planned(d, some, limits={"ttft": ttft, "gpu_memory": d.hardware.gpu_memory + GIB})
    host = {"ttft": ttft, "host_memory": d.hardware.host_memory + 16 * GIB}
    roomier = planned(d, some, limits=host)
    looser = planned(d, some, limits={"ttft": ttft * PRICE_STEP})
    links = [
        planned(with_faster_links(d, names), some, limits={"ttft": ttft})
        for names in (("h2d", "d2h"), ("dram",), ("hbm",))
    ]
    links.append(planned(with_faster_arithmetic(d), some, limits={"ttft": ttft}))
    expected = [gained(plan, other) for other in (larger, roomier, looser, *links)]
    got = list(plan.prices.values())
    assert min(got) >= 0 and max(got) > 0.01
    assert got == pytest.approx(expected, abs=0.01)


def test_a_given_batch_is_kept() -> None:
    plan = planned(deployment("llama2-7b", "a6000"), w=Workload(1024, 64, batch=12))
    assert set(plan.table.batch) == {12.0}
    assert {a.prediction.batch[0] for a in plan.alternatives} == {12.0}
    assert not any(t.name == "flexgen" for t in plan.table.technique)  # 8 parts


@pytest.mark.parametrize(("name", "asked"), [("tpot", 0.01), ("ttft", 0.02), ("gpu_memory", 2e9)])
def test_infeasible_says_what_would_do(name: str, asked: float) -> None:
    d = deployment("llama2-7b", "a6000")
    with pytest.raises(NoPlanError, match="no plan meets the limits") as caught:
        planned(d, [parse("full")], limits={name: asked})
    said = {"gpu_memory": "GPU memory"}.get(name, name.upper())
    assert f"{said} would have to be" in str(caught.value)
    wanted = caught.value.relaxations[name]
    assert planned(d, [parse("full")], limits={name: wanted * 1.001}).choice.batch[0] >= 1
    with pytest.raises(InfeasibleError):
        planned(d, [parse("full")], limits={name: wanted * 0.99})


def test_a_model_larger_than_the_gpu_is_streamed_or_says_what_is_missing() -> None:
    with pytest.raises(InfeasibleError, match=r"host memory would have to be 1\d\d GiB"):
        planned(deployment("llama2-70b", "rtx4090", host=64))
    plan = planned(deployment("llama2-70b", "rtx4090", host=256))
    assert plan.choice.fits.all() and plan.choice.technique.parts[0].placement.streams
    assert rows.plan_fields(plan)["baseline"] is None


def test_two_gpus_hold_what_one_does_not() -> None:
    one, two = (planned(deployment("llama2-13b", "rtx4090", tp, 400)) for tp in (1, 2))
    assert one.baseline is None and two.choice.technique.name == "full"
    assert value(two) < value(one)


def test_impossible_requests() -> None:
    with pytest.raises(InputError, match="expected one of throughput, latency, cost"):
        planned(deployment("llama2-7b", "a6000"), objective="speed")
    with pytest.raises(InputError, match="kcache-64g has no price"):
        planned(deployment("llama2-7b", "kcache-64g"), objective="cost")
    with pytest.raises(InfeasibleError, match="kcache cannot run here: keys and values"):
        planned(deployment("deepseek-v2-lite", "a6000"), [parse("kcache")])
    with pytest.raises(InfeasibleError, match="no lossless technique can run here; --lossy admits"):
        planned(deployment("llama2-7b", "a6000"), [parse("h2o")])


def test_batches_end_where_evaluation_does() -> None:
    d, short = deployment("smollm2-135m", "b200"), Workload(1, 1)
    limits = PlanLimits(d.hardware.gpu_memory, d.hardware.host_memory)
    for text in ("full", "flexgen"):
        tried = candidate_batches(Question(d, short, "throughput", limits), parse(text))
        assert 0 < tried[-1] <= MOST_SEQUENCES and (tried[-1] > MOST_SEQUENCES / 2)


def test_the_table_covers_the_batches_that_matter() -> None:
    d, w = deployment("llama2-7b", "a6000"), CHAT
    limits = PlanLimits(d.hardware.gpu_memory, d.hardware.host_memory)
    asked = Question(d, w, "throughput", limits)
    memories = limits.gpu_memory, limits.gpu_memory + GIB
    tried = candidate_batches(asked, parse("full"), memories)
    largest = Prediction(parse("full"), d, np.ones(1), w.prompt, w.generate).max_batch[0]
    assert tried[0] == 1 and largest in tried and tried[-1] > largest
    assert (np.diff(tried) > 0).all() and (tried == np.floor(tried)).all()
    assert (candidate_batches(asked, parse("flexgen"), memories) % 8 == 0).all()
    table = tabulate(asked)
    for name, column in (("batch", table.batch), *table.columns.items()):
        assert column.shape == (len(table.technique),)
        assert name == "loss" or np.isfinite(column).all()  # nothing is known of some losses


def test_heads_are_considered_where_they_exist() -> None:
    """No prediction module was published with Llama 2; DeepSeek-V3 comes with one."""
    llama = Deployment(load_model("llama2-7b"), load_hardware("a6000"), load_stack("fused"))
    deepseek = replace(llama, model=replace(llama.model, family="deepseek_v3"))
    rate = Admission(rate=0.9, seen_at=4)
    assert not rate.settings(parse("mtp"), llama, 1000, 100)
    assert rate.settings(parse("mtp"), deepseek, 1000, 100)
    assert not replace(rate, only=("mtp",)).settings(parse("mtp"), llama, 1000, 100)
    assert rate.settings(parse("magicdec"), llama, 1000, 100)


def test_a_technique_that_nobody_measured_must_gain_more_than_its_error() -> None:
    """Of the ledger's rows; two techniques that only move things share full KV's error."""
    d = Deployment(load_model("llama3.1-8b"), load_hardware("h100"), load_stack("vllm"))
    full, kivi, moved = parse("full"), parse("kivi"), parse("place:weights_host=0.5")
    alike = known_difference(d, parse("place:cpu_share=0.5"), moved)
    assert known_difference(d, full, kivi) > 2 * alike > 0
    assert known_difference(d, full, moved) >= UNKNOWN > alike  # no engine was measured with it
    assert known_difference(d, full, kivi) == known_difference(d, kivi, full)
    near = Question(d, CHAT, "throughput", PlanLimits(1.0, 1.0), error=0.01)
    assert near.between(full, kivi) == 0.01


def test_what_loses_most_is_no_rival() -> None:
    """StreamingLLM's published loss is above 80 %: no line advises it."""
    d = Deployment(load_model("llama3.1-8b"), load_hardware("h100"), load_stack("vllm"))
    limits = PlanLimits(0.9 * d.hardware.gpu_memory, d.hardware.host_memory, 2.0, 0.1)
    some = tuple(parse(t) for t in ("full", "magicdec", "streamingllm", "kivi", "kvpr"))
    w = Workload(8192, 256, service=True)
    plan = make_plan(d, w, "throughput", limits, Admission(some))
    names = [a.prediction.technique.name for a in plan.alternatives]
    assert "streamingllm" not in names and "kivi" in names
    assert all("streamingllm" not in b.technique for b in plan.binding)
    drafts = [a.prediction.technique for a in plan.alternatives if a.prediction.technique.drafts]
    assert all(t.drafts for t in drafts if t.name == "magicdec")
    assert plan.baseline is plan.choice if plan.choice.technique.name == "full" else True
