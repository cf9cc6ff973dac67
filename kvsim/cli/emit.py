"""The option that asks for settings to paste, and what it adds to an answer."""

from typing import TYPE_CHECKING, Annotated

from kvsim.cli.arguments import option, words

if TYPE_CHECKING:
    from kvsim.emit.served import Served
    from kvsim.report.json import Row

EmitOption = Annotated[
    str | None,
    option("--emit", "ENGINE,...", "Settings of vllm, sglang, trtllm, lmcache, hf, llamacpp."),
]


def engines(text: str | None) -> list[str]:
    """The engines that settings are asked for.

    Raises
    ------
    InputError
        For an unknown engine.
    """
    from kvsim.emit.engines import WRITERS
    from kvsim.errors import unknown

    found = [] if text is None else words("--emit", text)
    for name in found:
        if name not in WRITERS:
            raise unknown("engine in --emit:", name, WRITERS)
    return found


def settings(names: list[str], served: "Served") -> "list[Row]":
    """Settings of some engines for a replica, as an answer holds them."""
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


def show(rows: "list[Row]") -> None:
    """Print settings below an answer."""
    for row in rows:
        print()
        print(row["text"])
