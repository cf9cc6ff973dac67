"""What ``make.py docs`` builds the site from is there: pages of the navigation, objects, links."""

import re
from pkgutil import resolve_name
from typing import Any

import pytest

from tests.docs.blocks import ROOT, pages

yaml: Any = pytest.importorskip("yaml")

GENERATED = {"index.md", "contributing.md", "changelog.md", "techniques/index.md"}
OBJECT = re.compile(r"^::: (\S+)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def listed() -> list[str]:
    """Pages in the navigation of the site."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    return [page for section in nav for some in section.values() for page in some]


def test_navigation_has_every_page() -> None:
    written = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").glob("*.md")}
    assert set(listed()) == written | GENERATED | {"questions/index.md"}
    assert len(listed()) == len(set(listed()))


def test_documented_objects_exist() -> None:
    for name in OBJECT.findall((ROOT / "docs" / "api.md").read_text(encoding="utf-8")):
        resolve_name(name)


def test_links_lead_to_files() -> None:
    missing = set()
    for page in (*pages(), ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md"):
        text = page.read_text(encoding="utf-8")
        links = LINK.findall(re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL))
        missing |= {(page.name, link) for link in links if not (page.parent / link).exists()}
    assert missing == set()
