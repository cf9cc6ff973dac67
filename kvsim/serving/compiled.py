"""Numba's compiler: every function of the simulator once, for the types its annotations name.

Python calls few of these functions: the entries. They alone are kept on disk, each with the code of
all that it calls, so that a run after the first loads one file. The others are compiled when an
entry has to be.
"""

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast, get_type_hints

from numba import njit, types
from numba.core import event

from kvsim.serving.parts import parts_only

import_module("kvsim.serving.views_code")  # Numba learns what functions here are given

F = TypeVar("F", bound=Callable[..., object])
Kinds = Mapping[Any, Any]
"""Numba's type of every class that annotations name besides numbers."""

OPTIONS: Any = {"error_model": "numpy", "_nrt": False}
"""Compiled functions allocate nothing, so that arrays need no reference counts: counting them at
every call would take longer than the work."""
INSIDE: Any = {
    **OPTIONS,
    "no_cpython_wrapper": True,  # what Python never calls needs no code that takes its arguments
    "no_cfunc_wrapper": True,
    "no_rewrites": True,  # nothing here is an array expression, which they are for
}
"""Each of these shortens the wait for the first run."""

PLAIN = {int: types.int64, float: types.float64, bool: types.boolean}

_compiled: list[tuple[Any, Any]] = []
_ready: set[tuple[Any, object]] = set()


def compiled(function: F) -> F:
    """Machine code for other compiled functions; Python cannot call it."""
    return _registered(function, None)


def compiled_unless(otherwise: Callable[..., object]) -> Callable[[F], F]:
    """The same, but with the code of another function where some of its types do not occur."""
    return lambda function: _registered(function, otherwise)


def _registered(function: F, otherwise: Any) -> F:
    dispatcher: Any = njit(**INSIDE)(function)
    if hasattr(dispatcher, "py_func"):  # else NUMBA_DISABLE_JIT is set
        dispatcher._can_compile = False  # but in _compile
        _compiled.append((dispatcher, otherwise))
    return cast(F, dispatcher)


def entry(function: F) -> F:
    """Machine code that Python calls, kept on disk where Numba finds a place for it."""
    try:
        dispatcher: Any = njit(cache=True, **OPTIONS)(function)
    except (RuntimeError, OSError):
        return cast(F, njit(**OPTIONS)(function))
    kept: Any = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if hasattr(kept, "_source_stamp"):  # an entry holds the code of what it calls in other files
        kept._source_stamp = _stamp()
    return cast(F, dispatcher)


@cache
def _stamp() -> tuple[tuple[float, int], ...]:
    """What changes when any file of this folder does."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return tuple((place.stat().st_mtime, place.stat().st_size) for place in files)


def prepare(
    function: Callable[..., object], kinds_of: Callable[[], Kinds], variant: object = None
) -> None:
    """Load an entry, or compile it, for the types that its annotations name.

    Parameters
    ----------
    kinds_of : gives the types; asked once for each variant, because finding them takes longer than
        a short run.
    """
    if (function, variant) in _ready or not hasattr(function, "py_func"):
        return
    kinds = {**PLAIN, **kinds_of()}
    with _compiling(kinds):
        signature = _signature(function, kinds)
        assert signature is not None
        _compile(function, signature)
    _ready.add((function, variant))


@contextmanager
def _compiling(kinds: Kinds) -> Iterator[None]:
    """Where entries may be compiled; all that they may call is compiled before the first one."""
    config: Any = import_module("numba.core.config")
    before = config.OPT, config.LOOP_VECTORIZE
    # loop vectorisation and the last of LLVM's passes gain nothing here
    config.OPT, config.LOOP_VECTORIZE = type(config.OPT)(2), 0
    collects = gc.isenabled()
    gc.disable()  # compiling leaves little to collect, and looking for it takes a tenth of the time
    try:
        with event.install_listener("numba:compile", _Callees(kinds)):
            yield
    finally:
        config.OPT, config.LOOP_VECTORIZE = before
        if collects:
            gc.enable()


class _Callees(event.Listener):
    """Compiles what an entry may call when the entry itself is about to be compiled."""

    def __init__(self, kinds: Kinds) -> None:
        self.kinds = kinds
        self.begun = False

    def on_start(self, event: Any) -> None:
        """Say what is awaited, and compile in order of definition, callees first."""
        if self.begun:
            return
        self.begun = True
        entry = event.data["dispatcher"]
        _announce(getattr(entry._cache, "cache_path", None) is not None)
        needed = _callees(entry)
        for dispatcher, otherwise in _compiled:
            if dispatcher not in needed:
                continue
            signature = _signature(dispatcher, self.kinds)
            if signature is not None:
                _compile(dispatcher, signature)
            elif otherwise is not None:
                signature = _signature(otherwise, self.kinds)
                if signature is not None and signature not in dispatcher.overloads:
                    dispatcher.add_overload(otherwise.overloads[signature])

    def on_end(self, event: object) -> None:
        """Print nothing when a compilation ends."""


def _callees(entry: Any) -> set[Any]:
    """What an entry may call, directly or through others, by the names in their code."""
    alternatives, open_ = dict(_compiled), [entry]
    found: set[Any] = set()
    while open_:
        function = open_.pop().py_func
        names, known = function.__code__.co_names, function.__globals__
        modules = [vars(known[name]) for name in names if isinstance(known.get(name), ModuleType)]
        called = {
            scope[name]
            for scope in (known, *modules)
            for name in names
            if isinstance(scope.get(name), type(entry))
        }
        called |= {alternatives[one] for one in called if alternatives.get(one) is not None}
        open_ += called - found
        found |= called
    return found


@cache
def _announce(kept: bool) -> None:
    """Say what is awaited, once in a process, and how it need not be again."""
    text = "kvsim: compiling the serving simulator, once after an installation"
    if not kept:
        text = (
            "kvsim: compiling the serving simulator, in every run: no place found to keep it; "
            "NUMBA_CACHE_DIR can name a folder"
        )
    print(text, file=sys.stderr, flush=True)


def _signature(dispatcher: Any, kinds: Kinds) -> tuple[Any, ...] | None:
    """Numba's types of the parameters, if all of them occur."""
    found = [kinds.get(hint) for hint in _hints(dispatcher.py_func)]
    return None if None in found else tuple(found)


@cache
def _hints(function: Callable[..., object]) -> tuple[Any, ...]:
    hints = get_type_hints(function, include_extras=True)
    return tuple(hint for name, hint in hints.items() if name != "return")


def _compile(dispatcher: Any, signature: tuple[Any, ...]) -> None:
    """Compile for one signature alone, not again for a literal or a narrower integer."""
    if signature in dispatcher.overloads:
        return
    dispatcher._can_compile = True
    if "no_cpython_wrapper" in dispatcher.targetoptions:
        with parts_only():
            dispatcher.compile(signature)
        dispatcher._can_compile = False
        dispatcher._clear()  # what Python would find when it calls, and must not
        return
    try:
        dispatcher.compile(signature)
    except Exception:  # code that another version kept, or that was cut short, fails in many ways
        with suppress(OSError):
            dispatcher._cache.flush()
        dispatcher.compile(signature)
    dispatcher._can_compile = False
