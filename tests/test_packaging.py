"""What is installed: one name, all modules, all data, and no more than the requirements say."""

import ast
import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import kvsim
from kvsim.techniques import TECHNIQUES
from make import join_changes, list_components

ROOT = Path(__file__).parents[1]
ROOMS = {"planner", "validate", "traces", "hwprofiles", "cli"}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def build(folder: Path, kind: str) -> Path:
    """The wheel or the sdist of this checkout, from a copy: an old build/ here cannot slip in."""
    if find_spec("build") is None:
        pytest.skip("needs build, of the extra `test`")
    copy = folder / "source"
    skipped = shutil.ignore_patterns(
        ".venv*", ".git", ".*_cache", ".hypothesis", "build", "dist", "*.egg-info", "__pycache__"
    )
    shutil.copytree(ROOT, copy, symlinks=True, ignore=skipped)
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", ".."]
    built = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout[-4000:] + built.stderr[-4000:]
    (path,) = folder.glob("kvsim-*.*")
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build(tmp_path_factory.mktemp("wheel"), "wheel"))


def installed(wheel: zipfile.ZipFile) -> set[str]:
    """Files of the wheel, without its *.dist-info."""
    return {name for name in wheel.namelist() if ".dist-info/" not in name}


def name_of(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def test_kvsim_is_the_only_name_installed(wheel: zipfile.ZipFile) -> None:
    assert {name.split("/")[0] for name in installed(wheel)} == {"kvsim"}


def test_wheel_has_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "kvsim"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    if not listed:
        pytest.skip("needs the repository")
    left_out = {f for f in set(listed) - installed(wheel) if (ROOT / f).is_file()}
    assert not left_out - {"kvsim/serving/README.md"}


def test_sdist_can_be_tested(tmp_path: Path) -> None:
    """All that the tests read is in it, and those of engine and planner pass in it."""
    path = build(tmp_path, "sdist")
    with tarfile.open(path) as file:
        file.extractall(tmp_path / "sdist", filter="data")
    (source,) = (tmp_path / "sdist").iterdir()
    wanted = {
        *("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md", "cli.py", "make.py"),
        *("CITATION.cff", "mkdocs.yml", "requirements.txt", "requirements-test.txt"),
        *(
            "docs/start.md",
            "benchmarks/mutants.py",
            "tests/conftest.py",
            "tests/support/left_out.py",
        ),
    }
    assert not [name for name in wanted if not (source / name).is_file()]
    assert not [p for p in source.rglob("*") if p.is_symlink() or p.name == "__pycache__"]
    assert_usable(source)


def test_a_checkout_without_symbolic_links_works(tmp_path: Path) -> None:
    """As on Windows, or in a ZIP: links are files that hold their target's name."""
    cloned = subprocess.run(
        ["git", "clone", "-q", "-c", "core.symlinks=false", str(ROOT), str(tmp_path / "clone")],
        capture_output=True,
        text=True,
        check=False,
    )
    if cloned.returncode:
        pytest.skip("needs the repository")
    assert (tmp_path / "clone" / "planner").read_text() == "kvsim/planner"
    assert_usable(tmp_path / "clone")


def assert_usable(source: Path) -> None:
    """It plans, passes what `make.py lint` runs, and the tests of engine and planner."""
    script = f"import runpy; print(runpy.run_path({str(source / 'make.py')!r})['LINT'])"
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout
    lint: list[list[str]] = ast.literal_eval(printed.decode())
    here = {**os.environ, "PYTHONPATH": str(source)}
    for arguments in (
        ["-c", f"import kvsim; assert kvsim.__file__.startswith({str(source)!r})"],
        ["-m", "kvsim", "plan", "--model", "llama2-7b", "--gpu", "a6000"],
        *lint,
        ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/engine", "tests/planner"],
    ):
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=source, env=here, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (arguments, done.stdout[-3000:], done.stderr[-3000:])


def test_wheel_needs_no_torch(wheel: zipfile.ZipFile) -> None:
    (path,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    requires = HeaderParser().parsestr(wheel.read(path).decode()).get_all("Requires-Dist", [])
    always = {name_of(line) for line in requires if "extra ==" not in line}
    assert {"numpy", "pulp"} <= always
    assert not {name for name in always if name.startswith(("torch", "nvidia", "triton"))}


def test_requirements_pin_every_dependency(project: dict[str, Any]) -> None:
    extras = project["optional-dependencies"]
    hashed = (ROOT / "requirements.txt").read_text()
    for file, wanted in [
        ("requirements.txt", project["dependencies"]),
        ("requirements-test.txt", extras["test"]),
        ("requirements-docs.txt", extras["docs"]),
    ]:
        text = (ROOT / file).read_text() + hashed
        lines = [line for line in text.splitlines() if line and line[0] not in "# "]
        assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+( \\)?", line) for line in lines)
        assert {name_of(one) for one in wanted} <= {name_of(line) for line in lines}
    blocks = re.findall(r"^[a-z].*?(?=^[a-z]|\Z)", hashed, re.MULTILINE | re.DOTALL)
    assert all("--hash=sha256:" in block for block in blocks)


def test_version_is_the_same_everywhere(project: dict[str, Any]) -> None:
    assert kvsim.__version__ == project["version"]
    assert f"\nversion: {kvsim.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_readme_counts_the_techniques() -> None:
    assert f" {len(TECHNIQUES)} techniques " in (ROOT / "README.md").read_text().replace("\n", " ")


def test_changes_are_joined_below_their_version(tmp_path: Path) -> None:
    changes = tmp_path / "docs" / "changes"
    changes.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('version = "2.0"\n')
    log = tmp_path / "CHANGELOG.md"
    log.write_text("# Changelog\n\nWords.\n\n## 1.0\n\nThe first.\n\n### Fixed\n\n- Old.\n")
    rest = log.read_text().partition("## 1.0")[2]
    (changes / "README.md").write_text("How.\n")
    (changes / "b.md").write_text("It is\nquicker.\n")
    (changes / "a.md").write_text("### Fixed\n\n- A.\n- B.\n\n### Added\n\nNew.\n")
    join_changes(tmp_path)
    added = (
        "### Added\n\n- New.\n\n### Changed\n\n- It is\n  quicker.\n\n### Fixed\n\n- A.\n- B.\n\n"
    )
    assert log.read_text() == f"# Changelog\n\nWords.\n\n## 2.0\n\n{added}## 1.0{rest}"
    assert [p.name for p in changes.iterdir()] == ["README.md"]
    (changes / "c.md").write_text("### Fixed\n\n- C.\n")
    join_changes(tmp_path)
    added = added.replace("- B.\n", "- B.\n- C.\n")
    assert log.read_text() == f"# Changelog\n\nWords.\n\n## 2.0\n\n{added}## 1.0{rest}"


def test_rooms_are_reached_through_kvsim_only() -> None:
    for module in pkgutil.walk_packages(kvsim.__path__, "kvsim."):
        importlib.import_module(module.name)
    assert not ROOMS & set(sys.modules)


def test_the_bill_of_materials_has_every_pin_with_its_licence() -> None:
    def package(name: str, field: str = "License", *values: str) -> dict[str, list[str]]:
        fields = {key: list[str]() for key in ("License-Expression", "Classifier", "License")}
        return fields | {"Name": [name], "Version": ["1.2"], field: list(values)}

    installed = [
        package("Some_Thing", "License-Expression", "MIT"),
        package("other", "License", "BSD\n..."),
        package("third", "Classifier", "License :: OSI Approved :: Apache Software License"),
        package("tool"),
    ]
    pins = "# a note\nsome-thing==1.2\nother==1.2\nthird==1.2\n"
    found = list_components(installed, pins)
    named = {one["name"]: one["licenses"][0]["license"]["name"] for one in found["components"]}
    assert named == {"other": "BSD", "some-thing": "MIT", "third": "Apache Software License"}
    assert found["components"][1]["purl"] == "pkg:pypi/some-thing@1.2"
    with pytest.raises(SystemExit, match="not installed: fourth"):
        list_components(installed, pins + "fourth==2\n")
