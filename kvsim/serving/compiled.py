"""Numba's compiler: every function of the simulator once, for the types its annotations name."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

from numba import njit, types
from numba.core import event

F = TypeVar("F", bound=Callable[..., object])

OPTIONS: Any = {"error_model": "numpy", "_nrt": False}
"""Compiled functions allocate nothing, so that arrays need no reference counts: counting them at
every call would take longer than the work."""

PLAIN = {int: types.int64, float: types.float64, bool: types.boolean}

_registered: list[Any] = []


def compiled(function: F) -> F:
    """Machine code, kept on disk; the Python function is its ``py_func``."""
    dispatcher = _kept_where_possible(function)
    _registered.append(dispatcher)
    return cast(F, dispatcher)


def compiled_apart(function: F) -> F:
    """The same for one that few runs need: it is compiled when it is called."""
    return cast(F, _kept_where_possible(function))


def _kept_where_possible(function: Callable[..., object]) -> Any:
    """Compiled with a cache on disk, or without one where Numba finds no place for it."""
    try:
        dispatcher: Any = njit(cache=True, **OPTIONS)(function)
    except (RuntimeError, OSError):
        return njit(**OPTIONS)(function)
    kept: Any = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if hasattr(kept, "_source_stamp"):  # a caller holds the code of what it calls in other files
        kept._source_stamp = _stamp()
    return dispatcher


@cache
def _stamp() -> tuple[tuple[float, int], ...]:
    """What changes when any file of this folder does."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return tuple((place.stat().st_mtime, place.stat().st_size) for place in files)


def inlined(function: F) -> F:
    """A part of the one compiled function that calls it."""
    return cast(F, njit(inline="always", **OPTIONS)(function))


def prepare(kinds: Mapping[Any, Any]) -> None:
    """Compile what has not been compiled yet, in order of definition, callees first.

    With one signature each, no function is compiled a second time for an argument that happens to
    be a literal or a narrower integer.

    Parameters
    ----------
    kinds : Numba's type of every class that annotations name besides numbers.
    """
    kinds = {**PLAIN, **kinds}
    with cheaper_passes(), announced():
        while _registered:
            dispatcher = _registered.pop(0)
            if not hasattr(dispatcher, "py_func"):
                continue  # NUMBA_DISABLE_JIT is set
            hints = get_type_hints(dispatcher.py_func, include_extras=True)
            hints.pop("return")
            dispatcher.compile(tuple(kinds[hint] for hint in hints.values()))
            dispatcher.disable_compile()


@contextmanager
def cheaper_passes() -> Iterator[None]:
    """Without loop vectorisation and the last of LLVM's passes, which gain nothing here."""
    config: Any = import_module("numba.core.config")
    before = config.OPT, config.LOOP_VECTORIZE
    config.OPT, config.LOOP_VECTORIZE = type(config.OPT)(2), 0
    try:
        yield
    finally:
        config.OPT, config.LOOP_VECTORIZE = before


class _Announcer(event.Listener):
    """Says once what is awaited."""

    def __init__(self) -> None:
        self.said = False

    def on_start(self, event: object) -> None:
        if not self.said:
            self.said = True
            print(
                "kvsim: compiling the serving simulator, once after an installation",
                file=sys.stderr, flush=True,
            )  # fmt: skip

    def on_end(self, event: object) -> None:
        """Print nothing when a compilation ends."""


@contextmanager
def announced() -> Iterator[None]:
    """A line on stderr if anything has to be compiled."""
    with event.install_listener("numba:compile", _Announcer()):
        yield
