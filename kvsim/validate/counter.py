"""What a real run does, op by op: FLOPs by torch's formulas, bytes named and bytes measured.

An implementation names its ops as ``kvsim/techniques`` does and says which tensors each of them
reads and writes; what its kernels really touched is measured beside it, see
``kvsim.validate.footprint``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from threading import Lock
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

from kvsim.graph import Channel
from kvsim.validate.footprint import Between, Footprint, Outlived, Written, is_composite, is_kernel

Kind = Literal["prefill", "between", "decode", "draft", "verify"]
"""What a forward pass is for."""


def size(*tensors: Tensor | None) -> int:
    """Sum the sizes of tensors. [B]"""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


@dataclass
class Count:
    """What one op did in one forward pass, over all layers."""

    flops: int = 0  # [FLOP]
    bytes: dict[Channel, int] = field(default_factory=dict)  # by channel [B]
    rows: int = 0  # gathered one by one from host memory
    launches: int = 0  # kernels that PyTorch ran, views and allocations left out
    stated: int = 0  # of the bytes those that the op names, copies between memories left out [B]
    touched: int = 0  # what its kernels read and wrote, as they were seen to, but for ... [B]
    written: list[Written] = field(default_factory=list)  # ... what others read later

    @property
    def measured(self) -> int:
        """What its kernels read and wrote, as ``kvsim.validate.footprint`` counts. [B]"""
        return self.touched + sum(one.size for one in self.written)

    def move(self, channel: Channel, moved: int) -> None:
        """Add bytes to a channel.

        Parameters
        ----------
        channel
            Memory or link that they pass through.
        """
        self.bytes[channel] = self.bytes.get(channel, 0) + moved

    def add(self, other: "Count") -> None:
        """Add another count of the same op.

        Parameters
        ----------
        other
            Its FLOPs, bytes by channel, rows and launches are added to these.
        """
        self.flops += other.flops
        self.rows += other.rows
        self.launches += other.launches
        self.stated += other.stated
        self.touched += other.touched
        self.written += other.written
        for channel, moved in other.bytes.items():
            self.move(channel, moved)


class OpRecord:
    """What an op says about itself while it runs; does nothing unless counted."""

    counting = False  # whether it is worth finding out what to say

    def reads(self, *tensors: Tensor | None) -> None:
        """Note what the op reads from the memory of its device."""

    def writes(self, *tensors: Tensor | None) -> None:
        """Note what the op writes to the memory of its device."""

    def visible(self, queries: int, keys: int, seen: Tensor | str) -> None:
        """Note which pairs of a query and a key are seen: only these count.

        Parameters
        ----------
        seen
            A mask that is true where a key is seen, or the name of a usual pattern.
        """

    def computes(self, flops: int) -> None:
        """Note the work of a kernel that PyTorch has no formula for.

        Parameters
        ----------
        flops
            Floating-point operations of one run. [FLOP]
        """


class NullCounter:
    """The interface of a count that counts nothing."""

    def begin(self, kind: Kind) -> None:
        """Note that a forward pass starts.

        Parameters
        ----------
        kind
            What the pass does: ``prefill``, ``decode``, ``draft``, ``verify`` or ``between`` these.
        """

    @contextmanager
    def op(self, name: str, memory: Channel = "hbm") -> Iterator[OpRecord]:
        """Run one op of a layer under its name in ``kvsim/techniques``.

        Parameters
        ----------
        memory
            Memory of the device that runs it.
        """
        yield OpRecord()

    def copy(
        self, name: str, stream: Literal["h2d", "d2h"], tensors: Sequence[Tensor], rows: int = 0
    ) -> None:
        """Note a copy between GPU and host memory, in the pass that uses its data.

        Parameters
        ----------
        stream
            Direction of the copy: to the device (``h2d``) or to the host (``d2h``).
        rows
            Rows that are gathered one by one from host memory.
        """

    @contextmanager
    def moving(self, stream: str) -> Iterator[None]:
        """Run work of a lane, on the thread or stream that stands for it.

        Parameters
        ----------
        stream
            The lane: ``h2d`` or ``d2h``.
        """
        yield

    def separate(self) -> "NullCounter":
        """A count of its own for work that a later pass will use; see ``merge``."""
        return self

    def merge(self, note: "NullCounter") -> None:
        """Add what was counted apart to this pass.

        Parameters
        ----------
        note
            A count that ``separate`` has made.
        """


NULL_COUNTER = NullCounter()


def uncounted() -> AbstractContextManager[None]:
    """Work that is only there to say what an op reads and writes; its kernels do not count."""
    return _disable_current_modes()


@dataclass
class CountedPass:
    """One forward pass and its ops."""

    kind: Kind
    ops: dict[str, Count] = field(default_factory=dict)


class OpCounter(NullCounter):
    """Counts every op; safe to call from the threads that stand for streams on a CPU."""

    def __init__(self, outlived: Outlived | None = None) -> None:
        self.passes: list[CountedPass] = []
        self.links: dict[str, int] = {}  # what was seen to be copied, by direction [B]
        self.watched = False  # whether what is read between ops was seen too
        self._lock = Lock()
        self._outlived = outlived or Outlived()

    def between(self) -> AbstractContextManager[object]:
        """A whole run: what is read between ops is seen too."""
        self.watched = True
        return Between(self._outlived)

    def begin(self, kind: Kind) -> None:
        """Note that a forward pass starts: what follows belongs to it.

        Parameters
        ----------
        kind
            What the pass does: ``prefill``, ``decode``, ``draft``, ``verify`` or ``between`` these.
        """
        self.passes.append(CountedPass(kind))

    @contextmanager
    def op(self, name: str, memory: Channel = "hbm") -> Iterator[OpRecord]:
        """Count what runs inside under that name.

        Parameters
        ----------
        name
            Name of the op in ``kvsim/techniques``.
        memory
            Memory of the device that runs it: ``hbm`` or ``dram``.
        """
        record, footprint = _CountedRecord(), Footprint(self._outlived)
        with footprint, Watch() as watch:
            yield record
        touched, written = footprint.close()
        with self._lock:
            count = self._count(name)
            count.stated += record.moved
            count.touched += touched
            count.written += written
            count.flops += int((watch.flops + record.unseen) * record.share)
            count.launches += watch.kernels
            count.move(memory, record.moved)

    def copy(
        self, name: str, stream: Literal["h2d", "d2h"], tensors: Sequence[Tensor], rows: int = 0
    ) -> None:
        """Count a copy on the link and in the memories at its ends.

        Parameters
        ----------
        name
            Name of the op in ``kvsim/techniques``.
        stream
            To the device (``h2d``) or to the host (``d2h``).
        tensors
            What is copied; its bytes count on the link, in GPU memory and in host memory.
        rows
            Rows that are gathered one by one from host memory.
        """
        moved = size(*tensors)
        with self._lock:
            count = self._count(name)
            for channel in (stream, "hbm", "dram"):
                count.move(channel, moved)
            count.rows += rows
            count.launches += len(tensors)

    @contextmanager
    def moving(self, stream: str) -> Iterator[None]:
        """Measure what a copy moves.

        Parameters
        ----------
        stream
            The lane: ``h2d`` or ``d2h``.
        """
        footprint = Footprint(self._outlived)
        with footprint:
            yield
        moved, _ = footprint.close()
        with self._lock:
            self.links[stream] = self.links.get(stream, 0) + moved

    def separate(self) -> "OpCounter":
        """A count of its own."""
        note = OpCounter(self._outlived)
        note.begin("decode")
        return note

    def merge(self, note: NullCounter) -> None:
        """Add what was counted apart to this pass.

        Parameters
        ----------
        note
            A count that ``separate`` has made.
        """
        assert isinstance(note, OpCounter)
        for name, more in note.passes[0].ops.items():
            with self._lock:
                self._count(name).add(more)

    def _count(self, name: str) -> Count:
        return self.passes[-1].ops.setdefault(name, Count())


class _CountedRecord(OpRecord):
    counting = True

    def __init__(self) -> None:
        self.moved, self.unseen, self.share = 0, 0, Fraction(1)

    def computes(self, flops: int) -> None:
        self.unseen += flops

    def reads(self, *tensors: Tensor | None) -> None:
        self.moved += size(*tensors)

    def writes(self, *tensors: Tensor | None) -> None:
        self.moved += size(*tensors)

    def visible(self, queries: int, keys: int, seen: Tensor | str) -> None:
        if isinstance(seen, Tensor):
            with uncounted():
                self.share = Fraction(int(seen.sum()), seen.numel())
        elif seen in ("causal", "later"):
            self.share = Fraction(2 * keys - queries + 1, 2 * keys)


class Fused:
    """Kernels launched past PyTorch, whose dispatcher does not see them."""

    launched: ClassVar[int] = 0


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """FLOPs by torch's formulas, and kernels, of everything that PyTorch runs.

    Ops made of others are opened first, as ``torch.utils.flop_counter`` does; what is left are
    kernels, views and allocations.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops, self._seen, self._before = 0, 0, Fused.launched

    @property
    def kernels(self) -> int:
        """Kernels so far; to be read when it is left."""
        return self._seen + Fused.launched - self._before

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ) -> object:
        kwargs = kwargs or {}
        formula = FORMULAS.get(func.overloadpacket)
        if formula is None and is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=out)
        self._seen += is_kernel(func)
        return out


def _attention_flops(
    queries: Tensor, keys: Tensor, values: Tensor, *_: object, **__: object
) -> int:
    """Of fused attention with grouped heads, every pair of a query and a key counted."""
    return 2 * queries.shape[:3].numel() * keys.shape[2] * (queries.shape[3] + values.shape[3])


def _int4_flops(tensor: Tensor, packed: Tensor, group: int, scales: Tensor, **_: object) -> int:
    """Of a product with 4-bit weights."""
    return 2 * tensor.numel() * scales.shape[1]


FORMULAS: Mapping[object, Callable[..., int]] = {
    **flop_registry,
    **{
        getattr(torch.ops.aten, name): _attention_flops
        for name in (
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
        )
    },
    torch.ops.aten._weight_int4pack_mm: _int4_flops,
    torch.ops.aten._weight_int4pack_mm_for_cpu: _int4_flops,
}
"""torch's own, but for fused attention, which it does not know, or only with equal heads."""
