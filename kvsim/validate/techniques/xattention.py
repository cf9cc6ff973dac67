"""XAttention: a prompt's queries attend to the blocks with the heaviest antidiagonals."""

from math import ceil

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.papers.xattention import ROUNDING
from kvsim.techniques.papers.xattention import Xattention as Settings
from kvsim.validate.counter import OpRecord
from kvsim.validate.kernels.gather import rows_at
from kvsim.validate.model.attention import Pass, attend
from kvsim.validate.parts.base import SmallRun
from kvsim.validate.parts.selection import LayerContext
from kvsim.validate.parts.sparse import SparsePromptCache


class Xattention(SparsePromptCache):
    """Every query head has its own blocks; decoding reads every token.

    References
    ----------
    .. [1] R. Xu et al., "XAttention", ICML 2025, section 2, algorithm 1; a share of each row of
       blocks in place of a threshold.
    """

    @classmethod
    def small_settings(cls, run: SmallRun) -> list[str]:
        """Half of the blocks of 8 tokens."""
        return ["block=8,stride=4,share=0.5"]

    def __init__(self, place: LayerContext) -> None:
        super().__init__(place)
        settings = self.parts.selection
        assert isinstance(settings, Settings)
        self.block, self.stride, self.share = settings.block, settings.stride, settings.share

    def attend_prompt(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Row by row of blocks, each to its best."""
        start, block = step.starts[0], self.block
        if start % block:
            raise InputError(f"xattention: prompts come in chunks that {block} does not divide")
        ranked = self._rank(queries, keys, step)
        end = keys.shape[2]
        within = torch.arange(block, device=queries.device)
        outs = []
        for row in range(ranked.shape[2]):
            many = ceil(self.share * (start // block + row + 1) - ROUNDING)
            chosen = ranked[:, :, row].topk(many, dim=-1).indices.sort(-1).values
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
            record.reads(queries, keys, values)
            record.writes(out)
        return out

    def _rank(self, queries: Tensor, keys: Tensor, step: Pass) -> Tensor:
        """Weights of blocks (sequences, heads, rows, columns), each row's own the greatest."""
        block, stride, start = self.block, self.stride, step.starts[0]
        ends = self._on_device[step.rows, None]
        with self.counter.op("antidiagonals") as record:
            own = [step.positions, torch.arange(keys.shape[2], device=keys.device)[None]]
            thin = []
            for numbers, places in zip((queries, keys), own, strict=True):
                known = numbers * (places < ends)[:, None, :, None]
                known = F.pad(known, (0, 0, 0, -numbers.shape[2] % block))
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
            record.reads(queries, keys)
            record.writes(found.to(keys.dtype))
        with self.counter.op("rank_blocks") as record:
            row = torch.arange(found.shape[2], device=keys.device)[:, None] + start // block
            column = torch.arange(found.shape[3], device=keys.device)
            ranked = found.masked_fill(column > row, -torch.inf)
            ranked = ranked.masked_fill(column == row, torch.inf)
            record.reads(ranked.to(keys.dtype))
            record.writes(ranked.to(keys.dtype))
        return ranked
