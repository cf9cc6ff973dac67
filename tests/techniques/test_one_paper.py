"""A paper is one technique file and one implementation file."""

import re
from pathlib import Path

import pytest

from kvsim.techniques.notation import presets

ROOT = Path(__file__).parents[2]
LISTS = {
    "kvsim/report/colours.py",  # marks of pages; a name that it does not have gets one too
    "kvsim/validate/counts/compare.py",  # reasons of differences, where there are any
}


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


VARIANTS = {"eagle2": "eagle", "eagle3": "eagle", "p-eagle": "eagle", "gear-first": "gear"}


@pytest.mark.parametrize("name", presets())
def test_a_technique_has_its_papers_file(name: str) -> None:
    file = VARIANTS.get(name, name).replace("-", "_")
    assert presets()[name].__module__ == f"kvsim.techniques.papers.{file}"
