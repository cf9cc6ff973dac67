"""Benchmarks of attention: over 16 bits, over packed rows, packing itself, and top-k of scores."""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor

from kvsim.engine.formats import Format
from kvsim.engine.ops import SCORE
from kvsim.frozen import frozen
from kvsim.graph import Op
from kvsim.validate.bench import compute
from kvsim.validate.bench.work import Bench, Call, Work
from kvsim.validate.counter import OpRecord
from kvsim.validate.kernels.attention import attend as attend_packed
from kvsim.validate.kernels.quantise import quantise
from kvsim.validate.kernels.stores import By, Store, View, score_dtype
from kvsim.validate.kernels.topk import softmax_top_k
from kvsim.validate.model.attention import Seen, attend
from kvsim.validate.techniques.fp8 import Narrow

ATTENTION_HEADS = ((9, 3, 64), (32, 32, 128), (32, 8, 128))
"""Heads, KV heads and head dim of SmolLM2-135M, Llama-2-7B and Llama-3-8B."""
FP16_BYTES = 2  # [B]


@frozen
class Shape:
    """Sizes of an attention benchmark.

    Attributes
    ----------
    batch
        Sequences.
    heads, kv_heads, dim
        Query heads, KV heads, and dimension of a head.
    tokens
        Tokens of each sequence, new ones included. [tokens]
    new
        New tokens of each sequence. [tokens]
    """

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
        """FLOPs of the attention scores and of the weighted sum of values. [FLOP]"""
        return 4.0 * self.batch * self.heads * self.dim * self.pairs

    @property
    def kv_numbers(self) -> int:
        """Number of elements in the keys and values of the whole batch."""
        return 2 * self.batch * self.kv_heads * self.dim * self.tokens

    @property
    def query_bytes(self) -> int:
        """Size of the queries and the output in 16 bits. [B]"""
        return 2 * FP16_BYTES * self.batch * self.heads * self.dim * self.new

    @property
    def case(self) -> dict[str, object]:
        """The sizes by name, as they are recorded with the sample."""
        return asdict(self)


def shapes(place: Bench) -> Iterator[Shape]:
    """Yield the sizes to measure: decoding at several batches and contexts, drafts, and prompts."""
    if not place.on_cpu:
        yield from _gpu_shapes(place)
        return
    contexts = place.pick((256, 2048, 16384), (256, 1024, 4096, 8192, 16384))
    for heads in ATTENTION_HEADS[: place.pick(2, 3)]:
        for batch in place.pick((1, 4), (1, 4, 16)):
            for tokens in contexts:
                yield Shape(batch, *heads, tokens)
        for tokens in place.pick((2048,), (512, 2048, 8192)):
            yield Shape(1, *heads, tokens, new=5)
        for tokens in place.pick((128, 512), (64, 128, 256, 512, 1024, 2048)):
            yield Shape(place.pick(1, 2), *heads, tokens, new=tokens)


def _gpu_shapes(place: Bench) -> Iterator[Shape]:
    """Yield shapes of served models, in which prefill of 64-channel heads runs at half the rate."""
    for heads in reversed(ATTENTION_HEADS[place.pick(1, 0) :]):
        for batch in place.pick((1, 8), (1, 4, 16)):
            for tokens in place.pick((256, 8192, 131072), (256, 1024, 8192, 65536, 131072)):
                yield Shape(batch, *heads, tokens)
        yield Shape(1, *heads, 8192, new=5)
        if heads[2] >= SERVED_DIM:
            for tokens in place.pick((512, 2048, 8192), (128, 512, 1024, 2048, 8192, 16384)):
                yield Shape(1, *heads, tokens, new=tokens)


SERVED_DIM = 128  # channels of a head


def attention_works(place: Bench) -> Iterator[Work]:
    """Yield benchmarks of attention; decoding on a GPU also with a mask, and over fp8 caches."""
    for shape in shapes(place):
        decoding = not place.on_cpu and shape.new < shape.tokens
        kernels = ["prompt" if shape.new == shape.tokens else "attention"]
        if decoding:
            kernels = ["attention", "attention-masked"] if shape.new == 1 else ["attention-masked"]
            kernels += ["attention-fp8"] if "fp8" in compute.formats(place) else []
        for kernel in kernels:
            width = 1 if kernel == "attention-fp8" else FP16_BYTES
            moved = float(width * shape.kv_numbers + shape.query_bytes)
            if place.fits(moved) and shape.flops <= place.most_flops / 10:
                op = Op(
                    "attn", kernel=kernel, flops=shape.flops, bytes={"hbm": moved},
                    size=float(shape.new),
                )  # fmt: skip
                case = shape.case | ({"kernel": kernel} if decoding else {})
                inputs = partial(_attention_inputs, place, shape, kernel)
                yield Work(place, case, op, inputs, partial(_attention_call, shape, kernel))


def _attention_inputs(place: Bench, s: Shape, kernel: str) -> tuple[Tensor, ...]:
    q = place.random(s.batch, s.heads, s.new, s.dim)
    k, v = (place.random(s.batch, s.kv_heads, s.tokens, s.dim) for _ in "kv")
    if kernel == "attention-fp8":
        k, v = (Narrow().encode(numbers)[0] for numbers in (k, v))
    return q, k, v


def _attention_call(s: Shape, kernel: str, q: Tensor, k: Tensor, v: Tensor) -> Call:
    if kernel == "attention-fp8":
        ends = torch.full((s.batch,), s.tokens, dtype=torch.int32, device=q.device)
        store = Narrow().store
        view = View(ends, store([k]), store([v]), ends, ends, most=s.tokens)
        return partial(attend_packed, q, view)
    whole: Seen = "all" if s.new == 1 else "causal"
    masked = kernel == "attention-masked" or 1 < s.new < s.tokens
    return partial(attend, OpRecord(), q, k, v, _mask(q, s) if masked else whole)


def _mask(q: Tensor, shape: Shape) -> Tensor:
    keys, queries = (torch.arange(n, device=q.device) for n in (shape.tokens, shape.new))
    return (keys <= queries[:, None] + (shape.tokens - shape.new))[None, None]


PACKED_GROUP = 32
MOST_ON_CPU = 2**24  # numbers that the plain twin widens in a tenth of a second


def packed_attention_works(place: Bench) -> Iterator[Work]:
    """Yield benchmarks of attention over packed caches, in decoding and in verifying drafts."""
    longest = 8192 if place.on_cpu else 65536
    contexts = place.pick((256, longest), (256, 1024, 4096, longest))
    for bits in place.pick((4,), (2, 4, 8)):
        for heads in ATTENTION_HEADS[:2]:
            for batch in place.pick((1, 4), (1, 4, 16)):
                for tokens in contexts:
                    yield from _work(place, Shape(batch, *heads, tokens), bits)
            for tokens in contexts[1:]:
                yield from _work(place, Shape(1, *heads, tokens, new=5), bits)


def _work(place: Bench, shape: Shape, bits: int) -> Iterator[Work]:
    moved = shape.kv_numbers * Format(bits, PACKED_GROUP).number + shape.query_bytes
    if place.fits(moved) and not (place.on_cpu and shape.kv_numbers > MOST_ON_CPU):
        op = Op(
            "attn",
            kernel="lowbit",
            flops=shape.flops,
            bytes={"hbm": float(moved)},
            size=float(shape.new),
            unpacked=float(shape.kv_numbers),
        )
        inputs = partial(_packed_inputs, place, shape, bits)
        yield Work(place, shape.case | {"bits": bits}, op, inputs, _packed_call)


def _packed_inputs(place: Bench, s: Shape, bits: int) -> tuple[Tensor, Store, Store]:
    q = place.random(s.batch, s.heads, s.new, s.dim)
    return q, store(place, s, bits, "channel"), store(place, s, bits, "token")


def _packed_call(q: Tensor, k: Store, v: Store) -> Call:
    counts = torch.full((len(q),), k.rows, dtype=torch.int32, device=q.device)
    return partial(attend_packed, q, View(counts, k, v, counts, counts))


def store(place: Bench, shape: Shape, bits: int, by: By) -> Store:
    """Allocate random packed keys or values of every sequence and KV head.

    Parameters
    ----------
    shape
        Sizes of the benchmark.
    by
        Whether scales are per "channel" (keys) or per "token" (values).
    """
    codes = place.codes(shape.batch, shape.kv_heads, shape.tokens, shape.dim * bits // 8)
    table = (
        (-(-shape.tokens // PACKED_GROUP), shape.dim)
        if by == "channel"
        else (shape.tokens, shape.dim // PACKED_GROUP)
    )
    scale, zero = (
        place.random(shape.batch, shape.kv_heads, *table, dtype=torch.float16) for _ in range(2)
    )
    return Store(codes, scale, zero, bits, PACKED_GROUP, by)


def topk_works(place: Bench) -> Iterator[Work]:
    """Yield benchmarks of selecting the 64 largest attention scores per KV head."""
    logits = score_dtype(torch.empty(0, dtype=place.half))
    for heads, kv_heads, _ in ATTENTION_HEADS[:2]:
        for batch in place.pick((1, 8), (1, 4, 16)):
            for tokens in place.pick((512, 8192), (512, 2048, 8192, 32768)):
                scores = batch * heads * tokens
                case = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "tokens": tokens}
                op = Op("topk", kernel="topk", bytes={"hbm": SCORE * scores})
                numbers = partial(place.random, batch, heads, tokens, dtype=logits)
                call = partial(_topk_call, kv_heads)
                yield Work(place, case, op, numbers, call)


def _topk_call(kv_heads: int, logits: Tensor) -> Call:
    batch, _, tokens = logits.shape
    eligible = torch.full((batch,), tokens, dtype=torch.int32, device=logits.device)
    return partial(softmax_top_k, logits, kv_heads, 64, eligible)


KV_HEADS = ((3, 64), (32, 128))


def packing_works(place: Bench) -> Iterator[Work]:
    """Yield benchmarks of quantising prompts and single tokens, as keys and as values."""
    for bits in place.pick((4,), (2, 4, 8)):
        for kv_heads, dim in KV_HEADS:
            for tokens in place.pick((32, 2048), (32, 256, 2048, 8192)):
                numbers = kv_heads * dim * tokens
                moved = numbers * (FP16_BYTES + Format(bits, PACKED_GROUP).number)
                if not place.fits(moved) or (place.on_cpu and numbers > MOST_ON_CPU):
                    continue
                for way in ("pack by channel", "pack by token", "widen"):
                    case = {"way": way, "bits": bits, "kv_heads": kv_heads, "tokens": tokens}
                    op = Op("quantise", kernel="quantise", bytes={"hbm": float(moved)})
                    inputs = partial(_packing_inputs, place, way, bits, (1, kv_heads, tokens, dim))
                    yield Work(place, case, op, inputs, partial(_packing_call, place, way, bits))


def _packing_inputs(place: Bench, way: str, bits: int, shape: tuple[int, ...]) -> Tensor | Store:
    numbers = place.random(*shape)
    return quantise(numbers, bits, PACKED_GROUP, "token") if way == "widen" else numbers


def _packing_call(place: Bench, way: str, bits: int, numbers: Tensor | Store) -> Call:
    if isinstance(numbers, Store):
        return lambda: numbers.numbers().to(place.half)
    by: By = "channel" if way.endswith("channel") else "token"
    return partial(quantise, numbers, bits, PACKED_GROUP, by)
