"""A page in every way a browser shows it, commands at every width; all: benchmarks/pages."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvsim
from benchmarks.page_checks import again, agreed, lines, looked, sums
from benchmarks.pages import WIDTHS, Case, printed
from kvsim.report.colours import PALETTE
from tests.support import axe
from tests.support import browser as chromium
from tests.support.colours import SEEN, apart
from tests.support.devtools import Browser, browser

LEAST = 20.0  # distance of the two nearest colours; 2.3 is just visible


@pytest.mark.parametrize("reader", SEEN)
def test_every_reader_tells_the_colours_apart(reader: str) -> None:
    assert apart(PALETTE, reader)[0] >= LEAST


@pytest.mark.parametrize("name", ["predict", "trace chat", "gpu", "technique"])
def test_no_number_is_cut_at_any_width(name: str, tmp_path: Path) -> None:
    case = Case(name, tmp_path)
    told = {width: printed(case, width) for width in WIDTHS}
    for width in WIDTHS:
        assert list(lines(told[WIDTHS[-1]], told[width], width)) == []


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if chromium.CHROMIUM is None:
        pytest.skip("there is no Chromium")
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.mark.parametrize("name", ["predict", "trace conversation"])
def test_a_page_is_right_at_every_width_and_printed(
    name: str, chrome: Browser, tmp_path: Path
) -> None:
    case = Case(name, tmp_path)
    told = case.written()
    assert list(looked(chrome, case.page)) == []
    assert list(agreed(chrome, case.page, told)) == []
    assert list(again(chrome, case.page)) == []


@pytest.mark.skipif(axe.SCRIPT is None, reason=axe.WHY)
def test_axe_sees_what_is_wrong(chrome: Browser, tmp_path: Path) -> None:
    """Pages above are held to these rules; here one is broken."""
    page = tmp_path / "wrong.html"
    page.write_text('<!doctype html><body><p style="color:#ddd">Faint, without a title.</p></body>')
    chrome.open(page, 390)
    assert {rule.split(" (")[0] for rule in axe.broken(chrome)} >= {
        "color-contrast",
        "document-title",
        "html-has-lang",
    }


def test_lanes_and_bars_are_the_numbers_of_the_rows(chrome: Browser, tmp_path: Path) -> None:
    case = Case("predict", tmp_path)
    case.written()
    words = case.arguments[1:]
    options = {
        name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)
    }
    assert list(sums(chrome, case.page, list(kvsim.predict(**options).rows))) == []
