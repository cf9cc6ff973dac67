"""What works without the packages of the extras, and what is said where they are needed."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvsim.errors import EXTRAS

ROOT = Path(__file__).parents[1]
CASE = ["--model", "llama2-7b", "--gpu", "a6000"]
SERVED = ["--trace", "sample:chat", *CASE]
PLAIN = [
    ["plan", *CASE, "--only", "full", "--report", "plan.html"],
    ["plan", *CASE, "--offline", "--batch", "4", "--max-loss", "0.1", "--json"],
    ["plan", *CASE, "--only", "full", "--engine", "vllm", "--emit", "vllm"],
    ["predict", *CASE, "--technique", "full,kivi:bits=4", "--batch", "1,8", "--report", "of.html"],
    ["explore", *CASE, "--out", "explore.html"],
    ["reproduce", "kcache", "--report", "kcache.html"],
    ["models"],
    ["gpus", "h100"],
    ["techniques", "kivi"],
    ["stacks"],
    ["traces", "inspect", "sample:chat"],
    ["traces", "inspect", "sample:conversation"],
    ["traces", "generate", "like.csv", "--like", "sample:chat"],
    ["simulate", *SERVED],
    ["plan", "--trace", "sample:chat", "--model", "llama2-7b", "--gpu", "h100"],
    [
        "capacity",
        "--trace",
        "sample:chat",
        "--model",
        "llama2-7b",
        "--gpus",
        "h100",
        "--ttft",
        "5s",
        "--tpot",
        "200ms",
    ],
]
NEEDING = [
    ["traces", "inspect", "trace.parquet"],
    ["traces", "generate", "like.parquet", "--like", "sample:chat"],
    ["sweep", "grid.toml", "--out", "grid"],
]
SCRIPT = f"""
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout

class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, *rest):
        hidden = name.split(".")[0] in {list(EXTRAS)}
        return None if hidden else self.finder.find_spec(name, *rest)

sys.meta_path[:] = map(Without, sys.meta_path)
from kvsim.cli.app import main
found = []
for arguments in {PLAIN + NEEDING}:
    sys.argv, out, err = ["kvsim", *arguments], io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            found.append([end.code, out.getvalue(), err.getvalue()])
import kvsim
grid = kvsim.sweep("llama2-7b", "a6000", batch=[1, 8], prompt=[1024, 4096])
drawn = len(grid.figure().data), len(repr(grid).splitlines())
try:
    said = grid.frame()
except kvsim.errors.InputError as problem:
    said = str(problem)
print(json.dumps([found, drawn, said]))
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Where the commands ran, and how each of them ended."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "grid.toml").write_text('kind = "predict"\n[grid]\nmodel = "llama2-7b"\n')
    (folder / "trace.parquet").write_bytes(b"PAR1")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folder, json.loads(done.stdout)


def test_most_commands_need_no_extra(ended: tuple[Path, Any]) -> None:
    folder, (found, drawn, _) = ended
    for arguments, (code, out, err) in zip(PLAIN, found, strict=False):
        assert code == 0, (arguments, err)
        pages = [name for name in arguments if name.endswith(".html")]
        assert all("</html>" in (folder / name).read_text() for name in pages)
        assert out or pages or (folder / "like.csv").exists()
    assert drawn[0] >= 1 and drawn[1] >= 4


def test_others_say_what_to_install(ended: tuple[Path, Any]) -> None:
    folder, (found, _, frame) = ended
    for arguments, (code, out, err) in zip(NEEDING, found[len(PLAIN) :], strict=True):
        assert (code, out) == (2, ""), arguments
        assert err.count("\n") == 1 and err.endswith("; pip install 'kvsim[traces]'\n"), arguments
    assert frame == "data frames need pandas, not installed; pip install 'kvsim[frames]'"
    assert not (folder / "grid").exists() and not (folder / "like.parquet").exists()


def test_extras_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    some = ("traces", "frames", "gguf")
    listed = {name.split(">")[0]: extra for extra in some for name in extras[extra]}
    assert listed | {"torch": "validate"} == {name: extra for name, (extra, _) in EXTRAS.items()}
