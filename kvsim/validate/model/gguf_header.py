"""What a GGUF file declares, held against its size before a library allocates for it.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

import struct
from io import BufferedReader
from math import prod
from pathlib import Path

from kvsim.errors import InputError
from kvsim.files import opened
from kvsim.files.kinds import WEIGHTS

MAGIC = b"GGUF"
MOST_ENTRIES = 1_000_000  # fields, tensors or items of one array
LONGEST_NAME = 65_535  # bytes
MOST_DIMENSIONS = 4
WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a number by its type; 8 is a text, 9 an array."""
WHOLE, TEXT, ARRAY = 4, 8, 9
ALIGNMENT, MOST_ALIGNMENT = "general.alignment", 2**20


def check_header(path: Path) -> None:
    """Refuse a GGUF file whose header cannot be true.

    Raises
    ------
    InputError
        If it declares more than the file can hold, nests arrays, has text that is not UTF-8, or a
        tensor without numbers.
    """
    with opened(path, WEIGHTS) as file:
        _Header(file, path).check()


class _Header:
    """Walks over a header, piece by piece."""

    def __init__(self, file: BufferedReader, path: Path) -> None:
        self.file, self.path = file, path
        self.size = path.stat().st_size

    def check(self) -> None:
        if self.file.read(4) != MAGIC:
            raise self.wrong("does not begin as one")
        if self.number("I") not in (2, 3):
            raise self.wrong("is of another version than 2 or 3")
        tensors, fields = self.entries("tensors", 24), self.entries("fields", 12)
        for _ in range(fields):
            name = self.text("the name of a field")
            if name == ALIGNMENT:
                self.alignment()
            else:
                self.value(self.number("I"), name)
        numbers = 0
        for _ in range(tensors):
            name = self.text("the name of a tensor")
            dimensions = self.number("I")
            if not 1 <= dimensions <= MOST_DIMENSIONS:
                raise self.wrong(f"tensor {name!r} has {dimensions} dimensions")
            shape = [self.number("Q") for _ in range(dimensions)]
            if 0 in shape:
                raise self.wrong(f"tensor {name!r} has no numbers, its shape is {shape}")
            numbers += prod(shape)
            self.number("I")
            offset = self.number("Q")
            if offset > self.size:
                raise self.wrong(f"tensor {name!r} begins beyond the end of the file")
        if numbers > 8 * self.size:  # a byte holds eight numbers at most
            raise self.wrong(f"its tensors have {numbers:.3g} numbers in {self.size:,} bytes")

    def alignment(self) -> None:
        """Step over what tensors' places are multiples of."""
        kind = self.number("I")
        size = self.number("I") if kind == WHOLE else 0
        if not 1 <= size <= MOST_ALIGNMENT or size & (size - 1):
            raise self.wrong(f"field {ALIGNMENT!r} is no power of 2 up to {MOST_ALIGNMENT:,}")

    def value(self, kind: int, name: str) -> None:
        """Step over the value of a field."""
        if kind == TEXT:
            self.text(f"field {name!r}")
        elif kind in WIDTHS:
            self.skip(WIDTHS[kind], name)
        elif kind == ARRAY:
            inner = self.number("I")
            if inner != TEXT and inner not in WIDTHS:
                raise self.wrong(f"field {name!r} is an array of arrays or of nothing known")
            count = self.entries(f"items of field {name!r}", WIDTHS.get(inner, 8))
            if inner in WIDTHS:
                self.skip(count * WIDTHS[inner], name)
            else:
                for _ in range(count):
                    self.text(f"field {name!r}")
        else:
            raise self.wrong(f"field {name!r} is of the unknown kind {kind}")

    def entries(self, what: str, each: int) -> int:
        """A declared count, of things that take at least so many bytes each."""
        count = self.number("Q")
        left = self.size - self.file.tell()
        if count > MOST_ENTRIES or count * each > left:
            raise self.wrong(f"declares {count:,} {what}, {left:,} bytes are left")
        return count

    def text(self, what: str) -> str:
        length = self.number("Q")
        if length > min(self.size - self.file.tell(), 100 * LONGEST_NAME):
            raise self.wrong(f"{what} declares {length:,} bytes")
        content = self.file.read(length)
        try:
            return content.decode()[:80]
        except UnicodeDecodeError as problem:
            place = self.file.tell() - length + problem.start
            raise self.wrong(f"{what}: byte {place} of the file is not UTF-8") from None

    def number(self, form: str) -> int:
        width = struct.calcsize(f"<{form}")
        content = self.file.read(width)
        if len(content) < width:
            raise self.wrong("ends within its header")
        found: int = struct.unpack(f"<{form}", content)[0]
        return found

    def skip(self, count: int, name: str) -> None:
        if self.file.tell() + count > self.size:
            raise self.wrong(f"ends within field {name!r}")
        self.file.seek(count, 1)

    def wrong(self, problem: str) -> InputError:
        expected = "expected a GGUF file; fetch it again"
        return InputError(f"{self.path}: not readable as GGUF ({problem}), {expected}")
