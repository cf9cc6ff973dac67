"""Answers to questions that are kept as JSON beside the module that asks them."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.frozen.moved import shortened


def kept(place: Path) -> dict[str, Any]:
    """What the file has; nothing before it is written first."""
    found: dict[str, Any] = json.loads(place.read_text(encoding="utf-8")) if place.exists() else {}
    return found


def renewed(
    place: Path, names: Iterable[str], answered: Callable[[str], Any], part: str
) -> dict[str, Any]:
    """What holds now of questions with a part in their names, what the file has of the others."""
    now = kept(place)
    found = {name: answered(name) if part in name else now[name] for name in names}
    return {name: shortened(each) for name, each in found.items()}
