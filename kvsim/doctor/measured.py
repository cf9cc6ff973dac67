"""Faults of a table of measured rows, as `kvsim reproduce` reads it."""

from pathlib import Path

from kvsim.errors import InputError
from kvsim.evidence import published


def faults(file: Path) -> tuple[list[str], list[str]]:
    """Each unsound row, and rows that are there twice."""
    found: list[str] = []
    try:
        rows = published.read(str(file), found.append)
    except InputError as fault:
        return [str(fault)], []
    return found, [f"{len(rows):,} sound rows"]
