"""Settings of serving engines that an answer carries."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvsim.errors import unknown

if TYPE_CHECKING:
    from kvsim.emit.served import Served
    from kvsim.report.json import Row


def check_engines(names: Sequence[str] | None) -> None:
    """Refuse engines that no settings are written for.

    Parameters
    ----------
    names
        Names of engines, if any were asked for.

    Raises
    ------
    InputError
        Naming the first unknown one.
    """
    if not names:
        return
    from kvsim.emit.engines import WRITERS

    for name in names:
        if name not in WRITERS:
            raise unknown("engine in --emit:", name, WRITERS)


def write_settings(names: Sequence[str], served: "Served") -> "list[Row]":
    """Write the settings of serving engines for one replica.

    Parameters
    ----------
    names
        Names of engines.
    served
        What the replica serves, and how.

    Returns
    -------
    list of dict
        One entry per engine: its version, source, settings, command line, and what it lacks.
    """
    from kvsim.emit.engines import annotate, emit
    from kvsim.emit.flags import MANUALS

    rows = []
    for name in names:
        found, manual = emit(name, served), MANUALS[name]
        rows.append(
            {
                "engine": name,
                "version": manual.version,
                "source": manual.source,
                "text": annotate(found),
                "line": found.line,
                "flags": {f.name: f.source for f in found.flags},
                "missing": list(found.missing),
            }
        )
    return rows
