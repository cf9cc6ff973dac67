"""What differs between two documents of numbers and names."""

import math
from collections.abc import Iterator
from typing import Any

ROUNDING = 1e-13  # what is smaller is none


def moved(before: Any, now: Any, same: float, place: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in before.keys() | now.keys():
            yield from moved(before.get(key), now.get(key), same, f"{place}.{key}")
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for i, pair in enumerate(zip(before, now, strict=True)):
            yield from moved(*pair, same, f"{place}[{i}]")
    elif not _same(before, now, same):
        yield f"{place}: {before} became {now}"


def _same(before: Any, now: Any, same: float) -> bool:
    if isinstance(before, float) or isinstance(now, float):
        try:
            return math.isclose(before, now, rel_tol=same, abs_tol=ROUNDING)
        except TypeError:
            return False
    return bool(before == now)
