"""Resampling of traces: other days of the same traffic, and traffic of more clients.

Requests that belong together stay together [1]_: a block of time keeps its bursts and which
requests coincide, a session goes whole with its first turn, and prompts share what they shared.
Each block of a drawn day is one of the trace's from about that time, so a day keeps its shape.

References
----------
.. [1] H. R. Kuensch, "The jackknife and the bootstrap for general stationary observations", Annals
   of Statistics 17 (1989), https://doi.org/10.1214/aos/1176347265
"""

from dataclasses import replace
from math import ceil

import numpy as np

from kvsim.errors import InputError
from kvsim.traces.requests import Floats, Integers, Requests

TRACE_BLOCKS = 24  # enough to differ, and each long enough to keep queues and bursts
SHORTEST_BLOCK, LONGEST_BLOCK = 20.0, 900.0  # [s]
MOST_REQUESTS = 20_000_000  # of a trace with more clients, as many as fit in memory
NEARBY = 0.25  # of the trace's duration that a block may come from on either side
GOLDEN = (5**0.5 - 1) / 2  # multiples of it fill an interval most evenly


def draw_day(
    requests: Requests, seed: int, blocks: int = TRACE_BLOCKS, nearby: float = NEARBY
) -> tuple[Requests, Integers]:
    """Draw another day of the same traffic by a block bootstrap.

    Parameters
    ----------
    requests
        The trace.
    seed
        The same seed gives the same day.
    blocks
        Number of blocks that the trace is cut into; fewer if they would become too short.
    nearby
        How far from its place in the day a block may be drawn, as a share of the trace's duration.

    Returns
    -------
    tuple of Requests and array
        The day, as long as the trace, and which request of the trace each of its requests is. (n,)
    """
    lasts = requests.duration
    if lasts <= 0 or len(requests) < 2:
        return requests, np.arange(len(requests))
    random = np.random.default_rng([seed, len(requests)])
    since = requests.arrival - requests.arrival[0]
    if _begin_together(requests, nearby):
        return _draw_sessions(requests, random)
    width = float(np.clip(lasts / blocks, min(SHORTEST_BLOCK, lasts / 4), LONGEST_BLOCK))
    width = max(width, lasts / len(requests))  # a block has a request on average at least
    count = max(round(lasts / width), 1)
    width = lasts / count
    reach = max(round(nearby * count), 1)
    source = np.arange(count) + random.integers(-reach, reach, count, endpoint=True)
    source = np.where(source < 0, -source - 1, source)
    source = np.where(source >= count, 2 * count - 1 - source, source)
    home = np.minimum((since / width).astype(np.int64), count - 1)[requests.sessions]
    rows_of = np.split(
        np.argsort(home, kind="stable"), np.cumsum(np.bincount(home, minlength=count))
    )
    rows = np.concatenate([rows_of[block] for block in source])
    copy = np.repeat(np.arange(count), [rows_of[block].size for block in source])
    arrival = since[rows] + (copy - source[copy]) * width
    return _assemble(requests, rows, copy, arrival, _times_before(source)[copy])


def _begin_together(requests: Requests, nearby: float = NEARBY) -> bool:
    """Whether all sessions begin early in a trace, as those of users who stay all the time do."""
    since = requests.arrival - requests.arrival[0]
    last = since[requests.sessions].max()
    return requests.parent is not None and bool(last <= nearby * requests.duration)


def _draw_sessions(requests: Requests, random: np.random.Generator) -> tuple[Requests, Integers]:
    """Draw as many sessions, of users who all are there from the beginning, each as a whole.

    Blocks of time would hold all users or none.
    """
    first, of, length = np.unique(requests.sessions, return_inverse=True, return_counts=True)
    rows_of = np.split(np.argsort(of, kind="stable"), np.cumsum(length)[:-1])
    source = random.integers(0, first.size, first.size)
    rows = np.concatenate([rows_of[session] for session in source])
    place = np.repeat(np.arange(first.size), length[source])
    start = requests.arrival[first]
    arrival = requests.arrival[rows] + (start - start[source])[place]
    again = _times_before(source)[place]
    return _assemble(requests, rows, again, arrival, again)


def _times_before(drawn: Integers) -> Integers:
    """Count how often each item of a sequence came before in it. (n,)"""
    order, before = np.argsort(drawn, kind="stable"), np.empty(drawn.size, np.int64)
    before[order] = np.arange(drawn.size) - np.searchsorted(drawn[order], drawn[order])
    return before


def scale_clients(requests: Requests, factor: float) -> tuple[Requests, Integers]:
    """Scale the number of clients of a trace at the same duration.

    The trace is copied; copies are shifted in time and wrap around, and of a fractional copy a
    share of the sessions is kept. Copies share no prefixes with each other.

    Parameters
    ----------
    requests
        The trace.
    factor
        New number of clients over that of the trace.

    Returns
    -------
    tuple of Requests and array
        The requests, and the index in ``requests`` that each is a copy of. (n,)
    """
    if factor == 1:
        return requests, np.arange(len(requests))
    lasts, whole = requests.duration, int(np.ceil(factor))
    session = requests.sessions
    first = np.unique(session, return_inverse=True)[1]
    kept = np.mod((first + 0.5) * GOLDEN, 1.0) < factor - (whole - 1)
    parts = [np.arange(len(requests))] * (whole - 1) + [np.flatnonzero(kept)]
    rows = np.concatenate(parts)
    copy = np.repeat(np.arange(whole), [part.size for part in parts])
    since = requests.arrival - requests.arrival[0]
    if _begin_together(requests):
        start = since[session][rows]
        lasts = max(float(start.max()), np.finfo(float).tiny)
        arrival = since[rows] - start + np.mod(start + copy * lasts / whole, lasts)
    else:
        arrival = since[rows] + copy * lasts / whole
        arrival = np.where(arrival > lasts, arrival - lasts, arrival)
    return _assemble(requests, rows, copy, arrival, copy)


def _assemble(
    requests: Requests, rows: Integers, copy: Integers, arrival: Floats, own: Integers
) -> tuple[Requests, Integers]:
    """Select requests in several copies, sorted by arrival.

    Parameters
    ----------
    copy
        The copy of each, within which turns follow each other.
    own
        Requests with the same number may share prefixes.
    """
    order = np.argsort(arrival, kind="stable")
    rows, copy, own = rows[order], copy[order], own[order]
    plain = replace(requests, parent=None, think=None)
    arrival = arrival[order] - arrival[order[0]] if rows.size else arrival
    some = plain.take(rows, arrival)
    ids = some.block_ids
    if ids is not None and ids.size and some.block_start is not None:
        place = np.repeat(own, np.diff(some.block_start))
        some = replace(some, block_ids=ids + place * (int(ids.max()) + 1))
    if requests.parent is not None:
        where = np.full((int(copy.max(initial=0)) + 1, len(requests)), -1)
        where[copy, rows] = np.arange(rows.size)
        before = requests.parent[rows]
        parent = np.where(before >= 0, where[copy, before], -1)
        think = None if requests.think is None else requests.think[rows]
        parent = np.where(parent < np.arange(rows.size), parent, -1)
        some = replace(some, parent=parent, think=think)
    return some, rows


LEAST_S = 120.0  # that a load lasts, so that sequences in flight settle [s]
MAX_SENT_REQUESTS = 100_000


def at_rate(requests: Requests, per_second: float) -> tuple[Requests, int]:
    """Scale a trace's arrival times to a mean rate, and repeat it if it becomes too short.

    All gaps between arrivals are scaled by the same factor, so that bursts remain. Each repetition
    has its own prefix blocks, so that its prompts are not in any cache.

    Parameters
    ----------
    requests
        The trace.
    per_second
        Mean arrival rate. [requests/s]

    Returns
    -------
    tuple of Requests and int
        The scaled trace, and how many copies of the original it consists of.

    Raises
    ------
    InputError
        If all requests of the trace arrive at once, so that it has no rate.
    """
    if requests.duration <= 0:
        raise InputError(
            "--req-s: the requests of this trace all arrive at once; expected a trace with arrival "
            "times, such as one that kvsim traces generate makes"
        )
    count = len(requests)
    one = requests.scaled(per_second * requests.duration / (count - 1))
    period = count / per_second  # the gap before a repetition is the mean gap [s]
    copies = min(ceil(LEAST_S / period), max(1, MAX_SENT_REQUESTS // count))
    rows, copy = np.tile(np.arange(count), copies), np.repeat(np.arange(copies), count)
    return _assemble(one, rows, copy, one.arrival[rows] + copy * period, copy)[0], copies
