"""Attention over a cache: what it reads, computes and keeps resident.

All techniques attend through ``ops``; they differ in the format they read, in the tokens they see
and in what they add around it.
"""

from dataclasses import replace

import numpy as np

from kvsim.engine.formats import FP16, Format
from kvsim.engine.ops import HALF, gemm, kv_bytes
from kvsim.graph import Number, Op, Point
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Kernel
from kvsim.models.model import LayerShape, Model

SPLIT = 512.0  # cached tokens at which half of a long context's further floor is paid [tokens]


def cached(d: Deployment, p: Point, shape: LayerShape) -> Number:
    """Tokens per sequence whose keys and values a layer keeps and attends to. [tokens]"""
    tokens = p.max_length if d.stack.static_cache else p.length
    return tokens if shape.window is None else np.minimum(tokens, shape.window)


def resident_kv(d: Deployment, p: Point, shape: LayerShape, stored: Format = FP16) -> Number:
    """Memory of one layer's cache. [B]"""
    m = d.shard
    size = stored.resident(m.k_width, m.v_width, cached(d, p, shape))
    return d.stack.cache_overhead * p.batch * size


def score_bytes(d: Deployment, p: Point, scored: bool = False) -> float:
    """Bytes moved per attention score; ``scored`` if a technique needs the prompt's. [B]"""
    flash = p.prefill and d.stack.flash_prompt and not scored
    return 0.0 if flash else d.stack.score_bytes


def query_key_pairs(d: Deployment, p: Point, limit: Number | None, scored: bool = False) -> Number:
    """Query-key pairs per head and sequence; a query sees at most ``limit`` keys.

    Causal, but where scores leave the chip the masked half is computed too.
    """
    if d.stack.static_cache or score_bytes(d, p, scored) > 0:
        length = p.max_length if d.stack.static_cache else p.length
        return p.new * (length if limit is None else np.minimum(length, limit))
    if limit is None:
        return p.new * p.context + p.new * (p.new + 1) / 2
    # queries that still see everything
    growing: Number = np.minimum(np.maximum(limit - p.context, 0), p.new)
    return growing * p.context + growing * (growing + 1) / 2 + (p.new - growing) * limit


def ops(
    d: Deployment,
    p: Point,
    shape: LayerShape,
    *,
    name: str = "attn",
    stored: Format = FP16,
    limit: Number | None = None,
    values: Number | None = None,
    extra_bytes: Number = 0.0,
    scored: bool = False,
    after: tuple[str, ...] = (),
) -> list[Op]:
    """Attention of the new tokens over the cached ones and themselves.

    Parameters
    ----------
    stored : format of the cache that is read; the prompt reads its own in fp16.
    limit : cached tokens a query sees at most, where a technique keeps fewer. [tokens]
    values : tokens whose values are read, where a technique skips some. [tokens]
    extra_bytes : further GPU memory traffic of the same kernel. [B]
    scored : the technique needs the prompt's scores, so that they leave the chip.
    """
    m, stack = d.shard, d.stack
    stored = FP16 if p.prefill else stored
    sees = _smaller(shape.window, limit)
    length = cached(d, p, LayerShape())
    # the earliest new query sees as many tokens as the latest
    tokens = length if sees is None else np.minimum(length, sees + (p.new - 1))
    read = _read(d, stored, tokens, p.new, values)
    pairs = query_key_pairs(d, p, sees, scored)
    value_pairs = pairs if values is None else np.minimum(pairs, p.new * values)
    expand: list[Op] = []
    if stack.plain_passes and limit is None and values is None and not stored.packs:
        expand = _again(d, p, tokens, after)
    flops: Number = 2.0 * p.batch * m.heads * m.head_dim * (pairs + value_pairs)
    if m.latent:
        up, flops, expanded = _latent(d, p, tokens, pairs)
        up_name = "kv_up" if name == "attn" else f"{name}_kv_up"
        expand, after = [*expand, replace(up, name=up_name, after=after)], ()
        extra_bytes = extra_bytes + expanded
    moved = (
        p.batch * read
        + kv_bytes(m, p.tokens)
        + 2 * HALF * p.tokens * m.heads * m.head_dim
        + p.batch * m.heads * pairs * score_bytes(d, p, scored)
        + extra_bytes
    )
    kernel = _kernel(m, p, stored)
    shares = stack.kernel(kernel)
    fixed: Number = 0.0
    if not p.prefill:
        if shares.padding:
            moved = moved + p.batch * shares.padding * m.kv_width * stored.number
        if shares.split:
            fixed = shares.split * tokens / (tokens + SPLIT)
    unpacked: Number = 0.0
    if not p.prefill and (stored.kernel == "lowbit" or "fp8" not in d.hardware.flops):
        unpacked = p.batch * stored.unpacked(m.k_width, m.v_width, tokens)
    op = Op(
        name, "gpu", kernel, flops, {"hbm": moved}, size=p.new,
        columns=p.tokens * m.heads if p.prefill else m.heads,
        slower=head_factor(shares, m.head_dim, m.queries_per_kv), fixed=fixed, after=after,
        unpacked=unpacked,
    )  # fmt: skip
    apart = stack.packed_layer + stack.merge_token * p.new * tokens
    if stored.kernel == "lowbit" and not p.prefill and (stack.packed_layer or stack.merge_token):
        return [*expand, op, Op("tail", fixed=apart)]
    return [*expand, op]


def _kernel(m: Model, p: Point, stored: Format) -> str:
    """Kernel class of attention over a cache in this format."""
    if p.prefill:
        return "prompt"
    return stored.kernel.replace("attention", "latent") if m.latent else stored.kernel


def head_factor(shares: Kernel, head_dim: Number, queries_per_kv: Number) -> Number:
    """How many times longer attention's work takes for heads of this shape.

    1 at a head dimension of 128 and grouped heads; linear in the logarithm of the dimension
    between 64, 128 and 256, and constant outside.
    """
    octaves: Number = np.clip(np.log2(head_dim / 128), -1.0, 1.0)
    factor: Number = 1.0 + (shares.wide - 1.0) * np.maximum(0.0, octaves)
    factor = factor + (shares.narrow - 1.0) * np.maximum(0.0, -octaves)
    return factor * (1.0 + (shares.ungrouped - 1.0) * (queries_per_kv == 1))


def _read(
    d: Deployment, stored: Format, tokens: Number, new: Number, values: Number | None
) -> Number:
    """Bytes that attention over one sequence's cache moves, with the copies software makes. [B]"""
    m, stack = d.shard, d.stack
    read = stored.read(m.k_width, m.v_width, tokens, new)
    if values is not None:
        read = read - m.v_width * (tokens - np.minimum(tokens, values)) * stored.v_number
    copies = 2.0 * m.queries_per_kv if stack.repeat_kv and m.queries_per_kv > 1 else 0.0
    if not stored.packs:
        return read * (stack.append_passes + 1.0 + copies)
    if stack.unpack_bytes:  # unpacked outside the kernel, then copied out
        return read + m.kv_width * tokens * (stack.unpack_bytes + HALF * copies)
    return read * _packed_passes(d)  # the kernel unpacks, and knows grouped heads


def _again(d: Deployment, p: Point, tokens: Number, after: tuple[str, ...]) -> list[Op]:
    """Further passes over a whole fp16 cache that an engine's plain decoding makes."""
    if p.prefill:
        return []
    one = np.asarray(p.new) == 1
    moved = d.stack.plain_passes * kv_bytes(d.shard, p.batch * tokens) * one
    return [Op("again", kernel="attention", bytes={"hbm": moved}, launches=0.0, after=after)]


def _packed_passes(d: Deployment) -> float:
    """Passes over a packed cache; copying its heads out reads it once and writes it wider.

    One pass, of the concatenation, comes before that copy; the others are wider too.
    """
    passes, wider = d.stack.packed_passes, d.shard.queries_per_kv
    if not d.stack.repeat_packed or wider == 1:
        return passes
    return (passes - 1) * wider + 1 + (1 + wider)


def _smaller(window: int | None, limit: Number | None) -> Number | None:
    if window is None or limit is None:
        return limit if window is None else window
    return np.minimum(window, limit)


def _latent(d: Deployment, p: Point, tokens: Number, pairs: Number) -> tuple[Op, Number, Number]:
    """Attention to ``tokens`` cached latents in the cheaper way, point by point.

    Returns the product with the up-projection, attention's own FLOPs, and its further bytes.

    Expanded: every cached latent becomes full keys and values. Absorbed: queries are projected
    into the latent space and outputs back out of it (DeepSeek-V2, section 2.1.2).
    """
    m = d.shard
    inputs, outputs = m.attention_matrices()["kv_up"]
    cached_tokens = p.batch * tokens
    expand = 2.0 * cached_tokens * inputs * outputs
    absorb = 2.0 * p.tokens * inputs * outputs
    per_pair = 2.0 * p.batch * m.heads * pairs
    expanded = per_pair * (m.head_dim + m.value_dim)
    absorbed = per_pair * (2 * m.kv_rank + m.rope_dim)
    cheaper = expand + expanded < absorb + absorbed
    up = gemm(d, "kv_up", np.where(cheaper, cached_tokens, p.tokens), (inputs, outputs))
    read = np.where(cheaper, HALF * cached_tokens * m.heads * (m.head_dim + m.value_dim), 0.0)
    return up, np.where(cheaper, expanded, absorbed), read
