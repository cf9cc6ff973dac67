"""Text files of frozen answers: how they are written, read and compared.

A file holds cases. A case starts with ``== NAME``; each line below it is ``quantity = value``, the
value in JSON with ten significant digits. Cases and quantities are sorted, so that a difference
between two versions of a file shows exactly what moved.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_name("data")
DIGITS = 10
ZERO = 1e-13  # differences below this are rounding
HEAD = "== "

Answer = dict[str, Any]
"""Quantities of a case by name, each a JSON value."""


@dataclass(frozen=True)
class Kind:
    """A set of frozen answers.

    Attributes
    ----------
    name
        Folder of its files in ``data``.
    compute
        The answer to a case, given the case's name.
    tolerance
        Relative difference that counts as none.
    every
        An ordinary run compares one case in this many; ``make.py test --all`` compares all.
    depth
        Levels of nested dictionaries that get a line of their own.
    additions
        Whether a quantity that the file does not have is no difference.
    """

    name: str
    compute: Callable[[str], Answer]
    tolerance: float = 1e-9
    every: int = 1
    depth: int = 1
    additions: bool = False

    def files(self) -> list[str]:
        """Names of the files, one per stack, paper or room."""
        return sorted(path.stem for path in (DATA / self.name).glob("*.txt"))

    def load(self, file: str) -> dict[str, Answer]:
        """Return the frozen answers of a file by case."""
        return _read(DATA / self.name / f"{file}.txt")

    def answer(self, case: str) -> Answer:
        """Compute the answer to a case as the files hold it."""
        return dict(_flat(self.compute(case), self.depth))

    def compare(self, before: Answer, now: Answer) -> Iterator[str]:
        """Yield one line per quantity that moved, with the relative change of numbers."""
        names = [name for name in now if name not in before and not self.additions]
        for name in sorted([*before, *names]):
            old, new = before.get(name), now.get(name)
            for place, one, other in _differences(old, new, self.tolerance, self.additions):
                yield f"{name}{place}: {one!r} became {other!r}{_change(one, other)}"

    def save(self, file: str, answers: dict[str, Answer]) -> None:
        """Write a file."""
        lines = []
        for case in sorted(answers):
            lines.append(f"{HEAD}{case}")
            for name, value in sorted(answers[case].items()):
                lines.append(f"{name} = {json.dumps(rounded(value), separators=(',', ':'))}")
        path = DATA / self.name / f"{file}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@cache
def _read(path: Path) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith(HEAD):
            answers[line.removeprefix(HEAD)] = current = {}
        elif line:
            name, _, value = line.partition(" = ")
            current[name] = json.loads(value)
    return answers


def rounded(value: Any) -> Any:
    """Return a JSON value with ten significant digits in each number."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _flat(answer: Answer, depth: int, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in answer.items():
        if depth > 1 and isinstance(value, dict) and value:
            yield from _flat(value, depth - 1, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _differences(
    before: Any, now: Any, tolerance: float, additions: bool, place: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in before if additions else {**before, **now}:
            inner = before.get(key), now.get(key)
            yield from _differences(*inner, tolerance, additions, f"{place}.{key}")
    elif isinstance(before, list) and isinstance(now, list | tuple) and len(before) == len(now):
        for i, pair in enumerate(zip(before, now, strict=True)):
            yield from _differences(*pair, tolerance, additions, f"{place}[{i}]")
    elif not _equal(before, now, tolerance):
        yield place, before, now


def _equal(before: Any, now: Any, tolerance: float) -> bool:
    if _is_number(before) and _is_number(now):
        both_nan = math.isnan(before) and math.isnan(now)
        return both_nan or math.isclose(before, now, rel_tol=tolerance, abs_tol=ZERO)
    return bool(before == now)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _change(before: Any, now: Any) -> str:
    if not (_is_number(before) and _is_number(now) and before):
        return ""
    return f" ({now / before - 1:+.2%})"
