"""Which kind of file it is, and what is wrong with it."""

from collections.abc import Callable
from pathlib import Path

from kvsim.doctor import configuration, measured, profile, trace
from kvsim.errors import InputError
from kvsim.evidence.published import COLUMNS
from kvsim.files import check_input, opened, read_json
from kvsim.files.kinds import JSON, TRACE
from kvsim.frozen import frozen
from kvsim.machines.keys import HARDWARE_FILE, STACK_FILE
from kvsim.machines.schema import keys_of
from kvsim.traces import attentionfile

HEAD = 65536  # bytes that tell a table's columns
ROWS = {"technique", "metric", "published"}  # columns that no request trace has


@frozen
class Diagnosis:
    """What a file is taken for, and its faults in the order of the file where it has one."""

    kind: str
    faults: tuple[str, ...]
    notes: tuple[str, ...] = ()


def examine(path: str) -> Diagnosis:
    """Find every fault of a file that kvsim reads.

    Raises
    ------
    InputError
        If the file cannot be read at all, or is of no kind that kvsim reads.
    """
    file = check_input(path, TRACE)
    kind, check = _kind(file)
    faults, notes = check(file)
    return Diagnosis(kind, tuple(faults), tuple(notes))


Check = Callable[[Path], tuple[list[str], list[str]]]


def _kind(file: Path) -> tuple[str, Check]:
    if file.suffix == ".toml":
        return _toml(file)
    if file.suffix == ".json":
        return _json(file)
    if file.suffix == ".csv" and ROWS & _header(file):
        return "measured rows", measured.faults
    return "request trace", trace.faults


def _toml(file: Path) -> tuple[str, Check]:
    """A stack or a hardware profile, whichever has more of the keys."""
    try:
        keys = set(keys_of(file))
    except InputError as fault:
        unreadable = str(fault)
        return "TOML file", lambda _: ([unreadable], [])
    if len(keys & STACK_FILE.keys) + ("extends" in keys) >= len(keys & HARDWARE_FILE.keys):
        return "software stack", profile.stack_faults
    return "hardware profile", profile.hardware_faults


def _json(file: Path) -> tuple[str, Check]:
    if file.stat().st_size > JSON.most:
        return "request trace", trace.faults
    try:
        found = read_json(file, JSON, strict=False)
    except InputError:
        return "model configuration", configuration.faults  # which says what is wrong with it
    if isinstance(found, dict) and found.get("format") == attentionfile.FORMAT:
        return "attention trace", trace.attention_faults
    if isinstance(found, dict) and {"model_type", "hidden_size", "text_config"} & found.keys():
        return "model configuration", configuration.faults
    return "request trace", trace.faults


def _header(file: Path) -> set[str]:
    with opened(file, TRACE) as table:
        first = table.read(HEAD).decode("utf-8-sig", "replace").partition("\n")[0]
    return {name.strip().strip('"') for name in first.split(",")} & set(COLUMNS)
