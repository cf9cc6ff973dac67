"""The compiled core: what Python shares with it, and what is kept on disk between versions."""

import importlib.util
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numba
import numpy as np
import pytest

import kvsim
from kvsim.serving import core
from kvsim.serving.core import jit_entry

SOURCE = """
from typing import Any, NamedTuple
from kvsim.serving.core import jit_entry

class Given(NamedTuple):
    numbers: Any

@jit_entry
def twice(given: Given) -> float:
    return 2 * given.numbers[1]
"""


class Inner(NamedTuple):
    """A tuple in a tuple."""

    cube: Any
    ratio: float


class Outer(NamedTuple):
    """One of everything that compiled code takes."""

    inner: Inner
    records: Any
    record: Any
    number: int
    there: bool
    nothing: None = None


@jit_entry
def work(given: Any, numbers: Any) -> Any:
    """Read and write in every way there is."""
    plane = given.inner.cube[1]
    numbers[0] = given.inner.cube[1, 2, 3] + plane[2][3]
    numbers[1] = given.inner.ratio * given.number * given.there
    numbers[2] = given.record.size + given.records.size + given.records[1].parts[2]
    given.records[0] = given.records[1]
    given.records[1].parts[0] += 0.5
    given.record.size = -7
    return numbers.size


def test_compiled_code_reads_and_writes_what_python_has() -> None:
    kind = np.dtype([("size", "i4"), ("parts", "f8", (3,)), ("flag", "?")], align=True)
    records = np.zeros(2, kind)
    records["parts"] = [[1, 2, 3], [4, 5, 6]]
    records["flag"] = [False, True]
    cube = np.arange(24.0).reshape(2, 3, 4)
    alone = np.zeros(1, kind)
    given, numbers = Outer(Inner(cube, 0.5), records, alone[0], 6, True), np.zeros(3)
    assert work(given, numbers) == 3
    assert numbers.tolist() == [23 + 23, 3.0, 0 + 2 + 6]
    assert records["parts"].tolist() == [[4, 5, 6], [4.5, 5, 6]]
    assert records["flag"].tolist() == [True, True]
    assert alone["size"] == -7


def test_what_does_not_lie_row_behind_row_is_refused() -> None:
    with pytest.raises(AssertionError, match="one behind the other"):
        work(np.zeros((4, 4))[:, :2], np.zeros(3))


def loaded(place: Path) -> ModuleType:
    """A file as a module of its own, as a new process would have it."""
    spec = importlib.util.spec_from_file_location("kept", place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kept"] = module
    spec.loader.exec_module(module)
    return module


def twice(module: ModuleType) -> float:
    found: float = module.twice(module.Given(np.array([3.0, 4.0])))
    return found


@pytest.mark.parametrize(
    "damage", [b"", b"\x80\x05cut", b"ckvsim.serving.spend\nAClassOfLongAgo\n.", b"cgone\nGone\n."]
)
def test_what_another_version_kept_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    place = tmp_path / "kept.py"
    place.write_text(SOURCE)
    first = loaded(place)
    assert twice(first) == 8 and first.twice.dispatcher.stats.cache_misses
    (index,) = tmp_path.rglob("*.nbi")
    index.write_bytes(pickle.dumps(numba.__version__) + damage)
    assert twice(loaded(place)) == 8
    third = loaded(place)
    assert twice(third) == 8 and third.twice.dispatcher.stats.cache_hits


def test_without_a_place_to_keep_it_code_is_compiled_each_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "_announced", [])
    names: dict[str, Any] = {}
    exec(SOURCE, names)  # a function of no file
    assert names["twice"](names["Given"](np.array([3.0, 4.0]))) == 8
    said = capsys.readouterr().err
    assert said.startswith("kvsim: compiling the serving simulator in every run")
    assert "NUMBA_CACHE_DIR" in said and said.count("\n") == 1


def test_an_edit_of_any_serving_file_is_seen(tmp_path: Path) -> None:
    """A longer wait is read from the tables by the next process, whatever was kept before."""
    source = Path(kvsim.__file__).parent
    copy = tmp_path / "kvsim"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    script = (
        "from kvsim.serving.costs import pass_seconds\n"
        "from tests.support.served import tables_of\n"
        "import kvsim; print(kvsim.__file__)\n"
        "print(pass_seconds(tables_of('full', 8, 128, 'chunked').tables, [100, 100]))"
    )

    def seconds() -> float:
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        place, found = done.stdout.split()
        assert place.startswith(str(tmp_path))
        return float(found)

    (tmp_path / "tests").symlink_to(source.parent / "tests")
    before = seconds()
    assert seconds() == before
    edited = copy / "serving" / "costs.py"
    text = edited.read_text()
    line = "cost[k] += (1 - above) * values[node, k] + above * values[node + 1, k]"
    assert line in text
    edited.write_text(text.replace(line, line.replace("(1 - above)", "2 * (1 - above)")))
    assert seconds() > before
