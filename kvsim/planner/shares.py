"""The ways to place a layer's cache, each within a box of shares."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import numpy as np

from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.machines.deployment import Deployment
from kvsim.models.model import LayerShape
from kvsim.techniques import compose
from kvsim.techniques.papers.kvpr import Place
from kvsim.techniques.technique import Technique

EDGES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the boxes that a share is within
CPU_EDGES = (0.0, 0.25, 0.5, 1.0)  # of the boxes of a share that the CPU attends to
ROUNDING = 1e-6  # of a token
ALONE = (
    frozenset({"full", "cpu"}),
    frozenset({"full", "copied", "recomputed"}),
    frozenset({"full", "shared"}),
)
JOINED = (
    frozenset({"full", "shared", "beside", "joined"}),
    frozenset({"full", "halved", "halved_beside", "halved_joined"}),
)
FAMILIES = (*ALONE, *JOINED)
"""What layers of one model may do beside each other.

Copies of caches and the CPU's answers would wait for each other on the link, whose queue is in
order: layers of both kinds are slower together than either alone. Within a layer they may stand
together: where GPU and CPU share the attention, each over its own tokens at the same time, the GPU
may have copied some of its own (``beside``) or recomputed them (``joined``), and the batch may pass
in halves (``halved``).
These are many options, and their bounds say less: they are for the batch that is best without.
"""


@frozen
class Shares:
    """Where a layer's cached tokens are, as shares; the rest is on the GPU."""

    host: float = 0.0  # copied in every step, or recomputed
    split: float = 0.0  # of those, recomputed; a share of the prompt
    cpu: float = 0.0  # attended to by the CPU

    def towards(self, other: "Shares", share: float) -> "Shares":
        """A share of the way to others."""
        here, there = vars(self), vars(other)
        return Shares(**{k: x + share * (there[k] - x) for k, x in here.items()})


@frozen
class Option:
    """A way to place a layer's cache: the corners of a box of shares."""

    name: str
    corners: tuple[Shares, ...]
    parts: int = 1

    @property
    def kind(self) -> str:
        """What is done, whatever the shares."""
        return self.name.rstrip("0123456789")

    @property
    def needs(self) -> frozenset[str]:
        """The techniques that do what it does; a user may leave some of them out."""
        some = {"fastdecode"} if any(c.cpu for c in self.corners) else set()
        if any(c.split for c in self.corners):
            some.add("kvpr")
        elif any(c.host for c in self.corners):
            some.add("offload")
        return frozenset(some or {"full"})

    @property
    def middle(self) -> Shares:
        """The middle of the box."""
        count = len(self.corners)
        keys = vars(self.corners[0])
        return Shares(**{k: sum(getattr(c, k) for c in self.corners) / count for k in keys})

    def held(self, share: float) -> "Option":
        """The same where a layer holds only a share of the prompt: splits are shares of that."""
        corners = tuple(replace(c, split=c.split * share) for c in self.corners)
        return replace(self, corners=corners)


def options_for(deployment: Deployment, halves: bool) -> list[Option]:
    """Every way to place a cache there.

    Parameters
    ----------
    halves : whether a batch may pass in two halves, so that GPU and CPU alternate; layers may then
        also recompute some tokens while the CPU attends to others.
    """
    found = [Option("full", (Shares(),))]
    boxes = list(pairwise(EDGES))
    for i, (low, high) in enumerate(boxes):
        found.append(Option(f"copied{i}", (Shares(low), Shares(high))))
    # else a layer input is no smaller than what it replaces
    smaller = deployment.shard.hidden < deployment.shard.kv_width
    if smaller:
        for i, (low, high) in enumerate(boxes):
            found.append(Option(f"recomputed{i}", (*_recomputed(low), *_recomputed(high))))
    if deployment.shard.latent:
        return found
    found.append(Option("cpu", (Shares(cpu=1.0),), 2 if halves else 1))
    for i, edges in enumerate(pairwise(CPU_EDGES)):
        alone = tuple(Shares(cpu=cpu) for cpu in edges)
        found.append(Option(f"shared{i}", alone))
        joined = tuple(dict.fromkeys(s for cpu in edges for s in _joined(cpu))) if smaller else ()
        if halves:
            found.append(Option(f"halved{i}", alone, 2))
        beside = tuple(s for s in joined if not s.split)  # no kernel starts to recompute
        if halves and joined:
            found.append(Option(f"beside{i}", beside))
            found.append(Option(f"halved_beside{i}", beside, 2))
            found.append(Option(f"joined{i}", joined))
            found.append(Option(f"halved_joined{i}", joined, 2))
    return found


def _recomputed(host: float) -> tuple[Shares, Shares]:
    """A share on the host that is copied, and that is recomputed."""
    return Shares(host), Shares(host, host)


def _joined(cpu: float) -> tuple[Shares, ...]:
    """A share for the CPU; the rest stays, is copied, or is recomputed."""
    return Shares(cpu=cpu), Shares(1 - cpu, 0.0, cpu), Shares(1 - cpu, 1 - cpu, cpu)


def held_shares(deployment: Deployment, shapes: Iterable[LayerShape], prompt: int) -> Array:
    """The share of a prompt that a layer has cached, by shape: less where its window ends. (k,)"""
    # the new token has taken a place in a full window, unless places are reserved
    new = 0 if deployment.stack.cache.static else 1
    windows = (shape.window for shape in shapes)
    return np.array([(w - new) / prompt if w and w < prompt else 1.0 for w in windows])


def placed(shares: Shares, prompt: int, streamed: float = 0.0, parts: int = 1) -> Technique:
    """The technique of all layers that places them so."""
    return compose(_place(shares, prompt, streamed, parts))


def _place(s: Shares, prompt: int, streamed: float, parts: int) -> Place:
    return Place(
        host_share=s.host,
        split=float(np.floor(s.split * prompt + ROUNDING)),
        cpu_share=s.cpu,
        weights_host=streamed,
        parts=parts,
    )
