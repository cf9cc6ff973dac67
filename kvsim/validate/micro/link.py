"""The link between host and device: copies over sizes, pinned and pageable, each way and both.

On a CPU the link is a copy between two pools of memory by a second thread.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from kvsim.graph import Channel, Op, Stream
from kvsim.validate.micro.place import Bench, Call, Work
from kvsim.validate.transfer import Lane, Transfers

SIZES = (2**12, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26)
LARGE = 2**28
QUICK_SIZES = (2**12, 2**16, 2**20, 2**24)


def h2d(place: Bench) -> Iterator[Work]:
    """Copies from the host to the device."""
    yield from _one_way(place, "h2d")


def d2h(place: Bench) -> Iterator[Work]:
    """Copies from the device to the host."""
    yield from _one_way(place, "d2h")


def duplex(place: Bench) -> Iterator[Work]:
    """Both directions at once; what is told are the bytes of one."""
    for moved in place.either((2**24,), (2**22, 2**24, 2**26)):
        op = _op("duplex", "h2d", moved)
        yield Work({"bytes": moved}, op, partial(_both, place, moved), "lanes")


def _one_way(place: Bench, link: Channel) -> Iterator[Work]:
    sizes = place.either(QUICK_SIZES, SIZES) + (() if place.on_cpu or place.quick else (LARGE,))
    for memory in ("pinned",) if place.on_cpu else ("pinned", "pageable"):
        for moved in sizes:
            if place.fits(2 * moved):
                case = {"memory": memory, "bytes": moved}
                make = partial(_calls, place, link, moved, memory == "pinned")
                yield Work(case, _op(link, link, moved), make, "lanes")


def _op(name: str, link: Channel, moved: float) -> Op:
    """As ``kvsim.engine.ops.copy`` states it."""
    stream: Stream = "h2d" if link == "h2d" else "d2h"
    through: tuple[Channel, ...] = (link, "hbm", "dram")
    return Op(name, stream, "copy", bytes=dict.fromkeys(through, moved))


@contextmanager
def _calls(place: Bench, link: Channel, moved: int, pinned: bool) -> Iterator[Sequence[Call]]:
    with lanes(place) as transfers:
        lane = transfers.h2d if link == "h2d" else transfers.d2h

        def inputs() -> tuple[Tensor, Tensor]:
            return ends(place, link, moved, pinned)

        first = inputs()
        sets = place.turns(first, first, inputs)
        yield [send(transfers, lane, copier(*pair)) for pair in sets]


@contextmanager
def _both(place: Bench, moved: int) -> Iterator[Sequence[Call]]:
    with lanes(place) as transfers:
        to, back = (copier(*ends(place, link, moved, True)) for link in ("h2d", "d2h"))

        def call() -> None:
            begin = transfers.mark()
            marks = [transfers.h2d(to, begin), transfers.d2h(back, begin)]
            for mark in marks:
                mark.wait()

        yield [call]


def ends(place: Bench, link: Channel, moved: int, pinned: bool) -> tuple[Tensor, Tensor]:
    """Target and source of a copy."""
    there = torch.ones(moved, dtype=torch.uint8, device=place.device)
    here = torch.ones(moved, dtype=torch.uint8, pin_memory=pinned and not place.on_cpu)
    return (there, here) if link == "h2d" else (here, there)


def copier(target: Tensor, source: Tensor) -> Callable[[], None]:
    """A function that starts the copy once."""

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    return copy


def send(transfers: Transfers, lane: Lane, work: Callable[[], None]) -> Call:
    """Queue work on a lane behind what compute was asked to do, and let compute wait for it."""
    return lambda: lane(work, transfers.mark()).wait()


@contextmanager
def lanes(place: Bench) -> Iterator[Transfers]:
    """Lanes for as long as something is timed."""
    transfers = Transfers(place.device)
    try:
        yield transfers
    finally:
        transfers.close()
