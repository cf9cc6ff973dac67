"""What the user types as a number, checked; every message names the option."""

import re
from typing import Any

import typer

from kvsim import options as limits
from kvsim.errors import InputError

MOST = 1e9  # of any number that a user gives
MOST_RUN = 1_000_000  # sequences or tokens of a run on this machine
WHOLE = re.compile(r"\s*+-?[0-9]{1,18}\s*+")
TIME = re.compile(r"\s*+([0-9.]++(?:[eE][+-]?[0-9]++)?)\s*+(?:(us|ms|s|min)\s*+)?")
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
TOKENS = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)([kKmM])\s*")
THOUSANDS = {"k": 1_000, "K": 1_024, "m": 1_000_000, "M": 1_048_576}  # as vLLM reads them


def _check(name: str, value: float, got: str = "") -> float:
    if name in limits.RANGES:
        limits.RANGES[name].check(name, value, got)
    return value


def option(
    name: str, metavar: str, meaning: str, group: str | None = None, also: tuple[str, ...] = ()
) -> Any:
    """An option that takes text; the functions here check what it means."""
    return typer.Option(name, *also, metavar=metavar, help=meaning, rich_help_panel=group)


def number(name: str, text: str, share: bool = False) -> float:
    """A number above 0, or a share from 0 to 1."""
    try:
        value = float(text) if text.isascii() and "_" not in text else float("nan")
    except ValueError:
        value = float("nan")
    if name in limits.RANGES and value == value:
        return _check(name, value, repr(text))
    if not (0 <= value <= 1 if share else 0 < value <= MOST):
        expected = "a number from 0 to 1" if share else f"a number above 0, at most {MOST:g}"
        raise InputError(f"{name}: got {text[:40]!r}; expected {expected}")
    return value


def gib(name: str, text: str) -> float:
    """GiB as bytes. [B]"""
    return number(name, text) * 2**30


def seconds(name: str, text: str, most_bare: float) -> float:
    """A time as 500ms, 2s or 0.5; none for no limit. [s]

    Parameters
    ----------
    most_bare : a number without a unit that is larger than this may be meant in milliseconds, and
        is refused. [s]
    """
    if text.strip().lower() == "none":
        return float("inf")
    found = TIME.fullmatch(text)
    value = _positive(found[1]) if found else float("nan")
    if found and found[2] is None and value > most_bare:
        plain = found[1]
        raise InputError(f"{name}: got {text[:40]!r} without a unit; write {plain}ms or {plain}s")
    value *= UNITS[(found and found[2]) or "s"]
    if not 0 < value <= MOST:
        raise InputError(
            f"{name}: got {text[:40]!r}; expected a time above 0 with its unit, as 500ms or 2s, or "
            f"none for no limit"
        )
    return _check(name, value, repr(text))


def _positive(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # 1.2.3
        return float("nan")


def tokens(name: str, text: str) -> int:
    """A number of tokens: 4096, 4k (4,000) or 4K (4,096)."""
    found = TOKENS.fullmatch(text)
    if found is None:
        return count(name, text, ", as 4096, 4k (4,000) or 4K (4,096)")
    value = float(found[1]) * THOUSANDS[found[2]]
    if not value.is_integer() or value > MOST:
        raise InputError(f"{name}: {text[:40]!r} is {value:.15g} tokens; expected a whole number")
    return int(_check(name, value))


def token_counts(name: str, text: str) -> list[int]:
    """Numbers of tokens separated by commas, as ``2048,32k``. [tokens]"""
    if not all(WHOLE.fullmatch(item) or TOKENS.fullmatch(item) for item in text.split(",")):
        raise InputError(
            f"{name}: got {text[:40]!r}; expected whole numbers separated by commas, as 2048,32k"
        )
    return [tokens(name, item) for item in text.split(",")]


def words(name: str, text: str, known: tuple[str, ...] = ()) -> list[str]:
    """Words separated by commas, each of them one of the known ones if there are any."""
    found = [word.strip().lower() for word in text.split(",")]
    if not all(found):
        raise InputError(f"{name}: got {text[:40]!r}; expected words separated by commas")
    for word in found:
        if known and word not in known:
            raise InputError(f"{name}: got {word[:40]!r}; expected one of {', '.join(known)}")
    return list(dict.fromkeys(found))


def count(name: str, text: str, alternative: str = "") -> int:
    """The one whole number that an option was given."""
    if not WHOLE.fullmatch(text):
        raise InputError(f"{name}: got {text[:40]!r}; expected one whole number{alternative}")
    return int(_check(name, int(text)))


def counts(name: str, text: str) -> list[int]:
    """Whole numbers separated by commas."""
    items = text.split(",")
    if not all(WHOLE.fullmatch(item) for item in items):
        raise InputError(
            f"{name}: got {text[:40]!r}; expected whole numbers separated by commas, as 1,8"
        )
    return [int(_check(name, int(item))) for item in items]


def either(text: str | None, usual: str) -> str:
    """What was given, however odd, or the usual value."""
    return usual if text is None else text


def run_sizes(
    given: tuple[str | None, str | None, str | None], usual: tuple[int, int, int]
) -> tuple[int, int, int]:
    """Sequences, prompt tokens and generated tokens of a run on this machine.

    Parameters
    ----------
    given : what ``--batch``, ``--prompt`` and ``--generate`` were given, if anything.
    usual : what counts where nothing was given.
    """
    found = []
    names = ("--batch", "--prompt", "--generate")
    for name, text, otherwise in zip(names, given, usual, strict=True):
        size = count(name, either(text, str(otherwise)))
        if not 1 <= size <= MOST_RUN:
            raise InputError(f"{name}: got {size}; expected a whole number from 1 to {MOST_RUN}")
        found.append(size)
    batch, prompt, generate = found
    return batch, prompt, generate
