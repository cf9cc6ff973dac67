"""Phrases that stopped a native reader do not come back into docs, help, messages or docstrings."""

import re

from tests.house.test_house import sources
from tests.support.places import ROOT

OLD = re.compile(
    r"told apart|taken up\b|\bnobody\b|leave it away|left away|teeth of a saw|evidence any more"
    r"|^\s*\"\"\"As set\.|\bBe served next|\bStay with full|Taken for granted|none is of mine"
    r"|\bbrings? no(thing)?\b|would carry|that is quantised so|\bhanded over at\b"
    r"|shapes that no fit saw, ",
    re.MULTILINE,
)
PAGES = ("README.md", "CONTRIBUTING.md", "make.py")


def test_old_phrases_do_not_come_back() -> None:
    files = [ROOT / path for path in (*sources(), *PAGES)]
    files += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "kvsim/hwprofiles").rglob("*.toml")]
    found = {
        f"{path.relative_to(ROOT)}: {match[0].strip()}"
        for path in files
        for match in OLD.finditer(path.read_text("utf-8"))
    }
    assert found == set()
