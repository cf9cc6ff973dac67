"""Attention over a cache: bytes, FLOPs and resident memory.

All techniques attend through ``ops``; they differ in the format they read, in the tokens they see
and in what they add around it. Where a model has an indexer (sparse attention), ``indexer_ops``
scores every cached token and chooses the best.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvsim.engine.formats import FP16, Format
from kvsim.engine.ops import FP16_BYTES, gemm, kv_bytes, top_k
from kvsim.engine.roofline import seconds
from kvsim.graph import Number, Op, Point
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Kernel
from kvsim.models.model import LayerShape, Model

Flag = bool | np.bool | NDArray[np.bool]
SPLIT = 512.0  # cached tokens at which half of a long context's further floor is paid [tokens]
FILLED = 0.8  # share of the GPU's blocks from which FlashAttention 2 splits no cache
BLOCK = 64.0  # queries of a head that one block of FlashAttention 2 computes over a paged cache


def cached(deployment: Deployment, point: Point, shape: LayerShape) -> Number:
    """Count the tokens per sequence that a layer caches and attends to.

    Parameters
    ----------
    deployment
        Model, machine and software stack.
    point
        The pass, or arrays of passes.
    shape
        Kind of the layer.

    Returns
    -------
    Number
        Cached tokens, at most the layer's window. [tokens]
    """
    tokens = point.max_length if deployment.stack.cache.static else point.length
    return tokens if shape.window is None else np.minimum(tokens, shape.window)


def resident_kv(
    deployment: Deployment, point: Point, shape: LayerShape, stored: Format = FP16
) -> Number:
    """Compute the memory that one layer's cache takes.

    Parameters
    ----------
    deployment
        Model, machine and software stack.
    point
        The pass, or arrays of passes.
    shape
        Kind of the layer.
    stored
        Format of the cache.

    Returns
    -------
    Number
        Bytes on one GPU. [B]
    """
    m = deployment.shard
    size = stored.resident(m.k_width, m.v_width, cached(deployment, point, shape))
    return point.batch * size


def score_bytes(deployment: Deployment, point: Point, scored: bool = False) -> float:
    """Compute the bytes moved per attention score.

    Parameters
    ----------
    deployment
        Model, machine and software stack.
    point
        The pass, or arrays of passes.
    scored
        Whether a technique needs the scores of the prompt, so that they leave the chip.

    Returns
    -------
    float
        Zero if the scores stay on the chip (flash attention). [B]
    """
    flash = point.prefill and deployment.stack.attention.flash_prompt and not scored
    return 0.0 if flash else deployment.stack.attention.score_bytes


def query_key_pairs(
    deployment: Deployment, point: Point, limit: Number | None, scored: bool = False
) -> Number:
    """Count the query-key pairs that attention computes, per head and sequence.

    Attention is causal; if the scores leave the chip, the masked half is computed as well.

    Parameters
    ----------
    deployment
        Model, machine and software stack.
    point
        The pass, or arrays of passes.
    limit
        Most keys that a query attends to; None for all. [tokens]
    scored
        Whether a technique needs the scores of the prompt.

    Returns
    -------
    Number
        Pairs. [pairs per head and sequence]
    """
    if deployment.stack.cache.static or score_bytes(deployment, point, scored) > 0:
        length = point.max_length if deployment.stack.cache.static else point.length
        return point.new * (length if limit is None else np.minimum(length, limit))
    if limit is None:
        return point.new * point.context + point.new * (point.new + 1) / 2
    # queries that still see everything
    growing: Number = np.minimum(np.maximum(limit - point.context, 0), point.new)
    return growing * point.context + growing * (growing + 1) / 2 + (point.new - growing) * limit


def ops(
    deployment: Deployment,
    point: Point,
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
    """Return the ops of one layer's attention: new tokens over the cached ones and themselves.

    Parameters
    ----------
    deployment
        Model, machine and software stack.
    point
        The forward pass, or arrays of passes.
    shape
        Kind of the layer, with its attention window.
    name
        Name of the attention op.
    stored
        Format of the cache that is read; a pass that reads prompts reads their tokens in fp16.
    limit
        Most cached tokens that a query sees, where a technique keeps fewer. [tokens]
    values
        Tokens whose values are read, where a technique skips some. [tokens]
    extra_bytes
        Further GPU memory traffic of the same kernel. [B]
    scored
        Whether the technique needs the prompt's attention scores, so that they are written to GPU
        memory.
    after
        Names of ops that this one waits for, besides those before it on its stream.

    Returns
    -------
    list of Op
        The ops in issue order, per GPU and for the whole batch.
    """
    m, stack = deployment.shard, deployment.stack
    stored = FP16 if point.prefill else stored
    chosen = m.indexer.tokens if m.indexer else None
    sees = _minimum(_minimum(shape.window, limit), chosen)
    length = cached(deployment, point, LayerShape())
    tokens: Number = length
    if chosen is not None and sees is not None:  # by every query for itself
        tokens = np.minimum(length, sees * point.new)
    elif sees is not None:  # the earliest new query sees as many tokens as the latest
        tokens = np.minimum(length, sees + (point.new - 1))
    read = _read(deployment, stored, tokens, point.new, values)
    pairs = query_key_pairs(deployment, point, sees, scored)
    value_pairs = pairs if values is None else np.minimum(pairs, point.new * values)
    expand: list[Op] = []
    if stack.packed_cache.plain_passes and limit is None and values is None and not stored.packs:
        expand = _repeated_passes(deployment, point, tokens, after)
    if copies_cache(deployment, stored):
        whole = stored.read(m.k_width, m.v_width, tokens, point.new)
        expand = [*expand, _cache_copies(deployment, point, point.batch * whole)]
    flops: Number = 2.0 * point.batch * m.heads * m.head_dim * (pairs + value_pairs)
    if m.latent:
        separate = False if chosen is None else np.greater(length, chosen)
        up, flops, expanded = _latent(deployment, point, tokens, pairs, separate)
        up_name = "kv_up" if name == "attn" else f"{name}_kv_up"
        expand, after = [*expand, replace(up, name=up_name, after=after)], ()
        extra_bytes = extra_bytes + expanded
    moved = (
        point.batch * read
        + kv_bytes(m, point.tokens) * shape.keeps
        + 2 * FP16_BYTES * point.tokens * m.heads * m.head_dim
        + point.batch * m.heads * pairs * score_bytes(deployment, point, scored)
        + extra_bytes
    )
    walked = _walks(deployment, point)
    kernel = "prompt" if walked else _kernel(m, point, stored)
    shares = stack.kernel(kernel)
    fixed: Number = 0.0
    chain: Number = 0.0
    idle: Number = 1.0
    size: Number = point.new
    columns: Number = point.tokens * m.heads if point.prefill else m.heads
    own = point.prefill and "prompt" in stack.kernels
    if own or walked:  # queries are given out by the cached tokens that they read, too
        size, columns = tokens, point.batch * m.heads * tokens
    if walked:
        several = np.greater(point.new, 0.0 if point.beside else 1.0)
        flops = flops * np.where(
            several, np.maximum(point.new, BLOCK) / np.where(several, point.new, 1.0), 1.0
        )
        before = np.maximum(tokens - point.new, 0.0)
        chain = shares.walk * before * (m.head_dim / 128) * several
    if own and np.any(np.greater(point.context, 0)):
        one = _one_token_seconds(deployment, point, shape, limit, values)
        one = one - (shares.floor + stack.time.gap)
        chain = np.maximum(chain, one * np.greater(point.context, 0))
    if not point.prefill and not walked:
        chain = shares.walk * tokens * (m.head_dim / 128)
        idle = last_wave(deployment, point, shares)
        if shares.padding:
            moved = moved + point.batch * shares.padding * m.kv_width * stored.number
        if shares.split:
            fixed = shares.split * tokens / (tokens + SPLIT)
    unpacked: Number = 0.0
    widens = stored.kernel == "lowbit" or "fp8" not in deployment.hardware.flops
    if not point.prefill and (widens or shares.unpack_ops):
        unpacked = point.batch * stored.unpacked(m.k_width, m.v_width, tokens + shares.padding)
        unpacked = unpacked * (point.new if stack.packed_cache.unpack_each else 1.0)
    op = Op(
        name,
        "gpu",
        kernel,
        flops,
        {"hbm": moved},
        size=size,
        columns=columns,
        slower=head_factor(shares, m.head_dim, m.queries_per_kv) * idle,
        fixed=fixed,
        chain=chain,
        after=after,
        unpacked=unpacked,
    )
    apart = stack.packed_cache.layer + stack.packed_cache.merge_token * point.new * tokens
    if (
        stored.kernel == "lowbit"
        and not point.prefill
        and (stack.packed_cache.layer or stack.packed_cache.merge_token)
    ):
        return [*expand, op, Op("tail", fixed=apart)]
    return [*expand, op]


def _kernel(model: Model, point: Point, stored: Format) -> str:
    """Return the kernel class of attention over a cache in this format."""
    if point.prefill:
        return "prompt"
    return stored.kernel.replace("attention", "latent") if model.latent else stored.kernel


def _one_token_seconds(
    deployment: Deployment,
    point: Point,
    shape: LayerShape,
    limit: Number | None,
    values: Number | None,
) -> Number:
    """Return the kernel time of decoding one new token over the same cache. [s]

    A later part of a prompt is read no quicker than that, and one of a single token as quickly.
    """
    one = replace(point, context=point.length - 1.0, new=1.0, prefill=False)
    found = ops(deployment, one, shape, limit=limit, values=values)
    return sum(seconds(op, deployment) for op in found if op.name == "attn")


def _walks(deployment: Deployment, point: Point) -> bool:
    """Return whether one block of queries reads a sequence's whole cache.

    FlashAttention 2 as vLLM calls it splits a long cache only where no sequence of the pass has
    more than one new token: not in a prompt's later parts, not for drafts, and not for sequences
    that decode beside a part of a prompt. Measured on an RTX PRO 6000 with vLLM 0.19, and on A6000
    and H100 with its kernels of 2024 [1]_.

    References
    ----------
    .. [1] casys-kaist/LLMServingSim, commit 5daddb2, attention profiles.
    """
    if not deployment.stack.kernel("prompt").walk:
        return False
    return point.prefill or point.beside or float(np.min(point.new)) > 1


def last_wave(deployment: Deployment, point: Point, shares: Kernel) -> Number:
    """Compute by how much decode attention slows down because its last blocks do not fill the GPU.

    FlashAttention 2 gives each sequence and KV head one block once these fill the share ``FILLED``
    of the GPU, and divides caches among more blocks below that [1]_. If a pass has several new
    tokens per sequence, each query head has a block.

    Parameters
    ----------
    deployment
        Model, machine and software stack.
    point
        The decoding pass, or arrays of passes.
    shares
        Kernel class, with the number of blocks that a multiprocessor runs at once.

    Returns
    -------
    Number
        Factor on the time, at least 1.

    References
    ----------
    .. [1] Dao-AILab/flash-attention 2, ``num_splits_heuristic`` in csrc/flash_attn/flash_api.cpp,
       https://github.com/Dao-AILab/flash-attention
    """
    m, slots = deployment.shard, shares.unit_blocks * deployment.hardware.units
    if not slots or m.latent:
        return 1.0
    several = m.heads * np.ceil(point.new / BLOCK)
    each = np.where(np.greater(point.new, 1.0), several, m.cached_heads)
    blocks = np.maximum(point.batch * each, 1.0)
    return np.where(blocks < FILLED * slots, 1.0, np.ceil(blocks / slots) * slots / blocks)


def head_factor(shares: Kernel, head_dim: Number, queries_per_kv: Number) -> Number:
    """Compute how many times longer attention takes for heads of this shape.

    1 at a head dimension of 128 and grouped heads; linear in the logarithm of the dimension
    between 64, 128 and 256, and constant outside.

    Parameters
    ----------
    shares
        Kernel class with its factors for wide, narrow and ungrouped heads.
    head_dim
        Dimension of a head.
    queries_per_kv
        Query heads that share one KV head.

    Returns
    -------
    Number
        Factor on the kernel's time.
    """
    octaves: Number = np.clip(np.log2(head_dim / 128), -1.0, 1.0)
    factor: Number = 1.0 + (shares.wide - 1.0) * np.maximum(0.0, octaves)
    factor = factor + (shares.narrow - 1.0) * np.maximum(0.0, -octaves)
    return factor * (1.0 + (shares.ungrouped - 1.0) * (queries_per_kv == 1))


def _read(
    deployment: Deployment, stored: Format, tokens: Number, new: Number, values: Number | None
) -> Number:
    """Return the bytes that attention to one sequence's cache moves, copies included. [B]"""
    m, stack = deployment.shard, deployment.stack
    read = stored.read(m.k_width, m.v_width, tokens, new)
    if values is not None:
        read = read - m.v_width * (tokens - np.minimum(tokens, values)) * stored.v_number
    copies = 2.0 * m.queries_per_kv if stack.attention.repeat_kv and m.queries_per_kv > 1 else 0.0
    if not stored.packs:
        if copies_cache(deployment, stored):
            return read * (copies / 2 or 1.0)
        return read * (stack.cache.append_passes + 1.0 + copies)
    if stack.packed_cache.unpack_bytes:  # unpacked outside the kernel, then copied out
        return read + m.kv_width * tokens * (stack.packed_cache.unpack_bytes + FP16_BYTES * copies)
    return read * _packed_passes(deployment)  # the kernel unpacks, and knows grouped heads


def copies_cache(deployment: Deployment, stored: Format) -> bool:
    """Tell whether copying the cache before attention is a kernel separate from attention.

    Parameters
    ----------
    deployment
        Model, machine and software stack; the stack has the kernel class ``cache-copy`` if such
        copies were measured.
    stored
        Format of the cache; packed ones are unpacked instead of copied.

    Returns
    -------
    bool
        Whether the copy is an op with its own time.
    """
    return "cache-copy" in deployment.stack.kernels and not stored.packs


def _cache_copies(deployment: Deployment, point: Point, read: Number) -> Op:
    """Return the op that appends new tokens (torch.cat) and repeats KV heads (repeat_kv)."""
    m, stack = deployment.shard, deployment.stack
    passes: Number = 0.0 if point.prefill else stack.cache.append_passes
    if stack.attention.repeat_kv and m.queries_per_kv > 1:
        passes = passes + 1.0 + m.queries_per_kv
    return Op("cache_copy", kernel="cache-copy", bytes={"hbm": passes * read}, launches=0.0)


def _repeated_passes(
    deployment: Deployment, point: Point, tokens: Number, after: tuple[str, ...]
) -> list[Op]:
    """Return ops for further passes over a whole fp16 cache in an engine's plain decoding.

    Only where every query head has a KV head of its own: engines run grouped heads by another path.
    """
    if point.prefill or deployment.shard.queries_per_kv > 1:
        return []
    one = np.asarray(point.new) == 1
    moved = (
        deployment.stack.packed_cache.plain_passes
        * kv_bytes(deployment.shard, point.batch * tokens)
        * one
    )
    return [Op("again", kernel="attention", bytes={"hbm": moved}, launches=0.0, after=after)]


def _packed_passes(deployment: Deployment) -> float:
    """Return the number of passes over a packed cache, whose repeated heads are wider.

    If KV heads are repeated, one pass reads the packed cache for the concatenation, one reads it
    again and writes the wider copy, and the others read that copy.
    """
    passes, wider = deployment.stack.packed_cache.passes, deployment.shard.queries_per_kv
    if not deployment.stack.packed_cache.repeat_kv or wider == 1:
        return passes
    return (passes - 1) * wider + 1 + (1 + wider)


def _minimum(window: Number | None, limit: Number | None) -> Number | None:
    if window is None or limit is None:
        return limit if window is None else window
    return np.minimum(window, limit)


def _latent(
    deployment: Deployment, point: Point, tokens: Number, pairs: Number, apart: Flag
) -> tuple[Op, Number, Number]:
    """Return attention to cached latents in the cheaper way, point by point.

    Returns the product with the up-projection, attention's own FLOPs, and its further bytes.

    Expanded: every cached latent becomes full keys and values. Absorbed: queries are projected
    into the latent space and outputs back out of it (DeepSeek-V2, section 2.1.2), which is the one
    way where queries read latents ``apart`` from one another.
    """
    m = deployment.shard
    inputs, outputs = m.attention_matrices()["kv_up"]
    cached_tokens = point.batch * tokens
    expand = 2.0 * cached_tokens * inputs * outputs
    absorb = 2.0 * point.tokens * inputs * outputs
    per_pair = 2.0 * point.batch * m.heads * pairs
    expanded = per_pair * (m.head_dim + m.value_dim)
    absorbed = per_pair * (2 * m.kv_rank + m.rope_dim)
    cheaper = np.less(expand + expanded, absorb + absorbed) & np.logical_not(apart)
    rows = np.where(cheaper, cached_tokens, point.tokens)
    up = gemm(deployment, "kv_up", rows, (inputs, outputs), deployment.mixer_stored("kv_up"))
    read = np.where(cheaper, FP16_BYTES * cached_tokens * m.heads * (m.head_dim + m.value_dim), 0.0)
    return up, np.where(cheaper, expanded, absorbed), read


def indexer_ops(deployment: Deployment, point: Point, tokens: Number) -> list[Op]:
    """Return the ops of an indexer, which scores cached tokens for every query and selects some.

    The kernel applies a ReLU to the scores of every head, weights and sums them, and so writes one
    number per query-key pair. The indexer is replicated on all tensor-parallel GPUs.

    Parameters
    ----------
    deployment
        Model, machine and software stack.
    point
        The pass, or arrays of passes.
    tokens
        Cached tokens per sequence that are scored. [tokens]

    Returns
    -------
    list of Op
        The scoring kernel and the selection; none for a model without an indexer.

    References
    ----------
    .. [1] DeepSeek-AI, "DeepSeek-V3.2", 2025, section 2.1, equation 1,
       https://arxiv.org/abs/2512.02556
    """
    m = deployment.shard
    chooser = m.indexer
    if chooser is None:
        return []
    pairs = point.new * tokens
    if point.prefill:
        pairs = point.new * point.context + point.new * (point.new + 1) / 2
    pairs = point.batch * pairs
    keys = chooser.key_bytes * (point.batch * tokens + point.tokens)
    queries = point.tokens * chooser.heads * (chooser.head_dim + FP16_BYTES)
    scores = Op(
        "index",
        kernel="index",
        flops=2.0 * chooser.heads * chooser.head_dim * pairs,
        bytes={"hbm": keys + queries},
        size=point.new,
        columns=point.tokens * chooser.heads if point.prefill else chooser.heads,
        dtype="fp8",
    )
    return [scores, top_k("index_topk", pairs)]


def indexer_keys(deployment: Deployment, batch: Number, tokens: Number) -> Number:
    """Compute the size of the indexer's keys in one layer.

    Parameters
    ----------
    deployment
        Model, machine and software stack.
    batch
        Sequences in the batch. [sequences]
    tokens
        Kept tokens per sequence. [tokens]

    Returns
    -------
    Number
        Zero for a model without an indexer. [B]
    """
    chooser = deployment.shard.indexer
    return 0.0 if chooser is None else batch * tokens * chooser.key_bytes
