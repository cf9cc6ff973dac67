"""KVPR: part of an offloaded cache is recomputed while the rest is still being copied.

C. Jiang, L. Gao, H. E. Zarch, M. Annavaram, "KVPR: efficient LLM inference with I/O-aware KV cache
partial recomputation", ACL Findings 2025, https://arxiv.org/abs/2411.17089

The cache lives in host memory, and with it the layer inputs X of its first tokens. To decode with
s' cached tokens, a layer of hidden size h and batch b

1. copies the inputs X[0:l] of the first l tokens to the GPU: b l h numbers       (equation 6),
2. recomputes their K = X W_K and V = X W_V on the GPU                            (7, 8, 9)
   while the keys and values of the other s' - l tokens are being copied: 2 b (s' - l) h numbers,
3. merges both parts and attends to them: the result is exact,
4. and sends the new token's keys and values home.

Copies for the next layer run beside the compute of this one, through two buffers. The scheduler
chooses the l that makes the layer's time shortest                                (10, 11).
By rows the batch passes through all layers with the weights on the GPU; by columns weights are
streamed too, and each layer serves several batches before the next layer (section 3.2).

``Kvpr`` has the paper's settings; ``Place`` is the placement that does the work, ``choose_split``
the scheduler. What any offloading does is in ``axes.placement``.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

import numpy as np

from kvsim.engine import attention, ops
from kvsim.engine.ops import output_ops
from kvsim.engine.roofline import channel_seconds, seconds
from kvsim.engine.timeline import steady_seconds
from kvsim.frozen import frozen
from kvsim.graph import Array, Group, Number, Op, Step
from kvsim.machines.deployment import Deployment
from kvsim.search import last_within, least_of_convex
from kvsim.techniques.axes.base import LayerPass, Part, Parts, Term
from kvsim.techniques.axes.placement import (
    BUFFER_FREE,
    ROW_OR_COLUMN,
    HostPlacement,
    positive,
    tokens_before,
)
from kvsim.techniques.axes.settings import param
from kvsim.techniques.axes.storage import PACKED_ON_HOST, packed_on_host

ZERO: Number = 0.0
GATHERED = 2  # accesses of layer inputs while they are joined to rows of one product
TURNED = 10  # of keys while they get positions: two products, a negated half, its joining, a sum
PLACED = 4  # of keys and values: sorted by head, then copied to where attention reads
LARGE_GRID = 2**12  # points from which on two searches at once no longer fit into the CPU's cache
SPLIT_TOLERANCE = 1e-3  # share of a step's time that a chosen split may leave on the table


@frozen
class Kvpr(Term):
    """Offloads the cache and recomputes part of it from layer inputs.

    References
    ----------
    .. [1] C. Jiang et al., "KVPR: efficient LLM inference with I/O-aware KV cache partial
       recomputation", ACL Findings 2025, section 3, https://arxiv.org/abs/2411.17089
    """

    name: ClassVar[str] = "kvpr"
    evidence_kind: ClassVar[str] = PACKED_ON_HOST

    split: Number | str = param("auto", "recomputed tokens", high=1e7, choices=("auto",))
    schedule: str = param("row", "order of layers and batch", choices=ROW_OR_COLUMN)
    bits: float = param(16, "bits per number on the host", choices=(4, 8, 16), gentler=1)
    parts: int = param(8, "parts of the batch in column order", low=1, high=1024)

    def pieces(self) -> tuple[Part, ...]:
        """The whole cache on the host, a part of it as layer inputs; by columns all weights too."""
        column = self.schedule == "column"
        place = Place(
            1.0, self.split, weights_host=1.0 if column else 0, parts=self.parts if column else 1
        )
        return (place, *packed_on_host(self.bits))

    def notes(self, at: LayerPass) -> tuple[str, ...]:
        """How much is recomputed, or why nothing is."""
        assert isinstance(at.placement, Place)
        return at.placement.split_notes(at)

    def options(self, deployment: Deployment, prompt: int, generate: int) -> Iterable[Term]:
        """Splits by sixteenths of the prompt, the balanced one, both schedules, and packed."""
        splits = np.floor(np.linspace(0, prompt, 17))[:, None, None]
        column = [Kvpr("auto", "column", bits) for bits in (16, 4)]
        return [Kvpr(splits), Kvpr(), Kvpr(bits=4), *column]


@frozen
class Place(HostPlacement):
    """Keeps shares of cache and weights on the host and recomputes ``split`` cached tokens.

    The notation's ``place``: every corner of the family, so that a plan can mix them by layer.
    """

    name = "place"

    @property
    def recomputes(self) -> bool:
        """Whether some of the host's tokens are recomputed."""
        return isinstance(self.split, str) or positive(self.split)

    def refuses(self, deployment: Deployment, parts: Parts) -> str:
        """Recomputation needs every token's own layer input, and fp16 beside what is copied."""
        if not self.recomputes or self.exceeds:
            return super().refuses(deployment, parts)
        selection, storage = parts.selection, parts.storage
        if positive(self.cache_disk):
            return "recomputation needs its layer inputs in host memory, but cache_disk is above 0"
        if not positive(self.host_share):
            return "split recomputes tokens on the host, but host_share is 0"
        if deployment.model.owners:
            return "recomputation needs a layer's own input, but some layers share another's cache"
        if selection.evicts != "never":
            return f"recomputation needs every token's layer input, but {selection.name} drops some"
        if storage.stored.packs and storage.read.packs:
            return (
                f"what is recomputed is fp16, and {storage.name} is attended to packed; "
                f"pack on the host alone (place with grouped:host=true)"
            )
        return super().refuses(deployment, parts)

    def notes(self, at: LayerPass) -> tuple[str, ...]:
        """How much is recomputed, or why nothing is."""
        return self.split_notes(at) if self.recomputes else ()

    # decoding: copy inputs, recompute while the rest arrives, merge

    def fetch(self, at: LayerPass) -> list[Op]:
        """Inputs first, then the rest of the host's tokens beside the recomputation."""
        if not (self.loads and self.recomputes):
            return super().fetch(at)
        return self.fetch_split(at, choose_split(self, at))

    def fetch_split(self, at: LayerPass, split: Number) -> list[Op]:
        """Return the ops that bring the host's tokens to the GPU, ``split`` of them recomputed.

        Parameters
        ----------
        split : tokens l per sequence whose keys and values are recomputed. [tokens]
        """
        d, p, m, stored = at.d, at.p, at.d.shard, at.storage.stored
        states = p.batch * split * input_width(d)  # X[0:l], b l h numbers (equation 6)
        rest = self.on_host(at) - split  # s' - l tokens, 2 b (s' - l) h numbers (equation 6)
        # K[0:l] = X[0:l] W_K and V[0:l] = X[0:l] W_V: 4 b l h^2 FLOPs for multi-head attention
        # (equations 7 and 8); their time (equation 9) is the roofline's of this product
        matrix = (m.hidden, m.kv_width)
        product = ops.gemm(d, "recompute", p.batch * split, matrix, after=("load_inputs",))
        wanted = np.asarray(split) > 0
        # the paper's OPT models learn positions; elsewhere recomputed keys get theirs once more
        keys = 0.0 if m.learned_positions else ops.FP16_BYTES * m.k_width * p.batch * split
        rotated, placed = 2.0 * keys, list[Op]()
        if d.stack.time.counted_launches:  # kernels of PyTorch turn and place, one after another
            both = ops.kv_bytes(m, p.batch * split)
            moved = GATHERED * ops.FP16_BYTES * states + TURNED * keys + PLACED * both
            rotated, placed = 0.0, [Op("place_recomputed", bytes={"hbm": moved})]
        recompute = replace(product, bytes={"hbm": (product.bytes["hbm"] + rotated) * wanted})
        merged: Number = 0.0
        if d.stack.offload.merge_passes:  # both parts are copied into one buffer
            merged = d.stack.offload.merge_passes * ops.kv_bytes(m, p.batch * split)
            merged = merged + 2 * ops.kv_bytes(m, p.batch * rest) * wanted
        inputs = ops.quantise(d, states / m.kv_width, stored, "dequantise_inputs")
        widened = ops.quantise(d, p.batch * rest, stored, "dequantise")
        size = states * stored.k_number
        return [
            ops.copy(
                "load_inputs", "h2d", size, kernel="copy", after=(BUFFER_FREE,), prefetch=True
            ),
            self.load(at, rest),
            *(replace(op, after=("load_inputs",)) for op in inputs),
            recompute,
            *placed,
            *(replace(op, after=("load_kv",)) for op in widened),
            Op("merge", bytes={"hbm": merged}, after=("load_kv",)),
        ]

    def on_host(self, at: LayerPass) -> Number:
        """Tokens per sequence whose keys are on the host before this pass. [tokens]"""
        return self.host_share * tokens_before(at)

    # prefill: the inputs that decoding recomputes from go home, in place of their keys and values

    def sent_share(self, at: LayerPass) -> Number:
        """All but the tokens that every step recomputes: their keys and values never go home."""
        if not (self.recomputes and at.p.prefill):
            return 1.0
        first, _ = self.first_and_last_split(at)
        return 1 - first / np.maximum(self.host_share * at.p.prompt, 1.0)

    def finish(self, at: LayerPass) -> list[Op]:
        """The inputs of all tokens that some step will recompute."""
        if not (self.recomputes and at.p.prefill):
            return []
        d, stored = at.d, at.storage.stored
        _, last = self.first_and_last_split(at)
        states = at.p.batch * last * input_width(d)
        packed = ops.quantise(d, states / d.shard.kv_width, stored, "quantise_inputs")
        after = ("quantise_inputs",) if packed else ("qkv",)
        size = states * stored.k_number
        return [*packed, ops.copy("store_inputs", "d2h", size, kernel="copy", after=after)]

    def first_and_last_split(self, at: LayerPass) -> tuple[Number, Number]:
        """Tokens recomputed in the first decoding step and in the last. [tokens]"""
        if "splits" not in at.known:
            p = at.part or at.p
            first = replace(p, context=p.prompt, new=1.0, prefill=False)
            last = replace(first, context=p.max_length - 1)
            at.known["splits"] = tuple(choose_split(self, at.in_pass(q)) for q in (first, last))
        splits: tuple[Number, Number] = at.known["splits"]
        return splits

    # memory

    def loaded_cache(self, at: LayerPass, home: tuple[Number, Number]) -> dict[str, Number]:
        """Keys and values but for those that every step recomputes; the layer inputs."""
        loaded = super().loaded_cache(at, home)
        if not self.recomputes:
            return loaded
        first, last = self.first_and_last_split(at)
        inputs = at.p.batch * last * input_width(at.d)
        return {
            "kv": loaded["kv"] * (1 - first / np.maximum(self.host_share * at.kept_tokens, 1.0)),
            "layer inputs": inputs * at.storage.stored.k_number,
        }

    def load_buffer(self, at: LayerPass) -> Number:
        """One layer's loaded tokens and the inputs of the others. [B]

        What is recomputed lands beside what was loaded, unless a pass joins both elsewhere.
        """
        if not self.recomputes:
            return super().load_buffer(at)
        d, stored = at.d, at.storage.stored
        _, split = self.first_and_last_split(at)
        tokens = self.host_share * at.kept_tokens
        if d.stack.offload.merge_passes:
            tokens = np.maximum(tokens - split, 0)
        kv = tokens * stored.token(d.shard.k_width, d.shard.v_width)
        size = at.p.batch * (kv + split * input_width(d) * stored.k_number)
        return self.drafted_on_host(at) + size

    def scratch(self, at: LayerPass) -> Number:
        """One more layer in fp16: where both parts are joined, or of a packed cache. [B]

        One packed layer is widened and recomputed while another is attended to. The update of a
        static cache fills the joined layer in prefill too.
        """
        widened, d = super().scratch(at), at.d
        if not (self.loads and self.recomputes):
            return widened
        merged = d.stack.offload.merge_passes > 0
        unused = at.p.prefill and not (d.stack.cache.static and merged)
        if unused or not (merged or at.storage.stored.packs):
            return widened
        _, split = self.first_and_last_split(at)
        whole = ops.kv_bytes(d.shard, at.p.batch * at.kept_tokens)
        return widened + whole * (np.asarray(split) > 0)

    def split_notes(self, at: LayerPass) -> tuple[str, ...]:
        """The split in use, and why it is 0 on grouped-query models."""
        d, m = at.d, at.d.shard
        width, split = input_width(d), float(np.ravel(choose_split(self, at))[0])
        if width < m.kv_width:
            cached = float(np.ravel(at.p.context)[0])
            rates = d.bandwidth["h2d"], d.flops("fp16")
            ideal = float(optimal_split(cached, m.hidden, *rates)) if m.queries_per_kv == 1 else 0
            everyone = (
                f"; each of {d.tp} GPUs loads the layer's whole input, {width:.0f} numbers per "
                f"token, where it would load {m.kv_width:.0f} of keys and values"
            )
            return (
                f"{split:.0f} of {cached:.0f} cached tokens are recomputed in the last step "
                f"(equation 11: {ideal:.0f})"
                f"{everyone if d.tp > 1 else ''}",
            )
        sharing = "a latent cache" if m.latent else f"{m.queries_per_kv} query heads per KV head"
        if d.tp > 1 and not m.latent:
            sharing += f" and {d.tp} GPUs that each load the layer's whole input"
        return (
            f"split {split:.0f}: with {sharing} a token's layer input ({width:.0f} numbers) is "
            f"no smaller than the keys and values it would replace ({m.kv_width:.0f}), so "
            f"recomputing saves no transfer and only adds work",
        )


# the scheduler: the split l that makes the layer's time shortest (equations 10 and 11)


def optimal_split(context: Number, width: Number, link: Number, flops: Number) -> Number:
    """Return the split at which recomputing and copying take equally long, for MHA. [tokens]

    Recomputing takes t_recomp = 4 b l h^2 / v_gpu (equations 8 and 9), copying the others
    4 b (s' - l) h / v_com at two bytes per number. The time of a layer (equation 10),

        t = 2 b l h / v_com + max(4 b l h^2 / v_gpu, 4 b (s' - l) h / v_com),

    falls up to their crossing l = s' / (1 + v_com h / v_gpu) and rises beyond it, with its first
    term (by columns) and without it (by rows): there lies the optimum of equation 11.

    Parameters
    ----------
    context : cached tokens s'. [tokens]
    width : hidden size h.
    link : rate of the host link, v_com. [B/s]
    flops : rate of the GPU, v_gpu. [FLOP/s]

    Returns
    -------
    Tokens to recompute, not rounded.

    References
    ----------
    .. [1] C. Jiang et al., "KVPR", equations 8 to 11, https://arxiv.org/abs/2411.17089
    """
    return context / (1.0 + link * width / flops)


def input_width(deployment: Deployment) -> float:
    """Return the numbers of a token's layer input h, whole on every shard."""
    return deployment.shard.hidden


def choose_split(place: Place, at: LayerPass) -> Number:
    """Return how many tokens a pass recomputes: as set, the runtime's share, or the best. [tokens]

    Equation 10 stands for a GPU and a link at constant rates. The best split is found with the
    times that the model gives each op, so that launches, saturation of the link and the layer's
    other work count. It is the paper's in the limit of large layers.

    Parameters
    ----------
    place : the placement with its setting ``split``.
    at : the decoding pass.

    Returns
    -------
    Whole tokens, at most the prompt's tokens that live on the host.
    """
    d, p, split = at.d, at.p, place.split
    limit: Number = np.floor(np.minimum(p.prompt, place.on_host(at)))
    if not isinstance(split, str):
        given: Number = np.minimum(split, limit)
        return given
    if d.stack.offload.split_prompt:
        fixed: Number = np.minimum(np.floor(d.stack.offload.split_prompt * p.prompt), limit)
        return fixed
    best = _balanced_split if d.stack.offload.overlap == 1 else _shortest_split
    balanced: Number = np.floor(best(place, at, limit))
    return balanced


def _balanced_split(place: Place, at: LayerPass, limit: Number) -> Array:
    """The whole number of tokens that makes the longer of GPU and link time shortest.

    GPU time grows with the split and link time falls, so the best is at their crossing. Where
    an input is no smaller than the keys and values it replaces, both grow: nothing is recomputed.
    """
    d, p, shape = at.d, at.p, at.shape
    none = np.zeros(np.broadcast_shapes(np.shape(p.batch), np.shape(limit)))
    if input_width(d) >= d.shard.kv_width:
        return none
    surroundings = [
        *place.prefetch(at),
        *ops.before_attention(d, p, shape),
        *attention.ops(d, p, shape),
        *ops.after_attention(d, p, shape),
    ]
    around = _busy_seconds(surroundings, d)
    # the link also runs beside the head: its time is spread over the layers
    head, _, _ = _busy_seconds(list(output_ops(d, p)), d)
    around = (around[0] + head / d.shard.layers / place.tiles, *around[1:])

    def times(split: Array) -> tuple[Array, Array]:
        moved = place.fetch_split(at, split)
        gpu, link, hbm = (a + b for a, b in zip(around, _busy_seconds(moved, d), strict=True))
        return np.asarray(np.maximum(gpu, hbm)), np.asarray(link)

    low = last_within(lambda split: np.subtract(*times(split)), none, none + limit)
    best, shortest = none, np.maximum(*times(none))  # no kernel at all may be best
    for split in (low, np.minimum(low + 1, limit)):
        longer = np.maximum(*times(split))
        best = np.where(longer < shortest, split, best)
        shortest = np.minimum(longer, shortest)
    return best


def _shortest_split(place: Place, at: LayerPass, limit: Number) -> Array:
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
        *own.prefetch(now),
        *ops.before_attention(d, p, shape, own.weights_wait()),
        *at.selection.attend(now),
        *ops.after_attention(d, p, shape, at.parts.mlp, own.output_wait(now)),
    )
    head = output_ops(d, p)
    known = {id(op): seconds(op, d) for op in (*layer, *head)}  # most ops are alike in all splits

    def duration(op: Op, deployment: Deployment) -> Number:
        return known[id(op)] if id(op) in known else seconds(op, deployment)

    def took(split: Array) -> Number:
        if split.ndim > none.ndim and split[0].size >= LARGE_GRID:
            return np.stack([np.asarray(took(one)) for one in split])
        moved = {op.name: op for op in place.fetch_split(at, split)}
        played = tuple(moved.get(op.name, op) for op in layer)
        step = Step((Group((played,), d.shard.layers * place.tiles),), head)
        return np.broadcast_to(steady_seconds(step, d, duration), split.shape)

    first, last = np.minimum(1.0, whole), np.maximum(whole - 1, 0.0)
    inside, least = least_of_convex(took, first, last, SPLIT_TOLERANCE)
    without, all_of_it = np.asarray(took(np.stack([none, whole])))
    best = np.argmin([without, least, all_of_it], axis=0)  # no kernel may be best, or no copy
    return np.asarray(np.choose(best, [none, inside, whole]))


def _busy_seconds(some: list[Op], deployment: Deployment) -> tuple[Number, Number, Number]:
    """Time that the GPU, the link to it, and GPU memory as a channel work on some ops. [s]"""
    gpu = sum((seconds(op, deployment) for op in some if op.stream == "gpu"), ZERO)
    link = sum((seconds(op, deployment) for op in some if op.stream == "h2d"), ZERO)
    hbm = sum((channel_seconds(op, deployment).get("hbm", 0.0) for op in some), ZERO)
    return gpu, link, hbm
