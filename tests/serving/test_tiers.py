"""Memories that keep prefix blocks besides the GPU's."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsim import techniques
from kvsim.errors import InputError
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.serving.costs import StepCosts
from kvsim.serving.outcome import Outcome, faults
from kvsim.serving.rules import PREFIX_LOADS, Rules
from kvsim.serving.scheduler import ROUTES
from kvsim.serving.simulate import Run, simulate
from kvsim.traces.requests import Requests
from tests.support.served import tables_of


def played(requests: Requests, **changes: Any) -> Run:
    base = tables_of("full", 8, 128, "chunked")
    rules = replace(base.rules, prefix_caching=True, **changes)
    costs = replace(base, rules=rules)
    object.__setattr__(costs, "tables", base.tables)
    run = simulate(requests, costs)
    assert faults(run) == []
    return run


def repeated(times: int = 2, between: float = 10.0) -> Requests:
    """One prompt of ten blocks again and again, and after each another that takes its memory."""
    ids = [np.arange(10), np.arange(10) + 10] * times
    count = len(ids)
    return Requests(
        np.linspace(0, (count - 1) * between, count), np.full(count, 320), np.full(count, 2),
        np.concatenate(ids), np.arange(count + 1) * 10, 32,
    )  # fmt: skip


@pytest.mark.parametrize("memory", ["host", "nvme", "remote"])
def test_a_prompt_that_left_the_gpu_is_loaded_from_where_it_was_stored(memory: str) -> None:
    run = played(repeated(), blocks=22, prefix_load="load", **{f"{memory}_cache": 1e9})
    assert run.progress.hits.tolist() == [0, 0, 319, 319]
    found = Outcome(run)
    on_gpu = 2 * 16  # the first block of each, where the other prompt leaves it
    assert found.prefix_hits[memory] == pytest.approx((638 - on_gpu) / 1280)
    assert found.prefix_hits["gpu"] == pytest.approx(on_gpu / 1280)
    each = int(run.world.limits.unit_bytes)
    moved = found.link_bytes
    assert moved["d2h"] == moved["h2d"] == 20 * each
    other = {"host": (), "nvme": ("nvme_read", "nvme_write"), "remote": ("nic_in", "nic_out")}
    for name in ("nvme_read", "nvme_write", "nic_in", "nic_out"):
        assert moved[name] == (20 * each if name in other[memory] else 0)
    assert found.stored_bytes[memory] == 20 * each


def test_a_load_takes_what_its_slowest_link_takes() -> None:
    rates = {"nvme_read": 1e8, "nvme_write": 1e9}
    run = played(repeated(), blocks=22, prefix_load="load", nvme_cache=1e9, **rates)
    ttft = run.progress.first - run.progress.arrival
    assert ttft[2] == pytest.approx(10 * int(run.world.limits.unit_bytes) / 1e8, rel=0.1)


def test_what_was_not_used_for_long_is_forgotten_and_what_fills_no_block_is_not_stored() -> None:
    kept = played(repeated(), blocks=22, host_cache=1e9, cache_ttl=1000.0)
    gone = played(repeated(), blocks=22, host_cache=1e9, cache_ttl=15.0)
    assert kept.progress.hits[2] > 16 == gone.progress.hits[2]  # one block is left on the GPU
    whole = played(repeated(), blocks=22, host_cache=1e9, cache_block=128, prefix_load="load")
    assert whole.progress.hits.tolist() == [0, 0, 256, 256]


@pytest.mark.parametrize("nic", [1e7, 1e8, 3e8, 1e9, 1e10])
def test_the_split_is_never_later_than_loading_or_recomputing_alone(nic: float) -> None:
    ttft = {}
    for how in PREFIX_LOADS:
        run = played(repeated(), blocks=22, prefix_load=how, remote_cache=1e9, nic=nic)
        ttft[how] = float(run.progress.first[2] - run.progress.arrival[2])
    assert ttft["faster"] <= 1.001 * min(ttft["load"], ttft["recompute"])
    assert ttft["split"] <= 1.001 * ttft["faster"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nvme_cache": 1e9}, "--nvme-cache: needs prefix blocks; add --prefix-caching"),
        ({"prefix_caching": True, "cache_ttl": 5.0}, "--cache-ttl: has no effect without"),
        ({"prefix_caching": True, "cache_block": 512}, "--cache-block: has no effect without"),
        ({"nvme_read": 1e9}, "--nvme-read: has no effect without --nvme-cache"),
        ({"nic": 1e9}, "--nic: has no effect without --remote-cache"),
        ({"prefix_load": "never"}, "--prefix-load: got 'never'"),
        ({"cache_ttl": 0.0}, "--cache-ttl: got 0.0"),
    ],
)
def test_settings_without_effect_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as problem:
        Rules(**changes)
    assert message in str(problem.value)


def test_blocks_that_are_not_whole_blocks_of_the_trace_are_refused() -> None:
    with pytest.raises(InputError, match="--cache-block: got 48; expected a multiple of 32"):
        played(repeated(), host_cache=1e9, cache_block=48)
    plain = Requests(np.zeros(1), np.array([30]), np.array([5]))
    with pytest.raises(InputError, match="the trace has no prefix blocks"):
        played(plain, host_cache=1e9)


def shared_trace() -> Requests:
    from kvsim.traces.read import load

    place = Path(os.environ.get("KVSIM_SHARED", "")) / "traces/mooncake_conversation_trace.jsonl"
    if "KVSIM_SHARED" not in os.environ or not place.exists():
        pytest.skip("KVSIM_SHARED names no folder with the Mooncake trace")
    return load(str(place)).requests


def test_hits_per_memory_are_those_of_a_plain_count() -> None:
    """One request at a time: the GPU holds only the last prompts, host memory all."""
    requests = shared_trace().head(2000)
    d = Deployment(load_model("llama3.1-8b"), load_hardware("h100"), load_stack("fused"))
    rules = Rules(
        max_seqs=1, block_tokens=512, prefix_caching=True, host_cache=1e15, prefix_load="load"
    )
    longest = int((requests.prompt + requests.generate).max())
    costs = StepCosts(techniques.parse("full"), d, rules, longest, int(requests.prompt.max()))
    spaced = replace(requests, arrival=np.linspace(0, 1e3 * (len(requests) - 1), len(requests)))
    run = simulate(spaced, costs)
    seen: set[int] = set()
    expected = 0
    for prompt, ids in zip(requests.prompt.tolist(), requests.blocks(), strict=True):
        full = ids[: prompt // 512].tolist()
        new = next((k for k, block in enumerate(full) if block not in seen), len(full))
        expected += min(512 * new, prompt - 1)
        seen.update(full)
    found = run.replicas.found.sum(axis=0)
    assert found.sum() == run.progress.hits.sum() == expected
    assert found[1] > 0
    assert faults(run) == []


@pytest.mark.parametrize("shared", [0.0, 1e9])
@pytest.mark.parametrize("route", ROUTES)
def test_requests_that_arrive_in_pieces_have_the_same_times(
    route: str, shared: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes between two calls wait for what arrives later; after the last all are played."""
    arrival, ends = np.linspace(0, 0.2, 11), np.arange(12) * 10
    prompt, generate = np.full(11, 320), np.full(11, 40)
    some = Requests(arrival, prompt, generate, np.arange(110) % 40, ends, 32)
    base = tables_of("full", 8, 128, "chunked")
    costs = replace(base, rules=replace(base.rules, prefix_caching=True, remote_cache=shared))
    object.__setattr__(costs, "tables", base.tables)
    whole = simulate(some, costs, 2, route).progress
    assert np.isfinite(whole.last).all()
    monkeypatch.setattr("kvsim.serving.simulate.REQUESTS_PER_CALL", 3)
    pieces = simulate(some, costs, 2, route).progress
    assert (pieces.first.tolist(), pieces.last.tolist()) == (
        whole.first.tolist(),
        whole.last.tolist(),
    )
