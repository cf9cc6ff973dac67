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
from kvsim.planner import sensitivity, trace
from kvsim.planner.alternatives import _in_time, find_waves
from kvsim.planner.arrangements import Arrangement, Use, level_shares, shift_layers
from kvsim.planner.costs import ALONE, Shares, placement_options
from kvsim.planner.milp import Programme, Streaming
from kvsim.planner.placement import lower_limits
from kvsim.planner.question import GIB, Admission, PlanLimits, Question, Workload
from kvsim.planner.replica import (
    NODES_PER_OCTAVE,
    Classes,
    Loads,
    ReplicaCapacity,
    ReplicaTargets,
    _prompt_seconds,
    group_requests,
    load_coefficients,
)
from kvsim.planner.table import TableSearch
from kvsim.prediction.generate import Prediction
from kvsim.serving.costs import StepCosts, simple_pass_seconds
from kvsim.serving.rules import Rules
from kvsim.techniques import parse
from kvsim.traces.requests import Requests
from tests.support.mixes import lower_bound


def deployment(gpu: str = "a6000", tp: int = 1) -> Deployment:
    return Deployment(load_model("llama2-7b"), load_hardware(gpu), load_stack("fused"), tp=tp)


# what is near a setting


@pytest.mark.parametrize(
    ("gamma", "beside"), [(1, [0, 2, 3]), (3, [1, 2, 4, 5]), (16, [14, 15]), (0, [1, 2])]
)
def test_drafts_beside_those_of_a_setting(gamma: int, beside: list[int]) -> None:
    """None at all is a setting too; no more are drafted than rates by position are known for."""
    technique = parse("magicdec").with_rounds(gamma, 0.8)
    found = Admission(rate=0.8, seen_at=4).neighbours(technique, deployment(), 2000.0)
    assert [t.drafts for t in found] == beside


COPIED = Use(Shares(host=0.5), 1, 12)
KEPT = Use(Shares(), 1, 20)


def layers_of(a: Arrangement) -> list[list[int]]:
    return [[use.layers for use in uses] for uses in a.uses]


def test_layers_move_between_uses_until_one_is_left() -> None:
    """Eight at first, then two, then one; a use keeps its last layer, and other shapes theirs."""
    other = (Use(Shares(host=1.0), 1, 7),)
    for count in (8, 2, 1):
        found = [layers_of(a) for a in shift_layers(Arrangement(((COPIED, KEPT), other)), count)]
        assert found == [[[12 - count, 20 + count], [7]], [[12 + count, 20 - count], [7]]]
    few = (replace(COPIED, layers=2), KEPT)
    found = [layers_of(a) for a in shift_layers(Arrangement((few,)), 8)]
    assert found == [[[1, 21]], [[10, 12]]]
    last = (replace(COPIED, layers=1), KEPT)
    assert [layers_of(a) for a in shift_layers(Arrangement((last,)), 1)] == [[[2, 19]]]


def test_uses_that_copy_are_levelled_to_their_mean() -> None:
    uses = (COPIED, Use(Shares(host=1.0, split=0.25), 1, 4, streamed=0.5), Use(Shares(), 2, 3))
    found = level_shares(Arrangement((uses, (KEPT,))))
    assert found is not None
    level, left = found.uses[0]
    assert (level.layers, level.parts) == (16, 1)
    assert level.shares.host == pytest.approx((12 * 0.5 + 4 * 1.0) / 16)
    assert level.shares.split == pytest.approx(4 * 0.25 / 16)
    assert level.streamed == pytest.approx(4 * 0.5 / 16)
    assert left == uses[2] and found.uses[1] == (KEPT,)
    assert level_shares(Arrangement(((COPIED,), (KEPT,)))) is None


# bounds, limits and objectives


def test_streamed_weights_add_to_a_bound() -> None:
    """One corner of two layers; two layers' worth of weights come through the second resource."""
    seconds = np.array([[[[3.0]], [[1.0]]]])  # phase, resource, corner, shape
    streaming = Streaming(np.array([[[0.0], [4.0]]]), np.zeros(1), np.zeros(1), 0.0, most=2.0)
    programme = cast(Programme, SimpleNamespace(
        seconds=seconds, head=np.array([[0.5, 0.25]]), streaming=streaming, tangents=()
    ))  # fmt: skip
    corners = np.array([[2.0]])
    assert lower_bound(programme, corners).tolist() == [6.5]
    assert lower_bound(programme, corners, np.array([2.0])).tolist() == [2 * 1.0 + 0.25 + 2 * 4.0]


def test_memory_is_lowered_by_more_than_replay_lacked() -> None:
    limits = PlanLimits(40e9, 100e9, ttft=1.0)
    less = lower_limits(limits, (1e9, 2e9))
    assert less.gpu_memory == pytest.approx(38.9e9, rel=1e-4) and less.gpu_memory < 38.9e9
    assert less.host_memory == pytest.approx(97.8e9, rel=1e-4) and less.host_memory < 97.8e9
    assert less.ttft == 1.0
    late = lower_limits(limits, (np.inf, 0.0))  # a time was missed, which memory does not mend
    assert 39.99e9 < late.gpu_memory < 40e9


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
    for other in (replace(w, batch=1), replace(w, batch=None), replace(w, service=True)):
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
        workload=SimpleNamespace(batch=None, predict=predict), deployment=None,
        limits=SimpleNamespace(ttft=limit),
    )  # fmt: skip
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


def costs_of(technique: str) -> StepCosts:
    d = Deployment(load_model("llama3-8b"), load_hardware("a6000"), load_stack("fused"))
    rules = Rules(max_seqs=16, max_tokens=256)
    return StepCosts(parse(technique), d, rules, 2048, 1024).with_density(NODES_PER_OCTAVE)


def test_the_line_of_a_round_goes_through_one_sequence_and_the_most() -> None:
    """Fixed time and time per sequence of one class, read back at both batches."""
    requests = Requests(np.arange(10.0), np.full(10, 600), np.full(10, 81))
    classes = group_requests(requests)
    assert len(classes) == 1
    options = [costs_of("full"), costs_of("kivi")]
    x = load_coefficients(options, classes)
    assert x.fixed.shape == (2,) and x.work.shape == x.gpu.shape == (1, 2)
    for o, costs in enumerate(options):
        seats = 10 / 9 * 80
        assert x.seats[0, o] == pytest.approx(seats)
        prompts = 10 / 9 * float(_prompt_seconds(costs, np.array([600.0]))[0])
        each = (float(x.work[0, o]) - prompts) / seats
        for batch in (1, 16):
            (took,) = simple_pass_seconds(costs.tables, batch=batch, context=np.array([640.5]))
            assert x.fixed[o] + batch * each == pytest.approx(took, rel=1e-9)
        cached = costs.tables.gpu_bytes[int(np.ceil(640.5 / costs.rules.block_tokens))]
        assert x.gpu[0, o] == pytest.approx(seats * float(cached))
        assert x.room[o] == costs.capacity
        most = max(costs.tables.gpu_bytes[-1], costs.tables.prompt_bytes[-1])
        assert x.longest[o] == most  # a prompt may be kept before it is packed


def test_techniques_up_to_half_as_bad_again_are_combined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates of 2, 3 and 3.01 replicas: what the third uses is not tried beside the first's."""
    asked: list[Any] = []

    def carry(
        loads: Any, bounds: Any, lanes: Any, cuts: tuple[ReplicaCapacity, ...]
    ) -> ReplicaCapacity:
        asked.append((loads, lanes, len(cuts)))
        return ReplicaCapacity((0, 1), 1.0, 1.0, 0.5)

    monkeypatch.setattr(trace, "solve_replica", carry)
    found = cast(Any, object.__new__(trace._TraceSearch))
    found.loads = cast(Loads, SimpleNamespace(only=lambda some: some))
    found.bounds, found.seconds = ReplicaTargets(max_seqs=8), 0.0
    found.done = [
        SimpleNamespace(estimate=ReplicaCapacity((option,), 1.0, load, 0.0))
        for option, load in ((4, 3.0), (1, 2.0), (7, 3.01))
    ]
    simulated: list[ReplicaCapacity] = []
    found._simulate = simulated.append
    found.combinations()
    assert asked == [([1, 4], trace.SEVERAL_LANES, n) for n in range(trace.MORE_SETTINGS)]
    assert [s.option_of for s in simulated] == [(1, 4)] * trace.MORE_SETTINGS
    assert found.seconds == 0.5 * trace.MORE_SETTINGS


def test_a_class_decodes_all_tokens_but_the_first() -> None:
    one = Classes(
        np.ones(1), np.array([5.0]), np.array([2.0]), np.zeros(1, np.int64), np.ones(1, np.int64)
    )
    assert one.decoded_per_s.tolist() == [8.0]


def test_layers_that_share_attention_in_halves_are_levelled_too() -> None:
    """Those that the CPU answers for, half by half, stay as they are."""
    some = Use(Shares(host=0.2, split=0.1, cpu=0.5), 2, 6, streamed=0.5)
    other, whole = Use(Shares(cpu=0.25), 2, 2), Use(Shares(cpu=1.0), 2, 4)
    found = level_shares(Arrangement(((some, other, whole),)))
    assert found is not None
    level, left = found.uses[0]
    assert (level.layers, level.parts) == (8, 2) and level.streamed == pytest.approx(0.375)
    assert vars(level.shares) == pytest.approx({"host": 0.15, "split": 0.075, "cpu": 0.4375})
    assert left == whole and not found.shared and Arrangement(((some, other),)).shared


def test_an_option_needs_the_techniques_that_do_what_it_does() -> None:
    d = deployment()
    needs = {o.kind: set(o.needs) for o in placement_options(d, halves=True)}
    assert needs == {
        "full": {"full"}, "copied": {"offload"}, "recomputed": {"kvpr"}, "cpu": {"fastdecode"},
        "shared": {"fastdecode"}, "halved": {"fastdecode"},
        "beside": {"fastdecode", "offload"}, "halved_beside": {"fastdecode", "offload"},
        "joined": {"fastdecode", "kvpr"}, "halved_joined": {"fastdecode", "kvpr"},
    }  # fmt: skip
    assert {o.kind for o in placement_options(d, halves=False)} == set().union(*ALONE)
