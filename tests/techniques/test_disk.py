"""A drive behind the host: the same placement, one level further."""

from dataclasses import replace

import numpy as np
import pytest

from kvsim.engine.roofline import all_ops
from kvsim.engine.timeline import steady_seconds
from kvsim.errors import InputError
from kvsim.graph import Channel
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.planner.plan import plan_among
from kvsim.planner.question import Admission, PlanLimits, Question, Workload
from kvsim.prediction.generate import Prediction
from kvsim.prediction.memory import decode_point
from kvsim.techniques import parse
from tests.support.drives import with_drive

SHARED = "place:host_share=0.75,weights_host=0.5,states_host=0.5,parts=2"
ON_DISK = f"{SHARED},cache_disk=0.4,weights_disk=0.6,states_disk=0.2"


def deployment(stack: str = "fused", **drive: float) -> Deployment:
    hardware = with_drive(load_hardware("t4"), **drive)
    return Deployment(load_model("opt-6.7b"), hardware, load_stack(stack))


def moved(text: str, channel: Channel) -> float:
    d = deployment()
    (step,) = parse(text).cycle(d, decode_point(8.0, 500, 50, 10)).steps
    return sum(count * float(op.bytes.get(channel, 0.0)) for op, count in all_ops(step))


def test_bytes_are_divided_and_none_is_lost() -> None:
    """The drive reads and holds its share; what crosses the host link is the same."""
    assert moved(ON_DISK, "h2d") == pytest.approx(moved(SHARED, "h2d"))
    assert moved(ON_DISK, "d2h") == pytest.approx(moved(SHARED, "d2h"))
    assert moved(SHARED, "disk_read") == moved(SHARED, "disk_write") == 0
    d, point = deployment(), decode_point(8.0, 500, 50, 49)
    before, after = (parse(text).resident(d, point) for text in (SHARED, ON_DISK))
    assert after["gpu"] == before["gpu"]
    shares = {"kv": 0.4, "weights": 0.6, "hidden states": 0.2}
    for name, size in before["host"].items():
        assert after["disk"][name] == pytest.approx(shares[name] * size)
        assert after["host"][name] == pytest.approx((1 - shares[name]) * size)
    reads = 0.6 * before["host"]["weights"] + 0.4 * before["host"]["kv"] * 510 / 550
    states = 0.2 * 0.5 * 2 * 8 * 4096 * 32
    assert moved(ON_DISK, "disk_read") == pytest.approx(reads + states, rel=1e-6)


@pytest.mark.parametrize("stack", ["ideal", "flexgen"])
def test_a_round_waits_for_the_drive(stack: str) -> None:
    """It takes no less than its bytes at the drive's rate; a quick drive costs nothing more."""
    point, took = decode_point(8.0, 500, 50, 10), []
    for rate in (1e9, 4e9, 1e15):
        d = deployment(stack, read=rate, write=rate)
        (step,) = parse(ON_DISK).cycle(d, point).steps
        took.append(float(steady_seconds(step, d)))
        assert took[-1] >= moved(ON_DISK, "disk_read") / rate
    (step,) = parse(SHARED).cycle(d, point).steps
    host = float(steady_seconds(step, d))
    assert took[0] > 1.5 * took[1] > took[2]
    assert took[2] == pytest.approx(host)
    assert host <= took[2]


def test_flexgen_says_shares_of_the_whole() -> None:
    """Its percentages are of all weights and of the whole cache, as in its paper."""
    one = parse("flexgen:weights_gpu=20,weights_disk=60,cache_gpu=50,cache_disk=10,parts=2")
    other = parse("place:weights_host=0.8,weights_disk=0.75,host_share=0.5,cache_disk=0.2,parts=2")
    d, point = deployment(), decode_point(8.0, 500, 50, 49)
    for mine, yours in zip(*(t.resident(d, point).values() for t in (one, other)), strict=True):
        assert mine == pytest.approx(yours)
    assert str(parse("flexgen")) == str(parse("flexgen:weights_disk=0"))
    assert parse(str(one)) == one


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("flexgen:weights_disk=10", "give its size with --disk"),
        ("place:host_share=1,split=9,cache_disk=1", "layer inputs in host memory"),
        ("quest + place:host_share=1,cache_disk=1", "single tokens"),
    ],
)
def test_what_cannot_be_on_a_drive(text: str, reason: str) -> None:
    d = deployment(size=0 if "--disk" in reason else 1e12)
    assert reason in parse(text).refuses(d)


def test_more_than_everything_is_refused() -> None:
    with pytest.raises(InputError, match="weights_gpu and weights_disk exceed 100 %"):
        parse("flexgen:weights_gpu=50,weights_disk=60")


def test_room_on_the_drive_bounds_the_batch() -> None:
    t, largest = parse("place:host_share=1,cache_disk=1"), []
    for size in (1e9, 2e9, 4e9):
        p = Prediction(t, deployment(size=size), np.array([4.0]), 500, 50)
        largest.append(float(p.max_batch[0]))
        assert bool(p.fits[0]) == (p.disk_bytes[0] <= size) == (largest[-1] >= 4)
    assert largest == sorted(largest)
    assert largest[0] < largest[2]


@pytest.mark.parametrize(
    "admitted", [Admission(only=("full", "offload")), Admission(engine="flexgen")]
)
def test_plans_put_no_more_there_than_memory_lacks(admitted: Admission) -> None:
    """A drive gives a plan where there was none, and never a worse one where there was one."""
    found = []
    for host, drive in ((3e9, 1e12), (60e9, 1e12), (60e9, 0.0)):
        d = deployment("flexgen", size=drive)
        hardware = replace(d.hardware, gpu_memory=8e9, host_memory=host)
        limits = PlanLimits(7e9, host, disk=drive or np.inf)
        asked = Workload(200, 20, batch=8), "throughput", limits, admitted
        choice = plan_among([Question(replace(d, hardware=hardware), *asked)]).choice
        assert choice.host_bytes[0] <= host
        found.append((float(choice.disk_bytes[0]), float(choice.output_tok_s[0])))
    assert found[0][0] > 0
    assert found[1][0] == 0
    assert found[1][1] >= found[2][1] * (1 - 1e-9) > found[0][1]
