"""Every command of README and docs runs as printed, and prints what the page shows."""

from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, blocks, pages, played, steady

WITH_COMMANDS = [
    page
    for page in pages()
    if any(block.commands or block.language == "python" for block in blocks(page))
]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_runs_as_printed(page: Path) -> None:
    for block, printed in played(page):
        if block.language == "console":
            assert steady(block.text) == steady(printed)
