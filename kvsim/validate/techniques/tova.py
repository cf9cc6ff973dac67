"""TOVA: keeps the prompt tokens to which its last query attends."""

from torch import Tensor

from kvsim.validate.parts.eviction import CutCache
from kvsim.validate.parts.selection import LayerContext

SMALL_SETTINGS = ("budget={half}",)


class Tova(CutCache):
    """Cache that scores tokens by the last query's weights, averaged over a layer's heads.

    References
    ----------
    .. [1] M. Oren et al., "Transformers are multi-state RNNs", EMNLP 2024, section 4.
    """

    def __init__(self, place: LayerContext) -> None:
        super().__init__(place)
        self.watch(1)

    def score(self, keys: Tensor, values: Tensor) -> Tensor:
        """Score tokens by the last query's attention, averaged over the heads of the layer."""
        return self.observed(keys)[:, :, 0].float().mean(1, keepdim=True)
