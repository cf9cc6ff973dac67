"""FlexGen: weights, cache and hidden states placed on GPU and host in any proportion."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from kvsim.engine.formats import Format
from kvsim.graph import Number
from kvsim.machines.deployment import Deployment
from kvsim.techniques.base import Technique
from kvsim.techniques.hostcache import PACKED_GROUP, HostCache
from kvsim.techniques.settings import param


@dataclass(frozen=True)
class Flexgen(HostCache):
    """Offloading by columns: a layer serves all parts of the batch before the next layer.

    References
    ----------
    .. [1] Y. Sheng et al., "FlexGen: high-throughput generative inference of large language
       models with a single GPU", ICML 2023, sections 4.2 to 4.4.
    """

    name: ClassVar[str] = "flexgen"

    weights_gpu: float = param(0, "weights on the GPU [%]", high=100, whole=False)
    cache_gpu: float = param(0, "cache on the GPU [%]", high=100, whole=False)
    states_gpu: float = param(100, "hidden states on the GPU [%]", high=100, whole=False)
    bits: float = param(16, "bits per cached number", choices=(4, 8, 16))
    parts: int = param(8, "parts of the batch", low=1, high=1024)

    @property
    def host_part(self) -> Number:
        """What is not on the GPU."""
        return 1.0 - self.cache_gpu / 100

    @property
    def stored(self) -> Format:
        """Fp16, or groups of 64."""
        return Format() if self.bits == 16 else Format(self.bits, PACKED_GROUP)

    @property
    def streamed_weights(self) -> float:
        """What is not on the GPU."""
        return 1.0 - self.weights_gpu / 100

    @property
    def streamed_states(self) -> float:
        """What is not on the GPU."""
        return 1.0 - self.states_gpu / 100

    def tiles(self) -> int:
        """As set."""
        return self.parts

    def options(self, d: Deployment, prompt: int, generate: int) -> Iterable[Technique]:
        """The corners of the placement, and half the weights."""
        shares = (0.0, 50.0, 100.0)
        return [Flexgen(w, c) for w in shares for c in (0.0, 50.0)] + [Flexgen(bits=4)]
