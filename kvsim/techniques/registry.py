"""Every name of the notation.

The techniques are the classes of ``papers/``, one file each with the pieces that are its own;
pieces that several papers share are named here.
"""

from functools import cache
from importlib import import_module
from inspect import isclass
from pkgutil import iter_modules

from kvsim.techniques import papers
from kvsim.techniques.axes.base import Term
from kvsim.techniques.axes.drafting import Selfdraft
from kvsim.techniques.axes.storage import Grouped

SHARED: tuple[type[Term], ...] = (Grouped, Selfdraft)


@cache
def terms() -> dict[str, type[Term]]:
    """Return every term by its name: first full, then the others in alphabetical order."""
    found = {kind.name: kind for kind in (*SHARED, *_of_papers())}
    return {name: found[name] for name in sorted(found, key=lambda n: (n != "full", n))}


def presets() -> dict[str, type[Term]]:
    """Return the terms that are a paper's technique, rather than pieces of one."""
    return {name: kind for name, kind in terms().items() if kind.preset}


def _of_papers() -> list[type[Term]]:
    """The public terms that a paper's file defines; a base has no name of its own."""
    modules = (import_module(f"{papers.__name__}.{m.name}") for m in iter_modules(papers.__path__))
    return [
        kind
        for module in modules
        for kind in vars(module).values()
        if isclass(kind)
        and issubclass(kind, Term)
        and kind.__module__ == module.__name__
        and not kind.__name__.startswith("_")
        and "name" in vars(kind)
    ]
