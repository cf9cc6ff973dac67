"""What answers show in other ways: each figure is one of their JSON, frames have every number,
and the shapes of charts differ."""

import re
from collections.abc import Iterator
from html import unescape
from typing import Any

import pytest

import kvsim
from kvsim.report.result import UNITS as FRAME_UNITS
from tests.frozen.answers import played
from tests.support.commands import shown

ASKED = {
    "predict": "predict --model llama3.1-8b --gpu a10 --technique full,fp8,offload --prompt 8192 "
    "--batch 1,4 --report page.html",
    "plan": "plan --model llama3.1-8b --gpu l40s --verbose --report page.html",
    "plan offline": "plan --model llama3.1-8b --gpu l40s --offline --prompt 2k --generate 16 "
    "--only full,kivi --lossy --explain --pareto --report page.html",
    "simulate": "simulate --model llama2-7b --gpu a6000 --prompt 600 --generate 90 --rate 4 "
    "--hours 0.01 --compare full,kivi --report page.html",
    "simulate targets": "simulate --model llama2-7b --gpu a6000 --trace own.csv --ttft 60ms "
    "--tpot 30ms --check --report page.html",
    "simulate loads": "simulate --model llama3.1-8b --gpu a100-80g --prompt 2k --generate 300 "
    "--rate 2,50 --hours 0.02 --report page.html",
    "capacity": "capacity --model llama2-7b --gpus a6000,l4 --prompt 600 --generate 30 --rate 4 "
    "--hours 0.02 --ttft 2s --tpot 100ms --failures 1 --report page.html",
    "capacity day": "capacity --model llama3.1-8b --gpus a6000 --trace sample:day --rate 20x "
    "--tp 1 --ttft 9s --tpot 100ms --schedule --sure 0 --report page.html",
    "reproduce": "reproduce kcache --report page.html",
}
"""Frozen answers, which are computed once for all of these tests."""
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


def numbers(value: Any) -> Iterator[float]:
    """Every number in a nested value, by a recursion of its own."""
    if isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from numbers(each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


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
    _, found, text = played(ASKED[name])
    known = {abs(float(n)) for n in numbers(found.to_dict())}
    known |= set(map(float, re.findall(r"\d+(?:\.\d+)?", found.command)))
    body = BESIDE.split(shown(found, verbose=True))[0]
    assert FIGURE.search(body) and unknown(body, known, most=3) == []
    page = re.sub(r"<(script|style|svg)\b.*?</\1>", " ", text, flags=re.DOTALL)
    cells = re.findall(r"<td.*?</td>", page, re.DOTALL)
    assert cells and not re.search(r"<th[^>]*>[^<]*_", page)  # a field's name is no heading
    assert unknown("\n".join(unescape(re.sub("<.*?>", "", x)) for x in cells), known, most=4) == []
    there = set(FIGURE.findall(unescape(re.sub("<.*?>", "", page))))
    assert {each for each in FIGURE.findall(body) if each[1] not in ("", "%")} <= there


def results() -> dict[str, Any]:
    sweep = kvsim.sweep("llama3.1-8b", "h100", batch=[1, 8], prompt=1024)
    return {name: played(case)[1] for name, case in ASKED.items()} | {"sweep": sweep}


@pytest.mark.parametrize("name", [*ASKED, "sweep"])
def test_frames_have_every_number_of_the_json(name: str) -> None:
    found = results()[name]
    long = found.to_frame()
    assert sorted(long["value"]) == sorted(numbers(found.fields))
    assert set(long["unit"]) <= {*FRAME_UNITS.values(), "1"}
    assert long[long["quantity"].str.endswith("ttft_s")]["unit"].eq("s").all()
    wide = found.frame()
    units = wide.attrs["units"]
    assert all(units[name] == "s" for name in wide if "ttft_s" in name)
    for row, line in zip(found.rows, wide.to_dict("records"), strict=True):
        assert {*numbers(row)} <= {*line.values()}
    assert found.to_dict() == found.envelope()


def looks(figure: Any) -> list[tuple[Any, ...]]:
    """How each named trace of a figure is drawn, but for its colour."""
    found: list[tuple[Any, ...]] = []
    for trace in figure.data:
        if trace.name is None or trace.type not in ("bar", "scatter"):
            continue
        if trace.type == "bar":
            found.append(("bar", trace.marker.pattern.shape))
            continue
        drawn = "markers" in (trace.mode or "")
        shape = trace.marker.symbol if drawn else trace.line.dash
        shape = shape[0].removesuffix("-open") if isinstance(shape, tuple) else shape
        found.append((trace.mode, shape, trace.line.dash))
    return found


FIVE = (
    "predict --model llama3.1-8b --gpu h100 --technique full,offload,kivi,quantspec,snapkv "
    "--batch 1,8 --prompt 8k,16k"
)


DRAWN = ASKED | {"five": FIVE}
DRAWN.pop("plan offline")  # mixtures have the symbol of their first part, open


@pytest.mark.parametrize("case", DRAWN.values(), ids=DRAWN)
def test_in_grey_every_line_and_bar_has_its_own_shape(case: str) -> None:
    for title, figure in played(case)[1].figures():
        found = looks(figure)
        repeated = {look for look in found if found.count(look) > 1}
        assert not repeated or len(found) > 8, (title, repeated)
