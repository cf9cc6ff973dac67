"""Faults of request traces and of attention traces."""

from dataclasses import replace
from pathlib import Path

from kvsim.errors import InputError
from kvsim.traces import attentionfile
from kvsim.traces.read import Reader, ReadOptions


def faults(file: Path) -> tuple[list[str], list[str]]:
    """Rows that break a rule, by rule with the first of each; then what concerns the whole file."""
    options, found = ReadOptions(skip_bad=True), []
    while True:
        reader = Reader(str(file), options)
        try:
            count = sum(len(part.prompt) for part in reader.parts())
        except InputError as fault:
            found.append(str(fault))
            if options.sort or "--sort" not in str(fault):
                return [*_rows(reader), *found], []
            options = replace(options, sort=True)  # the order is one fault; look for others
            continue
        return [*_rows(reader), *found], [f"{count:,} sound requests", *_remarks(reader)]


def _rows(reader: Reader) -> list[str]:
    left = reader.left_out
    return [
        f"{left.first[rule]}" + (f" ({count:,} such rows)" if count > 1 else "")
        for rule, count in left.counts.items()
        if rule
        != "failed"  # requests that failed where they were measured are no fault of the file
    ]


def _remarks(reader: Reader) -> list[str]:
    return [note for note in reader.notes() if not note.startswith("left out")]


def attention_faults(file: Path) -> tuple[list[str], list[str]]:
    """The first fault: what follows it in a nested file has no meaning without it."""
    try:
        attentionfile.load(file)
    except InputError as fault:
        return [str(fault)], []
    return [], []
