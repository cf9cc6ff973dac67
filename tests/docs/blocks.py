"""Code blocks of README and docs: run as printed, their output compared or, with --write, renewed.

``console`` blocks hold commands after ``$`` and what they print; ``head=N`` shows the first N
lines and then ``...``. ``sh`` blocks are run for their exit code; ``sh slow`` ones only if
KVSIM_SLOW_DOCS is set, ``sh yours`` never: they ask for a cluster, a checkpoint or a log of the
reader's. ``python`` blocks of a page are run one after another. A block with a file's name, as
``json requests.jsonl``, is that file for the commands of its page.
"""

import os
import re
import shlex
import sys
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from tests.support.commands import run

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```(\w+)[ ]?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TIMED = re.compile(r"(?<=in )[0-9.]+ s\.$", re.MULTILINE)
ENVIRONMENT = {"COLUMNS": "100", "NO_COLOR": "1"}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    info: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The kvsim commands of the block, comments left out."""
        if self.language == "console":
            return [line[2:] for line in self.text.splitlines() if line.startswith("$ ")]
        slow = self.info == "slow" and not os.environ.get("KVSIM_SLOW_DOCS")
        if self.language != "sh" or slow or self.info == "yours":
            return []
        lines = self.text.replace("\\\n", " ").splitlines()
        parts = [part.strip() for line in lines for part in line.partition("  #")[0].split(";")]
        return [part for part in parts if part.startswith("kvsim ")]


def pages() -> list[Path]:
    """Every page with blocks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """The blocks of a page in order."""
    return [Block(*found.groups()) for found in FENCE.finditer(page.read_text(encoding="utf-8"))]


def played(page: Path) -> list[tuple[Block, str]]:
    """Every block of a page with what its commands printed, in a folder with its files."""
    found = []
    names: dict[str, object] = {"__name__": page.stem}
    with TemporaryDirectory() as folder, chdir(folder), patch.dict(os.environ, ENVIRONMENT):
        for block in blocks(page):
            if block.info and "." in block.info and "=" not in block.info:
                Path(block.info).write_text(block.text, encoding="utf-8")
            if block.language == "python":
                exec(compile(block.text, str(page), "exec"), names)
            printed = []
            for command in block.commands:
                result = run(*shlex.split(command)[1:])
                assert result.code == 0, f"{page.name}: {command}: {result.err}"
                printed.append(f"$ {command}\n{shortened(result.out, block.info)}")
            found.append((block, "".join(printed)))
    return found


def shortened(text: str, info: str) -> str:
    """What a page shows of an output: its first lines if it says so."""
    lines = [line.rstrip() for line in text.splitlines()]
    wanted = re.search(r"head=(\d+)", info)
    if wanted and len(lines) > int(wanted[1]):
        lines = [*lines[: int(wanted[1])], "..."]
    return "\n".join(lines) + "\n"


def steady(text: str) -> str:
    """A text without the seconds that a run took."""
    return TIMED.sub("S s.", text)


def write(page: Path) -> None:
    """Put into a page what its commands print now."""
    results = iter(played(page))

    def renewed(found: re.Match[str]) -> str:
        block, printed = next(results)
        body = printed if block.language == "console" else block.text
        return f"```{found[1]}{' ' * bool(found[2])}{found[2]}\n{body}```"

    page.write_text(FENCE.sub(renewed, page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    for place in [Path(name).resolve() for name in sys.argv[2:]] or pages():
        if any(block.language == "console" for block in blocks(place)):
            write(place)
