"""Which compositions have rounds that are the same work on the GPU, and which rounds those are."""

from collections.abc import Hashable, Mapping
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvsim.validate.parts.composed import Composed


def why_eager(run: "Composed") -> str:
    """Why rounds of a composition are not replayed; empty where they are."""
    if run.gamma:
        return "how many drafts stay is asked of the GPU in every round"
    if run.guesses:
        return "a guess goes with every token, and its pairs are fetched beside compute"
    if any(not placement.replays for placement in run.placements):
        return "copies beside compute wait for rounds before"
    for layer in run.layers:
        if not layer.replays:
            return f"where {layer.parts.selection.name} puts a token follows from the host's count"
        if not layer.cells.replays:
            return f"what {layer.parts.storage.name} packs follows from the host's count"
    return ""


def branch(run: "Composed", cached: list[int]) -> Hashable:
    """What the round after so many cached tokens has in common with others; none for none."""
    found = {
        layer.cells.branch([n + 1 for n in layer.stored_tokens(cached[layer.context.rows])])
        for layer in run.layers
    }
    return None if None in found else frozenset(found)


def reads_all_slots(run: "Composed") -> bool:
    """Whether attention of some layer reads all slots of its cache."""
    return any(layer.cells.reads_all_slots for layer in run.layers)


def op_shares(run: "Composed", cached: list[int]) -> Mapping[str, float]:
    """How much of ops the round after so many cached tokens does, on average over the layers."""
    found = [
        layer.cells.op_shares([n + 1 for n in layer.stored_tokens(cached[layer.context.rows])])
        for layer in run.layers
    ]
    return {
        op: fmean(some.get(op, 1.0) for some in found) for op in {op for s in found for op in s}
    }
