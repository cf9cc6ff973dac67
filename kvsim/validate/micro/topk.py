"""Softmax over attention scores and the choice of the largest."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from kvsim.engine.ops import SCORE
from kvsim.graph import Op
from kvsim.validate.kernels.attention import score_dtype
from kvsim.validate.kernels.topk import softmax_top_k
from kvsim.validate.micro.attention import HEADS
from kvsim.validate.micro.place import Bench, Call, Work


def works(place: Bench) -> Iterator[Work]:
    """Batches of scores over contexts, 64 tokens chosen per KV head."""
    for heads, kv_heads, _ in HEADS[:2]:
        for batch in place.either((1, 8), (1, 4, 16)):
            for tokens in place.either((512, 8192), (512, 2048, 8192, 32768)):
                scores = batch * heads * tokens
                case = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "tokens": tokens}
                op = Op("topk", kernel="topk", bytes={"hbm": SCORE * scores})
                sizes = (batch, heads, kv_heads, tokens)
                yield Work(case, op, partial(_calls, place, *sizes))


@contextmanager
def _calls(
    place: Bench, batch: int, heads: int, kv_heads: int, tokens: int
) -> Iterator[Sequence[Call]]:
    eligible = torch.full((batch,), tokens, dtype=torch.int32, device=place.device)
    dtype = score_dtype(torch.empty(0, dtype=place.half))

    def logits() -> Tensor:
        return place.random(batch, heads, tokens, dtype=dtype)

    def call(one: Tensor) -> Call:
        return lambda: softmax_top_k(one, kv_heads, 64, eligible)

    first = logits()
    yield [call(one) for one in place.turns(first, [first], logits)]
