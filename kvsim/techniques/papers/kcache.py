"""KCache: keys on the GPU, values in host memory, the best N fetched for every query."""

from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from kvsim.frozen import frozen
from kvsim.graph import Number
from kvsim.machines.deployment import Deployment
from kvsim.techniques.place import Place
from kvsim.techniques.settings import param
from kvsim.techniques.terms import Part, Term
from kvsim.techniques.values import TopValues


@frozen
class Kcache(Term):
    """Top-N attention over values in host memory, per batch entry and query head.

    Nothing hides the fetch: scores, selection, copy and weighted sum follow one another.

    References
    ----------
    .. [1] Q. He and Z. Wu, "Efficient LLM inference with KCache", 2024, section 3, table 1.
    """

    name: ClassVar[str] = "kcache"

    n: Number = param(128, "values fetched per query head", low=1, high=1e7)
    gpu_layers: int = param(0, "first layers whose values stay on the GPU", high=1000)

    def says(self) -> tuple[Part, ...]:
        """Values of the best tokens, which live on the host."""
        return TopValues(self.n), Place(values_host=1, gpu_layers=self.gpu_layers)

    def options(self, deployment: Deployment, prompt: int, generate: int) -> Iterable[Term]:
        """The paper's N, with and without one layer on the GPU."""
        counts = np.array([32.0, 64.0, 128.0, 256.0])[:, None, None]
        return [Kcache(counts, layers) for layers in (0, 1)]
