"""Several techniques on one replica, each for its own requests.

Every lane has its own batch and its share of the memory. The GPU computes one pass at a time: the
lanes that have work take turns, so each token waits for a pass of every other busy lane.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.serving.batch import queue
from kvsim.serving.core import jit_entry
from kvsim.serving.costs import StepCosts
from kvsim.serving.records import (
    GAP_BINS,
    GAPS,
    REFUSED,
    Bin,
    Integers,
    Replica,
    World,
    make,
)
from kvsim.serving.scheduler import has_work, step
from kvsim.serving.servable import find_refusals, longest_request
from kvsim.serving.simulate import Run
from kvsim.serving.tables import Tables
from kvsim.serving.world import limits_of, make_sizes, make_world
from kvsim.traces.requests import Requests


@frozen
class Lane:
    """A technique's step costs, and its part of the memory for caches, from 0 to 1."""

    costs: StepCosts
    share: float = 1.0


def simulate_lanes(requests: Requests, lanes: list[Lane], lane_of: NDArray[np.integer]) -> Run:
    """Play a trace on one replica.

    Parameters
    ----------
    lane_of : index of each request's lane. (n,)

    Returns
    -------
    Run
        Its fleet is one replica; its costs are those of the first lane.

    Raises
    ------
    InputError
        If lanes and requests do not fit together, or a technique cannot keep the rules.
    """
    if not lanes or sum(lane.share for lane in lanes) > 1 + 1e-9:
        raise InputError("lanes: expected at least one, with shares of the memory up to 1 together")
    which = np.asarray(lane_of, dtype=np.int64)
    if which.shape != (len(requests),) or (which < 0).any() or (which >= len(lanes)).any():
        raise InputError(f"lane_of: expected one of {len(lanes)} lanes for every request")
    if requests.depends:
        raise InputError("lanes: the trace has turns or aborts, which lanes do not model")
    capacity = min(lane.costs.capacity for lane in lanes)
    rate = np.array([lane.costs.rate for lane in lanes])[which]
    limits = [_limits(lane, requests, capacity) for lane in lanes]
    common = make_world(requests, lanes[0].costs, len(lanes), rate)
    worlds = tuple(
        common._replace(limits=own, sizes=make_sizes(lane.costs))
        for own, lane in zip(limits, lanes, strict=True)
    )
    tables = tuple(lane.costs.tables for lane in lanes)
    progress: Any = common.requests
    for number, (lane, own) in enumerate(zip(lanes, limits, strict=True)):
        most = longest_request(lane.costs, (int(own.gpu), int(own.host)))
        refused = find_refusals(most, requests) > 0
        progress.status[refused & (which == number)] = REFUSED
    play_lanes(tables, worlds, which)
    whole = limits[0].copy()
    whole.gpu = sum(int(own.gpu) for own in limits)
    return Run(requests, lanes[0].costs, _one_replica(common._replace(limits=whole)))


def _limits(lane: Lane, requests: Requests, capacity: int) -> Any:
    """A lane's rules, and its part of the memory."""
    limits = limits_of(lane.costs, requests)
    limits.gpu = int(capacity * lane.share)
    limits.host = int(limits.host * lane.share)
    limits.host_cache = int(limits.host_cache * lane.share)
    return limits


def _one_replica(world: World) -> World:
    """What the lanes did, as one replica's record."""
    lanes: Any = world.replicas
    bins: Any = np.asarray(world.bins).reshape(-1, GAP_BINS)
    for own, width in zip(bins, lanes["bin_width"], strict=True):
        for _ in range(round(np.log2(lanes["bin_width"].max() / width))):
            for name in own.dtype.names:  # bins twice as wide, two into one
                pairs = own[name].reshape(GAP_BINS // 2, 2, -1).sum(axis=1)
                own[name] = 0.0
                own[name][: GAP_BINS // 2] = pairs.reshape(own[name][: GAP_BINS // 2].shape)
    sums = {
        name: lanes[name].sum()
        for name in ("emitted", "preemptions", "passes", "private", "pinned", "host_private",
                     "host_swapped", "peak")
    }  # fmt: skip
    least = {name: lanes[name].max() for name in ("clock", "bin_width")}
    one = make(Bin, GAP_BINS, **{name: bins[name].sum(axis=0) for name in bins.dtype.names})
    return world._replace(
        replicas=make(Replica, 1, lowest=lanes["lowest"].min(), **sums, **least),
        bins=one,
        gaps=world.gaps.reshape(-1, GAPS).sum(axis=0),
    )


@jit_entry
def play_lanes(tables: tuple[Tables, ...], worlds: tuple[World, ...], lane_of: Integers) -> None:
    """Passes in turn; a lane that alone has work plays on until a request arrives."""
    now, coming, turn = 0.0, 0, 0
    requests, lanes = worlds[0].requests, worlds[0].replicas
    while True:
        while coming < requests.size and requests[coming].arrival <= now:
            lane = lane_of[coming]
            if requests[coming].status != REFUSED:
                requests[coming].replica = 0
                queue(worlds[lane], lanes[lane], coming)
            coming += 1
        busy = 0
        for lane in range(lanes.size):
            busy += has_work(lanes[lane])
        next_arrival = requests[coming].arrival if coming < requests.size else np.inf
        if busy == 0:
            if coming == requests.size:
                return
            now = next_arrival
            continue
        while not has_work(lanes[turn]):
            turn = (turn + 1) % lanes.size
        lanes[turn].clock = now
        until = next_arrival if busy == 1 else now
        step(tables[turn], worlds[turn], lanes[turn], until)
        now = lanes[turn].clock
        turn = (turn + 1) % lanes.size
