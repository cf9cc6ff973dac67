"""What every technique is: parameters, ops between projections, and what stays resident.

A technique's file states ``attend`` (the ops between the projection of queries, keys and values
and the output projection) and ``cache`` (what one layer keeps). Everything else has a default
here and is overridden where the technique really differs.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import numpy as np

from kvsim.engine import attention
from kvsim.engine import ops as blocks
from kvsim.engine.formats import FP16, Format
from kvsim.graph import Buffers, Cycle, Group, Number, Op, Point, Step
from kvsim.machines.deployment import WEIGHTS, Deployment
from kvsim.models.model import LayerShape
from kvsim.techniques.settings import check, plain

SCORE_MEMORY = 8.0  # an eager score: fp16, its softmax in fp32, and that in fp16 again [B]
Layout = list[tuple[tuple[LayerShape, ...], int]]


@dataclass(frozen=True)
class Technique:
    """A way to keep and use the KV cache, with its settings.

    Numeric settings may be arrays that broadcast with a point's batch and context; those that
    change the structure of a step (bits, layers, gamma, schedules) are scalars.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool] = False  # same tokens as full-precision KV, up to rounding

    def __post_init__(self) -> None:
        for f in fields(self):
            check(self.name, f.name, getattr(self, f.name), f.metadata)

    # what a technique's file states

    def attend(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> list[Op]:
        """Ops between the projections of one layer."""
        raise NotImplementedError

    def cache(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> Buffers:
        """What one layer keeps resident besides its weights. [B]"""
        raise NotImplementedError

    # what a technique may override

    def refuses(self, d: Deployment) -> str:
        """Why it cannot run there, or nothing."""
        return ""

    @property
    def exact(self) -> bool:
        """Whether these settings give the tokens that full-precision KV gives."""
        return self.lossless

    @property
    def assumes(self) -> str:
        """What its speed rests on that the user has not said, if anything."""
        return ""

    def options(self, d: Deployment, prompt: int, generate: int) -> Iterable["Technique"]:
        """Settings worth considering for a workload; array-valued ones along the first axis."""
        return [self]

    def notes(self, d: Deployment, p: Point) -> tuple[str, ...]:
        """What a reader of a plan should know about these settings there."""
        return ()

    def gpu_layers_of(self, d: Deployment) -> int:
        """First layers whose cache stays on the GPU where others are offloaded."""
        return 0

    def tiles(self) -> int:
        """Parts of the batch that pass through a layer one after another."""
        return 1

    def once(self, d: Deployment, p: Point) -> Buffers:
        """Buffers that all layers share, for one tile's point. [B]"""
        return {}

    @property
    def stored(self) -> Format:
        """How cached numbers are stored."""
        return FP16

    def scratch(self, d: Deployment, p: Point) -> Number:
        """One layer's copies of the cache that are alive during attention only. [B]

        The grown copy of torch.cat, the heads repeat_kv writes out, an unpacked layer.
        """
        stack, m = d.stack, d.shard
        wider = m.queries_per_kv if m.queries_per_kv > 1 else 0.0
        tokens = p.max_length if stack.static_cache else p.length
        if not p.prefill and self.stored.bits < 16 and not stack.unpack_bytes:
            repeated = wider * stack.repeat_packed
            copies = repeated  # then keys or values are made contiguous, and values concatenated
            copies += 0.5 * max(1.0, repeated) if stack.packed_passes >= 3 else 0.0
            copies += 0.5 if stack.packed_passes >= 3 and not stack.old_cache else 0.0
            return copies * p.batch * self.stored.read(m.k_width, m.v_width, tokens)
        copies = 1.0 if stack.append_passes >= 2 and not stack.old_cache else 0.0
        copies += wider * stack.repeat_kv
        copies += 1.0 if stack.unpack_bytes and self.stored.bits < 16 else 0.0
        return copies * blocks.kv_bytes(m, sequences_alive(d, p) * tokens)

    def layer(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> list[Op]:
        """Ops of one decoder layer in issue order."""
        return [
            *blocks.before_attention(d, p),
            *self.attend(d, p, shape, on_gpu),
            *blocks.after_attention(d, p, shape),
        ]

    def weights(self, d: Deployment, shape: LayerShape) -> Buffers:
        """Resident weights of one layer. [B]"""
        return {"gpu": {"weights": d.stack.weight_copies * layer_weights(d, shape)}}

    # what follows from it

    def forward(self, d: Deployment, p: Point) -> Step:
        """One pass of the new tokens through the model."""
        tiles, part = self.tiles(), self._part(p)
        groups = []
        built: dict[tuple[LayerShape, bool], tuple[Op, ...]] = {}
        for shapes, count, on_gpu in self.layout(d):
            for shape in shapes:
                if (shape, on_gpu) not in built:
                    built[shape, on_gpu] = tuple(self.layer(d, part, shape, on_gpu))
            if len(set(shapes)) == 1:
                shapes, count = shapes[:1], count * len(shapes) * tiles
            else:
                shapes = tuple(s for s in shapes for _ in range(tiles))
            groups.append(Group(tuple(built[s, on_gpu] for s in shapes), count))
        return Step(tuple(groups), blocks.head(d, p))

    def resident(self, d: Deployment, p: Point) -> Buffers:
        """Bytes that one GPU and its share of the host hold during this pass. [B]"""
        part = self._part(p)
        packed = self.stored.bits < 16
        parts = [resident_once(d, part, self.scratch(d, part), packed), self.once(d, part)]
        for shapes, count, on_gpu in self.layout(d):
            for shape in shapes:
                cache = self.cache(d, p, shape, on_gpu)
                parts += [scale(x, count) for x in (self.weights(d, shape), cache)]
                if d.stack.old_cache and not p.prefill:
                    parts.append(scale(self._replaced(d, p, shape, cache), count))
        return merge(*parts)

    def _replaced(self, d: Deployment, p: Point, shape: LayerShape, cache: Buffers) -> Buffers:
        """What torch.cat writes anew of a layer's cache; packed keys only grow in blocks."""
        tokens = p.batch * attention.cached(d, p, shape)
        stays = d.shard.k_width * tokens * self.stored.number if self.stored.bits < 16 else 0.0
        return {"gpu": {"kv before the step": np.maximum(cache["gpu"].get("kv", 0.0) - stays, 0.0)}}

    def _part(self, p: Point) -> Point:
        return replace(p, batch=p.batch / self.tiles()) if self.tiles() > 1 else p

    def layout(self, d: Deployment) -> list[tuple[tuple[LayerShape, ...], int, bool]]:
        """Blocks of layers with how often each repeats, and whether its cache is on the GPU."""
        first, rest = split_layout(list(d.shard.layout), self.gpu_layers_of(d))
        return [(*block, True) for block in first] + [(*block, False) for block in rest]

    # phases

    def prefill(self, d: Deployment, p: Point) -> Step:
        """The pass over the prompt."""
        return self.forward(d, p)

    def between(self, d: Deployment, p: Point) -> tuple[Step, ...]:
        """Extra passes between prefill and the first decoding round."""
        return ()

    def cycle(self, d: Deployment, p: Point) -> Cycle:
        """One decoding round that starts with ``p.context`` cached tokens."""
        return Cycle((self.forward(d, p),), 1.0)

    # settings

    @property
    def settings(self) -> dict[str, Any]:
        """Parameters by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __str__(self) -> str:
        """Read back by the registry's ``parse``."""
        given = ",".join(f"{k}={plain(v)}" for k, v in self.settings.items())
        return f"{self.name}:{given}" if given else self.name

    def rows(self) -> list[Self]:
        """One technique with scalar settings per row of array-valued ones."""
        count = max([1, *(np.size(v) for v in self.settings.values())])
        return [
            replace(
                self,
                **{
                    k: plain(np.ravel(v)[i if np.size(v) > 1 else 0])
                    for k, v in self.settings.items()
                    if isinstance(v, np.ndarray)
                },
            )
            for i in range(count)
        ]


def merge(*parts: Buffers) -> Buffers:
    """Buffers of several owners in one table; equal names add up."""
    total: dict[Any, dict[str, Number]] = {}
    for part in parts:
        for tier, buffers in part.items():
            into = total.setdefault(tier, {})
            for name, size in buffers.items():
                into[name] = into.get(name, 0.0) + size
    return total


def scale(part: Buffers, by: Number) -> Buffers:
    """Every buffer ``by`` times."""
    return {tier: {k: by * v for k, v in buffers.items()} for tier, buffers in part.items()}


def split_layout(layout: Layout, first: int) -> tuple[Layout, Layout]:
    """The layout of the first layers, and that of the others."""
    before: Layout = []
    after: Layout = []
    for shapes, count in layout:
        whole, part = divmod(min(first, count * len(shapes)), len(shapes))
        first -= whole * len(shapes) + part
        before += [(shapes, whole)] if whole else []
        before += [(shapes[:part], 1)] if part else []
        after += [(shapes[part:], 1)] if part else []
        left = count - whole - (1 if part else 0)
        after += [(shapes, left)] if left else []
    return before, after


def layer_weights(d: Deployment, shape: LayerShape) -> float:
    """Stored weights of one layer of a shard; norms and biases are below 0.1 % and left out. [B]"""
    m, stored = d.shard, d.weight_format
    matrices = list(m.attention_matrices().values())
    if shape.routed:
        expert = m.mlp_matrices(m.expert_ffn).values()
        shared = m.mlp_matrices(m.shared_experts * m.expert_ffn).values()
        size = m.experts * sum(stored.bytes(*x) for x in expert)
        size += sum(stored.bytes(*x) for x in shared) if m.shared_experts else 0.0
        size += blocks.HALF * m.hidden * m.experts
    else:
        size = sum(stored.bytes(*x) for x in m.mlp_matrices(m.ffn).values())
    return size + sum(stored.bytes(*x) for x in matrices)


def sequences_alive(d: Deployment, p: Point) -> Number:
    """Sequences in a pass at once: in prefill as many as fit in a part, at least one."""
    if not p.prefill:
        return p.batch
    return np.minimum(p.batch, np.maximum(1.0, d.stack.prefill_chunk / np.maximum(p.new, 1.0)))


def resident_once(d: Deployment, part: Point, scratch: Number, packed: bool = False) -> Buffers:
    """Embedding, LM head, activations and the runtime's own memory. [B]

    Parameters
    ----------
    part : the point of one tile, whose activations are alive at once.
    scratch : what attention needs besides queries, keys, values and scores. [B]
    packed : whether the prompt's cache is packed.
    """
    m, stack = d.shard, d.stack
    table = WEIGHTS["fp16"].bytes(m.hidden, m.vocab)
    learned = blocks.HALF * m.learned_positions * m.hidden
    embedding = (table if m.tied else 2 * table) + learned
    chunk = (packed and stack.packed_chunk) or stack.prefill_chunk
    alive = np.minimum(part.tokens, chunk)
    length = part.max_length if stack.static_cache else part.length
    scores = SCORE_MEMORY * m.heads * length if attention.score_bytes(d, part) else 0.0
    hidden = stack.activation_passes * m.hidden
    attending = blocks.HALF * (hidden + m.heads * m.head_dim + m.kv_width) + scores
    width = max(m.ffn, m.experts_active * m.expert_ffn)
    mlp = blocks.HALF * (hidden + (3 if m.gated else 2) * width)
    # cosines and sines, of all positions and of those at hand
    turns = 0.0 if m.learned_positions else 2 * blocks.HALF * m.head_dim
    turned = turns * (part.max_length + part.new)
    rows = part.batch if part.prefill and not stack.prompt_logits else part.tokens
    layers = np.maximum(alive * attending + scratch, alive * mlp)
    return {
        "gpu": {
            "embedding": stack.weight_copies * embedding,
            "workspace": turned + np.maximum(layers, rows * m.vocab * stack.logit_bytes),
            "context": stack.context_memory,
        }
    }
