"""Markup in every text field of every input comes out as text on every page."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import kvsim
from kvsim.models.catalogue import catalogue_config
from tests.support.commands import run

SHIPPED = Path(kvsim.__file__).parent
MARK = "<img src=x onerror=kvsim>"
TEXT = f"{MARK}</script></td>{MARK}&amp;"
"""What is put into text fields; names of files get the first part only."""
KEPT = ("basis", "extends")  # one of a few words


class Tags(HTMLParser):
    """Every image and attribute that the markup would make, were it not escaped."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.made: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if any(name.startswith("on") or value == "x" for name, value in attrs):
            self.made.append(self.get_starttag_text() or tag)


def check(page: Path) -> None:
    content = page.read_text(encoding="utf-8")
    assert "<img src=x" not in content
    assert not Tags(content).made
    assert "img src=x" in content, "the markup is not shown at all, so that nothing was tested"


def spoiled(toml: Path) -> str:
    """A profile or stack with markup in each of its texts."""
    lines = []
    for line in toml.read_text(encoding="utf-8").splitlines():
        key, equals, value = line.partition(" = ")
        if key not in KEPT:
            value = re.sub(r'"([^"]+)"', rf'"\1{TEXT}"', value)
        lines.append(key + equals + value)
    return "\n".join(lines)


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of inputs whose texts and names hold markup."""
    monkeypatch.chdir(tmp_path)
    config = dict(catalogue_config("smollm2-135m"))
    read = ("model_type", "torch_dtype", "hidden_act")  # values that have to be known ones
    texts = {k: v + TEXT for k, v in config.items() if isinstance(v, str) and k not in read}
    name = f"{MARK}m.json"
    Path(name).write_text(json.dumps(config | texts | {"_name_or_path": TEXT}))
    Path(f"{MARK}g.toml").write_text(spoiled(SHIPPED / "hwprofiles/t4.toml"))
    Path(f"{MARK}s.toml").write_text(spoiled(SHIPPED / "hwprofiles/stacks/fused.toml"))
    Path(f"{MARK}t.csv").write_text(
        "arrival_s,prompt_tokens,generate_tokens\n0,10,5\n1,20,5\n2,9,4\n"
    )
    found = json.loads((SHIPPED / "traces/measured/smollm2-135m.json").read_text())
    for field in ("weights", "text", "settings"):
        found[field] += TEXT
    Path(f"{MARK}q.json").write_text(json.dumps(found))
    header = "model,gpu,technique,batch,prompt,generate,note,tpot_ms\n"
    Path(f"{MARK}r.csv").write_text(f"{header}smollm2-135m,t4,full,1,64,8,{TEXT},7.1\n")
    return tmp_path


WHERE = ("--model", f"./{MARK}m.json", "--gpu", f"./{MARK}g.toml", "--stack", f"./{MARK}s.toml")
SERVED = ("--trace", f"{MARK}t.csv")
COMMANDS = {
    "predict": ("predict", *WHERE, "--technique", "full,kivi:bits=4", "--prompt", "64"),
    "plan": ("plan", *WHERE, "--prompt", "64", "--lossy", "--quality", f"{MARK}q.json"),
    "simulate": ("simulate", *WHERE, *SERVED, "--compare", "full,kivi:bits=4"),
    "reproduce": ("reproduce", f"./{MARK}r.csv"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_markup_is_text_on_the_page_of(name: str, inputs: Path) -> None:
    result = run(*COMMANDS[name], "--report", "page.html")
    assert result.code in (0, 1), result.err
    check(inputs / "page.html")


def test_markup_is_text_on_the_page_of_capacity(inputs: Path) -> None:
    where = [word.replace("--gpu", "--gpus") for word in WHERE]
    targets = ("--ttft", "9s", "--tpot", "5s", "--max-gpus", "1")
    result = run("capacity", *where, *SERVED, *targets, "--report", "page.html")
    assert result.code in (0, 1), result.err
    check(inputs / "page.html")


def test_markup_is_text_on_the_page_of_explore(inputs: Path) -> None:
    result = run("explore", *WHERE, "--out", "page.html", "--technique", "full")
    assert result.code == 0, result.err
    check(inputs / "page.html")
