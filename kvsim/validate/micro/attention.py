"""Attention over a cache in 16 bits: decoding, verification and prompts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from kvsim.frozen import frozen
from kvsim.graph import Op
from kvsim.validate.counter import OpRecord
from kvsim.validate.micro.place import Bench, Call, Work
from kvsim.validate.model.attention import Seen, attend

HEADS = ((9, 3, 64), (32, 32, 128), (32, 8, 128))
"""Heads, KV heads and head dim of SmolLM2-135M, Llama-2-7B and Llama-3-8B."""
NUMBER = 2  # [B]


@frozen
class Shape:
    """New tokens of some sequences, and the tokens they attend to, themselves included."""

    batch: int
    heads: int
    kv_heads: int
    dim: int
    tokens: int
    new: int = 1

    @property
    def pairs(self) -> float:
        """Query-key pairs per head and sequence."""
        past = self.tokens - self.new
        return self.new * past + self.new * (self.new + 1) / 2

    @property
    def flops(self) -> float:
        """Of scores and values. [FLOP]"""
        return 4.0 * self.batch * self.heads * self.dim * self.pairs

    @property
    def kv_numbers(self) -> int:
        """Numbers in the keys and values of the whole batch."""
        return 2 * self.batch * self.kv_heads * self.dim * self.tokens

    @property
    def query_bytes(self) -> int:
        """Queries and what comes out. [B]"""
        return 2 * NUMBER * self.batch * self.heads * self.dim * self.new

    @property
    def case(self) -> dict[str, object]:
        """What tells it from others."""
        return {
            "batch": self.batch,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "dim": self.dim,
            "tokens": self.tokens,
            "new": self.new,
        }


def shapes(place: Bench) -> Iterator[Shape]:
    """Decoding over batches and contexts, drafts to verify, prompts."""
    longest = 16384 if place.on_cpu else 131072
    contexts = place.either((256, 2048, longest), (256, 1024, 4096, longest // 2, longest))
    for heads in HEADS[: place.either(2, 3)]:
        for batch in place.either((1, 4), (1, 4, 16)):
            for tokens in contexts:
                yield Shape(batch, *heads, tokens)
        for tokens in place.either((2048,), (512, 2048, 8192)):
            yield Shape(1, *heads, tokens, new=5)
        for tokens in place.either((128, 512), (64, 128, 256, 512, 1024, 2048)):
            yield Shape(place.either(1, 2), *heads, tokens, new=tokens)


def works(place: Bench) -> Iterator[Work]:
    """As a decoder runs them."""
    for shape in shapes(place):
        moved = float(NUMBER * shape.kv_numbers + shape.query_bytes)
        if place.fits(moved) and shape.flops <= place.most_flops / 10:
            op = Op(
                "attn",
                kernel="prompt" if shape.new == shape.tokens else "attention",
                flops=shape.flops,
                bytes={"hbm": moved},
                size=float(shape.new),
            )
            yield Work(shape.case, op, partial(_calls, place, shape))


@contextmanager
def _calls(place: Bench, shape: Shape) -> Iterator[Sequence[Call]]:
    s = shape

    def inputs() -> tuple[Tensor, Tensor, Tensor]:
        q = place.random(s.batch, s.heads, s.new, s.dim)
        k, v = (place.random(s.batch, s.kv_heads, s.tokens, s.dim) for _ in "kv")
        return q, k, v

    def call(q: Tensor, k: Tensor, v: Tensor) -> Call:
        seen: Seen = "all" if s.new == 1 else "causal" if s.new == s.tokens else _mask(q, s)
        return lambda: attend(OpRecord(), q, k, v, seen)

    first = inputs()
    yield [call(*each) for each in place.turns(first, first, inputs)]


def _mask(q: Tensor, shape: Shape) -> Tensor:
    keys, queries = (torch.arange(n, device=q.device) for n in (shape.tokens, shape.new))
    return (keys <= queries[:, None] + (shape.tokens - shape.new))[None, None]
