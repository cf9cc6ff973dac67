"""Pages: self-contained, with the numbers of the JSON, and as browsers show them."""

import re
import shutil
import subprocess
from base64 import b64decode
from gzip import decompress
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from string import ascii_lowercase

import pytest
from plotly.graph_objects import Scatter

from kvsim.report.colours import ORDER, PALETTE, mark, mark_at
from kvsim.techniques import TECHNIQUES
from tests.support import browser
from tests.support.commands import run
from tests.support.envelope import answer_in

PREDICT = ("predict", "--model", "llama3.1-8b", "--gpu", "h100", "--technique",
           "full,offload,quantspec", "--batch", "1,8", "--prompt", "8k")  # fmt: skip


class Cells(HTMLParser):
    """The numbers behind the cells of a page, and its verdict."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.values: list[float] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        value = dict(attrs).get("data-value")
        if tag == "td" and value is not None:
            self.values.append(float(value))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("page") / "predict.html"
    result = run(*PREDICT, "--report", str(place))
    assert result.code == 0 and f"kvsim: wrote {place}" in result.err
    return place


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_every_technique_has_its_own_mark_also_in_grey() -> None:
    marks = [mark(name) for name in ORDER]
    assert marks == [mark_at(place) for place in range(len(ORDER))]
    assert len({m.symbol for m in marks}) == len(ORDER)  # shapes alone suffice
    assert len({(m.colour, m.dash) for m in marks}) == len(ORDER)  # lines
    assert len({(m.colour, m.pattern) for m in marks}) == len(ORDER)  # bars
    assert len({mark(name) for name in TECHNIQUES}) == len(TECHNIQUES)
    assert mark("kivi:bits=4") == mark("kivi bits=4") == mark("kivi")


def test_any_number_of_techniques_and_any_name_has_a_mark() -> None:
    assert len({(m.symbol, m.colour) for m in map(mark_at, range(200))}) == 200
    draw = Random(32)
    for _ in range(200):
        name = "".join(draw.choices(ascii_lowercase, k=draw.randint(1, 12)))
        look = mark(name)
        assert Scatter(marker={"symbol": look.symbol}, line={"dash": look.dash})  # raises if none


@pytest.mark.parametrize("colour", PALETTE)
def test_colours_stand_out_on_light_and_on_dark(colour: str) -> None:
    assert 1.05 / (luminance(colour) + 0.05) >= 3
    assert (luminance(colour) + 0.05) / (luminance("#16181d") + 0.05) >= 3


def test_cells_hold_the_numbers_of_the_json(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    rows = answer_in(run(*PREDICT, "--json").out)["rows"]
    keys = ("batch", "ttft_s", "tpot_s", "decode_tok_s", "output_tok_s", "gpu_bytes", "host_bytes",
            "max_batch")  # fmt: skip
    expected = [row[key] for row in rows for key in keys]
    assert Cells(text).values[: len(expected)] == expected  # a table of speed-ups follows


def test_the_foot_has_the_command_that_gives_the_same(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = re.search(r"Made by <code>(kvsim [^<]*)</code>", text)
    assert found and found[1].split()[1:] == list(PREDICT)


def test_a_page_stands_alone_within_its_size(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    (packed,) = re.findall(r'id="plotly">([^<]*)<', text)
    assert decompress(b64decode(packed)).count(b"plotly.js v") == 1
    assert len(text.encode()) <= 5e6 and "plotly.js v" not in text
    assert not re.search(r"<(?:link|img|iframe)\b|<script[^>]* src=", text)


@pytest.mark.skipif(browser.CHROMIUM is None, reason="there is no Chromium")
@pytest.mark.parametrize(
    ("width", "scheme", "paper"),
    [(390, browser.DARK, "rgb(22, 24, 29)"), (1440, browser.LIGHT, "rgb(255, 255, 255)")],
)
def test_a_browser_shows_it_whole(
    page: Path, width: int, scheme: int, paper: str, tmp_path: Path
) -> None:
    seen = browser.look(page, width, scheme, tmp_path)
    assert seen["scroll"] == seen["width"] == width
    assert (seen["overlaps"], seen["said"], seen["requests"]) == ([], [], [])
    assert seen["paper"] == paper and seen["pictures"] >= 4
    assert 10 < len(seen["verdict"].split()) <= 60


UNPACKED = """const fs = require("fs"), page = fs.readFileSync(process.argv[1], "utf8");
const code = page.slice(page.indexOf("const inflate"), page.indexOf("const plotted"));
const letters = Buffer.from(page.match(/id="plotly">([^<]*)</)[1], "base64");
const out = eval(code + ";inflate")(new Uint8Array(letters));
const same = Buffer.compare(Buffer.from(out), require("zlib").gunzipSync(letters)) === 0;
console.log(same, out.length);"""


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node")
def test_the_script_unpacks_what_is_packed(page: Path) -> None:
    """At once, so that charts are there when a page has loaded, as for a one-shot screenshot."""
    done = subprocess.run(
        ["node", "-e", UNPACKED, str(page)], capture_output=True, text=True, check=True, timeout=60
    )
    same, size = done.stdout.split()
    assert same == "true" and int(size) > 1e6


PRINTED = """<script>(() => {
  dispatchEvent(new Event("beforeprint"));
  const places = [...document.querySelectorAll(".picture")];
  const drawn = places.filter((x) => x.querySelector(".main-svg"));
  document.title = `drawn ${drawn.length} of ${places.length}`;
})();</script>"""


@pytest.mark.skipif(browser.CHROMIUM is None, reason="there is no Chromium")
def test_a_page_that_is_printed_at_once_has_all_its_pictures(page: Path, tmp_path: Path) -> None:
    """They are drawn while the page loads."""
    printed = tmp_path / "printed.html"
    text = page.read_text(encoding="utf-8").replace("</body></html>", f"{PRINTED}</body></html>")
    printed.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [*browser.flags(tmp_path / "profile"), "--virtual-time-budget=9000", "--dump-dom",
         printed.as_uri()],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    said = re.search(r"<title>drawn (\d+) of (\d+)", done.stdout)
    assert said is not None and int(said[1]) == int(said[2]) >= 4
