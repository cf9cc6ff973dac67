"""What is installed: one name, all modules, all data, and no more than the requirements say."""

import importlib
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import HeaderParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import kvsim

ROOT = Path(__file__).parents[1]
ROOMS = {"planner", "validate", "traces", "hwprofiles", "cli"}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of this checkout, built from a copy: an old build/ here cannot slip in."""
    if find_spec("build") is None:
        pytest.skip("needs build, of the extra `test`")
    copy = tmp_path_factory.mktemp("wheel") / "source"
    skipped = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=skipped)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", ".."]
    built = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout[-4000:] + built.stderr[-4000:]
    (path,) = copy.parent.glob("*.whl")
    return zipfile.ZipFile(path)


def installed(wheel: zipfile.ZipFile) -> set[str]:
    """Files of the wheel, without its *.dist-info."""
    return {name for name in wheel.namelist() if ".dist-info/" not in name}


def under(folder: str, pattern: str) -> set[str]:
    """Files of this checkout that fit, by the path they have when installed."""
    return {f"kvsim/{path.relative_to(ROOT / folder)}" for path in (ROOT / folder).glob(pattern)}


def name_of(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def test_kvsim_is_the_only_name_installed(wheel: zipfile.ZipFile) -> None:
    assert {name.split("/")[0] for name in installed(wheel)} == {"kvsim"}


def test_wheel_has_every_module(wheel: zipfile.ZipFile) -> None:
    expected = under("kvsim", "**/*.py")
    assert {"kvsim/cli/app.py", "kvsim/planner/__init__.py"} <= expected
    assert {name for name in installed(wheel) if name.endswith(".py")} == expected


def test_wheel_has_the_data(wheel: zipfile.ZipFile) -> None:
    for folder, pattern in [
        ("kvsim", "py.typed"),
        ("kvsim", "models/catalogue/*.json"),
        ("kvsim", "hwprofiles/*.toml"),
        ("kvsim", "hwprofiles/stacks/*.toml"),
        ("kvsim", "traces/samples/*"),
    ]:
        expected = under(folder, pattern)
        assert expected, f"no {folder}/{pattern} in this checkout"
        assert expected <= installed(wheel)


def test_wheel_needs_no_torch(wheel: zipfile.ZipFile) -> None:
    (path,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    requires = HeaderParser().parsestr(wheel.read(path).decode()).get_all("Requires-Dist", [])
    always = {name_of(line) for line in requires if "extra ==" not in line}
    assert {"numpy", "pulp"} <= always
    assert not {name for name in always if name.startswith(("torch", "nvidia", "triton"))}


def test_requirements_pin_every_dependency(project: dict[str, Any]) -> None:
    extras = project["optional-dependencies"]
    for file, wanted in [
        ("requirements.txt", project["dependencies"]),
        ("requirements-test.txt", extras["test"]),
        ("requirements-docs.txt", extras["docs"]),
    ]:
        text = (ROOT / file).read_text() + (ROOT / "requirements.txt").read_text()
        lines = [line for line in text.splitlines() if line and line[0] not in "#-"]
        assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", line) for line in lines)
        assert {name_of(one) for one in wanted} <= {name_of(line) for line in lines}


def test_version_is_the_same_everywhere(project: dict[str, Any]) -> None:
    assert kvsim.__version__ == project["version"]


def test_rooms_are_reached_through_kvsim_only() -> None:
    for module in pkgutil.walk_packages(kvsim.__path__, "kvsim."):
        importlib.import_module(module.name)
    assert not ROOMS & set(sys.modules)
