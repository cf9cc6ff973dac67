"""How deeply a text nests, found before a parser recurses into it."""

import re

from kvsim.errors import InputError

DEEPEST = 64  # levels; a config.json has 4, a profile 3

# Strings first, so that brackets inside them do not count.
# Nothing is scanned twice: a string without an end reaches to the end, and takes no step back.
JSON_PIECES = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
TOML_STRINGS = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*+(?:"{3,5}|)'
    r"|'''(?:[^']|'(?!''))*+(?:'{3,5}|)"
    r'|"(?:[^"\\\n]|\\[^\n])*+"?'
    r"|'[^'\n]*+'?"
    r"|#[^\n]*+",
    re.DOTALL,
)
BRACKETS = re.compile(r"[\[{]|[\]}]")
DOTTED = re.compile(rf"(?<![A-Za-z0-9_.-])(?:[A-Za-z0-9_-]++[ \t]*+\.[ \t]*+){{{DEEPEST}}}")


def check_json(text: str, where: str, deepest: int = DEEPEST) -> None:
    """Refuse JSON whose arrays and objects nest too deeply.

    Raises
    ------
    InputError
        Saying where it goes too deep.
    """
    if text.count("[") + text.count("{") > deepest:
        _check(JSON_PIECES, text, where, deepest)


def check_toml(text: str, where: str, deepest: int = DEEPEST) -> None:
    """Refuse TOML whose arrays, tables or dotted keys nest too deeply.

    Raises
    ------
    InputError
        Saying where it goes too deep.
    """
    plain = TOML_STRINGS.sub("s", text)
    dotted = DOTTED.search(plain)
    if dotted:
        raise _deep(where, plain, dotted.start(), deepest)
    _check(BRACKETS, plain, where, deepest)


def _check(pieces: re.Pattern[str], text: str, where: str, deepest: int) -> None:
    depth = 0
    for piece in pieces.finditer(text):
        first = text[piece.start()]
        if first in "[{":
            depth += 1
            if depth > deepest:
                raise _deep(where, text, piece.start(), deepest)
        elif first in "]}":
            depth = max(depth - 1, 0)


def _deep(where: str, text: str, place: int, deepest: int) -> InputError:
    line = text.count("\n", 0, place) + 1
    return InputError(f"{where}, line {line}: nested too deeply; expected at most {deepest} levels")
