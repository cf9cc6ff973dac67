"""ThinK: key channels that matter little to queries are dropped."""

import numpy as np

from kvsim.engine import ops
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Number, Op
from kvsim.techniques.axes.base import Launches, LayerPass, Storage
from kvsim.techniques.axes.settings import param


@frozen
class Think(Storage):
    """Prunes a share of the key channels of the prompt, per head.

    References
    ----------
    .. [1] Y. Xu et al., "ThinK: thinner key cache by query-driven pruning", ICLR 2025, section 3;
       40 % of channels, scored by the last 32 queries; https://arxiv.org/abs/2407.21018.
    """

    name = "think"
    launches = Launches(prefill={"channels": 17, "thin": 7}, decode={"attn": 39})

    ratio: float = param(0.4, "share of key channels that are dropped", high=0.9, whole=False)
    window: int = param(32, "last queries that score the prompt [tokens]", low=1, high=1e4)

    candidates = ({"ratio": 0.4}, {"ratio": 0.6})

    @property
    def exact(self) -> bool:
        """Whether no channel is dropped."""
        return self.ratio == 0

    def _dropped(self, at: LayerPass) -> Number:
        """Return the number of channels that each head drops of the prompt's keys."""
        width = at.d.shard.k_width // at.d.shard.cached_heads
        return float(int(self.ratio * width))

    def _gone(self, at: LayerPass) -> Number:
        """Return the bytes by which a sequence's cached keys are smaller. [B]"""
        tokens = np.minimum(at.kept_tokens, at.p.prompt)
        return ops.FP16_BYTES * at.d.shard.cached_heads * self._dropped(at) * tokens

    def extra_bytes(self, at: LayerPass) -> Number:
        """Return the bytes of pruned channels, as a negative number. [B]"""
        return 0.0 if at.p.prefill else -at.p.batch * self._gone(at)

    def extra_flops(self, at: LayerPass) -> Number:
        """Return the FLOPs of pruned channels, as a negative number. [FLOP]"""
        if at.p.prefill:
            return 0.0
        tokens = np.minimum(at.kept_tokens, at.p.prompt)
        return -2.0 * at.p.tokens * at.d.shard.heads * self._dropped(at) * tokens

    def side_bytes(self, at: LayerPass) -> tuple[Number, Number]:
        """Return the size of keys without the dropped channels, and of values. [B]"""
        k, v = super().side_bytes(at)
        return k - at.p.batch * self._gone(at), v

    def resident(self, at: LayerPass) -> dict[str, Number]:
        """Return the memory of the cache, and of the kept channels' 32-bit indices. [B]"""
        kept = at.d.shard.k_width - at.d.shard.cached_heads * self._dropped(at)
        return {**super().resident(at), "kept channels": 4.0 * at.p.batch * kept}

    def complete(self, at: LayerPass) -> list[Op]:
        """Return the ops that rank channels and copy the best; nothing in decoding.

        Channels are ranked by the norms of the last queries and the prompt's keys.
        """
        if not at.p.prefill:
            return []
        m, p = at.d.shard, at.p
        width = m.k_width / m.cached_heads
        acts = float(self.ratio > 0)
        asking = m.heads * width * np.minimum(self.window, p.prompt)
        scored = ops.FP16_BYTES * p.batch * (m.k_width * p.prompt + asking + m.k_width) * acts
        kept = m.k_width + m.v_width - m.cached_heads * self._dropped(at)
        return [
            Op("channels", kernel="pointwise", bytes={"hbm": scored}),
            Op("thin", kernel="gather", bytes={"hbm": 2 * ops.FP16_BYTES * p.tokens * kept}),
        ]

    def shared_buffers(self, at: LayerPass) -> Buffers:
        """Return the memory of one layer's whole prompt in fp16, until channels are dropped. [B]"""
        return ops.prompt_kv(at.d, at.p)
