"""Request traces as columns of arrivals, lengths and shared prefixes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import InputError

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


CONDUCT = {"parent": np.int64, "think": np.float64, "priority": np.int64, "abort_after": np.float64}
CONDUCT_DEFAULTS = {
    "id": np.nan,
    "parent": np.nan,
    "session": np.nan,
    "think": 0.0,
    "priority": 0.0,
    "abort_after": np.inf,
}
"""Roles of a trace's columns on turns, classes and aborts, and what an empty value stands for: such
a request follows none, thinks for no time, is of class 0, or waits to the end."""
CLASSES = 8  # of priority


@dataclass(frozen=True, eq=False)
class Requests:
    """A request trace, sorted by arrival; the columns are read-only.

    Several requests may arrive at the same instant; they keep the order of the trace.
    A trace with prefix blocks names, per request, the hash blocks of its prompt in order; equal
    ids are equal prefixes. The last block of a prompt may be partly filled.

    Attributes
    ----------
    arrival
        Arrivals, ascending, from the first request of the trace. (n,) [s]
    prompt
        Prompt lengths, at least 1. (n,) [tokens]
    generate
        Generated lengths, at least 1. (n,) [tokens]
    block_ids
        Prefix blocks of all requests one after another, numbered 0, 1, ... by first appearance in
        the trace; None in a trace without them. (m,)
    block_start
        Request i has `block_ids[block_start[i]:block_start[i + 1]]`; None without blocks. (n + 1,)
    block_tokens
        Prompt tokens per block; 0 without blocks. [tokens]
    parent
        The request that each one follows as a turn of its session, an earlier one, or -1. A turn
        arrives at its arrival, or `think` after its parent's last token, whichever is later. (n,)
    think
        From the parent's last token to the turn; 0 if not given. (n,) [s]
    priority
        Classes from 0, which goes first, to 7; all 0 if not given. (n,)
    abort_after
        Time after the arrival at which the client disconnects if the request is not finished;
        infinite, or None for all, if it waits. (n,) [s]

    Raises
    ------
    InputError
        If columns differ in length, arrivals are not finite or descend, a length is below 1, or a
        turn, class or time to an abort is invalid.
    """

    arrival: Floats
    prompt: Integers
    generate: Integers
    block_ids: Integers | None = None
    block_start: Integers | None = None
    block_tokens: int = 0
    parent: Integers | None = None
    think: Floats | None = None
    priority: Integers | None = None
    abort_after: Floats | None = None

    def __post_init__(self) -> None:
        for name, kind in (("arrival", np.float64), ("prompt", np.int64), ("generate", np.int64)):
            self._freeze(name, kind, len(self.arrival))
        if not np.isfinite(self.arrival).all():
            raise InputError("arrival: not finite; expected seconds")
        if (self.arrival[1:] < self.arrival[:-1]).any():
            raise InputError("arrival: descends; expected requests sorted by arrival")
        for name in ("prompt", "generate"):
            if (getattr(self, name) < 1).any():
                raise InputError(f"{name}: below 1; expected at least one token per request")
        if (self.block_ids is None) != (self.block_start is None) or (
            (self.block_ids is None) != (self.block_tokens == 0)
        ):
            raise InputError("blocks: expected ids, starts and tokens per block together")
        if self.block_ids is not None and self.block_start is not None:
            self._freeze("block_ids", np.int64, len(self.block_ids))
            self._freeze("block_start", np.int64, len(self) + 1)
            start = self.block_start
            if start[0] != 0 or start[-1] != len(self.block_ids) or (np.diff(start) < 0).any():
                raise InputError("block_start: expected ascending offsets from 0 to all blocks")
            if len(self.block_ids) and self.block_ids.min() < 0:
                raise InputError("block_ids: below 0; expected numbers from 0")
            if self.block_tokens < 1:
                raise InputError("block_tokens: below 1; expected tokens per block")

        self._check_conduct()

    def _check_conduct(self) -> None:
        """Check the columns on turns, classes and aborts.

        Raises
        ------
        InputError
            For the first column that holds what it cannot.
        """
        for name, kind in CONDUCT.items():
            if getattr(self, name) is not None:
                self._freeze(name, kind, len(self.arrival))
        own = np.arange(len(self))
        if self.parent is not None and ((self.parent < -1) | (self.parent >= own)).any():
            raise InputError("parent: expected an earlier request, or -1")
        if self.think is not None and self.parent is None:
            raise InputError("think: has no effect without parent")
        if self.think is not None and not (np.isfinite(self.think) & (self.think >= 0)).all():
            raise InputError("think: expected seconds, at least 0")
        if self.priority is not None and ((self.priority < 0) | (self.priority >= CLASSES)).any():
            raise InputError(f"priority: expected priority classes from 0 to {CLASSES - 1}")
        if self.abort_after is not None and not (self.abort_after > 0).all():
            raise InputError("abort_after: expected seconds above 0")

    @property
    def depends(self) -> bool:
        """Whether arrivals or aborts depend on how requests are served."""
        return self.parent is not None or self.abort_after is not None

    def without_sessions(self) -> "Requests":
        """Return the requests with fixed arrivals and without aborts."""
        return replace(self, parent=None, think=None, abort_after=None)

    @property
    def sessions(self) -> Integers:
        """Index of the first turn of the session that each request belongs to. (n,)"""
        found = np.arange(len(self))
        if self.parent is None:
            return found
        for index in np.flatnonzero(self.parent >= 0).tolist():  # turns come after their parents
            found[index] = found[self.parent[index]]
        return found

    def _conduct(self, rows: Integers) -> dict[str, Any]:
        """Turns, classes and aborts of selected requests; turns that lose their parent begin."""
        found = {n: c[rows] for n in CONDUCT if (c := getattr(self, n)) is not None}
        if self.parent is not None:
            place = np.full(len(self) + 1, -1)
            place[rows] = np.arange(len(rows))
            parent = np.where(self.parent[rows] >= 0, place[self.parent[rows]], -1)
            found["parent"] = np.where(parent < np.arange(len(rows)), parent, -1)
        return found

    def _freeze(self, name: str, kind: type, length: int) -> None:
        column: NDArray[np.generic] = np.asarray(getattr(self, name), dtype=kind).view()
        if column.shape != (length,):
            raise InputError(f"{name}: shape {column.shape}; expected ({length},)")
        column.flags.writeable = False
        object.__setattr__(self, name, column)

    def __len__(self) -> int:
        return len(self.arrival)

    def __getitem__(self, rows: slice) -> "Requests":
        """Consecutive requests, ``trace[a:b]``; arrivals and block ids are unchanged."""
        first, last, step = rows.indices(len(self))
        if step != 1:
            raise InputError(f"slice step {step}: expected consecutive requests")
        return self.take(np.arange(first, max(first, last)))

    def take(self, rows: Integers, arrival: Floats | None = None) -> "Requests":
        """Select requests by index; ids of prefix blocks are unchanged.

        Parameters
        ----------
        rows
            Indices of the requests. (k,)
        arrival
            New arrivals, with which indices need not ascend; None to keep the old ones. (k,) [s]

        Returns
        -------
        Requests
            The selected requests.
        """
        part = {name: getattr(self, name)[rows] for name in ("prompt", "generate")}
        part["arrival"] = self.arrival[rows] if arrival is None else arrival
        part |= self._conduct(rows)
        if self.block_ids is None or self.block_start is None:
            return Requests(**part)
        count = np.diff(self.block_start)[rows]
        start = np.concatenate([[0], np.cumsum(count)])
        place = np.arange(start[-1]) + np.repeat(self.block_start[rows] - start[:-1], count)
        return Requests(
            **part,
            block_ids=self.block_ids[place],
            block_start=start,
            block_tokens=self.block_tokens,
        )

    def head(self, count: int) -> "Requests":
        """Return the first requests.

        Parameters
        ----------
        count
            How many; all if there are fewer.
        """
        return self[: max(count, 0)]

    def scaled(self, rate_factor: float) -> "Requests":
        """Return the requests with all arrivals scaled to another rate; think times stay.

        Parameters
        ----------
        rate_factor
            Factor on the rate; arrivals are divided by it.

        Returns
        -------
        Requests
            The scaled trace.

        Raises
        ------
        InputError
            If the factor is not a number above 0.
        """
        if not (np.isfinite(rate_factor) and rate_factor > 0):
            raise InputError(f"rate factor {rate_factor}: expected a number above 0")
        return replace(self, arrival=self.arrival / rate_factor)

    def time_scaled(self, factor: float) -> "Requests":
        """Return the requests with all times scaled, think times and aborts included.

        Parameters
        ----------
        factor
            Factor on the rate; all times are divided by it.

        Returns
        -------
        Requests
            The scaled trace.
        """
        some = self.scaled(factor)
        if self.think is not None:
            some = replace(some, think=self.think / factor)
        if self.abort_after is not None:
            some = replace(some, abort_after=self.abort_after / factor)
        return some

    @property
    def duration(self) -> float:
        """Time from the first arrival to the last; 0 for fewer than two requests. [s]"""
        return float(self.arrival[-1] - self.arrival[0]) if len(self) else 0.0

    def blocks(self) -> Iterator[Integers]:
        """Yield the ids of each request's prefix blocks; nothing for a trace without them."""
        if self.block_ids is not None and self.block_start is not None:
            for first, last in pairwise(self.block_start):
                yield self.block_ids[first:last]


LONGEST_REQUEST = 100_000_000  # tokens; ten times the longest context anyone offers
