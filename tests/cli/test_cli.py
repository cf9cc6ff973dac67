"""The command line keeps its contract: fields, formats, widths, exit codes and what it imports."""

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import typer

import kvsim
from kvsim.machines.profiles import hardware_names, stack_names
from kvsim.models.catalogue import catalogue_config, model_names
from kvsim.techniques import TECHNIQUES
from tests.support.commands import run
from tests.support.envelope import answer_in

CASE = ("--model", "llama2-7b", "--gpu", "a6000")
TWO = ("predict", *CASE, "--technique", "full", "--technique", "kvpr:split=64")
GRID = (*TWO, "--batch", "1,400", "--prompt", "512,1024", "--generate", "1,32")
COMMANDS = ("models", "gpus", "techniques", "stacks", "predict", "plan")
LISTS = COMMANDS[:4]
NAMES = {
    "models": set(model_names()),
    "gpus": set(hardware_names()),
    "techniques": set(TECHNIQUES),
    "stacks": set(stack_names()),
}
HEAVY = {"numpy", "pyarrow", "scipy", "pandas", "pulp", "plotly", "torch", "rich"}


@cache
def done(*args: str) -> str:
    """Standard output of a command that must succeed and say nothing else."""
    result = run(*args)
    said = [line for line in result.err.splitlines() if not line.startswith("kvsim: wrote ")]
    assert (result.code, said) == (0, [])
    return result.out


def answer(*args: str) -> Any:
    return answer_in(done(*args, "--json"))


def python(code: str, out: Any = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    command, err = [sys.executable, "-c", code], subprocess.PIPE
    return subprocess.run(command, stdout=out, stderr=err, text=True, check=False)


def test_all_techniques_that_engines_run_are_ranked() -> None:
    case = ("predict", "--model", "llama3.1-8b", "--gpu", "h100")
    rows = answer_in(run(*case, "--technique", "all", "--json").out)["rows"]
    rates = [row["decode_tok_s"] for row in rows]
    assert rates == sorted(rates, reverse=True)
    assert {"full", "fp8", "ngram", "cache"} <= {row["technique"] for row in rows}
    assert all(row["technique"] in (*TECHNIQUES, "cache") for row in rows)
    drafts = {"dflash", "draft", "eagle", "eagle3", "ngram"}
    alone = {name: {"full"} for name in ("flexgen", "ollama", "ktransformers")}
    for stack, names in (alone | {"llamacpp": {"full", "cache"} | drafts}).items():
        rows = answer_in(run(*case, "--technique", "all", "--stack", stack, "--json").out)["rows"]
        assert {row["technique"] for row in rows} == names, stack
    refused = run(*case, "--compare", "full,all")
    assert refused.code == 2 and "`kvsim predict --technique all`" in refused.err


def test_no_technique_that_does_not_fit_is_called_the_fastest() -> None:
    case = ("--model", "llama3.1-8b", "--gpu", "rtx4090", "--batch", "64", "--prompt", "16k")
    said = " ".join(run("predict", *case, "--technique", "full,fp8").out.split())
    assert "No technique fits on rtx4090 at batch 64; fp8 needs the least" in said
    assert "fastest" not in said


def test_limits_of_the_command_line_reach_the_plan() -> None:
    options = "--gpu-memory 20 --host-memory 16 --ttft 5 --tpot 0.5 --max-loss 0.5 --batch auto"
    found = answer("plan", *CASE, *options.split())
    assert found["limits"] == {
        "gpu_memory": 20 * 2**30, "host_memory": 16 * 2**30, "ttft": 5, "tpot": 0.5,
        "loss": 0.5, "assumed": 0,
    }  # fmt: skip
    predicted, load = found["predicted"], found["load"]
    assert predicted["gpu_bytes"] <= 20 * 2**30 and predicted["host_bytes"] <= 16 * 2**30
    assert load["ttft_s"]["p90"] <= 5 and load["tpot_s"]["p90"] <= 0.5
    assert load["kept_share"] >= 0.9 and load["requests_per_s"] <= load["stretch_requests_per_s"]
    assert found["not_modelled"] and not any("arrivals" in what for what in found["not_modelled"])


def test_an_alternative_says_which_option_would_admit_it() -> None:
    some = ("plan", *CASE, "--offline", "--only", "full,quantspec,pyramidkv")
    needs = {r["technique"]: r["needs"] for r in answer(*some)["alternatives"]}
    assert needs == {"quantspec": ["--max-loss 0.01", "--acceptance"], "pyramidkv": ["--lossy"]}
    given = answer(*some, "--lossy", "--acceptance", "0.9")["alternatives"]
    assert given and not [r for r in given if r["needs"] or not r["allowed"]]


def test_a_fixed_batch_of_a_service_says_what_other_weights_bring() -> None:
    found = answer("plan", *CASE, "--batch", "4", "--weights", "fp16,int4", "--tp", "1,2")
    asked = {(p["weights"], p["tp"]) for p in found["alternatives"] if "tp" in p}
    asked.add((found["predicted"]["weights"], found["predicted"]["tp"]))
    assert asked == {(w, n) for w in ("fp16", "int4") for n in (1, 2)}
    assert found["choice"]["max_seqs"] == 4


def test_times_without_a_unit_are_asked_about() -> None:
    result = run("plan", *CASE, "--tpot", "50")
    assert result.code == 2 and "write 50ms or 50s" in result.err


@pytest.mark.parametrize("command", LISTS)
def test_lists_name_everything(command: str) -> None:
    rows = answer(command)["rows"]
    assert {row["name"] for row in rows} == NAMES[command]
    table = done(command)
    assert all(name in table for name in NAMES[command])
    if command != "stacks":
        assert all(row["sources" if command == "gpus" else "source"] for row in rows)
    if command == "techniques":
        assert all(p["meaning"] for row in rows for p in row["parameters"])


def test_csv_is_the_json() -> None:
    rows = answer(*GRID)["rows"]
    read = list(csv.DictReader(io.StringIO(done(*GRID, "--csv"))))
    assert len(read) == len(rows)
    for got, expected in zip(read, rows, strict=True):
        got = {key: text for key, text in got.items() if not key.startswith("ranges.")}
        assert set(got) == set(expected) - {"assumed", "breakdown", "notes", "ranges"}
        for key, text in got.items():
            if isinstance(expected[key], (int, float)) and not isinstance(expected[key], bool):
                assert float(text) == expected[key]
            assert not text.startswith(("{", "["))  # nothing nested
        assert (got["technique"], got["basis"]) == (expected["technique"], "carried over")


def completed_by(shell: str, **environment: str) -> str:
    """What kvsim offers a shell that completes a line."""
    with patch.dict(os.environ, environment | {"_KVSIM_COMPLETE": f"complete_{shell}"}):
        return run().out


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("plan --model llama3.3", "llama3.3-70b"),
        ("plan --model Qwen/Qwen3-8", "Qwen/Qwen3-8B"),
        ("plan --gpu rtx409", "rtx4090 rtx4090d"),
        ("predict --technique full,kiv", "full,kivi"),
        ("plan --weights nvf", "nvfp4"),
        ("plan --weights rel", "released"),
        ("simulate --stack hf-e", "hf-eager"),
        ("simulate --trace sample:ch", "sample:chat"),
        ("simulate --trace ch", ""),
        ("models qwen3-next", "qwen3-next-80b-a3b"),
        ("traces inspect sample:ch", ""),
    ],
)
def test_values_are_completed_in_every_shell(line: str, completed: str) -> None:
    words = f"kvsim {line}"
    bash = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    assert completed_by("bash", **bash).split() == completed.split()
    for shell in ("zsh", "fish"):
        asked = {"_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
        offered = completed_by(shell, **asked).replace("\\", "")  # zsh escapes colons
        assert all(word in offered for word in completed.split())


def test_version_is_that_of_the_package() -> None:
    assert done("--version").strip() == f"kvsim {kvsim.__version__}"


def test_help_names_every_command_and_explains_every_option() -> None:
    begin = run().out
    assert all(f"kvsim {command}" in begin for command in ("plan", "predict", "capacity"))
    assert all(command in done("--help") for command in COMMANDS)
    assert "..." not in done("--help").partition("Commands:")[2]  # nothing is cut off
    for command in COMMANDS:
        text = done(command, "--help").partition("\n\n")[2].partition("Examples:\n")
        entries = re.split(r"\n  (?=--)", text[0])[1:]
        assert all(len(re.split(r"\s{2,}", entry, maxsplit=1)[1]) > 10 for entry in entries)
        assert text[2].count("kvsim ") == 2


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "[red]x[blue]<script>:smile:"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(catalogue_config("smollm2-135m"))))
    page = tmp_path / "page.html"
    odd = ("--model", str(folder), "--gpu", "t4")
    assert folder.name in done("predict", *odd, "--technique", "full")
    assert folder.name in done("plan", *odd, "--only", "full", "--report", str(page))
    assert "<script>:smile:" not in page.read_text()


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action")]


def test_a_report_stands_alone(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text("an older page")
    found = json.loads(done("plan", *CASE, "--lossy", "--json", "--report", str(file)))
    text = file.read_text(encoding="utf-8")
    page = Page(text)
    assert (
        all(link.startswith("#") for link in page.links)
        and "link" not in page.tags
        and "img" not in page.tags
    )
    assert text.count('data-for="picture') >= 3 and text.count('id="plotly"') == 1
    assert len(text) < 5e6 and 'name="viewport"' in text and "Made by <code>kvsim plan" in text
    assert found["choice"]["technique"] in text and "Not modelled" in text
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("method", ["write_text", "replace"])
@pytest.mark.parametrize("before", [None, "an older page"])
def test_a_failing_write_leaves_nothing_half_written(
    method: str, before: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    if before:
        file.write_text(before)
    full = OSError(28, "No space left on device")
    with patch.object(Path, method, side_effect=full):
        result = run(*TWO, "--report", str(file))
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert f"{file}: disk full" in result.err
    assert [path.read_text() for path in tmp_path.iterdir()] == ([before] if before else [])


@pytest.mark.parametrize("stop", [KeyboardInterrupt, typer.Abort])
def test_an_interrupt_says_one_line(stop: type[BaseException]) -> None:
    before = signal.getsignal(signal.SIGINT)  # ignored, where tests run in the background
    with patch("kvsim.api.deployments.load_model", side_effect=stop):
        assert run(*TWO) == (128 + signal.SIGINT, "", "kvsim: stopped by SIGINT\n")
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["--help"], HEAVY),
        (["plan", "--help"], HEAVY),
        (["plan", *CASE, "--only", "full"], {"torch", "plotly"}),
    ],
)
def test_imports_wait_until_they_are_needed(arguments: list[str], absent: set[str]) -> None:
    setup = "import sys; from kvsim.cli import app as cli; "
    code = f"{setup}sys.argv = {['kvsim', *arguments]!r}\n"
    code += "try: cli.main()\nexcept SystemExit as stop: assert not stop.code\n"
    code += f"print(sorted({absent!r} & set(sys.modules)), file=sys.stderr)"
    assert python(code).stderr == "[]\n"


def test_output_that_nobody_reads_or_that_has_no_room() -> None:
    code = "import sys; from kvsim.cli import app as cli; sys.argv = ['kvsim', 'gpus', '--json']; "
    code += "cli.main()"
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        gone = python(code, pipe)
    assert (gone.returncode, gone.stderr) == (128 + signal.SIGPIPE, "")
    if not Path("/dev/full").is_char_device():
        pytest.skip("no /dev/full here")
    with Path("/dev/full").open("w") as full:
        stuck = python(code, full)
    assert (stuck.returncode, stuck.stderr.count("\n")) == (2, 1)
    assert stuck.stderr.startswith("kvsim: standard output: No space")
