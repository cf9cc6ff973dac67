"""Several techniques on one replica, against plain replicas that take turns."""

from dataclasses import replace

import numpy as np
import pytest

from kvsim.errors import InputError
from kvsim.serving.lanes import Lane, simulate_lanes
from kvsim.serving.outcome import faults
from kvsim.serving.simulate import simulate
from kvsim.serving.world import limits_of
from kvsim.traces.requests import Requests
from tests.support.plain.memory import PlainRequest
from tests.support.plain.scheduler import PlainReplica
from tests.support.served import compare, tables_of, workload


def test_one_lane_is_the_plain_replica() -> None:
    costs = tables_of("kivi", 8, 128, "chunked")
    requests = workload(np.random.default_rng(3), prefix=False)
    alone = simulate(requests, costs).progress
    lane = simulate_lanes(requests, [Lane(costs)], np.zeros(len(requests), int)).progress
    for column in ("started", "first", "last", "made", "preempted", "status"):
        np.testing.assert_array_equal(getattr(lane, column), getattr(alone, column), column)


@pytest.mark.parametrize("seed", range(8))
def test_lanes_take_turns_as_the_plain_simulator_does(seed: int) -> None:
    for number in range(seed * 6, seed * 6 + 6):
        random = np.random.default_rng(number)
        names = random.choice(["full", "kivi", "quantspec", "specache"], 2, replace=False)
        requests = workload(random, prefix=False)
        blocks = int(np.max(requests.prompt + requests.generate) // 16 * random.uniform(2, 8))
        lanes = []
        for name, share in zip(names, (0.6, 0.4), strict=True):
            base = tables_of(str(name), 8, 128, "chunked")
            costs = replace(base, rules=replace(base.rules, blocks=blocks))
            object.__setattr__(costs, "tables", base.tables)
            lanes.append(Lane(costs, share))
        which = random.integers(0, 2, len(requests))
        run = simulate_lanes(requests, lanes, which)
        assert faults(run) == []
        compare(run.progress, in_turn(requests, lanes, which), f"lanes {number}")


def in_turn(requests: Requests, lanes: list[Lane], which: np.ndarray) -> list[PlainRequest]:
    """Plain replicas with one clock: whoever has work plays one pass, then it is the next's."""
    room = min(lane.costs.capacity for lane in lanes)
    fleet = []
    for lane in lanes:
        limits = limits_of(lane.costs, requests)
        limits.gpu, limits.host = int(room * lane.share), int(limits.host * lane.share)
        fleet.append(PlainReplica(lane.costs.tables, limits))
    coming = [
        PlainRequest(
            i, requests.arrival[i], int(requests.prompt[i]), int(requests.generate[i]),
            lanes[which[i]].costs.rate, [],
        )
        for i in range(len(requests))
    ]  # fmt: skip
    out, now, turn = list(coming), 0.0, 0
    while True:
        while coming and coming[0].arrival <= now:
            r = coming.pop(0)
            lane = fleet[which[r.index]]
            if not lane.could_hold(r):
                r.status = "refused"
            else:
                r.replica = 0
                lane.waiting.append(r)
        busy = [bool(f.batch or f.waiting or f.swapped) for f in fleet]
        if not any(busy):
            if not coming:
                return out
            now = coming[0].arrival
            continue
        while not busy[turn]:
            turn = (turn + 1) % len(fleet)
        fleet[turn].clock = now
        fleet[turn].step()
        now = fleet[turn].clock
        turn = (turn + 1) % len(fleet)


def test_lanes_that_do_not_fit_together_are_refused() -> None:
    costs = tables_of("full", 8, 128, "chunked")
    requests = workload(np.random.default_rng(0), prefix=False)
    nobody = np.zeros(len(requests), int)
    for lanes, which in (
        ([], nobody),
        ([Lane(costs, 0.7), Lane(costs, 0.7)], nobody),
        ([Lane(costs)], nobody + 1),
        ([Lane(costs)], nobody - 1),
        ([Lane(costs)], nobody[1:]),
    ):
        with pytest.raises(InputError, match="expected"):
            simulate_lanes(requests, lanes, which)
