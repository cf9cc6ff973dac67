"""Prefix blocks of generated requests: how deep and how late an earlier prompt is used again."""

import numpy as np

from kvsim.frozen import frozen
from kvsim.traces.lengths import MARKS, Empirical, empirical
from kvsim.traces.requests import Floats, Integers, Requests
from kvsim.traces.statistics import leading_hits

NEAR = 64  # requests looked at on either side of the wanted distance


@frozen
class Prefixes:
    """Prefix reuse.

    Attributes
    ----------
    block_tokens
        Prompt tokens per block. [tokens]
    classes
        Prompt lengths that split requests into classes of equal size. [tokens]
    depth
        Per class, the share of a prompt's blocks that an earlier request has.
    distance
        Requests between a request and the latest one it shares that prefix with.
    """

    block_tokens: int
    classes: tuple[float, ...]
    depth: tuple[Empirical, ...]
    distance: Empirical

    def draw(self, random: "np.random.Generator", prompt: Integers) -> tuple[Integers, Integers]:
        """Block ids of all requests in a line, and where each request's begin, (n + 1,)."""
        blocks = -(-prompt // self.block_tokens)
        chance = random.random((2, len(prompt)))
        depths = np.empty(len(prompt))
        kinds = np.searchsorted(self.classes, prompt, side="right")
        for kind, margin in enumerate(self.depth):
            depths[kinds == kind] = margin.at(chance[0][kinds == kind], chance[0][:0])
        wanted = np.rint(np.minimum(depths, 1.0) * blocks).astype(np.int64)
        distance = np.rint(self.distance.at(chance[1], chance[1])).astype(np.int64)
        return _chain(blocks, wanted, np.maximum(distance, 1))


def fit(requests: Requests, classes: int = 8) -> Prefixes | None:
    """The prefix reuse of a trace; None without prefix blocks."""
    if requests.block_ids is None or requests.block_start is None:
        return None
    counts = np.maximum(np.diff(requests.block_start), 1)
    hits = leading_hits(requests)
    cuts = np.unique(np.quantile(requests.prompt, np.linspace(0, 1, classes + 1)[1:-1]))
    kinds = np.searchsorted(cuts, requests.prompt, side="right")
    shares: Floats = hits / counts
    return Prefixes(
        requests.block_tokens,
        tuple(cuts.tolist()),
        tuple(empirical(_or_zero(shares[kinds == kind])) for kind in range(len(cuts) + 1)),
        empirical(_or_zero(_distances(requests, hits))),
    )


def reuse(block_tokens: int, share: float, depth: float, distance: float) -> Prefixes:
    """Prefix reuse in four numbers.

    Parameters
    ----------
    block_tokens
        Prompt tokens per block. [tokens]
    share
        Requests whose prefix an earlier request has.
    depth
        Mean share of their prompt that this is; uniform around it, as wide as 0 and 1 allow.
    distance
        Median distance to the earlier request; exponential. [requests]
    """
    reach = min(depth, 1 - depth)
    deep = np.clip((MARKS - (1 - share)) / max(share, 1e-9), 0, 1)
    depths = np.where(1 - share < MARKS, depth - reach + 2 * reach * deep, 0.0)
    far = -distance / np.log(2) * np.log(np.maximum(1 - MARKS, 1e-3))
    return Prefixes(
        block_tokens,
        (),
        (Empirical(tuple(np.log1p(depths).tolist())),),
        Empirical(tuple(np.log1p(far).tolist())),
    )


def _or_zero(values: Floats | Integers) -> Floats:
    return np.asarray(values if len(values) else [0.0], dtype=float)


def _distances(requests: Requests, hits: Integers) -> Integers:
    """For each request with hits, how many requests ago its last hit block was last there."""
    latest: dict[int, int] = {}
    found = []
    for row, (ids, depth) in enumerate(zip(requests.blocks(), hits.tolist(), strict=True)):
        if depth:
            found.append(row - latest[int(ids[depth - 1])])
        latest.update(dict.fromkeys(ids.tolist(), row))
    return np.array(found, dtype=np.int64)


def _chain(blocks: Integers, wanted: Integers, distance: Integers) -> tuple[Integers, Integers]:
    """Give each request its first `wanted` blocks from an earlier one, and new ones after."""
    start = np.concatenate([[0], np.cumsum(blocks)])
    ids = np.empty(start[-1], dtype=np.int64)
    fresh, longest = 0, 0
    rows = zip(blocks.tolist(), wanted.tolist(), distance.tolist(), strict=True)
    sizes = blocks.tolist()
    for row, (size, depth, back) in enumerate(rows):
        here = int(start[row])
        depth = min(depth, size)
        if depth and row:
            parent = _parent(sizes, row, max(row - back, 0), depth, longest)
            depth = min(depth, sizes[parent])
            there = int(start[parent])
            ids[here : here + depth] = ids[there : there + depth]
        else:
            depth = 0
        ids[here + depth : here + size] = np.arange(fresh, fresh + size - depth)
        fresh += size - depth
        longest = row if size > sizes[longest] else longest
    return ids, start


def _parent(sizes: list[int], row: int, near: int, depth: int, longest: int) -> int:
    """An earlier request of at least `depth` blocks, near the wanted one; else the longest."""
    for step in range(NEAR):
        for one in (near - step, near + step):
            if 0 <= one < row and sizes[one] >= depth:
                return one
    return longest
