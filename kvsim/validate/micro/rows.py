"""Scattered rows fetched from host memory: gathered there and copied, or read row by row."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from kvsim.graph import Op
from kvsim.validate.kernels.gather import gather
from kvsim.validate.micro.link import lanes, send
from kvsim.validate.micro.place import Bench, Call, Work

NUMBER = 2  # [B]
SCARCE = 16  # rows there are per row that is fetched


def works(place: Bench) -> Iterator[Work]:
    """Rows of several widths; ``gathered`` is the kernel that techniques use."""
    for dim in place.either((64,), (32, 64, 128)):
        for rows in place.either((128, 1024, 8192, 32768), (128, 512, 2048, 8192, 32768)):
            moved = 2.0 * rows * dim * NUMBER
            if not place.fits(SCARCE * moved):
                continue
            for way in ("gathered", "selected, then copied"):
                fetched = 2.0 * rows if way == "gathered" else 0.0
                op = Op(
                    "rows",
                    "h2d",
                    "copy",
                    rows=fetched,
                    bytes={"h2d": moved, "hbm": moved, "dram": moved},
                )
                case = {"way": way, "rows": rows, "dim": dim}
                yield Work(case, op, partial(_calls, place, way, rows, dim), "lanes")


@contextmanager
def _calls(place: Bench, way: str, rows: int, dim: int) -> Iterator[Sequence[Call]]:
    with lanes(place) as transfers:

        def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
            homes = (place.random(1, 1, SCARCE * rows, dim).cpu() for _ in "kv")
            k, v = (h if place.on_cpu else h.pin_memory() for h in homes)
            index = torch.randint(SCARCE * rows, (1, 1, rows), device=place.device)
            return k, v, index, place.random(2, 1, 1, rows, dim)

        def call(k: Tensor, v: Tensor, index: Tensor, out: Tensor) -> Call:
            if way == "gathered":
                fetch = partial(_gather, k, v, index, out)
                return send(transfers, transfers.h2d, fetch)
            return partial(_select, k, v, index, out)

        first = inputs()
        yield [call(*each) for each in place.turns(first, first[:2], inputs)]


def _gather(keys: Tensor, values: Tensor, index: Tensor, out: Tensor) -> None:
    gather(keys, values, index, out[0], out[1])


def _select(keys: Tensor, values: Tensor, index: Tensor, out: Tensor) -> None:
    """The host has to know the indices, which synchronises."""
    there = index[0, 0].cpu()
    for home, target in ((keys, out[0]), (values, out[1])):
        target[0, 0].copy_(home[0, 0].index_select(0, there), non_blocking=True)
