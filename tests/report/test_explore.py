"""The page with sliders holds what `kvsim predict` says, and follows its sliders."""

import json
import re
from pathlib import Path

import pytest

from tests.support import browser, devtools
from tests.support.commands import run
from tests.support.envelope import answer_in

CASE = ("--model", "llama3.1-8b", "--gpu", "h100")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("explore") / "e.html"
    done = run("explore", *CASE, "--technique", "full,kivi,offload", "--out", str(place))
    assert done.code == 0 and f"wrote {place}" in done.err
    return place


def grid(page: Path) -> dict:  # type: ignore[type-arg]
    found = re.search(r'id="grid">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return json.loads(found[1])  # type: ignore[no-any-return]


def test_the_grid_is_what_predict_says(page: Path) -> None:
    found = grid(page)
    (kivi,) = [v for v in found["variants"] if v["name"] == "kivi" and v["knobs"] == {"bits": 4}]
    rows = answer_in(
        run("predict", *CASE, "--technique", "kivi:bits=4", "--batch", "8", "--prompt", "4096",
            "--json").out
    )["rows"]  # fmt: skip
    place = found["prompts"].index(4096), found["batches"].index(8)
    table = kivi["links"][0]
    for key, name in (("tpot", "tpot_s"), ("ttft", "ttft_s"), ("gpu", "gpu_bytes")):
        unit = 2**30 if key == "gpu" else 1
        found_here = table[key][place[0]][place[1]] * unit
        assert found_here == pytest.approx(rows[0][name], rel=6e-3)
    assert len(page.read_bytes()) <= 5e6


def test_only_what_crosses_the_link_follows_the_link(page: Path) -> None:
    found = grid(page)
    tables = {v["name"]: len(v["links"]) for v in found["variants"]}
    assert tables == {"full": 1, "kivi": 1, "offload": len(found["links"])}


@pytest.mark.skipif(browser.CHROMIUM is None, reason="there is no Chromium")
def test_a_browser_shows_the_answer(page: Path, tmp_path: Path) -> None:
    with devtools.browser(tmp_path) as b:
        b.open(page, 390)
        seen = b.look()
    assert (seen["scroll"], seen["said"], seen["overlaps"]) == (390, [], [])
    assert len(seen["cells"]) >= 15 and seen["pictures"] >= 1
