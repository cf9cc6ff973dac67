"""Options of `kvsim simulate` that take several values: one run for each combination."""

from collections.abc import Mapping
from itertools import product

from kvsim.errors import InputError

MOST = 32  # runs of one command
NONE_AT_ZERO = ("host_cache", "nvme_cache")  # a tier of no size is none


def cases(given: Mapping[str, str | None]) -> list[dict[str, str | None]]:
    """Every combination of the values under the options' names, in the order typed.

    Raises
    ------
    InputError
        For an empty or repeated value, and for too many combinations.
    """
    lists = {name: _values(name, text) for name, text in given.items()}
    found = [dict(zip(lists, some, strict=True)) for some in product(*lists.values())]
    if len(found) > MOST:
        raise InputError(
            f"{_options(given)}: {len(found)} combinations; expected at most {MOST} in one command"
        )
    return found


def _values(name: str, text: str | None) -> list[str | None]:
    if text is None or "," not in text:
        return [text]
    items = [item.strip() for item in text.split(",")]
    if not all(items) or len(set(items)) < len(items):
        option = f"--{name.replace('_', '-')}"
        raise InputError(f"{option}: got {text[:40]!r}; expected different values, as 0,20,50")
    return [None if item == "0" and name in NONE_AT_ZERO else item for item in items]


def _options(given: Mapping[str, str | None]) -> str:
    return ", ".join(f"--{k.replace('_', '-')}" for k, v in given.items() if v and "," in v)


def told(case: Mapping[str, str | None], given: Mapping[str, str | None]) -> dict[str, str | float]:
    """The values of a case that another case has otherwise, as JSON has them."""
    varied = {name: case[name] for name, text in given.items() if text and "," in text}
    return {name: _plain(value) for name, value in varied.items()}


def _plain(value: str | None) -> str | float:
    if value is None:
        return 0.0
    try:
        return float(value)
    except ValueError:
        return value
