"""Pictures without their colours: what is drawn can still be told, by shape, dash or hatching."""

from typing import Any

import pytest

import kvsim

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
        kvsim.predict(*POINT, FIVE, batch=[1, 8], prompt="8k"),
        kvsim.plan("llama2-7b", "a6000", prompt=2048),
        kvsim.simulate("sample:chat", "llama3-8b", "l40s", "full,offload,kivi"),
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
