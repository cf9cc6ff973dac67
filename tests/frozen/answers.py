"""What commands print and draw, to the letter: lines of the terminal, and the page beside them.

A case is the command line; with ``--report`` or ``--out F.html`` also what the page adds.
"""

import json
import os
import re
import shlex
from collections.abc import Iterable
from contextlib import chdir
from functools import cache
from html import unescape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np

from tests.docs.blocks import ENVIRONMENT, steady
from tests.frozen.store import Answer, Kind
from tests.robust.kills import OWN
from tests.support.commands import WIDTH, Result, run_and_keep

PAGE = "page.html"
SWEPT = {
    "plans.toml": 'kind = "plan"\n[grid]\nmodel = ["llama2-7b"]\ngpu = ["a6000"]\n'
                  "prompt = [2000]\ngenerate = [32]\ntp = [2]\n",
    "fleets.toml": 'kind = "capacity"\n[grid]\nmodel = ["llama2-7b"]\ngpu = ["a6000"]\n'
                   'trace = ["own.csv"]\n',
    "serving.toml": 'kind = "simulate"\n[grid]\nmodel = ["llama2-7b"]\ngpu = ["a6000", "l4"]\n'
                    'technique = ["offload", "full"]\ntrace = ["own.csv"]\nreplicas = [1, 2]\n',
    "ranked.toml": '[grid]\nmodel = ["llama2-7b"]\ngpu = ["a6000"]\ntechnique = "all"\n'
                   "batch = [8]\ncontext = [2000]\ntp = [2]\n",
}  # fmt: skip
FIGURE = re.compile(r'<script type="application/json" data-for="\w+">(.*?)</script>', re.DOTALL)
UNSEEN = re.compile(r"<(script|style|svg|head|footer)\b.*?</\1>", re.DOTALL)


@cache
def played(case: str) -> tuple[Result, Any, str]:
    """Run a command beside small files; what it printed, what it computed, and its page."""
    with TemporaryDirectory() as folder, chdir(folder), patch.dict(os.environ, ENVIRONMENT):
        for name, content in (OWN | SWEPT).items():
            Path(name).write_text(content)
        ended, found = run_and_keep(*shlex.split(case))
        page = Path(PAGE).read_text(encoding="utf-8") if Path(PAGE).exists() else ""
    return ended, found, page


def compute(case: str) -> Answer:
    """Return what a command prints and draws."""
    ended, _, page = played(case)
    printed = [*ended.out.splitlines(), "", *ended.err.splitlines()[-1:] * (ended.code > 0)]
    assert "--csv" in case or max(map(len, ended.out.splitlines()), default=0) <= WIDTH
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
