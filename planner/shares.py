"""The ways to place a layer's cache, each within a box of shares."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvsim.machines.deployment import Deployment
from kvsim.techniques import compose
from kvsim.techniques.base import Technique
from kvsim.techniques.place import Place

EDGES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the boxes that a share is within
CPU_EDGES = (0.0, 0.25, 0.5, 1.0)  # of the boxes of a share that the CPU attends to
ROUNDING = 1e-6  # of a token
FAMILIES = (
    frozenset({"full", "cpu"}),
    frozenset({"full", "copied", "recomputed"}),
    frozenset({"full", "shared"}),
)
"""What layers of one model may do beside each other.

Copies of caches and the CPU's answers would wait for each other on the link, whose queue is in
order: layers of both kinds are slower together than either alone. Where GPU and CPU share the
attention of every layer, each over its own tokens at the same time, no halves of a batch alternate.
"""


@dataclass(frozen=True)
class Shares:
    """Where a layer's cached tokens are, as shares; the rest is on the GPU."""

    host: float = 0.0  # copied in every step, or recomputed
    split: float = 0.0  # of those, recomputed; a share of the prompt
    cpu: float = 0.0  # attended to by the CPU


@dataclass(frozen=True)
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
    def middle(self) -> Shares:
        """The middle of the box."""
        count = len(self.corners)
        keys = vars(self.corners[0])
        return Shares(**{k: sum(getattr(c, k) for c in self.corners) / count for k in keys})


def options_for(deployment: Deployment, halves: bool) -> list[Option]:
    """Every way to place a cache there.

    Parameters
    ----------
    halves : whether a batch may pass in two halves, so that GPU and CPU alternate.
    """
    found = [Option("full", (Shares(),))]
    boxes = list(pairwise(EDGES))
    for i, (low, high) in enumerate(boxes):
        found.append(Option(f"copied{i}", (Shares(low), Shares(high))))
    if (
        deployment.shard.hidden < deployment.shard.kv_width
    ):  # else a layer input is no smaller than what it replaces
        for i, (low, high) in enumerate(boxes):
            some = (Shares(low), Shares(low, low), Shares(high), Shares(high, high))
            found.append(Option(f"recomputed{i}", some))
    if not deployment.shard.latent:
        found.append(Option("cpu", (Shares(cpu=1.0),), 2 if halves else 1))
        for i, (low, high) in enumerate(pairwise(CPU_EDGES)):
            found.append(Option(f"shared{i}", (Shares(cpu=low), Shares(cpu=high))))
    return found


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
