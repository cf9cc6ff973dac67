"""The pieces of a plan's search, each by hand: neighbours, bounds, objectives, waves, estimates."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvsim.evidence.ledger import KnownError
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.planner import sensitivity
from kvsim.planner.alternatives import _in_time, find_waves
from kvsim.planner.fleet.demand import traffic_of
from kvsim.planner.fleet.offers import estimate_replicas
from kvsim.planner.question import GIB, Admission, PlanLimits, Question, Workload
from kvsim.planner.table import TableSearch
from kvsim.prediction.generate import Prediction
from kvsim.serving.costs import StepCosts
from kvsim.serving.rules import Rules
from kvsim.serving.simulate import simulate
from kvsim.techniques import parse
from kvsim.traces.requests import Requests


def deployment(gpu: str = "a6000", tp: int = 1) -> Deployment:
    return Deployment(load_model("llama2-7b"), load_hardware(gpu), load_stack("fused"), tp=tp)


# what is near a setting


@pytest.mark.parametrize(
    ("gamma", "beside"), [(1, [0, 2, 3]), (3, [1, 2, 4]), (4, [2, 3]), (0, [1, 2])]
)
def test_drafts_beside_those_of_a_setting(gamma: int, beside: list[int]) -> None:
    """None at all is a setting too; no more are drafted than rates by position are known for."""
    technique = parse("magicdec").with_rounds(gamma, 0.8)
    found = Admission(rate=0.8, seen_at=4).neighbours(technique, deployment(), 2000.0)
    assert [t.drafts for t in found] == beside


# bounds, limits and objectives


@pytest.mark.parametrize("tp", [1, 2])
def test_objectives_of_a_turn_are_those_of_its_prediction(tp: int) -> None:
    d, w = deployment(tp=tp), Workload(1000, 20)
    p = w.predict(parse("full"), d, np.array([8.0]))
    turn = float(p.request_s[0])

    def objective(name: str) -> float:
        q = SimpleNamespace(deployment=d, workload=w, objective=name)
        return Question.goal(cast(Question, q), turn, 8.0)

    assert objective("cost") == pytest.approx(float(p.usd_per_million()[0]), rel=1e-12)
    assert objective("throughput") == pytest.approx(-float(p.output_tok_s[0]) / tp, rel=1e-12)
    assert objective("latency") == turn


def test_nothing_may_be_lost_or_assumed_unless_the_user_says_so() -> None:
    limits = PlanLimits(40e9, 100e9)
    assert limits.finite() == {"gpu_memory": 40e9, "host_memory": 100e9, "loss": 0, "assumed": 0}
    assert limits.hard() == {"gpu_memory": 40e9, "host_memory": 100e9}


def test_two_requests_that_do_not_fit_together_run_one_after_the_other() -> None:
    """A cache on the host serves both at once, four times as slow as the GPU serves each."""
    d = deployment()
    w = Workload(4000, 40, batch=2)
    alone, both = (
        float(Prediction(parse("full"), d, np.array([n]), 4000, 40).gpu_bytes[0])
        for n in (1.0, 2.0)
    )
    limits = PlanLimits((alone + both) / 2, 128 * GIB)
    q = Question(d, w, "throughput", limits, Admission((parse("full"),)))
    choice = w.predict(parse("offload"), d, np.array([2.0]))
    found = find_waves(q, choice)
    assert found is not None
    assert (found.count, found.prediction.batch.tolist()) == (2, [1.0])
    assert found.prediction.technique.name == "full"
    each = float(found.prediction.request_s[0])
    assert found.output_tok_s == pytest.approx(2 * 40 / (2 * each))
    for other in (replace(w, batch=1), replace(w, batch=None)):
        assert find_waves(replace(q, workload=other), choice) is None


@pytest.mark.parametrize(
    ("choice", "limit", "safe"), [(2, 1.5, 1), (100, 41.0, 41), (9, 0.5, None)]
)
def test_the_safe_batch_is_looked_for_below_the_choice(
    choice: int, limit: float, safe: int | None
) -> None:
    """The first token takes a second per sequence; no batch is tried that has none."""

    def predict(t: Any, d: Any, batch: np.ndarray, contexts: int = 0) -> Any:
        assert batch.size and (batch >= 1).all() and (batch < choice).all()
        return SimpleNamespace(batch=batch, ttft_s=batch)

    asked = SimpleNamespace(
        workload=SimpleNamespace(batch=None, predict=predict),
        deployment=None,
        limits=SimpleNamespace(ttft=limit),
    )
    chosen = SimpleNamespace(
        technique=SimpleNamespace(tiles=lambda: 1), batch=np.array([float(choice)])
    )
    known = {"ttft": KnownError(None, "", 1.0, 1.0, True)}
    found = sensitivity._find_safer(cast(Question, asked), cast(Prediction, chosen), known)
    assert (found and found.batch.tolist()) == (safe and [safe])


def test_a_row_that_just_meets_its_limits_is_in_time() -> None:
    columns = {"tpot": np.array([0.1, 0.11]), "gpu_memory": np.array([40e9, 1.0])}
    hard = {"tpot": 0.1, "gpu_memory": 40e9}
    search = SimpleNamespace(
        table=SimpleNamespace(columns=columns),
        q=SimpleNamespace(limits=SimpleNamespace(hard=lambda: hard)),
    )
    assert [_in_time(cast(TableSearch, search), row) for row in (0, 1)] == [True, False]


# estimates of a trace


@pytest.mark.parametrize("technique", ["full", "kivi"])
def test_as_many_replicas_are_estimated_as_are_busy(technique: str) -> None:
    """The estimate reads prompts and decodes in turn; passes that do both take less time."""
    d = Deployment(load_model("llama3-8b"), load_hardware("a6000"), load_stack("fused"))
    rules = Rules(max_seqs=16, max_tokens=256)
    costs = StepCosts(parse(technique), d, rules, 2048, 1024)
    requests = Requests(np.arange(200) / 10, np.full(200, 600), np.full(200, 81))
    traffic = traffic_of(requests, 1)
    (needed,) = estimate_replicas(costs, traffic, np.inf)
    at_once = replace(requests, arrival=np.zeros(200))
    busy = simulate(at_once, costs, 1).progress.last.max() / requests.duration
    assert busy <= needed <= 1.5 * busy
    (stricter,) = estimate_replicas(costs, traffic, 0.05)
    (never,) = estimate_replicas(costs, traffic, 0.001)  # below a round of one sequence
    assert stricter >= needed and never == np.inf
