"""Checkpoints and tokenisers that declare what is not so."""

import struct
from pathlib import Path

import pytest

from kvsim.errors import InputError
from kvsim.validate.model.architecture import read_rope
from kvsim.validate.model.checkpoint import Tokeniser, check_header


def text(content: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(content) if length is None else length) + content


def array(inner: int, count: int, content: bytes = b"") -> bytes:
    return struct.pack("<IIQ", 9, inner, count) + content


def gguf(*fields: bytes, tensors: bytes = b"", version: int = 3, counts: str = "") -> bytes:
    tensor_count = int(bool(tensors)) if not counts else 10**9
    return (
        b"GGUF"
        + struct.pack("<IQQ", version, tensor_count, len(fields))
        + b"".join(fields)
        + tensors
    )


def field(value: bytes, name: bytes = b"a") -> bytes:
    return text(name) + value


def tensor(*shape: int) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(b"t") + sizes + struct.pack("<IQ", 0, 0) + bytes(64)


SOUND = {
    "no field": gguf(),
    "a text": gguf(field(struct.pack("<I", 8) + text(b"llama"))),
    "numbers": gguf(field(struct.pack("<If", 6, 1.5)), field(array(4, 2, bytes(8)))),
    "texts": gguf(field(array(8, 2, text(b"x") + text(b"y")))),
    "a tensor": gguf(tensors=tensor(4, 4)),
}
BROKEN = {
    "nothing": (b"", "does not begin as one"),
    "another file": (b"PK\3\4" + bytes(50), "does not begin as one"),
    "version 1": (gguf(version=1), "a version other than 2 or 3"),
    "cut off": (gguf()[:10], "ends within its header"),
    "a thousand million tensors": (gguf(counts="many"), "declares 1,000,000,000 tensors"),
    "a thousand million items": (gguf(field(array(4, 10**9))), "declares 1,000,000,000 items"),
    "more than 2^63 items": (gguf(field(array(0, 2**64 - 1))), "items of field 'a'"),
    "nested arrays": (gguf(field(array(9, 1, bytes(20)))), "array of arrays"),
    "an unknown kind": (gguf(field(struct.pack("<I", 77))), "unknown kind 77"),
    "a text without end": (gguf(field(struct.pack("<I", 8) + text(b"x", 2**60))), "declares 1,1"),
    "bytes that are no text": (
        gguf(field(struct.pack("<I", 8) + text(b"ab\xff"))),
        "byte 47 of the file is not UTF-8",
    ),
    "a name that is no text": (gguf(field(bytes(8), b"\xff\xfe")), "is not UTF-8"),
    "a zero dimension": (gguf(tensors=tensor(4, 0)), "tensor 't' has no numbers"),
    "no dimension": (gguf(tensors=tensor()), "has 0 dimensions"),
    "nine dimensions": (gguf(tensors=tensor(*[1] * 9)), "has 9 dimensions"),
    "more numbers than bytes": (gguf(tensors=tensor(10**6, 10**6)), r"1e\+12 numbers"),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_header_passes(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(SOUND[name])
    check_header(path)


@pytest.mark.parametrize("name", BROKEN)
def test_a_header_that_cannot_be_true_is_refused(name: str, tmp_path: Path) -> None:
    content, words = BROKEN[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"model.gguf: not readable as GGUF .*{words}"):
        check_header(path)


def test_every_cut_of_a_header_is_refused(tmp_path: Path) -> None:
    whole = gguf(field(array(8, 2, text(b"x") + text(b"y"))), tensors=tensor(2, 2))[:-64]
    path = tmp_path / "model.gguf"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match="not readable as GGUF"):
            check_header(path)


@pytest.mark.parametrize("value", ["linear", [1, 2], 4, True])
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_rope_fields_are_objects(name: str, value: object) -> None:
    with pytest.raises(InputError, match=rf"config.json: field '{name}' is .* expected an object"):
        read_rope({name: value}, 64, 2048, "config.json")


class Splits:
    """A tokeniser that gives what it is told."""

    def __init__(self, ids: list[int] | None) -> None:
        self.ids = ids

    def encode(self, words: str, add_special_tokens: bool = True) -> "Splits":
        if self.ids is None:
            raise ValueError("broken")
        return self


@pytest.mark.parametrize(
    ("ids", "start", "words"),
    [
        ([], (), "makes no tokens"),
        ([1, 100], (), "token 100 is beyond the model's vocabulary of 100"),
        ([1, 2], (500,), "token 500 is beyond"),
        (None, (), "cannot split the text .broken"),
    ],
)
def test_tokens_belong_to_the_model(
    ids: list[int] | None, start: tuple[int, ...], words: str
) -> None:
    tokeniser = Tokeniser(Splits(ids), start, "tokenizer.json")
    with pytest.raises(InputError, match=f"tokenizer.json: {words}"):
        tokeniser.check(tokeniser("text"), 100)
