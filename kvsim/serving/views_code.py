"""What views, rows and bundles are in machine code; Numba learns it when this is imported."""

import operator
from importlib import import_module
from typing import Any

import numba

from kvsim.serving.views import WORD, ArrayView, Bundle, RecordView, Shared, fetch

types: Any = numba.types  # none of this has types for mypy
cgutils: Any = import_module("numba.core.cgutils")
extending: Any = import_module("numba.extending")
templates: Any = import_module("numba.core.typing.templates")
ir: Any = import_module("llvmlite.ir")

FETCHED = 0, 3, 1  # to be read, kept in every cache, data

extending.register_model(RecordView)(extending.models.RecordModel)
extending.register_model(Bundle)(extending.models.OpaqueModel)


@extending.register_model(ArrayView)
class ArrayViewModel(extending.models.StructModel):  # type: ignore[misc]
    """The address of the first element, and the length of each axis."""

    def __init__(self, manager: Any, view: ArrayView) -> None:
        shape = types.UniTuple(types.intp, view.ndim)
        super().__init__(manager, view, [("data", types.CPointer(view.dtype)), ("shape", shape)])


extending.make_attribute_wrapper(ArrayView, "shape", "shape")


@templates.infer_getattr
class ArrayViewAttributes(templates.AttributeTemplate):  # type: ignore[misc]
    """``size``, as arrays have it."""

    key = ArrayView

    def resolve_size(self, view: ArrayView) -> Any:
        """A whole number, for views of one axis."""
        return types.intp if view.ndim == 1 else None


@extending.lower_getattr(ArrayView, "size")
def _size(context: Any, builder: Any, view: ArrayView, value: Any) -> Any:
    struct = cgutils.create_struct_proxy(view)(context, builder, value=value)
    return builder.extract_value(struct.shape, 0)


@extending.type_callable(operator.getitem)
def _type_of_item(context: Any) -> Any:
    return lambda view, index: view.at(index) if isinstance(view, ArrayView) else None


@extending.type_callable(operator.setitem)
def _type_of_setting(context: Any) -> Any:
    def typer(view: Any, index: Any, value: Any) -> Any:
        found = view.at(index) if isinstance(view, ArrayView) else None
        return None if found is None or isinstance(found, ArrayView) else types.none

    return typer


@extending.lower_builtin(operator.getitem, ArrayView, types.Integer)
@extending.lower_builtin(operator.getitem, ArrayView, types.BaseTuple)
def _item(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    """An element, or a view of the axes that remain."""
    found = sig.return_type
    place, lengths = _place(context, builder, sig, args)
    if isinstance(found, ArrayView):
        return _made(context, builder, found, (place, lengths))
    return context.unpack_value(builder, found, place)


@extending.lower_builtin(operator.setitem, ArrayView, types.Integer, types.Any)
@extending.lower_builtin(operator.setitem, ArrayView, types.BaseTuple, types.Any)
def _set_item(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    """Write one element, a record as a whole."""
    dtype = sig.args[0].dtype
    place, _ = _place(context, builder, sig, args)
    if isinstance(dtype, RecordView):
        size = context.get_constant(types.intp, dtype.size)
        cgutils.raw_memcpy(builder, place, args[2], size, 1)
    else:
        value = context.cast(builder, args[2], sig.args[2], dtype)
        context.pack_value(builder, dtype, value, place)
    return context.get_dummy_value()


@extending.type_callable(fetch)
def _type_of_fetch(context: Any) -> Any:
    return lambda view, index: types.none if isinstance(view, ArrayView) else None


@extending.lower_builtin(fetch, ArrayView, types.Integer)
def _fetch(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    """The processor's own instruction for it, which waits for nothing."""
    place, _ = _place(context, builder, sig, args)
    word = ir.IntType(32)
    address = builder.bitcast(place, ir.IntType(8).as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [address.type, word, word, word])
    asked = builder.module.declare_intrinsic("llvm.prefetch", [address.type], kind)
    builder.call(asked, [address, *(word(number) for number in FETCHED)])
    return context.get_dummy_value()


def _place(context: Any, builder: Any, sig: Any, args: Any) -> tuple[Any, Any]:
    """The address that an index leads to, and the lengths of the axes that it leaves out."""
    view, index = sig.args[:2]
    kinds, indices = [index], [args[1]]
    if not isinstance(index, types.Integer):
        kinds, indices = list(index.types), cgutils.unpack_tuple(builder, args[1], len(index))
    lengths = cgutils.unpack_tuple(builder, builder.extract_value(args[0], 1), view.ndim)
    offset = context.cast(builder, indices[0], kinds[0], types.intp)
    for axis in range(1, view.ndim):
        offset = builder.mul(offset, lengths[axis])
        if axis < len(kinds):
            own = context.cast(builder, indices[axis], kinds[axis], types.intp)
            offset = builder.add(offset, own)
    return builder.gep(builder.extract_value(args[0], 0), [offset]), lengths[len(kinds) :]


def _made(context: Any, builder: Any, view: ArrayView, parts: tuple[Any, Any]) -> Any:
    """A view of an address and lengths."""
    data, lengths = parts
    struct = cgutils.get_null_value(context.get_value_type(view))
    struct = builder.insert_value(struct, data, 0)
    for axis, length in enumerate(lengths):
        struct = builder.insert_value(struct, length, (1, axis))
    return struct


@templates.infer_getattr
class BundleFields(templates.AttributeTemplate):  # type: ignore[misc]
    """The fields of a bundle, by their names."""

    key: Any = Bundle

    def generic_resolve(self, bundle: Bundle, name: str) -> Any:
        """The type of one field, or None for a name it lacks."""
        return bundle.fields[name][1] if name in bundle.fields else None


@templates.infer_getattr
class RecordFields(BundleFields):
    """The fields of a record, by their names."""

    key = RecordView


@extending.lower_getattr_generic(Bundle)
def _field(context: Any, builder: Any, bundle: Bundle, address: Any, name: str) -> Any:
    offset, kind = bundle.fields[name]
    place = cgutils.pointer_add(builder, address, WORD * offset)
    if isinstance(kind, Bundle):
        return place
    if isinstance(kind, types.NoneType):
        return context.get_dummy_value()
    return _loaded(context, builder, kind, place)


def _loaded(context: Any, builder: Any, kind: Any, place: Any) -> Any:
    """What a bundle has at an address. It never changes during a run."""

    def word(pointer: Any) -> Any:
        found = builder.load(pointer)
        found.set_metadata("invariant.load", builder.module.add_metadata([]))
        return found

    if not isinstance(kind, ArrayView):
        return word(builder.bitcast(place, context.get_value_type(kind).as_pointer()))
    words = builder.bitcast(place, context.get_value_type(types.intp).as_pointer())
    pointer = context.get_value_type(types.CPointer(kind.dtype))
    data = builder.inttoptr(word(words), pointer)
    lengths = [word(cgutils.gep_inbounds(builder, words, 1 + axis)) for axis in range(kind.ndim)]
    return _made(context, builder, kind, (data, lengths))


@extending.lower_getattr_generic(RecordView)
def _record_field(context: Any, builder: Any, record: RecordView, value: Any, name: str) -> Any:
    offset, kind, shape = record.fields[name]
    if not isinstance(kind, ArrayView):
        place = cgutils.get_record_member(builder, value, offset, context.get_data_type(kind))
        return context.unpack_value(builder, kind, place)
    data = cgutils.get_record_member(builder, value, offset, context.get_data_type(kind.dtype))
    lengths = [context.get_constant(types.intp, length) for length in shape]
    return _made(context, builder, kind, (data, lengths))


@extending.lower_setattr_generic(RecordView)
def _set_record_field(context: Any, builder: Any, sig: Any, args: Any, name: str) -> None:
    offset, kind, _ = sig.args[0].fields[name]
    place = cgutils.get_record_member(builder, args[0], offset, context.get_data_type(kind))
    value = context.cast(builder, args[1], sig.args[1], kind)
    context.pack_value(builder, kind, value, place)


@extending.typeof_impl.register(Shared)
def _type_of_shared(shared: Shared, context: object) -> Any:
    return shared.kind


@extending.unbox(ArrayView)
@extending.unbox(RecordView)
@extending.unbox(Bundle)
def _unboxed(kind: Any, shared: Any, unboxing: Any) -> Any:
    """The address that Python hands over; of a view, the words that lie there."""
    context, builder, python = unboxing.context, unboxing.builder, unboxing.pyapi
    number = python.object_getattr_string(shared, "address")
    address = python.long_as_voidptr(number)
    python.decref(number)
    if isinstance(kind, ArrayView):
        return extending.NativeValue(_loaded(context, builder, kind, address))
    return extending.NativeValue(builder.bitcast(address, context.get_value_type(kind)))
