"""Arrays, records and tuples of them as compiled functions pass them on: by their address.

Numba passes an array as seven numbers or more, so that a world of fourteen arrays takes a hundred
parameters at every call, and the compiler spends most of its time on them. Here a tuple is one
address, behind which each of its arrays has an address and a shape. What these functions never need
is left out: owners, strides (elements lie one behind the other) and negative indices.

This file holds the types and what Python hands over; ``views_code`` says what they compile to.
"""

from functools import cache
from hashlib import sha1
from importlib import import_module
from typing import Any, TypeVar, cast

import numpy as np
from numba import types

T = TypeVar("T")

numba: Any = import_module("numba")  # its functions have no types

WORD = 8  # bytes that every field of a bundle is a multiple of


class ArrayView(types.Type):
    """An array: the type of its elements and its number of axes."""

    def __init__(self, dtype: Any, ndim: int) -> None:
        super().__init__(f"ArrayView({dtype}, {ndim})")
        self.dtype, self.ndim = dtype, ndim

    @property
    def mangling_args(self) -> Any:
        """A short name: it is repeated in every line of the code that mentions a function."""
        return _short("Array", self.name), ()

    def at(self, index: Any) -> Any:
        """Type of what an index of one axis or several leads to, or None if none does."""
        axes = 1 if isinstance(index, types.Integer) else len(getattr(index, "types", ()))
        if not 1 <= axes <= self.ndim:
            return None
        return self.dtype if axes == self.ndim else ArrayView(self.dtype, self.ndim - axes)


class RecordView(types.Type):
    """A record: where its fields lie, nested arrays as views of a known shape."""

    members = ()  # of Numba's model of records, which asks for them

    def __init__(self, dtype: np.dtype[Any]) -> None:
        plain = numba.from_dtype(dtype)
        self.size = plain.size
        self.fields: dict[str, tuple[int, Any, tuple[int, ...]]] = {}
        for name, found in plain.fields.items():
            shape, kind = dtype[name].shape, found.type
            if shape:
                kind = ArrayView(kind.dtype, len(shape))
            self.fields[name] = found.offset, kind, shape
        super().__init__(f"RecordView({self.fields}, {self.size})")

    @property
    def mangling_args(self) -> Any:
        """A short name, as a view has it."""
        return _short("Record", self.name), ()


class Bundle(types.Type):
    """A named tuple: where each of its fields lies, and of which type it is."""

    def __init__(self, name: str, fields: dict[str, Any]) -> None:
        self.fields: dict[str, tuple[int, Any]] = {}
        self.words = 0
        for field, kind in fields.items():
            self.fields[field] = self.words, kind
            self.words += _words(kind)
        super().__init__(f"{name}({self.fields})")

    @property
    def mangling_args(self) -> Any:
        """A short name, as a view has it."""
        return _short("Bundle", self.name), ()


class Shared:
    """What Python hands over to an entry, and the memory where compiled code finds it."""

    def __init__(self, value: Any) -> None:
        self.value = value  # kept as long as its address is in use
        self.kind = kind_of(value)
        self.memory = np.array(_content(value), dtype=np.int64)
        found = self.memory[0] if isinstance(self.kind, RecordView) else self.memory.ctypes.data
        self.address = int(found)


def shared(value: T) -> T:
    """An array, a record or a named tuple as an entry takes it; the same if nothing is compiled."""
    return value if numba.config.DISABLE_JIT else cast(T, Shared(value))


def fetch(view: Any, index: int) -> None:
    """Ask memory for an element that is needed soon; compiled code goes on meanwhile."""


def kind_of(value: Any) -> Any:
    """Type of an array, a record, a named tuple or a number in compiled code."""
    if isinstance(value, np.ndarray):
        assert value.flags.c_contiguous, "compiled code takes rows that lie one behind the other"
        return ArrayView(_element(value.dtype), value.ndim)
    if isinstance(value, np.void):
        return _element(value.dtype)
    if isinstance(value, tuple):
        names = type(value)._fields  # type: ignore[attr-defined]
        kinds = {name: kind_of(part) for name, part in zip(names, value, strict=True)}
        return Bundle(type(value).__name__, kinds)
    return numba.typeof(value)


def _short(title: str, name: str) -> str:
    return title + sha1(name.encode()).hexdigest()[:10]


@cache  # Numba takes longer to read a record's type than a short run takes
def _element(dtype: np.dtype[Any]) -> Any:
    return RecordView(dtype) if dtype.fields else numba.from_dtype(dtype)


def _words(kind: Any) -> int:
    """Space of a field in a bundle."""
    if isinstance(kind, Bundle):
        return kind.words
    return 1 + kind.ndim if isinstance(kind, ArrayView) else 1


def _content(value: Any) -> list[int]:
    """The words of something in a bundle."""
    if isinstance(value, np.ndarray):
        return [value.ctypes.data, *value.shape]
    if isinstance(value, np.void):
        return [value.__array_interface__["data"][0]]
    if isinstance(value, tuple):
        return [word for part in value for word in _content(part)]
    if isinstance(value, float):
        return [int(np.float64(value).view(np.int64))]
    return [0 if value is None else int(value)]
