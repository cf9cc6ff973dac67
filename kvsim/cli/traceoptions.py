"""Options that say how a request trace is read, and the reader's options they make."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli.arguments import count, number, option
from kvsim.errors import InputError

if TYPE_CHECKING:
    from kvsim.traces.read import ReadOptions

Format = Annotated[str, option("--format", "NAME", "The trace's format; by default recognised.")]
Columns = Annotated[
    str,
    option("--columns", "ROLE=NAME,...", "Of any file: arrival=..,prompt=..,generate=..,blocks=.."),
]
AbortAfter = Annotated[
    str | None,
    option("--abort-after", "TIME", "Clients hang up so long after the arrival."),
]
TimeUnit = Annotated[str, option("--time-unit", "UNIT", "Of arrivals: s, ms, us, ns or date.")]
CharsPerToken = Annotated[
    str, option("--chars-per-token", "X", "Estimate tokens of traces that hold text.")
]
Sort = Annotated[bool, typer.Option("--sort", help="Sort by arrival.")]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Leave out rows that break a rule, and count them.")
]


def hash_blocks(name: str) -> Any:
    """The option for the size of prefix blocks; engines have blocks of their own beside them."""
    return option(name, "N", "Tokens per prefix hash block of the trace.")


def reading(
    format: str,
    columns: str,
    time_unit: str,
    block_tokens: str,
    chars_per_token: str,
    sort: bool,
    skip_bad: bool,
    blocks_option: str = "--block-tokens",
) -> "ReadOptions":
    """The options of a trace's reader.

    Raises
    ------
    InputError
        For text that is not what an option takes.
    """
    from kvsim.traces.read import ReadOptions

    pairs = [item.partition("=")[::2] for item in columns.split(",")] if columns else []
    named = dict(pairs)
    if len(named) < len(pairs):
        raise InputError(f"--columns: got {columns[:60]!r}; expected each role once")
    if not all(named.values()):
        raise InputError(f"--columns: got {columns[:60]!r}; expected arrival=NAME,prompt=NAME,..")
    return ReadOptions(
        format, named, time_unit,
        at_least(blocks_option, block_tokens, 1) if block_tokens else 0,
        number("--chars-per-token", chars_per_token) if chars_per_token else 0.0,
        sort, skip_bad,
    )  # fmt: skip


def at_least(name: str, text: str, least: int) -> int:
    """A whole number that is no smaller."""
    value = count(name, text)
    if value < least:
        raise InputError(f"{name}: got {value}; expected at least {least}")
    return value
