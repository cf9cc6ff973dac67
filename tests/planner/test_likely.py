"""How sure a plan keeps its targets: the interval's own quantiles, and the largest safe batch."""

import numpy as np
import pytest

from kvsim.evidence.ledger import KnownError, evidence_for
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.planner.plan import make_plan
from kvsim.planner.question import PlanLimits, Workload
from kvsim.planner.sensitivity import LIKELY_ENOUGH, probability_below

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

    loose = make_plan(d, workload, "throughput", PlanLimits(memory, 2.0**37, 20.0, 1.0))
    assert loose.likely.sure and loose.likely.safer is None
