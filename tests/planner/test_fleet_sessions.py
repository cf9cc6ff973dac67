"""Fleets for sessions: turns stay together, follow their answers, and clients may hang up."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.planner.fleet.demand import traffic_of
from kvsim.planner.fleet.offers import Configuration
from kvsim.planner.fleet.play import copy_origins, overlay_copies, play
from kvsim.planner.question import Admission, PlanLimits
from kvsim.planner.trace import make_trace_plan
from kvsim.serving.costs import StepCosts
from kvsim.serving.outcome import Outcome
from kvsim.serving.pools import TwoPools, simulate_pools
from kvsim.serving.rules import Rules
from kvsim.serving.simulate import simulate
from kvsim.techniques import parse
from kvsim.traces.requests import Requests

SESSIONS, TURNS = 40, 4


def sessions(seed: int = 0) -> Requests:
    """Sessions of four turns with ever longer prompts."""
    random = np.random.default_rng(seed)
    begin = np.cumsum(random.exponential(0.5, SESSIONS))
    arrival = (begin[:, None] + 0.1 * np.arange(TURNS)).ravel()
    prompt = random.integers(20, 800, (SESSIONS, TURNS)).cumsum(axis=1).ravel()
    parent = np.tile(np.arange(-1, TURNS - 1), (SESSIONS, 1)) + TURNS * np.arange(SESSIONS)[:, None]
    parent[:, 0] = -1
    order = np.argsort(arrival, kind="stable")
    place = np.argsort(order)
    before = parent.ravel()[order]
    return Requests(
        arrival[order], prompt[order], random.integers(5, 100, arrival.size),
        parent=np.where(before >= 0, place[before], -1), think=np.full(arrival.size, 0.3),
    )  # fmt: skip


@cache
def replica() -> Configuration:
    requests = sessions()
    d = Deployment(load_model("llama3-8b"), load_hardware("l40s"), load_stack("fused"))
    costs = StepCosts(
        parse("full"), d, Rules(), int((requests.prompt + requests.generate).max()),
        int(requests.prompt.max()),
    )  # fmt: skip
    return Configuration(costs.with_density(2), "l40s", 1.0)


def test_turns_of_a_session_are_of_one_class_and_on_one_kind_of_replica() -> None:
    traffic = traffic_of(sessions())
    assert len(np.unique(traffic.session)) == SESSIONS
    assert traffic.classes > 1
    share = np.full((len(traffic.demand.rate), traffic.classes, 3), 1 / 3)
    kind = traffic.dispatched(share)
    for first in np.unique(traffic.session):
        mine = traffic.session == first
        assert len(set(traffic.of[mine])) == len(set(kind[mine])) == 1
    assert set(kind) == {0, 1, 2}
    assert sum(len(traffic.part(c)) for c in range(traffic.classes)) == len(traffic.requests)
    parents = [traffic.part(c).parent for c in range(traffic.classes)]
    assert sum(int((p >= 0).sum()) for p in parents if p is not None) == SESSIONS * (TURNS - 1)


@pytest.mark.parametrize("apart", [None, TwoPools(1, 1)])
def test_a_fleet_plays_turns_as_the_simulator_does(apart: TwoPools | None) -> None:
    requests, one = sessions(), replace(replica(), apart=apart)
    traffic = traffic_of(requests, windows=1)
    played = play(traffic, [one], np.full((1, 1), 2), np.ones((1, traffic.classes, 1)))
    if apart is None:
        run = simulate(requests, one.costs, 2, "least-loaded")
    else:
        run = simulate_pools(requests, one.costs, TwoPools(2, 2), "least-loaded")
    np.testing.assert_allclose(played.ttft, Outcome(run).ttft_s, rtol=1e-12)
    assert (run.progress.arrival > requests.arrival).sum() > SESSIONS  # turns that waited


def test_slower_replicas_make_turns_wait_longer() -> None:
    traffic = traffic_of(sessions(), windows=1)
    share = np.ones((1, traffic.classes, 1))
    once, slower = (
        play(traffic, [replica()], np.full((1, 1), 2), share, slowdown=x) for x in (1.0, 2.0)
    )
    assert slower.duration > once.duration + 1
    assert slower.ttft.mean() > 1.9 * once.ttft.mean()


def test_a_client_that_hangs_up_without_a_token_is_late() -> None:
    requests = replace(sessions(), abort_after=np.full(SESSIONS * TURNS, 1e-4))
    traffic = traffic_of(requests, windows=1)
    played = play(traffic, [replica()], np.full((1, 1), 1), np.ones((1, traffic.classes, 1)))
    run = simulate(requests, replica().costs, 1, "least-loaded")
    without = np.isnan(run.progress.first)
    assert (np.isinf(played.ttft) == without).all()
    assert without.mean() > 0.7  # the turns that would have followed among them
    assert not np.isfinite(played.tpot).any()


def test_copies_of_a_trace_keep_their_turns() -> None:
    requests = sessions()
    several = overlay_copies(requests, 3)
    assert several.parent is not None
    assert requests.parent is not None
    whose = copy_origins(requests, 3)
    after = np.flatnonzero(several.parent >= 0)
    assert (whose[several.parent[after]] == requests.parent[whose[after]]).all()
    assert after.size > 0.95 * 3 * SESSIONS * (TURNS - 1)  # but where a session goes round the end
    assert len(np.unique(several.parent[after])) == after.size


def test_a_plan_for_a_trace_plays_turns() -> None:
    d = replica().costs.deployment
    limits = PlanLimits(d.hardware.gpu_memory, d.hardware.host_memory, 5.0, 0.1, 0.0)
    full = Admission((parse("full"),))
    plan = make_trace_plan(d, sessions(), "throughput", limits, full, Rules())
    run = plan.choice.outcome.run
    assert (run.progress.arrival > run.requests.arrival).sum() > SESSIONS
