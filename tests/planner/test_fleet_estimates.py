"""What a fleet's search rests on, by hand: classes, windows, closed estimates, near targets."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvsim.errors import InfeasibleError
from kvsim.planner import bits, replica
from kvsim.planner.fleet import answer, demand, offers
from kvsim.planner.fleet.demand import FleetTargets, Traffic, traffic_of
from kvsim.planner.fleet.offers import Rated, late_shares, replicas_needed
from kvsim.planner.fleet.play import Played, _most_running
from kvsim.planner.replica import Loads, ReplicaTargets, _token_parts, group_requests
from kvsim.serving.records import FINISHED, REFUSED
from kvsim.traces.requests import Requests

INF = np.inf


def test_parts_have_equal_tokens_and_equal_lengths_stay_together() -> None:
    """Of 24 tokens the first 8 are in part 0: what begins below a third, and so on."""
    assert _token_parts(np.array([9, 1, 2, 5, 7]), 3).tolist() == [1, 0, 0, 0, 1]
    assert _token_parts(np.array([4, 4, 4, 12]), 3).tolist() == [0, 0, 0, 1]
    assert _token_parts(np.array([12, 6, 6]), 4).tolist() == [2, 0, 0]
    assert (
        _token_parts(np.array([3]), 3).tolist() == [0]
        and _token_parts(np.zeros(0, int), 3).size == 0
    )


def test_classes_are_of_prompts_and_within_them_of_generated_tokens() -> None:
    prompt, generate = np.array([4, 4, 4, 6, 6]), np.array([3, 3, 4, 5, 5])
    found = group_requests(Requests(np.array([0.0, 1, 2, 3, 4]), prompt, generate), 2)
    assert found.of.tolist() == [0, 0, 1, 2, 2]
    for c in range(len(found)):
        mine = found.of == c
        assert found.prompt[c] == prompt[mine].mean()
        assert found.generate[c] == generate[mine].mean()
        assert found.per_s[c] == mine.sum() / 4
    assert found.decoded_per_s == pytest.approx(found.per_s * (found.generate - 1))
    at_once = group_requests(Requests(np.zeros(2), np.array([2, 2]), np.array([3, 3])))
    assert at_once.per_s.tolist() == [2.0]


LOADS = Loads(
    fixed=np.array([0.01, 0.02]), work=np.array([[0.5, 0.3], [0.2, 0.1]]),
    seats=np.array([[40.0, 30.0], [8.0, 4.0]]), gpu=np.array([[60.0, 20.0], [100.0, 80.0]]),
    host=np.array([[0.0, 9.0], [0.0, 6.0]]), room=np.array([10.0, 5.0]),
    host_room=np.array([1.0, 0.5]), tokens=np.array([1.0, 2.0]), longest=np.array([9.0, 5.0]),
    late=np.array([[0.0, 0.1], [0.3, 0.5]]),
)  # fmt: skip


def test_replicas_are_those_of_the_scarcest_thing_a_lap_needs() -> None:
    seqs, targets = np.array([4.0, 3.0]), FleetTargets(1.0, 0.05)
    needed = replicas_needed(LOADS, targets, seqs)
    for c, j in product(range(2), range(2)):
        slack = 0.05 * LOADS.tokens[j] - LOADS.fixed[j]
        laps = max(
            LOADS.gpu[c, j] / LOADS.room[j], LOADS.host[c, j] / LOADS.host_room[j],
            LOADS.seats[c, j] / seqs[j], LOADS.work[c, j] / slack,
        )  # fmt: skip
        assert needed[c, j] == pytest.approx(LOADS.fixed[j] * laps + LOADS.work[c, j])
    without = replicas_needed(LOADS, FleetTargets(1.0), seqs)
    assert without[0, 0] == pytest.approx(0.01 * 10 + 0.5)
    late = replicas_needed(LOADS, FleetTargets(1.0, 0.01), seqs)  # two tokens a round just in time
    assert np.isinf(late).all()
    long = replicas_needed(replace(LOADS, longest=np.array([10.1, 5.0])), targets, seqs)
    assert np.isinf(long[:, 0]).all() and np.isfinite(long[:, 1]).all()
    nothing = replace(LOADS, fixed=np.zeros(2), work=np.zeros((2, 2)))
    assert (replicas_needed(nothing, targets, seqs) == 1e-9).all()


def test_late_requests_are_counted_of_their_class() -> None:
    some = cast(Traffic, SimpleNamespace(of=np.array([0, 0, 0, 1]), classes=2))
    assert late_shares(LOADS, some) == pytest.approx(np.array([[0, 0.1 / 0.75], [1.0, 1.0]]))


def rated(name: str, needed: list[float], rent: float) -> Rated:
    made: Any = SimpleNamespace(name=name, rent=rent)
    return Rated(made, np.array(needed), np.zeros(len(needed)))


def names(found: list[Rated]) -> list[str]:
    return [r.configuration.name for r in found]


def test_the_best_of_all_and_of_each_class_without_what_is_far_dearer() -> None:
    best = offers._select_cheapest
    some = [
        rated("dear", [9.0, 9.0], 1.0), rated("all", [1.0, 1.0], 2.0),
        rated("first", [1.0, 9.0], 1.0), rated("one class", [1.5, INF], 1.0),
        rated("far", [4.1, INF], 1.0),
    ]  # fmt: skip
    assert names(best(some, 9)) == ["all", "first", "one class"]
    assert names(best(some, 2)) == ["all", "first"]
    assert names(best([rated("a", [4.0], 1.0), rated("b", [1.0], 1.0)], 9)) == ["b", "a"]
    three = [rated("a", [4.1], 1.0), rated("b", [1.0], 1.0), rated("c", [4.2], 1.0)]
    assert names(best(three, 9)) == ["b", "a"]  # two at least
    little = [rated("a", [0.01], 2.0), rated("c", [0.02], 2.0), rated("whole", [0.5], 1.0)]
    assert names(best(little, 9)) == ["a", "c", "whole"]  # 25 times as dear, but one is enough
    much = [rated("a", [1.0], 2.0), rated("c", [2.0], 2.0), rated("whole", [50.0], 1.0)]
    assert names(best(much, 9)) == ["a", "c"]
    assert some[1].cost_of_all == 4.0 and some[1].cost.tolist() == [2.0, 2.0]


def waited(reached: FleetTargets) -> Played:
    """A fleet with one request."""
    ttft, tpot = np.array([reached.ttft]), np.array([reached.tpot])
    return Played(ttft, tpot, ttft, np.zeros(1, np.int64), (), 1.0, np.array([10]))


@pytest.mark.parametrize(
    ("ttft", "tpot", "loose", "words"),
    [
        (1.0, 0.1, (2.4, 0.1), "TTFT p90 of 1 s cannot be met: reads comes nearest with 1.9 s"),
        (
            9.0,
            0.01,
            (9.0, 0.12),
            "TPOT p90 of 10 ms cannot be met: decodes comes nearest with 100 ms",
        ),
        (9.0, 1.0, (9.0, 1.0), "the targets are met by no replica under load"),
    ],
)
def test_targets_in_reach_are_the_nearest_with_room(
    ttft: float, tpot: float, loose: tuple[float, float], words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One configuration reads prompts sooner, the other decodes sooner."""
    reach = {"reads": FleetTargets(1.9, 0.11, 0.9), "decodes": FleetTargets(2.0, 0.1, 0.9)}
    monkeypatch.setattr(answer, "_play_at_rest", lambda r, _: waited(reach[r.configuration.name]))
    some = [rated("decodes", [1.0], 1.0), rated("reads", [1.0], 1.0)]
    nothing: Any = None
    targets = FleetTargets(ttft, tpot, 0.9)
    found, said = answer.reachable_targets(some, nothing, targets, lambda _: None)
    name = "reads" if ttft == 1.0 else "decodes"
    asked = reach[name]
    assert found.ttft == pytest.approx(max(ttft, 1.2 * asked.ttft))
    assert found.tpot == pytest.approx(max(tpot, 1.2 * asked.tpot))
    assert found.share == 0.9
    assert words in said


@pytest.mark.parametrize(
    ("needed", "count", "load"),
    [([0.1, INF], 8, 1.0), ([2.0, 1.5], 28, 1.0), ([30.0], 64, 64 / 240), ([0.0], 8, 1.0)],
)
def test_replicas_at_rest_are_eight_times_what_is_needed(
    needed: list[float], count: int, load: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def play(*args: Any) -> Any:
        seen.append(args)
        return waited(FleetTargets(1.0, 2.0))

    monkeypatch.setattr(answer, "play", play)
    some: Any = SimpleNamespace(demand=SimpleNamespace(rate=np.zeros((3, 2))), classes=2)
    found = answer._play_at_rest(rated("x", needed, 1.0), some)
    ((_, _, running, share, faster),) = seen
    assert found.ttft.tolist() == [1.0] and running.tolist() == [[count]] * 3
    assert share.shape == (3, 2, 1) and share.min() == 1.0 and faster == pytest.approx(load)


def trace(count: int, seconds: float) -> Requests:
    arrival = 5.0 + np.linspace(0.0, seconds, count)
    return Requests(arrival, np.full(count, 10), np.full(count, 4))


@pytest.mark.parametrize(
    ("count", "seconds", "windows"),
    [(500, 1200.0, 4), (500, 1499.0, 4), (399, 9000.0, 3), (9000, 90000.0, 24), (50, 9000.0, 1)],
)
def test_windows_are_long_and_full_enough(count: int, seconds: float, windows: int) -> None:
    found = traffic_of(trace(count, seconds))
    assert len(found.demand.rate) == windows
    assert found.window.min() == 0 and found.window.max() == windows - 1
    assert found.demand.hours == pytest.approx(seconds / windows / 3600)
    total = found.demand.rate.sum(axis=1) * seconds / windows
    assert total == pytest.approx(np.bincount(found.window))
    assert len(traffic_of(trace(count, seconds), 2).demand.rate) == 2


def test_rare_classes_join_their_twin_without_reuse() -> None:
    of = np.repeat([0, 1, 2, 3, 5], [30, 19, 5, 20, 3])
    assert np.bincount(demand._merge_rare_classes(of)).tolist() == [49, 5, 20, 3]


def test_requests_go_to_kinds_in_the_shares_of_their_class_and_window() -> None:
    count = 4000
    window, of = np.arange(count) % 2, np.arange(count) // 2 % 2
    some = Traffic(
        requests=trace(count, 1.0), of=of, window=window, session=np.arange(count),
        prompt=np.ones(2), generate=np.ones(2), reuse=np.zeros(2), demand=cast(Any, None),
    )  # fmt: skip
    share = np.array([[[0.25, 0.75], [1.0, 0.0]], [[0.5, 0.5], [0.0, 1.0]]])
    kind = some.dispatched(share)
    for w, c in product(range(2), range(2)):
        mine = kind[(window == w) & (of == c)]
        assert (mine == 0).mean() == pytest.approx(share[w, c, 0], abs=0.002)
    assert some.part(1).prompt.size == count // 2


def test_sequences_are_held_from_their_start_to_their_end() -> None:
    progress = SimpleNamespace(
        replica=np.array([0, 0, 0, 1, 0]), started=np.array([0.0, 1.0, 2.0, 0.0, 0.0]),
        last=np.array([2.0, 4.0, 3.0, 9.0, 9.0]),
        status=np.array([FINISHED, FINISHED, FINISHED, FINISHED, REFUSED]),
    )  # fmt: skip
    run: Any = SimpleNamespace(progress=progress, replicas=SimpleNamespace(size=2))
    assert _most_running(run) == 2  # the first has left when the third begins
    progress.last[0] = 2.5
    assert _most_running(run) == 3


@pytest.mark.parametrize("mean", [2.0, 2.5, 3.1, 4.0, 8.0])
def test_bits_are_those_with_the_least_loss_of_all(mean: float) -> None:
    random = np.random.default_rng(1)
    widths = (2, 3, 8)
    alone = np.sort(random.random((2, 3, 2, 4)), axis=1)[:, ::-1]
    losses: Any = SimpleNamespace(alone=alone, bits=widths)
    found = bits.assign(losses, mean)
    each = alone.mean(axis=-1)

    def lost(chosen: Any) -> float:
        return float(sum(each[s, chosen[2 * s + i], i] for s, i in product(range(2), range(2))))

    allowed = [
        chosen for chosen in product(range(3), repeat=4)
        if sum(widths[b] for b in chosen) <= 4 * mean + 1e-9
    ]  # fmt: skip
    assert lost(found.ravel().tolist()) == pytest.approx(min(map(lost, allowed)), rel=1e-6)
    with pytest.raises(InfeasibleError, match="narrowest"):
        bits.assign(losses, 1.9)


@pytest.mark.parametrize("size", [1.0, 1e-6])
def test_the_speed_of_each_class_counts_by_its_share_of_the_sequences(size: float) -> None:
    """However few they are: 80 and 20 of 100 sequences, of two tokens a round each."""
    some = replace(
        LOADS, seats=size * np.array([[80.0], [20.0]]), fixed=np.array([0.01]),
        work=np.zeros((2, 1)), gpu=np.zeros((2, 1)), host=np.zeros((2, 1)), room=np.ones(1),
        host_room=np.ones(1), tokens=np.array([2.0]), longest=np.zeros(1), late=np.zeros((2, 1)),
    )  # fmt: skip
    problem, *_ = replica.build_replica_programme(some, ReplicaTargets(max_seqs=200), fastest=True)
    found = {variable.name: -value for variable, value in problem.objective.items()}
    assert {name: value for name, value in found.items() if value} == pytest.approx(
        {"speed_0_0": 0.8 / 100, "speed_1_0": 0.2 / 100}  # over the most laps, 1 / 0.01 s
    )
