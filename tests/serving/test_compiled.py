"""Compiled functions: what Python may call, and what is kept on disk between versions."""

import importlib.util
import pickle
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import pytest

from kvsim.serving import compiled
from kvsim.serving.compiled import prepare
from kvsim.serving.growth import blocks_of
from kvsim.serving.records import Limits, make

SOURCE = """
from kvsim.serving.compiled import entry

@entry
def twice(number: int) -> int:
    return 2 * number
"""


def loaded(place: Path) -> ModuleType:
    """A file as a module of its own, as a new process would have it."""
    spec = importlib.util.spec_from_file_location("kept", place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_python_is_refused_what_has_no_way_in_for_it() -> None:
    with pytest.raises(TypeError, match="No matching definition"):
        blocks_of(make(Limits, 1, block_tokens=16)[0], 3.0)


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
    prepare(first.twice, dict)
    assert first.twice(4) == 8 and first.twice.stats.cache_misses
    (index,) = tmp_path.rglob("*.nbi")
    index.write_bytes(pickle.dumps(numba.__version__) + damage)
    again = loaded(place)
    prepare(again.twice, dict)
    assert again.twice(4) == 8
    third = loaded(place)
    prepare(third.twice, dict)
    assert third.twice(4) == 8 and third.twice.stats.cache_hits


def test_without_a_place_to_keep_it_code_is_compiled_each_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names: dict[str, Any] = {}
    exec(SOURCE, names)  # a function of no file
    compiled._announce.cache_clear()
    prepare(names["twice"], dict)
    assert names["twice"](4) == 8
    said = capsys.readouterr().err
    assert said.startswith("kvsim: compiling the serving simulator, in every run")
    assert "NUMBA_CACHE_DIR" in said and said.count("\n") == 1
