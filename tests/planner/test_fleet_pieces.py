"""Pieces of fleets by what they promise: traffic, sets of replicas, what is reached, memories."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvsim.planner.fleet import offers
from kvsim.planner.fleet.demand import (
    ClassTarget,
    FleetTargets,
    _merge_rare_classes,
    traffic_of,
)
from kvsim.planner.fleet.offers import Configuration, Extras, FleetLimits, _add_memory
from kvsim.planner.fleet.play import Fleet, Played, quantile, replica_sets
from kvsim.planner.fleet.search import FleetSolver
from kvsim.planner.question import Admission
from kvsim.serving.costs import StepCosts
from kvsim.serving.pools import TwoPools
from kvsim.serving.rules import Rules
from kvsim.techniques import parse
from kvsim.traces.requests import Requests
from kvsim.traces.resample import draw_day, scale_clients
from tests.support.fleets import deployment
from tests.traces.test_workload import drawn

TARGETS = FleetTargets(2.0, 0.1, 0.9, (ClassTarget(500, 5.0, 0.2), ClassTarget(900, 9.0, 0.3)))


def requests(seed: int, count: int = 600) -> Requests:
    random = np.random.default_rng(seed)
    arrival = np.cumsum(random.exponential(4.0, count))
    return Requests(arrival, random.integers(1, 1500, count), random.integers(1, 300, count))


@pytest.mark.parametrize("windows", [0, 1, 5])
def test_classes_and_windows_hold_every_request_once(windows: int) -> None:
    some = requests(windows)
    traffic = traffic_of(some, windows, TARGETS)
    count = np.bincount(traffic.of)
    per_window = np.bincount(traffic.window, minlength=len(traffic.hours))
    assert len(traffic.hours) == (windows or min(24, int(some.duration / 300), 6))
    assert traffic.hours.sum() * 3600 == pytest.approx(some.duration)
    assert 3600 * traffic.hours @ traffic.rate == pytest.approx(count)
    assert 3600 * traffic.hours * traffic.rate.sum(axis=1) == pytest.approx(per_window)
    assert traffic.mean * some.duration == pytest.approx(count)
    assert (np.diff(traffic.window) >= 0).all()
    assert traffic.prompt @ count == pytest.approx(some.prompt.sum())
    assert traffic.generate @ count == pytest.approx(some.generate.sum())
    for c in range(traffic.classes):
        prompts = some.prompt[traffic.of == c]
        assert len({(p > 500) + (p > 900) for p in prompts}) == 1  # one target for a class
        assert prompts.min() <= traffic.prompt[c] <= prompts.max()
    parts = [traffic.of_window(w) for w in range(len(traffic.hours))]
    assert [len(part.requests) for part in parts] == per_window.tolist()
    for w, part in enumerate(parts):
        assert (part.rate[0] == traffic.rate[w]).all() and not part.window.any()
        assert (part.of == traffic.of[traffic.window == w]).all()


def test_more_clients_are_more_of_every_class() -> None:
    traffic = traffic_of(requests(3, 2000), 4, TARGETS)
    twice = traffic.varied(2.0)
    assert len(twice.requests) == pytest.approx(2 * len(traffic.requests), rel=0.05)
    assert np.bincount(twice.of) / np.bincount(traffic.of) == pytest.approx(2.0, rel=0.3)
    assert twice.window.max() == 3 and traffic.varied() is traffic
    other = traffic.varied(1.0, day=1)
    assert len(other.requests) == pytest.approx(len(traffic.requests), rel=0.2)
    assert other.requests.arrival.tolist() != traffic.requests.arrival.tolist()


def test_another_day_of_sparse_traffic_is_drawn_in_few_blocks() -> None:
    some = requests(3, 300)
    sparse = replace(some, arrival=some.arrival * (3e9 / some.duration))
    day, rows = draw_day(sparse, 1)
    assert 150 < len(day) < 450 and rows.size == len(day) and day.duration <= 3e9


def test_another_day_has_as_many_users() -> None:
    users = drawn(users=50, turns=2)
    for seed in range(1, 4):
        day, rows = draw_day(users, seed)
        assert len(day) == len(users) and (np.diff(day.arrival) >= 0).all()
        assert day.parent is not None and users.parent is not None
        assert (day.parent < 0).sum() == (users.parent < 0).sum()
        assert len(set(rows.tolist())) < len(users)


@pytest.mark.parametrize("factor", [1.5, 2.0, 3.0])
def test_more_users_are_all_there_from_the_beginning(factor: float) -> None:
    users = drawn(users=50, turns=2)
    more, _ = scale_clients(users, factor)
    assert more.parent is not None and users.parent is not None
    assert (more.parent < 0).sum() == pytest.approx(factor * (users.parent < 0).sum(), abs=1)
    start, own = (x.arrival[x.sessions] - x.arrival[0] for x in (more, users))
    assert start.max() <= own.max()


def test_prefix_blocks_make_requests_as_much_work_as_several() -> None:
    some = requests(3, 300)
    blocks = 36 * len(some)
    named = replace(
        some, block_ids=np.arange(blocks), block_start=np.arange(0, blocks + 1, 36), block_tokens=16
    )
    assert traffic_of(some).work == len(some) and traffic_of(named).work == 3 * len(some)


def test_a_class_is_divided_in_its_shares_and_sessions_stay_together() -> None:
    some = requests(4, 3000)
    traffic = traffic_of(some, 2, TARGETS)
    random = np.random.default_rng(4)
    share = random.uniform(0.1, 1, (2, traffic.classes, 3))
    share[0, 0, 2] = 0.0
    share /= share.sum(axis=2, keepdims=True)
    kind = traffic.dispatched(share)
    for w in range(2):
        for c in range(traffic.classes):
            mine = kind[(traffic.window == w) & (traffic.of == c)]
            found = np.bincount(mine, minlength=3) / mine.size
            assert found == pytest.approx(share[w, c], abs=4 / mine.size + 0.01)
    assert not (kind[(traffic.window == 0) & (traffic.of == 0)] == 2).any()
    first = replace(traffic, session=np.repeat(np.arange(0, 3000, 3), 3))
    together = first.dispatched(share).reshape(-1, 3)
    assert (together == together[:, :1]).all()


def test_rare_classes_join_their_twin_and_others_stay() -> None:
    of = np.repeat([0, 1, 2, 3, 5], [30, 19, 30, 20, 19])
    merged = _merge_rare_classes(of)
    assert np.bincount(merged).tolist() == [49, 30, 20, 19]
    assert set(merged) == set(range(4))


def test_targets_are_of_the_class_of_a_prompt() -> None:
    prompt = np.array([1, 500, 501, 900, 901, 10**6])
    assert TARGETS.classify(prompt).tolist() == [0, 0, 1, 1, 2, 2]
    ttft, tpot = TARGETS.list_limits(prompt)
    assert ttft.tolist() == [2, 2, 5, 5, 9, 9] and tpot[[0, 2, 4]].tolist() == [0.1, 0.2, 0.3]
    assert TARGETS.uniform == FleetTargets(9.0, 0.3, 0.9)
    twice = TARGETS.times("ttft", 2.0)
    assert [x.ttft for x in twice.classes] == [4, 10, 18]
    assert [x.tpot for x in twice.classes] == [0.1, 0.2, 0.3]


@pytest.mark.parametrize("seed", range(10))
def test_sets_of_replicas_run_where_they_are_asked_to(seed: int) -> None:
    random = np.random.default_rng(seed)
    windows = int(random.integers(1, 7))
    running = random.integers(0, 5, windows)
    window = np.sort(random.integers(0, windows, 4000))
    sets, of = replica_sets(running, window)
    assert sets and all(count > 0 for count in sets)
    for w in np.flatnonzero(running):
        used = np.unique(of[window == w])
        assert sum(sets[i] for i in used) == running[w]  # all that run in a window have work
        for i in used:
            share = (of[window == w] == i).mean()
            assert share == pytest.approx(sets[i] / running[w], abs=0.02)


def test_a_steady_kind_is_one_set() -> None:
    window = np.array([0, 1, 2])
    assert replica_sets(np.array([4, 4, 4]), window)[0] == [4]
    sets, of = replica_sets(np.array([1, 2, 1]), window)
    assert sorted(sets) == [1, 1] and len(set(of[[0, 2]])) == 1
    assert replica_sets(np.zeros(3, np.int64), window)[0] == [1]


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("count", [1, 2, 7, 200])
def test_a_quantile_is_numpys(share: float, count: int) -> None:
    values = np.random.default_rng(count).uniform(0, 9, count)
    assert quantile(values, share) == pytest.approx(float(np.quantile(values, share)), rel=1e-12)
    assert quantile(np.append(values, [np.inf] * (2 * count)), 0.9) == np.inf
    assert quantile(values[:0], share) == 0.0


def played(ttft: list[float], tpot: list[float], prompt: list[int]) -> Played:
    kind = np.zeros(len(ttft), np.int64)
    one, two = np.array(ttft), np.array(tpot)
    return Played(one, two, one, kind, (), 1.0, np.array(prompt))


def test_each_class_is_held_to_its_own_targets() -> None:
    good = played([1.9, 4.9, 8.9], [0.09, 0.19, 0.29], [100, 600, 1000])
    assert good.meets(TARGETS) and good.good_share(TARGETS) == 1.0
    assert good.measure_excess(TARGETS) == pytest.approx((8.9 / 9, 0.29 / 0.3, 8.9 / 9))
    for place, (ttft, tpot) in enumerate([(2.1, 0.09), (4.9, 0.21), (9.1, 0.29)]):
        slow = played([1.9, 4.9, 8.9], [0.09, 0.19, 0.29], [100, 600, 1000])
        slow.ttft[place], slow.tpot[place] = ttft, tpot
        assert not slow.meets(TARGETS) and slow.good_share(TARGETS) == pytest.approx(2 / 3)
    refused = played([1.0, np.inf], [np.nan, np.nan], [100, 100])
    assert refused.refused == 1 and not refused.meets(FleetTargets(2.0, 0.1, 0.9))
    assert not refused.meets(FleetTargets(tpot=0.1))  # what never ends is late
    assert good.reached(0.5).ttft == 4.9


@pytest.mark.parametrize("count", [1, 10, 97, 200])
@pytest.mark.parametrize("share", [0.5, 0.9, 0.99, 0.999])
def test_a_share_of_the_requests_is_within_both_targets(count: int, share: float) -> None:
    random = np.random.default_rng(count)
    ttft, tpot = (random.exponential(x, count).tolist() for x in (0.4, 0.05))
    some = played(ttft, tpot, [100] * count)
    over = some.measure_excess(FleetTargets(1.0, 0.1, share))
    assert over.both >= max(over.ttft, over.tpot)
    for stretch, kept in ((1 + 1e-9, True), (1 - 1e-9, False)):  # the least by which both suffice
        targets = FleetTargets(stretch * over.both, 0.1 * stretch * over.both, share)
        good = some.good_share(targets)
        assert good is not None and (good >= share) == kept == some.meets(targets)


def configuration(reserved: float = np.inf) -> Configuration:
    costs = StepCosts(
        parse("full"), deployment("llama3.1-8b", "l40s", 2), Rules(prefix_caching=True), 4096, 2048
    )
    return Configuration(costs, "l40s", 2.0, reserved)


def test_other_memories_are_of_each_gpu_and_loaded() -> None:
    rates = {"nvme_read": 3e9, "nvme_write": 1e9}
    extras = Extras(host=5e9, drive=70e9, rates=rates)
    both = _add_memory(configuration(), 5e9, 70e9, extras).costs.rules
    assert (both.host_cache, both.nvme_cache, both.prefix_load) == (10e9, 140e9, "load")
    assert (both.nvme_read, both.nvme_write) == (3e9, 1e9)
    host = _add_memory(configuration(), 5e9, 0.0, extras).costs.rules
    assert (host.host_cache, host.nvme_cache) == (10e9, 0.0)
    assert host.nvme_read == Rules().nvme_read


def test_engines_apart_are_one_replica() -> None:
    plain = configuration(reserved=1.5)
    apart = replace(plain, apart=TwoPools(2, 1, rate=1e9))
    assert (plain.gpus, plain.engines, plain.sides, plain.rent) == (2, 1, None, 1.5)
    assert (apart.gpus, apart.engines, apart.sides) == (6, 3, (2, 1))
    kept = _add_memory(apart, 5e9, 0.0, Extras(host=5e9))
    assert kept.host - apart.host == 2 * 10e9  # those that decode keep no prefixes


def test_limits_count_the_most_that_they_allow() -> None:
    one, other = configuration(), configuration()
    for limits, most in [
        (FleetLimits(gpus=7), 3),
        (FleetLimits(gpus=7, gpus_of={"l40s": 5}), 2),
        (FleetLimits(gpus_of={"h100": 1}), 10**6),
    ]:
        assert limits.count_most(one) == most
        assert limits.allow([one], np.array([most])) and limits.allow(
            [one, other], np.array([1, 1])
        )
        assert most == 10**6 or not limits.allow([one, other], np.array([most, 1]))
    assert not FleetLimits(configurations=1).allow([one, other], np.array([1, 1]))


def test_of_two_fleets_the_cheaper_then_the_plainer_is_better() -> None:
    def fleet(x: Configuration, cost: float) -> Fleet:
        one = np.ones((1, 1), np.int64)
        return Fleet((x,), one, np.ones((1, 1, 1)), np.zeros(1, np.int64), cost)

    plain = configuration()
    frills = _add_memory(plain, 5e9, 0.0, Extras(host=5e9))
    better = FleetSolver._improves_on
    assert better(fleet(frills, 1.0), None)
    assert better(fleet(frills, 1.0), fleet(plain, 1.01))
    assert not better(fleet(plain, 1.01), fleet(frills, 1.0))
    assert better(fleet(plain, 1.0 + 1e-12), fleet(frills, 1.0))
    assert not better(fleet(frills, 1.0 - 1e-12), fleet(plain, 1.0))
    assert not better(fleet(plain, 1.0), fleet(plain, 1.0))


def test_a_fleet_is_stressed_by_headroom_and_by_every_loss() -> None:
    fleet = SimpleNamespace(
        kinds="ab", replicas=np.array([2, 1]), running=np.array([[2, 1], [1, 1]])
    )
    own = SimpleNamespace(fleet=lambda kinds, left, asked: left.tolist())
    asked = SimpleNamespace(limits=FleetLimits(headroom=0.5, failures=1), load=2.0)
    found: list[Any] = list(FleetSolver.stressed(*cast(Any, (own, fleet, asked))))
    assert found[:2] == [(fleet, 3.0), (fleet, 2.0)]
    assert found[2:] == [([[1, 1], [0, 1]], 2.0), ([[2, 0], [1, 0]], 2.0)]


def test_the_two_cheapest_techniques_beside_full_kv_each_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def estimated(name: str, needed: float) -> Any:
        costs = SimpleNamespace(technique=SimpleNamespace(name=name))
        return SimpleNamespace(costs=costs), np.array([needed, 1.0])

    def estimate(_: object, __: object, admission: Any) -> list[Any]:
        if [t.name for t in admission.techniques] == ["full"]:
            return [estimated("full", 10.0)]
        some = [("kivi", 5.0), ("fp8", 6.0), ("fp8", 3.0), ("h2o", 11.0), ("gear", 7.0)]
        return [estimated(*x) for x in some]

    monkeypatch.setattr(offers, "_estimate", estimate)
    admission = Admission(
        techniques=tuple(map(parse, ("full", "kivi", "fp8"))), only=("full", "kivi", "fp8")
    )
    one = SimpleNamespace(deployment=deployment("llama3-8b", "h100", 1))
    found = offers._list_settings(*cast(Any, (one, SimpleNamespace(admission=admission))))
    names = [(x.costs.technique.name, float(needed[0])) for x, needed in found]
    assert names == [("full", 10.0), ("fp8", 3.0), ("kivi", 5.0)]
