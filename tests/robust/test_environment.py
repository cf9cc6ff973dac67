"""Other homes, languages, limits, full disks and readers that go away."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.robust.cases import WHERE
from tests.robust.runner import execute, preload

PREDICT = ("predict", *WHERE, "--technique", "full", "--json")
MANY = ("--rate", "100", "--requests", "200000")


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    preload()


def spawned(*arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """A process of its own, where the interpreter's start matters."""
    command = [sys.executable, "-m", "kvsim", *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, check=False, **options)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    try:
        done = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except OSError:
        done = False
    if not done:
        pytest.skip("a small disk can only be mounted by root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_named_and_left_as_it_was(small_disk: Path, tmp_path: Path) -> None:
    for name in ("out.csv", "out.parquet", "out.jsonl.gz"):
        (small_disk / name).write_text("before")
        ended = execute(("traces", "generate", str(small_disk / name), *MANY), tmp_path)
        assert ended.code == 2 and not ended.out, ended
        assert "disk full" in ended.err and ended.err.count("\n") == 1
        assert (small_disk / name).read_text() == "before"
        assert not list(small_disk.glob(".kvsim-*"))
    ended = execute(
        ("predict", *WHERE, "--technique", "full", "--report", str(small_disk / "page.html")),
        tmp_path,
    )
    assert ended.code in (0, 2) and "Traceback" not in ended.err


def test_files_may_not_grow_beyond_a_limit(tmp_path: Path) -> None:
    ended = execute(
        ("traces", "generate", "out.csv", *MANY), tmp_path, limits={resource.RLIMIT_FSIZE: 50_000}
    )
    assert ended.code == 2 and "larger than allowed" in ended.err
    assert not list(tmp_path.glob("*out*")) and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    "environment",
    [
        {"HOME": None},
        {"HOME": "/nowhere", "XDG_CACHE_HOME": "/nowhere"},
        {"HOME": "/proc", "TMPDIR": "/proc"},
        {"COLUMNS": "10"},
        {"KVSIM_FILE_LIMITS": ""},
        {"TZ": "Asia/Kathmandu"},
    ],
)
def test_the_answer_is_the_same_anywhere(
    environment: dict[str, str | None], tmp_path: Path
) -> None:
    usual = execute(PREDICT, tmp_path)
    assert usual.code == 0 and usual.err == ""
    there = execute(PREDICT, tmp_path, environment)
    assert (there.code, there.out, there.err) == (0, usual.out, "")


def test_the_answer_has_the_same_bytes_in_any_language_and_hash(tmp_path: Path) -> None:
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHON"))}
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    found = {
        spawned(*PREDICT, env=plain | path | more, stdout=subprocess.PIPE).stdout
        for more in (
            {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
            {"PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1"},
            {"PYTHONHASHSEED": "2", "OMP_NUM_THREADS": "2", "PYTHONIOENCODING": "ascii"},
        )
    }
    assert len(found) == 1 and found.pop().startswith(b"[")


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    ends, writes = os.pipe()
    os.close(ends)
    ended = spawned("models", "--json", stdout=writes)
    os.close(writes)
    assert ended.returncode == 141 and ended.stderr == b""


def test_a_closed_or_full_output_is_no_fault() -> None:
    closed = spawned("models", preexec_fn=lambda: os.close(1))
    assert closed.returncode == 0 and closed.stderr == b""
    with Path("/dev/full").open("wb") as full:
        ended = spawned("models", stdout=full)
    assert ended.returncode == 2 and ended.stderr.count(b"\n") == 1
    assert b"No space left" in ended.stderr


def test_two_writers_of_one_file_leave_one_of_both_whole(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvsim", "traces", "generate", "out.csv", *MANY, "--seed"]
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment = os.environ | path
    both = [
        subprocess.Popen([*command, seed], cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
        for seed in "12"
    ]
    assert [process.wait() for process in both] == [0, 0]
    written = (tmp_path / "out.csv").read_bytes()
    wholes = []
    for seed in "12":
        alone = tmp_path / f"{seed}.csv"
        execute(("traces", "generate", alone.name, *MANY, "--seed", seed), tmp_path)
        wholes.append(alone.read_bytes())
    assert written in wholes and wholes[0] != wholes[1]
    assert not list(tmp_path.glob(".kvsim-*"))
