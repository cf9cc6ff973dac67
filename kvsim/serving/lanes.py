"""Several techniques on one replica, each for its own requests.

Every lane has its own batch and its share of the memory. The GPU computes one pass at a time: the
lanes that have work take turns, so each token waits for a pass of every other busy lane.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import InputError
from kvsim.serving.compiled import compiled
from kvsim.serving.costs import StepCosts
from kvsim.serving.queues import push
from kvsim.serving.record import widen
from kvsim.serving.schedule import step
from kvsim.serving.simulate import Run, engine_of, fits
from kvsim.serving.state import (
    LOWEST,
    REFUSED,
    RUNNING,
    SWAPPERS,
    WAIT_HEAD,
    WAITERS,
    Engine,
    Fleet,
    Integers,
    Progress,
    Trace,
    fleet_of,
    progress_of,
    trace_of,
)
from kvsim.traces.requests import Requests

if TYPE_CHECKING:
    from kvsim.serving.tables import Tables


@dataclass(frozen=True)
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
    room = min(lane.costs.capacity for lane in lanes)
    engines = tuple(_engine(lane, requests, room) for lane in lanes)
    rate = np.array([lane.costs.rate for lane in lanes])[which]
    trace = trace_of(requests, rate, any(e.shared_bytes > 0 for e in engines))
    progress = progress_of(len(requests))
    blocks = int(trace.ids.max()) + 1 if trace.ids.size else 0
    fleet = fleet_of(len(lanes), lanes[0].costs.rules, room, blocks)
    _play(tuple(lane.costs.tables for lane in lanes), engines, trace, fleet, progress, which)
    whole = engines[0]._replace(gpu=sum(e.gpu for e in engines))
    return Run(requests, lanes[0].costs, whole, progress, _one_replica(fleet))


def _engine(lane: Lane, requests: Requests, room: int) -> Engine:
    """A lane's rules, and its part of the memory."""
    e = engine_of(lane.costs, requests)
    host, host_cache = int(e.host * lane.share), int(e.host_cache * lane.share)
    return e._replace(gpu=int(room * lane.share), host=host, host_cache=host_cache)


def _one_replica(f: Fleet) -> Fleet:
    """What the lanes did, as one replica's record."""
    for lane in range(f.clock.size):
        while f.width[lane] < f.width.max():
            widen(f, lane)
    tally = f.tally.sum(axis=0, keepdims=True)
    tally[0, LOWEST] = f.tally[:, LOWEST].min()
    return f._replace(
        clock=f.clock.max(keepdims=True),
        tally=tally,
        series=f.series.sum(axis=0, keepdims=True),
        width=f.width.max(keepdims=True),
        gaps=f.gaps.sum(axis=0, keepdims=True),
    )


@compiled
def _play(
    tables: "tuple[Tables, ...]",
    engines: tuple[Engine, ...],
    x: Trace,
    f: Fleet,
    p: Progress,
    lane_of: Integers,
) -> None:
    """Passes in turn; a lane that is alone plays on until somebody arrives."""
    now, coming, turn = 0.0, 0, 0
    while True:
        while coming < x.arrival.size and x.arrival[coming] <= now:
            lane = lane_of[coming]
            if fits(tables[lane], engines[lane], x, coming):
                p.replica[coming] = 0
                push(f, p, lane, WAIT_HEAD, coming)
            else:
                p.status[coming] = REFUSED
            coming += 1
        busy = 0
        for lane in range(f.clock.size):
            busy += _has_work(f, lane)
        next_arrival = x.arrival[coming] if coming < x.arrival.size else np.inf
        if busy == 0:
            if coming == x.arrival.size:
                return
            now = next_arrival
            continue
        while not _has_work(f, turn):
            turn = (turn + 1) % f.clock.size
        f.clock[turn] = now
        until = next_arrival if busy == 1 else now
        step(tables[turn], x, f, engines[turn], p, turn, until)
        now = f.clock[turn]
        turn = (turn + 1) % f.clock.size


@compiled
def _has_work(f: Fleet, lane: int) -> bool:
    return bool(f.tally[lane, RUNNING] + f.tally[lane, WAITERS] + f.tally[lane, SWAPPERS] > 0)
