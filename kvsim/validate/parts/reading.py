"""Base classes of selections that read parts of a full cache: pages, and prompt blocks."""

import numpy as np
import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.axes.selection import chosen_blocks
from kvsim.validate.counter import OpRecord
from kvsim.validate.kernels.gather import rows_at
from kvsim.validate.model.attention import Pass, attend
from kvsim.validate.parts.selection import LayerCache, LayerContext


def in_pages(keys: Tensor, page: int, none: float) -> Tensor:
    """Arrange the keys of prompts by page.

    Parameters
    ----------
    keys
        (batch, KV heads, tokens, dim).
    page
        Tokens of a page. [tokens]
    none
        Value of the keys that the last page lacks.

    Returns
    -------
    Tensor
        (batch, KV heads, pages, page, dim).
    """
    padded = torch.nn.functional.pad(keys, (0, 0, 0, -keys.shape[2] % page), value=none)
    return padded.view(*keys.shape[:2], -1, page, keys.shape[3])


class SparsePromptCache(LayerCache):
    """Base of caches with sparse attention over the prompt and full attention in decoding.

    Subclasses attend in ``attend_prompt``; every query head may read other tokens.
    """

    def __init__(self, place: LayerContext) -> None:
        super().__init__(place)
        self.refuse_windows()


class SparseBlocksCache(SparsePromptCache):
    """Base of caches in which every query head attends to its best blocks of the prompt.

    A block of queries always reads its own block. Subclasses rank the blocks in ``rank``.

    Attributes
    ----------
    block
        Tokens of a block. [tokens]
    share
        Share of the preceding blocks, including its own, to which a block of queries attends, from
        0 to 1.
    """

    block: int
    share: float

    def rank(self, queries: Tensor, keys: Tensor, step: Pass) -> Tensor:
        """Score the key blocks for each block of queries of a chunk.

        Returns
        -------
        Tensor
            Scores, (sequences, heads, blocks of queries, blocks of keys); highest for a block
            itself, lowest for later ones.
        """
        raise NotImplementedError

    def attend_prompt(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Attend with each block of queries to its best blocks. (sequences, heads, chunk, dim)

        Raises
        ------
        InputError
            If a chunk does not begin at a block.
        """
        start, block = step.starts[0], self.block
        if start % block:
            name = self.parts.selection.name
            raise InputError(f"{name}: prompt chunks are not a multiple of {block} tokens")
        ranked = self.rank(queries, keys, step)
        end = keys.shape[2]
        within = torch.arange(block, device=queries.device)
        allowed = start // block + np.arange(1.0, ranked.shape[2] + 1)
        outs = []
        for row, many in enumerate(chosen_blocks(self.share, allowed)):
            chosen = ranked[:, :, row].topk(int(many), dim=-1).indices.sort(-1).values
            tokens = (chosen[..., None] * block + within).flatten(2)
            asking = queries[:, :, row * block : (row + 1) * block]
            places = step.positions[:, row * block : (row + 1) * block]
            index = tokens.clamp(max=end - 1).view(len(tokens), keys.shape[1], -1)
            k, v = (rows_at(numbers, index).view(*tokens.shape, -1) for numbers in (keys, values))
            seen = tokens[:, :, None] <= places[:, None, :, None]
            with self.counter.op("attn") as record:
                outs.append(attend(OpRecord(), asking, k, v, seen))
                record.visible(asking.shape[2], tokens.shape[2], seen)
        out = torch.cat(outs, 2)
        with self.counter.op("attn") as record:
            record.reads(queries, keys, values).writes(out)
        return out

    def causal(self, found: Tensor, step: Pass) -> Tensor:
        """Give a block of queries' own block the highest rank, and later blocks the lowest.

        Parameters
        ----------
        found
            Ranks of blocks, (sequences, heads, blocks of queries, blocks of keys).
        """
        with self.counter.op("rank_blocks") as record:
            row = torch.arange(found.shape[2], device=found.device)[:, None]
            row = row + step.starts[0] // self.block
            column = torch.arange(found.shape[3], device=found.device)
            ranked = found.masked_fill(column > row, -torch.inf)
            ranked = ranked.masked_fill(column == row, torch.inf)
            record.reads(ranked.to(self.dtype)).writes(ranked.to(self.dtype))
        return ranked
