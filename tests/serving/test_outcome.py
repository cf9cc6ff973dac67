"""Figures of a run, by hand: two replicas, four requests, and a run of nothing."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.serving import costs
from kvsim.serving import simulate as simulation
from kvsim.serving.costs import StepCosts, worst_errors
from kvsim.serving.outcome import STRETCHES, Outcome, Targets, make_timeline, spread
from kvsim.serving.records import ABORTED, FINEST_GAP, FINISHED, GAP_BINS, GAP_RATIO, POOLS, REFUSED
from kvsim.serving.simulate import Run
from kvsim.serving.tables import COST_RESOURCES
from kvsim.techniques import parse
from kvsim.techniques.acceptance import probability

D = Deployment(load_model("llama3-8b"), load_hardware("h100"), load_stack("fused"), tp=2)
NAN = np.nan


def run_of(requests: int = 4) -> Any:
    """The third request is refused and the fourth given up; the second has one token."""
    some = slice(0, requests)
    progress = SimpleNamespace(
        status=np.array([FINISHED, FINISHED, REFUSED, ABORTED])[some],
        arrival=np.array([1.0, 2.0, 2.5, 3.0])[some],
        started=np.array([1.5, 4.0, NAN, 5.0])[some],
        first=np.array([2.0, 6.0, NAN, NAN])[some],
        last=np.array([8.0, 6.0, NAN, NAN])[some],
        hits=np.array([3, 0, 0, 1])[some],
        made=np.array([4, 1, 0, 0])[some],
    )
    bins = SimpleNamespace(
        seconds=np.zeros((2, GAP_BINS)),
        running=np.zeros((2, GAP_BINS)),
        cache=np.zeros((2, GAP_BINS)),
        waiting=np.zeros((2, GAP_BINS)),
        prompt=np.zeros((2, GAP_BINS)),
        use=np.zeros((2, GAP_BINS, len(COST_RESOURCES))),
    )
    if requests:
        bins.seconds[0, :3], bins.seconds[1, :2] = (0.5, 0.25, 1.0), (1.0, 0.25)
        bins.running[0, :3], bins.cache[0, 0], bins.cache[1, 1] = (1.0, 0.5, 3.0), 40.0, 20.0
        bins.use[0, 1, COST_RESOURCES.index("hbm")] = 1.5
        bins.use[1, 0, COST_RESOURCES.index("h2d")] = 0.25
        bins.waiting[1, 0], bins.prompt[1, 1] = 6.0, 8.0
    pools = SimpleNamespace(count=np.array([5, 7, 2, 11, 13, 4, 17]))
    assert len(pools.count) == 2 * POOLS + 1
    every = SimpleNamespace(
        clock=np.array([9.0, 5.0]) if requests else np.zeros(2), emitted=np.array([4, 1]),
        found=np.array([[6, 0, 0, 0], [0, 2, 1, 0]])[:, : POOLS + 1],
        link_bytes=np.array([[1e9, 0, 0, 0, 0, 0], [1e9, 4e9, 0, 0, 0, 0]]) * (requests > 0),
        peak=np.array([30, 60]), preemptions=np.array([2, 3]),
        bin_width=np.array([1.0, 2.0]), size=2,
    )  # fmt: skip
    return SimpleNamespace(
        requests=Fake(requests), progress=progress, replicas=every, bins=bins,
        gaps=np.array([[0, 8, 0, 0], [0, 1, 0, 1]]) if requests else np.zeros((2, 4)),
        world=SimpleNamespace(
            limits=SimpleNamespace(gpu=120, unit_bytes=10), pools=pools, entries=None
        ),
        costs=SimpleNamespace(
            deployment=D, technique="full", error={"rounds": 0.001}, context=100, host_capacity=0,
            rules=SimpleNamespace(block_tokens=1),
            room=SimpleNamespace(
                capacity=120, prompt_bytes=60 * np.arange(4), host_bytes=np.zeros(4)
            ),
        ),
    )  # fmt: skip


class Fake:
    """As much of requests as figures read."""

    def __init__(self, count: int) -> None:
        self.prompt = np.array([20, 5, 3, 2])[:count]
        self.generate = np.array([4, 1, 9, 9])[:count]
        self.arrival = np.array([1.0, 2.0, 2.5, 3.0])[:count]

    def __len__(self) -> int:
        return len(self.prompt)


def test_times_of_requests() -> None:
    found = Outcome(run_of(), Targets())
    np.testing.assert_array_equal(found.ttft_s, [1.0, 4.0, NAN, NAN])
    np.testing.assert_array_equal(found.tpot_s, [2.0, NAN, NAN, NAN])
    np.testing.assert_array_equal(found.latency_s, [7.0, 4.0, NAN, NAN])
    np.testing.assert_array_equal(found.queue_s, [0.5, 2.0, NAN, 2.0])
    assert found.duration_s == 8.0


@pytest.mark.parametrize(
    ("ttft", "tpot", "good"),
    [(np.inf, np.inf, 2), (4.0, 2.0, 2), (3.9, 2.0, 1), (4.0, 1.9, 1), (0.9, 9.0, 0)],
)
def test_good_requests_are_within_both_targets(ttft: float, tpot: float, good: int) -> None:
    found = Outcome(run_of(), Targets(ttft, tpot))
    assert found.meets_targets.sum() == good and not found.meets_targets[2:].any()
    assert found.summary()["goodput_per_s"] == good / 8
    assert found.summary()["good_share"] == good / 4


def test_shares_of_the_time_and_of_resources() -> None:
    found = Outcome(run_of(), Targets())
    assert found.busy_share == 3.0 / 16
    assert found.mean_batch == 4.5 / 3.0
    use = found.utilisation
    assert use["hbm"] == 1.5 / 16
    assert found.link_bytes == dict.fromkeys(found.link_bytes, 0.0) | {"h2d": 4e9, "d2h": 8e9}
    for link, stored in (("h2d", 0.25), ("d2h", 0.0)):
        seconds = stored + found.link_bytes[link] / 2 / D.bandwidth[link]
        assert use[link] == pytest.approx(seconds / 16)


def test_memories_hits_and_money() -> None:
    found = Outcome(run_of(), Targets())
    stored = {"host": (7 + 13) * 20, "nvme": (2 + 4) * 20, "remote": 17 * 20}
    assert found.stored_bytes == stored
    assert [*found.prefix_hits.values()][:3] == [0.2, 2 / 30, 1 / 30]
    assert D.hardware.price is not None and found.usd is not None
    assert found.usd == pytest.approx(D.hardware.price * 4 * 8 / 3600)
    said = found.summary()
    assert said["usd_per_million_tokens"] == pytest.approx(found.usd / 5 * 1e6)
    assert (said["kv_peak_bytes"], said["kv_peak_share"], said["preemptions"]) == (60, 0.5, 5)
    assert said["prefix_hit_share"] == 4 / 30


def test_a_summary_counts_every_request_once() -> None:
    said = Outcome(run_of(), Targets()).summary()
    counts = {name: said[name] for name in ("finished", "refused", "aborted", "unfinished")}
    assert counts == {"finished": 2, "refused": 1, "aborted": 1, "unfinished": 0}
    assert said["refused_rows"] == [3] and said["requests"] == 4 and said["replicas"] == 2
    assert (said["output_tok_s"], said["request_per_s"]) == (5 / 8, 2 / 8)


def test_quantiles_of_gaps_are_the_middle_of_their_bin() -> None:
    found = Outcome(run_of(), Targets()).gaps()
    middle = [FINEST_GAP * GAP_RATIO ** (i + 0.5) for i in range(4)]
    assert found == pytest.approx({"p50": middle[1], "p90": middle[1], "p99": middle[3]})


def test_a_run_of_nothing_has_no_figures() -> None:
    found = Outcome(run_of(0), Targets())
    assert found.duration_s == found.busy_share == found.mean_batch == 0.0
    assert set(found.utilisation.values()) == {0.0}
    assert found.gaps() == {"p50": None, "p90": None, "p99": None}
    said = found.summary()
    for name in ("output_tok_s", "request_per_s", "goodput_per_s", "good_share",
                 "prefix_hit_share"):  # fmt: skip
        assert said[name] is None, name
    assert said["ttft_s"] == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert spread(np.array([1.0, NAN, 3.0]))["mean"] == 2.0


def test_stretches_of_time_add_up_bins_of_either_width() -> None:
    """Bins of one second and of two: five stretches of two seconds until the ninth."""
    found = make_timeline(cast(Run, run_of()))
    assert found["start_s"].tolist() == [0, 2, 4, 6, 8]
    assert found["busy_share"].tolist() == [1.75 / 4, 1.25 / 4, 0, 0, 0]
    assert found["arrivals_per_s"].tolist() == [0.5, 1.5, 0, 0, 0]
    assert found["finished_per_s"].tolist() == [0, 0, 0, 0.5, 0.5]
    assert found["running"].tolist() == [0.75, 1.5, 0, 0, 0]
    assert found["waiting"].tolist() == [3, 0, 0, 0, 0]
    assert found["prompt_tok_s"].tolist() == [0, 4, 0, 0, 0]
    assert found["kv_share"] == pytest.approx([40 / 1.75 / 120, 20 / 1.25 / 120, 0, 0, 0])
    assert found["hbm"].tolist() == [1.5 / 4, 0, 0, 0, 0]
    run = run_of()
    run.replicas.clock[0] = 2.0 * (STRETCHES + 1) - 0.5
    assert found["start_s"][1] == 2.0 and make_timeline(run)["start_s"][1] == 4.0
    assert len(make_timeline(run)["start_s"]) == 65
    run.replicas.clock[0] = 2.0 * STRETCHES
    assert len(make_timeline(run)["start_s"]) == STRETCHES


def test_the_error_of_tables_is_the_largest_relative_one() -> None:
    samples: Any = {"rounds": (lambda tables: np.array([1.0, 3.0, 1.9]), np.array([1.0, 2.5, 2.0]))}
    nothing: Any = None
    assert worst_errors(samples, nothing) == pytest.approx({"rounds": 0.2})
    drawn = costs._log_uniform(np.random.default_rng(0), 8)
    assert {*drawn} == set(range(1, 9)) and np.median(drawn) == 3


@pytest.mark.parametrize("gamma", [1, 2, 5])
def test_one_acceptance_gives_the_mean_of_a_round(gamma: int) -> None:
    for p in (0.0, 0.3, 0.8):
        accepted = sum(p**k for k in range(1, gamma + 1))
        assert probability(accepted / gamma, gamma) == pytest.approx(p, abs=1e-9)
    assert probability(1.0, gamma) == 1.0


def test_requests_have_the_rounds_that_were_drawn() -> None:
    class Measured:
        def draw(self, random: object, gamma: int, count: int) -> Any:
            assert gamma == 4
            return np.full(count, 3)

    costs: Any = SimpleNamespace(technique=parse("selfdraft:gamma=4"), rate=2.0)
    generate = np.array([1, 2, 4, 5, 8])
    found = simulation.draw_rates(cast(StepCosts, costs), generate, 0, cast(Any, Measured()))
    assert found.tolist() == [1.0, 1.0, 3.0, 2.0, 7 / 3]
    plain: Any = SimpleNamespace(technique=parse("full"), rate=1.0)
    assert simulation.draw_rates(plain, generate, 0).tolist() == [1.0] * 5
    many = simulation.draw_rates(costs, np.full(400, 401), 0)
    assert many.mean() == pytest.approx(2.0, rel=0.02) and many.std() > 0.01
