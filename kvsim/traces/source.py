"""Locating, decompressing and recognising trace files of all formats."""

import gzip
import zlib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import IO, cast

from kvsim.errors import InputError, unknown
from kvsim.files import TRACE, open_input
from kvsim.frozen import frozen

SAMPLE = "sample:"
CODECS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
FOREIGN = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip", b"\x04\x22\x4d\x18": "lz4"}
FOREIGN |= {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"ARROW1": "Arrow IPC", b"ORC": "ORC"}
BOM = b"\xef\xbb\xbf"
PEEK = 1 << 16  # bytes that tell what a file is
BYTES_AT_ONCE = 1 << 22  # bytes read at once
MAX_LINE_BYTES = 1 << 29  # longest line or record; more is no trace [bytes]


def samples() -> dict[str, Path]:
    """Return the traces that ship with kvsim.

    Returns
    -------
    dict of str to Path
        File by the name in ``sample:NAME``.
    """
    folder = Path(str(files("kvsim.traces"))) / "samples"
    files_there = (path for path in sorted(folder.iterdir()) if path.suffix != ".md")
    return {path.name.split(".")[0]: path for path in files_there}


@frozen
class Source:
    """A trace file or shipped sample that can be read repeatedly.

    Attributes
    ----------
    name
        Name that the user gave.
    path
        Path of the file.
    codec
        gzip, zstd or empty.
    peek
        Its first bytes, decompressed, without a byte-order mark.
    """

    name: str
    path: Path
    codec: str
    peek: bytes

    @property
    def kind(self) -> str:
        """Container format: "csv", "jsonl", "json" (one document) or "parquet"."""
        if self.peek[:4] == b"PAR1":
            return "parquet"
        line, newline, _ = self.peek.lstrip().partition(b"\n")
        if line[:1] == b"{":  # an object that goes on below its first line is a document
            return "json" if newline and not line.rstrip().endswith(b"}") else "jsonl"
        return "json" if line[:1] == b"[" else "csv"

    def open(self) -> IO[bytes]:
        """Open the file for reading.

        Returns
        -------
        file object
            Decompressed bytes from the start of the file.
        """
        if self.codec == "gzip":
            return cast(IO[bytes], gzip.open(self.path))
        if self.codec:
            import pyarrow as pa

            return cast(IO[bytes], pa.CompressedInputStream(pa.OSFile(str(self.path)), self.codec))
        return self.path.open("rb")

    def blocks(self) -> Iterator[bytes]:
        """Yield the decompressed bytes in pieces, without a byte-order mark.

        Raises
        ------
        InputError
            If the compressed file is cut off or damaged.
        """
        first = True
        with self.open() as stream:
            while block := self.read(stream, BYTES_AT_ONCE):
                yield block.removeprefix(BOM) if first else block
                first = False

    def read(self, stream: IO[bytes], count: int) -> bytes:
        """Read bytes of an open stream.

        Parameters
        ----------
        stream
            The open stream.
        count
            Most bytes to read. [B]

        Returns
        -------
        bytes
            The bytes; empty at the end.

        Raises
        ------
        InputError
            If the compressed data is cut off or damaged.
        """
        try:
            return stream.read(count)
        except (OSError, EOFError, zlib.error) as problem:
            raise self.damaged(problem) from None

    def damaged(self, problem: Exception) -> InputError:
        """Create the error about compressed data that cannot be read.

        Parameters
        ----------
        problem
            Exception that the decompressor raised.

        Returns
        -------
        InputError
            The error, to be raised.
        """
        short = isinstance(problem, EOFError) or "runcated" in str(problem)
        how = "ends too early" if short else f"is damaged ({problem})"
        kind = self.codec or self.kind
        return InputError(f"{self.name}: the {kind} data {how}; fetch or write the file again")


def find(name: str) -> Source:
    """Find the file that a path or ``sample:NAME`` refers to.

    Parameters
    ----------
    name
        Path, or name of a sample.

    Returns
    -------
    Source
        The file, with the properties that its first bytes show.

    Raises
    ------
    InputError
        If there is no such file, it is empty, or in an archive format that kvsim does not read.
    """
    path = Path(name)
    if name.startswith(SAMPLE):
        known = samples()
        if name[len(SAMPLE) :] not in known:
            raise unknown("sample trace", name[len(SAMPLE) :], known)
        path = known[name[len(SAMPLE) :]]
    with open_input(path, TRACE) as file:
        start = file.read(PEEK)
    for magic, kind in FOREIGN.items():
        if start.startswith(magic):
            raise InputError(
                f"{name}: is {kind}; expected CSV, JSON(L) (plain, gz, zst) or Parquet"
            )
    codec = next((codec for magic, codec in CODECS.items() if start.startswith(magic)), "")
    source = Source(name, path, codec, start)
    if codec:
        with source.open() as stream:
            source = Source(name, path, codec, source.read(stream, PEEK))
    source = Source(name, path, codec, source.peek.removeprefix(BOM))
    if not source.peek.strip():
        raise InputError(f"{name}: is empty; expected a trace with at least one request")
    return source
