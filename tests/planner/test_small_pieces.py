"""Small decisions of plans, each where it turns: ranks, shares of memory, batches."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.planner import local_search, service, table
from kvsim.planner.alternatives import admitting_options
from kvsim.planner.local_search import BatchEvaluator, Trials
from kvsim.planner.plan import ChosenPlan
from kvsim.planner.question import (
    GIB,
    PlanLimits,
    Question,
    Workload,
    relative_gain,
    simplicity_rank,
)
from kvsim.planner.table import TableSearch
from kvsim.prediction.generate import Prediction
from kvsim.quality.evidence import Evidence
from kvsim.techniques import parse

D = Deployment(load_model("llama3-8b"), load_hardware("a6000"), load_stack("fused"))
ASKED = Question(D, Workload(1000, 100), "throughput", PlanLimits(0.9 * 48 * GIB, 100 * GIB))


def predicted(batch: int = 4, text: str = "full", d: Deployment = D) -> Prediction:
    return Prediction(parse(text), d, np.array([float(batch)]), 1000, 100)


@pytest.mark.parametrize(
    ("loss", "assumed", "evidence", "expected"),
    [
        (0.02, 0.0, Evidence("measured", 0.0201), ["--max-loss 0.03"]),
        (0.02, 0.0, Evidence("measured", 0.02), ["--max-loss 0.02"]),
        (0.05, 0.0, Evidence("measured", 0.02, 0.0, 0.05), ["--max-loss 0.05"]),
        (0.02, 1.0, Evidence("none", 0.02), ["--lossy", "--acceptance"]),
        (0.02, 0.0, Evidence("measured", 0.02, missing="longer"), ["--lossy"]),
        (0.01, 0.0, Evidence("measured", 0.01), []),
        (0.0, 1.0, Evidence("measured", 0.0), ["--acceptance"]),
    ],
)
def test_options_that_would_admit_a_row(
    loss: float, assumed: float, evidence: Evidence, expected: list[str]
) -> None:
    columns = {"loss": np.array([0.0, loss]), "assumed": np.array([0.0, assumed])}
    table = SimpleNamespace(columns=columns, evidence=[None, evidence])
    search = cast(TableSearch, SimpleNamespace(table=table))
    assert list(admitting_options(ASKED.with_limits(loss=0.01), search, 1)) == expected


def test_gains_of_objectives_that_are_small_or_negative_where_more_is_better() -> None:
    assert relative_gain(12.0, 10.0) == pytest.approx(0.2) and relative_gain(10.0, 12.0) == 0.0
    assert relative_gain(-10.0, -12.0) == pytest.approx(0.2) and relative_gain(-12.0, -10.0) == 0.0
    assert relative_gain(10.0, 10.0) == 0.0


def test_full_kv_is_simplest_and_losses_come_last() -> None:
    texts = ("full", "offload", "offload + selfdraft", "snapkv", "kivi + offload")
    assert [simplicity_rank(parse(text)) for text in texts] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 1),
        (1, 2),
    ]


def test_finer_batches_lie_between_a_row_and_its_neighbours() -> None:
    t = parse("offload:schedule=column,parts=2")
    options = table.evaluate(ASKED, t, np.array([2.0, 8.0, 20.0, 40.0]))
    found = table.batches_between(ASKED, options, 2)
    inside = [b for b in range(10, 40, 2) if b != 20]
    assert set(found.batch) <= set(inside) and len(found.batch) == len(set(found.batch)) >= 10
    assert {10.0, 18.0, 22.0, 38.0} <= set(found.batch)
    assert (found.batch % 2 == 0).all()
    first = table.batches_between(ASKED, options, 0)
    assert set(first.batch) == {4.0, 6.0}
    given = replace(ASKED, workload=replace(ASKED.workload, batch=8))
    assert not len(table.batches_between(given, options, 2))


def test_batches_grow_by_a_third_to_beyond_the_largest() -> None:
    t = parse("full")
    found = table.candidate_batches(ASKED, t, (40 * GIB, 45 * GIB))
    largest = [
        float(np.ravel(ASKED.workload.largest(t, D, g * GIB, 100 * GIB))[0]) for g in (40, 45)
    ]
    assert found[:6].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 7.0]  # ceil of 1.35 ** n
    assert set(largest) <= set(found) and max(found) > max(largest)
    assert (np.diff(found) > 0).all()
    grid = [b for b in found if b not in largest]
    assert all(b / a <= 2 for a, b in pairwise(grid))
    assert sum(b > max(largest) for b in found) <= 2
    given = replace(ASKED, workload=replace(ASKED.workload, batch=6))
    assert table.candidate_batches(given, t).tolist() == [6.0]
    parts = parse("offload:schedule=column,parts=4")
    assert table.candidate_batches(given, parts).size == 0


def test_measures_are_small_where_a_plan_is_good_and_per_gpu() -> None:
    d = replace(D, hardware=load_hardware("h100"), tp=2)
    p = predicted(d=d)
    found = table.measures(p)
    assert found["throughput"] == pytest.approx(-p.output_tok_s / 2)
    assert found["cost"] == pytest.approx(p.usd_per_million())
    assert (found["latency"], found["ttft"]) == (p.request_s, p.ttft_s)
    assert table.measures(replace(p, generate=1))["tpot"].tolist() == [0.0]


def test_jobs_take_full_batches_and_a_last_smaller_one() -> None:
    four, one = (float(predicted(batch).request_s[0]) for batch in (4, 1))
    found = ChosenPlan.hours_for(cast(Any, SimpleNamespace(choice=predicted(), question=ASKED)), 9)
    assert found == pytest.approx((2 * four + one) / 3600)


@pytest.mark.parametrize(
    ("objective", "value", "said"),
    [
        ("throughput", 1.25, "25 % more requests/s per GPU"),
        ("throughput", 0.75, "25 % fewer requests/s per GPU"),
        ("cost", 1.25, "costs 20 % less per request"),
        ("latency", 0.8, "requests take 25 % longer"),
    ],
)
def test_options_are_compared_in_a_clause(objective: str, value: float, said: str) -> None:
    asked = SimpleNamespace(objective=objective, total_gpus=0)
    choice, other = (
        SimpleNamespace(value=v, carried=SimpleNamespace(gpus=n)) for v, n in ((1, 1), (value, 2))
    )
    assert service.compare_options(*cast(Any, (asked, choice, other))) == said


def test_rows_of_a_table_are_within_every_limit() -> None:
    columns = {"ttft": np.array([1.0, 2.0, 1.0]), "gpu_memory": np.array([3.0, 3.0, 4.0])}
    search = cast(Any, SimpleNamespace(table=SimpleNamespace(columns=columns)))
    limits = {"ttft": 1.0, "gpu_memory": 3.5}
    assert [service._within(search, row, limits) for row in range(3)] == [True, False, False]


def test_placements_beyond_a_memory_have_no_goal(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = dict.fromkeys(("ttft", "tpot", "disk", "throughput"), np.zeros(3))
    memories = {"host_memory": np.array([100, 101, 9]), "gpu_memory": np.array([40, 40, 44])}
    monkeypatch.setattr(
        local_search, "measures", lambda _: plain | {k: v * GIB for k, v in memories.items()}
    )
    own = SimpleNamespace(q=ASKED, _predicted=lambda *_: True)
    trials = Trials(("full", 1), np.ones(3), np.zeros((3, 5)))
    goals, _ = BatchEvaluator._goals(cast(Any, own), trials)
    assert goals.tolist() == [0.0, np.inf, np.inf]


def test_the_least_on_the_disk_leaves_what_the_host_has_room_for() -> None:
    def predict(trials: Trials) -> Any:
        return SimpleNamespace(host_bytes=400 * GIB * (1 - trials.shares[:, local_search.DISK]))

    own = SimpleNamespace(q=ASKED, _predicted=predict)
    trials = Trials(("full", 1), np.ones(2), np.zeros((2, 5)))
    found = BatchEvaluator._spilled(cast(Any, own), trials)
    assert found.shares[:, local_search.DISK].tolist() == [0.75, 0.75]
