"""Finds the class that runs a technique or one of its parts."""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from inspect import isclass
from types import MappingProxyType
from typing import TypeVar

from kvsim.errors import InputError
from kvsim.techniques.axes.base import Part
from kvsim.techniques.axes.drafting import Selfdraft

Piece = TypeVar("Piece")
FILES: Mapping[str, str] = MappingProxyType(
    {
        "all": "parts.selection",
        "fp16": "parts.rows",
        "grouped": "parts.rows",
        "gpu": "parts.place",
        "place": "parts.place",
        "values": "techniques.kcache",
        "pairs": "techniques.specache",
        "late-kivi": "techniques.specache",
        "guessed": "techniques.infinigen",
        "hierarchical": "techniques.quantspec",
        "landmarks": "techniques.shadowkv",
        "lowrank": "techniques.shadowkv",
    }
)
"""Files of parts by their names; ``techniques/some_name.py`` holds the class of ``some-name``."""

SELF_DRAFTING: Mapping[str, str] = MappingProxyType(
    {"upper": "quantspec", "all": "quantspec", "streamingllm": "magicdec", "snapkv": "magicdec"}
)
"""Whose drafts a model's own layers make, by what these read."""


def find_class(base: type[Piece], name: str) -> type[Piece] | None:
    """Find the class of a technique or part by its name.

    Parameters
    ----------
    base
        What the class has to be derived from.
    name
        As the notation writes it, such as ``late-kivi``, whose class is ``LateKivi``.

    Returns
    -------
    The class, or none if no file has one.
    """
    file = FILES.get(name, f"techniques.{name.replace('-', '_').replace(' ', '_')}")
    module = f"kvsim.validate.{file}"
    if find_spec(module) is None:
        return None
    wanted = name.replace("-", "").replace(" ", "")
    for key, kind in vars(import_module(module)).items():
        if key.lower() == wanted and isclass(kind) and issubclass(kind, base):
            return kind
    return None


def find_part(base: type[Piece], part: Part, name: str = "") -> type[Piece]:
    """Find the class that runs a part.

    Parameters
    ----------
    base
        What the class has to be derived from.
    name
        Of the class, where it is not the part's.

    Raises
    ------
    InputError
        If there is none.
    """
    if isinstance(part, Selfdraft):
        name = SELF_DRAFTING[part.reads]
    kind = find_class(base, name or part.name)
    if kind is None:
        raise InputError(
            f"{part.name}: this {part.axis} has no real implementation; it can be simulated alone"
        )
    return kind
