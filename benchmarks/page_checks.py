"""What may be wrong with a page in Chromium, or with a command's lines in a terminal."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support import axe
from tests.support.commands import run
from tests.support.devtools import Browser

NUMBER = r"-?\d[\d,]*\.?\d*(?:e[+-]\d+)?"
SIZES = {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "KiB": 2.0**10, "MiB": 2.0**20,
         "GiB": 2.0**30, "%": 0.01}  # fmt: skip
VALUE = rf"(?<![\w.–-])({NUMBER})(?:\s?(µs|ms|s|min|h|[KMG]iB|%)(?!\w))?(?!\.?\w*[a-wyz\d])"
RANGE = rf"({NUMBER})–({NUMBER}) (µs|ms|s|min|h)"
COMPARED = ("ttft_s", "tpot_s", "decode_tok_s", "output_tok_s", "gpu_bytes", "kv_peak_bytes")
TABLES = 1100  # from this width on tables are seen whole [CSS pixels]
LARGEST = 5e6  # of a page [bytes]
ROUND = 0.01  # of a typical round from the mean over all, and of its printed digits


def lines(wide: str, narrow: str, width: int) -> Iterator[str]:
    """Lines that are too long, and numbers of the prose that the widest output has otherwise."""
    for line in narrow.splitlines():
        if len(line) > width and len(line.split()) > 2 and "kvsim: " not in line:
            yield f"longer than {width}: {line[:60]}"
        if line != line.rstrip():
            yield f"trailing blanks: {line[:60]}"
    known = set(re.findall(NUMBER, wide))
    for number in set(re.findall(NUMBER, narrow)) - known:
        if len(number) > 3:
            yield f"{number} is not in the widest output"


def looked(b: Browser, page: Path, shots: Path | None = None) -> Iterator[str]:
    """What is wrong with a page: at two widths, light and dark, and printed."""
    papers = set()
    for width in (390, 1440):
        for scheme in ("light", "dark"):
            b.open(page, width, scheme)
            seen = b.look()
            papers.add(seen["paper"])
            where = f"{width} px, {scheme}"
            if seen["scroll"] != width:
                yield f"{where}: {seen['scroll']} px wide"
            for key in ("overlaps", "cut", "said", "requests", "scrolled"):
                if seen[key] and (key != "scrolled" or width > TABLES):
                    yield f"{where}: {key}: {seen[key][:2]}"
            if axe.SCRIPT is not None:
                for rule in axe.broken(b):
                    yield f"{where}: axe: {rule}"
            if shots:
                b.shot(shots / f"{page.stem}-{width}-{scheme}.png")
    if len(papers) != 2:
        yield "dark is as light"
    yield from printed(b, page, shots)


def printed(b: Browser, page: Path, shots: Path | None = None) -> Iterator[str]:
    """What is wrong with a page on A4."""
    b.paged(page)
    seen = b.look()
    for heading in seen["headings"]:
        if heading["next"] is not None and heading["next"] > heading["column"] + 300:
            yield f"printed: {heading['text'][:40]} stands last on its sheet"
    for key in ("overlaps", "cut"):
        if seen[key]:
            yield f"printed: {key}: {seen[key][:2]}"
    if shots:
        b.shot(shots / f"{page.stem}-print.png")


def large(page: Path) -> Iterator[str]:
    """A page that is too large, or has plotly.js more than once."""
    text = page.read_bytes()
    if len(text) > LARGEST:
        yield f"{len(text):,} bytes"
    if text.count(b'id="plotly"') > 1:
        yield "plotly.js is inside more than once"


def again(b: Browser, page: Path) -> Iterator[str]:
    """The command in the foot, run again: every cell must have the same number."""
    b.open(page, 1440)
    before = b.look()
    other = page.with_name(f"again-{page.name}")
    arguments = shlex.split(before["foot"])[1:]
    assert arguments, "the foot has no command"
    where = "--out" if arguments[0] == "explore" else "--report"
    found = run(*arguments, where, str(other))
    if not other.exists():
        yield f"the foot's command ends with: {found.err[-120:]}"
        return
    b.open(other, 1440)
    after = b.look()
    for key in ("verdict", "cells", "traces", "grid"):
        if before[key] != after[key]:
            yield f"the foot's command gives other {key}"


def numbers(found: Any) -> Iterator[float]:
    """Every number of a JSON value."""
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, list):
        for value in found:
            yield from numbers(value)
    elif isinstance(found, (int, float)) and not isinstance(found, bool):
        yield float(found)


def agreed(b: Browser, page: Path, told: str) -> Iterator[str]:
    """Cells and numbers of the verdict that the JSON of the same run has not."""
    values = json.loads(told)
    known = sorted(set(numbers(values)))
    b.open(page, 1440)
    seen = b.look()
    for shown, value in seen["cells"]:
        if not any(abs(value - k) <= 1e-12 * abs(k) for x in known for k in (x, 100 * x)):
            yield f"the cell {shown} ({value!r}) is not in the JSON"
    answer = values.get("answer") if isinstance(values, dict) else None
    verdict = answer.get("verdict") if isinstance(answer, dict) else answer
    if verdict is not None and " ".join(seen["verdict"].split()) != " ".join(verdict.split()):
        yield "the verdict is not the JSON's"
    rows = values if isinstance(values, list) else values.get("techniques", [])
    known += related([row for row in rows if isinstance(row, dict)])
    said = re.sub(RANGE, r"\1 \3, \2 \3", seen["verdict"])
    for number, unit in re.findall(VALUE, said) if verdict is None else ():
        if not _in(number, unit, known):
            yield f"{number} {unit} of the verdict is not in the JSON"


def related(rows: list[dict[str, Any]]) -> list[float]:
    """What a sentence says of two rows: how many, how many times, how much more or less."""
    found = [float(len(rows)), float(sum(bool(row.get("fits")) for row in rows))]
    for key in COMPARED:
        here = [x for row in rows if isinstance(x := row.get(key), (int, float)) and x]
        for one in here:
            found += [v for other in here for v in (one / other, 1 - one / other, one - other)]
    return found


def _in(shown: str, unit: str, known: list[float]) -> bool:
    """Whether a number is one of those that are known, as far as its digits go."""
    digits = shown.replace(",", "")
    value, scale = float(digits), SIZES.get(unit, 1.0)
    half = 0.5 * 10.0 ** -len(digits.partition(".")[2]) * scale * 1.001
    return any(abs(value * scale - k) <= half for k in known)


def sums(b: Browser, page: Path, rows: list[dict[str, Any]]) -> Iterator[str]:
    """Lanes of a round against its length in the heading, memory bars against the rows' totals."""
    b.open(page, 1440)
    for title, traces in b.look()["traces"].items():
        if title.startswith("One decoding round"):
            ends = [x + base for t in traces for x, base in zip(t["x"], t["base"], strict=True)]
            told = re.search(r": ([\d.,]+) (ms|s|µs)(?: for ([\d.]+) tokens)?,", title)
            assert told, title
            length = float(told[1].replace(",", "")) * SIZES[told[2]] * 1e3
            each = length / float(told[3] or 1) / 1e3
            times = [row["tpot_s"] for row in rows if isinstance(row.get("tpot_s"), float)]
            if min(abs(each / time - 1) for time in times) > ROUND:
                yield f"a round of {each * 1e3:.4g} ms per token; no row has such a TPOT"
            if abs(max(ends) / length - 1) > 6e-3:
                yield f"lanes end at {max(ends):.4g} ms, the heading says {length:.4g} ms"
        if title.startswith("GPU memory"):
            bars = [t for t in traces if t["type"] == "bar"]
            totals = [sum(t["x"][i] for t in bars) for i in range(len(bars[0]["x"]))]
            sizes = (row.get("gpu_bytes") for row in rows)
            known = [size / 2**30 for size in sizes if isinstance(size, (int, float))]
            for total in totals:
                if min(abs(total - size) for size in known) > 2e-3 * total:
                    yield f"bars of {total:.4g} GiB, no row has that"
