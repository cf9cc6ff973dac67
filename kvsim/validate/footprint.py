"""What the ops of a real run move, measured: every tensor that their kernels read and write.

An op stands for one kernel that an engine would run, so it is measured as one: bytes from outside
that are read, each once, and bytes that others read later. What is made inside and not read
outside stays on the chip. Views are free, work in place counts where it is, a gather reads what it
takes and not all of its source, and a plain copy writes alone, as what made its source could have
written there. Integers and masks are left out: they say where numbers are.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from math import prod
from typing import Any
from weakref import ref

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

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
    """Tell whether an op is made of others, which are to be looked at instead."""
    implicit = "CompositeImplicitAutograd"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), implicit))


@cache
def is_kernel(func: Any) -> bool:
    """Tell whether an op is a kernel: no view, nothing that only allocates."""
    return not (func.is_view or func.name().startswith(("aten::empty", "aten::_unsafe_view")))


class Written:
    """Bytes that an op has made; none until somebody else reads them."""

    def __init__(self, views: Iterable[View]) -> None:
        self._views = views
        self.size = 0  # [B]

    def read(self) -> None:
        """Add up what was written, as another op needs it in memory."""
        self.size = _union(self._views)


class Outlived:
    """Tensors that ops have made and that are still there."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ref[UntypedStorage], Written]] = {}

    def add(self, storage: UntypedStorage, views: Iterable[View]) -> Written:
        """Note a tensor that only its own op has read so far."""
        key, forget = storage._cdata, self._known.pop
        written = Written(views)
        self._known[key] = ref(storage, lambda _: forget(key, None)), written
        return written

    def read(self, storage: UntypedStorage) -> None:
        """Note that somebody reads a tensor."""
        if known := self._known.pop(storage._cdata, None):
            known[1].read()


class Between(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches for what is read between the ops of a run.

    Parameters
    ----------
    outlived : what ops have made.
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


class Footprint(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes that one op moves.

    Ops that are made of others must have been opened before they get here.

    Parameters
    ----------
    outlived : what the ops of the run have made.
    """

    def __init__(self, outlived: Outlived) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outlived = outlived
        self._rows = 0  # read or written one by one [B]
        self._held: dict[int, UntypedStorage] = {}  # so that no place is used again
        self._own: set[int] = set()
        self._reads: dict[int, set[View]] = defaultdict(set)
        self._writes: dict[int, set[View]] = defaultdict(set)
        self._computed: dict[int, set[View]] = defaultdict(set)  # writes but for plain copies

    def close(self) -> tuple[int, list[Written]]:
        """Tell what was moved; the op is over.

        Returns
        -------
        moved
            Read from outside and written to what was there before. [B]
        written
            What it has made.
        """
        own = {key: self._writes.pop(key) for key in self._own if key in self._writes}
        written = [self._outlived.add(self._held[key], views) for key, views in own.items()]
        self._held.clear()
        outside = (*self._reads.values(), *self._writes.values())
        return self._rows + sum(_union(views) for views in outside), written

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ) -> object:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._note(func, args, kwargs, out)
        return out

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
        """Whether a tensor comes from memory, and not from a kernel of this op."""
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
    """Arguments that a kernel writes to."""
    for i, asked in enumerate(func._schema.arguments):
        if asked.alias_info is not None and asked.alias_info.is_write:
            yield from _numbers(args[i] if i < len(args) else kwargs.get(asked.name))


def _view(tensor: Tensor) -> View:
    place = int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())
    return *place, tensor.element_size()


def _union(views: Iterable[View]) -> int:
    """Size of what views of one tensor show together. [B]"""
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
