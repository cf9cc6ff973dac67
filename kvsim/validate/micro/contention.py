"""Copies beside compute: what both take together, and each alone."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kvsim.graph import Channel, Number, Op
from kvsim.validate.micro import gemm, memory
from kvsim.validate.micro.link import copier, ends, lanes, send
from kvsim.validate.micro.place import Bench, Call, Work

INPUTS, OUTPUTS = 4096, 4096
COPIES = (2**24, 2**25, 3 * 2**24, 2**26, 5 * 2**24)


def works(place: Bench) -> Iterator[Work]:
    """Products that take longer than the copy, and reads of the device's memory."""
    rows = 32 if place.on_cpu else 4096
    for copied in place.either(COPIES[:2], COPIES):
        for compute in ("gemm", "memory"):
            pair = f"{compute} beside {copied} B"
            repeats = copied // (2**24 if place.on_cpu else 2**22)
            op = _busy(place, compute, rows, repeats)
            for way in ("copy", "compute", "both"):
                case = {"pair": pair, "compute": compute, "way": way, "bytes": copied}
                make = partial(_calls, place, way, compute, rows, copied, repeats)
                yield Work(case, _copied(copied) if way == "copy" else op, make, "lanes")


def _busy(place: Bench, compute: str, rows: int, repeats: int) -> Op:
    """All of what computes."""
    if compute == "memory":
        return Op("memory_read", bytes={"hbm": 2.0 * place.cache * repeats}, launches=repeats)
    one = gemm.product(place, "fp16", rows, INPUTS, OUTPUTS).op
    moved: dict[Channel, Number] = {"hbm": repeats * one.bytes["hbm"]}
    return replace(one, flops=repeats * one.flops, bytes=moved, launches=float(repeats))


def _copied(copied: int) -> Op:
    return Op("copy", "h2d", "copy", bytes={c: float(copied) for c in ("h2d", "hbm", "dram")})


@contextmanager
def _calls(
    place: Bench, way: str, compute: str, rows: int, copied: int, repeats: int
) -> Iterator[Sequence[Call]]:
    with lanes(place) as transfers:
        copy = copier(*ends(place, "h2d", copied, True))
        busy = _compute(place, compute, rows, repeats)

        def both() -> None:
            mark = transfers.h2d(copy, transfers.mark())
            busy()
            mark.wait()

        calls = {"copy": send(transfers, transfers.h2d, copy), "compute": busy, "both": both}
        yield [calls[way]]


def _compute(place: Bench, kind: str, rows: int, repeats: int) -> Call:
    if kind == "memory":
        numbers: Tensor = place.random(2 * place.cache // 4, dtype=torch.float32)
        one = memory.use("read", numbers)
    else:
        x, w = place.random(rows, INPUTS), place.random(OUTPUTS, INPUTS)
        one = partial(_product, x, w)

    def call() -> None:
        for _ in range(repeats):
            one()

    return call


def _product(tensor: Tensor, w: Tensor) -> Tensor:
    return tensor @ w.t()
