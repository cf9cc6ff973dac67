"""JSON on standard output, and nothing else there."""

import json
from typing import Any

import numpy as np

Row = dict[str, Any]
"""A result under its contract names: text, numbers, lists and rows, as JSON has them."""


def number(value: Any) -> float | int | None:
    """A JSON number: None for what does not exist, whole where it is whole."""
    scalar = float(np.ravel(value)[0])
    if not np.isfinite(scalar):
        return None
    return int(scalar) if scalar.is_integer() else scalar


def print_json(value: Any) -> None:
    """Print a result for programs; what is not finite would be an error."""
    print(json.dumps(value, indent=2, allow_nan=False))
