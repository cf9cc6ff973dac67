"""Whatever a model or a file is called, what is emitted is read back as it was meant."""

import ast
import json
import os
import random
import re
import shlex
import stat
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from kvsim.emit.engines import Setting, emit, write_path, write_python, write_yaml
from kvsim.options import command_line
from tests.emit.test_emit import served

NAMES = 300
PIECES = (
    *("model", "7b", "a b", "  ", "'", '"', "`touch INJECTED`", "$(touch INJECTED)"),
    *("; touch INJECTED", "\n", "\\\n", "\\", "-", "--", "--port 1", "=", "#", "!", "&", "|"),
    *("é", "模型", "😀", "\u2028", "\x85", "\t", ">INJECTED", "*", "~", "{a,b}", "$HOME"),
    *("%s", "[x]", ": ", "/", ".", "true", "\x7f"),
)
PROGRAMS = ("vllm", "python", "trtllm-serve", "llama-server", "kvsim")
SERVICE = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
STUB = """#!/bin/sh
for word in "${0##*/}" "$@"; do printf '%s\\0' "$word"; done >> "$RECORD"
printf '\\0' >> "$RECORD"
"""
"""Writes its name and arguments down, each ended by a NUL, and another one at the end."""


def names() -> list[str]:
    """Names that no two characters of a shell, YAML, JSON or Python would get past unquoted."""
    draw = random.Random(32)
    drawn = ["".join(draw.choices(PIECES, k=draw.randint(1, 6))) for _ in range(NAMES)]
    assert len(set(drawn)) > 0.9 * NAMES and sum(name.startswith("-") for name in drawn) > 10
    return drawn


def run_by_shell(script: str, folder: Path) -> list[list[str]]:
    """The commands that bash starts for a script."""
    record = folder / "record"
    record.write_bytes(b"")
    for program in PROGRAMS:
        stub = folder / "bin" / program
        stub.parent.mkdir(exist_ok=True)
        stub.write_text(STUB)
        stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e"], input=script.encode(), cwd=folder, capture_output=True, check=False,
        env={**os.environ, "PATH": path, "RECORD": str(record), "LC_ALL": "C.UTF-8"},
    )  # fmt: skip
    assert not done.returncode and not done.stdout and not done.stderr, (script, done)
    assert {x.name for x in folder.iterdir()} == {"bin", "record"}, "something was injected"
    commands = record.read_bytes().decode().split("\0\0")[:-1]
    return [command.split("\0") for command in commands]


def expected(engine: str, name: str) -> list[str]:
    """The words before the first plain option, and after it nothing is drawn."""
    path = write_path(name)
    return {
        "vllm": ["vllm", "serve", path],
        "lmcache": ["vllm", "serve", path],
        "sglang": ["python", "-m", "sglang.launch_server", "--model-path", path],
        "trtllm": ["trtllm-serve", path],
    }[engine]


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "lmcache"])
def test_commands_have_the_words_that_were_meant(engine: str, tmp_path: Path) -> None:
    drawn = names()
    plain = run_by_shell(emitted_command(engine, "NAME"), tmp_path)[0]
    for one_line, some in ((False, drawn), (True, drawn[:50])):
        script = "\n".join(emitted_command(engine, name, one_line) for name in some)
        started = run_by_shell(script, tmp_path)
        for name, words in zip(some, started, strict=True):
            begin = expected(engine, name)
            assert words == begin + plain[len(begin) :], name


def emitted_command(engine: str, name: str, one_line: bool = False) -> str:
    found = emit(engine, served("fp8 + eagle:gamma=3", model=name, host_cache=2**36))
    text = found.line if one_line else found.text
    if text.startswith("# "):  # a file, an empty line, and the command
        file, _, text = text.partition("\n\n")
        assert isinstance(yaml.safe_load(file), dict)
    return text


def test_roles_and_their_router_are_commands_too(tmp_path: Path) -> None:
    for name in names()[:20]:
        found = emit("sglang", served(model=name, apart=(2, 1)))
        started = run_by_shell(found.text, tmp_path)
        assert len(started) == 3
        assert [words[4] for words in started[:2]] == [write_path(name)] * 2
        assert started[2][2] == "sglang_router.launch_router"


def test_command_lines_of_kvsim_have_the_words_that_were_meant(tmp_path: Path) -> None:
    drawn = names()
    lines = [
        command_line("predict", {"model": x, "gpu": Path(x), "technique": "offload + kivi"})
        for x in drawn
    ]
    for name, words in zip(drawn, run_by_shell("\n".join(lines), tmp_path), strict=True):
        given = [f"--model={name}"] if name.startswith("-") else ["--model", name]
        path = str(Path(name))
        given += [f"--gpu={path}"] if path.startswith("-") else ["--gpu", path]
        assert words == ["kvsim", "predict", *given, "--technique", "offload + kivi"]


def test_containers_have_the_words_that_were_meant() -> None:
    plain: list[str] = []
    for name in ("NAME", *names()[:60]):
        asked = served("ngram:gamma=3,acceptance=0.5", model=name, gpu="4090", apart=(2, 1))
        found = [x for x in yaml.safe_load_all(emit("k8s", asked).text) if x]
        called = {x["metadata"]["name"] for x in found}
        assert len(called) == 2 and all(SERVICE.fullmatch(x) for x in called), called
        for deployment in found[::2]:
            (container,) = deployment["spec"]["template"]["spec"]["containers"]
            words = [expanded(word) for word in container["command"] + container["args"]]
            assert words[:3] == expected("vllm", name), name
            plain = plain or words[3:]
            assert words[3:5] == plain[:2]


def expanded(word: str) -> str:
    """What Kubernetes starts for a word, in a container without variables."""
    return re.sub(r"\$(\$)|\$(\([^)]*\))", lambda found: found[1] or "EXPANDED", word)


def test_python_yaml_and_json_read_back_what_was_written() -> None:
    for name in names():
        text = emit("hf", served("kivi:bits=2", model=name)).text
        (loaded,) = (
            node.args[0]
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_pretrained"
        )
        assert isinstance(loaded, ast.Constant) and loaded.value == name
        assert ast.literal_eval(write_python({"a": name, "b": 1})) == {"a": name, "b": 1}
        settings: dict[str, Setting | Mapping[str, Setting]] = {}
        settings |= {"model": name, "inner": {"draft": name, "share": 0.5, "used": True}}
        assert yaml.safe_load(write_yaml(settings)) == settings
        lines = emit("vllm", served("eagle:gamma=3", model=name, draft_model=("eagle", name))).text
        (config,) = shlex.split(lines.rpartition("--speculative-config ")[2])
        wanted = {"method": "eagle3", "model": name, "num_speculative_tokens": 3}
        assert json.loads(config) == wanted
    for word in ("true", "No", "null", "~", "1e3", "012", "", "y", "0x1f", "2026-11-23", "a: b"):
        assert yaml.safe_load(write_yaml({"x": word})) == {"x": word}
