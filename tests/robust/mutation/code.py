"""The functions of a module that a change touches, and their replacement where they are loaded."""

import gc
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType

from tests.support.places import ROOT


def key_of(code: CodeType, path: str) -> str:
    """A function, or a part of one: its file below the project and its name in it."""
    return f"{path}:{code.co_qualname}"


def touched(before: str, after: str, path: Path) -> tuple[set[str], bool]:
    """Qualified names of the code that differs; whether a module's own body does."""
    old = dict(_codes(compile(before, str(path), "exec", dont_inherit=True)))
    names, whole = set(), False
    for place, code in _codes(compile(after, str(path), "exec", dont_inherit=True)):
        if place not in old or _own(code) != _own(old[place]):
            names.add(code.co_qualname)
            whole = whole or _on_import(code)
    return names, whole


def swap(source: str, path: Path) -> None:
    """Give every function of a module the code of another source of it.

    The module is loaded first: one that a command imports later would come without the change.
    """
    import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    new = dict(_codes(compile(source, str(path), "exec", dont_inherit=True)))
    resolved: dict[str, bool] = {}
    gc.unfreeze()  # tests freeze what was imported, and frozen functions are not listed
    for function in [found for found in gc.get_objects() if type(found) is FunctionType]:
        code = function.__code__
        file = code.co_filename
        if file not in resolved:
            resolved[file] = Path(file).resolve() == path
        if resolved[file]:
            other = new.get(f"{code.co_qualname}:{code.co_firstlineno}")
            if other is not None and len(other.co_freevars) == len(code.co_freevars):
                function.__code__ = other


def _on_import(code: CodeType) -> bool:
    """Whether importing runs it: the body of a module or of a class, or a generator there."""
    generator = code.co_name == "<genexpr>" and "<locals>" not in code.co_qualname
    return generator or not code.co_flags & 2


def _codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    """A module's code and all that is in it."""
    yield f"{code.co_qualname}:{code.co_firstlineno}", code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _own(code: CodeType) -> tuple[object, ...]:
    """What a code does by itself."""
    constants = [repr(c) for c in code.co_consts if not isinstance(c, CodeType)]
    return code.co_code, code.co_names, code.co_varnames, constants
