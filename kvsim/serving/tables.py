"""Step costs of one technique as tables that a compiled simulator can read.

A pass over decoding sequences and parts of prompts takes

    round(batch, mean context)                      alone, as the engine predicts it
    + beside(batch, mean context)                   where prompts are read in the same pass and the
                                                    engine's attention then splits no cache; less
                                                    the time that streamed weights take longer
    + token(all tokens) - token(decoding ones)      projections and MLPs run over all at once
    + routed(all tokens) - routed(decoding ones)    experts, where ranks bring tokens to them
    + head(all rows) - head(decoding rows)          a finished prompt adds one row of logits
    + the sum over its parts of prompts of what else each needs: attention, quantisation, copies

and no less than the streaming of weights, which happens once in a pass, or than the round alone.

Where a pass is divided over several lanes (data-parallel ranks, micro-batches of a pipeline), what
comes on top of the round is that of the lane with most tokens; experts take those of all ranks.

``round`` and the pass over one prompt are the engine's own predictions, so batches of only one
kind are exact at the tables' nodes; ``accuracy`` says how far direct evaluation is from the tables
elsewhere, passes of both kinds included.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from kvsim.engine.roofline import all_ops, peak_seconds
from kvsim.graph import Array, Number, Op, Step
from kvsim.machines.deployment import Deployment
from kvsim.prediction.generate import POINTS_AT_ONCE
from kvsim.serving.kv_budget import Bytes, Room
from kvsim.serving.passes import TIME_MEASURE, Measure, Passes

COST_RESOURCES = ("hbm", "compute", "h2d", "d2h", "link", "dram", "cpu")
"""Whose use is recorded: the channels, and the arithmetic of the GPU and of the host."""

COSTS = ("seconds", *COST_RESOURCES)
"""What a pass costs: its time, and the time each resource would need at its full rate. [s]"""

TO_GPU, TO_HOST = COSTS.index("h2d"), COSTS.index("d2h")

PROBES = 3  # batches, parts and starts at which other nodes are judged
GAP_PROBES = np.array([0.25, 0.5, 0.8])[:, None]  # where a gap is looked into
MIDDLE = 1  # of them
MAX_NODES = 4096
DENSE_TOKENS = 256  # token counts up to here have a node each
TOKEN_DENSITY = 16  # and beyond them this many per octave


class Nodes(NamedTuple):
    """Grid points of the tables: batches, contexts, chunks and starts."""

    batches: Array  # numbers of decoding sequences, from 0 (b,)
    contexts: Array  # mean contexts (c,) [tokens]
    tokens: Array  # numbers of tokens in a pass (t,) [tokens]
    chunks: Array  # lengths of prompt chunks (n,) [tokens]
    starts: Array  # prompt tokens before a chunk (s,) [tokens]


class NodeBelow(NamedTuple):
    """The index of the grid point at or below each integer, for each axis.

    Attributes
    ----------
    contexts, tokens, chunks, starts : index by the integer, for the axis of ``Nodes`` of that name.
    """

    contexts: NDArray[np.int32]
    tokens: NDArray[np.int32]
    chunks: NDArray[np.int32]
    starts: NDArray[np.int32]


class PerNode(NamedTuple):
    """Values at every grid point of each table."""

    round: Array  # a decoding round (b, c)
    beside: Array  # additional cost of a round beside a prompt chunk (b, c)
    token: Array  # projections, MLPs and norms, by tokens (t,)
    head: Array  # LM head and sampling, by rows of logits (t,)
    chunk: Array  # further cost of a prompt chunk (n, s)
    between: Array  # passes between prefill and decoding, by prompt length (c,)
    routed: Array  # routed experts, by tokens of all data-parallel ranks; 0 for one rank (t,)


class Tables(NamedTuple):
    """The tables that the compiled simulator reads."""

    nodes: Nodes  # grid points
    below: NodeBelow  # grid point below each integer
    costs: PerNode  # by COSTS, or only the first of them, along the last axis [s]
    pauses: bool  # whether there are passes between prefill and decoding
    prompt_bytes: Bytes  # cache of a sequence in prefill, by KV blocks (b,) [B]
    gpu_bytes: Bytes  # cache of a sequence in decoding, by KV blocks from 0 (b,) [B]
    host_bytes: Bytes  # its part in host memory (b,) [B]
    width: int  # tokens per sequence in the widest pass of a round [tokens]
    lanes: int  # number of ranks and micro-batches over which a pass is divided
    ranks: int  # number of data-parallel ranks
    streamed: Array  # minimum cost of a pass, in which weights are streamed once [s]
    issued: float  # minimum time of a prefill pass, for the host to launch its kernels [s]
    graph_tokens: float  # tokens of a pass above which this applies [tokens]
    h2d: float  # rate at which each GPU swaps in and loads evicted blocks [B/s]
    d2h: float  # rate at which each GPU swaps out [B/s]

    @property
    def seconds(self) -> PerNode:
        """The tables restricted to times, without the use of resources. [s]"""
        return PerNode(*(values[..., 0] for values in self.costs))


def make_nodes(
    density: int, max_seqs: int, longest: int, longest_chunk: int, most_tokens: int
) -> Nodes:
    """Choose grid points up to the largest batch, context, prompt chunk and pass. [tokens]

    Parameters
    ----------
    density : grid points per octave of contexts and chunks.
    max_seqs : largest batch. [sequences]
    longest : longest context. [tokens]
    longest_chunk : largest prompt chunk. [tokens]
    most_tokens : largest number of tokens of a pass. [tokens]
    """
    sparse = np.round(spread(most_tokens, TOKEN_DENSITY))
    return Nodes(
        batches=np.arange(max_seqs + 1.0),
        contexts=spread(longest, density)[1:],
        tokens=np.unique(np.concatenate([np.arange(DENSE_TOKENS + 1.0), sparse])),
        chunks=spread(longest_chunk, density)[1:],
        starts=spread(longest, density),
    )


def spread(most: float, per_octave: int) -> Array:
    """Return integers from 0 to a maximum, all small ones and then at a constant ratio.

    Parameters
    ----------
    most : the largest number.
    per_octave : numbers per octave.

    Returns
    -------
    array
        The numbers in ascending order. (n,)
    """
    count = int(np.ceil(np.log2(max(most, 2)) * per_octave)) + 1
    geometric = np.round(np.geomspace(1, max(most, 2), count))
    return np.unique(np.concatenate([[0.0], geometric]))


def refine(nodes: Nodes, passes: Passes, good: float, contexts: Array | None = None) -> Nodes:
    """Add grid points where linear interpolation is inaccurate.

    Costs of techniques that work in blocks increase in steps, and token budgets make kinks.

    Parameters
    ----------
    nodes : the initial grid.
    passes : predictions of single passes.
    good : relative error that is accepted.
    contexts : grid points of contexts, if known. (c,) [tokens]

    Returns
    -------
    Nodes
        The refined grid.
    """
    batches = np.unique(np.round(np.geomspace(1, nodes.batches[-1], PROBES)))[:, None]
    few = np.unique(np.round(np.geomspace(1, nodes.chunks[-1], PROBES)))[:, None]
    early = np.unique(np.round(np.linspace(0, nodes.starts[-1], PROBES)))[:, None]
    if contexts is None:
        contexts = _bisected(nodes.contexts, lambda x: passes.round(batches, x), good)
    return nodes._replace(
        contexts=contexts,
        chunks=_bisected(nodes.chunks, lambda x: passes.resident.prompt(x, early), good),
        starts=_bisected(nodes.starts, lambda x: passes.resident.prompt(few, x), good),
    )


def _bisected(nodes: Array, values: Callable[[Array], Array], good: float) -> Array:
    """Halve intervals between nodes until the interpolation error is below ``good``.

    Parameters
    ----------
    values : evaluates the interpolated quantities at nodes, (n,) to (m, n).
    """
    known, open_ = nodes, np.ones(nodes.size - 1, bool)  # gaps that were not looked into yet
    at = values(known)
    while known.size < MAX_NODES:
        gap = np.flatnonzero(open_ & (np.diff(known) > 1))
        if not gap.size:
            break
        low, high = known[gap], known[gap + 1]
        x = np.floor(low + GAP_PROBES * (high - low))  # (3, gaps)
        direct = values(x.ravel()).reshape(-1, *x.shape)
        above = (x - low) / (high - low)
        line = (1 - above) * at[:, None, gap] + above * at[:, None, gap + 1]
        off = (np.abs(line - direct) > good * np.abs(direct)).any(axis=(0, 1))
        middle, at_middle = x[MIDDLE], direct[:, MIDDLE]
        open_[gap] = off
        halved = gap[off]
        known = np.insert(known, halved + 1, middle[off])
        at = np.insert(at, halved + 1, at_middle[:, off], axis=1)
        open_ = np.insert(open_, halved + 1, True)
    return known


def tabulate(passes: Passes, nodes: Nodes, known: PerNode | None = None) -> PerNode:
    """Evaluate passes at every grid point.

    Parameters
    ----------
    passes : predictions of single passes by some measure.
    nodes : the grid.
    known : values on a grid with the same batches and contexts, whose rounds are reused.

    Returns
    -------
    PerNode
        The cost at each grid point. [s]
    """
    token, head = passes.tokens(nodes.tokens), passes.head(nodes.tokens)
    routed = passes.routed(nodes.tokens)
    alone = passes.resident.prompt(nodes.chunks[:, None], nodes.starts[None, :])
    shared = np.interp(nodes.chunks, nodes.tokens, token + routed)[:, None]
    shared = shared + passes.head(np.ones(1))
    rounds, beside = _all_rounds(passes, nodes) if known is None else (known.round, known.beside)
    return PerNode(
        round=rounds,
        beside=beside,
        token=token,
        head=head,
        chunk=np.maximum(alone - shared, 0.0),
        between=passes.predecoding(nodes.contexts),
        routed=routed,
    )


def _all_rounds(passes: Passes, nodes: Nodes) -> tuple[Array, Array]:
    """Evaluate rounds at every node, and their additional cost beside a prompt chunk."""
    alone = _rounds(passes, nodes.batches[1:], nodes.contexts)
    streams = passes.technique.streams_weights
    if not (streams or passes.deployment.stack.kernel("prompt").walk):
        return alone, np.zeros_like(alone)
    both = _rounds(passes.resident, nodes.batches[1:], nodes.contexts, beside=True)
    return alone, both - alone if streams else np.maximum(both - alone, 0.0)


def _rounds(passes: Passes, batch: Array, contexts: Array, beside: bool = False) -> Array:
    """Evaluate rounds at every batch and context, with a first row for no sequences."""
    rows = max(1, POINTS_AT_ONCE // contexts.size)
    parts = [
        passes.round(batch[i : i + rows, None], contexts[None, :], beside)
        for i in range(0, batch.size, rows)
    ]
    return np.concatenate([np.zeros((1, contexts.size)), *parts])


def _work_of(resource: str) -> Measure:
    """Return the time that a resource would need at its full rate. [s]"""

    def of_op(op: Op, d: Deployment) -> Number:
        return peak_seconds(op, d).get(resource, 0.0)

    def of_step(step: Step, d: Deployment) -> Number:
        return sum(count * of_op(op, d) for op, count in all_ops(step))

    return Measure(of_step, of_step, of_op)


def make_tables(
    passes: Passes, nodes: Nodes, room: Room, work: bool = True, known: PerNode | None = None
) -> Tables:
    """Tabulate the times, the resource use and the memory of passes.

    Parameters
    ----------
    passes : predictions of single passes.
    nodes : the grid.
    room : memory for caches.
    work : whether to include the use of resources.
    known : values on a grid with the same batches and contexts, whose rounds are reused.
    """
    d = passes.deployment
    measures = [TIME_MEASURE, *map(_work_of, COST_RESOURCES if work else ())]
    known = None if work else known
    bare = passes.replayed
    measured = [tabulate(replace(bare, measure=each), nodes, known) for each in measures]
    return Tables(
        nodes=nodes,
        below=NodeBelow(*(_index_nodes(getattr(nodes, axis)) for axis in NodeBelow._fields)),
        costs=PerNode(*(np.stack(column, axis=-1) for column in zip(*measured, strict=True))),
        pauses=bool(measured[0].between.any()),
        prompt_bytes=room.prompt_bytes,
        gpu_bytes=room.decode_bytes,
        host_bytes=room.host_bytes,
        width=passes.width,
        lanes=d.lanes,
        ranks=d.dp,
        streamed=np.array([replace(bare, measure=each).streamed for each in measures]),
        issued=passes.issued,
        graph_tokens=d.stack.time.graph,
        h2d=d.bandwidth["h2d"],
        d2h=d.bandwidth["d2h"],
    )


def _index_nodes(nodes: Array) -> NDArray[np.int32]:
    """Return the index of the node at or below each integer; equal nodes share the array.

    Contexts of millions of tokens make it large, and the tables of a replica with other pass
    budgets have the same contexts.
    """
    key = nodes.tobytes()
    found = _INDICES.get(key)
    if found is None:
        bounds = np.ceil(nodes)
        bounds[0], bounds[-1] = 0, bounds[-1] + 1  # nothing begins at the last node
        gaps = np.diff(bounds).astype(np.int64)
        found = np.repeat(np.arange(gaps.size, dtype=np.int32), gaps)
        _INDICES[key] = found
    return found


_INDICES: WeakValueDictionary[bytes, NDArray[np.int32]] = WeakValueDictionary()
