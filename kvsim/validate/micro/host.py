"""The host: its memory, its arithmetic, and attention over a cache that stays there."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from kvsim.graph import Op
from kvsim.validate.micro import attention, memory
from kvsim.validate.micro.place import Bench, Call, Work

HERE = torch.device("cpu")
CACHE = 2**25  # a usual last-level cache [B]


def reads(place: Bench) -> Iterator[Work]:
    """Host memory, far beyond its caches."""
    for work in memory.works(on_host(place)):
        if work.case["cached"] == "no":
            op = replace(work.op, stream="cpu", bytes={"dram": work.op.bytes["hbm"]})
            yield replace(work, op=op)


def products(place: Bench) -> Iterator[Work]:
    """Square products in fp32."""
    for width in place.either((256, 512, 1024), (256, 512, 768, 1024, 1536, 2048)):
        op = Op("product", "cpu", "cpu", flops=2.0 * width**3, dtype="fp32")
        yield Work({"width": width}, op, partial(_product, width))


def attends(place: Bench) -> Iterator[Work]:
    """Decode attention over fp32 keys and values: what FastDecode leaves to the host."""
    here = on_host(place)
    for shape in attention.shapes(here):
        moved = float(2 * shape.kv_numbers * attention.NUMBER)
        if shape.new == 1 and here.fits(moved):
            op = Op("attn", "cpu", "cpu", flops=shape.flops, bytes={"dram": moved}, dtype="fp32")
            yield Work(shape.case, op, partial(_attend, here, shape))


def on_host(place: Bench) -> Bench:
    """The same limits for the host's memory."""
    return replace(place, device=HERE, cache=place.cache if place.on_cpu else CACHE)


@contextmanager
def _product(width: int) -> Iterator[Sequence[Call]]:
    x, w = (torch.randn(width, width) for _ in range(2))
    yield [lambda: x @ w]


@contextmanager
def _attend(place: Bench, s: attention.Shape) -> Iterator[Sequence[Call]]:
    def inputs() -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.float32
        k, v = (place.random(s.batch, s.kv_heads, s.tokens, s.dim, dtype=wide) for _ in "kv")
        return place.random(s.batch, s.heads, s.new, s.dim, dtype=wide), k, v

    def call(q: Tensor, k: Tensor, v: Tensor) -> Call:
        return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)

    grouped = s.heads != s.kv_heads
    first = inputs()
    yield [call(*each) for each in place.turns(first, first, inputs)]
