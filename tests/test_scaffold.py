"""What `make.py new-technique` writes runs at once, and its tests say what to fill in."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random
from types import ModuleType

import pytest

from tests.support.places import ROOT

NAME = "my-technique"
COMMANDS = (
    "predict --model llama3-8b --gpu h100 --technique {each} --batch 4 --report predict.html",
    "plan --model llama3-8b --gpu h100 --only {names},full --lossy --offline --report plan.html",
    "plan --model llama2-7b --gpu a6000 --batch 4 --lossy --report lossy.html",
    "simulate --trace sample:chat --model llama3-8b --gpu h100 --compare {each} --report s.html",
    "explore --model llama3-8b --gpu h100 --out explore.html",
    "sweep grid.toml --out grid --report sweep.html",
    "techniques --json",
)
GRID = """kind = "predict"
[grid]
model = ["llama3-8b"]
gpu = ["h100"]
technique = "all"
batch = [1, 8]
context = [1024]
"""
MANY = 40 if "KVSIM_ALL_TESTS" in os.environ else 2


def drawn_names() -> list[str]:
    """Names as people give them, the same in every run."""
    draw, letters = Random(32), "aeioubcdfgklmnprstvwxz"
    words = ("".join(draw.choices(letters, k=draw.randint(3, 9))) for _ in range(2 * MANY))
    return [
        NAME,
        *(
            "-".join(pair) if draw.random() < 0.3 else pair[0]
            for pair in zip(words, words, strict=False)
        ),
    ]


def make() -> ModuleType:
    """make.py as a module."""
    spec = importlib.util.spec_from_file_location("make", ROOT / "make.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout with a new technique in it."""
    target = tmp_path_factory.mktemp("checkout") / "kvsim"
    left = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".mypy_cache", ".*_cache", "site")
    shutil.copytree(ROOT, target, symlinks=True, ignore=left)
    for name in drawn_names():
        make().new_technique(name, target)
    (target / "grid.toml").write_text(GRID)
    return target


def python(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python that imports the copy."""
    environment = os.environ | {"PYTHONPATH": str(copy)}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, check=False
    )


def test_a_technique_is_three_files(copy: Path) -> None:
    before = {path.relative_to(ROOT) for path in (ROOT / "kvsim").rglob("*.py")}
    after = {path.relative_to(copy) for path in (copy / "kvsim").rglob("*.py")}
    assert len(after - before) == 2 * len(drawn_names())  # and a test of each


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split()[0])
def test_every_command_knows_them(command: str, copy: Path) -> None:
    names = drawn_names()
    each = ",".join(f"{name}:budget=100" for name in names)
    done = python(copy, "-m", "kvsim", *command.format(names=",".join(names), each=each).split())
    assert done.returncode == 0, done.stderr
    pages = [copy / word for word in command.split() if word.endswith(".html")]
    told = done.stdout + "".join(page.read_text() for page in pages)
    if "lossy.html" not in command:  # which names the best alternatives alone
        assert [name for name in names if name not in told] == []


def test_a_real_run_knows_it(copy: Path) -> None:
    asked = f"validate --model smollm2-135m --layers 2 --techniques {NAME} --prompt 40 --generate 4"
    done = python(copy, "-m", "kvsim", *asked.split())
    assert done.returncode == 0 and NAME in done.stdout, done.stderr


def test_the_tests_take_them_up_and_their_own_say_what_is_missing(copy: Path) -> None:
    tests = [
        "tests/techniques/test_contract.py",
        "tests/validate/test_impl_counts.py",
        "tests/validate/test_launches.py",
    ]
    chosen = " or ".join(drawn_names())
    done = python(
        copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests,
        "-k", f"({chosen}) and (MHA or llama or cites or dispatched)",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    others = [
        "tests/house", "tests/techniques/test_settings.py", "tests/techniques/test_one_paper.py",
        "tests/techniques/test_compositions.py::test_the_page_of_techniques_is_the_generated_one",
        "tests/quality/test_evidence.py", "tests/report/test_pages.py",
    ]  # fmt: skip
    done = python(
        copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", *others,
        "-k", "not browser and not printed",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    own = "tests/techniques/test_my_technique.py"
    done = python(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", own)
    assert "cite its paper" in done.stdout
    assert "by hand" in done.stdout
    assert "2 failed, 4 passed" in done.stdout


def test_the_profile_and_the_stack_of_the_page_are_all_it_takes(copy: Path) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    gpu, stack = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    profiles = copy / "kvsim" / "hwprofiles"
    (profiles / "example-48g.toml").write_text(gpu)
    (profiles / "stacks" / "my-engine.toml").write_text(stack)
    for path in ("example-48g.toml", "stacks/my-engine.toml"):
        done = python(copy, "-m", "kvsim", "doctor", f"kvsim/hwprofiles/{path}")
        assert done.returncode == 0, done.stdout
    asked = "predict --model llama3-8b --gpu example-48g --stack my-engine --technique full"
    assert python(copy, "-m", "kvsim", *asked.split()).returncode == 0
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/machines", "tests/doctor"]
    done = python(copy, *tests, "-k", "sound or no_more or distinct_names or no_fault")
    assert done.returncode == 0, done.stdout


def test_names_that_are_none_and_names_that_are_taken() -> None:
    for name, said in (
        ("My technique", "lower-case"),
        ("kivi", "there already"),
        ("place", "there already"),  # a piece, which has no file of its own
        ("lambda", "word of Python"),
        ("selection", "word of Python or of the files"),
    ):
        with pytest.raises(SystemExit, match=said):
            make().new_technique(name)
