"""The pieces of a plan's search, each by hand: neighbours, bounds, objectives, waves, estimates."""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from kvsim.evidence.ledger import KnownError
from kvsim.graph import Array
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.planner import sensitivity
from kvsim.planner.alternatives import _in_time, find_waves
from kvsim.planner.fleet import offers
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


def test_the_safer_batch_is_the_largest_whose_intervals_are_within() -> None:
    """The upper end of the interval of the TTFT is 1.3 times the prediction."""
    d = Deployment(load_model("llama2-7b"), load_hardware("a6000"), load_stack("vllm"))
    limits = PlanLimits(40 * GIB, 64 * GIB, ttft=2.0)
    q = Question(d, Workload(2048, 128), "throughput", limits)
    known = {"ttft": KnownError(None, "", 0.8, 1.3, True)}
    choice = q.workload.predict(parse("full"), d, np.array([24.0]))
    found = sensitivity._find_safer(q, choice, known)
    assert found is not None
    batch = float(found.batch[0])
    late = q.workload.predict(parse("full"), d, np.array([batch + 1]))
    assert float(found.ttft_s[0]) * 1.3 <= 2.0 < float(late.ttft_s[0]) * 1.3
    assert sensitivity._find_safer(q.with_limits(ttft=0.05), choice, known) is None


def test_a_row_that_just_meets_its_limits_is_in_time() -> None:
    columns = {"tpot": np.array([0.1, 0.11]), "gpu_memory": np.array([40e9, 1.0])}
    hard = {"tpot": 0.1, "gpu_memory": 40e9}
    search = SimpleNamespace(
        table=SimpleNamespace(columns=columns),
        q=SimpleNamespace(limits=SimpleNamespace(hard=lambda: hard)),
    )
    assert [_in_time(cast(TableSearch, search), row) for row in (0, 1)] == [True, False]


# estimates of a trace


@pytest.mark.parametrize(
    ("max_seqs", "room", "host", "tpot", "most", "lap"),
    [
        (16, 1e12, 1e12, np.inf, 16, 80 / 16),
        (256, 820e6, 1e12, np.inf, 820 / 41, 80 * 41 / 820),
        (256, 1e12, 656e6, np.inf, 656 / 82, 80 * 82 / 656),
        (256, 1e12, 1e12, 0.1, 256, 0.49012 / (2 * 0.1 - 0.00744)),
    ],
    ids=["seats", "memory", "host", "TPOT"],
)
def test_replicas_of_one_class_by_hand(
    monkeypatch: pytest.MonkeyPatch,
    max_seqs: int,
    room: float,
    host: float,
    tpot: float,
    most: float,
    lap: float,
) -> None:
    """2 requests/s of 600 + 81 tokens, 2 tokens per round: 80 sequences in a lap of one second."""

    def seconds(
        _: object, batch: float = 0, context: Array | float = 0.0, **part: Array
    ) -> Array | float:
        if part:  # 256, 256 and 88 tokens: 0.07328 s together
            lasts = 0.005 * part["finished"] + 1e-6 * part["after"]
            return 1e-4 * part["tokens"] + 1e-5 * part["start"] + lasts
        return 0.01 + 0.002 * batch + 1e-5 * batch**2 + 1e-6 * batch * context

    monkeypatch.setattr(offers, "simple_pass_seconds", seconds)
    blocks = np.arange(65)
    costs = SimpleNamespace(
        tables=SimpleNamespace(
            gpu_bytes=1e6 * blocks, host_bytes=2e6 * blocks, prompt_bytes=1e6 * blocks,
            lanes=2, costs=SimpleNamespace(round=np.zeros((257, 1))),
        ),
        rules=Rules(max_seqs=max_seqs, max_tokens=512),
        capacity=room, room=SimpleNamespace(host_capacity=host), rate=2.0,
    )  # fmt: skip
    costs.with_density = lambda *_, **__: costs
    requests = Requests(np.linspace(0, 100, 200), np.full(200, 600), np.full(200, 81))
    (needed,) = estimate_replicas(cast(StepCosts, costs), traffic_of(requests, 1), tpot)
    each = 0.002 + 1e-5 * (most + 1) + 1e-6 * 640.5
    work = 2 * 0.07328 / 2 + 80 * each
    assert needed == pytest.approx((0.01 - 1e-5 * most) * lap + work, rel=1e-9)


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
