"""``dataclass`` for classes by the hundred: as the standard library's, made in half of its time.

The standard library compiles six methods for every frozen class when it is imported. Here the
constructor is compiled when the class is first used, and the others are the same for all classes.
What is not frozen, or has slots, is the standard library's own.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, **options):
        """Make a class a dataclass, with the options of ``dataclasses.dataclass``."""
        if not options.get("frozen") or options.keys() - {"frozen", "repr", "eq"}:
            return dataclasses.dataclass(cls, **options)
        return _frozen(cls, **options) if cls else partial(_frozen, **options)


FIELDS, PARAMS = "__dataclass_fields__", "__dataclass_params__"


def _frozen(cls: type, *, frozen: bool, repr: bool = True, eq: bool = True) -> type:
    own = vars(cls)
    shared = {"__setattr__": _set, "__delattr__": _delete}
    if repr:
        shared["__repr__"] = _repr
    if eq:
        shared["__eq__"] = _equal
        if own.get("__hash__") is None:  # None is what defining __eq__ leaves
            shared["__hash__"] = _hash
    shared = {name: method for name, method in shared.items() if own.get(name) is None}
    constructs = "__init__" not in own
    above = [vars(base)[PARAMS] for base in cls.__mro__[1:] if PARAMS in vars(base)]
    if not all(params.frozen for params in above):
        return dataclasses.dataclass(frozen=True)(cls)  # says what is wrong
    for params in above:  # or a class that is made as not frozen may not have them as its bases
        params.frozen = False
    made: Any = dataclasses.dataclass(init=False, repr=False, eq=False)(cls)
    for params in (*above, vars(made)[PARAMS]):
        params.frozen = True
    for name, method in shared.items():
        setattr(made, name, method)
    if constructs:
        made.__init__ = _Constructor(made)
    made._compared = _values(made)
    return made  # type: ignore[no-any-return]


class _Constructor:
    """Stands for ``__init__`` until it is asked for, and then compiles it."""

    def __init__(self, cls: type) -> None:
        self._cls = cls

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        compiled = self._cls.__init__ = _compiled(self._cls)  # type: ignore[misc]
        return compiled.__get__(instance, owner)


class _Missing:
    """Default of a field that a factory makes."""

    def __repr__(self) -> str:
        return "<factory>"


def _compiled(cls: Any) -> Any:
    """The constructor of a class, with its fields' names, defaults and types."""
    known: dict[str, Any] = {"_put": object.__setattr__, "_missing": _Missing()}
    plain, body = ["self"], []
    named: list[str] = []
    for field in dataclasses.fields(cls):
        name = value = text = field.name
        if field.default_factory is not dataclasses.MISSING:
            known[f"_make_{name}"] = field.default_factory
            text = f"{name}=_missing"
            value = f"_make_{name}()"
            if field.init:
                value += f" if {name} is _missing else {name}"
        elif field.default is not dataclasses.MISSING:
            known[f"_default_{name}"] = field.default
            text = f"{name}=_default_{name}"
        if field.init:
            (named if field.kw_only else plain).append(text)
        if field.init or field.default_factory is not dataclasses.MISSING:
            body.append(f"_put(self, {name!r}, {value})")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    parameters = ", ".join([*plain, *(["*", *named] if named else [])])
    exec(f"def __init__({parameters}):\n " + "\n ".join(body or ["pass"]), known)
    made = known["__init__"]
    made.__qualname__, made.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    types = {field.name: field.type for field in dataclasses.fields(cls) if field.init}
    made.__annotations__ = types | {"return": None}
    return made


def _values(cls: type) -> Callable[[Any], tuple[Any, ...]]:
    """A function of an instance that returns what is compared of it."""
    names = [field.name for field in dataclasses.fields(cls) if field.compare]
    if len(names) > 1:
        return staticmethod(attrgetter(*names))
    return staticmethod(lambda instance: tuple(getattr(instance, name) for name in names))


def _equal(self: Any, other: Any) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    return self._compared(self) == self._compared(other)


def _hash(self: Any) -> int:
    return hash(self._compared(self))


@recursive_repr()
def _repr(self: Any) -> str:
    shown = [field.name for field in dataclasses.fields(self) if field.repr]
    values = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
    return f"{self.__class__.__qualname__}({values})"


def _set(self: Any, name: str, value: object) -> None:
    if FIELDS in vars(type(self)) or name in getattr(type(self), FIELDS):
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
    object.__setattr__(self, name, value)


def _delete(self: Any, name: str) -> None:
    if FIELDS in vars(type(self)) or name in getattr(type(self), FIELDS):
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
    object.__delattr__(self, name)
