"""The device's memory: read, written and copied, beyond its cache and within it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from kvsim.graph import Op
from kvsim.validate.micro.place import Bench, Call, Work

WAYS = ("read", "write", "copy")


LARGE = 2**28  # caches from which on fewer multiples of them are measured [B]


def works(place: Bench) -> Iterator[Work]:
    """Sizes beyond the cache, and one that fits it.

    From four caches up where memory allows it, else what lies between two caches and the most that
    a copy, which needs twice its size, can take.
    """
    most = place.memory / 2 / place.cache
    wanted = place.either((4.0, 6.0, 8.0), (4.0, 6.0, 8.0, 12.0, 16.0, 24.0))
    large = [caches for caches in wanted if caches <= most / 2]  # with room for another set
    if place.cache > LARGE or len(large) < 3:
        top = min(most, 3.0 if place.cache > LARGE else 8.0)
        large = [2.0, (2.0 + top) / 2, top] if top > 2.0 else [2.0] * (top == 2.0)
    for moved in [place.cache // 4, *(int(caches * place.cache) // 4 * 4 for caches in large)]:
        yield from _sized(place, moved)


def _sized(place: Bench, moved: int) -> Iterator[Work]:
    cached = "yes" if moved < place.cache else "no"
    for way in WAYS:
        count = 2 * moved if way == "copy" else moved
        case = {"way": way, "bytes": moved, "cached": cached}
        op = Op(f"memory_{way}", bytes={"hbm": float(count)})
        yield Work(case, op, partial(_calls, place.device, way, moved))


@contextmanager
def _calls(device: torch.device, way: str, moved: int) -> Iterator[Sequence[Call]]:
    yield [use(way, torch.ones(moved // 4, device=device))]


def use(way: str, numbers: Tensor) -> Call:
    """What reads, writes or copies fp32 numbers once."""
    if way == "read":
        return numbers.sum
    if way == "write":
        return lambda: numbers.fill_(2.0)
    target = torch.empty_like(numbers)
    return lambda: target.copy_(numbers)
