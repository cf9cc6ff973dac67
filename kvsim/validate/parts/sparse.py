"""What selections share that read a prompt sparsely and drop nothing."""

from torch import Tensor

from kvsim.validate.model.attention import Pass
from kvsim.validate.parts.base import hold_chunk
from kvsim.validate.parts.selection import LayerCache, LayerContext


class SparsePromptCache(LayerCache):
    """Every query head has its own part of the prompt; decoding reads every token.

    A technique attends in ``attend_prompt``.
    """

    def __init__(self, place: LayerContext) -> None:
        super().__init__(place)
        self.refuse_windows()

    def prefill(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Straight into the slots."""
        held = self.kv.prompt(self.slots)
        with self.counter.op("attn") as record:
            k, v = hold_chunk(record, held, keys, values, step)
        return self.attend_prompt(queries, k, v, step)
