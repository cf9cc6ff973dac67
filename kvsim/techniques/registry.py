"""Every name of the notation.

The techniques are the classes of ``papers/``, one file each with the pieces that are its own;
pieces that several papers share are named here.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from inspect import isclass
from pkgutil import iter_modules

from kvsim.errors import InputError
from kvsim.techniques import papers
from kvsim.techniques.axes.base import Term
from kvsim.techniques.axes.drafting import Selfdraft
from kvsim.techniques.axes.storage import Grouped

SHARED: tuple[type[Term], ...] = (Grouped, Selfdraft)


ENTRY_POINTS = "kvsim.techniques"
"""Group in which an installed package names its techniques' classes."""


@cache
def terms() -> dict[str, type[Term]]:
    """Return every term by its name: first full, then the others in alphabetical order."""
    of_papers = (kind for file in _paper_files() for kind in _terms_of_file(file))
    found = {kind.name: kind for kind in (*SHARED, *of_papers)}
    return {name: found[name] for name in sorted(found, key=lambda n: (n != "full", n))}


@cache
def presets() -> dict[str, type[Term]]:
    """Return the terms that are a paper's technique, rather than pieces of one."""
    return {name: kind for name, kind in terms().items() if kind.preset}


class TechniqueMapping(Mapping[str, type[Term]]):
    """The presets by name, whose files are read once they are asked for."""

    def __getitem__(self, name: str) -> type[Term]:
        return presets()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(presets())

    def __len__(self) -> int:
        return len(presets())


def find_term(name: str) -> type[Term] | None:
    """Find a term by its name; where a file of ``papers/`` bears it, only that file is read.

    Parameters
    ----------
    name
        As in the notation.

    Returns
    -------
    type[Term] or None
        None where no term has that name.
    """
    file = name.replace("-", "_")
    if terms.cache_info().currsize or file not in _paper_files():
        return terms().get(name)
    return next((kind for kind in _terms_of_file(file) if kind.name == name), None)


def register_technique(kind: type[Term]) -> type[Term]:
    """Add a technique of your own, which every command then knows by its name.

    An installed package can name its classes under the entry point ``kvsim.techniques`` instead:
    they are loaded when such a name is first asked for. ``python3 make.py new-technique NAME``
    writes a class to start from.

    Parameters
    ----------
    kind
        A ``@frozen`` class that extends :class:`kvsim.techniques.axes.base.Term`.

    Returns
    -------
    type[Term]
        The same, so that it can decorate the class.

    Raises
    ------
    InputError
        If it is no such class, or its name is taken.
    """
    what = getattr(kind, "__name__", str(kind))[:80]
    if not isclass(kind) or not issubclass(kind, Term):
        raise InputError(f"technique {what}: expected a class that extends Term")
    name = getattr(kind, "name", None)
    if not isinstance(name, str) or not name:
        raise InputError(f"technique {what}: it has no name; add name: ClassVar[str] = ...")
    if terms().get(name, kind) is not kind:
        raise InputError(f"technique {what}: the name {name!r} is taken; choose another")
    terms()[name] = kind
    if kind.preset:
        presets()[name] = kind
    return kind


@cache
def load_installed() -> None:
    """Register the techniques of installed packages; finding them takes a tenth of a second."""
    for point in entry_points(group=ENTRY_POINTS):
        register_technique(point.load())


@cache
def _paper_files() -> list[str]:
    return [module.name for module in iter_modules(papers.__path__)]


def _terms_of_file(name: str) -> list[type[Term]]:
    """The public terms that a paper's file defines; a base has no name of its own."""
    module = import_module(f"{papers.__name__}.{name}")
    return [
        kind
        for kind in vars(module).values()
        if isclass(kind)
        and issubclass(kind, Term)
        and kind.__module__ == module.__name__
        and not kind.__name__.startswith("_")
        and "name" in vars(kind)
    ]
