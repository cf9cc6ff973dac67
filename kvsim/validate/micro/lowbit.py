"""Attention over a packed cache, unpacked by the kernel that attends."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kvsim.engine.formats import Format
from kvsim.graph import Op
from kvsim.validate.kernels.attention import View, attend
from kvsim.validate.kernels.stores import By, Store
from kvsim.validate.micro.attention import HEADS, Shape
from kvsim.validate.micro.place import Bench, Call, Work

GROUP = 32
MOST_ON_CPU = 2**24  # numbers that the plain twin widens in a tenth of a second


def works(place: Bench) -> Iterator[Work]:
    """Decoding and verification over batches and contexts."""
    longest = 8192 if place.on_cpu else 65536
    contexts = place.either((256, longest), (256, 1024, 4096, longest))
    for bits in place.either((4,), (2, 4, 8)):
        for heads in HEADS[:2]:
            for batch in place.either((1, 4), (1, 4, 16)):
                for tokens in contexts:
                    yield from _work(place, Shape(batch, *heads, tokens), bits)
            for tokens in contexts[1:]:
                yield from _work(place, Shape(1, *heads, tokens, new=5), bits)


def _work(place: Bench, shape: Shape, bits: int) -> Iterator[Work]:
    moved = shape.kv_numbers * Format(bits, GROUP).number + shape.query_bytes
    if place.fits(moved) and not (place.on_cpu and shape.kv_numbers > MOST_ON_CPU):
        op = Op(
            "attn",
            kernel="lowbit",
            flops=shape.flops,
            bytes={"hbm": float(moved)},
            size=float(shape.new),
        )
        yield Work(shape.case | {"bits": bits}, op, lambda: _calls(place, shape, bits))


@contextmanager
def _calls(place: Bench, shape: Shape, bits: int) -> Iterator[Sequence[Call]]:
    s = shape
    counts = torch.full((s.batch,), s.tokens, dtype=torch.int32, device=place.device)

    def inputs() -> tuple[Tensor, Store, Store]:
        q = place.random(s.batch, s.heads, s.new, s.dim)
        return q, store(place, s, bits, "channel"), store(place, s, bits, "token")

    def call(q: Tensor, k: Store, v: Store) -> Call:
        view = View(counts, k, v, counts, counts)
        return lambda: attend(q, view)

    first = inputs()
    _, k, v = first
    read = [k.codes, k.scale, k.zero, v.codes, v.scale, v.zero]
    yield [call(*each) for each in place.turns(first, read, inputs)]


def store(place: Bench, shape: Shape, bits: int, by: By) -> Store:
    """Packed keys (by channel) or values (by token) of every sequence and KV head."""
    codes = place.codes(shape.batch, shape.kv_heads, shape.tokens, shape.dim * bits // 8)
    table = (
        (-(-shape.tokens // GROUP), shape.dim)
        if by == "channel"
        else (shape.tokens, shape.dim // GROUP)
    )
    scale, zero = (
        place.random(shape.batch, shape.kv_heads, *table, dtype=torch.float16) for _ in range(2)
    )
    return Store(codes, scale, zero, bits, GROUP, by)
