"""What the user types as a number, checked; every message names the option."""

import re
from typing import Any

import typer

from kvsim.errors import InputError

MOST = 1e9  # of any number that a user gives
WHOLE = re.compile(r"\s*-?[0-9]{1,18}\s*")


def option(name: str, metavar: str, meaning: str) -> Any:
    """An option that takes text; what it means is checked by the functions here."""
    return typer.Option(name, metavar=metavar, help=meaning)


def number(name: str, text: str, share: bool = False) -> float:
    """A number above 0, or a share from 0 to 1."""
    try:
        value = float(text) if text.isascii() and "_" not in text else float("nan")
    except ValueError:
        value = float("nan")
    if not (0 <= value <= 1 if share else 0 < value <= MOST):
        expected = "a number from 0 to 1" if share else f"a number above 0, at most {MOST:g}"
        raise InputError(f"{name}: got {text[:40]!r}; expected {expected}")
    return value


def gib(name: str, text: str) -> float:
    """GiB as bytes. [B]"""
    return number(name, text) * 2**30


def count(name: str, text: str, alternative: str = "") -> int:
    """One whole number."""
    if not WHOLE.fullmatch(text):
        raise InputError(f"{name}: got {text[:40]!r}; expected one whole number{alternative}")
    return int(text)


def counts(name: str, text: str) -> list[int]:
    """Whole numbers separated by commas."""
    items = text.split(",")
    if not all(WHOLE.fullmatch(item) for item in items):
        raise InputError(
            f"{name}: got {text[:40]!r}; expected whole numbers separated by commas, as 1,8"
        )
    return [int(item) for item in items]


def either(text: str | None, usual: str) -> str:
    """What was given, however odd, or the usual value."""
    return usual if text is None else text
