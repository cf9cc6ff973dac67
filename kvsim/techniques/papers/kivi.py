"""KIVI: keys packed per channel, values per token, the latest tokens in fp16."""

from kvsim.engine import ops
from kvsim.engine.formats import Format, kivi
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Op
from kvsim.techniques.axes.base import Launches, LayerPass, Storage, pack
from kvsim.techniques.axes.settings import combine, param


@frozen
class Kivi(Storage):
    """Quantises keys per channel and values per token; keeps the latest tokens in FP16.

    Groups are quantised asymmetrically. New tokens are packed before attention, as in the paper's
    algorithm; the released code packs them afterwards, as ``late-kivi:group=32,residual=128`` does.

    References
    ----------
    .. [1] Z. Liu et al., "KIVI: a tuning-free asymmetric 2bit quantization for KV cache",
       ICML 2024, section 3 and appendix A.
    """

    name = "kivi"
    launches = Launches(prefill={"attn": 3, "quantise": 44}, decode={"quantise": 17, "attn": 13})

    bits: float = param(2, "bits per cached number", choices=(1, 2, 4, 8, 16), gentler=1)
    group: int = param(32, "numbers that share a scale", low=8, high=1024, gentler=-1)
    residual: int = param(128, "latest tokens kept in fp16", high=1e6, gentler=1)

    candidates = combine(bits=(2, 4), group=(32, 64))  # the paper's

    @property
    def stored(self) -> Format:
        """Format of the cache: quantised groups and an fp16 residual."""
        return kivi(self.bits, self.group, self.residual)

    @property
    def by_token(self) -> bool:
        """False, as the keys of a group of tokens share scales."""
        return self.exact

    def scores_prompt(self, at: LayerPass) -> bool:
        """Return whether the prompt's attention uses separate kernels, as in KIVI's first release.

        Parameters
        ----------
        at : the pass through the layer.
        """
        return at.d.stack.packed_cache.scored_prompt or self.scored

    def prepare(self, at: LayerPass) -> list[Op]:
        """Return the ops that pack blocks of keys and single tokens' values."""
        return pack(at)

    def shared_buffers(self, at: LayerPass) -> Buffers:
        """Return the memory of one layer's whole prompt in fp16, until it is packed. [B]"""
        return ops.prompt_kv(at.d, at.p)
