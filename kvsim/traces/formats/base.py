"""What a trace format is: which columns say when requests arrive and how long they are."""

from collections.abc import Callable, Iterator
from typing import Any

from kvsim.frozen import frozen

TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "date": 1.0}  # seconds per unit

Record = dict[str, Any]


@frozen
class TraceFormat:
    """One public trace format; the reader follows it and nothing else.

    A column has one or more names; the first that the file has is taken.

    Attributes
    ----------
    title
        What the format is.
    source
        Where it is published.
    arrival
        Name and unit (`TIME_UNITS`) of the column with arrivals. Dates count as `date`.
    prompt, generate
        Names of the columns with prompt and generated tokens.
    blocks
        Name of the column with the prompt's prefix hash blocks; empty if there is none.
    block_tokens
        Prompt tokens per block. [tokens]
    marks
        Further columns that tell this format from others.
    arrives
        False if files without arrivals exist; their requests all arrive at 0 s.
    failed
        What a generated length of 0 means here; such rows are no requests and are left out,
        counted. Empty: such a row is an error.
    unpack
        Turns a JSON record into rows; the record itself if not given.
    conduct
        Roles and names of columns on turns, classes and aborts, where a file has them.
    """

    title: str
    source: str
    arrival: tuple[tuple[str, str], ...]
    prompt: tuple[str, ...]
    generate: tuple[str, ...]
    blocks: str = ""
    block_tokens: int = 0
    marks: tuple[str, ...] = ()
    arrives: bool = True
    failed: str = ""
    unpack: Callable[[Record], Iterator[Record]] | None = None
    conduct: tuple[tuple[str, str], ...] = ()


@frozen
class Layout:
    """A format's columns as one file has them; `arrival` is empty if it has none."""

    format: str
    arrival: str
    unit: str
    prompt: str
    generate: str
    blocks: str = ""
    block_tokens: int = 0
    failed: str = ""
    unpack: Callable[[Record], Iterator[Record]] | None = None
    chars_per_token: float = 0.0
    conduct: tuple[tuple[str, str], ...] = ()  # roles and columns of turns, classes and aborts

    def columns(self) -> list[str]:
        """Names of the columns to read."""
        named = (self.arrival, self.prompt, self.generate, self.blocks)
        return [name for name in (*named, *dict(self.conduct).values()) if name]
