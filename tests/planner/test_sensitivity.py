"""What changes a plan: breakpoints, the front, and the chance that targets are kept."""

from dataclasses import replace

import numpy as np
import pytest

from kvsim.evidence.ledger import KnownError, evidence_for
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.planner.plan import ChosenPlan, make_plan
from kvsim.planner.question import Admission, PlanLimits, Workload
from kvsim.planner.sensitivity import (
    LIKELY_ENOUGH,
    pareto_front,
    probability_below,
    with_faster_links,
)
from kvsim.planner.table import Column, Options
from kvsim.techniques import parse

SOME = Admission((parse("full"), parse("fastdecode")))


def planned(d: Deployment, w: Workload) -> ChosenPlan:
    h = d.hardware
    return make_plan(d, w, "throughput", PlanLimits(h.gpu_memory, h.host_memory), SOME)


def test_beyond_a_flip_another_technique_is_chosen() -> None:
    d = Deployment(load_model("llama2-7b"), load_hardware("a6000"), load_stack("fused"))
    w = Workload(2048, 32)
    plan = planned(d, w)
    found = plan.flips()
    assert plan.choice.technique.name == "full" and found
    for flip in found:
        if flip.what == "host memory bandwidth":
            changed = (1 + share * (flip.factor - 1) for share in (0.6, 1.05))
            before, after = (planned(with_faster_links(d, ("dram",), x), w) for x in changed)
            assert before.choice.technique.name == "full"
            assert after.choice.technique.name != "full"


def test_the_front_holds_what_nothing_beats() -> None:
    random = np.random.default_rng(0)
    columns: dict[str, Column] = {
        k: random.random(50) for k in ("tpot", "throughput", "gpu_memory")
    }
    table = Options([parse("full")] * 50, columns=columns)
    rows = pareto_front(table, {"gpu_memory": 0.5})
    inside = np.flatnonzero(columns["gpu_memory"] <= 0.5)
    for i in inside:
        better = (columns["tpot"][inside] <= columns["tpot"][i]) & (
            columns["throughput"][inside] <= columns["throughput"][i]
        )
        assert (i in rows) == (better.sum() == 1)  # itself
    assert list(columns["tpot"][rows]) == sorted(columns["tpot"][rows])


def test_of_equal_rows_the_front_has_the_simplest() -> None:
    """Copies that hide behind compute cost nothing, but for rounding."""
    some = [parse("offload:host_share=0.1"), parse("full"), parse("fastdecode"), parse("full")]
    columns = {
        "tpot": np.array([1.0 - 1e-12, 1.0, 1.0 + 1e-12, 2.0]),
        "throughput": np.array([-5.0 - 1e-10, -5.0, -5.0, -9.0]),
    }
    assert pareto_front(Options(technique=some, columns=columns), {}) == [1, 3]
    swapped = {name: values[[1, 0, 2, 3]] for name, values in columns.items()}
    some = [some[i] for i in (1, 0, 2, 3)]
    assert pareto_front(Options(technique=some, columns=swapped), {}) == [0, 3]


def test_a_front_of_a_plan_begins_with_one_sequence() -> None:
    d = Deployment(load_model("llama2-7b"), load_hardware("a6000"), load_stack("fused"))
    rows = planned(d, replace(Workload(1024, 16), service=True)).front()
    assert rows[0].batch[0] == 1
    rates = [float(p.output_tok_s[0]) for p in rows]
    assert rates == pytest.approx(sorted(rates), rel=1e-2)


ERROR = KnownError(None, "", low=0.8, high=1.5, exact=False)


@pytest.mark.parametrize(("factor", "share"), [(1.5, 0.9), (0.8, 0.1), (1.0, 0.5)])
def test_an_interval_is_read_back(factor: float, share: float) -> None:
    assert probability_below(ERROR, factor) == pytest.approx(share, abs=1e-4)


def test_more_room_is_never_less_likely() -> None:
    found = [probability_below(ERROR, factor) for factor in np.geomspace(0.2, 5, 200)]
    assert found == sorted(found) and found[0] < 1e-6 and found[-1] > 1 - 1e-4


def test_without_a_spread_the_prediction_decides() -> None:
    exact = KnownError(None, "", low=1.0, high=1.0, exact=True)
    assert (
        probability_below(exact, 1.0) == probability_below(exact, 1.2) == 1.0
        and probability_below(exact, 0.99) == 0.0
    )


def test_the_safe_batch_is_the_largest_whose_interval_is_within() -> None:
    d = Deployment(load_model("llama2-7b"), load_hardware("a6000"), load_stack("vllm"))
    memory = 0.9 * d.hardware.gpu_memory
    workload = Workload(2048, 128, service=True)
    limits = PlanLimits(memory, d.hardware.host_memory, ttft=2.0, tpot=0.1)
    plan = make_plan(d, workload, "throughput", limits)
    found = plan.likely
    assert plan.choice.technique.name == "full" and not found.sure
    assert 0.5 < found.kept["tpot"] < LIKELY_ENOUGH < found.kept["ttft"]
    high = evidence_for(d, "full", "decode").high
    assert found.safer is not None
    batch = float(found.safer.batch[0])
    assert batch < float(plan.choice.batch[0])
    for size, kept in ((batch, True), (batch + 1, False)):
        row = workload.predict(plan.choice.technique, d, np.array([size]))
        assert (float(row.tpot_s[0]) * high <= limits.tpot) is kept

    easy = PlanLimits(memory, 2.0**37, 20.0, 1.0)
    loose = make_plan(d, workload, "throughput", easy, Admission((parse("full"),)))
    assert loose.likely.sure and loose.likely.safer is None
