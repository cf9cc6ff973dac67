"""What commands print and draw, to the letter: lines of the terminal, and the page beside them.

A case is the command line; with ``--report`` or ``--out F.html`` also what the page adds.
"""

import json
import os
import re
import shlex
from collections.abc import Iterable
from contextlib import chdir
from html import unescape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np

from tests.docs.blocks import ENVIRONMENT, steady
from tests.frozen.store import Answer, Kind
from tests.robust.kills import OWN
from tests.support.commands import run

PAGE = "page.html"
FIGURE = re.compile(r'<script type="application/json" data-for="\w+">(.*?)</script>', re.DOTALL)
UNSEEN = re.compile(r"<(script|style|svg|head|footer)\b.*?</\1>", re.DOTALL)


def compute(case: str) -> Answer:
    """Run a command beside small files and return what it prints and draws."""
    with TemporaryDirectory() as folder, chdir(folder), patch.dict(os.environ, ENVIRONMENT):
        for name, content in OWN.items():
            Path(name).write_text(content)
        ended = run(*shlex.split(case))
        page = Path(PAGE).read_text(encoding="utf-8") if Path(PAGE).exists() else ""
    printed = [*ended.out.splitlines(), "", *ended.err.splitlines()[-1:] * (ended.code > 0)]
    said = " ".join(" ".join(printed).split())
    rows = [
        " | ".join(filter(None, (unescape(x).strip() for x in re.split("<[^>]*>", row))))
        for row in re.split(
            r"</?(?:tr|p|h\d|li|section|details|summary)\b[^>]*>", UNSEEN.sub("", page)
        )
    ]
    return {
        "code": ended.code,
        "terminal": _numbered(printed),
        "page": _numbered(row for row in rows if row and row not in said),
        "figures": {str(i): _drawn(json.loads(x)) for i, x in enumerate(FIGURE.findall(page))},
    }


def _numbered(lines: Iterable[str]) -> dict[str, str]:
    """Lines by block and place, so that one that comes in between moves its block alone."""
    found: dict[str, str] = {}
    block = place = 0
    for line in lines:
        if not line.strip():
            block, place = block + 1, 0
            continue
        found[f"{block:02}.{place:02}"] = steady(line.rstrip())
        place += 1
    return found


def _drawn(value: Any) -> Any:
    """A figure with its long lists of numbers as count, sum, ends and largest."""
    if isinstance(value, dict):
        return {key: _drawn(each) for key, each in value.items()}
    if not isinstance(value, list):
        return value
    numbers = [each for each in value if isinstance(each, int | float)]
    if len(numbers) < 8 or len(numbers) < len(value):
        return [_drawn(each) for each in value]
    many = np.array(numbers, dtype=float)
    return [len(many), float(many.sum()), numbers[0], numbers[-1], float(np.abs(many).max())]


ANSWERS = Kind("answers", compute, tolerance=1e-6, depth=2)
