"""Every name of the notation, found in the files of this folder.

A file ``some_name.py``, here or in ``papers``, holds the term ``some-name``; other files hold what
terms share.
"""

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from inspect import isclass
from pkgutil import iter_modules

from kvsim.techniques.terms import Term


@cache
def terms() -> dict[str, type[Term]]:
    """Terms by name: first full, then the others in alphabetical order."""
    found = {kind.name: kind for kind in _terms()}
    return {name: found[name] for name in sorted(found, key=lambda n: (n != "full", n))}


def presets() -> dict[str, type[Term]]:
    """Terms that are a paper's technique, rather than pieces of one."""
    return {name: kind for name, kind in terms().items() if kind.preset}


def _terms() -> Iterator[type[Term]]:
    for package in ("kvsim.techniques", "kvsim.techniques.papers"):
        for module in iter_modules(import_module(package).__path__):
            name = module.name.replace("_", "-")
            for kind in vars(import_module(f"{package}.{module.name}")).values():
                public = isclass(kind) and not kind.__name__.startswith("_")
                if public and issubclass(kind, Term) and getattr(kind, "name", "") == name:
                    yield kind
