"""XAttention: a prompt's queries attend to the blocks with the heaviest antidiagonals."""

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from kvsim.techniques.papers.xattention import Xattention as Settings
from kvsim.validate.model.attention import Pass
from kvsim.validate.parts.reading import SparseBlocksCache
from kvsim.validate.parts.selection import LayerContext

SMALL_SETTINGS = ("block=8,stride=4,share=0.5",)


class Xattention(SparseBlocksCache):
    """Cache in which each query head chooses its blocks of the prompt; decoding is dense.

    References
    ----------
    .. [1] R. Xu et al., "XAttention", ICML 2025, section 2, algorithm 1; a share of each row of
       blocks in place of a threshold.
    """

    def __init__(self, place: LayerContext) -> None:
        super().__init__(place)
        settings = self.context.settings(Settings)
        self.block, self.stride, self.share = settings.block, settings.stride, settings.share

    def rank(self, queries: Tensor, keys: Tensor, step: Pass) -> Tensor:
        """Score blocks by sums of attention weights along their antidiagonals."""
        block, stride, start = self.block, self.stride, step.starts[0]
        with self.counter.op("antidiagonals") as record:
            thin = []
            for numbers in (queries, keys):
                known = F.pad(numbers, (0, 0, 0, -numbers.shape[2] % block))
                thin.append(known.view(*known.shape[:2], -1, stride, known.shape[3]))
            asked, held = thin[0].flip(3).flatten(3), thin[1].flatten(3)
            grouped = asked.reshape(*held.shape[:2], -1, held.shape[3])
            logits = (grouped @ held.mT).view(*asked.shape[:3], -1).float()
            logits = logits / (stride * queries.shape[3] ** 0.5)
            rows = torch.arange(logits.shape[2], device=keys.device)[:, None] + start // stride
            seen = torch.arange(logits.shape[3], device=keys.device) <= rows
            weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
            each = block // stride
            shape = (*weights.shape[:2], weights.shape[2] // each, each, -1, each)
            found: Tensor = weights.view(shape).sum((3, 5))
            record.visible(logits.shape[2], logits.shape[3], seen)
            record.reads(queries, keys).writes(found.to(keys.dtype))
        return self.causal(found, step)
