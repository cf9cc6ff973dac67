"""The trace formats, and which of them a file has."""

from collections.abc import Collection

from kvsim.errors import InputError, unknown
from kvsim.traces.conduct import DEFAULTS
from kvsim.traces.formats import (
    azure,
    bailian,
    burstgpt,
    llmservingsim,
    mooncake,
    own,
    sharegpt,
    vidur,
    vllm,
)
from kvsim.traces.formats.base import TIME_UNITS, Layout, TraceFormat

FORMATS: dict[str, TraceFormat] = {
    "kvsim": own.FORMAT,
    "azure": azure.FORMAT,
    "burstgpt": burstgpt.FORMAT,
    "mooncake": mooncake.FORMAT,
    "bailian": bailian.FORMAT,
    "vllm": vllm.FORMAT,
    "sharegpt": sharegpt.FORMAT,
    "llmservingsim": llmservingsim.FORMAT,
    "vidur": vidur.FORMAT,
}
GENERIC = "columns"  # the format that the user describes by naming columns
ROLES = ("arrival", "prompt", "generate", "blocks", *DEFAULTS)


def choose(file: str, columns: Collection[str], wanted: str = "") -> Layout:
    """The layout of a file with these columns: of the format wanted, or of the one that fits.

    Raises
    ------
    InputError
        If no format fits, or the wanted one lacks a column.
    """
    if wanted:
        if wanted not in FORMATS:
            raise unknown("trace format", wanted, FORMATS)
        return _layout(file, columns, wanted)
    fitting = [name for name, format in FORMATS.items() if _fits(columns, format)]
    if not fitting:
        found = ", ".join(map(repr, list(columns)[:8])) or "none"
        raise InputError(
            f"{file}, line 1: columns {found} are of no known trace format; name them with "
            "--columns arrival=..,prompt=..,generate=.. or the format with --format "
            f"({', '.join(FORMATS)})"
        )
    return _layout(file, columns, max(fitting, key=lambda name: len(FORMATS[name].marks)))


def named(file: str, columns: Collection[str], names: dict[str, str], unit: str) -> Layout:
    """The layout that the user describes: a column for each role, and the unit of time."""
    for role in names:
        if role not in ROLES:
            raise unknown("column role", role, ROLES)
    for role in ("prompt", "generate"):
        if role not in names:
            raise InputError(f"--columns: no {role}; expected arrival=..,prompt=..,generate=..")
    for role, name in names.items():
        if name not in columns:
            raise _missing(file, name, role, columns)
    if unit not in TIME_UNITS:
        raise unknown("time unit", unit, TIME_UNITS)
    return Layout(
        GENERIC, names.get("arrival", ""), unit, names["prompt"], names["generate"],
        names.get("blocks", ""),
        conduct=tuple((role, name) for role, name in names.items() if role in DEFAULTS),
    )  # fmt: skip


def _fits(columns: Collection[str], format: TraceFormat) -> bool:
    if not all(mark in columns for mark in format.marks):
        return False
    if format.marks and format.unpack:
        return True
    arrives = any(name in columns for name, _ in format.arrival) or not format.arrives
    lengths = (format.prompt, format.generate)
    return arrives and all(any(name in columns for name in names) for names in lengths)


def _layout(file: str, columns: Collection[str], name: str) -> Layout:
    format = FORMATS[name]
    if format.marks and format.unpack:  # rows are made of records; names are the format's own
        return Layout(name, "", "s", format.prompt[0], format.generate[0], unpack=format.unpack)
    arrivals = [(column, unit) for column, unit in format.arrival if column in columns]
    if not arrivals and format.arrives:
        raise _missing(file, format.arrival[0][0], "arrival", columns)
    arrival, unit = arrivals[0] if arrivals else ("", "s")
    chosen = {"arrival": arrival}
    for role, names in (("prompt", format.prompt), ("generate", format.generate)):
        chosen[role] = next((one for one in names if one in columns), "")
        if not chosen[role]:
            raise _missing(file, names[0], role, columns)
    blocks = format.blocks if format.blocks in columns else ""
    return Layout(
        name, chosen["arrival"], unit, chosen["prompt"], chosen["generate"], blocks,
        format.block_tokens if blocks else 0, format.failed, format.unpack,
        conduct=tuple((role, name) for role, name in format.conduct if name in columns),
    )  # fmt: skip


def _missing(file: str, name: str, role: str, columns: Collection[str]) -> InputError:
    hint = unknown(f"column {name!r} ({role}) is not there: known to the file are", name, columns)
    return InputError(f"{file}, line 1: {hint}; or name yours with --columns {role}=..")
