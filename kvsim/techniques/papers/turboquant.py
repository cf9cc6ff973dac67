"""TurboQuant: each token's vectors are rotated at random, then quantised element by element."""

import numpy as np

from kvsim.engine import ops
from kvsim.engine.formats import FP16, Format
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Number, Op
from kvsim.techniques.axes.base import Launches, LayerPass, Storage, pack
from kvsim.techniques.axes.settings import param


@frozen
class Turboquant(Storage):
    """Rotates each head's vectors and quantises them to few bits.

    Each vector is stored with its norm in fp16 and no other parameters.

    Queries and outputs are rotated with the cache: attention works on rotated vectors.

    References
    ----------
    .. [1] A. Zandieh et al., "TurboQuant: online vector quantization with near-optimal distortion
       rate", arXiv:2504.19874, algorithm 1 and section 4.
    """

    name = "turboquant"
    launches = Launches(
        prefill={"attn": 3, "rotate": 2, "quantise": 32},
        decode={"rotate": 4, "quantise": 32, "attn": 45},
    )

    bits: float = param(4, "bits per cached key", choices=(2, 3, 4, 8, 16))
    value_bits: float | str = param(
        "same", "bits per cached value", choices=(2, 3, 4, 8, 16, "same")
    )
    group: int = param(128, "numbers that share one norm", low=8, high=1024)

    candidates = ({"bits": 3}, {"bits": 4}, {"bits": 4, "value_bits": 3})  # published, and the next

    @property
    def stored(self) -> Format:
        """Format of the cache, with one fp16 norm per vector."""
        values = self.bits if isinstance(self.value_bits, str) else self.value_bits
        if self.bits == values == 16:
            return FP16
        return Format(self.bits, 2 * self.group, value_bits=values)

    def prepare(self, at: LayerPass) -> list[Op]:
        """Return the ops that rotate new queries, keys and values, and pack keys and values."""
        return [] if self.exact else [self._rotate(at, "rotate", True), *pack(at)]

    def complete(self, at: LayerPass) -> list[Op]:
        """Return the op that rotates outputs back; nothing in prefill.

        The prompt's own attention reads vectors that are not rotated.
        """
        return [] if self.exact or at.p.prefill else [self._rotate(at, "rotate_back", False)]

    def _rotate(self, at: LayerPass, name: str, cached: bool) -> Op:
        m, p = at.d.shard, at.p
        tokens: Number = p.tokens
        if p.prefill:  # what stays of the prompt
            kept = at.selection.count_kept_prompt(at)
            tokens = p.batch * (kept - np.minimum(kept, p.context))
        heads = m.heads * m.head_dim * (not p.prefill)
        numbers = tokens * (heads + cached * m.kv_width)
        moved = 2 * ops.FP16_BYTES * numbers + ops.FP16_BYTES * m.head_dim**2
        return Op(
            name, kernel="gemm", flops=2.0 * m.head_dim * numbers, bytes={"hbm": moved}, size=tokens
        )

    def shared_buffers(self, at: LayerPass) -> Buffers:
        """Return the memory of one layer's whole prompt in fp16, until it is packed. [B]"""
        return {} if self.exact else ops.prompt_kv(at.d, at.p)
