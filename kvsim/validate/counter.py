"""Counters of real runs, op by op: FLOPs by PyTorch's formulas, stated and measured bytes.

An implementation names its ops as ``kvsim/techniques`` does and says which tensors each of them
reads and writes; what its kernels really touched is measured beside it.

An op stands for one kernel that an engine would run, so it is measured as one: bytes from outside
that are read, each once, and bytes that others read later. What is made inside and not read
outside stays on the chip. Views are free, work in place counts where it is, a gather reads what it
takes and not all of its source, and a plain copy writes alone, as what made its source could have
written there. Integers and masks are left out: they say where numbers are.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from math import prod
from threading import Lock
from typing import Any, ClassVar, Literal, Self
from weakref import ref

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from kvsim.graph import Channel

WHERE = (torch.bool, torch.int16, torch.int32, torch.int64)
"""Formats of positions, indices and masks."""
GATHERS = ("aten::index", "aten::index_select", "aten::gather", "aten::embedding")
SCATTERS = ("aten::index_put_", "aten::_index_put_impl_", "aten::scatter_", "aten::index_copy_")
OVERWRITES = ("aten::copy_", "aten::fill_", "aten::zero_")
Kwargs = Mapping[str, object]
View = tuple[int, tuple[int, ...], tuple[int, ...], int]
"""Offset, shape, strides, and the size of a number [B]."""


@cache
def is_composite(func: Any) -> bool:
    """Return whether an op consists of other ops, which are counted instead."""
    implicit = "CompositeImplicitAutograd"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), implicit))


@cache
def is_kernel(func: Any) -> bool:
    """Return whether an op runs a kernel, rather than making a view or allocating memory."""
    return not (func.is_view or func.name().startswith(("aten::empty", "aten::_unsafe_view")))


class Written:
    """Bytes that an op has written; they count once another op reads them.

    Parameters
    ----------
    views
        Views of the tensor that the op has written.
    """

    def __init__(self, views: Iterable[View]) -> None:
        self._views = views
        self.size = 0  # [B]

    def read(self) -> None:
        """Count the bytes as written to memory, because another op reads them."""
        self.size = _union(self._views)


class Outlived:
    """Tensors that ops have created and that still exist."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ref[UntypedStorage], Written]] = {}

    def add(self, storage: UntypedStorage, views: Iterable[View]) -> Written:
        """Record a tensor that only its own op has read so far."""
        key, forget = storage._cdata, self._known.pop
        written = Written(views)
        self._known[key] = ref(storage, lambda _: forget(key, None)), written
        return written

    def read(self, storage: UntypedStorage) -> None:
        """Record that a tensor is read."""
        if known := self._known.pop(storage._cdata, None):
            known[1].read()


class Between(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records tensors that are read between the ops of a run.

    Parameters
    ----------
    outlived : tensors that ops have created.
    """

    def __init__(self, outlived: Outlived) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outlived = outlived

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ) -> object:
        if is_composite(func):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        if is_kernel(func):
            for tensor in _numbers((args, kwargs)):
                self._outlived.read(tensor.untyped_storage())
        return func(*args, **(kwargs or {}))


class Fused:
    """Counter of kernels launched outside PyTorch's dispatcher, such as Triton's.

    Attributes
    ----------
    launched
        Number of such kernels so far, in this process.
    """

    launched: ClassVar[int] = 0


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of FLOPs, by PyTorch's formulas, and of kernels of everything that PyTorch runs.

    Composite ops are decomposed first, as in ``torch.utils.flop_counter``, into kernels, views and
    allocations.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops, self._seen, self._before = 0, 0, Fused.launched

    @property
    def kernels(self) -> int:
        """Number of kernels so far; valid after the context is left."""
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
        self._note(func, args, kwargs, out)
        return out

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: Kwargs, out: object) -> None:
        """Hook that receives each kernel; ignored by default."""


class Footprint(Watch):  # type: ignore[no-untyped-call]
    """Counter of the bytes that one op moves.

    Parameters
    ----------
    outlived : tensors that ops of the run have created.
    """

    def __init__(self, outlived: Outlived) -> None:
        super().__init__()
        self._outlived = outlived
        self._rows = 0  # read or written one by one [B]
        self._held: dict[int, UntypedStorage] = {}  # so that no place is used again
        self._own: set[int] = set()
        self._reads: dict[int, set[View]] = defaultdict(set)
        self._writes: dict[int, set[View]] = defaultdict(set)
        self._computed: dict[int, set[View]] = defaultdict(set)  # writes but for plain copies

    def finish(self) -> tuple[int, list[Written]]:
        """Return the moved bytes at the end of the op.

        Returns
        -------
        moved
            Bytes read from and written to tensors that existed before. [B]
        written
            Tensors that the op has created.
        """
        own = {key: self._writes.pop(key) for key in self._own if key in self._writes}
        written = [self._outlived.add(self._held[key], views) for key, views in own.items()]
        self._held.clear()
        outside = (*self._reads.values(), *self._writes.values())
        return self._rows + sum(_union(views) for views in outside), written

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: Kwargs, out: object) -> None:
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        fresh = [t for t in _tensors(out) if t.untyped_storage()._cdata not in given]
        self._own |= {self._hold(tensor) for tensor in fresh}
        if not is_kernel(func):
            return
        name, changed = func.name().partition(".")[0], list(_changed(func, args, kwargs))
        read = [t for t in _numbers((args, kwargs)) if not any(t is c for c in changed)]
        if name in GATHERS:
            if read and self._from_outside(read.pop(0)):
                self._rows += sum(t.numel() * t.element_size() for t in _numbers(out))
        elif name in SCATTERS:
            if changed and self._hold(changed[0]) not in self._own:
                self._rows += sum(t.numel() * t.element_size() for t in read[-1:])
            changed = []
        elif name not in OVERWRITES and not func._schema.overload_name.endswith("out"):
            read += changed
        plain = (name == "aten::copy_" and args[0].dtype == args[1].dtype) or name in SCATTERS
        for tensor in read:
            if self._from_outside(tensor) and not plain:
                self._reads[self._hold(tensor)].add(_view(tensor))
        for tensor in (*changed, *fresh):
            self._write(tensor, plain)

    def _from_outside(self, tensor: Tensor) -> bool:
        """Return whether a tensor comes from memory rather than from a kernel of this op."""
        key = self._hold(tensor)
        if key in self._own:
            return False
        self._outlived.read(tensor.untyped_storage())
        here = self._computed.get(key)
        return not here or _union(here | {_view(tensor)}) > _union(here)

    def _write(self, tensor: Tensor, plain: bool) -> None:
        key, view = self._hold(tensor), _view(tensor)
        if tensor.dtype not in WHERE:
            self._writes[key].add(view)
            if not plain:
                self._computed[key].add(view)

    def _hold(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        self._held[key] = storage
        return key


def _tensors(values: object) -> Iterator[Tensor]:
    return (value for value in tree_iter(values) if isinstance(value, Tensor))


def _numbers(values: object) -> Iterator[Tensor]:
    return (t for t in _tensors(values) if t.dtype not in WHERE)


def _changed(func: Any, args: tuple[object, ...], kwargs: Kwargs) -> Iterator[Tensor]:
    """Yield the arguments that a kernel writes to."""
    for i, asked in enumerate(func._schema.arguments):
        if asked.alias_info is not None and asked.alias_info.is_write:
            yield from _numbers(args[i] if i < len(args) else kwargs.get(asked.name))


def _view(tensor: Tensor) -> View:
    place = int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())
    return *place, tensor.element_size()


def _union(views: Iterable[View]) -> int:
    """Return the size of the union of several views of one tensor. [B]"""
    (_, shape, strides, size), *more = views = [v for v in views if 0 not in v[1]] or [EMPTY]
    if not more:
        return size * prod(n for n, step in zip(shape, strides, strict=True) if step)
    last = max(v[0] + sum((n - 1) * s for n, s in zip(v[1], v[2], strict=True)) for v in views)
    with _disable_current_modes():
        seen = torch.zeros(last + 1, dtype=torch.bool)
        for offset, shape, strides, _ in views:
            seen.as_strided(shape, strides, offset).fill_(True)
        return size * int(seen.sum())


EMPTY: View = (0, (0,), (1,), 0)


Kind = Literal["prefill", "between", "decode", "draft", "verify"]
"""What a forward pass is for."""


def size(*tensors: Tensor | None) -> int:
    """Sum the sizes of tensors. [B]"""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


@dataclass
class Count:
    """Work of one op over all layers of a pass or phase, as counted or as predicted."""

    flops: float = 0  # [FLOP]
    bytes: dict[Channel, float] = field(default_factory=dict)  # bytes by channel [B]
    rows: int = 0  # rows gathered one by one from host memory
    launches: float = 0  # kernels that PyTorch ran, without views and allocations
    stated: int = 0  # bytes that the op states, without copies between memories [B]
    touched: int = 0  # bytes that its kernels read and wrote, except ``written`` [B]
    written: list[Written] = field(default_factory=list)  # bytes written and read by others [B]

    @property
    def measured(self) -> int:
        """Bytes that its kernels read and wrote, as ``Footprint`` counts them. [B]"""
        return self.touched + sum(one.size for one in self.written)

    def move(self, channel: Channel, moved: float) -> None:
        """Add bytes to a channel.

        Parameters
        ----------
        channel
            Name of the memory or link.
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
    """Record of what an op states about its own work; does nothing unless ops are counted."""

    counting = False  # whether it is worth finding out what to say

    def reads(self, *tensors: Tensor | None) -> Self:
        """Record the tensors that the op reads from device memory; returns this record."""
        return self

    def writes(self, *tensors: Tensor | None) -> Self:
        """Record the tensors that the op writes to device memory; returns this record."""
        return self

    def visible(self, queries: int, keys: int, seen: Tensor | str) -> None:
        """Record how many query-key pairs the op computes.

        Pairs that a mask hides are not counted.

        Parameters
        ----------
        queries, keys
            Numbers of queries and of keys per sequence.
        seen
            Mask that is true where a query sees a key, or ``all``, ``causal`` or ``later``.
        """

    def computes(self, flops: int) -> None:
        """Record the FLOPs of a kernel for which PyTorch has no formula.

        Parameters
        ----------
        flops
            Floating-point operations of one run. [FLOP]
        """


class NullCounter:
    """A counter that counts nothing, and the interface of all counters."""

    def begin(self, kind: Kind) -> None:
        """Record that a forward pass starts.

        Parameters
        ----------
        kind
            Kind of the pass: ``prefill``, ``decode``, ``draft``, ``verify`` or ``between`` these.
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
        """Record a copy between GPU and host memory, in the pass that uses its data.

        Parameters
        ----------
        stream
            Direction of the copy: to the device (``h2d``) or to the host (``d2h``).
        rows
            Rows that are gathered one by one from host memory.
        """

    @contextmanager
    def moving(self, stream: str) -> Iterator[None]:
        """Context of a copy stream's work, on the thread or stream that represents it.

        Parameters
        ----------
        stream
            The lane: ``h2d`` or ``d2h``.
        """
        yield

    def separate(self) -> "NullCounter":
        """Return a separate counter for work that a later pass will use; see ``merge``."""
        return self

    def merge(self, note: "NullCounter") -> None:
        """Add the counts of a separate counter to this pass.

        Parameters
        ----------
        note
            Counter that ``separate`` has returned.
        """


NULL_COUNTER = NullCounter()


def uncounted() -> AbstractContextManager[None]:
    """Context whose kernels are not counted, for work that only records what an op reads."""
    return _disable_current_modes()


@dataclass
class CountedPass:
    """One forward pass and its ops."""

    kind: Kind
    ops: dict[str, Count] = field(default_factory=dict)


class OpCounter(NullCounter):
    """Counter of every op; safe to call from the threads that represent streams on a CPU."""

    def __init__(self, outlived: Outlived | None = None) -> None:
        self.passes: list[CountedPass] = []
        self.links: dict[str, int] = {}  # what was seen to be copied, by direction [B]
        self.watched = False  # whether what is read between ops was seen too
        self._lock = Lock()
        self._outlived = outlived or Outlived()

    def watch(self) -> AbstractContextManager[object]:
        """Context of a whole run, in which reads between ops are recorded too."""
        self.watched = True
        return Between(self._outlived)

    def begin(self, kind: Kind) -> None:
        """Record that a forward pass starts, to which the following ops belong."""
        self.passes.append(CountedPass(kind))

    @contextmanager
    def op(self, name: str, memory: Channel = "hbm") -> Iterator[OpRecord]:
        """Count the work within the context under the name of an op."""
        record, footprint = _CountedRecord(), Footprint(self._outlived)
        with footprint:
            yield record
        touched, written = footprint.finish()
        with self._lock:
            count = self._count(name)
            count.stated += record.moved
            count.touched += touched
            count.written += written
            count.flops += int((footprint.flops + record.unseen) * record.share)
            count.launches += footprint.kernels
            count.move(memory, record.moved)

    def copy(
        self, name: str, stream: Literal["h2d", "d2h"], tensors: Sequence[Tensor], rows: int = 0
    ) -> None:
        """Count a copy on the link and in the memories at its ends."""
        moved = size(*tensors)
        with self._lock:
            count = self._count(name)
            for channel in (stream, "hbm", "dram"):
                count.move(channel, moved)
            count.rows += rows
            count.launches += len(tensors)

    @contextmanager
    def moving(self, stream: str) -> Iterator[None]:
        """Measure the bytes that a copy moves."""
        footprint = Footprint(self._outlived)
        with footprint:
            yield
        moved, _ = footprint.finish()
        with self._lock:
            self.links[stream] = self.links.get(stream, 0) + moved

    def separate(self) -> "OpCounter":
        """Return a separate counter of the same kind."""
        note = OpCounter(self._outlived)
        note.begin("decode")
        return note

    def merge(self, note: NullCounter) -> None:
        """Add the counts of a separate counter to this pass."""
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

    def reads(self, *tensors: Tensor | None) -> Self:
        self.moved += size(*tensors)
        return self

    writes = reads

    def visible(self, queries: int, keys: int, seen: Tensor | str) -> None:
        if isinstance(seen, Tensor):
            with uncounted():
                self.share = Fraction(int(seen.sum()), seen.numel())
        elif seen in ("causal", "later"):
            self.share = Fraction(2 * keys - queries + 1, 2 * keys)


def _attention_flops(
    queries: Tensor, keys: Tensor, values: Tensor, *_: object, **__: object
) -> int:
    """Return the FLOPs of fused attention with grouped heads, over all query-key pairs."""
    return 2 * queries.shape[:3].numel() * keys.shape[2] * (queries.shape[3] + values.shape[3])


def _int4_flops(tensor: Tensor, packed: Tensor, group: int, scales: Tensor, **_: object) -> int:
    """Return the FLOPs of a product with 4-bit weights."""
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
