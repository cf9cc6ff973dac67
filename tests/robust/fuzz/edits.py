"""Edits of sound files: odd pieces of text, odd values in a tree, odd bytes."""

import json
import re
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from hypothesis import strategies as st

TOKENS = re.compile(r"[0-9][0-9_.eE+-]*|\w+|\"[^\"\n]*\"|'[^'\n]*'|\s+|.", re.DOTALL)
ODD_NUMBERS = (
    "0", "-1", "1", "2", "3", "0.5", "1.5", "-0.0", "1e-9", "1e18", "1e21", "1e200", "1e308",
    "1e400", "-1e308", "1e-308", "5e-324", "255", "65536", "1000001", "2147483648",
    "9223372036854775807", "9223372036854775808", "18446744073709551616", "9" * 400, "9" * 5000,
    "nan", "inf", "-inf", "NaN", "Infinity", "0x10", "0o7", "1_000", "1__0", "01", "1e", ".5",
    "٣", "½", "1,5", "1/2",
)  # fmt: skip
ODD_WORDS = (
    "", " ", "x", "true", "false", "null", "None", "full", "kivi", "auto", "layers", "[]", "{}",
    "[[]]", "[1]", '{"a": 1}', '""', '"x"', "''", '"', "'", "[", "]", "{", "}", "(", ")", ":", ";",
    ",", "=", "+", "-", "..", "/", "\\", "#", "\n", "\r", "\r\n", "\t", "\0", "\x1b[31m",
    "2026-11-22", "2026-11-22T06:00:00Z", "06:00:00", "\\ud800", '"\\ud800"', "\u202e", "\ufeff",
    "é", "e\u0301", "😀", "<script>alert(1)</script>", "&amp;", "%s", "{0}", "../../etc/passwd",
    "/dev/zero", "x" * 300, "a." * 70 + "a = 1", "[" * 70,
    "x" * 100_000, '\\"' * 50_000, '"' * 100_001, " " * 100_000, "[" * 100_000,
    "(a" * 50_000, "'" * 50_001, "a=" * 50_000, "\\" * 99_999, '"""' + '\\"' * 50_000,
)  # fmt: skip
ODD_TEXTS = (*ODD_NUMBERS, *ODD_WORDS)
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 0.5, -0.0, 1.5, 1e-9, 1e18, 1e308, -1e308, 5e-324, 1000,
    255, 65536, 1000001, 2**31, 2**63 - 1, 2**63, 2**64, 10**30, 10**400, float("nan"),
    float("inf"), float("-inf"), "", " ", "x", "1", "0", "nan", "full", "linear", "yarn", "llama3",
    "dynamic", "\ud800", "\0", "\n", "x" * 300, "<b>", [], [None], [0], [1, 2, 3], [[]], ["x"],
    {}, {"a": 1}, {"": None}, [[[[[[]]]]]], {"type": "yarn", "factor": 0}, [1] * 5000,
)  # fmt: skip
ODD_BYTES = (
    b"", b"\0", b"\xff", b"\xfe\xff", b"\xef\xbb\xbf", b"\x80", b"\xed\xa0\x80", b"\n", b"\r", b'"',
    b"\0" * 64, b"\xff" * 8, b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"PAR1", b"GGUF", b"PK\3\4",
)  # fmt: skip
SMALL = st.integers(0, 2**16)


@st.composite
def texts(draw: st.DrawFn, seeds: Sequence[str]) -> bytes:
    """A sound text with up to four pieces replaced, dropped, doubled, moved or put in between."""
    pieces = TOKENS.findall(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 4))):
        if not pieces:
            break
        at, how = draw(SMALL) % len(pieces), draw(st.integers(0, 5))
        if how == 0:
            pieces[at] = draw(st.sampled_from(ODD_TEXTS))
        elif how == 1:
            pieces.insert(at, draw(st.sampled_from(ODD_TEXTS)))
        elif how == 2:
            del pieces[at : at + 1 + draw(SMALL) % 4]
        elif how == 3:
            pieces[at:at] = pieces[at : at + 1 + draw(SMALL) % 40]
        elif how == 4:
            other = draw(SMALL) % len(pieces)
            pieces[at], pieces[other] = pieces[other], pieces[at]
        else:
            at = next((i for i in range(at, len(pieces)) if pieces[i][:1].isdigit()), at)
            pieces[at] = draw(st.sampled_from(ODD_NUMBERS))
    return draw(damaged("".join(pieces).encode("utf-8", "surrogatepass")))


@st.composite
def trees(draw: st.DrawFn, seeds: Sequence[Any]) -> bytes:
    """A sound JSON document with up to four of its values or names changed."""
    tree = deepcopy(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 4))):
        places = _places(tree)
        if not places:
            break
        holder, key = places[draw(SMALL) % len(places)]
        _edit(draw, holder, key, places)
    return draw(damaged(json.dumps(tree).encode()))


def _edit(draw: st.DrawFn, holder: Any, key: Any, places: list[tuple[Any, Any]]) -> None:
    how = draw(st.integers(0, 6))
    value = holder[key]
    if how <= 1:
        holder[key] = deepcopy(draw(st.sampled_from(ODD_VALUES)))
    elif how == 2:
        del holder[key]
    elif how == 3:
        other, name = places[draw(SMALL) % len(places)]
        if name in other if isinstance(other, dict) else name < len(other):
            holder[key] = deepcopy(other[name])
    elif how == 4 and isinstance(holder, dict):
        holder[draw(st.sampled_from(ODD_WORDS))] = holder.pop(key)
    elif how == 5 and isinstance(holder, list):
        holder[key:key] = [value] * (1 + draw(SMALL) % 50)
    else:
        scale = draw(st.sampled_from((-1, 0, 1e-12, 0.1, 2, 1e6, 1e12, 1e300)))
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        holder[key] = value * scale if is_number and abs(value) < 1e300 else [value]


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every value of a tree, as what holds it and its key there; the first thousand."""
    found: list[tuple[Any, Any]] = []
    open_nodes = [tree]
    while open_nodes and len(found) < 1000:
        node = open_nodes.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node))
        for key in keys if isinstance(node, dict | list) else ():
            found.append((node, key))
            if isinstance(node[key], dict | list):
                open_nodes.append(node[key])
    return found


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes that one time in eight are cut, changed, repeated or joined by odd ones."""
    if draw(st.integers(0, 7)):
        return content
    at = draw(SMALL) % (len(content) + 1)
    how = draw(st.integers(0, 4))
    if how == 0:
        return content[:at]
    if how == 1:
        return content[:at] + bytes([draw(st.integers(0, 255))]) + content[at + 1 :]
    if how == 2:
        return content[:at] + draw(st.sampled_from(ODD_BYTES)) + content[at:]
    if how == 3:
        return content[:at] + content[at + draw(SMALL) % 64 :]
    return content + content[at:]
