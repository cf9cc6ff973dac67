"""FlexPrefill: the last queries of a prompt tell every head which blocks to read.

X. Lai et al., "FlexPrefill: A Context-Aware Sparse Attention Mechanism for Efficient Long-Sequence
Inference", ICLR 2025, section 4, algorithms 1 to 4, https://arxiv.org/abs/2502.20766.

For every head, and for every chunk of a prompt that is read at once:

1. the last block of queries attends to all keys; its weights are summed per block of keys
2. the same weights are estimated from the means of blocks. Where both distributions are close
   (``TAU``), the head's blocks are ranked by the means of queries and keys
3. where they are not, by lines: the weight that the last queries gave to a block of keys or to a
   block of distances, whichever is more

Where this departs: every row of blocks reads the share that is set, not as many as reach a
cumulated weight; lines are of whole blocks, as in the authors' release.
"""

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from kvsim.techniques.papers.flexprefill import Flexprefill as Settings
from kvsim.validate.model.attention import Pass
from kvsim.validate.parts.reading import SparseBlocksCache
from kvsim.validate.parts.scores import scores
from kvsim.validate.parts.selection import LayerContext

SMALL_SETTINGS = ("block=8,share=0.5",)
TAU = 0.1  # square root of the Jensen-Shannon divergence below which means of blocks are trusted
LEAST = 1e-20  # of a sum that is divided by


class Flexprefill(SparseBlocksCache):
    """Cache in which each query head chooses its blocks of the prompt; decoding is dense."""

    def __init__(self, place: LayerContext) -> None:
        super().__init__(place)
        settings = self.context.settings(Settings)
        self.block, self.share = settings.block, settings.share

    def rank(self, queries: Tensor, keys: Tensor, step: Pass) -> Tensor:
        """Score blocks by pooled queries and keys, or by columns and diagonals of the last queries.

        Pooled scores are used for heads in which they predict the last queries' attention well.
        (sequences, heads, blocks of queries, blocks of keys)
        """
        with self.counter.op("last_block") as record:
            asked, asking = queries[:, :, -self.block :], step.positions[:, -self.block :]
            tokens = torch.arange(keys.shape[2], device=keys.device)
            weights = scores(asked, keys, (tokens <= asking[..., None])[:, None])
            shares = weights / weights.sum((2, 3), keepdim=True)
            columns = self._sum_blocks(shares.sum(2)[..., None])[..., 0]
            away = ((asking[..., None] - tokens).clamp(min=0) // self.block)[:, None]
            flat = away.expand_as(shares).flatten(2)
            diagonals = torch.zeros_like(columns).scatter_add_(2, flat, shares.flatten(2))

            held = self._means(keys)
            column = torch.arange(columns.shape[2], device=keys.device)
            guess = scores(asked.float().mean(2, keepdim=True), held)[:, :, 0]
            trusted = _distance(guess, columns) < TAU

            row = torch.arange(-(-step.new // self.block), device=keys.device)[:, None]
            row = row + step.starts[0] // self.block
            by_means = scores(self._means(queries), held, column <= row)
            lines = diagonals[:, :, (row - column).clamp(min=0)]
            by_lines = torch.maximum(columns[:, :, None], lines)
            kept, found = weights.to(keys.dtype), by_means.to(keys.dtype)
            record.reads(keys, keys, queries, asked, kept, kept, found, found)
            record.writes(kept, kept, found, found)
        return self.causal(torch.where(trusted[..., None, None], by_means, by_lines), step)

    def _means(self, numbers: Tensor) -> Tensor:
        """Means of blocks of a prompt's tokens, (sequences, heads, blocks, dim) in fp32."""
        many = self._sum_blocks(torch.ones_like(numbers[:1, :1, :, :1], dtype=torch.float32))
        return self._sum_blocks(numbers.float()) / many

    def _sum_blocks(self, numbers: Tensor) -> Tensor:
        """Sum (..., tokens, dim) over the tokens of each block."""
        padded = F.pad(numbers, (0, 0, 0, -numbers.shape[-2] % self.block))
        *lead, tokens, dim = padded.shape
        return padded.view(*lead, tokens // self.block, self.block, dim).sum(-2)


def _distance(one: Tensor, other: Tensor) -> Tensor:
    """Square root of the Jensen-Shannon divergence between distributions (..., blocks)."""
    middle = (one + other) / 2
    sides = [torch.xlogy(p, p / middle.clamp(min=LEAST)).sum(-1) for p in (one, other)]
    return (sum(sides) / 2).clamp(min=0).sqrt()  # type: ignore[union-attr]
