"""Values from Python, as the command line takes them."""

from collections.abc import Iterable
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from kvsim.cli.arguments import seconds
from kvsim.cli.options import deployment

if TYPE_CHECKING:
    from kvsim.machines.deployment import Deployment

Given = str | float | Path
"""One value, as text or as a number."""

Several = Given | Iterable[Given]
"""One value or several."""


def text(value: Several) -> str:
    """A value as the command line takes it; several are separated by commas."""
    if isinstance(value, (str, Path)):
        return str(value)
    if isinstance(value, Iterable):
        return ",".join(text(item) for item in value)
    number = float(value)
    return str(int(number)) if number.is_integer() else repr(number)


def line_of(command: str, **options: Several | bool | None) -> str:
    """Return the command line that gives the same, each word quoted for the shell."""
    parts = ["kvsim", command]
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            parts.append(option)
        elif value is not None and value is not False:
            word = text(value)
            joined = word.startswith("-")  # else the value could be taken for an option
            parts += [quote(f"{option}={word}")] if joined else [option, quote(word)]
    return " ".join(parts)


def given(value: Several | None) -> str | None:
    """A value as text, or that none was given."""
    return None if value is None else text(value)


def duration(name: str, value: Given | None, most_bare: float) -> float:
    """A time, infinite if none was given; bare numbers up to ``most_bare`` are seconds. [s]"""
    return seconds(f"--{name}", "none" if value is None else text(value), most_bare)


def deployment_of(
    model: Given, gpu: Given, stack: Given, tp: Given, weights: str, host: Given | None = None,
    spread: tuple[Given, Given, Given] = (1, 1, 1),
) -> "Deployment":  # fmt: skip
    """The deployment that values from Python describe."""
    pp, dp, ep = map(text, spread)
    return deployment(
        text(model), text(gpu), text(stack), text(tp), weights, given(host), (pp, dp, ep)
    )
