"""Finds the class that runs a part: ``some_name.py`` holds the class of the part ``some-name``."""

from importlib import import_module
from importlib.util import find_spec
from inspect import isclass
from typing import TypeVar

from kvsim.errors import InputError
from kvsim.techniques.axes.base import Part

Piece = TypeVar("Piece")
FOLDERS = "kvsim.validate.techniques", "kvsim.validate.parts"
"""Where to look, in this order."""


def find_class(base: type[Piece], name: str) -> type[Piece] | None:
    """Find the class of a part or technique by its name.

    Parameters
    ----------
    base : what the class has to be derived from.
    name : as the notation writes it, such as ``late kivi``.

    Returns
    -------
    The class, or none if no file has one.
    """
    file, wanted = name.replace("-", "_").replace(" ", "_"), name.replace("-", "").replace(" ", "")
    for module in (f"{folder}.{file}" for folder in FOLDERS):
        if find_spec(module) is None:
            continue
        for key, kind in vars(import_module(module)).items():
            if key.lower() == wanted and isclass(kind) and issubclass(kind, base):
                return kind
    return None


def find_part(base: type[Piece], part: Part) -> type[Piece]:
    """Find the real implementation of a part.

    Raises
    ------
    InputError
        If there is none.
    """
    kind = find_class(base, part.name)
    if kind is None:
        raise InputError(
            f"{part.name}: this {part.axis} has no real implementation; it can be simulated alone"
        )
    return kind
