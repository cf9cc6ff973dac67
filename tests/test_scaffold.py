"""What `make.py new-technique` writes runs at once, and its tests say what to fill in."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.places import ROOT

NAME = "my-technique"


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
    make().new_technique(NAME, target)
    return target


def python(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python that imports the copy."""
    environment = os.environ | {"PYTHONPATH": str(copy)}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "command",
    [
        f"predict --model llama3-8b --gpu h100 --technique {NAME}:budget=100 --batch 4",
        f"plan --model llama3-8b --gpu h100 --only {NAME},full --lossy --offline",
        f"simulate --trace sample:chat --model llama3-8b --gpu h100 --technique {NAME}",
        f"validate --model smollm2-135m --layers 2 --techniques {NAME} --prompt 40 --generate 4",
    ],
)
def test_every_command_knows_it(command: str, copy: Path) -> None:
    done = python(copy, "-m", "kvsim", *command.split())
    assert done.returncode == 0, done.stderr
    assert NAME in done.stdout


def test_contract_and_counts_take_it_up_and_its_tests_say_what_is_missing(copy: Path) -> None:
    tests = ["tests/techniques/test_contract.py", "tests/validate/test_impl_counts.py"]
    chosen = ["-k", f"{NAME} and (MHA or llama or cites)"]
    done = python(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, *chosen)
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
    done = python(copy, *tests, "-k", "example-48g or my-engine or distinct_names")
    assert done.returncode == 0, done.stdout


def test_names_that_are_none_and_names_that_are_taken() -> None:
    for name, said in (("My technique", "lower-case"), ("kivi", "there already")):
        with pytest.raises(SystemExit, match=said):
            make().new_technique(name)
