"""MInference: a prompt's queries attend along the columns and diagonals that matter to each head.

H. Jiang et al., "MInference 1.0: Accelerating Pre-filling for Long-Context LLMs via Dynamic Sparse
Attention", NeurIPS 2024, section 3.2, algorithm 2, https://arxiv.org/abs/2407.02490.

For every head, and for every chunk of a prompt that is read at once:

1. the last ``window`` queries attend to all keys                       (``find_lines``)
2. their weights are summed along columns (one key) and along diagonals (one distance), and both
   sums are ranked                                                      (``rank_lines``)
3. every query attends to the ``vertical`` best columns and the ``slash`` best diagonals (``attn``)

Where this departs: a query for which lines cross, or end before it, goes on to the next best ones,
so that it attends to ``vertical + slash`` tokens whatever the text. Lines are masks of a whole
product here, as PyTorch has no kernel that walks along diagonals; what is counted is what they let
through. All heads have this pattern, which the paper's search gives most of them.
"""

import torch
from torch import Tensor

from kvsim.techniques.papers.minference import Minference as Settings
from kvsim.validate.counter import OpRecord
from kvsim.validate.model.attention import Pass, attend
from kvsim.validate.parts.reading import SparsePromptCache
from kvsim.validate.parts.scores import query_ranges, scores
from kvsim.validate.parts.selection import LayerContext

SMALL_SETTINGS = ("vertical=4,slash=8,window=4",)


class Minference(SparsePromptCache):
    """Cache whose prefill attends to columns and diagonals chosen by a chunk's last queries."""

    def __init__(self, place: LayerContext) -> None:
        super().__init__(place)
        settings = self.context.settings(Settings)
        self.vertical, self.slash, self.window = settings.vertical, settings.slash, settings.window

    def attend_prompt(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Attend to the best columns and diagonals (vertical and slash lines) of each head."""
        columns, diagonals = self._rank(queries, keys, step)
        shared, held = queries.shape[1] // keys.shape[1], keys.shape[2]
        k, v = (numbers.repeat_interleave(shared, 1) for numbers in (keys, values))
        outs, per_query = [], queries.shape[0] * queries.shape[1] * held
        for some in query_ranges(step.new, per_query, queries.device):
            places = step.positions[:, some]
            seen = self._select_tokens(columns, diagonals, places)
            with self.counter.op("attn") as record:
                outs.append(attend(OpRecord(), queries[:, :, some], k, v, seen))
                record.visible(places.shape[1], held, seen)
        out = torch.cat(outs, 2)
        with self.counter.op("attn") as record:
            record.reads(queries, keys, values).writes(out)
        return out

    def _rank(self, queries: Tensor, keys: Tensor, step: Pass) -> tuple[Tensor, Tensor]:
        """Rank columns and diagonals, from 0 for the best, (sequences, heads, tokens)."""
        many, held = min(self.window, step.new), keys.shape[2]
        asked, tokens = queries[:, :, -many:], torch.arange(held, device=keys.device)
        with self.counter.op("find_lines") as record:
            away = (step.positions[:, -many:, None] - tokens)[:, None]
            weights = scores(asked, keys, away >= 0)
            columns = weights.sum(2)
            flat = away.clamp(min=0).expand_as(weights).flatten(2)
            diagonals = torch.zeros_like(columns).scatter_add_(2, flat, weights.flatten(2))
            kept = weights.to(keys.dtype)
            record.reads(asked, keys, kept, kept)  # softmax, then both sums
            record.writes(kept, kept)
        with self.counter.op("rank_lines") as record:
            sums = torch.stack([columns, diagonals])
            record.reads(sums.to(keys.dtype)).writes(sums.to(keys.dtype))
            order = sums.argsort(dim=-1, descending=True, stable=True)
            ranks = order.argsort(dim=-1)
        return ranks[0], ranks[1]

    def _select_tokens(self, columns: Tensor, diagonals: Tensor, places: Tensor) -> Tensor:
        """Return which tokens each query attends to, (sequences, heads, queries, tokens)."""
        held = columns.shape[2]
        tokens = torch.arange(held, device=columns.device)
        away = (places[..., None] - tokens)[:, None]
        by_line = diagonals[:, :, None].expand(-1, -1, places.shape[1], -1)
        slash = by_line.gather(3, away.clamp(0, held - 1).expand_as(by_line))
        # of ``vertical`` columns and ``slash`` diagonals the n-th best count alike
        best = torch.minimum(columns[:, :, None] * self.slash, slash * self.vertical)
        order = (best * held + tokens).masked_fill(away < 0, torch.iinfo(best.dtype).max)
        most = min(self.vertical + self.slash, held)
        index = order.topk(most, dim=-1, largest=False).indices
        chosen = torch.zeros_like(order, dtype=torch.bool).scatter_(3, index, True)
        return chosen & (away >= 0)
