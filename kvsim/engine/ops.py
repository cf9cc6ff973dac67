"""Building blocks of techniques: the ops of a decoder layer, and its resident memory.

Every formula of the simulator that is not one technique's own stands here once. Widths are those
of one tensor-parallel shard; numbers outside the cache are fp16 unless a weight format says
otherwise.
"""

from collections.abc import Iterable
from functools import reduce

import numpy as np

from kvsim.engine.formats import FP16_BYTES as FP16_BYTES
from kvsim.engine.formats import Format
from kvsim.graph import Buffers, Channel, Group, Number, Op, Point, Stream
from kvsim.machines.deployment import WEIGHT_FORMATS, Deployment, WeightFormat, experts_class
from kvsim.machines.hardware import Stack
from kvsim.machines.parallel import NETWORK, left_idle
from kvsim.models.model import LayerShape, Model

FP32_BYTES = 4.0  # [B]
MOST_CALLED = 0.99  # share of a GPU's experts that one token calls for at most
SCORE = 2 * FP16_BYTES  # an fp16 attention score that leaves the chip: written once, read once [B]


def kv_bytes(model: Model, tokens: Number) -> Number:
    """Compute the size of fp16 keys and values in one layer.

    Parameters
    ----------
    model
        The model.
    tokens
        Cached tokens of all sequences. [tokens]

    Returns
    -------
    Number
        Size. [B]
    """
    return FP16_BYTES * model.kv_width * tokens


def prompt_kv(deployment: Deployment, point: Point) -> Buffers:
    """Return the buffer of fp16 keys and values that a layer needs only during prefill.

    Parameters
    ----------
    deployment
        Model, machine and software stack.
    point
        The pass, or arrays of passes.

    Returns
    -------
    Buffers
        One buffer on the GPU, empty in decoding. [B]
    """
    return {
        "gpu": {"prompt kv": kv_bytes(deployment.shard, point.tokens) if point.prefill else 0.0}
    }


def gemm(
    deployment: Deployment,
    name: str,
    tokens: Number,
    matrix: tuple[int, int],
    weights: WeightFormat | None = None,
    after: tuple[str, ...] = (),
) -> Op:
    """Multiply the hidden states of some tokens by one weight matrix.

    Parameters
    ----------
    deployment
        Model, machine and software stack.
    name
        Name of the op.
    tokens
        Rows of the product. [tokens]
    matrix
        Inputs and outputs of the weight matrix.
    weights
        How the matrix is stored; None for the deployment's format.
    after
        Ops that this one waits for, besides those before it on its stream.

    Returns
    -------
    Op
        The kernel, with the time to widen packed weights and to quantise its input.
    """
    inputs, outputs = matrix
    stored = weights or deployment.stored(name)
    bias = FP16_BYTES * outputs if deployment.shard.biased(name) else 0.0
    kernel = deployment.stack.kernel(stored.kernel)
    read = inputs * kernel.input_passes
    passes = deployment.weight_passes(stored, tokens)
    moved = passes * stored.bytes(inputs, outputs) + bias + FP16_BYTES * tokens * (read + outputs)
    return Op(
        name,
        kernel=stored.kernel,
        flops=2.0 * tokens * inputs * outputs,
        bytes={"hbm": moved},
        size=tokens,
        columns=outputs,
        dtype=deployment.product_dtype(stored),
        chain=kernel.walk * inputs,
        fixed=unpacking(deployment, stored, passes * inputs * outputs, tokens)
        + quantising(deployment, stored, tokens * inputs),
        after=after,
    )


def quantising(deployment: Deployment, stored: WeightFormat, numbers: Number) -> Number:
    """Compute the time to quantise the fp16 input of a matrix product to 8 bits.

    Parameters
    ----------
    deployment
        Model, machine and software stack.
    stored
        Format of the weights.
    numbers
        Number of elements of the input.

    Returns
    -------
    Number
        Zero unless the format quantises inputs dynamically. [s]
    """
    if not stored.dynamic:
        return deployment.stack.time.quantise if stored.dtype in ("fp8", "fp4") else 0.0
    kernel = deployment.stack.kernel("quantise-input")
    moved = (FP16_BYTES + 1) * numbers
    return kernel.floor + moved / (deployment.bandwidth["hbm"] * kernel.memory)


def unpacking(
    deployment: Deployment, stored: WeightFormat, weights: Number, rows: Number
) -> Number:
    """Compute the time to widen packed weights that is not hidden by loading them.

    Kernels that widen weights in registers take time for arithmetic. Software that widens them
    before the product moves them through memory once more, either always or for products of many
    rows.

    Parameters
    ----------
    deployment
        Model, machine and software stack.
    stored
        Format of the weights.
    weights
        Number of weights in the matrix.
    rows
        Rows of the product.

    Returns
    -------
    Number
        Zero for 16-bit weights, and for formats in which products are computed directly. [s]
    """
    if stored.bits == 16 or stored.dtype != "fp16":
        return 0.0
    stack = deployment.stack
    rate = deployment.bandwidth["hbm"] * stack.kernel("pointwise").memory
    took: Number = stack.weights.unpack_ops * stored.unpack / (deployment.flops("fp32") / 2)
    as_integers = deployment.product_dtype(stored) == "int8"
    moved: Number = 0.0 if as_integers else stack.weights.unpack_bytes / rate
    if stack.weights.unpack_rows:
        moved = moved * (np.asarray(rows) >= stack.weights.unpack_rows)
    return (took + moved) * weights


def before_attention(
    deployment: Deployment, point: Point, shape: LayerShape, after: tuple[str, ...] = ()
) -> list[Op]:
    """Return a layer's ops before attention: pointwise kernels, and query, key and value products.

    Norms, positions, residuals and the activation of the MLP are counted here for the whole layer.

    Parameters
    ----------
    deployment
        Model, machine and software stack.
    point
        The forward pass, or arrays of passes.
    shape
        Kind of the layer.
    after
        Names of ops that these wait for, besides those before them on their stream.

    Returns
    -------
    list of Op
        The ops in issue order.
    """
    m = deployment.shard
    active = (m.experts_active * m.expert_ffn or m.ffn) if shape.mlp else 0
    passes = deployment.stack.time.pointwise_passes * ((2 * m.norms + 2) * m.hidden + 3 * active)
    matrices = m.mixer_matrices(shape)
    latent = deployment.stack.time.latent if "kv_up" in matrices else 0.0
    small = Op(
        "pointwise",
        kernel="pointwise",
        bytes={"hbm": FP16_BYTES * point.tokens * passes},
        launches=deployment.stack.time.pointwise_launches,
        fixed=deployment.stack.time.layer + latent + _further_kernels(deployment.stack),
    )
    made_later = ("out", "kv_up")
    ops = [small]
    for name, matrix in matrices.items():
        if name not in made_later:
            waits = after if len(ops) == 1 else ()
            stored = deployment.mixer_stored(name)
            ops.append(gemm(deployment, name, point.tokens, matrix, stored, after=waits))
    return [*ops, *_wide_norms(deployment, point)]


def _wide_norms(deployment: Deployment, point: Point) -> list[Op]:
    """Return norms over the queries and keys of all heads, which GPUs of a group compute in part.

    Each adds up the squares of its part, and the group adds up two sums per token.
    """
    m, launches = deployment.shard, deployment.stack.time.wide_norm_launches
    if not (m.wide_norms and launches and deployment.tp > 1):
        return []
    moved = FP16_BYTES * 2 * point.tokens * (m.heads + m.kv_heads) * m.head_dim
    floors = (launches - 1.0) * deployment.stack.kernel("pointwise").floor
    squares = Op("norms", kernel="pointwise", bytes={"hbm": moved}, launches=launches, fixed=floors)
    return [squares, *all_reduce(deployment, "norm_sum", FP32_BYTES * 2 * point.tokens)]


def _further_kernels(stack: Stack) -> float:
    """Return the minimum time of a layer's small kernels except the first."""
    return max(stack.time.pointwise_launches - 1.0, 0.0) * stack.kernel("pointwise").floor


def after_attention(
    deployment: Deployment,
    point: Point,
    shape: LayerShape,
    weights: WeightFormat | None = None,
    after: tuple[str, ...] = (),
) -> list[Op]:
    """Return a layer's ops after attention: output projection, MLP and tensor-parallel sums.

    Parameters
    ----------
    deployment
        Model, machine and software stack.
    point
        The forward pass, or arrays of passes.
    shape
        Kind of the layer.
    weights
        Format of the MLP's weights; None for the deployment's.
    after
        Names of ops that these wait for, besides those before them on their stream.

    Returns
    -------
    list of Op
        The ops in issue order.
    """
    m = deployment.shard
    found: list[Op] = []
    states = FP16_BYTES * point.tokens * m.hidden
    out = m.mixer_matrices(shape).get("out")
    if out:
        stored = deployment.mixer_stored("out")
        found.append(gemm(deployment, "out", point.tokens, out, stored, after=after))
        found += all_reduce(deployment, "out_sum", states)
    if m.side:
        found.append(gemm(deployment, "side", point.tokens, (m.hidden, m.side)))
    if shape.routed:
        found += _experts(deployment, point)
    elif shape.mlp:
        found += _mlp(deployment, point, m.ffn, weights)
    return [*found, *all_reduce(deployment, "mlp_sum", states)] if shape.mlp else found


def _mlp(
    deployment: Deployment, point: Point, width: int, weights: WeightFormat | None = None
) -> list[Op]:
    return [
        gemm(deployment, name, point.tokens, matrix, weights)
        for name, matrix in deployment.shard.mlp_matrices(width).items()
    ]


def _experts(deployment: Deployment, point: Point) -> list[Op]:
    """Return the ops of the router, of the routed experts in use, and of the shared ones."""
    m = deployment.shard
    ops = [gemm(deployment, "router", point.tokens, (m.hidden, m.experts), WEIGHT_FORMATS["fp16"])]
    if deployment.stack.time.routing:
        ops.append(Op("routing", fixed=deployment.stack.time.routing, launches=0.0))
    ops += exchange_tokens(deployment, "experts_to", point.tokens, point.ranks)
    ops += routed_experts(deployment, point)
    ops += exchange_tokens(deployment, "experts_back", point.tokens, point.ranks)
    return (
        [*ops, *_mlp(deployment, point, m.shared_experts * m.expert_ffn)]
        if m.shared_experts
        else ops
    )


def routed_experts(deployment: Deployment, point: Point, foreign: Number | None = None) -> list[Op]:
    """Return the ops of the routed experts that a pass calls, and of the traffic between GPUs.

    The tokens are those of all data-parallel ranks, the experts those of the busiest GPU.

    Parameters
    ----------
    deployment
        Model, machine and software stack.
    point
        The forward pass, or arrays of passes.
    foreign
        Copies of tokens that this GPU receives for experts of other GPUs and discards. [tokens]
        If None, it is computed: 0 if tokens are sent only to the GPUs of their experts, and all
        others if every GPU receives all tokens.

    Returns
    -------
    list of Op
        The ops in issue order.
    """
    m = deployment.shard
    tokens = point.tokens * (deployment.dp if point.ranks is None else point.ranks)
    shared, apart = deployment.stack.drafts.shared_experts, tokens
    if shared and not point.prefill:  # tokens of one sequence choose alike
        apart = tokens / point.new * (1.0 + (point.new - 1.0) * (1.0 - shared))
    sums, called = deployment.stack.sums, m.experts_active / m.experts
    if sums.skew:  # the step waits for the GPU with the most tokens, which call for more experts
        called = np.minimum(called * deployment.routed_share * deployment.ep, MOST_CALLED)
    idle = left_idle(called, apart, sums.popularity)
    touched = deployment.local_experts * (1.0 - idle)
    routed = tokens * m.experts_active * deployment.routed_share
    name = experts_class(deployment.weight_format.kernel)
    kernel = deployment.stack.kernel(name)
    passes, traffic = kernel.input_passes, kernel.traffic
    held = kernel.expert * deployment.local_experts
    ops = []
    if traffic:
        if foreign is None:
            every = deployment.ep > 1 and deployment.dp == 1
            foreign = np.maximum(tokens * m.experts_active - routed, 0.0) if every else 0.0
        through = (
            traffic * FP16_BYTES * (routed + deployment.stack.sums.sorted_out * foreign) * m.hidden
        )
        ops.append(Op("experts_traffic", bytes={"hbm": through}, launches=0.0))
    for product, (inputs, outputs) in m.mlp_matrices(deployment.expert_width).items():
        stored = deployment.stored(f"experts_{product}")
        moved = touched * stored.bytes(inputs, outputs)
        ops.append(
            Op(
                f"experts_{product}",
                kernel=name,
                flops=2.0 * routed * inputs * outputs,
                bytes={"hbm": moved + FP16_BYTES * routed * (passes * inputs + outputs)},
                size=np.maximum(1.0, routed / np.maximum(touched, 1.0)),  # no token touches none
                columns=outputs,
                dtype=deployment.product_dtype(stored),
                fixed=held + unpacking(deployment, stored, touched * inputs * outputs, routed),
            )
        )
    return ops


def runtime(deployment: Deployment, share: Number = 1.0) -> list[Op]:
    """Return the op that represents the fixed time of the offloading runtime in a layer.

    Parameters
    ----------
    deployment
        Model, machine and software stack; the stack holds the measured time.
    share
        Share of the layer's cache that is in host memory; at 0 the op takes no time.

    Returns
    -------
    list of Op
        One op; none if the stack has no such time.
    """
    times, away = deployment.stack.offload, np.asarray(share) > 0
    if not times.layer and not times.host:
        return []
    return [Op("runtime", fixed=times.layer * away, host=times.host * away, launches=0.0)]


def copy(
    name: str,
    stream: Stream,
    size: Number,
    *,
    kernel: str = "relay",
    rows: Number = 0.0,
    launches: float = 1.0,
    after: tuple[str, ...] = (),
    prefetch: bool = False,
    sync: bool = False,
) -> Op:
    """Return an op that copies between GPU and host memory, or between host memory and a drive.

    A copy to or from a drive loads the host's memory, not PCIe. Kernel class ``relay`` is for the
    cache, whose host memory may be pageable; ``copy`` for memory that is always pinned.

    Parameters
    ----------
    name
        Name of the op.
    stream
        Direction of the copy.
    size
        Size of the copied data. [B]
    kernel
        Kernel class.
    rows
        Rows gathered one by one from scattered addresses; 0 for one contiguous copy.
    launches
        Copies issued per layer and step; below 1 if not every step has one.
    after
        Names of ops that this one waits for, besides those before it on its stream.
    prefetch
        Whether it is issued one layer early.
    sync
        Whether the host waits for its end before it issues more.

    Returns
    -------
    Op
        The copy.
    """
    moved: dict[Channel, Number]
    if stream == "disk_read" or stream == "disk_write":
        moved = {stream: size, "dram": size}
    else:
        channel: Channel = "h2d" if stream == "h2d" else "d2h"
        moved = {channel: size, "hbm": size, "dram": size}
    return Op(
        name,
        stream,
        kernel,
        bytes=moved,
        rows=rows,
        launches=launches,
        after=after,
        prefetch=prefetch,
        sync=sync,
    )


def quantise(
    deployment: Deployment,
    tokens: Number,
    stored: Format,
    name: str = "quantise",
    every: float = 1.0,
) -> list[Op]:
    """Return the op that reads keys and values in fp16 and writes them packed, or the reverse.

    Parameters
    ----------
    deployment
        Model, machine and software stack.
    tokens
        Tokens of all sequences. [tokens]
    stored
        The packed format.
    name
        Name of the op; names that begin with "de" are for the reverse direction.
    every
        Number of steps in which the work is done once; each step is charged an equal share.

    Returns
    -------
    list of Op
        One kernel; none for fp16.
    """
    if not stored.packs:
        return []
    moved = tokens * stored.packing(deployment.shard.k_width, deployment.shard.v_width)
    widened = (
        tokens * (deployment.shard.k_width + deployment.shard.v_width)
        if name.startswith("de")
        else 0.0
    )
    return [
        Op(name, kernel="quantise", bytes={"hbm": moved}, launches=1.0 / every, unpacked=widened)
    ]


def pack_prompt(
    deployment: Deployment, batch: Number, tokens: Number, stored: Format, before: Number = 0.0
) -> list[Op]:
    """Return the op that packs the prompt tokens of a prefill pass.

    It packs only the tokens that the pass adds to the packed part of each prompt; formats may keep
    the latest tokens in fp16.

    Parameters
    ----------
    deployment
        Model, machine and software stack.
    batch
        Number of prompts.
    tokens
        Tokens of each prompt up to the end of the pass. [tokens]
    stored
        The packed format.
    before
        Tokens of each prompt that earlier passes have read. [tokens]

    Returns
    -------
    list of Op
        One kernel; none for fp16.
    """
    if not stored.packs:
        return []
    m = deployment.shard
    sides = zip(
        stored.packed_sides(m.k_width, m.v_width, tokens),
        stored.packed_sides(m.k_width, m.v_width, before),
        (stored.packing(1, 0), stored.packing(0, 1)),
        strict=True,
    )
    moved = batch * sum((now - then) * each for now, then, each in sides)
    return [Op("quantise", kernel="quantise", bytes={"hbm": moved})]


def id_lists(deployment: Deployment, batch: Number, every: float = 1.0) -> list[Op]:
    """Return the op in which the host builds index lists of salient tokens, for every KV head.

    Parameters
    ----------
    deployment
        Model, machine and software stack; the stack holds the measured time per list.
    batch
        Sequences in the batch. [sequences]
    every
        Decode steps from one such op to the next. [steps]

    Returns
    -------
    list of Op
        One op for K and V of all sequences and heads, or none if the stack has no such time.
    """
    fixed = 2 * deployment.stack.selection.id_list * batch * deployment.shard.cached_heads / every
    return [Op("id_lists", fixed=fixed, launches=0.0)] if deployment.stack.selection.id_list else []


def top_k(name: str, scores: Number, sync: bool = False, every: float = 1.0) -> Op:
    """Return the op that selects the largest attention scores, which it reads from GPU memory.

    Parameters
    ----------
    name
        Name of the op.
    scores
        Scores written and read. [scores]
    sync
        Whether the host waits for the selection.
    every
        Decode steps from one selection to the next. [steps]

    Returns
    -------
    Op
        The selection.
    """
    moved: dict[Channel, Number] = {"hbm": SCORE * scores}
    return Op(name, kernel="topk", bytes=moved, launches=1.0 / every, sync=sync)


def all_reduce(deployment: Deployment, name: str, data: Number) -> list[Op]:
    """Sum hidden states over the replica's GPUs.

    A ring takes 2 (tp - 1) transfers of 1 / tp of the data. In a one-shot sum every GPU reads the
    data of all others; in a two-shot sum it sums a part of the data and then reads the others'
    sums. Over several machines, each machine first sums its own data; then the GPUs with the same
    part sum it in a ring over the network, as in NCCL.

    Parameters
    ----------
    deployment
        Model, machine and software stack.
    name
        Name of the op.
    data
        Size of the hidden states. [B]

    Returns
    -------
    list[Op]
        One op; nothing on a single GPU.
    """
    d = deployment
    if d.tp == 1:
        return []
    nodes = -(-d.tp // d.domain)
    gpus, latency = d.tp // nodes, d.hardware.links["link"].latency
    between = 2 * (nodes - 1) * (data / d.tp / NETWORK.bandwidth + NETWORK.latency)
    if d.stack.sums.direct_share:
        return [_quickest_sum(d, name, data, gpus, between)]
    if d.stack.sums.one_shot:
        moved, wait = (gpus - 1) * data, latency
    else:
        moved, wait = 2 * (gpus - 1) / gpus * data, 2 * (gpus - 1) * latency
    return [Op(name, kernel="allreduce", bytes={"link": moved}, fixed=wait + between)]


def _quickest_sum(
    deployment: Deployment, name: str, data: Number, gpus: int, between: Number
) -> Op:
    """Return the fastest of a one-shot sum, a two-shot sum and a ring over ``data`` bytes per GPU.

    The op carries the bytes that its way moves, and what that way takes beyond them as fixed time,
    with the time ``between`` machines. GPUs of several machines cannot read each other's memory, so
    only the ring is left to them.
    """
    stack, others, rate = deployment.stack, gpus - 1, deployment.bandwidth["link"]
    once, twice = others * data, 2 * others / gpus * data
    hops, share = stack.sums.direct_hop * others, stack.sums.direct_share * rate
    one = stack.sums.direct + hops + once / share
    two = stack.sums.direct + stack.sums.direct_second + 2 * hops + twice / share
    ring = (
        stack.sums.ring + 2 * others * stack.sums.ring_hop + twice / (stack.sums.ring_share * rate)
    )
    took = np.minimum(np.minimum(one, two), ring) if gpus == deployment.tp else ring
    moved = np.where(took == one, once, twice)
    carried = moved / (rate * stack.kernel("allreduce").memory)
    return Op(name, kernel="allreduce", bytes={"link": moved}, fixed=took - carried + between)


def exchange_tokens(
    deployment: Deployment, name: str, tokens: Number, ranks: Number | None = None
) -> list[Op]:
    """Return the op that sends hidden states from data-parallel ranks to the GPUs of their experts.

    A GPU receives each token that is routed to one of its experts, and no token more than once; if
    every GPU holds a part of every expert, this is an all-gather. Between nodes, a token is sent
    once to each node over all of the node's ports, and NVLink distributes it there. The way back
    takes as long.

    Parameters
    ----------
    deployment
        Model, machine and software stack.
    name
        Name of the op.
    tokens
        Tokens of the rank that has the most. [tokens]
    ranks
        Tokens of all ranks together, as a multiple of ``tokens``; None if all ranks have equally
        many.

    Returns
    -------
    list of Op
        One op for one direction; none on a single rank.
    """
    d = deployment
    if d.dp == 1:
        return []
    sums, link = d.stack.sums, d.hardware.links["link"]
    states = FP16_BYTES * d.model.hidden * tokens * d.dp  # of all ranks, if all have as many
    copies = min(1.0, d.model.experts_active * d.routed_share)
    moved = states * copies * (d.dp - 1) / d.dp
    share = sums.ring_share if sums.direct_share else 1.0
    wait = link.latency + max(sums.direct, sums.exchange) + moved / link.bandwidth * (1 / share - 1)
    nodes = -(-d.parallelism.stage // d.domain)
    if nodes > 1:
        busy = 1.0 if ranks is None else np.minimum(1.0, ranks * nodes / d.dp)
        entering = busy * states * (nodes - 1) / nodes / d.domain
        wait = wait + NETWORK.latency + entering / NETWORK.bandwidth
    return [Op(name, kernel="allreduce", bytes={"link": moved}, fixed=wait)]


def output_ops(
    deployment: Deployment, point: Point, prompts: Number = 0.0, issued: Number = 0.0
) -> tuple[Op, ...]:
    """Return the ops outside the layers of a pass: embedding, LM head, sampling, the host's work.

    Parameters
    ----------
    deployment
        Model, machine and software stack.
    point
        The pass, or arrays of passes.
    prompts
        Number of prompts that are read in the same pass as a decoding batch.
    issued
        Time that the host takes to issue all layers of a pass that reads a prompt. [s]

    Returns
    -------
    tuple of Op
        The LM head; sampling together with the embedding and the last norm; and the server's work
        if it takes any time.
    """
    m = deployment.shard
    rows = (
        point.batch if point.prefill and not deployment.stack.memory.prompt_logits else point.tokens
    )
    head = deployment.vocabulary_stored("lm_head")
    logits = gemm(deployment, "lm_head", rows, (m.hidden, m.vocab), head)
    looked_up = 3 if m.learned_positions else 2  # rows of the embedding and of positions, their sum
    moved = rows * (m.vocab + 2 * m.hidden) + looked_up * point.tokens * m.hidden
    time = deployment.stack.time
    sample = Op(
        "sample",
        kernel="pointwise",
        bytes={"hbm": FP16_BYTES * moved},
        fixed=time.step + time.sampling + time.sequence * point.batch,
        # the host handles each sequence once it has its token, or issues the next pass then
        sync=time.sequence > 0 or deployment.stack.eager,
    )
    return logits, sample, *_server(deployment, point, prompts, issued)


def issue_seconds(deployment: Deployment, groups: Iterable[Group], tokens: Number) -> Number:
    """Compute the host time to launch the layers of a prefill pass.

    Parameters
    ----------
    deployment
        Model, machine and software stack.
    groups
        Layers of the pass.
    tokens
        All tokens in the pass. [tokens]

    Returns
    -------
    Number
        Zero if the pass is replayed as a graph. [s]
    """
    time = deployment.stack.time
    if not time.issue:
        return 0.0
    kernels: Number = 0.0
    for group in groups:
        for layer in group.layers:
            for op in layer:
                if op.stream == "gpu":
                    kernels = kernels + group.count * op.times * np.maximum(op.launches, 1.0)
    return time.issue * kernels * (np.asarray(tokens) > time.graph)


def _server(
    deployment: Deployment, point: Point, prompts: Number, issued: Number
) -> tuple[Op, ...]:
    """Return the host's work during a pass, which takes at least as long.

    The engine's process prepares the next pass. In the server's, each prompt is read, tokenised and
    queued, a later part of it by its share of the tokens, and each token decoded is turned into
    text and sent.
    """
    time, server = deployment.stack.time, deployment.stack.server
    read, decoded = (point.batch, 0.0) if point.prefill else (prompts, point.batch)
    busy: list[Number] = [issued] if np.any(issued) else []
    if time.beside_step or time.beside_sequence:
        busy.append(time.beside_step + time.beside_sequence * (read + decoded))
    if server.token or server.prompt:
        begun = read * (point.new / point.length) if point.prefill else read
        busy.append(server.prompt * begun + server.token * decoded)
    if not busy:
        return ()
    longest = reduce(np.maximum, busy)
    return (Op("server", stream="cpu", fixed=longest, launches=0.0),)
