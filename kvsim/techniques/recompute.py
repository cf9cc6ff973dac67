"""Partial recomputation: keys and values of some tokens come from the layer's stored inputs.

References
----------
.. [1] C. Jiang et al., "KVPR: efficient LLM inference with I/O-aware KV cache partial
   recomputation", ACL Findings 2025, section 3.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvsim.engine import attention, ops
from kvsim.engine.closing import closing
from kvsim.engine.roofline import channel_seconds, seconds
from kvsim.engine.timeline import steady
from kvsim.graph import Array, Group, Number, Op, Step
from kvsim.machines.deployment import Deployment
from kvsim.search import last_within, least_of_convex
from kvsim.techniques.layers import LayerPass

if TYPE_CHECKING:
    from kvsim.techniques.place import Place

ZERO: Number = 0.0
MANY = 2**12  # points from which on two searches at once no longer fit into the CPU's cache
NEAR = 1e-3  # share of a step's time that a chosen split may leave on the table


def optimal_split(context: Number, width: Number, link: Number, flops: Number) -> Number:
    """Tokens to recompute so that recomputing and copying end together, for MHA. [tokens]

    The crossing of 4 b l h^2 / flops and 4 b (s - l) h / link, at which both of the paper's
    objectives (with and without the time of the activations) are smallest.

    Parameters
    ----------
    context : cached tokens s. [tokens]
    width : hidden size h.
    link : rate of the host link. [B/s]
    flops : rate of the GPU. [FLOP/s]

    References
    ----------
    .. [1] C. Jiang et al., "KVPR", 2025, equations 8 to 11.
    """
    return context / (1.0 + link * width / flops)


def input_width(deployment: Deployment) -> float:
    """Numbers copied per recomputed token: the layer's whole input, which every shard needs."""
    return deployment.shard.hidden


def recomputed(place: "Place", at: LayerPass) -> Number:
    """Tokens recomputed in this pass: as set, the runtime's share, or what balances GPU and link.

    Never more than the prompt's tokens that live on the host. [tokens]
    """
    d, p, split = at.d, at.p, place.split
    limit: Number = np.floor(np.minimum(p.prompt, place.on_host(at)))
    if not isinstance(split, str):
        given: Number = np.minimum(split, limit)
        return given
    if d.stack.offload.split_prompt:
        fixed: Number = np.minimum(np.floor(d.stack.offload.split_prompt * p.prompt), limit)
        return fixed
    best = _balance if d.stack.offload.overlap == 1 else _shortest
    balanced: Number = np.floor(d.stack.offload.split_achieved * best(place, at, limit))
    return balanced


def first_and_last(place: "Place", at: LayerPass) -> tuple[Number, Number]:
    """Tokens recomputed in the first decoding step and in the last. [tokens]"""
    if "splits" not in at.known:
        p = at.part or at.p
        first = replace(p, context=p.prompt, new=1.0, prefill=False)
        last = replace(first, context=p.max_length - 1)
        at.known["splits"] = tuple(recomputed(place, at.then(q)) for q in (first, last))
    splits: tuple[Number, Number] = at.known["splits"]
    return splits


def fetch(place: "Place", at: LayerPass, split: Number) -> list[Op]:
    """Inputs first, then the rest of the host's tokens beside the recomputation."""
    d, p, m, stored = at.d, at.p, at.d.shard, at.storage.stored
    states = p.batch * split * input_width(d)
    rest = place.on_host(at) - split
    matrix = (m.hidden, m.kv_width)
    product = ops.gemm(d, "recompute", p.batch * split, matrix, after=("load_inputs",))
    wanted = np.asarray(split) > 0
    rotated = 0.0 if m.learned_positions else 2 * ops.HALF * m.k_width * p.batch * split
    recompute = replace(product, bytes={"hbm": (product.bytes["hbm"] + rotated) * wanted})
    moved: Number = 0.0
    if d.stack.offload.merge_passes:  # both parts are copied into one buffer
        moved = d.stack.offload.merge_passes * ops.kv_bytes(m, p.batch * split)
        moved = moved + 2 * ops.kv_bytes(m, p.batch * rest) * wanted
    joined = Op("merge", bytes={"hbm": moved}, after=("load_kv",))
    inputs = ops.quantise(d, states / m.kv_width, stored, "dequantise_inputs")
    widened = ops.quantise(d, p.batch * rest, stored, "dequantise")
    size = states * stored.k_number
    return [
        ops.copy("load_inputs", "h2d", size, kernel="copy", after=("attn@-2",), ahead=True),
        place.load(at, rest),
        *(replace(op, after=("load_inputs",)) for op in inputs),
        recompute,
        *(replace(op, after=("load_kv",)) for op in widened),
        joined,
    ]


def spared(place: "Place", at: LayerPass) -> Number:
    """Share of the prompt's tokens that every step recomputes, so that they never reach home."""
    first, _ = first_and_last(place, at)
    return first / np.maximum(place.host_share * at.p.prompt, 1.0)


def store_inputs(place: "Place", at: LayerPass) -> list[Op]:
    """Prefill sends home the inputs that decoding recomputes from."""
    d, stored = at.d, at.storage.stored
    _, last = first_and_last(place, at)
    states = at.p.batch * last * input_width(d)
    packed = ops.quantise(d, states / d.shard.kv_width, stored, "quantise_inputs")
    after = ("quantise_inputs",) if packed else ("qkv",)
    size = states * stored.k_number
    return [*packed, ops.copy("store_inputs", "d2h", size, kernel="copy", after=after)]


def buffer(place: "Place", at: LayerPass) -> Number:
    """One layer's loaded tokens and the inputs of the others. [B]

    What is recomputed lands beside what was loaded, unless a pass joins both elsewhere.
    """
    d, stored = at.d, at.storage.stored
    _, split = first_and_last(place, at)
    tokens = place.host_share * at.kept
    if d.stack.offload.merge_passes:
        tokens = np.maximum(tokens - split, 0)
    kv = tokens * stored.token(d.shard.k_width, d.shard.v_width)
    return at.p.batch * (kv + split * input_width(d) * stored.k_number)


def scratch(place: "Place", at: LayerPass) -> Number:
    """One more layer in fp16: where both parts are joined, or of a packed cache. [B]

    One packed layer is widened and recomputed while another is attended to. The update of a
    static cache fills the joined layer in prefill too.
    """
    d = at.d
    merged = d.stack.offload.merge_passes > 0
    unused = at.p.prefill and not (d.stack.cache.static and merged)
    if unused or not (merged or at.storage.stored.packs):
        return 0.0
    _, split = first_and_last(place, at)
    whole = ops.kv_bytes(d.shard, at.p.batch * at.kept)
    return whole * (np.asarray(split) > 0)


def notes(place: "Place", at: LayerPass) -> tuple[str, ...]:
    """The split in use, why it is best at 0 on grouped-query models, and what GPUs load alike."""
    d, m = at.d, at.d.shard
    width, split = input_width(d), float(np.ravel(recomputed(place, at))[0])
    if width < m.kv_width:
        cached = float(np.ravel(at.p.context)[0])
        rates = d.bandwidth["h2d"], d.flops("fp16")
        ideal = float(optimal_split(cached, m.hidden, *rates)) if m.queries_per_kv == 1 else 0
        everyone = (
            f"; each of {d.tp} GPUs loads the layer's whole input, {width:.0f} numbers per token, "
            f"where it would load {m.kv_width:.0f} of keys and values"
        )
        return (
            f"split: {split:.0f} of {cached:.0f} cached tokens are recomputed in the last step "
            f"(the paper's equation 11 at peak rates: {ideal:.0f}){everyone if d.tp > 1 else ''}",
        )
    sharing = "a latent cache" if m.latent else f"{m.queries_per_kv} query heads per KV head"
    if d.tp > 1 and not m.latent:
        sharing += f" and {d.tp} GPUs that each load the layer's whole input"
    return (
        f"split {split:.0f}: with {sharing} a token's layer input ({width:.0f} numbers) is "
        f"no smaller than the keys and values it would replace ({m.kv_width:.0f}), so "
        f"recomputing saves no transfer and only adds work",
    )


def _balance(place: "Place", at: LayerPass, limit: Number) -> Array:
    """The whole number of tokens that makes the longer of GPU and link time shortest.

    GPU time grows with the split and link time falls, so the best is at their crossing. Where
    an input is no smaller than the keys and values it replaces, both grow: nothing is recomputed.
    """
    d, p, shape = at.d, at.p, at.shape
    none = np.zeros(np.broadcast_shapes(np.shape(p.batch), np.shape(limit)))
    if input_width(d) >= d.shard.kv_width:
        return none
    surroundings = [
        *place.ahead(at),
        *ops.before_attention(d, p, shape),
        *attention.ops(d, p, shape),
        *ops.after_attention(d, p, shape),
    ]
    around = _loads(surroundings, d)
    # the link also runs beside the head: its time is spread over the layers
    head, _, _ = _loads(list(closing(d, p)), d)
    around = (around[0] + head / d.shard.layers / place.tiles, *around[1:])

    def times(split: Array) -> tuple[Array, Array]:
        moved = fetch(place, at, split)
        gpu, link, hbm = (a + b for a, b in zip(around, _loads(moved, d), strict=True))
        return np.asarray(np.maximum(gpu, hbm)), np.asarray(link)

    low = last_within(lambda split: np.subtract(*times(split)), none, none + limit)
    best, shortest = none, np.maximum(*times(none))  # no kernel at all may be best
    for split in (low, np.minimum(low + 1, limit)):
        longer = np.maximum(*times(split))
        best = np.where(longer < shortest, split, best)
        shortest = np.minimum(longer, shortest)
    return best


def _shortest(place: "Place", at: LayerPass, limit: Number) -> Array:
    """The whole number of tokens that makes the step shortest where copies hold up the GPU.

    How much of that they do depends on when they start, so the timeline itself is asked: every
    clock of it is a maximum of sums, which are convex in the split where both parts have work.
    """
    d, p, shape = at.d, at.p, at.shape
    none = np.zeros(np.broadcast_shapes(np.shape(p.batch), np.shape(limit)))
    if input_width(d) >= d.shard.kv_width:
        return none

    whole = none + limit
    own = replace(place, split=whole)
    now = replace(at, parts=replace(at.parts, placement=own), known={})
    layer = (
        *own.ahead(now),
        *ops.before_attention(d, p, shape, own.weights_wait()),
        *at.selection.attend(now),
        *ops.after_attention(d, p, shape, at.parts.mlp, own.output_wait(now)),
    )
    head = closing(d, p)
    known = {id(op): seconds(op, d) for op in (*layer, *head)}  # most ops are alike in all splits

    def duration(op: Op, deployment: Deployment) -> Number:
        return known[id(op)] if id(op) in known else seconds(op, deployment)

    def took(split: Array) -> Number:
        if split.ndim > none.ndim and split[0].size >= MANY:
            return np.stack([np.asarray(took(one)) for one in split])
        moved = {op.name: op for op in fetch(place, at, split)}
        played = tuple(moved.get(op.name, op) for op in layer)
        step = Step((Group((played,), d.shard.layers * place.tiles),), head)
        return np.broadcast_to(steady(step, d, duration), split.shape)

    inside, least = least_of_convex(took, np.minimum(1.0, whole), np.maximum(whole - 1, 0.0), NEAR)
    without, all_of_it = np.asarray(took(np.stack([none, whole])))
    best = np.argmin([without, least, all_of_it], axis=0)  # no kernel may be best, or no copy
    return np.asarray(np.choose(best, [none, inside, whole]))


def _loads(some: list[Op], deployment: Deployment) -> tuple[Number, Number, Number]:
    """Time that the GPU, the link to it, and GPU memory as a channel work on some ops. [s]"""
    gpu = sum((seconds(op, deployment) for op in some if op.stream == "gpu"), ZERO)
    link = sum((seconds(op, deployment) for op in some if op.stream == "h2d"), ZERO)
    hbm = sum((channel_seconds(op, deployment).get("hbm", 0.0) for op in some), ZERO)
    return gpu, link, hbm
