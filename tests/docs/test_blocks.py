"""Every command of README and docs runs as printed, and prints what the page shows."""

from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, blocks, pages, played, steady

WITH_COMMANDS = [page for page in pages() if any(block.commands for block in blocks(page))]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_runs_as_printed(page: Path) -> None:
    for block, printed in played(page):
        if block.language == "console":
            assert steady(block.text) == steady(printed)


def test_questions_are_answered_in_the_first_sixty_words() -> None:
    for name, wanted in ANSWERS.items():
        page = ROOT / "docs" / "questions" / f"{name}.md"
        (block, *_) = [block for block in blocks(page) if block.language == "console"]
        said = " ".join(" ".join(block.text.splitlines()[1:]).split())
        first = " ".join(said.split()[:90])  # a title of at most 30 words stands above the answer
        assert all(word in first for word in wanted), (name, first)


ANSWERS = {
    "long-context": ("on rtx4090 with int4 weights", "TPOT", "Full KV does not fit"),
    "offload": ("Stay with full KV", "slower", "host-to-GPU link"),
    "quantised-cache": ("full KV's", "saves", "of GPU memory"),
    "speculation": ("faster than full up to batch", "slower from"),
    "recompute-or-load": ("kvpr is fastest", "host-to-GPU link"),
    "accuracy": ("Nothing was measured on h100", "nearest card"),
    "how-many-gpus": ("Rent", "per hour"),
    "max-num-seqs": ("sequences at once", "Targets kept"),
    "kv-pool": ("KV tokens", "such sequences fit"),
    "huggingface": ("offload on h100", "TPOT"),
    "cheapest-gpu": ("Rent", "per hour"),
    "quality": ("It loses", "relative"),
    "tensor-parallel": ("Run full KV on h100", "output tok/s"),
    "longest-context": ("Longest prompt:", "tokens"),
    "engine-flags": ("Run full KV on",),
    "prefix-tier": ("of prompt tokens come from the prefix cache", "TTFT p99"),
}
"""What the first words of each page's answer must say."""
