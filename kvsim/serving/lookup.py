"""Reading the time of decoding rounds from the tables, and how many of them a time holds."""

from typing import TYPE_CHECKING

import numpy as np

from kvsim.graph import Array
from kvsim.serving.compiled import compiled

if TYPE_CHECKING:
    from kvsim.serving.tables import Tables


@compiled
def segment(nodes: Array, x: float) -> int:
    """Index of the node at or below x, such that the next one exists."""
    low, high = 0, nodes.size - 1
    while high - low > 1:
        middle = (low + high) // 2
        if nodes[middle] <= x:
            low = middle
        else:
            high = middle
    return low


@compiled
def round_s(t: "Tables", batch: int, context: float) -> float:
    """A decoding round at a mean context, beyond the last node as before it. [s]"""
    return _stretch(t, batch, context, 0.0, 1)[1]


@compiled
def rounds_within(
    t: "Tables", batch: int, context: float, growth: float, rounds: int, seconds: float
) -> int:
    """Rounds until ``seconds`` have passed, the one during which they do included; at least 1."""
    done, left = 0, seconds
    while done < rounds:
        count, first, slope = _stretch(t, batch, context, growth, rounds - done)
        took = count * first + slope * (count * (count - 1.0) / 2)
        if took < left:
            left -= took
            done += count
            context += count * growth
            continue
        need = left / first
        if slope > 0:  # first k + slope k (k - 1) / 2 = left
            b = first - slope / 2
            need = 2 * left / (b + np.sqrt(b * b + 2 * slope * left))
        k = max(int(np.ceil(need)), 1)
        while k > 1 and (k - 1) * first + slope * ((k - 1) * (k - 2.0) / 2) >= left:
            k -= 1
        while k < count and k * first + slope * (k * (k - 1.0) / 2) < left:
            k += 1
        return done + min(k, count)
    return rounds


@compiled
def stretch(nodes: Array, context: float, growth: float, most: int) -> tuple[int, int]:
    """Node below a growing context, and how many rounds pass before it reaches the next one."""
    i = segment(nodes, context)
    count = most
    if growth > 0 and i < nodes.size - 2:
        fit = (nodes[i + 1] - context) / growth
        if fit < most:
            count = max(int(np.ceil(fit)), 1)
    return i, count


@compiled
def _stretch(
    t: "Tables", batch: int, context: float, growth: float, most: int
) -> tuple[int, float, float]:
    """Rounds whose contexts lie between the same two nodes: count, first round [s], increase [s]"""
    nodes, row = t.nodes.contexts, t.costs.round[batch]
    i, count = stretch(nodes, context, growth, most)
    slope = (row[i + 1, 0] - row[i, 0]) / (nodes[i + 1] - nodes[i])
    first = row[i, 0] + slope * (context - nodes[i])
    return count, first, slope * growth
