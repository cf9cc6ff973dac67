"""Writing files so that nobody ever sees half of one."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kvsim.errors import InputError


def replace_text(path: Path, text: str) -> None:
    """Write beside a file's place, then take that place.

    Raises
    ------
    InputError
        If the place cannot be written; nothing is left behind.
    """
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A draft beside a file's place; it takes that place if the block ends well, else it goes.

    Raises
    ------
    InputError
        If the place cannot be written; nothing is left behind.
    """
    draft = path.with_name(f".kvsim-{os.getpid()}-{path.name}")
    try:
        yield draft
        draft.replace(path)
    except OSError as problem:
        reason = problem.strerror or "cannot be written"
        raise InputError(f"{path}: {reason}; choose another place") from None
    finally:
        draft.unlink(missing_ok=True)


def toml_lines(entries: Mapping[str, object], quoted: bool = False) -> str:
    """A table's entries: texts, numbers and lists of texts; ``quoted`` keys may have dots."""
    return "".join(
        f'"{key}" = {_toml(value)}\n' if quoted else f"{key} = {_toml(value)}\n"
        for key, value in entries.items()
    )


def _toml(value: object) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{"".join(c if c.isprintable() else " " for c in escaped)}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return repr(value)
