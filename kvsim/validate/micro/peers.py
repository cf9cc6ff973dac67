"""Copies between two GPUs, where there are two."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from kvsim.graph import Op
from kvsim.validate.micro.place import Bench, Call, Work


def works(place: Bench) -> Iterator[Work]:
    """From the device to another one."""
    if place.on_cpu or torch.cuda.device_count() < 2:
        return
    other = next(i for i in range(torch.cuda.device_count()) if i != place.device.index)
    for moved in place.either((2**16, 2**26), (2**12, 2**16, 2**20, 2**24, 2**28)):
        op = Op("peer", kernel="allreduce", bytes={"link": float(moved)})
        yield Work({"bytes": moved}, op, partial(_calls, place, other, moved))


@contextmanager
def _calls(place: Bench, other: int, moved: int) -> Iterator[Sequence[Call]]:
    source = torch.ones(moved, dtype=torch.uint8, device=place.device)
    target = torch.ones(moved, dtype=torch.uint8, device=torch.device("cuda", other))
    yield [lambda: target.copy_(source, non_blocking=True)]
