"""Reading step costs from their tables: piecewise linear in tokens, and sums of many rounds."""

from typing import TYPE_CHECKING

import numpy as np

from kvsim.graph import Array
from kvsim.serving.compiled import compiled

if TYPE_CHECKING:
    from kvsim.serving.tables import Tables


@compiled
def _segment(nodes: Array, x: float) -> int:
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
def line(nodes: Array, values: Array, x: float) -> float:
    """Linear between nodes, and beyond the last as before it."""
    i = _segment(nodes, x)
    share = (x - nodes[i]) / (nodes[i + 1] - nodes[i])
    return float(values[i] + share * (values[i + 1] - values[i]))


@compiled
def round_s(t: "Tables", batch: int, context: float) -> float:
    """A decoding round at a mean context. [s]"""
    return line(t.nodes.contexts, t.seconds.round[batch], context)


@compiled
def chunk_s(t: "Tables", new: float, start: float) -> float:
    """What a part of a prompt needs besides its share of the common work. [s]"""
    chunks, starts, values = t.nodes.chunks, t.nodes.starts, t.seconds.chunk
    i = _segment(chunks, new)
    share = (new - chunks[i]) / (chunks[i + 1] - chunks[i])
    low, high = line(starts, values[i], start), line(starts, values[i + 1], start)
    return float(low + share * (high - low))


@compiled
def between_s(t: "Tables", prompt: float) -> float:
    """What follows a prompt before its first decoding round. [s]"""
    return line(t.nodes.contexts, t.seconds.between, prompt)


@compiled
def pass_s(t: "Tables", batch: int, context: float, new: int, finished: int) -> float:
    """A pass over decoding sequences and ``new`` prompt tokens, without the parts' own work. [s]

    Parameters
    ----------
    batch, context : decoding sequences and their mean context. [sequences, tokens]
    finished : prompts that this pass completes.
    """
    decoding = float(batch * t.width)
    took = round_s(t, batch, context)
    if new > 0:
        tokens, token, head = t.nodes.tokens, t.seconds.token, t.seconds.head
        took += line(tokens, token, decoding + new) - line(tokens, token, decoding)
        took += line(tokens, head, decoding + finished) - line(tokens, head, decoding)
    return took


@compiled
def rounds_s(t: "Tables", batch: int, context: float, growth: float, rounds: int) -> float:
    """Many rounds on end, the mean context growing in each: the sum in closed form. [s]"""
    total, left = 0.0, rounds
    while left > 0:
        count, first, slope = _stretch(t, batch, context, growth, left)
        total += count * first + slope * (count * (count - 1.0) / 2)
        context += count * growth
        left -= count
    return total


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
def _stretch(
    t: "Tables", batch: int, context: float, growth: float, most: int
) -> tuple[int, float, float]:
    """Rounds whose contexts lie between the same two nodes: count, first round [s], increase [s]"""
    nodes, row = t.nodes.contexts, t.seconds.round[batch]
    i = _segment(nodes, context)
    slope = (row[i + 1] - row[i]) / (nodes[i + 1] - nodes[i])
    first = row[i] + slope * (context - nodes[i])
    count = most
    if growth > 0 and i < nodes.size - 2:
        fit = (nodes[i + 1] - context) / growth
        if fit < most:
            count = max(int(np.ceil(fit)), 1)
    return count, first, slope * growth
