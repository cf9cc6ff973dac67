"""A paper is one technique file and one implementation file."""

import re
from pathlib import Path

import pytest

from kvsim.techniques.registry import terms

ROOT = Path(__file__).parents[2]
NEW = (
    "quest", "pyramidkv", "duoattention", "shadowkv", "turboquant", "kvquant", "eagle", "mtp",
    "draft",
)  # fmt: skip
LISTS = {"kvsim/report/colours.py"}  # marks of pages; a name that it does not have gets one too


def naming(word: str) -> set[str]:
    """Files of the program that say a word, by path."""
    files = (ROOT / "kvsim").rglob("*.py")
    found = re.compile(rf"\b{word}\b", re.IGNORECASE)
    return {
        path.relative_to(ROOT).as_posix()
        for path in files
        if found.search(path.read_text(encoding="utf-8"))
    }


def test_quest_is_two_files() -> None:
    assert naming("quest") - LISTS == {
        "kvsim/techniques/papers/quest.py",
        "kvsim/validate/techniques/quest.py",
    }


@pytest.mark.parametrize("name", NEW)
def test_a_new_preset_is_two_files(name: str) -> None:
    assert name in terms()
    for path in (ROOT / "kvsim/techniques/papers", ROOT / "kvsim/validate/techniques"):
        assert (path / f"{name}.py").is_file()
