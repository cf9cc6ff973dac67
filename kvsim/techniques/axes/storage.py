"""Storages that several techniques share: quantised groups, and caches in a single buffer."""

from kvsim.engine import ops
from kvsim.engine.formats import FP16, Format
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Number, Op
from kvsim.techniques.axes.base import LayerPass, Part, Storage, pack
from kvsim.techniques.axes.settings import param

FLEXGEN_GROUP = 64  # numbers that share a scale (FlexGen, section 4.4)
BITS = (1, 2, 3, 4, 8, 16)
PACKED_ON_HOST = "packed on the host"  # what offloading techniques share: they pack in one way


@frozen
class WholeStorage(Storage):
    """A storage whose cache is a single buffer ``kv``, without a tail in full precision."""

    def side_bytes(self, at: LayerPass) -> tuple[Number, Number]:
        """Return half of the buffer for keys and half for values. [B]"""
        half = self.resident(at)["kv"] / 2
        return half, half

    def tail_bytes(self, at: LayerPass) -> Number:
        """Return 0: recent tokens are part of ``kv``, or have a separate buffer. [B]"""
        return 0.0


@frozen
class Grouped(Storage):
    """Quantises each token in min-max groups, with separate widths for keys and values.

    References
    ----------
    .. [1] Y. Sheng et al., "FlexGen", ICML 2023, section 4.4: groups of 64.
    """

    name = "grouped"
    preset = False

    bits: float = param(4, "bits per cached number", choices=BITS)
    value_bits: float | str = param("same", "bits per cached value", choices=(*BITS, "same"))
    group: int = param(FLEXGEN_GROUP, "numbers that share a scale", low=8, high=1024)
    host: bool = param(False, "whether only the host's copy is packed", choices=(True, False))

    @property
    def stored(self) -> Format:
        """Format of the groups; fp16 at 16 bits."""
        values = self.bits if isinstance(self.value_bits, str) else self.value_bits
        if self.bits == values == 16:
            return FP16
        return Format(self.bits, self.group, value_bits=values)

    @property
    def read(self) -> Format:
        """Format that attention reads: fp16 if packed values are dequantised before it."""
        return FP16 if self.host else self.stored

    def prepare(self, at: LayerPass) -> list[Op]:
        """Return the ops that pack new tokens: all of them, or those that go to the host."""
        if not self.host:
            return pack(at)
        new = at.p.batch * at.kept_of_prompt if at.p.prefill else at.staying
        return ops.quantise(at.d, at.placement.v_host * new, self.stored)

    def shared_buffers(self, at: LayerPass) -> Buffers:
        """Return the memory of one layer's whole prompt in fp16, until it is packed. [B]"""
        return {} if self.host or self.exact else ops.prompt_kv(at.d, at.p)


def packed_on_host(bits: float) -> tuple[Part, ...]:
    """Return a grouped storage on the host, or nothing at 16 bits.

    Parameters
    ----------
    bits : bits per cached value on the host.
    """
    return () if bits == 16 else (Grouped(bits, host=True),)
