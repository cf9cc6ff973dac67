"""SnapKV: keeps the prompt tokens to which its last queries attend."""

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from kvsim.techniques.papers.snapkv import Snapkv as Settings
from kvsim.validate.model.attention import Pass
from kvsim.validate.parts.eviction import CutCache
from kvsim.validate.parts.scores import KeptQueries, by_kv_head
from kvsim.validate.parts.selection import LayerContext

SMALL_SETTINGS = ("budget={half},window=8",)
POOL = 5  # neighbouring tokens whose scores are averaged, so that what is kept hangs together


class Snapkv(CutCache):
    """A cache that evicts prompt tokens by the attention they get from the prompt's last queries.

    Each KV head keeps the tokens of the observation window, which is the end of the prompt, and
    the earlier tokens with the highest scores, ``budget`` tokens in total [1]_.

    References
    ----------
    .. [1] Y. Li et al., "SnapKV", NeurIPS 2024, section 4 and listing 1.
    """

    def __init__(self, place: LayerContext) -> None:
        super().__init__(place)
        settings = self.context.settings(Settings)
        self.window = int(settings.window)
        self.last = KeptQueries.of_last(self._on_device, min(self.window, self.prompt))

    def attend_prompt(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Compute full causal attention for a chunk, and record the window's queries.

        Returns
        -------
        Tensor
            Output of attention, (sequences, heads, chunk, dim).
        """
        self.observe(queries, step)
        return super().attend_prompt(queries, keys, values, step)

    def observe(self, queries: Tensor, step: Pass) -> None:
        """Record those queries of a prompt chunk that lie in the observation window.

        Does nothing if the longest prompt fits in the budget, because no token is evicted then.

        Parameters
        ----------
        queries
            Queries of the chunk, (sequences, heads, new, head dim).
        step
            The pass over the chunk.
        """
        if self.prompt > self.budget:
            self.last.observe(queries, step)

    def score(self, keys: Tensor, values: Tensor, there: Tensor) -> Tensor:
        """Score prompt tokens by the attention that the observation window pays to them.

        Attention weights are summed over the window's queries and averaged over ``POOL``
        neighbouring tokens. Tokens of the window itself score infinity, so that they are kept.

        Returns
        -------
        Tensor
            (batch, KV heads, tokens).
        """
        with self.counter.op("observe") as record:
            weights = self.last.weights(record, keys)
        total = by_kv_head(weights.float(), keys.shape[1]).sum(2)
        tokens = torch.arange(self.prompt, device=keys.device)
        own = tokens >= self._on_device[:, None] - min(self.window, self.budget)
        prefix = total.masked_fill(own[:, None], 0.0)
        pooled = F.avg_pool1d(prefix, POOL, 1, POOL // 2, count_include_pad=False)
        return pooled.masked_fill(own[:, None], torch.inf)
