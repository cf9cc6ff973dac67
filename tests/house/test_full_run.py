"""What the full run recorded is still there to be run."""

import json
import re
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import UNKNOWN
from tests.full_run import PARTS, RECORD, ROOT, count_passed, main
from tests.support.left_out import SLOW, left_out, unknown_names

TOO_OLD = 100  # commits since a part was run


def recorded() -> dict[str, Any]:
    rows: dict[str, Any] = json.loads(RECORD.read_text())
    return rows


def test_every_kind_that_was_run_is_still_collected() -> None:
    for part, row in recorded().items():
        assert part in PARTS, f"docs/full-run.json names {part}, which nothing runs"
        for kind in row["kinds"]:
            folder = ROOT / kind
            if folder.is_dir() and kind.startswith("tests"):
                some = folder.rglob("test_*.py") if kind != "tests" else folder.glob("test_*.py")
                assert any("def test_" in path.read_text() for path in some), kind
            else:
                assert folder.is_dir() or kind == part, f"{kind} is gone"


def test_a_part_that_was_not_run_for_long_is_named() -> None:
    for part, row in recorded().items():
        counted = subprocess.run(
            ["git", "rev-list", "--count", f"{row['commit']}..HEAD"], cwd=ROOT,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if counted.returncode == 0 and int(counted.stdout) > TOO_OLD:
            warnings.warn(f"{part} was last run {counted.stdout.strip()} commits ago", stacklevel=1)


def test_passed_tests_are_counted_by_folder(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    case = '<testcase classname="{}" name="x">{}</testcase>'
    cases = [
        ("tests.serving.test_core", ""), ("tests.serving.test_core", "<skipped/>"),
        ("tests.serving.test_lanes", ""), ("tests.test_api", ""), ("kvsim.graph", ""),
        ("tests.emit.test_emit", "<failure/>"),
    ]  # fmt: skip
    report.write_text(f"<testsuite>{''.join(case.format(*c) for c in cases)}</testsuite>")
    assert count_passed(report) == {"kvsim": 1, "tests": 1, "tests/serving": 2}


@pytest.mark.parametrize(
    "file", [".ci/run", "make.py", "benchmarks/mutants.py", "tests/full_run.py"]
)
def test_tests_that_a_script_names_are_there(file: str) -> None:
    found = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", (ROOT / file).read_text())
    assert found
    for path, function in found:
        assert f"def {function}" in (ROOT / path).read_text(), (path, function)


def test_tests_that_are_left_out_by_name_are_there(request: pytest.FixtureRequest) -> None:
    """All of them, where all tests are collected; the cases of this one show how they are found."""
    if not request.config.getoption("lf", default=False):  # which collects some tests of a file
        assert request.config.stash[UNKNOWN] == []
    file, _, _ = SLOW[0].partition("::")
    others = [name for name in SLOW if name.startswith(f"{file}::")]
    assert unknown_names([f"{file}::test_other"], ["tests"]) == others
    assert unknown_names([f"{SLOW[0]}x]"], ["tests"]) == others[1:]
    assert unknown_names([f"{SLOW[0]}x]"], [SLOW[0]]) == []


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["everything"]) == 2
    assert "expected some of tests, slow, pages" in capsys.readouterr().err


def test_twenty_commits_run_all_that_a_quick_run_leaves_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("KVSIM_ALL_TESTS", "KVSIM_LEFT_OUT", "KVSIM_TWENTIETH"):
        monkeypatch.delenv(name, raising=False)
    slow = "tests/robust/test_kills.py::test_stopped"
    names = [f"{slow}[{n}]" for n in range(40)]
    assert all(left_out(name, []) for name in names)
    seen: list[str] = []
    for number in range(842, 862):
        monkeypatch.setenv("KVSIM_TWENTIETH", str(number))
        seen += [name for name in names if not left_out(name, [])]
    assert sorted(seen) == sorted(names)
    monkeypatch.setenv("KVSIM_ALL_TESTS", "1")
    monkeypatch.setenv("KVSIM_LEFT_OUT", "1")
    assert not left_out(slow, []) and left_out("tests/test_api.py::test_one", [])
