"""Shares of a layer's cache, weights and hidden states that live on the host: what may be set."""

from dataclasses import replace
from typing import Any, Self

import numpy as np

from kvsim.frozen import frozen
from kvsim.graph import Number
from kvsim.machines.deployment import Deployment
from kvsim.techniques.axes import Placement
from kvsim.techniques.layers import Parts
from kvsim.techniques.settings import param


@frozen
class PlacedShares(Placement):
    """What a placement is set to, and what follows from that without looking at a layer."""

    host_share: Number = param(0, "share of cached tokens on the host", high=1, whole=False)
    split: Number | str = param(
        0, "tokens of the host's that are recomputed", high=1e7, choices=("auto",)
    )
    cpu_share: Number = param(
        0, "share of cached tokens that the CPU attends to", high=1, whole=False
    )
    values_host: Number = param(0, "share of cached values on the host", high=1, whole=False)
    weights_host: Number = param(0, "share of the weights on the host", high=1, whole=False)
    states_host: float = param(0, "share of the hidden states on the host", high=1, whole=False)
    parts: int = param(1, "parts of the batch by columns", low=1, high=1024)
    gpu_layers: int = param(0, "first layers whose cache stays on the GPU", high=1000)

    @property
    def k_host(self) -> Number:
        """Share of the cached keys that is copied or recomputed."""
        return self.host_share

    @property
    def v_host(self) -> Number:
        """Share of the cached values that is copied or recomputed."""
        if not some(self.values_host):
            return self.host_share
        return np.maximum(self.host_share, self.values_host)

    @property
    def on_cpu(self) -> Number:
        """Share of the cached tokens that the CPU attends to."""
        return self.cpu_share

    @property
    def loads(self) -> bool:
        """Whether every step copies a part of the cache to the GPU."""
        return some(self.host_share) or some(self.values_host)

    @property
    def kernels(self) -> tuple[str, ...]:
        """What is half here and half there is worked on in two parts; the CPU has its own."""
        parted = {"parted cache": self.host_share, "parted weights": self.weights_host}
        found = [name for name, share in parted.items() if some(share) and not np.all(share == 1)]
        return ("cpu cache" if some(self.cpu_share) else self.name, *found)

    @property
    def recomputes(self) -> bool:
        """Whether some of the host's tokens are recomputed."""
        return isinstance(self.split, str) or some(self.split)

    @property
    def tiles(self) -> int:
        """Parts of the batch."""
        return self.parts

    @property
    def streams(self) -> bool:
        """All but values that are fetched when they are chosen."""
        moves = (self.host_share, self.cpu_share, self.weights_host, self.states_host)
        return any(map(some, moves))

    def breaks(self, deployment: Deployment) -> tuple[int, ...]:
        """The first layer whose cache leaves the GPU."""
        first = self._first(deployment)
        return (first,) if first else ()

    def at(self, index: int, deployment: Deployment) -> Self:
        """The first layers keep their cache; their weights are placed like all."""
        if index >= self._first(deployment):
            return self
        return self.weights_alone()

    def weights_alone(self) -> Self:
        """The same with every cache on the GPU."""
        return replace(self, host_share=0, values_host=0, split=0, cpu_share=0, gpu_layers=0)

    def _first(self, deployment: Deployment) -> int:
        """Some runtimes never offload their first layers."""
        return max(
            self.gpu_layers,
            deployment.stack.offload.resident_layers if some(self.host_share) else 0,
        )

    def refuses(self, deployment: Deployment, beside: Parts) -> str:
        """Shares that exceed the whole, and what the CPU or recomputation cannot do."""
        if np.any(np.asarray(self.host_share) + self.cpu_share > 1 + 1e-12):
            return f"host_share and cpu_share={self.cpu_share} of a layer's tokens exceed 1"
        if self.recomputes and not some(self.host_share):
            return "split recomputes tokens that live on the host, and host_share is 0"
        selection, storage = beside.selection, beside.storage
        if self.recomputes and deployment.model.owners:
            return "recomputation needs a layer's own input, and some layers share another's cache"
        if self.recomputes and selection.evicts != "never":
            return f"recomputation needs every token's layer input, and {selection.name} drops some"
        if self.recomputes and storage.stored.packs and storage.read.packs:
            return (
                f"what is recomputed is fp16, and {storage.name} is attended to packed; "
                f"pack on the host alone (place with grouped:host=true)"
            )
        if not some(self.cpu_share):
            return ""
        if deployment.shard.latent:
            return "no CPU attention for a latent cache (MLA)"
        if storage.stored.packs:
            return f"the CPU attends to fp16 alone, not to {storage.name}"
        if selection.evicts == "always" and selection.scored:
            return f"{selection.name} ranks tokens by scores, which the CPU's attention keeps"
        return ""


def some(share: Any) -> bool:
    """Whether a share is anywhere above 0."""
    return bool(np.any(share > 0) if isinstance(share, np.ndarray) else share > 0)
