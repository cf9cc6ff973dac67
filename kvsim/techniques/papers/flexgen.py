"""FlexGen: weights, cache and hidden states placed on GPU and host in any proportion."""

from typing import ClassVar

from kvsim.frozen import frozen
from kvsim.techniques.axes.base import Part, Term
from kvsim.techniques.axes.placement import HostPlacement
from kvsim.techniques.axes.settings import combine, param
from kvsim.techniques.axes.storage import PACKED_ON_HOST, packed_on_host


@frozen
class Flexgen(Term):
    """Offloads cache and weights; each layer processes the parts of a batch in turn.

    Offloading by columns: a layer serves all parts of the batch before the next layer.

    References
    ----------
    .. [1] Y. Sheng et al., "FlexGen: high-throughput generative inference of large language
       models with a single GPU", ICML 2023, sections 4.2 to 4.4.
    """

    name: ClassVar[str] = "flexgen"
    evidence_kind: ClassVar[str] = PACKED_ON_HOST

    weights_gpu: float = param(0, "share of the weights on the GPU [%]", high=100, whole=False)
    cache_gpu: float = param(0, "share of the cache on the GPU [%]", high=100, whole=False)
    states_gpu: float = param(
        100, "share of the hidden states on the GPU [%]", high=100, whole=False
    )
    bits: float = param(16, "bits per cached number", choices=(4, 8, 16), gentler=1)
    parts: int = param(8, "parts of the batch", low=1, high=1024)

    candidates = (  # the corners of the placement, and half the weights
        *combine(weights_gpu=(0.0, 50.0, 100.0), cache_gpu=(0.0, 50.0)),
        {"bits": 4},
    )

    def pieces(self) -> tuple[Part, ...]:
        """What is not on the GPU is on the host."""
        cache, weights, states = (
            1.0 - share / 100 for share in (self.cache_gpu, self.weights_gpu, self.states_gpu)
        )
        place = HostPlacement(cache, weights_host=weights, states_host=states, parts=self.parts)
        return (place, *packed_on_host(self.bits))
