"""Turns of sessions, classes of priority and clients that hang up."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvsim.errors import InputError
from kvsim.machines.hardware import ServerWork
from kvsim.serving.outcome import Outcome, faults
from kvsim.serving.records import ABORTED, FINISHED
from kvsim.serving.simulate import Run, simulate
from kvsim.serving.world import turn_records
from kvsim.traces.requests import Requests
from tests.support.served import OPTIONS, check_turns, tables_of

PLAYED = 96  # workloads; benchmarks/reference.py plays 32,000


@pytest.mark.parametrize("seed", range(0, PLAYED, 12))
def test_every_request_has_the_times_of_the_plain_simulator(seed: int) -> None:
    for number in range(seed, seed + 12):
        check_turns(number, OPTIONS[number * 5 % len(OPTIONS)])


def played(requests: Requests, replicas: int = 1, **changes: Any) -> Run:
    base = tables_of("full", 8, 128, "chunked")
    run = simulate(
        requests, base.with_rules(replace(base.rules, **changes)), replicas, "round-robin"
    )
    assert faults(run) == []
    return run


def test_a_turn_comes_when_its_client_has_thought_about_the_answer_before() -> None:
    three = Requests(
        np.array([0.0, 0.1, 500.0]), np.full(3, 64), np.full(3, 20),
        parent=np.array([-1, 0, 1]), think=np.array([0.0, 3.0, 3.0]),
    )  # fmt: skip
    run = played(three)
    assert run.progress.arrival[1] == run.progress.last[0] + 3.0
    assert run.progress.arrival[2] == 500.0  # later than it would have to be
    ttft = Outcome(run).ttft_s
    np.testing.assert_allclose(ttft, ttft[0], rtol=1e-9)


def test_turns_of_one_session_on_two_replicas_come_one_after_another() -> None:
    turns = Requests(np.zeros(6), np.full(6, 64), np.full(6, 50), parent=np.arange(-1, 5))
    run = played(turns, replicas=2)
    assert (run.progress.arrival[1:] == run.progress.last[:-1]).all()
    assert run.progress.replica.tolist() == [0, 1, 0, 1, 0, 1]


def test_the_first_class_goes_first_and_the_last_class_is_preempted() -> None:
    late = np.arange(8) >= 6
    some = Requests(
        np.where(late, 0.2, 0.0), np.full(8, 200), np.full(8, 300), priority=np.where(late, 0, 1)
    )
    run = played(some, blocks=90)
    assert run.progress.preempted[late].sum() == 0 < run.progress.preempted.sum()
    alike = played(replace(some, priority=None), blocks=90)
    assert run.progress.last[late].max() < run.progress.last[~late].max()
    assert run.progress.last[late].mean() < 0.8 * alike.progress.last[late].mean()


def test_an_abort_frees_memory_for_those_who_wait() -> None:
    some = Requests(
        np.array([0.0, 0.01]),
        np.array([400, 400]),
        np.array([300, 5]),
        abort_after=np.array([0.5, np.inf]),
    )
    blocks = 45
    waits = played(replace(some, abort_after=None), blocks=blocks)
    run = played(some, blocks=blocks)
    assert waits.progress.last[0] > 0.6
    assert run.progress.status.tolist() == [ABORTED, FINISHED]
    assert waits.progress.started[1] == waits.progress.last[0]
    assert 0.51 >= run.progress.started[1] >= 0.5
    assert 0 < run.progress.made[0] < 300
    found = Outcome(run).summary()
    assert (found["aborted"], found["finished"], found["unfinished"]) == (1, 1, 0)


def test_a_client_hangs_up_by_its_own_clock() -> None:
    some = Requests(np.zeros(1), np.array([400]), np.array([300]), abort_after=np.array([0.5]))
    turns = turn_records(some, ServerWork(first=0.02, tokenise=1e-4))[0]
    assert turns.abort_after.tolist() == pytest.approx([0.44])


def test_a_session_ends_where_a_turn_is_aborted_or_refused() -> None:
    turns = Requests(
        np.zeros(4), np.array([100, 100, 100, 690]), np.array([500, 5, 5, 5]),
        parent=np.array([-1, 0, 1, -1]), abort_after=np.array([0.5, np.inf, np.inf, np.inf]),
    )  # fmt: skip
    run = played(turns, blocks=40)
    assert Outcome(run).summary()["aborted"] == 3
    assert Outcome(run).summary()["refused"] == 1
    assert np.isnan(run.progress.started[1:]).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parent": np.array([0, -1])}, "parent: expected an earlier request, or -1"),
        ({"think": np.ones(2)}, "think: has no effect without parent"),
        ({"parent": np.array([-1, 0]), "think": np.array([0, -1.0])}, "think: expected seconds"),
        ({"priority": np.array([0, 8])}, "priority: expected priority classes from 0 to 7"),
        ({"abort_after": np.array([1.0, 0.0])}, "abort_after: expected seconds above 0"),
        ({"abort_after": np.array([1.0])}, r"abort_after: shape \(1,\); expected \(2,\)"),
    ],
)
def test_columns_that_hold_what_they_cannot_are_named(
    changes: dict[str, Any], message: str
) -> None:
    two = Requests(np.zeros(2), *np.ones((2, 2), np.int64))
    with pytest.raises(InputError, match=message):
        replace(two, **changes)


def test_some_requests_keep_their_turns_and_a_turn_without_its_parent_is_a_first() -> None:
    ones = np.ones(4, np.int64)
    some = Requests(
        np.arange(4.0), ones, ones, parent=np.array([-1, 0, 1, 0]), priority=np.arange(4)
    )
    for found, parents in ((some[1:], [-1, 0, -1]), (some.take(np.array([0, 3])), [-1, 0])):
        assert found.parent is not None
        assert found.parent.tolist() == parents
