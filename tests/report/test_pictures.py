"""What pictures show: told apart without colours, within the bounds of their values."""

from typing import Any

import pytest

import kvsim
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
        kvsim.simulate("sample:chat", "llama3-8b", "l40s", "full,offload,kivi", ttft="2s"),
    ]
    return [picture for result in results for picture in result.figures()]


def test_in_grey_every_line_and_bar_has_its_own_shape(pictures: list[tuple[str, Any]]) -> None:
    for title, figure in pictures:
        found = looks(figure)
        repeated = {look for look in found if found.count(look) > 1}
        assert not repeated or len(found) > 8, (title, repeated)


def test_evidence_of_other_settings_is_called_that() -> None:
    for setting, elsewhere in (("kivi:bits=4", True), ("kivi", False)):
        (found,) = kvsim.predict(*POINT, setting, batch=8).found
        (said,) = describe_quality([found])
        assert ("as measured with bits 2" in said) == elsewhere, said
