"""The specification of a sweep: a TOML file with a kind and the values of each axis.

kind = "predict"

[grid]
model = ["llama3-8b", "llama2-7b"]
gpu = ["a6000", "h100"]
technique = "all"
batch = { from = 1, to = 256, count = 9, spacing = "log" }
context = [1024, 8192]
"""

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path

import numpy as np

from kvsim.errors import InputError, unknown
from kvsim.files import SPECIFICATION, read_toml
from kvsim.frozen import frozen
from kvsim.machines.hardware import DEFAULT_STACK, RELEASED
from kvsim.techniques import TECHNIQUES

Value = str | int | float

MOST_CHUNKS, MOST_POINTS = 10**6, 10**9
NAME_AXES = ("model", "gpu", "stack", "weights", "technique", "trace", "route")
SPREAD = ("pp", "dp", "ep")  # 1 and no column of the results where they are left out
WHOLE_AXES = ("tp", *SPREAD, "batch", "context", "prompt", "generate", "replicas")
REAL_AXES = ("rate", "ttft_target_s", "tpot_target_s")
POINT_AXES = ("batch", "context")  # axes of a prediction that are evaluated together

SOFTWARE: dict[str, tuple[Value, ...]] = {"stack": (DEFAULT_STACK,), "weights": (RELEASED,)}


def _required(*names: str) -> dict[str, tuple[Value, ...]]:
    """Axes without a default."""
    return dict.fromkeys(names, ())


AXES: Mapping[str, Mapping[str, tuple[Value, ...]]] = {
    "predict": _required("model", "gpu", "technique", "batch", "context") | SOFTWARE | {"tp": (1,)},
    "plan": _required("model", "gpu", "prompt", "generate")
    | SOFTWARE
    | {"tp": (1,), "ttft_target_s": (10.0,), "tpot_target_s": (0.1,)},
    "simulate": _required("model", "gpu", "technique", "trace")
    | SOFTWARE
    | {"tp": (1,), "rate": (1.0,), "replicas": (1,), "route": ("least-loaded",)}
    | {"ttft_target_s": (2.0,), "tpot_target_s": (0.1,)},
    "capacity": _required("model", "gpu", "trace")
    | SOFTWARE
    | {"rate": (1.0,), "ttft_target_s": (2.0,), "tpot_target_s": (0.1,)},
}
"""Axes of each kind of sweep with their defaults; an empty tuple marks a required axis."""


@frozen
class Spec:
    """A sweep as its file specifies it.

    Attributes
    ----------
    kind
        Kind of result at each point, one of ``AXES``.
    axes
        The values of every axis, in the order of ``AXES``.
    """

    kind: str
    axes: dict[str, tuple[Value, ...]]

    @property
    def split(self) -> list[str]:
        """Axes that have a single value in each chunk."""
        return [name for name in self.axes if self.kind != "predict" or name not in POINT_AXES]

    def combinations(self) -> list[dict[str, Value]]:
        """Return all combinations of values of the axes that divide a sweep into chunks.

        Returns
        -------
        list of dict
            Value by axis, one dictionary per combination.
        """
        names = self.split
        return [
            dict(zip(names, values, strict=True))
            for values in product(*(self.axes[n] for n in names))
        ]

    @property
    def points(self) -> int:
        """Number of points of the grid."""
        return prod(len(values) for values in self.axes.values())

    def described(self) -> dict[str, object]:
        """Return the sweep as the JSON object of its manifest.

        Returns
        -------
        dict
            The kind, and the values of each axis.
        """
        return {"kind": self.kind, "grid": {k: list(v) for k, v in self.axes.items()}}


def read(path: Path) -> Spec:
    """Read a sweep's file.

    Parameters
    ----------
    path
        The TOML file.

    Returns
    -------
    Spec
        The sweep.

    Raises
    ------
    InputError
        For unknown, missing or impossible entries, or a grid too large.
    """
    document = read_toml(path, SPECIFICATION)
    for key in document:
        if key not in ("kind", "grid"):
            raise unknown(f"key in {path}:", key, ("kind", "grid"))
    kind = document.get("kind", "predict")
    if not isinstance(kind, str) or kind not in AXES:
        raise InputError(f"{path}: kind is {kind!r}; expected one of {', '.join(AXES)}")
    grid = document.get("grid")
    if not isinstance(grid, dict):
        raise InputError(f"{path}: [grid] is missing; add it with {', '.join(AXES[kind])}")
    for key in grid:
        if key not in (*AXES[kind], *SPREAD):
            raise unknown(f"axis in [grid] of {path}:", key, (*AXES[kind], *SPREAD))
    axes = {}
    for name, usual in {**AXES[kind], **_required(*(x for x in SPREAD if x in grid))}.items():
        if name in grid:
            axes[name] = _values(path, name, grid[name])
        elif usual:
            axes[name] = usual
        else:
            raise InputError(f"{path}: {name} is missing under [grid]; give it a list of values")
    spec = Spec(kind, axes)
    chunks = prod(len(axes[name]) for name in spec.split)
    if chunks > MOST_CHUNKS or spec.points > MOST_POINTS:
        raise InputError(
            f"{path}: {spec.points:,} points in {chunks:,} chunks; expected at most "
            f"{MOST_POINTS:,} in {MOST_CHUNKS:,}: give fewer values"
        )
    return spec


def _values(path: Path, name: str, given: object) -> tuple[Value, ...]:
    """Values of an axis without duplicates, in the order given."""
    if name == "technique" and given == "all":
        return tuple(TECHNIQUES)
    if isinstance(given, dict):
        if name in NAME_AXES:
            raise InputError(f"{path}: {name} is a table; expected a list of names")
        found: Sequence[object] = _spread(path, name, given)
    else:
        found = given if isinstance(given, list) else [given]
    if not found:
        raise InputError(f"{path}: {name} has no values; give at least one")
    return tuple(dict.fromkeys(_value(path, name, value) for value in found))


def _value(path: Path, name: str, value: object) -> Value:
    wrong = f"{path}: {name} has {str(value)[:60]!r}; expected "
    if name in NAME_AXES:
        if not isinstance(value, str) or not value.strip():
            raise InputError(f"{wrong}texts")
        return value.strip()
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e18:
        raise InputError(f"{wrong}numbers")
    if name in WHOLE_AXES and (value != int(value) or not 1 <= value <= 10**9):
        raise InputError(f"{wrong}whole numbers of 1 or more")
    if name in REAL_AXES and not 0 < value <= 1e9:
        raise InputError(f"{wrong}numbers above 0")
    return int(value) if name in WHOLE_AXES else float(value)


def _spread(path: Path, name: str, given: Mapping[str, object]) -> list[Value]:
    """``{ from = 1, to = 256, count = 9, spacing = "log" }``."""
    for key in given:
        if key not in ("from", "to", "count", "spacing"):
            raise unknown(f"key of {name} in {path}:", key, ("from", "to", "count", "spacing"))
    first, last = (_value(path, name, given.get(key)) for key in ("from", "to"))
    count, spacing = given.get("count"), given.get("spacing", "linear")
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= 10**6:
        raise InputError(f"{path}: count of {name} is {count!r}; expected a whole number from 1")
    if spacing not in ("linear", "log"):
        raise InputError(f'{path}: spacing of {name} is {spacing!r}; expected "linear" or "log"')
    make = np.geomspace if spacing == "log" else np.linspace
    values = make(float(first), float(last), count)
    return [round(float(x)) if name in WHOLE_AXES else float(x) for x in values]
