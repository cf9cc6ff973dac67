"""What pictures show: told apart without colours, within the bounds of their values."""

from typing import Any

import pytest

import kvsim
from kvsim.report.answer import Answer
from kvsim.report.page import render_page
from kvsim.report.plan_charts import LATER
from kvsim.report.suitability import describe_quality

POINT = ("llama3.1-8b", "h100")
FIVE = "full,offload,kivi,quantspec,snapkv"


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


@pytest.fixture(scope="module")
def pictures() -> list[tuple[str, Any]]:
    results: list[Any] = [
        kvsim.predict(*POINT, FIVE, batch=[1, 8], prompt=["8k", "16k"]),
        kvsim.plan("llama2-7b", "a6000", prompt=2048),
        kvsim.plan("llama2-7b", "a6000", prompt=2048, offline=True, tpot="100ms"),
        kvsim.simulate("sample:chat", "llama3-8b", "l40s", "full,offload,kivi", ttft="2s"),
    ]
    return [picture for result in results for picture in result.figures()]


def test_in_grey_every_line_and_bar_has_its_own_shape(pictures: list[tuple[str, Any]]) -> None:
    assert len(pictures) > 15
    for title, figure in pictures:
        found = looks(figure)
        repeated = {look for look in found if found.count(look) > 1}
        assert not repeated or len(found) > 8, (title, repeated)


def test_axes_end_where_their_values_do(pictures: list[tuple[str, Any]]) -> None:
    """A reference line is no longer than what is compared with it."""
    for title, figure in pictures:
        if title.startswith("Break-even"):
            *lines, full = figure.data
            known = [x for t in lines for x, y in zip(t.x, t.y, strict=True) if y == y]
            assert (min(full.x), max(full.x)) == (min(known), max(known)), title
        if title.startswith("Break-even by context"):
            render_page([(title, figure)], title=title, answer=Answer("It is drawn."))
            assert 10 ** figure.layout.xaxis.range[1] < 2 * max(known), title


def test_a_line_joins_batches_of_one_prompt(pictures: list[tuple[str, Any]]) -> None:
    (speed,) = [f for title, f in pictures if title.endswith("a line for each prompt")]
    for line in speed.data:
        assert [x is None for x in line.x] == [y is None for y in line.y]
        assert [x is None for x in line.x].count(True) == 1 and len(line.x) > 3


def test_a_map_shows_what_the_table_compares(pictures: list[tuple[str, Any]]) -> None:
    (drawn,) = [f for title, f in pictures if title.startswith("Techniques: ")]
    later = {line.name for line in drawn.data if line.visible == LATER}
    shown = {line.name for line in drawn.data} - later
    assert {"full", "the choice", "TPOT target"} <= shown and "flexgen" in later
    rates = [y for line in drawn.data if line.name in shown - {"TPOT target"} for y in line.y]
    (target,) = [line for line in drawn.data if line.name == "TPOT target"]
    assert (min(target.y), max(target.y)) == (min(rates), max(rates))


def test_targets_are_lines_among_the_times_of_requests(pictures: list[tuple[str, Any]]) -> None:
    times = dict(pictures)
    *_, target = times["Time to first token (TTFT)"].data
    assert (target.name, target.x) == ("target 2.00 s", (2.0, 2.0))
    assert all("target" not in line.name for line in times["Time per token (TPOT)"].data)


def test_evidence_of_other_settings_is_called_that() -> None:
    for setting, elsewhere in (("kivi:bits=4", True), ("kivi", False)):
        (found,) = kvsim.predict(*POINT, setting, batch=8).found
        (said,) = describe_quality([found])
        assert ("measured with other settings" in said) == elsewhere, said
