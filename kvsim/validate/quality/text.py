"""The text that quality is measured on, and the windows of it that are read."""

import re
import sys
from collections import Counter
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

from kvsim.errors import InputError
from kvsim.files import TEXT, decode_text, display, read_bytes
from kvsim.frozen import frozen

MARKUP = (".html", ".htm", ".xhtml")


@frozen
class Text:
    """A text, with its source and checksum."""

    source: str
    content: str


def read_text(name: str | None) -> Text:
    """Read a text in UTF-8; of HTML the text between the tags.

    Parameters
    ----------
    name
        Path of the file; None for the manual of this Python.

    Raises
    ------
    InputError
        If there is no such text.
    """
    if name is None:
        return _manual()
    path = Path(name).expanduser()
    data = read_bytes(path, TEXT)
    content = decode_text(data, f"--text: {display(path)}", TEXT.expected)
    if path.suffix.lower() in MARKUP:
        content = _between_tags(content)
    if not content.strip():
        raise InputError(f"--text: {path} holds no text; give another file")
    return Text(f"{path.name}; sha256 {sha256(data).hexdigest()}", content)


def windows(tokens: list[int], count: int, length: int, start: tuple[int, ...]) -> list[list[int]]:
    """Cut evenly spread windows out of a text.

    Parameters
    ----------
    length
        Tokens of a window. [tokens]
    start
        Tokens that every window begins with, counted in its length.

    Raises
    ------
    InputError
        If the text is too short for them.
    """
    own = length - len(start)
    if len(tokens) < count * own:
        raise InputError(
            f"--text: {len(tokens)} tokens, but {count} windows of {own} need {count * own}; give "
            f"a longer text, or less --batch, --prompt or --generate"
        )
    apart = len(tokens) // count
    return [[*start, *tokens[i * apart : i * apart + own]] for i in range(count)]


def _manual() -> Text:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise InputError("--text: this Python came without its manual; give a file") from None
    content = "\n\n".join(topics[name] for name in sorted(topics))
    version = ".".join(map(str, sys.version_info[:3]))
    checksum = sha256(content.encode()).hexdigest()
    return Text(f"manual of Python {version} (pydoc_data.topics); sha256 {checksum}", content)


class _Reader(HTMLParser):
    """Collects the visible text of HTML; block elements end a paragraph."""

    UNSEEN = ("script", "style", "head")
    BLOCKS = ("p", "div", "li", "dt", "dd", "pre", "tr", "h1", "h2", "h3", "h4", "br")

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._within: Counter[str] = Counter()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._within[tag] += 1
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._within[tag] -= self._within[tag] > 0
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not any(self._within[tag] for tag in self.UNSEEN):
            self.parts.append(data if self._within["pre"] else re.sub(r"\s+", " ", data))


def _between_tags(markup: str) -> str:
    reader = _Reader()
    reader.feed(markup)
    reader.close()
    lines = (" ".join(line.split()) for line in "".join(reader.parts).split("\n"))
    return re.sub(r"\n{2,}", "\n\n", "\n".join(lines)).strip()
