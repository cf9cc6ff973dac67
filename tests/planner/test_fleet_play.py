"""A fleet that plays a trace, held against the serving simulator and against plain counts."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.planner.fleet.demand import FleetTargets, Traffic, traffic_of
from kvsim.planner.fleet.offers import Configuration
from kvsim.planner.fleet.play import (
    copy_origins,
    overlay_copies,
    play,
    quantile,
    replica_sets,
    replicas_kept_busy,
)
from kvsim.serving.costs import StepCosts
from kvsim.serving.outcome import Outcome
from kvsim.serving.rules import Rules
from kvsim.serving.simulate import simulate
from kvsim.serving.tables import PerNode
from kvsim.techniques import parse
from kvsim.traces.read import load
from kvsim.traces.requests import Requests
from kvsim.traces.statistics import leading_hits


@cache
def chat() -> Traffic:
    return traffic_of(load("sample:chat").requests.head(300), windows=3)


@cache
def replica(gpu: str) -> Configuration:
    requests = chat().requests
    d = Deployment(load_model("llama3-8b"), load_hardware(gpu), load_stack("fused"))
    costs = StepCosts(
        parse("full"), d, Rules(), int((requests.prompt + requests.generate).max()),
        int(requests.prompt.max()),
    )  # fmt: skip
    return Configuration(costs.with_density(2), gpu, 1.0)


def whole(kinds: int, kind: int) -> np.ndarray:
    share = np.zeros((3, chat().classes, kinds))
    share[..., kind] = 1.0
    return share


def test_one_kind_of_replica_is_the_simulator() -> None:
    played = play(chat(), [replica("l40s")], np.full((3, 1), 2), whole(1, 0))
    run = simulate(chat().requests, replica("l40s").costs, 2, "least-loaded")
    expected = Outcome(run)
    np.testing.assert_allclose(played.ttft, expected.ttft_s, rtol=1e-12)
    np.testing.assert_allclose(played.latency, expected.latency_s, rtol=1e-12)
    assert played.groups[0].count == 2
    assert played.groups[0].requests == 300


def test_kinds_do_not_disturb_each_other() -> None:
    """Each kind with its own requests is what it is in a fleet."""
    share = whole(2, 0)
    share[:, 3:, :] = [0.0, 1.0]
    some = [replica("l40s"), replica("a100-80g")]
    played = play(chat(), some, np.full((3, 2), 1), share)
    for kind, configuration in enumerate(some):
        mine = np.flatnonzero((chat().of >= 3) == bool(kind))
        run = simulate(chat().requests.take(mine), configuration.costs, 1)
        assert (played.kind[mine] == kind).all()
        np.testing.assert_allclose(played.ttft[mine], Outcome(run).ttft_s, rtol=1e-12)


def test_a_slowdown_is_slower_replicas() -> None:
    """Times of a slowed fleet are those of replicas whose every cost is as many times as large."""
    factor, slow = 1.7, replica("l40s")
    costs = slow.costs.with_density(2)
    tables, error = costs._checked
    slower = tables._replace(
        costs=PerNode(*(values * factor for values in tables.costs)),
        h2d=tables.h2d / factor, d2h=tables.d2h / factor,
    )  # fmt: skip
    object.__setattr__(costs, "_checked", (slower, error))
    counts = np.full((3, 1), 1)
    expected = play(chat(), [Configuration(costs, "l40s", 1.0)], counts, whole(1, 0))
    played = play(chat(), [slow], counts, whole(1, 0), slowdown=factor)
    np.testing.assert_allclose(played.ttft, expected.ttft, rtol=1e-6)
    np.testing.assert_allclose(played.latency, expected.latency, rtol=1e-6)


def test_dispatch_keeps_the_shares() -> None:
    share = np.zeros((3, chat().classes, 3))
    share[:] = [0.5, 0.3, 0.2]
    kind = chat().dispatched(share)
    for c in range(chat().classes):
        rows = chat().of == c
        counts = np.bincount(kind[rows], minlength=3)
        assert np.abs(counts - rows.sum() * share[0, c]).max() <= 2


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_replicas_that_start_and_stop(running: list[int], requests: int) -> None:
    """Every set serves only while it runs, and the sets of a window are all its replicas."""
    counts = np.array(running)
    window = np.sort(np.arange(requests) % len(running))
    keep = counts[window] > 0
    window = window[keep]
    sets, of = replica_sets(counts, window)
    for w in np.unique(window):
        used = np.unique(of[window == w])
        assert sum(sets[i] for i in used) <= counts[w]
        assert (window == w).sum() < 8 * len(sets) or sum(sets[i] for i in used) == counts[w]


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=50), st.floats(0.5, 0.999))
@settings(max_examples=80, deadline=None)
def test_quantile_is_numpys(values: list[float], share: float) -> None:
    assert quantile(np.array(values), share) == pytest.approx(np.quantile(values, share))


def test_what_fits_in_no_cache_is_never_served() -> None:
    assert quantile(np.array([1.0, np.inf]), 0.99) == np.inf
    assert quantile(np.array([1.0] * 200 + [np.inf]), 0.99) == 1.0


def test_more_load_needs_more_replicas() -> None:
    targets = FleetTargets(2.0, 0.1, 0.9)
    once, thrice = (
        replicas_kept_busy(chat().requests.scaled(rate), replica("l40s"), targets).needed
        for rate in (1.0, 3.0)
    )
    assert 0.2 < once < 1.5
    assert 1.8 * once < thrice < 3.5 * once
    impossible = FleetTargets(1e-4, 0.1, 0.9)
    assert replicas_kept_busy(chat().requests, replica("l40s"), impossible).needed == np.inf


def test_windows_and_classes_add_up_to_the_trace() -> None:
    traffic = chat()
    seconds = 3600 * traffic.demand.hours
    assert seconds.sum() == pytest.approx(traffic.requests.duration)
    counts = np.rint(traffic.demand.rate * seconds[:, None]).astype(int)
    for c in range(traffic.classes):
        np.testing.assert_array_equal(
            counts[:, c], np.bincount(traffic.window[traffic.of == c], minlength=3)
        )


def test_some_requests_keep_their_prefix_blocks() -> None:
    requests = Requests(
        np.arange(4.0), np.full(4, 8), np.full(4, 2), np.array([0, 1, 0, 2, 0, 1]),
        np.array([0, 2, 4, 4, 6]), 4,
    )  # fmt: skip
    part = requests.take(np.array([1, 3]))
    assert [block.tolist() for block in part.blocks()] == [[0, 2], [0, 1]]
    assert part.arrival.tolist() == [1.0, 3.0]


def test_copies_of_a_trace_share_no_prefix_and_add_up() -> None:
    requests = Requests(
        np.array([0.0, 1.0, 3.0]), np.array([8, 12, 4]), np.full(3, 2), np.array([0, 1, 0, 1]),
        np.array([0, 2, 4, 4]), 4,
    )  # fmt: skip
    several = overlay_copies(requests, 3)
    assert several.duration <= requests.duration
    assert sorted(several.prompt.tolist()) == sorted([8, 12, 4] * 3)
    assert several.prompt.tolist() == requests.prompt[copy_origins(requests, 3)].tolist()
    kinds = [tuple(block.tolist()) for block in several.blocks() if block.size]
    assert all(kinds.count(kind) == 2 for kind in kinds)
    assert leading_hits(several).sum() == 3 * leading_hits(requests).sum()
    assert overlay_copies(requests, 1) is requests
