"""Passes through the model: the ops of its layers, one after another.

Layers whose weights are in host memory are computed there by the CPU for a few tokens, and for many
tokens their weights are copied to the GPU, which is then quicker; nothing runs beside either.

Data-parallel ranks and micro-batches of a pipeline share the sequences evenly: a pass of each takes
as long as that with the most. Decoding ranks are padded to that one, as a CUDA graph is one for all
ranks; prompts are read outside graphs, and ranks without one have no tokens for the experts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from kvsim.engine import attention, ops, recurrence
from kvsim.engine.buffers import expert_weights, layer_weights
from kvsim.engine.formats import FP16_BYTES
from kvsim.engine.ops import issue_seconds, output_ops
from kvsim.engine.timeline import makespan
from kvsim.graph import Group, Number, Op, Point, Step
from kvsim.machines.deployment import Deployment
from kvsim.machines.parallel import NETWORK, left_idle
from kvsim.models.kinds import split_layout
from kvsim.models.model import LayerShape
from kvsim.techniques.axes.base import Launches, LayerPass, Parts

Shapes = tuple[LayerShape, ...]
Layout = list[tuple[Shapes, int, Parts]]
"""Blocks of layers, how often each repeats, and what its layers do."""
Counted = list[tuple[LayerShape, int, Parts]]
"""Shapes of layers, how many there are, and what they do."""
RANKED_ALONE = 4096  # tokens that one program ranks, in ``validate/kernels/rows_triton.py``
MODEL_LAUNCHES = Launches(
    prefill={"sample": 3, "attn": 2}, draft={"sample": 3}, decode={"sample": 3}
)
"""Kernels of what every technique does in the same way."""
Pass = Literal["prefill", "draft", "decode"]
Known = dict[tuple[object, ...], list[Op]]
"""Ops around attention by what they depend on in one pass."""


def lay_out(
    deployment: Deployment, ranges: Sequence[tuple[int, int | None]], parts: Sequence[Parts]
) -> Layout:
    """Return the layout of a model whose layers have different parts.

    Parameters
    ----------
    deployment : model, machine and software.
    ranges : first and last layer of each range; None for the model's last layer.
    parts : parts of the layers in each range.
    """
    found: Layout = []
    rest = list(deployment.shard.layout)
    segments = [*_segments(deployment, ranges, parts)]
    firsts = [*(first for first, _ in segments), deployment.model.layers]
    for (first, following), (_, own) in zip(pairwise(firsts), segments, strict=True):
        before, rest = split_layout(rest, following - first)
        found += [(*block, own) for block in before]
    return found


def count_layers(layout: Layout) -> Counted:
    """Count the layers of each shape that have the same parts.

    Parameters
    ----------
    layout : blocks of layers in order.
    """
    found: dict[tuple[int, LayerShape], tuple[int, Parts]] = {}
    for shapes, count, parts in layout:
        for shape in shapes:
            others, _ = found.get((id(parts), shape), (0, parts))
            found[id(parts), shape] = others + count, parts
    return [(shape, *some) for (_, shape), some in found.items()]


def _segments(
    deployment: Deployment, ranges: Sequence[tuple[int, int | None]], parts: Sequence[Parts]
) -> Iterator[tuple[int, Parts]]:
    """Yield the first layer of each segment of equal layers, with its parts."""
    latest: Parts | None = None
    for (first, last), own in zip(ranges, parts, strict=True):
        end = deployment.model.layers if last is None else min(last + 1, deployment.model.layers)
        for begin in [first, *sorted(b for b in own.boundaries(deployment) if first < b < end)]:
            now = own.for_layer(begin, deployment)
            if latest is None or not same_parts(latest, now):
                yield begin, now
                latest = now


def same_parts(one: Parts, other: Parts) -> bool:
    """Return whether two layers have equal parts; settings may be arrays.

    Parameters
    ----------
    one, other : the parts of the two layers.
    """
    if one is other:
        return True
    pairs = zip(one.by_axis(), other.by_axis(), strict=True)
    return one.mlp == other.mlp and all(
        a.name == b.name
        and all(np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
        for a, b in pairs
    )


def count_kernels(
    ops: Iterable[Op], tables: Iterable[Launches], kind: Pass, tokens: Number = 0.0
) -> tuple[Op, ...]:
    """Return ops with the number of kernels that kvsim's own implementations launch for each.

    Parameters
    ----------
    tables : launch tables of the parts that run the ops.
    tokens : tokens cached per sequence after the pass. [tokens]
    """
    stated = [getattr(table, kind) for table in (MODEL_LAUNCHES, *tables)]
    found = []
    for op in ops:
        few: Number = 0
        more = 0
        for table in stated:
            one, besides = pair if isinstance(pair := table.get(op.name, 0), tuple) else (pair, 0)
            few, more = few + one, more + besides
        if more:
            few = few + more * (np.asarray(tokens) > RANKED_ALONE)
        found.append(replace(op, launches=few * op.launches) if np.any(few) else op)
    return tuple(found)


def count_layer_kernels(at: LayerPass, ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Return a layer's ops with the number of kernels that the stack launches for each.

    Parameters
    ----------
    at : the pass through the layer.
    ops : ops of the layer, in issue order.
    """
    if not at.d.stack.time.counted_launches:
        return ops
    kind: Pass = "prefill" if at.p.prefill else "decode" if at.parts.keeps else "draft"
    tables = (table for part in at.parts.by_axis() for table in part.launch_tables)
    return count_kernels(ops, tables, kind, at.p.length)


def forward(deployment: Deployment, point: Point, layout: Layout) -> Step:
    """Return one forward pass of the new tokens through the model.

    Parameters
    ----------
    deployment : model, machine and software.
    point : batch, context and new tokens of the pass.
    layout : blocks of layers with their parts.
    """
    groups: list[Group] = []
    before: Parts | None = None
    known: Known = {}
    made: dict[tuple[int, LayerShape], tuple[Op, ...]] = {}  # layers that do the same are the same
    for shapes, count, parts in layout:
        tiles, part = parts.placement.tiles, tile_point(point, parts)
        built: dict[LayerShape, tuple[Op, ...]] = {}
        for s in dict.fromkeys(shapes):
            if (id(parts), s) not in made:
                made[id(parts), s] = layer_ops(LayerPass(deployment, part, s, parts), known)
            built[s] = made[id(parts), s]
        if len(built) == 1:
            shapes, count = shapes[:1], count * len(shapes) * tiles
        else:
            shapes = tuple(s for s in shapes for _ in range(tiles))
        if _leaves_to_cpu(parts, point):
            built |= {s: _after_cpu(ops) for s, ops in built.items() if not s.attends}
        block = tuple(built[s] for s in shapes)
        if before is not None and before is not parts and _leaves_to_cpu(before, point):
            groups.append(Group((_after_cpu(block[0]), *block[1:]), 1))
            count -= 1
        if count:
            groups.append(Group(block, count))
        before = parts
    issued = issue_seconds(deployment, groups, point.tokens) if point.prefill else 0.0
    head = output_ops(deployment, point, issued=issued)
    if deployment.stack.time.counted_launches:
        head = count_kernels(head, (), "prefill" if point.prefill else "decode")
    return Step(tuple(groups), head)


def _leaves_to_cpu(parts: Parts, point: Point) -> bool:
    """Whether the CPU is still computing attention when a layer's kernels have been launched."""
    place = parts.placement
    return not point.prefill and place.tiles > 1 and bool(np.any(place.on_cpu))


def layer_ops(at: LayerPass, known: Known | None = None) -> tuple[Op, ...]:
    """Return the ops of one decoder layer in issue order.

    Parameters
    ----------
    at : the pass through the layer.
    known : values shared by layers of the same pass; extended in place.
    """
    place, known = at.placement, {} if known is None else known
    around = at.shape.window_free
    before = (place.tiles, around, place.weights_wait())
    answered = place.output_wait(at) if at.shape.attends else ()
    behind = (place.tiles, around, answered, at.parts.mlp)
    if before not in known:
        known[before] = ops.before_attention(at.d, at.p, at.shape, place.weights_wait())
    if behind not in known:
        known[behind] = ops.after_attention(at.d, at.p, at.shape, at.parts.mlp, answered)
    found = (*place.prefetch(at), *known[before], *mix_tokens(at), *known[behind])
    return count_layer_kernels(at, place_host_weights(at.d, at.p, at.shape, found))


def mix_tokens(at: LayerPass) -> list[Op]:
    """Return the ops of attention or of a recurrence, between a layer's projections.

    Techniques change layers with a cache only; layers with a state run unchanged.

    Parameters
    ----------
    at : the pass through the layer.
    """
    if at.shape.mixer == "recurrent":
        return recurrence.ops(at.d, at.p)
    if not at.shape.attends:
        return [recurrence.end()]
    chosen = attention.indexer_ops(at.d, at.p, at.kept_tokens)
    own = at.selection.attend if at.shape.keeps else at.selection.borrow
    return [*chosen, *own(at)]


def _after_cpu(layer: tuple[Op, ...]) -> tuple[Op, ...]:
    """Return a layer's ops, which start when the CPU has finished the layer before."""
    start = next(i for i, op in enumerate(layer) if op.stream == "gpu")
    waiting = replace(layer[start], after=(*layer[start].after, "return_out@-1"))
    return (*layer[:start], waiting, *layer[start + 1 :])


def join_steps(steps: list[Step]) -> Step:
    """Join several passes that run one after another into one step.

    Parameters
    ----------
    steps : in order.
    """
    if len(steps) == 1:
        return steps[0]
    groups = tuple(group for step in steps for group in step.groups)
    return Step(groups, tuple(op for step in steps for op in step.head))


def tile_point(point: Point, parts: Parts) -> Point:
    """Return the operating point of one part of the batch.

    Parameters
    ----------
    point : operating point of the whole batch.
    parts : parts of the layers.
    """
    tiles = parts.placement.tiles
    return replace(point, batch=point.batch / tiles) if tiles > 1 else point


PART = 8192.0  # tokens of prompts in a pass, vLLM's budget on these cards [tokens]


def divided_pass(deployment: Deployment, point: Point, forward: Callable[[Point], Step]) -> Step:
    """Return one pass of a replica, divided over data-parallel ranks and micro-batches.

    Decoding uses one micro-batch per pipeline stage. A round takes the time of the slowest stage
    times the number of micro-batches, and at least one pass through all stages. Prompts are
    processed in passes of about ``PART`` tokens.

    Parameters
    ----------
    point : operating point of the whole replica.
    forward : the pass of one micro-batch on one rank.
    """
    d = deployment
    if point.prefill and d.stack.time.prompt_pass:
        return _in_parts(d, point, forward)
    if d.single_pass:
        return forward(point)
    each = np.ceil(point.batch / d.dp)
    own = np.ceil(each / d.pp)
    if point.prefill and d.pp > 1:
        own = np.minimum(own, np.maximum(1.0, PART // np.maximum(point.new, 1.0)))
    step = forward(replace(point, batch=own, ranks=point.batch / each if point.prefill else None))
    if d.pp == 1:
        return step
    send = _sending(d, FP16_BYTES * own * point.new * d.model.hidden)
    through = makespan(step, d) + (d.pp - 1) * send
    slowest = _slowest(step, d) + send
    if point.prefill:
        wait = (np.ceil(each / own) - 1) * slowest
    else:
        wait = np.maximum(0.0, np.minimum(float(d.pp), each) * slowest - through)
    stages = Op("stages", kernel="copy", fixed=(d.pp - 1) * send + wait, launches=0.0)
    return Step(step.groups, (*step.head, stages))


def _in_parts(d: Deployment, point: Point, forward: Callable[[Point], Step]) -> Step:
    """Return the prefill of prompts in passes of limited size, each through all stages.

    The passes are alike: of the mean length, at the mean context. The head runs once per prompt.
    """
    most = d.stack.time.prompt_pass
    parts = np.ceil(point.new / most)
    together = np.clip(np.floor(most / point.new), 1.0, point.batch)
    new = point.new / parts
    own = replace(point, batch=together, new=new, context=point.context + (point.new - new) / 2)
    step = forward(own)
    prompts = point.batch / together
    passes = parts * prompts
    head = _repeated(step.head, prompts)
    if d.pp == 1:
        groups = [
            Group(tuple(_repeated(layer, passes) for layer in group.layers), group.count)
            for group in step.groups
        ]
        return Step(tuple(groups), head)
    send = _sending(d, FP16_BYTES * own.tokens * d.model.hidden)
    through, slowest = makespan(step, d), _slowest(step, d) + send
    beside = slowest + (1 - d.stack.time.stage_overlap) * np.maximum(0.0, through - slowest)
    later = (d.pp - 1) * send + (passes - 1) * beside
    return Step(step.groups, (*head, Op("stages", kernel="copy", fixed=later, launches=0.0)))


def _repeated(ops: tuple[Op, ...], times: Number) -> tuple[Op, ...]:
    return tuple(replace(op, times=times * op.times) for op in ops)


def _sending(d: Deployment, data: Number) -> Number:
    """Return the time to send hidden states to the next stage, divided over its GPUs. [s]"""
    link = NETWORK if d.parallelism.stage >= d.domain else d.hardware.links["link"]
    return d.stack.time.stage + link.latency + data / d.tp / link.bandwidth


def _slowest(step: Step, d: Deployment) -> Number:
    """Time of the slowest stage: one with a layer more, or the last one, which has the head. [s]

    Layers are divided as evenly as can be; the last stage has no more than the others.
    """
    few, more = divmod(d.model.layers, d.pp)
    layers = step.groups[-1].layers[-1:]
    longest = makespan(Step((Group(layers, few + (more > 0)),), ()), d)
    return np.maximum(longest, makespan(Step((Group(layers, few),), step.head), d))


STATE_BYTES = 4.0  # of a hidden state's number as it travels: fp32 in llama.cpp [B]
EXCHANGES = ("experts_to", "experts_back")


def place_host_weights(
    deployment: Deployment, point: Point, shape: LayerShape, found: tuple[Op, ...]
) -> tuple[Op, ...]:
    """Replace the ops of a layer whose weights are in host memory.

    Either the CPU multiplies with these weights, and hidden states are sent to it and back, or the
    weights are copied to the GPU for the pass. Which of the two follows from the host's settings
    and, if these leave it open, from the tokens in the pass.

    Parameters
    ----------
    deployment
        Model, machine and software stack.
    point
        The pass, or arrays of passes.
    shape
        Kind of the layer.
    found
        Its ops with all weights on the GPU, in issue order.

    Returns
    -------
    tuple of Op
        The layer's ops in issue order; ``found`` itself if its weights are all on the GPU.
    """
    if not shape.home:
        return found
    own = [i for i, op in enumerate(found) if _is_away(op, shape)]
    if not own:
        return found
    before, after = found[: own[0]], [op for i, op in enumerate(found) if i > own[0]]
    moved = [found[i] for i in own]
    kept = [op for op in after if not _is_away(op, shape)]
    wide = _streamed(deployment, point)
    states = STATE_BYTES * point.tokens * deployment.shard.hidden
    if not before:  # in the GPU's queue, so that it waits for the layer and the step before
        before = (Op("give_states", bytes={"hbm": states}),)
    previous = (before[-1].name,)
    computed = _on_cpu(moved, states, 1.0 - wide, previous)
    copied = _on_gpu(deployment, point, shape, moved, wide, previous)
    return (*before, *computed, *copied, *kept)


def _is_away(op: Op, shape: LayerShape) -> bool:
    """Whether an op multiplies with weights that are in host memory."""
    if op.stream != "gpu" or op.kernel == "allreduce":
        return False
    experts = op.name.startswith("experts_") and op.name not in EXCHANGES
    if shape.home == "experts":
        return experts
    return shape.home == "layer" or experts or op.name in ("router", "up", "down")


def _streamed(deployment: Deployment, point: Point) -> Number:
    """Return 1 if weights are copied to the GPU for a pass, 0 if the CPU multiplies with them."""
    way, least = deployment.host.way, deployment.stack.offload.stream
    if way != "auto" or not least:
        return 1.0 if way == "streamed" else 0.0
    return np.asarray(np.asarray(point.tokens) >= least, dtype=float)


def _on_cpu(moved: list[Op], states: Number, share: Number, previous: tuple[str, ...]) -> list[Op]:
    """Return the ops of multiplying on the CPU, with copies of hidden states there and back."""
    if not np.any(share):
        return []
    flops = sum((op.flops for op in moved), np.zeros(()))
    read = sum((op.bytes.get("hbm", 0.0) for op in moved), np.zeros(()))
    product = Op(
        "host_product",
        "cpu",
        "host",
        share * flops,
        {"dram": share * read},
        after=("send_states_home",),
    )
    return [
        ops.copy("send_states_home", "d2h", share * states, kernel="copy", after=previous),
        product,
        ops.copy("return_states", "h2d", share * states, kernel="copy", after=("host_product",)),
        Op("take_states", bytes={"hbm": share * states}, after=("return_states",)),
    ]


def _on_gpu(
    deployment: Deployment,
    point: Point,
    shape: LayerShape,
    moved: list[Op],
    share: Number,
    previous: tuple[str, ...],
) -> list[Op]:
    """Return the ops of copying weights to the GPU; of experts, only those that tokens use."""
    if not np.any(share):
        return []
    size: Number = layer_weights(deployment, shape, on_host=True)
    if shape.routed:
        m = deployment.shard
        called, popularity = m.experts_active / m.experts, deployment.stack.sums.popularity
        size = size - expert_weights(deployment) * left_idle(called, point.tokens, popularity)
    load = ops.copy("load_host_weights", "h2d", share * size, kernel="copy", after=previous)
    load = replace(load, fixed=share * size * _staging(deployment))
    scaled = [
        replace(
            op,
            flops=share * op.flops,
            bytes={channel: share * n for channel, n in op.bytes.items()},
            fixed=share * op.fixed,
            unpacked=share * op.unpacked,
        )
        for op in moved
    ]
    first = replace(scaled[0], after=(*scaled[0].after, "load_host_weights"))
    return [load, first, *scaled[1:]]


def _staging(deployment: Deployment) -> float:
    """Return the additional time per byte of copying memory that is not pinned. [s/B]

    The driver copies it through its own pinned buffer, at a rate that the host limits.
    """
    stack = deployment.stack
    if not stack.offload.pageable:
        return 0.0
    linked = 1.0 / (deployment.bandwidth["h2d"] * stack.kernel("copy").memory)
    return max(0.0, 1.0 / stack.offload.pageable - linked)
