"""Rounds of inputs of one format, and the faults that they found."""

import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.robust.fuzz.formats import Format
from tests.robust.fuzz.play import faults, given_file

PLACE = re.compile(r"\w+ at \S+:\d+")


@dataclass
class Found:
    """What rounds of inputs led to.

    Attributes
    ----------
    inputs, accepted
        How many were given to a reader or command, and how many of them it took.
    faults
        By place: what went wrong, and the smallest input so far that shows it.
    """

    inputs: int = 0
    accepted: int = 0
    faults: dict[str, tuple[str, bytes]] = field(default_factory=dict)


def rounds(kind: Format, seconds: float, start: int, folder: Path, each: int = 200) -> Found:
    """Rounds of new inputs, ``each`` of them many, until the time is over. [s of the clock]"""
    until, found = time.monotonic() + seconds, Found()
    while time.monotonic() < until:
        search(kind, each, start, folder, found, commands=True, until=until)
        start += 1
    return found


def search(
    kind: Format,
    count: int,
    start: int,
    folder: Path,
    found: Found,
    commands: bool,
    until: float = float("inf"),
) -> None:
    """Give inputs to a format's reader and, if wanted, to its commands in turns.

    Parameters
    ----------
    count, start
        How many inputs, and the seed of them.
    folder
        Where the input's file is put; it is emptied.
    until
        When to stop, after one input at least. [s of the monotonic clock]
    """
    readers = (kind.read, *kind.commands) if commands else (kind.read,)

    @seed(start)
    @settings(
        max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),
    )  # fmt: skip
    @given(kind.inputs())
    def attempt(content: bytes) -> None:
        if found.inputs and time.monotonic() > until:
            return
        reader = readers[found.inputs % len(readers)]
        found.inputs += 1
        with given_file(kind.file, content, folder) as path:
            code, wrong = faults(reader, path)
        found.accepted += code == 0
        for fault in wrong:
            place = PLACE.search(fault)
            name = place[0] if place else fault[:40]
            known = found.faults.get(name)
            if known is None or len(content) < len(known[1]):
                found.faults[name] = (fault, content)

    attempt()
