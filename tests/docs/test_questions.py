"""The questions of docs/questions: figures in the first sixty words.

The pages' commands are run, and their output compared, by ``test_blocks``. Here the answers are
held to what they must say, and their figures to first principles: bytes over bandwidths, card
prices, the ledger, arithmetic between the figures.
"""

import re
from collections.abc import Callable

import pytest

import kvsim
from kvsim.machines.profiles import load_hardware
from kvsim.traces.read import load
from tests.docs.blocks import ROOT, blocks

GIB = 2**30
LLAMA3_TOKEN = 2 * 32 * 8 * 128 * 2  # keys and values of 32 layers, 8 KV heads of 128, fp16 [B]
LLAMA3_WEIGHTS = 8.03e9 * 2  # [B]


def answer(page: str, command: int = -1) -> str:
    """The answer's paragraph on a page, without the title above it."""
    (block, *_) = [
        b for b in blocks(ROOT / "docs" / "questions" / f"{page}.md") if b.language == "console"
    ]
    shown = block.text.split("$ ")[command].split("\n\n")[0].splitlines()[1:]
    starts = [i for i, line in enumerate(shown) if line.startswith(STARTS)]
    return " ".join(" ".join(shown[starts[0] if starts else 0 :]).split())


STARTS = ("Run ", "The best is ", "Full KV is ", "A host tier ", "Loading ", "At ", "On ", "Rent ",
          "full on", "offload", "kivi", "kvpr", "quantspec", "Full KV")  # fmt: skip


def figure(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, (pattern, text)
    return float(found[1].replace(",", ""))


def offload(text: str) -> None:
    moved = 8 * 8064 * LLAMA3_TOKEN / 26e9  # the whole cache over PCIe 4.0 for every token [s]
    full = figure(r"TPOT ([\d.]+) ms", text) / 1e3
    assert figure(r"offload is ([\d.]+)x slower", text) == pytest.approx(moved / full, rel=0.25)


def fleet(text: str) -> None:
    requests = load("sample:chat").requests
    count = int(figure(r"Rent (\d+) x l40s", text))
    cost = count * float(load_hardware("l40s").price or 0.0)
    hourly = requests.generate.sum() / requests.duration * 3600
    assert figure(r"\$([\d.]+) per hour", text) == pytest.approx(cost, rel=5e-3)
    million = cost / hourly * 1e6
    assert figure(r"\$([\d.]+) per million", text) == pytest.approx(million, rel=0.15)
    rate = len(requests) / requests.duration
    assert figure(r"requests, ([\d.]+) per second", text) == pytest.approx(rate, rel=5e-3)


def at_load(text: str) -> None:
    *held, pool = [float(x) for x in re.findall(r"([\d.]+) GiB", text)]
    shares = [float(x) for x in re.findall(r"(\d+) %", text)]
    assert held and held == sorted(held)
    assert shares == [pytest.approx(100 * size / pool, abs=0.6) for size in held]


def pool(text: str) -> None:
    tokens = figure(r"memory: ([\d,]+) tokens", text)
    sampled = 256 * 128256 * 30  # logits of vLLM's largest pass, which it keeps free [B]
    free = 0.9 * load_hardware("a10").gpu_memory - LLAMA3_WEIGHTS - sampled - 0.5 * GIB
    assert 0.97 < tokens * LLAMA3_TOKEN / free <= 1
    assert figure(r"([\d,]+) blocks", text) == tokens // 16
    assert figure(r"([\d.]+) sequences\.", text) == pytest.approx(tokens / 8128, rel=2e-3)


def cards(text: str) -> None:
    held = (LLAMA3_WEIGHTS + figure(r"batch (\d+):", text) * 33_000 * LLAMA3_TOKEN) / GIB
    assert figure(r"([\d.]+) of 80.0 GiB", text) == pytest.approx(held, rel=0.04)
    mine, other = (
        figure(p, text) for p in (r"([\d.]+) output tok/s,", r"batch \d+, ([\d.]+) output tok/s, 0")
    )
    assert figure(r"tok/s, (0\.\d+)x that", text) == pytest.approx(other / mine, rel=5e-3)


def longest(text: str) -> None:
    most = int(figure(r"Longest prompt: ([\d,]+) tokens", text))
    usable = 0.9 * load_hardware("rtx4090").gpu_memory
    needed = [
        float(kvsim.predict("qwen2.5-7b", "rtx4090", prompt=most + more).rows[0]["gpu_bytes"])
        for more in (0, 1)
    ]
    assert needed[0] <= usable < needed[1]


ANSWERS: dict[str, Callable[[str], None]] = {
    "offload": offload,
    "how-many-gpus": fleet,
    "cheapest-gpu": fleet,
    "memory-at-load": at_load,
    "kv-pool": pool,
    "host-or-larger-card": cards,
    "longest-context": longest,
}
"""What the figures in the first sixty words of a page are held to."""


@pytest.mark.parametrize("page", ANSWERS)
def test_figures_follow_from_first_principles(page: str) -> None:
    ANSWERS[page](" ".join(answer(page).split()[:60]))


def test_every_question_has_its_page() -> None:
    folder = ROOT / "docs" / "questions"
    pages = {page.stem for page in folder.glob("*.md")} - {"index"}
    assert len(pages) >= 21 and ANSWERS.keys() <= pages
    index = (folder / "index.md").read_text()
    assert all(f"({page}.md)" in index for page in pages)
