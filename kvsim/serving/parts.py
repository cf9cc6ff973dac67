"""Compiled functions that only others call: kept as LLVM's code for the entry that contains them.

Numba optimises each function and turns it into machine code as soon as it is compiled, with all
that it calls in it, so that what an entry calls through ten others is made ten times. Here it is
made once, with the entry.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

CODEGEN: Any = import_module("numba.core.codegen")  # it has no types
TARGET: Any = import_module("numba.core.registry").cpu_target


class CodePart(CODEGEN.JITCodeLibrary):  # type: ignore[misc]
    """A function's code before the optimisation that looks at several functions."""

    def _optimize_final_module(self) -> None:
        """The entry's optimisation does it."""

    def _finalize_final_module(self) -> None:
        """There is no machine code to be made."""
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Nowhere, as for every function that Python cannot call."""
        self._ensure_finalized()
        return 0


@contextmanager
def parts_only() -> Iterator[None]:
    """Where whatever is compiled becomes a part; nothing changes if Numba lacks what it takes."""
    codegen = TARGET.target_context.codegen()
    if getattr(codegen, "_library_class", None) is not CODEGEN.JITCodeLibrary:
        yield
        return
    codegen._library_class = CodePart
    codegen.set_env = _leave  # a part has no place for what it would find in Python
    try:
        yield
    finally:
        del codegen._library_class, codegen.set_env


def _leave(name: str, environment: object) -> None:
    """Leave out what Numba sets for a function that Python can call."""
