"""Faults of hardware profiles and software stacks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvsim.errors import InputError
from kvsim.machines.keys import HARDWARE_FILE, STACK_FILE
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.machines.schema import inspect


def hardware_faults(file: Path) -> tuple[list[str], list[str]]:
    """Faults of single entries, or where there are none those of entries together."""
    _, faults = inspect(file, HARDWARE_FILE)
    notes = [] if faults else _tried(load_hardware, file, faults)
    return [str(fault) for fault in faults], notes


def stack_faults(file: Path) -> tuple[list[str], list[str]]:
    """Faults of single entries, and of the stack that it extends."""
    _, faults = inspect(file, STACK_FILE)
    notes = [] if faults else _tried(load_stack, file, faults)
    return [str(fault) for fault in faults], notes


def _tried(load: Callable[[Path], Any], file: Path, faults: list[InputError]) -> list[str]:
    """Load it as the commands do; a note where numbers rest on an assumption."""
    try:
        loaded = load(file)
    except InputError as fault:
        faults.append(fault)
        return []
    sources = getattr(loaded, "sources", {})
    assumed = sorted(key for key, text in sources.items() if "assumed" in text.lower())
    return [f"assumed, not measured: {', '.join(assumed)}"] if assumed else []
