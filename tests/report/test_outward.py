"""Names that strangers chose reach a terminal, a spreadsheet and a file system as text."""

import csv
import io
import json
import random
import re
from html import escape
from pathlib import Path
from typing import Any

import pytest
from plotly.graph_objects import Figure, Scatter

from kvsim.console import escape_controls
from kvsim.report.answer import Answer
from kvsim.report.pictures import Chart
from kvsim.report.predict import FORMULAS
from kvsim.report.result import Result
from tests.emit.test_quoting import names
from tests.support.commands import run

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100,
    "max_position_embeddings": 4096,
}  # fmt: skip
PIECES = (
    *("=1+1", "@SUM(A1)", "+cmd|' C calc'!A0", "-2", "\t=1", "\r=1", "\x1b[31m"),
    *("\x1b]0;title\x07", "\x07", "\x9b2J", "\u202e", "\u2066", "a", " b", "'", '"', ",", ";"),
    *("模型", "<b>", "\x7f"),
)
COUNT = 200


def drawn() -> list[str]:
    random_ = random.Random(39)
    return ["".join(random_.choices(PIECES, k=random_.randint(1, 4))) for _ in range(COUNT)]


def model(folder: Path, name: str) -> str:
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(CONFIG))
    return f"--model={place}"


def test_a_text_has_no_control_characters_and_is_told_apart() -> None:
    shown = [escape_controls(name, "") for name in drawn() + names()]
    assert all(text.isprintable() for text in shown)
    assert escape_controls("a\x1bb\nc\td") == "a\\x1bb\nc\td"
    assert escape_controls("é 模型 😀") == "é 模型 😀"


@pytest.mark.parametrize("part", range(4))
def test_names_are_cells_and_lines_of_text(tmp_path: Path, part: int) -> None:
    for name in sorted(set(drawn()))[part::16]:  # a command for each: a quarter of them
        where = (model(tmp_path, name), "--gpu", "t4")
        asked = ("predict", *where, "--technique", "full", "--prompt", "64", "--generate", "4")
        text = run(*asked)
        assert text.code == 0, (name, text)
        assert all(c == "\n" or c.isprintable() for c in text.out + text.err), name
        (row,) = csv.DictReader(io.StringIO(run(*asked, "--csv").out))
        plain = escape_controls(name, "")
        assert row["model"] in (plain, f"'{plain}")
        assert not any(str(cell).startswith(FORMULAS) for cell in row.values()), name
        found: dict[str, Any] = json.loads(run(*asked, "--json").out)
        assert found["rows"][0]["model"] == name


@pytest.mark.parametrize("name", ["a\x1b[31mb", "a\u202eb\u2066", "a\U000e0041b\x7f", "é 模型 😀"])
def test_pages_show_names_as_text(tmp_path: Path, name: str) -> None:
    page, where = tmp_path / "page.html", model(tmp_path, name)
    asked = ("--gpu=t4", "--prompt=64", "--generate=4", "--technique=full", "--batch=1,2")
    assert run("predict", where, *asked, f"--report={page}").code == 0
    assert_plain(page.read_text(), name)


def test_pictures_and_titles_show_names_as_text() -> None:
    name = "a\x1b\b\u202e\U000e0041 </script> 😀"
    figure = Figure(Scatter(x=[1, 2], y=[1, 2], name=name))
    grid, chart = json.dumps({"name": name}), Chart(name)
    chart.figure = figure
    page = Result(name, Answer(name), {}, None, draw=lambda: [chart], grid=grid).html()
    assert_plain(page, name)
    assert page.count("</script>") == page.count("<script")


def assert_plain(page: str, name: str) -> None:
    """What a page holds, and the strings that its scripts read, have no control character."""
    data = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)
    shown = page + "".join(json.dumps(json.loads(part), ensure_ascii=False) for part in data)
    assert escape_controls(shown) == shown
    assert escape(escape_controls(name)) in page


def test_reports_stay_in_their_folder(tmp_path: Path) -> None:
    for name in ("../x", "a/../../x", "..", "\x1b[31m.html", "a\nb.html"):
        result = run(
            "simulate", model(tmp_path, "m"), "--gpu", "t4", "--trace", "sample:chat",
            "--technique", "full", "--max-seqs", "4", "--report", str(tmp_path / "out" / name),
        )  # fmt: skip
        assert result.code == 2 and "Traceback" not in result.err, name
        assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]
