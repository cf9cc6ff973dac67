"""Every figure that an answer or its page shows is one of its JSON, in the unit it is shown in."""

import io
import re
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from html import unescape
from typing import Any

import pytest

import kvsim

ASKED: dict[str, Callable[[], Any]] = {
    "predict": lambda: kvsim.predict(
        "llama3.1-8b", "a10", "full,fp8,offload", prompt=8192, batch="1,4"
    ),
    "plan": lambda: kvsim.plan("llama3.1-8b", "l40s"),
    "plan offline": lambda: kvsim.plan(
        "llama3.1-8b", "l40s", offline=True, prompt="2k", generate=64, lossy=True, only="full,kivi"
    ),
    "simulate": lambda: kvsim.simulate(
        model="llama2-7b", gpu="a6000", prompt="600", generate="90", rate="4", hours=0.01,
        compare="full,kivi",
    ),
    "simulate loads": lambda: kvsim.simulate(
        model="llama3.1-8b", gpu="a100-80g", prompt="2k", generate="300", rate="2,50", hours=0.02
    ),
    "capacity": lambda: kvsim.capacity(
        model="llama2-7b", gpus="a6000,l4", prompt="600", generate="30", rate="4", hours=0.02,
        ttft="2s", tpot="100ms", failures=1,
    ),
    "capacity day": lambda: kvsim.capacity(
        model="llama3.1-8b", gpus="a6000", trace="sample:day", rate="20x", tp="1", ttft="9s",
        tpot="100ms", schedule=True, sure=0,
    ),
    "reproduce": lambda: kvsim.reproduce("kcache"),
}  # fmt: skip
UNITS = {
    "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "GiB": 2.0**30, "%": 0.01,
    "GB/s": 1e9, "requests/s": 1.0, "tok/s": 1.0, "x": 1.0,
}  # fmt: skip
BARE = (1.0, 2.0**30, 0.01, 1e9)  # what a cell's heading may say
FIGURE = re.compile(
    r"(?<![\w.,/@:=-])\$?(\d[\d,]*(?:\.\d+)?)(?![\d.,]\w|[a-wyzA-Z\d_]|x\w)"
    rf"(?=(?:–[\d.,]+)?[ ]?(?:output |decode )?({'|'.join(UNITS)})?(?!\w))?"
)
NONE = re.compile(
    r"80 %\s+interval|NVIDIA [\w ]*GB|p90 [\d,]+|20\d\d(?:-\d\d)*|at most [\d.]+ \w+"
    r"|(?:[\d.]+,?\s+and\s+)?[\d.]+\s+times(?:\s+\w+\s+load)?"
    r"|of [\d.]+ GiB|> 99 %|[+-]\d+ %|\d+ % (?:more|fewer)|\([-\d.]+\s+to\s+[\d.]+\s+%\)"
)
"""Names, dates, words for a workload, and differences of two figures."""
BESIDE = re.compile(r"\n(?:What to change|How to run it|Evidence|Note|Below|Above|Assumed|Rows )")


def shown(found: Any) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        found.show(verbose=True)
    return out.getvalue()


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from numbers(each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield abs(float(value))


def unknown(text: str, known: set[float], most: int) -> list[str]:
    """Figures of a text that no number rounds to, or of which a fraction has too many digits."""
    found, text = [], NONE.sub("", text)
    for match in FIGURE.finditer(text):
        digits, unit = match.groups()
        value, places = float(digits.replace(",", "")), len(digits.partition(".")[2])
        half = 0.5000001 * 10.0**-places
        if not places and value >= 1000:  # three digits or more
            half = max(half, 0.5000001 * 10.0 ** (len(str(int(value))) - 4))
        sizes = (UNITS[unit],) if unit else BARE
        long = places and len(digits.replace(".", "").replace(",", "").lstrip("0")) > most
        if long or not any(abs(n / size - value) <= half for n in known for size in sizes):
            found.append(text[max(0, match.start() - 30) : match.end() + 20])
    return found


@pytest.mark.parametrize("name", ASKED)
def test_figures_are_those_of_the_json(name: str) -> None:
    found = ASKED[name]()
    known = set(numbers(found.to_dict()))
    known |= set(map(float, re.findall(r"\d+(?:\.\d+)?", found.command)))
    body = BESIDE.split(shown(found))[0]
    assert FIGURE.search(body) and unknown(body, known, most=3) == []
    page = re.sub(r"<(script|style|svg)\b.*?</\1>", " ", found.html(), flags=re.DOTALL)
    cells = re.findall(r"<td.*?</td>", page, re.DOTALL)
    assert cells and not re.search(r"<th[^>]*>[^<]*_", page)  # a field's name is no heading
    assert unknown("\n".join(unescape(re.sub("<.*?>", "", x)) for x in cells), known, most=4) == []
    there = set(FIGURE.findall(unescape(re.sub("<.*?>", "", page))))
    assert {each for each in FIGURE.findall(body) if each[1] not in ("", "%")} <= there
