"""The pieces techniques are built from: ops of a decoder layer and what a layer keeps resident.

Every formula of the simulator that is not one technique's own stands here once. Widths are those
of one tensor-parallel shard; numbers outside the cache are fp16 unless a weight format says
otherwise.
"""

from dataclasses import replace

import numpy as np

from kvsim.deployment import WEIGHTS, Deployment, WeightFormat
from kvsim.formats import FP16, Format
from kvsim.graph import Channel, Number, Op, Point, Stream
from kvsim.model import LayerShape, Model

HALF = 2.0  # bytes of an fp16 number [B]
SCORE = 2 * HALF  # an fp16 attention score that leaves the chip: written once, read once [B]


def kv_bytes(m: Model, tokens: Number) -> Number:
    """Fp16 keys and values of ``tokens`` tokens in one layer. [B]"""
    return HALF * m.kv_width * tokens


def cached(d: Deployment, p: Point, shape: LayerShape) -> Number:
    """Tokens per sequence whose keys and values a layer keeps and attends to. [tokens]"""
    tokens = p.max_length if d.stack.static_cache else p.length
    return tokens if shape.window is None else np.minimum(tokens, shape.window)


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
    growing: Number = np.minimum(
        np.maximum(limit - p.context, 0), p.new
    )  # queries that still see everything
    return growing * p.context + growing * (growing + 1) / 2 + (p.new - growing) * limit


def gemm(
    d: Deployment,
    name: str,
    tokens: Number,
    matrix: tuple[int, int],
    weights: WeightFormat | None = None,
    after: tuple[str, ...] = (),
) -> Op:
    """Hidden states of ``tokens`` tokens times one weight matrix (inputs, outputs)."""
    inputs, outputs = matrix
    stored = weights or d.weight_format
    moved = stored.bytes(inputs, outputs) + HALF * tokens * (inputs + outputs)
    return Op(
        name,
        kernel="gemm",
        flops=2.0 * tokens * inputs * outputs,
        bytes={"hbm": moved},
        size=tokens,
        dtype=stored.dtype,
        fixed=unpacking(d, stored, inputs * outputs),
        after=after,
    )


def unpacking(d: Deployment, stored: WeightFormat, weights: Number) -> Number:
    """Time to widen packed weights that loading them does not hide. [s]"""
    packed = stored.bits < 16 and stored.dtype == "fp16"
    return d.stack.unpack_ops * weights / (d.flops("fp32") / 2) if packed else 0.0


def before_attention(d: Deployment, p: Point, after: tuple[str, ...] = ()) -> list[Op]:
    """Norms, positions, residuals and the activation of the whole layer; then queries and KV."""
    m = d.shard
    active = m.experts_active * m.expert_ffn or m.ffn
    passes = d.stack.pointwise_passes * ((2 * m.norms + 2) * m.hidden + 3 * active)
    small = Op(
        "pointwise",
        kernel="pointwise",
        bytes={"hbm": HALF * p.tokens * passes},
        launches=d.stack.pointwise_launches,
        fixed=d.stack.layer,
    )
    matrices = m.attention_matrices()
    ops = [small, gemm(d, "qkv", p.tokens, matrices["qkv"], after=after)]
    if "q_up" in matrices:
        ops.append(gemm(d, "q_up", p.tokens, matrices["q_up"]))
    return ops


def after_attention(
    d: Deployment,
    p: Point,
    shape: LayerShape,
    weights: WeightFormat | None = None,
    after: tuple[str, ...] = (),
) -> list[Op]:
    """Output projection and MLP, with the sums over a tensor-parallel group.

    ``weights`` overrides the format of the MLP.
    """
    m = d.shard
    return [
        gemm(d, "out", p.tokens, m.attention_matrices()["out"], after=after),
        *all_reduce(d, "out_sum", p.tokens),
        *(_experts(d, p) if shape.routed else _mlp(d, p, m.ffn, weights)),
        *all_reduce(d, "mlp_sum", p.tokens),
    ]


def _mlp(d: Deployment, p: Point, width: int, weights: WeightFormat | None = None) -> list[Op]:
    return [
        gemm(d, name, p.tokens, matrix, weights)
        for name, matrix in d.shard.mlp_matrices(width).items()
    ]


def _experts(d: Deployment, p: Point) -> list[Op]:
    """Router, the routed experts that the tokens touch, and the shared ones.

    With uniform routing a token leaves an expert idle with probability 1 - active / experts.
    """
    m = d.shard
    idle = (1.0 - m.experts_active / m.experts) ** p.tokens
    touched = m.experts * (1.0 - idle)
    routed = p.tokens * m.experts_active
    ops = [gemm(d, "router", p.tokens, (m.hidden, m.experts), WEIGHTS["fp16"])]
    for name, (inputs, outputs) in m.mlp_matrices(m.expert_ffn).items():
        moved = touched * d.weight_format.bytes(inputs, outputs)
        ops.append(
            Op(
                f"experts_{name}",
                kernel="gemm",
                flops=2.0 * routed * inputs * outputs,
                bytes={"hbm": moved + HALF * routed * (inputs + outputs)},
                size=np.maximum(1.0, routed / touched),
                dtype=d.weight_format.dtype,
                fixed=unpacking(d, d.weight_format, touched * inputs * outputs),
            )
        )
    if m.shared_experts:
        ops += _mlp(d, p, m.shared_experts * m.expert_ffn)
    return ops


def all_reduce(d: Deployment, name: str, tokens: Number) -> list[Op]:
    """Sum of hidden states over the replica's GPUs.

    In a ring, 2 (tp - 1) transfers of 1 / tp of the data; in one shot, everyone reads all others'.
    """
    if d.tp == 1:
        return []
    data, latency = HALF * tokens * d.shard.hidden, d.hardware.links["link"].latency
    if d.stack.one_shot_sum:
        moved, wait = (d.tp - 1) * data, latency
    else:
        moved, wait = 2 * (d.tp - 1) / d.tp * data, 2 * (d.tp - 1) * latency
    return [Op(name, kernel="allreduce", bytes={"link": moved}, fixed=wait)]


def attention(
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
    read = stored.read(m.k_width, m.v_width, tokens)
    if values is not None:
        read = read - m.v_width * (tokens - np.minimum(tokens, values)) * stored.number
    copies = 2.0 * m.queries_per_kv if stack.repeat_kv and m.queries_per_kv > 1 else 0.0
    if stored.bits < 16 and stack.unpack_bytes:  # unpacked outside the kernel, then copied out
        widened = stack.unpack_bytes + HALF * copies
        read = read + m.kv_width * tokens * widened
    elif stored.bits < 16:  # the kernel unpacks, and knows grouped heads
        read = read * _packed_passes(d)
    else:
        read = read * (stack.append_passes + 1.0 + copies)
    pairs = query_key_pairs(d, p, sees, scored)
    value_pairs = pairs if values is None else np.minimum(pairs, p.new * values)
    expand: list[Op] = []
    plain = limit is None and values is None and stored.bits == 16 and not p.prefill
    if stack.plain_passes and plain:
        again = stack.plain_passes * kv_bytes(m, p.batch * tokens) * (np.asarray(p.new) == 1)
        expand = [Op("again", kernel="attention", bytes={"hbm": again}, launches=0.0, after=after)]
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
    op = Op(name, kernel=stored.kernel, flops=flops, bytes={"hbm": moved}, after=after)
    apart = stack.packed_layer + stack.merge_token * p.new * tokens
    if stored.kernel == "lowbit" and not p.prefill and (stack.packed_layer or stack.merge_token):
        return [*expand, op, Op("tail", fixed=apart)]
    return [*expand, op]


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


def runtime(d: Deployment, share: Number = 1.0) -> list[Op]:
    """Fixed time of a layer that keeps some share of its cache on the host."""
    fixed = d.stack.offloaded_layer * (np.asarray(share) > 0)
    return [Op("runtime", fixed=fixed, launches=0.0)] if d.stack.offloaded_layer else []


def copy(
    name: str,
    stream: Stream,
    size: Number,
    *,
    kernel: str = "relay",
    rows: Number = 0.0,
    launches: float = 1.0,
    after: tuple[str, ...] = (),
    ahead: bool = False,
    sync: bool = False,
) -> Op:
    """``size`` bytes between GPU and host memory, in ``rows`` gathered one by one if any.

    Kernel class ``relay`` is for the cache, whose host memory may be pageable, ``copy`` for what
    every runtime pins.
    """
    channel: Channel = "h2d" if stream == "h2d" else "d2h"
    moved: dict[Channel, Number] = {channel: size, "hbm": size, "dram": size}
    return Op(
        name, stream, kernel, bytes=moved, rows=rows, launches=launches,
        after=after, ahead=ahead, sync=sync,
    )  # fmt: skip


def quantise(
    d: Deployment, tokens: Number, stored: Format, name: str = "quantise", every: float = 1.0
) -> list[Op]:
    """Keys and values of ``tokens`` tokens read in fp16 and written packed, or the reverse.

    What is done once in ``every`` steps is charged evenly over them.
    """
    if stored.bits == 16:
        return []
    moved = d.shard.kv_width * tokens * (HALF + stored.number)
    return [Op(name, kernel="quantise", bytes={"hbm": moved}, launches=1.0 / every)]


def resident_kv(d: Deployment, p: Point, shape: LayerShape, stored: Format = FP16) -> Number:
    """Memory of one layer's cache. [B]"""
    m = d.shard
    size = stored.resident(m.k_width, m.v_width, cached(d, p, shape))
    return d.stack.cache_overhead * p.batch * size


def id_lists(d: Deployment, batch: Number, every: float = 1.0) -> list[Op]:
    """Lists of salient tokens made on the host, for K and V of every sequence and head."""
    fixed = 2 * d.stack.id_list * batch * d.shard.cached_heads / every
    return [Op("id_lists", fixed=fixed, launches=0.0)] if d.stack.id_list else []


def top_k(name: str, scores: Number, sync: bool = False, every: float = 1.0) -> Op:
    """Selection of the largest among ``scores`` attention scores that leave the chip."""
    moved: dict[Channel, Number] = {"hbm": SCORE * scores}
    return Op(name, kernel="topk", bytes=moved, launches=1.0 / every, sync=sync)


def head(d: Deployment, p: Point) -> tuple[Op, ...]:
    """Embedding look-up, last norm, LM head, sampling and the step's fixed time."""
    m = d.shard
    rows = p.batch if p.prefill and not d.stack.prompt_logits else p.tokens
    logits = gemm(d, "lm_head", rows, (m.hidden, m.vocab), WEIGHTS["fp16"])
    sample = Op(
        "sample",
        kernel="pointwise",
        bytes={"hbm": HALF * (rows * m.vocab + 2 * p.tokens * m.hidden)},
        fixed=d.stack.step + d.stack.sequence * p.batch,
        sync=d.stack.sequence > 0,  # the host handles each sequence once it has its token
    )
    return logits, sample
