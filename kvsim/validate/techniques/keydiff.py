"""KeyDiff: keeps the tokens whose keys are least similar to the others."""

import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from kvsim.validate.parts.eviction import CutCache

SMALL_SETTINGS = ("budget={half}",)


class Keydiff(CutCache):
    """Cache that scores each key by minus its cosine with the mean direction of all keys.

    References
    ----------
    .. [1] J. Park et al., "KeyDiff", NeurIPS 2025, section 3, equation 5.
    """

    def score(self, keys: Tensor, values: Tensor) -> Tensor:
        """Score each key by the negative cosine to the mean direction of its head's keys."""
        with self.counter.op("score") as record:
            directions = F.normalize(keys.float(), dim=-1)
            anchor = directions.mean(2, keepdim=True)
            scored = -(directions * F.normalize(anchor, dim=-1)).sum(-1).to(keys.dtype)
            record.reads(keys, keys).writes(scored)
        return scored
