"""Engines at a version: ``vllm-0.11`` is the stack ``vllm`` with what that version does otherwise.

The file of an engine lists the ``releases`` that exist, and of which of them whole runs were
``measured`` that its numbers are of; a file ``ENGINE-MAJOR.MINOR.toml`` states what older ones have
otherwise. A version that was not measured has the numbers of the nearest older one.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from kvsim.errors import InputError
from kvsim.frozen import frozen

VERSION_NAME = re.compile(
    r"(?P<engine>[a-z].*?)-v?(?P<number>\d+\.\d+)(?P<rest>(\.|rc|post|-)?[\w.+]*)"
)


@frozen
class Release:
    """A version that was asked for, and the one whose numbers stand for it."""

    engine: str
    asked: str  # as "0.11"
    nearest: str  # measured version; the same if it was measured itself
    file: str  # name of the file that states it

    @property
    def note(self) -> str:
        """What is told where another version stands for the one asked for; empty if none does."""
        if self.asked == self.nearest:
            return ""
        side = "older" if _order(self.nearest) < _order(self.asked) else "newer"
        return (
            f"no whole run of {self.engine} {self.asked} was measured; it has the numbers of "
            f"{self.nearest}, the nearest {side} version that was"
        )


def split_name(name: str, engines: Iterable[str]) -> tuple[str, str] | None:
    """Split the name of an engine at a version.

    Parameters
    ----------
    name
        Name of a stack without its card, in lower case.
    engines
        Engines that have versions.

    Returns
    -------
    tuple of str or None
        The engine and its version as "major.minor"; None where the name has no version.
    """
    found = VERSION_NAME.fullmatch(name)
    if not found or found["engine"] not in engines:
        return None
    return found["engine"], found["number"]


def choose_release(
    engine: str, asked: str, releases: Sequence[str], measured: Mapping[str, str]
) -> Release:
    """Choose the measured version that stands for the one asked for.

    Parameters
    ----------
    engine
        Name of the engine.
    asked
        Version, as "major.minor".
    releases
        Versions that exist.
    measured
        Versions of which whole runs were measured, with the stack's file that has their numbers.

    Returns
    -------
    Release
        Itself if it was measured, else the nearest older one, else the oldest.

    Raises
    ------
    InputError
        If there never was such a version.
    """
    if asked not in releases:
        listed = ", ".join(releases)
        raise InputError(f"--stack: {engine} has no version {asked}; expected one of {listed}")
    older = [v for v in measured if _order(v) <= _order(asked)]
    nearest = max(older, key=_order) if older else min(measured, key=_order)
    return Release(engine, asked, nearest, measured[nearest])


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
