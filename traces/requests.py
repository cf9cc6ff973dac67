"""A trace as columns: when requests arrive, how long they are, which prefixes they share."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import InputError

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


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

    Raises
    ------
    InputError
        If columns differ in length, arrivals are not finite or descend, or a length is below 1.
    """

    arrival: Floats
    prompt: Integers
    generate: Integers
    block_ids: Integers | None = None
    block_start: Integers | None = None
    block_tokens: int = 0

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

    def _freeze(self, name: str, kind: type, length: int) -> None:
        column: NDArray[Any] = np.asarray(getattr(self, name), dtype=kind).view()
        if column.shape != (length,):
            raise InputError(f"{name}: shape {column.shape}; expected ({length},)")
        column.flags.writeable = False
        object.__setattr__(self, name, column)

    def __len__(self) -> int:
        return len(self.arrival)

    def __getitem__(self, rows: slice) -> "Requests":
        """Consecutive requests, `trace[a:b]`; arrivals and block ids stay as they are."""
        first, last, step = rows.indices(len(self))
        if step != 1:
            raise InputError(f"slice step {step}: expected consecutive requests")
        last = max(first, last)
        part = {name: getattr(self, name)[first:last] for name in ("arrival", "prompt", "generate")}
        if self.block_ids is None or self.block_start is None:
            return Requests(**part)
        start = self.block_start[first : last + 1]
        ids = self.block_ids[start[0] : start[-1]]
        return Requests(**part, block_ids=ids, block_start=start - start[0],
                        block_tokens=self.block_tokens)  # fmt: skip

    def take(self, rows: Integers, arrival: Floats | None = None) -> "Requests":
        """Some requests by their numbers; block ids stay as they are.

        Parameters
        ----------
        arrival : when they arrive, if not when they did; then numbers need not ascend. [s]
        """
        part = {name: getattr(self, name)[rows] for name in ("prompt", "generate")}
        part["arrival"] = self.arrival[rows] if arrival is None else arrival
        if self.block_ids is None or self.block_start is None:
            return Requests(**part)
        count = np.diff(self.block_start)[rows]
        start = np.concatenate([[0], np.cumsum(count)])
        place = np.arange(start[-1]) + np.repeat(self.block_start[rows] - start[:-1], count)
        return Requests(**part, block_ids=self.block_ids[place], block_start=start,
                        block_tokens=self.block_tokens)  # fmt: skip

    def head(self, count: int) -> "Requests":
        """The first `count` requests, or all if there are fewer."""
        return self[: max(count, 0)]

    def between(self, start: float, end: float) -> "Requests":
        """Requests that arrive in [start, end). [s]"""
        first, last = np.searchsorted(self.arrival, [start, end], side="left")
        return self[int(first) : int(last)]

    def scaled(self, rate_factor: float) -> "Requests":
        """The same requests at `rate_factor` times the rate: arrivals divided by it."""
        if not (np.isfinite(rate_factor) and rate_factor > 0):
            raise InputError(f"rate factor {rate_factor}: expected a number above 0")
        return replace(self, arrival=self.arrival / rate_factor)

    @property
    def duration(self) -> float:
        """From the first arrival to the last; 0 for fewer than two requests. [s]"""
        return float(self.arrival[-1] - self.arrival[0]) if len(self) else 0.0

    def blocks(self) -> Iterator[Integers]:
        """Each request's prefix blocks in turn; nothing for a trace without them."""
        if self.block_ids is not None and self.block_start is not None:
            for first, last in pairwise(self.block_start):
                yield self.block_ids[first:last]
