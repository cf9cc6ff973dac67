"""Reading the tables: what passes cost, and how many decoding rounds a time holds.

``cost`` has one entry for each of COSTS, or for the first of them, to which passes add theirs.
"""

from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsim.graph import Array, Number
from kvsim.serving.core import jit_entry, jit_function
from kvsim.serving.records import PerCost, Records, make
from kvsim.serving.tables import Tables

Cost = Annotated[Array, "a number for each of COSTS, or for the first"]  # [s]
Costs = Annotated[Array, "a row of them for each node"]
Below = NDArray[np.int32]


class Decoding(NamedTuple):
    """Sequences that decode together."""

    batch: int
    context: float  # their mean [tokens]
    growth: float  # what each round adds to it [tokens]


class Prompts(NamedTuple):
    """What the prompts of a pass have in common."""

    tokens: int  # that it reads, in the lane with most of them [tokens]
    every: int  # in all lanes [tokens]
    finished: int  # prompts that it completes, in all lanes


class OnePass:
    """A pass over decoding sequences and at most one part of a prompt."""

    batch: int  # sequences that decode
    context: float  # their mean [tokens]
    tokens: int  # of the prompt that it reads [tokens]
    start: float  # those before them [tokens]
    finished: int  # 1 if they are its last ones
    after: float  # its length if what follows it is counted too [tokens]
    cost: PerCost  # what it costs, as COSTS [s]


@jit_function
def node_below(below: Below, position: float) -> int:
    """Index of the node at or below a position, such that the next one exists."""
    return int(below[min(int(position), below.size - 1)])


@jit_function
def add_between_nodes(cost: Cost, values: Costs, node: int, above: float) -> None:
    """A value between two nodes, and beyond the last as before it."""
    for k in range(cost.size):
        cost[k] += (1 - above) * values[node, k] + above * values[node + 1, k]


@jit_function
def add_per_token(tables: Tables, cost: Cost, values: Costs, span: tuple[int, int]) -> None:
    """What a pass of more tokens (or rows of logits) takes over one of fewer."""
    nodes, below = tables.nodes.tokens, tables.below.tokens
    i, j = node_below(below, span[0]), node_below(below, span[1])
    low = (span[0] - nodes[i]) / (nodes[i + 1] - nodes[i])
    high = (span[1] - nodes[j]) / (nodes[j + 1] - nodes[j])
    for k in range(cost.size):
        cost[k] += (1 - high) * values[j, k] + high * values[j + 1, k]
        cost[k] -= (1 - low) * values[i, k] + low * values[i + 1, k]


@jit_function
def of_lane(tables: Tables, count: int) -> int:
    """What the fullest lane has of something that is divided evenly over all."""
    return (count + tables.lanes - 1) // tables.lanes


@jit_function
def add_pass(tables: Tables, cost: Cost, decoding: Decoding, prompts: Prompts) -> None:
    """A pass over decoding sequences and parts of prompts, without the parts' own needs."""
    nodes, below = tables.nodes, tables.below
    if decoding.batch > 0:
        i = node_below(below.contexts, decoding.context)
        above = (decoding.context - nodes.contexts[i]) / (nodes.contexts[i + 1] - nodes.contexts[i])
        add_between_nodes(cost, tables.costs.round[decoding.batch], i, above)
    if prompts.tokens > 0:
        own = of_lane(tables, decoding.batch * tables.width)
        finished = of_lane(tables, prompts.finished)
        add_per_token(tables, cost, tables.costs.token, (own, own + prompts.tokens))
        add_per_token(tables, cost, tables.costs.head, (own, own + finished))
        if tables.ranks > 1:  # decoding ranks are padded to the fullest; prompts are as they come
            padded, stages = own * tables.ranks, tables.lanes // tables.ranks
            read = max(prompts.tokens, (prompts.every + stages - 1) // stages)
            add_per_token(tables, cost, tables.costs.routed, (padded, padded + read))


@jit_function
def add_chunk(tables: Tables, cost: Cost, tokens: float, start: float) -> None:
    """What a part of a prompt needs besides its share of the common work.

    Parameters
    ----------
    tokens, start : its length, and the tokens of its prompt before it. [tokens]
    """
    chunks, starts, values = tables.nodes.chunks, tables.nodes.starts, tables.costs.chunk
    i, j = node_below(tables.below.chunks, tokens), node_below(tables.below.starts, start)
    longer = (tokens - chunks[i]) / (chunks[i + 1] - chunks[i])
    later = (start - starts[j]) / (starts[j + 1] - starts[j])
    for k in range(cost.size):
        short = (1 - later) * values[i, j, k] + later * values[i, j + 1, k]
        long = (1 - later) * values[i + 1, j, k] + later * values[i + 1, j + 1, k]
        cost[k] += (1 - longer) * short + longer * long


@jit_function
def add_after_prompt(tables: Tables, cost: Cost, prompt: float) -> None:
    """What follows a prompt before its first decoding round."""
    if tables.pauses:
        nodes = tables.nodes.contexts
        i = node_below(tables.below.contexts, prompt)
        above = (prompt - nodes[i]) / (nodes[i + 1] - nodes[i])
        add_between_nodes(cost, tables.costs.between, i, above)


@jit_function
def stretch(tables: Tables, context: float, growth: float, most: int) -> tuple[int, int]:
    """Node below a growing context, and how many rounds pass before it reaches the next one."""
    nodes = tables.nodes.contexts
    i = node_below(tables.below.contexts, context)
    count = most
    if growth > 0 and i < nodes.size - 2:
        fit = (nodes[i + 1] - context) / growth
        if fit < most:
            count = max(int(np.ceil(fit)), 1)
    return i, count


@jit_function
def add_rounds(tables: Tables, cost: Cost, decoding: Decoding, rounds: int) -> None:
    """Many rounds in a row, the mean context growing in each: the sum in closed form."""
    nodes, values = tables.nodes.contexts, tables.costs.round[decoding.batch]
    context, left = decoding.context, rounds
    while left > 0:
        i, count = stretch(tables, context, decoding.growth, left)
        gap = nodes[i + 1] - nodes[i]
        above = count * ((context - nodes[i]) / gap)
        above += decoding.growth / gap * (count * (count - 1.0) / 2)
        for k in range(cost.size):
            cost[k] += (count - above) * values[i, k] + above * values[i + 1, k]
        context += count * decoding.growth
        left -= count


@jit_function
def round_s(tables: Tables, batch: int, context: float) -> float:
    """A decoding round at a mean context, beyond the last node as before it. [s]"""
    nodes, row = tables.nodes.contexts, tables.costs.round[batch]
    i = node_below(tables.below.contexts, context)
    slope = (row[i + 1, 0] - row[i, 0]) / (nodes[i + 1] - nodes[i])
    return float(row[i, 0] + slope * (context - nodes[i]))


@jit_function
def _rounds_of_line(first: float, slope: float, seconds: float) -> int:
    """Fewest rounds k with first k + slope k (k - 1) / 2 >= seconds; at least 1."""
    need = seconds / first
    if slope > 0:
        b = first - slope / 2
        need = 2 * seconds / (b + np.sqrt(b * b + 2 * slope * seconds))
    k = max(int(np.ceil(need)), 1)
    while k > 1 and (k - 1) * first + slope * ((k - 1) * (k - 2.0) / 2) >= seconds:
        k -= 1
    while k * first + slope * (k * (k - 1.0) / 2) < seconds:
        k += 1
    return k


@jit_function
def rounds_within(tables: Tables, decoding: Decoding, rounds: int, seconds: float) -> int:
    """Rounds until ``seconds`` have passed, the one during which they do included; at least 1."""
    nodes, row = tables.nodes.contexts, tables.costs.round[decoding.batch]
    context, done, left = decoding.context, 0, seconds
    while done < rounds:
        i, count = stretch(tables, context, decoding.growth, rounds - done)
        slope = (row[i + 1, 0] - row[i, 0]) / (nodes[i + 1] - nodes[i])
        first = row[i, 0] + slope * (context - nodes[i])
        slope *= decoding.growth
        took = count * first + slope * (count * (count - 1.0) / 2)
        if took >= left:
            return done + min(_rounds_of_line(first, slope, left), count)
        left -= took
        done += count
        context += count * decoding.growth
    return rounds


@jit_entry
def add_passes(tables: Tables, passes: Records[OnePass]) -> None:
    """What each of some passes costs."""
    for i in range(passes.size):
        one = passes[i]
        prompts = Prompts(one.tokens, one.tokens, one.finished)
        add_pass(tables, one.cost, Decoding(one.batch, one.context, 0.0), prompts)
        if one.tokens > 0:
            add_chunk(tables, one.cost, float(one.tokens), one.start)
        if one.after > 0:
            add_after_prompt(tables, one.cost, one.after)


def pass_seconds(tables: Tables, **passes: Number) -> Array:
    """Times of passes with the given fields of ``OnePass``, zeros where none are given. (n,) [s]"""
    count = max(np.size(values) for values in passes.values())
    records = make(OnePass, count, **passes)
    add_passes(tables, records)
    return np.asarray(records.cost[:, 0])
