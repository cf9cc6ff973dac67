"""The device's memory: read, written and copied, beyond its cache and within it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from kvsim.graph import Op
from kvsim.validate.micro.place import Call, Place, Work

WAYS = ("read", "write", "copy")


def works(place: Place) -> Iterator[Work]:
    """Sizes from four caches up, and one that fits a cache."""
    large = place.either((4, 6, 8), (4, 6, 8, 12, 16, 24))
    for moved in [place.cache // 4, *(caches * place.cache for caches in large)]:
        if place.fits(2 * moved):
            yield from _sized(place, moved)


def _sized(place: Place, moved: int) -> Iterator[Work]:
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
