"""Ada-KV: divides a layer's budget among its heads according to their scores."""

from kvsim.frozen import frozen
from kvsim.graph import Buffers
from kvsim.techniques.axes.base import Launches, LayerPass
from kvsim.techniques.papers.snapkv import Snapkv


@frozen
class AdaKv(Snapkv):
    """Ranks SnapKV's scores across the heads of a layer; each head keeps a minimum share.

    Kernels over heads of unequal length read as much as with equal ones.

    References
    ----------
    .. [1] Y. Feng et al., "Ada-KV: optimizing KV cache eviction by adaptive budget allocation for
       efficient LLM inference", NeurIPS 2025, section 3.3, algorithm 1;
       https://arxiv.org/abs/2407.11550.
    """

    name = "ada-kv"
    launches = Launches(prefill={"observe": 9, "select": 24, "compact": 5}, decode={"attn": 16})

    def resident(self, at: LayerPass) -> Buffers:
        """Return the memory of each head's cached length, as a 32-bit integer. [B]"""
        return {"gpu": {"head ends": 4.0 * at.p.batch * at.d.shard.cached_heads * self.cut(at)}}
