"""What passes cost, added up: their time, and what they need of each resource.

``total`` has one entry for each of COSTS.
"""

from typing import TYPE_CHECKING

from kvsim.graph import Array
from kvsim.serving.compiled import compiled
from kvsim.serving.lookup import segment, stretch
from kvsim.serving.tables import COSTS

if TYPE_CHECKING:
    from kvsim.serving.tables import Tables


COUNT = len(COSTS)


@compiled
def add_pass(
    t: "Tables", total: Array, batch: int, context: float, new: int, finished: int
) -> None:
    """A pass over decoding sequences and ``new`` prompt tokens, without the parts' own needs.

    Parameters
    ----------
    batch, context : decoding sequences and their mean context. [sequences, tokens]
    finished : prompts that this pass completes.
    """
    if batch > 0:
        _add_line(t.nodes.contexts, t.costs.round[batch], context, 1.0, total)
    if new > 0:
        decoding, nodes = float(batch * t.width), t.nodes.tokens
        _add_line(nodes, t.costs.token, decoding + new, 1.0, total)
        _add_line(nodes, t.costs.head, decoding + finished, 1.0, total)
        if batch > 0:
            i = segment(nodes, decoding)
            above = (decoding - nodes[i]) / (nodes[i + 1] - nodes[i])
            for values in (t.costs.token, t.costs.head):
                for k in range(COUNT):
                    total[k] -= (1 - above) * values[i, k] + above * values[i + 1, k]


@compiled
def add_rounds(
    t: "Tables", total: Array, batch: int, context: float, growth: float, rounds: int
) -> None:
    """Many rounds on end, the mean context growing in each: the sum in closed form."""
    nodes, values, left = t.nodes.contexts, t.costs.round[batch], rounds
    while left > 0:
        i, count = stretch(nodes, context, growth, left)
        gap = nodes[i + 1] - nodes[i]
        above = count * ((context - nodes[i]) / gap)
        above += growth / gap * (count * (count - 1.0) / 2)
        for k in range(COUNT):
            total[k] += (count - above) * values[i, k] + above * values[i + 1, k]
        context += count * growth
        left -= count


@compiled
def add_chunk(t: "Tables", total: Array, new: float, start: float) -> None:
    """What a part of a prompt needs besides its share of the common work."""
    chunks, starts, values = t.nodes.chunks, t.nodes.starts, t.costs.chunk
    i, j = segment(chunks, new), segment(starts, start)
    longer = (new - chunks[i]) / (chunks[i + 1] - chunks[i])
    later = (start - starts[j]) / (starts[j + 1] - starts[j])
    for k in range(COUNT):
        short = (1 - later) * values[i, j, k] + later * values[i, j + 1, k]
        long = (1 - later) * values[i + 1, j, k] + later * values[i + 1, j + 1, k]
        total[k] += (1 - longer) * short + longer * long


@compiled
def add_between(t: "Tables", total: Array, prompt: float) -> None:
    """What follows a prompt before its first decoding round."""
    if t.pauses:
        _add_line(t.nodes.contexts, t.costs.between, prompt, 1.0, total)


@compiled
def _add_line(nodes: Array, values: Array, x: float, times: float, total: Array) -> None:
    """Linear between nodes, and beyond the last as before it."""
    i = segment(nodes, x)
    above = times * ((x - nodes[i]) / (nodes[i + 1] - nodes[i]))
    below = times - above
    for k in range(COUNT):
        total[k] += below * values[i, k] + above * values[i + 1, k]
