"""KVQuant: keys packed per channel before rotary embedding, outliers separately."""

from kvsim.engine import ops
from kvsim.engine.formats import UNGROUPED, Format
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Number, Op
from kvsim.techniques.axes.base import Launches, LayerPass, Storage, pack, resident_kv
from kvsim.techniques.axes.settings import combine, param

OUTLIER = 4.0  # fp16 value and 16-bit position of an outlier: 0.32 bits per number at 1 % [B]
TOKEN = 4.0  # scale and offset of one token's values [B]


@frozen
class Kvquant(Storage):
    """Quantises to calibrated non-uniform levels; keeps outliers in FP16.

    Levels are calibrated beforehand, per channel for keys and per token for values.

    Attention applies rotary embedding to the keys as it dequantises them. The share ``outliers`` of
    elements with the largest magnitude stays in fp16, and so does the first token.

    References
    ----------
    .. [1] C. Hooper et al., "KVQuant: towards 10 million context length LLM inference with KV cache
       quantization", NeurIPS 2024, section 3; 1 % of outliers are 0.32 bits per number.
    """

    name = "kvquant"
    launches = Launches(
        prefill={"attn": 33, "quantise": 16, "outliers": 31},
        decode={"attn": 62, "quantise": 14, "outliers": 31},
    )

    bits: float = param(4, "bits per cached number", choices=(2, 3, 4))
    outliers: Number = param(0.01, "share of numbers kept in fp16", high=0.5, whole=False)

    candidates = combine(bits=(3, 4))  # for which the paper reports results

    @property
    def stored(self) -> Format:
        """Format of the cache; the tables of levels belong to the model."""
        return Format(self.bits, UNGROUPED)

    def _get_outlier_bytes(self, at: LayerPass, tokens: Number) -> Number:
        """Return the size of outliers and of each token's scale of values. [B]"""
        m = at.d.shard
        return at.p.batch * tokens * (self.outliers * m.kv_width * OUTLIER + TOKEN)

    def prepare(self, at: LayerPass) -> list[Op]:
        """Return the ops that pack new tokens, and find their outliers and ranges."""
        numbers = at.d.shard.kv_width * at.staying
        found = ops.FP16_BYTES * numbers + self._get_outlier_bytes(at, at.p.new)
        return [*pack(at), Op("outliers", kernel="topk", bytes={"hbm": found})]

    def extra_bytes(self, at: LayerPass) -> Number:
        """Return the bytes of outliers and scales that attention reads. [B]"""
        return 0.0 if at.p.prefill else self._get_outlier_bytes(at, at.kept_tokens)

    def transfer_bytes(self, at: LayerPass, tokens: Number) -> tuple[Number, Number]:
        """Return the size of keys and values, each with half of the outliers and scales. [B]"""
        k, v = super().transfer_bytes(at, tokens)
        more = self._get_outlier_bytes(at, tokens) / 2
        return k + more, v + more

    def resident(self, at: LayerPass) -> dict[str, Number]:
        """Return the memory of the packed cache, and of its outliers and scales. [B]"""
        return {
            "kv": resident_kv(at, self.stored),
            "outliers": self._get_outlier_bytes(at, at.kept_tokens),
        }

    def shared_buffers(self, at: LayerPass) -> Buffers:
        """Return the memory of one layer's whole prompt in fp16, until it is packed. [B]"""
        return ops.prompt_kv(at.d, at.p)
