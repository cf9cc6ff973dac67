"""KVPR: part of an offloaded cache is recomputed while the rest is still being copied."""

from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from kvsim.frozen import frozen
from kvsim.graph import Number
from kvsim.machines.deployment import Deployment
from kvsim.techniques import recompute
from kvsim.techniques.layers import LayerPass
from kvsim.techniques.papers.offload import packed_on_host
from kvsim.techniques.place import ROW_OR_COLUMN, Place
from kvsim.techniques.settings import param
from kvsim.techniques.terms import Part, Term


@frozen
class Kvpr(Term):
    """Offloading with partial recomputation of keys and values from stored layer inputs.

    References
    ----------
    .. [1] C. Jiang et al., "KVPR: efficient LLM inference with I/O-aware KV cache partial
       recomputation", ACL Findings 2025, section 3.
    """

    name: ClassVar[str] = "kvpr"

    split: Number | str = param("auto", "tokens recomputed", high=1e7, choices=("auto",))
    schedule: str = param("row", "order of layers and batch", choices=ROW_OR_COLUMN)
    bits: float = param(16, "bits per number on the host", choices=(4, 8, 16))
    parts: int = param(8, "parts of the batch by columns", low=1, high=1024)

    def says(self) -> tuple[Part, ...]:
        """The whole cache on the host, a part of it as layer inputs."""
        column = self.schedule == "column"
        place = Place(
            1.0, self.split, weights_host=1.0 if column else 0, parts=self.parts if column else 1
        )
        return (place, *packed_on_host(self.bits))

    def notes(self, at: LayerPass) -> tuple[str, ...]:
        """How much is recomputed, or why nothing is."""
        assert isinstance(at.placement, Place)
        return recompute.notes(at.placement, at)

    def options(self, deployment: Deployment, prompt: int, generate: int) -> Iterable[Term]:
        """Splits by sixteenths of the prompt, the balanced one, both schedules, and packed."""
        splits = np.floor(np.linspace(0, prompt, 17))[:, None, None]
        column = [Kvpr("auto", "column", bits) for bits in (16, 4)]
        return [Kvpr(splits), Kvpr(), Kvpr(bits=4), *column]
