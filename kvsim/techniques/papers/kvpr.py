"""KVPR: part of an offloaded cache is recomputed while the rest is still being copied.

C. Jiang, L. Gao, H. E. Zarch, M. Annavaram, "KVPR: efficient LLM inference with I/O-aware KV cache
partial recomputation", ACL Findings 2025, https://arxiv.org/abs/2411.17089

The cache lives in host memory, and with it the layer inputs X of its first tokens: the numbers that
the layer's key and value products multiply, so behind its norm. To decode with s' cached tokens, a
layer of hidden size h and batch b

1. copies the inputs X[0:l] of the first l tokens to the GPU: b l h numbers       (equation 6),
2. recomputes their K = X W_K and V = X W_V on the GPU                            (7, 8, 9)
   while the keys and values of the other s' - l tokens are being copied: 2 b (s' - l) h numbers,
3. merges both parts and attends to them: the result is exact,
4. and copies the new token's keys and values to the host.

Copies for the next layer run beside the compute of this one, through two buffers. The scheduler
chooses the l that makes the layer's time shortest                                (10, 11).
By rows the batch passes through all layers with the weights on the GPU; by columns weights are
streamed too, and each layer serves several batches before the next layer (section 3.2).

Where kvsim departs from the paper:

- Only the prompt's layer inputs are stored, so l is at most the prompt's length, not s'.
- Tokens that every step recomputes have no keys and values in host memory.
- The copy of X[0:l] takes time on the link by rows, too; the paper leaves it out there (the first
  term of equation 10).
- Streamed weights arrive as one piece per layer, and the recomputation waits for all of it; the
  paper loads W_K and W_V first (section 3.3, figure 5).
- The hardware profile stands for the paper's profiler.

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
# Reads and writes of each number in GPU memory, by the PyTorch kernels around the recomputation.
GATHERED = 2  # layer inputs are copied into the rows of one matrix: 1 read, 1 write
TURNED = 10  # rotary positions of keys: 2 products, negation, concatenation and sum, 2 each
PLACED = 4  # keys and values are reordered by head, then copied into attention's buffer: 2 each
LARGE_GRID = 2**12  # grid points beyond which two searches at once overflow the CPU's cache
SPLIT_TOLERANCE = 1e-3  # accepted excess over the shortest step's time, relative


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
        """Return a placement on the host with recomputation; by columns also of all weights."""
        column = self.schedule == "column"
        place = Place(
            1.0, self.split, weights_host=1.0 if column else 0, parts=self.parts if column else 1
        )
        return (place, *packed_on_host(self.bits))

    def notes(self, at: LayerPass) -> tuple[str, ...]:
        """Return how many tokens are recomputed, or why none are."""
        assert isinstance(at.placement, Place)
        return at.placement.split_notes(at)

    def options(self, deployment: Deployment, prompt: int, generate: int) -> Iterable[Term]:
        """Return splits by sixteenths of the prompt and the balanced one, for both schedules."""
        splits = np.floor(np.linspace(0, prompt, 17))[:, None, None]
        column = [Kvpr("auto", "column", bits) for bits in (16, 4)]
        return [Kvpr(splits), Kvpr(), Kvpr(bits=4), *column]


@frozen
class Place(HostPlacement):
    """Keeps shares of cache and weights on the host and recomputes ``split`` cached tokens.

    Plans use it to choose for each layer which tokens stay on the GPU, are copied or are
    recomputed. Its name in the notation is ``place``.
    """

    name = "place"

    @property
    def recomputes(self) -> bool:
        """Whether some of the tokens on the host are recomputed."""
        return isinstance(self.split, str) or positive(self.split)

    def refuses(self, deployment: Deployment, parts: Parts) -> str:
        """Return why tokens cannot be recomputed from layer inputs, or an empty string."""
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
        """Return how many tokens are recomputed, or why none are."""
        return self.split_notes(at) if self.recomputes else ()

    # decoding: copy inputs, recompute while the rest arrives, merge

    def fetch(self, at: LayerPass) -> list[Op]:
        """Return the copies of layer inputs, then of other tokens, and the recomputation."""
        if not (self.loads and self.recomputes):
            return super().fetch(at)
        return self.fetch_split(at, choose_split(self, at))

    def fetch_split(self, at: LayerPass, split: Number) -> list[Op]:
        """Return the ops that bring the host's tokens to the GPU, ``split`` of them recomputed.

        Parameters
        ----------
        at : a decoding pass through the layer.
        split : tokens l per sequence whose keys and values are recomputed. [tokens]

        Returns
        -------
        list of Op
            In issue order; those on different streams run side by side.
        """
        d, p, m, stored = at.d, at.p, at.d.shard, at.storage.stored
        input_numbers = p.batch * split * input_width(d)  # X[0:l], b l h numbers (equation 6)
        loaded = self.on_host(at) - split  # s' - l tokens, 2 b (s' - l) h numbers (equation 6)
        # K[0:l] = X[0:l] W_K and V[0:l] = X[0:l] W_V: 4 b l h^2 FLOPs for multi-head attention
        # (equations 7 and 8); their time (equation 9) is the roofline's of this product
        matrix = (m.hidden, m.kv_width)
        product = ops.gemm(d, "recompute", p.batch * split, matrix, after=("load_inputs",))
        recomputes = np.asarray(split) > 0
        # the paper's OPT models add positions to inputs; rotary models rotate recomputed keys
        key_bytes = 0.0 if m.learned_positions else ops.FP16_BYTES * m.k_width * p.batch * split
        rotary_bytes, place = 2.0 * key_bytes, list[Op]()  # read and written once
        if d.stack.time.counted_launches:  # PyTorch: separate kernels rotate, reorder and copy
            both = ops.kv_bytes(m, p.batch * split)
            moved = GATHERED * ops.FP16_BYTES * input_numbers + TURNED * key_bytes + PLACED * both
            rotary_bytes, place = 0.0, [Op("place_recomputed", bytes={"hbm": moved})]
        hbm = (product.bytes["hbm"] + rotary_bytes) * recomputes
        recompute = replace(product, bytes={"hbm": hbm})
        merge_bytes: Number = 0.0
        if d.stack.offload.merge_passes:  # both parts are copied into one buffer
            merge_bytes = d.stack.offload.merge_passes * ops.kv_bytes(m, p.batch * split)
            merge_bytes = merge_bytes + 2 * ops.kv_bytes(m, p.batch * loaded) * recomputes
        widen_inputs = ops.quantise(d, input_numbers / m.kv_width, stored, "dequantise_inputs")
        widen_loaded = ops.quantise(d, p.batch * loaded, stored, "dequantise")
        size = input_numbers * stored.k_number
        return [
            ops.copy(
                "load_inputs", "h2d", size, kernel="copy", after=(BUFFER_FREE,), prefetch=True
            ),
            self.load(at, loaded),
            *(replace(op, after=("load_inputs",)) for op in widen_inputs),
            recompute,
            *place,
            *(replace(op, after=("load_kv",)) for op in widen_loaded),
            Op("merge", bytes={"hbm": merge_bytes}, after=("load_kv",)),
        ]

    def on_host(self, at: LayerPass) -> Number:
        """Return the tokens per sequence whose keys are on the host before the pass. [tokens]"""
        return self.host_share * tokens_before(at)

    # prefill: the host stores layer inputs in place of the keys and values that are recomputed

    def sent_share(self, at: LayerPass) -> Number:
        """Return the share of the prompt's keys and values that is stored on the host, 0 to 1.

        Keys and values that every step recomputes are not stored.
        """
        if not (self.recomputes and at.p.prefill):
            return 1.0
        first, _ = self.first_and_last_split(at)
        return 1 - first / np.maximum(self.host_share * at.p.prompt, 1.0)

    def finish(self, at: LayerPass) -> list[Op]:
        """Store the layer inputs of all tokens that any step will recompute on the host."""
        if not (self.recomputes and at.p.prefill):
            return []
        d, stored = at.d, at.storage.stored
        _, last = self.first_and_last_split(at)
        input_numbers = at.p.batch * last * input_width(d)
        packed = ops.quantise(d, input_numbers / d.shard.kv_width, stored, "quantise_inputs")
        after = ("quantise_inputs",) if packed else ("qkv",)
        size = input_numbers * stored.k_number
        return [*packed, ops.copy("store_inputs", "d2h", size, kernel="copy", after=after)]

    def first_and_last_split(self, at: LayerPass) -> tuple[Number, Number]:
        """Return the tokens per sequence that the first and the last decoding step recompute.

        Parameters
        ----------
        at : any pass through the layer.

        Returns
        -------
        tuple of Number
            The splits of the first and the last step. [tokens]
        """
        if "splits" not in at.known:
            p = at.part or at.p
            first = replace(p, context=p.prompt, new=1.0, prefill=False)
            last = replace(first, context=p.max_length - 1)
            at.known["splits"] = tuple(choose_split(self, at.in_pass(q)) for q in (first, last))
        splits: tuple[Number, Number] = at.known["splits"]
        return splits

    # memory

    def loaded_cache(self, at: LayerPass, home: tuple[Number, Number]) -> dict[str, Number]:
        """Return the size of the keys, values and layer inputs in host memory. [B] Keys and values
        that every step recomputes are not stored.
        """
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
        """Return the size of a buffer for one layer's loaded tokens and the others' inputs. [B]

        It has room for the recomputed keys and values too, unless a stack merges both parts in
        another buffer (``merge_passes``).
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
        """Return the size of one layer in fp16 that only attention needs. [B]

        It is used by stacks that merge the copied and the recomputed tokens, and by packed caches,
        whose next layer is unpacked and recomputed during the attention of this one. A static cache
        has it in prefill, too.
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
        """Return notes on the split in use, or on why nothing is recomputed."""
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
                f"(by equation 11 of the paper: {ideal:.0f})"
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
    """Return the width h of a token's layer input, which is not divided between shards."""
    return deployment.shard.hidden


def choose_split(place: Place, at: LayerPass) -> Number:
    """Choose how many tokens a pass recomputes.

    It is the number that was set, the stack's share of the prompt (``offload.split_prompt``), or
    the one with the shortest step. Equation 10 takes constant rates of GPU and link. Here
    the times are those that kvsim predicts of each op, with launches, small copies below the link's
    full rate and the layer's other work. For large layers both choices are the same.

    Parameters
    ----------
    place : the placement with its setting ``split``.
    at : the decoding pass.

    Returns
    -------
    Number
        Whole tokens per sequence, at most the prompt tokens on the host. [tokens]
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
    """Find the whole number of tokens that minimises the longer of GPU and link time. [tokens]

    GPU time grows with the split and link time falls, so the best is next to where they cross.
    Where a layer input is no smaller than the keys and values it replaces, both grow: nothing is
    recomputed.
    """
    d, p, shape = at.d, at.p, at.shape
    none = np.zeros(np.broadcast_shapes(np.shape(p.batch), np.shape(limit)))
    if input_width(d) >= d.shard.kv_width:
        return none
    other_ops = [
        *place.prefetch(at),
        *ops.before_attention(d, p, shape),
        *attention.ops(d, p, shape),
        *ops.after_attention(d, p, shape),
    ]
    others = _busy_seconds(other_ops, d)  # of the GPU, the link and GPU memory
    # the link also runs while the GPU computes the LM head: that time is spread over the layers
    head, _, _ = _busy_seconds(list(output_ops(d, p)), d)
    others = (others[0] + head / d.shard.layers / place.tiles, *others[1:])

    def times(split: Array) -> tuple[Array, Array]:
        fetch = place.fetch_split(at, split)
        gpu, link, hbm = (a + b for a, b in zip(others, _busy_seconds(fetch, d), strict=True))
        return np.asarray(np.maximum(gpu, hbm)), np.asarray(link)

    low = last_within(lambda split: np.subtract(*times(split)), none, none + limit)
    best, shortest = none, np.maximum(*times(none))  # 0 launches nothing and may be best
    for split in (low, np.minimum(low + 1, limit)):
        longer = np.maximum(*times(split))
        best = np.where(longer < shortest, split, best)
        shortest = np.minimum(longer, shortest)
    return best


def _shortest_split(place: Place, at: LayerPass, limit: Number) -> Array:
    """Find the whole number of tokens with the shortest simulated step. [tokens]

    It is used for stacks whose copies delay the GPU. The delay depends on when copies start, so
    each split is simulated on the timeline. Its end is a maximum of sums of op times and so convex
    in the
    split, except at 0 and at all tokens, where one of the two parts is empty: these are tried
    separately.
    """
    d, p, shape = at.d, at.p, at.shape
    none = np.zeros(np.broadcast_shapes(np.shape(p.batch), np.shape(limit)))
    if input_width(d) >= d.shard.kv_width:
        return none

    every = none + limit
    full_place = replace(place, split=every)
    full_at = replace(at, parts=replace(at.parts, placement=full_place), known={})
    layer = (
        *full_place.prefetch(full_at),
        *ops.before_attention(d, p, shape, full_place.weights_wait()),
        *at.selection.attend(full_at),
        *ops.after_attention(d, p, shape, at.parts.mlp, full_place.output_wait(full_at)),
    )
    head = output_ops(d, p)
    known = {id(op): seconds(op, d) for op in (*layer, *head)}  # most do not depend on the split

    def duration(op: Op, deployment: Deployment) -> Number:
        return known[id(op)] if id(op) in known else seconds(op, deployment)

    def step_seconds(split: Array) -> Number:
        if split.ndim > none.ndim and split[0].size >= LARGE_GRID:
            return np.stack([np.asarray(step_seconds(one)) for one in split])
        fetch = {op.name: op for op in place.fetch_split(at, split)}
        played = tuple(fetch.get(op.name, op) for op in layer)
        step = Step((Group((played,), d.shard.layers * place.tiles),), head)
        return np.broadcast_to(steady_seconds(step, d, duration), split.shape)

    first, last = np.minimum(1.0, every), np.maximum(every - 1, 0.0)
    inside, least = least_of_convex(step_seconds, first, last, SPLIT_TOLERANCE)
    at_none, at_every = np.asarray(step_seconds(np.stack([none, every])))
    best = np.argmin([at_none, least, at_every], axis=0)
    return np.asarray(np.choose(best, [none, inside, every]))


def _busy_seconds(some: list[Op], deployment: Deployment) -> tuple[Number, Number, Number]:
    """Return how long some ops occupy the GPU, the link to it, and GPU memory. [s]"""
    gpu = sum((seconds(op, deployment) for op in some if op.stream == "gpu"), ZERO)
    link = sum((seconds(op, deployment) for op in some if op.stream == "h2d"), ZERO)
    hbm = sum((channel_seconds(op, deployment).get("hbm", 0.0) for op in some), ZERO)
    return gpu, link, hbm
