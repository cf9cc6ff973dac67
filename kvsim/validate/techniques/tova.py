"""TOVA: keeps the prompt tokens to which its last query attends."""

from torch import Tensor

from kvsim.validate.model.attention import Pass
from kvsim.validate.parts.eviction import CutCache
from kvsim.validate.parts.scores import KeptQueries
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
        self.last = KeptQueries.of_last(self._on_device, 1)

    def attend_prompt(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Attend in full, and record each prompt's last query, by which tokens are ranked.

        Returns
        -------
        Tensor
            Output of attention, (sequences, heads, chunk, dim).
        """
        if self.prompt > self.budget:
            self.last.observe(queries, step)
        return super().attend_prompt(queries, keys, values, step)

    def score(self, keys: Tensor, values: Tensor, there: Tensor) -> Tensor:
        """Score tokens by the last query's attention, averaged over the heads of the layer.

        Returns
        -------
        Tensor
            (batch, 1, tokens).
        """
        with self.counter.op("observe") as record:
            return self.last.weights(record, keys)[:, :, 0].float().mean(1, keepdim=True)
