"""On which layers a technique acts: those with a cache; and which it leaves alone."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvsim.graph import Point
from kvsim.machines.deployment import Deployment
from kvsim.models.kinds import Mixer
from kvsim.techniques.layers import Parts
from kvsim.techniques.layout import Layout, alike

if TYPE_CHECKING:
    from kvsim.techniques.base import Technique

PLAIN = ("all", "fp16", "gpu")  # parts that change nothing
LEFT: dict[Mixer, str] = {
    "recurrent": "have a state of constant size, which stays as it is",
    "shared": "attend to an earlier layer's cache, as that keeps it",
    "none": "mix no tokens",
}


def unspread(deployment: Deployment, technique: "Technique") -> str:
    """Why a technique cannot run on several ranks or stages; nothing if it can."""
    if deployment.alone:
        return ""
    far = Point(1.0, 2.0**16, 1.0, 2.0**16, 2.0**17)  # where all that goes to the host has gone
    host = technique.resident(deployment, far).get("host", {})
    if technique.mixes and not any(np.any(np.asarray(size) > 0) for size in host.values()):
        return ""
    return (
        "copies of attention (--dp) and stages (--pp) are modelled only for techniques that keep "
        "the cache on the GPU and draft nothing"
    )


def unborrowed(deployment: Deployment, layout: Layout) -> str:
    """Why layers that share a cache, or choose by an indexer, cannot run; nothing if they can."""
    m = deployment.model
    every = [parts for shapes, count, parts in layout for _ in range(count * len(shapes))]
    for index, owner in m.owners.items():
        if not alike(every[index], every[owner]):
            return f"layer {index} shares layer {owner}'s cache and cannot be treated differently"
    for *_, parts in layout:
        name = parts.selection.name
        if m.owners and not parts.selection.borrows:
            return f"{name} chooses anew in every layer, and some share an earlier one's cache"
        if m.indexer and not parts.selection.borrows:
            return f"{name} chooses what is read, and the model's indexer does so already"
    return ""


def left_alone(deployment: Deployment, layers: Sequence[Parts]) -> list[str]:
    """What a reader should know about layers without a cache of their own."""
    m = deployment.model
    kinds = Counter(shape.mixer for shape in m.shapes())
    acts = any(part.name not in PLAIN for parts in layers for part in parts.every()[:3])
    found = []
    if acts and kinds["attention"] < m.layers:
        others = [f"{kinds[kind]} {LEFT[kind]}" for kind in LEFT if kinds[kind]]
        found.append(f"acts on {kinds['attention']} of {m.layers} layers: {'; '.join(others)}")
    if kinds["recurrent"]:
        found.append(
            f"states: no run of such kernels stands behind stack {deployment.stack.name}; "
            f"they are taken to reach the shares of peak of its attention"
        )
    if m.indexer:
        alike = f", all of it on each of {deployment.tp} GPUs" if deployment.tp > 1 else ""
        found.append(
            f"sparse attention: a query reads at most {m.indexer.tokens} tokens; an indexer reads "
            f"{m.indexer.key_bytes:g} bytes of every cached token to choose them{alike}"
        )
    return found
