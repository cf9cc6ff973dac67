"""Rows gathered inside the device's memory by index."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from kvsim.graph import Op
from kvsim.validate.micro.place import Bench, Call, Work

NUMBER = 2  # [B]


def works(place: Bench) -> Iterator[Work]:
    """Rows of one head's keys or values, a sixteenth of those there are."""
    for dim in place.either((128,), (64, 128)):
        for rows in place.either((64, 2048, 8192, 32768), (64, 256, 1024, 4096, 16384, 65536)):
            moved = 2.0 * rows * dim * NUMBER
            if place.fits(16 * moved):
                case = {"rows": rows, "dim": dim}
                op = Op("gather", kernel="gather", bytes={"hbm": moved})
                yield Work(case, op, partial(_calls, place, rows, dim))


@contextmanager
def _calls(place: Bench, rows: int, dim: int) -> Iterator[Sequence[Call]]:
    def inputs() -> tuple[Tensor, Tensor]:
        index = torch.randint(16 * rows, (rows,), device=place.device)
        return place.random(16 * rows, dim), index

    first = inputs()
    sets = place.turns(first, first, inputs)
    yield [partial(torch.index_select, source, 0, index) for source, index in sets]
