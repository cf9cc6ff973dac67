"""The questions of docs/questions: one command each, right in the first sixty words.

The pages' commands are run, and their output compared, by ``test_blocks``. Here the answers are
held to what they must say, and their figures to first principles: bytes over bandwidths, card
prices, the ledger, arithmetic between the figures.
"""

import re
from collections.abc import Callable

import pytest

import kvsim
from kvsim.evidence.ledger import shipped
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


STARTS = ("Run ", "Best is ", "Full KV is ", "A host tier ", "Loading ", "At ", "On ", "Rent ",
          "full on", "offload", "kivi", "kvpr", "quantspec", "Full KV")  # fmt: skip


def figure(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, (pattern, text)
    return float(found[1].replace(",", ""))


def tokens_of(generate: int) -> Callable[[str], None]:
    """Tokens and requests per second tell the same, and the stretch is above what is kept."""

    def check(text: str) -> None:
        rate = figure(r"([\d.]+) requests/s", text)
        assert figure(r"\(([\d.,]+) output tok/s", text) == pytest.approx(rate * generate, rel=0.02)
        if "If predictions were exact" in text:
            assert figure(r"exact: ([\d.]+) requests/s", text) > rate

    return check


def offload(text: str) -> None:
    moved = 8 * 8064 * LLAMA3_TOKEN / 26e9  # the whole cache over PCIe 4.0 for every token [s]
    full = figure(r"TPOT ([\d.]+) ms", text) / 1e3
    assert figure(r"offload is ([\d.]+)x slower", text) == pytest.approx(moved / full, rel=0.25)


def quantised(text: str) -> None:
    full = 16 * 16128 * LLAMA3_TOKEN / GIB
    assert figure(r"saves ([\d.]+) GiB", text) == pytest.approx(full / 2, rel=0.02)
    assert 1 < figure(r"([\d.]+)x full", text) < 2


def speculation(text: str) -> None:
    ahead, behind = (int(figure(p, text)) for p in (r"between batch (\d+) and", r"and (\d+): "))
    found = kvsim.predict(
        "llama2-7b", "a100-80g", "full,quantspec", batch=[ahead, behind], prompt=128, generate=64
    ).rows
    full, quantspec = (
        [r["decode_tok_s"] for r in found if r["technique"] == t] for t in ("full", "quantspec")
    )
    assert quantspec[0] > full[0] and quantspec[1] < full[1]


def active_cache(text: str) -> None:
    rows = kvsim.predict("llama2-7b", "a6000", "offload,kvpr", batch=32, prompt="4k").rows
    assert figure(r"([\d.]+) decode tok/s", text) == pytest.approx(
        max(row["decode_tok_s"] for row in rows), rel=5e-3
    )


def prefix_load(text: str) -> None:
    load_s, recompute_s = (figure(rf"([\d.]+) s with {w}", text) for w in ("load", "recompute"))
    assert load_s < 0.95 * recompute_s


def accuracy(text: str) -> None:
    entries = [
        e for e in shipped() if (e.engine, e.device, e.technique) == ("trtllm", "h100", "full")
    ]
    assert 0 < figure(r"off by ([\d.]+) %", text) < 45
    assert 0 < figure(r"on ([\d,]+) numbers", text) <= sum(entry.rows for entry in entries)


def fleet(text: str) -> None:
    requests = load("sample:chat").requests
    count = int(figure(r"Rent (\d+) x l40s", text))
    cost = count * float(load_hardware("l40s").price or 0.0)
    hourly = requests.generate.sum() / requests.duration * 3600
    assert figure(r"\$([\d.]+) per hour", text) == pytest.approx(cost, rel=5e-3)
    million = cost / hourly * 1e6
    assert figure(r"\$([\d.]+) per million", text) == pytest.approx(million, rel=0.15)
    rate = len(requests) / requests.duration
    assert figure(r"([\d.]+) requests per second", text) == pytest.approx(rate, rel=5e-3)


def at_load(text: str) -> None:
    held = [float(x) for x in re.findall(r"([\d.]+) GiB", text)]
    shares = [float(x) for x in re.findall(r"(\d+) %", text)]
    assert held[:3] == sorted(held[:3]) and len(held) == 4
    assert shares == [pytest.approx(100 * size / held[3], abs=0.6) for size in held[:3]]


def pool(text: str) -> None:
    tokens = figure(r"memory: ([\d,]+) tokens", text)
    sampled = 256 * 128256 * 30  # logits of vLLM's largest pass, which it keeps free [B]
    free = 0.9 * load_hardware("a10").gpu_memory - LLAMA3_WEIGHTS - sampled - 0.5 * GIB
    assert 0.97 < tokens * LLAMA3_TOKEN / free <= 1
    assert figure(r"([\d,]+) blocks", text) == tokens // 16
    assert figure(r"([\d.]+) sequences\.", text) == pytest.approx(tokens / 8128, rel=2e-3)


def cards(text: str) -> None:
    held = (LLAMA3_WEIGHTS + figure(r"batch (\d+):", text) * 33_000 * LLAMA3_TOKEN) / GIB
    assert figure(r"([\d.]+) GiB of 80", text) == pytest.approx(held, rel=0.04)
    mine, other = (
        figure(p, text) for p in (r"([\d.]+) output tok/s,", r": ([\d.]+) output tok/s, 0")
    )
    assert figure(r"tok/s, (0\.\d+)x that", text) == pytest.approx(other / mine, rel=5e-3)


def transformers(text: str) -> None:
    assert figure(r"([\d.]+) decode tok/s", text) == pytest.approx(12, rel=0.25)  # as users report


def longest(text: str) -> None:
    most = int(figure(r"Longest prompt: ([\d,]+) tokens", text))
    fits = [
        kvsim.predict("qwen2.5-7b", "rtx4090", prompt=most + more).rows[0]["fits"]
        for more in (0, 1)
    ]
    assert fits == [True, False]


def flags(text: str) -> None:
    assert 4000 + 128 <= figure(r"--max-model-len (\d+)", text) <= 131_072
    assert figure(r"--max-num-seqs (\d+)", text) >= 1


def log(text: str) -> None:
    after, before = re.findall(r"Statistics are ([\d.]+) % off .* \(before: ([\d.]+) %\)", text)[0]
    assert float(after) <= float(before)


def too_large(text: str) -> None:
    assert figure(r"needs ([\d.]+) GiB", text) == pytest.approx(32.76e9 * 2 / GIB, rel=0.05)
    assert figure(r"--tp 2 \(TPOT ([\d.]+) ms", text) > 65.5e9 / 2 / 1.555e12 * 1e3


def tier(text: str) -> None:
    took = [float(x) for x in re.findall(r"([\d.]+) s\b", text)]
    gain = figure(r"mean TTFT by (\d+) %", text)
    assert took == sorted(took, reverse=True) and len(took) == 4
    assert gain == pytest.approx(100 * (1 - took[-1] / took[0]), abs=0.6)


ANSWERS: dict[str, tuple[tuple[str, ...], Callable[[str], None]]] = {
    "long-context": (("Run full KV on rtx4090 with int4 weights", "worse"), tokens_of(500)),
    "offload": (("Full KV is the best choice", "slower", "host-to-GPU link"), offload),
    "quantised-cache": (("fp8 is fastest", "saves", "of GPU memory"), quantised),
    "speculation": (("breaks even with full", "acceptance"), speculation),
    "recompute-or-load": (("kvpr is fastest", "Limit:"), active_cache),
    "recompute-or-load-a-prefix": (
        ("Loading stored prefixes", "faster than recomputing"),
        prefix_load,
    ),
    "accuracy": (("On h100, on held-out runs", "(median)"), accuracy),
    "how-many-gpus": (("Rent 1 x l40s", "per hour"), fleet),
    "cheapest-gpu": (("Rent 1 x l40s", "per million output tokens"), fleet),
    "max-num-seqs": (("Run full KV on h100", "TPOT 50.0 ms"), tokens_of(256)),
    "memory-at-load": (("At 5, 20 and 50 requests per second", "keeps up with"), at_load),
    "kv-pool": (("KV pool at 90 % of GPU memory",), pool),
    "host-or-larger-card": (("Run full KV on a100-80g", "--gpu a100-40g"), cards),
    "huggingface": (("offload on h100", "TPOT"), transformers),
    "quality": (("Run full KV on a6000", "no loss of quality"), tokens_of(128)),
    "tensor-parallel": (("Run full KV on h100", "requests/s"), tokens_of(128)),
    "longest-context": (("Longest prompt:",), longest),
    "engine-flags": (("vllm serve", "--gpu-memory-utilization 0.9"), flags),
    "fit-to-my-log": (("Statistics are", "--stack mine.toml"), log),
    "it-does-not-fit": (("does not fit", "It fits with --weights int8", "--tp 2"), too_large),
    "prefix-tier": (("A host tier of 150 GiB", "mean TTFT"), tier),
}
"""Per page what the first sixty words must say, and what their figures are held to. Of the 22
questions two share a page: what a prefix tier brings, and of which size."""


@pytest.mark.parametrize("page", ANSWERS)
def test_a_question_is_answered_in_the_first_sixty_words(page: str) -> None:
    wanted, check = ANSWERS[page]
    first = " ".join(answer(page).split()[:60])
    assert all(words in first for words in wanted), first
    check(first)


def test_every_question_has_its_page() -> None:
    folder = ROOT / "docs" / "questions"
    pages = {page.stem for page in folder.glob("*.md")} - {"index"}
    assert pages == set(ANSWERS)
    index = (folder / "index.md").read_text()
    assert all(f"({page}.md)" in index for page in pages)
