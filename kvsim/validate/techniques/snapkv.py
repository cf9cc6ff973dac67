"""SnapKV: keeps the prompt tokens to which its last queries attend."""

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from kvsim.techniques.papers.snapkv import Snapkv as Settings
from kvsim.validate.parts.eviction import CutCache
from kvsim.validate.parts.scores import by_kv_head
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
        self.window = int(self.context.settings(Settings).window)
        self.watch(self.window)

    def score(self, keys: Tensor, values: Tensor) -> Tensor:
        """Score prompt tokens by the attention that the observation window pays to them.

        Attention weights are summed over the window's queries and averaged over ``POOL``
        neighbouring tokens. Tokens of the window itself score infinity, so that they are kept.
        """
        total = by_kv_head(self.observed(keys).float(), keys.shape[1]).sum(2)
        own = min(self.window, self.budget)
        total[..., -own:] = 0.0
        pooled = F.avg_pool1d(total, POOL, 1, POOL // 2, count_include_pad=False)
        pooled[..., -own:] = torch.inf
        return pooled
