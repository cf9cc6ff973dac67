"""Compile the simulator with Numba, which here sees arrays, records and tuples by their address.

Numba passes an array as seven numbers, so that a named tuple of fourteen arrays would be a hundred
parameters of every call. Here the tuple is one address: behind it lie the address and the lengths
of each array. What the simulator never needs is left out: owners, strides (rows lie one behind the
other), negative indices and checks of bounds.

Functions under ``jit_function`` are compiled where a compiled function calls them. Those under
``jit_entry`` are what Python calls; their code is kept on disk with all that it contains. Only
documented names of Numba are used, most of them from ``numba.extending``.
"""

import gc
import operator
import sys
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha1
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, ParamSpec, SupportsInt, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba import extending, types

if TYPE_CHECKING:  # names of what Numba hands over; it documents them without a public module
    from numba.core.base import BaseContext
    from numba.core.pythonapi import _UnboxContext as UnboxContext
    from numba.core.typing.templates import Signature

P = ParamSpec("P")
T = TypeVar("T")

WORD = 8  # bytes of an address, a length or a number in a tuple
CACHE_LINE = 64  # bytes that the processor brings from memory at once

JIT_OPTIONS = {
    "error_model": "numpy",
    "no_cpython_wrapper": True,  # Python calls none of them: no code takes its arguments
    "no_cfunc_wrapper": True,
    "no_rewrites": True,  # they are for array expressions, of which there are none
}
"""Of functions that only compiled functions call; the last three shorten the first run."""


Values = Sequence[ir.Value]
Typer = Callable[..., types.Type | None]


# What compiled functions are given


class Field(NamedTuple):
    """A field of a record or of a named tuple."""

    offset: int  # from its beginning [B]
    kind: types.Type  # of what is stored
    inline: bool  # whether it lies there itself, not its address
    lengths: tuple[int, ...] = ()  # of an array that lies there itself


class Array(types.Type):  # type: ignore[misc]
    """The Numba type of an array, defined by its element type and number of axes."""

    def __init__(self, stored: types.Type, ndim: int) -> None:
        super().__init__(_unique_name("Array", stored, ndim))
        self.stored, self.ndim = stored, ndim

    def item(self, index: types.Type) -> types.Type | None:
        """Return the type of an indexed element or row.

        Parameters
        ----------
        index : type of a whole number, or of a tuple of them.

        Returns
        -------
        type or None
            The type of an element, or of a row if the index has fewer axes; None for an invalid
            index.
        """
        axes = 1 if isinstance(index, types.Integer) else len(getattr(index, "types", ()))
        if not 1 <= axes <= self.ndim:
            return None
        return (
            loaded_type(self.stored) if axes == self.ndim else Array(self.stored, self.ndim - axes)
        )


class Block(types.Record):  # type: ignore[misc]
    """Numba type of a record or named tuple, whose fields compiled code reads by address."""

    def __init__(self, title: str, fields: dict[str, Field], size: int) -> None:
        types.Type.__init__(self, _unique_name(title, fields, size))
        self.fields, self.size = fields, size

    members = ()  # for Numba's model of records, which here are no more than their address

    @property
    def mangling_args(self) -> tuple[str, tuple[()]]:
        """The name in machine code, which is the same in every process."""
        return self.name, ()

    def __repr__(self) -> str:
        return str(self.name)

    def typeof(self, name: str) -> types.Type:
        """Return the type of a field. Numba asks for it only when it compiles.

        Parameters
        ----------
        name : the field.
        """
        announce()
        return loaded_type(self.fields[name].kind)


class Shared:
    """A value (array, record or named tuple) together with its address for compiled code."""

    def __init__(self, value: object) -> None:
        self.value = value  # kept as long as its address is in use
        self.kind, words = _layout(value)
        self.words = np.array(words, dtype=np.int64)
        record = isinstance(value, np.void)
        self.address = int(self.words[0] if record else self.words.ctypes.data)


def share(value: T) -> T:
    """Wrap a value for compiled code, which then works on the same memory.

    Parameters
    ----------
    value : an array, a record or a named tuple; or a plain tuple of these. Its memory is shared
        with compiled code, not copied. With ``NUMBA_DISABLE_JIT`` it is returned unchanged.
    """
    if numba.config.DISABLE_JIT:
        return value
    if isinstance(value, np.ndarray | np.void) or hasattr(value, "_fields"):
        return cast(T, Shared(value))
    if isinstance(value, tuple):
        return cast(T, tuple(map(share, value)))
    return value


def type_of(value: object) -> types.Type:
    """Return the type of a value in compiled code.

    Parameters
    ----------
    value : a C-contiguous array, a record, a named tuple of these, or a
        number.
    """
    return _layout(value)[0]


def _layout(value: object) -> tuple[types.Type, list[int]]:
    """Return a value's type, and the words that represent it: addresses, lengths and numbers."""
    if isinstance(value, np.ndarray):
        assert value.flags.c_contiguous, "compiled code takes rows that lie one behind the other"
        return _array_type(value.dtype, value.ndim), [value.ctypes.data, *value.shape]
    if isinstance(value, np.void):
        return _stored_type(value.dtype), [value.__array_interface__["data"][0]]
    if not isinstance(value, tuple):
        return numba.typeof(value), [_number_word(value)]
    parts, words = [], list[int]()
    for part in value:
        kind, some = _layout(part)
        parts.append((kind, len(some), not isinstance(part, np.ndarray | np.void)))
        words += some
    names: tuple[str, ...] = value._fields  # type: ignore[attr-defined]
    return _tuple_type(type(value).__name__, names, tuple(parts)), words


@cache
def _tuple_type(
    title: str, names: tuple[str, ...], parts: tuple[tuple[types.Type, int, bool], ...]
) -> types.Type:
    """Return the type of a named tuple, by the type and the words of each item."""
    fields, offset = {}, 0
    for name, (kind, words, inline) in zip(names, parts, strict=True):
        fields[name] = Field(offset, kind, inline)
        offset += WORD * words
    return Block(title, fields, offset)


@cache
def _array_type(dtype: np.dtype[np.generic], ndim: int) -> types.Type:
    return Array(_stored_type(dtype), ndim)


@cache  # reading a structured dtype takes longer than a short run
def _stored_type(dtype: np.dtype[np.generic]) -> types.Type:
    if not dtype.fields:
        return numba.from_dtype(dtype)
    fields = {}
    for name, (kind, offset, *_) in dtype.fields.items():
        stored = numba.from_dtype(kind.base)
        if kind.shape:
            stored = Array(stored, len(kind.shape))
        fields[name] = Field(offset, stored, True, kind.shape)
    return Block("Record", fields, dtype.itemsize)


def loaded_type(stored: types.Type) -> types.Type:
    """Return the type that a stored number has in compiled code; all integers share one type.

    Parameters
    ----------
    stored : type of the number in memory, such as ``int8``; other types are returned unchanged.
    """
    return types.int64 if isinstance(stored, types.Integer) else stored


def _number_word(value: object) -> int:
    """Return the bits of a number as a whole number."""
    if isinstance(value, float):
        return int(np.float64(value).view(np.int64))
    return 0 if value is None else int(cast(SupportsInt, value))


def _unique_name(title: str, *content: object) -> str:
    """Return a short name that changes with a type and with every source file of this folder.

    Numba finds what it kept on disk by the names of types, so that code from before an edit is
    never found again.
    """
    return f"{title}_{sha1((repr(content) + _source_digest()).encode()).hexdigest()[:12]}"


@cache
def _source_digest() -> str:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return sha1(b"".join(place.read_bytes() for place in files)).hexdigest()


# What they compile to

extending.register_model(Block)(extending.models.RecordModel)


@extending.register_model(Array)
class ArrayModel(extending.models.StructModel):  # type: ignore[misc]
    """Compiled layout of an array: the address of its first element and the length of each axis."""

    def __init__(self, manager: object, array: Array) -> None:
        lengths = types.UniTuple(types.intp, array.ndim)
        members = [
            ("data", types.CPointer(array.stored)),
            ("lengths", lengths),
            ("size", types.intp),
        ]
        super().__init__(manager, array, members)


extending.make_attribute_wrapper(Array, "size", "size")


def _make_array(
    context: "BaseContext", builder: ir.IRBuilder, array: Array, data: ir.Value, lengths: Values
) -> ir.Value:
    """Return an array from an address and lengths."""
    made = builder.insert_value(context.get_constant_null(array), data, 0)
    for axis, length in enumerate(lengths):
        made = builder.insert_value(made, length, (1, axis))
    return builder.insert_value(made, lengths[0], 2)


def _load(
    context: "BaseContext", builder: ir.IRBuilder, stored: types.Type, place: ir.Value
) -> ir.Value:
    """Return the number at an address, or the address itself for a record."""
    pointer = builder.bitcast(place, context.get_value_type(types.CPointer(stored)))
    if isinstance(stored, Block):
        return builder.bitcast(pointer, context.get_value_type(stored))
    value = context.unpack_value(builder, stored, pointer)
    return context.cast(builder, value, stored, loaded_type(stored))


def _store(
    context: "BaseContext",
    builder: ir.IRBuilder,
    stored: types.Type,
    place: ir.Value,
    value: ir.Value,
) -> None:
    """Write a number of its loaded type, or copy a record."""
    if not isinstance(stored, Block):
        pointer = builder.bitcast(place, context.get_value_type(types.CPointer(stored)))
        narrow = context.cast(builder, value, loaded_type(stored), stored)
        context.pack_value(builder, stored, narrow, pointer)
        return
    words = context.get_value_type(types.CPointer(types.int64))
    into, origin = builder.bitcast(place, words), builder.bitcast(value, words)
    for k in range(stored.size // WORD):  # records are padded to whole words
        at = [context.get_constant(types.intp, k)]
        builder.store(builder.load(builder.gep(origin, at)), builder.gep(into, at))


@extending.type_callable(operator.getitem)
def _type_getitem(context: object) -> Typer:
    return lambda array, index: array.item(index) if isinstance(array, Array) else None


@extending.type_callable(operator.setitem)
def _type_setitem(context: object) -> Typer:
    def typer(array: types.Type, index: types.Type, value: types.Type) -> types.Type | None:
        found = array.item(index) if isinstance(array, Array) else None
        return None if found is None or isinstance(found, Array) else types.none

    return typer


@extending.lower_builtin(operator.getitem, Array, types.Integer)
@extending.lower_builtin(operator.getitem, Array, types.BaseTuple)
def _getitem(
    context: "BaseContext", builder: ir.IRBuilder, sig: "Signature", args: Values
) -> ir.Value:
    place, lengths = _locate(context, builder, sig, args)
    if isinstance(sig.return_type, Array):
        return _make_array(context, builder, sig.return_type, place, lengths)
    return _load(context, builder, sig.args[0].stored, place)


@extending.lower_builtin(operator.setitem, Array, types.Integer, types.Any)
@extending.lower_builtin(operator.setitem, Array, types.BaseTuple, types.Any)
def _setitem(
    context: "BaseContext", builder: ir.IRBuilder, sig: "Signature", args: Values
) -> ir.Value:
    stored = sig.args[0].stored
    place, _ = _locate(context, builder, sig, args)
    value = context.cast(builder, args[2], sig.args[2], loaded_type(stored))
    _store(context, builder, stored, place, value)
    return context.get_dummy_value()


def fetch(array: object, index: int) -> None:
    """Prefetch an element into the processor's cache.

    Parameters
    ----------
    array : the array.
    index : index of the element.
    """


@extending.type_callable(fetch)
def _type_fetch(context: object) -> Typer:
    return lambda array, index: types.none if isinstance(array, Array) else None


@extending.lower_builtin(fetch, Array, types.Integer)
def _fetch(
    context: "BaseContext", builder: ir.IRBuilder, sig: "Signature", args: Values
) -> ir.Value:
    stored = sig.args[0].stored
    memory, word = context.get_value_type(types.voidptr), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [memory, word, word, word])
    prefetch = builder.module.declare_intrinsic("llvm.prefetch", [memory], kind)
    place, _ = _locate(context, builder, sig, args)
    last = getattr(stored, "size", WORD) - 1  # of its bytes, which may lie in one line more
    for offset in (*range(0, last, CACHE_LINE), last):
        address = _place(context, builder, place, offset)
        builder.call(prefetch, [address, word(0), word(3), word(1)])  # to read, to keep, data
    return context.get_dummy_value()


def _locate(
    context: "BaseContext", builder: ir.IRBuilder, sig: "Signature", args: Values
) -> tuple[ir.Value, Values]:
    """Return the address of an indexed element, and the lengths of the remaining axes."""
    array, index = sig.args[:2]
    kinds, indices = [index], [args[1]]
    if not isinstance(index, types.Integer):
        kinds = list(index.types)
        indices = [builder.extract_value(args[1], k) for k in range(len(kinds))]
    lengths = [builder.extract_value(args[0], (1, axis)) for axis in range(array.ndim)]
    offset = context.cast(builder, indices[0], kinds[0], types.intp)
    for axis in range(1, array.ndim):
        offset = builder.mul(offset, lengths[axis])
        if axis < len(kinds):
            own = context.cast(builder, indices[axis], kinds[axis], types.intp)
            offset = builder.add(offset, own)
    return builder.gep(builder.extract_value(args[0], 0), [offset]), lengths[len(kinds) :]


def _place(
    context: "BaseContext", builder: ir.IRBuilder, address: ir.Value, offset: int
) -> ir.Value:
    """Return an address plus an offset in bytes."""
    memory = builder.bitcast(address, context.get_value_type(types.voidptr))
    return builder.gep(memory, [context.get_constant(types.intp, offset)], inbounds=True)


@extending.lower_getattr_generic(Block)
def _get_field(
    context: "BaseContext", builder: ir.IRBuilder, block: Block, address: ir.Value, name: str
) -> ir.Value:
    field = block.fields[name]
    if isinstance(field.kind, types.NoneType):
        return context.get_dummy_value()
    place = _place(context, builder, address, field.offset)
    if isinstance(field.kind, Array):
        return _load_array(context, builder, field, place)
    if not field.inline:
        place = _load_word(context, builder, place, 0, types.voidptr)
    return _load(context, builder, field.kind, place)


@extending.lower_setattr_generic(Block)
def _set_field(
    context: "BaseContext", builder: ir.IRBuilder, sig: "Signature", args: Values, name: str
) -> None:
    field = sig.args[0].fields[name]
    place = _place(context, builder, args[0], field.offset)
    value = context.cast(builder, args[1], sig.args[1], loaded_type(field.kind))
    _store(context, builder, field.kind, place, value)


def _load_array(
    context: "BaseContext", builder: ir.IRBuilder, field: Field, place: ir.Value
) -> ir.Value:
    pointer = types.CPointer(field.kind.stored)
    if field.inline:
        data = builder.bitcast(place, context.get_value_type(pointer))
        lengths = [context.get_constant(types.intp, length) for length in field.lengths]
    else:
        data = _load_word(context, builder, place, 0, pointer)
        axes = range(1, 1 + field.kind.ndim)
        lengths = [_load_word(context, builder, place, axis, types.intp) for axis in axes]
    return _make_array(context, builder, field.kind, data, lengths)


def _load_word(
    context: "BaseContext", builder: ir.IRBuilder, place: ir.Value, index: int, kind: types.Type
) -> ir.Value:
    """Return a word of a named tuple, which never changes during a run."""
    at = _place(context, builder, place, WORD * index)
    pointer = context.get_value_type(types.CPointer(kind))
    found = builder.load(builder.bitcast(at, pointer))
    found.set_metadata("invariant.load", builder.module.add_metadata([]))
    return found


@extending.typeof_impl.register(Shared)
def _type_of_shared(shared: Shared, context: object) -> types.Type:
    return shared.kind


@extending.unbox(Array)
@extending.unbox(Block)
def _unbox(kind: types.Type, shared: ir.Value, unboxing: "UnboxContext") -> extending.NativeValue:
    """Return the address that Python passes; for an array, the words stored there."""
    context, builder, python = unboxing.context, unboxing.builder, unboxing.pyapi
    number = python.object_getattr_string(shared, "address")
    address = python.long_as_voidptr(number)
    python.decref(number)
    if isinstance(kind, Array):
        return extending.NativeValue(_load_array(context, builder, Field(0, kind, False), address))
    return extending.NativeValue(builder.bitcast(address, context.get_value_type(kind)))


# Functions


def jit_function(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function callable from compiled functions; Python can still call it directly.

    Parameters
    ----------
    function : the function. It is compiled where a compiled function calls it, without checks of
        bounds; a division by 0 gives infinity or NaN, as in NumPy.
    """
    return extending.register_jitable(**JIT_OPTIONS)(function)  # type: ignore[no-any-return]


def jit_unless_tiered(otherwise: Callable[P, T]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let compiled functions call ``otherwise`` instead if only GPUs store shared blocks.

    Parameters
    ----------
    otherwise : function that is called if the world's ``links`` are None, with the same arguments.

    Returns
    -------
    callable
        Decorator of the function that is called where other memories keep blocks, too.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        def choose(*given: types.Type) -> Callable[P, T]:
            worlds = [kind for kind in given if "links" in getattr(kind, "fields", ())]
            return otherwise if worlds[0].fields["links"].kind is types.none else function

        extending.overload(function, jit_options=JIT_OPTIONS, strict=False)(choose)
        return function

    return decorate


class CompiledEntry(Generic[P, T]):
    """A compiled function that Python calls, kept on disk where Numba finds a place for it."""

    def __init__(self, function: Callable[P, T]) -> None:
        self.function = function
        self.ready: set[tuple[types.Type, ...]] = set()
        try:
            self.dispatcher = numba.njit(error_model="numpy", cache=True)(function)
        except (RuntimeError, OSError):
            self.dispatcher = numba.njit(error_model="numpy")(function)

    def __call__(self, *given: P.args, **named: P.kwargs) -> T:
        """Call it with arrays, records and named tuples, shared already or not."""
        if numba.config.DISABLE_JIT:
            return self.function(*given, **named)
        values = [share(value) for value in given]
        kinds = tuple(map(numba.typeof, values))
        if kinds not in self.ready:
            self._prepare(kinds)
        return self.dispatcher(*values)  # type: ignore[no-any-return]

    def _prepare(self, kinds: tuple[types.Type, ...]) -> None:
        """Load the code, or compile it."""
        if self.dispatcher.stats.cache_path is None:
            announce(kept=False)
        collects = gc.isenabled()
        gc.disable()  # there is little to collect, and looking for it takes a tenth of the time
        try:
            self.dispatcher.compile(kinds)
        except Exception:  # what another version kept, or was cut short, fails in many ways
            self.dispatcher.recompile()  # empties what is kept
            self.dispatcher.compile(kinds)
        finally:
            if collects:
                gc.enable()
        self.ready.add(kinds)


def jit_entry(function: Callable[P, T]) -> CompiledEntry[P, T]:
    """Let Python call a compiled function.

    Parameters
    ----------
    function : the function. Its arguments are numbers, or values that ``share`` accepts. It is
        compiled at the first call with arguments of these types, and cached on disk.
    """
    return CompiledEntry(function)


_announced: list[bool] = []


def announce(kept: bool = True) -> None:
    """Say once in a process that the simulator is being compiled, as it takes a while.

    Parameters
    ----------
    kept : whether compiled code is kept on disk; otherwise every run compiles again.
    """
    if _announced:
        return
    _announced.append(True)
    text = "kvsim: compiling the serving simulator (only on the first run)"
    if not kept:
        text = (
            "kvsim: compiling the serving simulator in every run, as no writable cache was found; "
            "set NUMBA_CACHE_DIR to a folder"
        )
    print(text, file=sys.stderr, flush=True)
