"""How keys and values are stored: the axis and its default, fp16."""

from typing import ClassVar

from kvsim.engine.formats import FP16, Format
from kvsim.frozen import frozen
from kvsim.graph import Number, Op
from kvsim.techniques.layers import LayerPass
from kvsim.techniques.terms import Axis, Part


@frozen
class Storage(Part):
    """How keys and values are stored: format, packing, and what attention does about it."""

    name = "fp16"
    axis: ClassVar[Axis] = "storage"

    @property
    def stored(self) -> Format:
        """Format of cached numbers where they live."""
        return FP16

    @property
    def read(self) -> Format:
        """Format that the GPU's attention reads; fp16 if numbers are widened on their way to it."""
        return self.stored

    @property
    def upper(self) -> "Storage | None":
        """The same cache read at half its bits, where it is stored in halves."""
        return None

    def notes(self, at: LayerPass) -> tuple[str, ...]:
        """Which kernels a low-bit answer stands for."""
        stack, said = at.d.stack, f"low-bit cache: stack {at.d.stack.name} stands for"
        if self.read != self.stored:
            share = stack.kernel("quantise").memory
            return (
                f"{said} kernels that widen what arrives from the host, before attention, at "
                f"{share:.0%} of the memory bandwidth",
            )
        if self.read.kernel != "lowbit":
            return ()
        if stack.packed_cache.unpack_bytes:
            return (
                f"{said} software that unpacks a layer to fp16 before attention and moves "
                f"{stack.packed_cache.unpack_bytes:g} bytes per number for it",
            )
        if stack.packed_cache.unpack_ops:
            each = f"{stack.packed_cache.unpack_ops:g} vector operations per number"
            return (
                f"{said} attention kernels tuned to unpack in registers with {each}; kernels that "
                f"are not lose on cards with much bandwidth",
            )
        passes = (
            f" in {stack.packed_cache.passes:g} passes" if stack.packed_cache.passes > 1 else ""
        )
        return (
            f"{said} attention kernels that read a packed cache{passes} at "
            f"{stack.kernel('lowbit').memory:.0%} of the memory bandwidth, which hides the "
            f"arithmetic of unpacking",
        )

    @property
    def by_token(self) -> bool:
        """Whether one token's numbers can be dropped, moved or fetched alone."""
        return True

    @property
    def scored(self) -> bool:
        """Whether the prompt's attention scores are needed, and so leave the chip."""
        return False

    @property
    def exact(self) -> bool:
        """Whether nothing is packed."""
        return not self.stored.packs

    def arrive(self, at: LayerPass) -> list[Op]:
        """Ops before attention: packing of the tokens that the pass adds."""
        return []

    def after(self, at: LayerPass) -> list[Op]:
        """Ops after attention: nothing where tokens are packed as they come."""
        return []

    def restore(self, at: LayerPass, tokens: Number) -> list[Op]:
        """What makes keys of so many chosen tokens per KV head readable."""
        return []

    def extra_bytes(self, at: LayerPass) -> Number:
        """What attention reads besides, or instead of, numbers in the format it reads. [B]"""
        return 0.0

    def number(self, at: LayerPass) -> tuple[Number, Number]:
        """Average size of a stored number of a key, and of a value. [B]"""
        return self.stored.k_number, self.stored.v_number

    def moved(self, at: LayerPass, tokens: Number) -> tuple[Number, Number]:
        """Bytes of keys and of values of so many cached tokens per sequence, as stored. [B]"""
        m, stored = at.d.shard, self.stored
        k, v = stored.packed_sides(m.k_width, m.v_width, tokens)
        return at.p.batch * k * stored.k_number, at.p.batch * v * stored.v_number

    def sides(self, at: LayerPass) -> tuple[Number, Number]:
        """Keys and values that one layer keeps if all of it is on the GPU, tails left out. [B]"""
        return _sides(at, self.read)

    def tail(self, at: LayerPass) -> Number:
        """What stays on the GPU in full precision wherever the rest is. [B]"""
        m, size = at.d.shard, at.d.stack.cache.overhead * at.p.batch
        return size * self.read.tail_bytes(m.k_width, m.v_width)

    def home(self, at: LayerPass) -> tuple[Number, Number]:
        """Keys and values in host memory if all that can move is there. [B]"""
        return self.sides(at) if self.read == self.stored else _sides(at, self.stored)

    def resident(self, at: LayerPass) -> dict[str, Number]:
        """What one layer keeps on the GPU if all of it is there; ``kv`` is the cache. [B]"""
        return {"kv": sum(self.sides(at), self.tail(at))}


@frozen
class WholeStorage(Storage):
    """A storage that states its cache as one buffer ``kv`` with no tail in full precision."""

    def sides(self, at: LayerPass) -> tuple[Number, Number]:
        """Half of the packed numbers are keys', half are values'."""
        half = self.resident(at)["kv"] / 2
        return half, half

    def tail(self, at: LayerPass) -> Number:
        """Fresh tokens are counted with the others, or as a buffer of their own."""
        return 0.0


def _sides(at: LayerPass, stored: Format) -> tuple[Number, Number]:
    m, size = at.d.shard, at.d.stack.cache.overhead * at.p.batch
    k, v = stored.resident_sides(m.k_width, m.v_width, at.kept)
    return size * k, size * v
