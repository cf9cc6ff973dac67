"""A prompt cut to what its last queries attend to."""

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
    """Kept are the observing queries' own tokens and those with the highest scores, by KV head.

    References
    ----------
    .. [1] Y. Li et al., "SnapKV", NeurIPS 2024, section 4 and listing 1.
    """

    def __init__(self, place: LayerContext) -> None:
        super().__init__(place)
        settings = self.parts.selection
        assert isinstance(settings, Settings)
        self.window = int(settings.window)
        self.last = KeptQueries.last(self._on_device, min(self.window, self.prompt))

    def attend_prompt(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """In full; the last queries are kept."""
        self.observe(queries, step)
        return super().attend_prompt(queries, keys, values, step)

    def observe(self, queries: Tensor, step: Pass) -> None:
        """Collect the observing queries that are in this chunk, if they choose anything."""
        if self.prompt > self.budget:
            self.last.observe(queries, step)

    def score(self, keys: Tensor, values: Tensor, there: Tensor) -> Tensor:
        """Weights of the last queries, summed and averaged over neighbours; their own stay."""
        with self.counter.op("observe") as record:
            weights = self.last.weights(record, keys)
        total = by_kv_head(weights.float(), keys.shape[1]).sum(2)
        tokens = torch.arange(self.prompt, device=keys.device)
        own = tokens >= self._on_device[:, None] - min(self.window, self.budget)
        prefix = total.masked_fill(own[:, None], 0.0)
        pooled = F.avg_pool1d(prefix, POOL, 1, POOL // 2, count_include_pad=False)
        return pooled.masked_fill(own[:, None], torch.inf)
