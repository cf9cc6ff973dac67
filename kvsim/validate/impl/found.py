"""The pieces of this folder: ``some_name.py`` holds the class of the part ``some-name``."""

from importlib import import_module
from importlib.util import find_spec
from inspect import isclass
from typing import TypeVar

from kvsim.errors import InputError
from kvsim.techniques.terms import Part

Piece = TypeVar("Piece")
FOLDER = __name__.rpartition(".")[0]


def found(base: type[Piece], name: str) -> type[Piece] | None:
    """The class of that name with that base, if there is one."""
    module = f"{FOLDER}.{name.replace('-', '_').replace(' ', '_')}"
    if find_spec(module) is None:
        return None
    wanted = name.replace("-", "").replace(" ", "")
    for key, kind in vars(import_module(module)).items():
        if key.lower() == wanted and isclass(kind) and issubclass(kind, base):
            return kind
    return None


def piece(base: type[Piece], part: Part) -> type[Piece]:
    """The real implementation of a part.

    Raises
    ------
    InputError
        If there is none.
    """
    kind = found(base, part.name)
    if kind is None:
        raise InputError(
            f"{part.name}: this {part.axis} has no real implementation; it can be simulated alone"
        )
    return kind
