"""What differs between two documents of numbers and names."""

import math
from collections.abc import Iterator
from typing import Any

ROUNDING = 1e-13  # what is smaller is none


def shortened(value: Any) -> Any:
    """A document with twelve digits of each number."""
    if isinstance(value, dict):
        return {key: shortened(each) for key, each in value.items()}
    if isinstance(value, list):
        return [shortened(each) for each in value]
    return float(f"{value:.12g}") if isinstance(value, float) else value


def moved(before: Any, now: Any, same: float, place: str = "") -> Iterator[str]:
    """Each number or name that is another one now; entries that are new are none."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in before:
            yield from moved(before[key], now.get(key), same, f"{place}.{key}")
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
