"""Every pair of terms of two axes on nine models; docs/techniques.md is written from it.

``python -m benchmarks.compositions`` holds all pairs to what a composition promises (equal to the
scalar twin at 1e-12, finite, bounded, memory that grows with the batch) or prints why they are
refused; ``--speed`` evaluates large grids; ``--docs`` writes the table.
"""

import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from benchmarks.evaluation import grid_seconds
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.techniques import TECHNIQUES, parse
from kvsim.techniques.notation import terms
from tests.support.pairs import AXES, MODELS, check, pairs, refusal

DOCS = Path(__file__).parents[1] / "docs" / "techniques.md"
ASKED = {"full": 1_000_000, "of three axes": 200_000}
PRESET = 300_000
THREE = "snapkv:budget=1024 + kivi:bits=4 + offload:host_share=0.5"
MOST_LAYERS = 50  # times that 80 different layers may take of a uniform 80


def main() -> None:
    if "--docs" in sys.argv:
        DOCS.write_text(document(), encoding="utf-8")
    elif "--speed" in sys.argv:
        _speed()
    else:
        _contract()


def _contract() -> None:
    for kind in MODELS:
        found = [check(text, kind) for text in pairs()]
        refused = sum(map(bool, found))
        print(f"{kind:8s} {len(found)} pairs: {len(found) - refused} hold, {refused} are refused")


def _speed() -> None:
    d = Deployment(load_model("llama2-7b"), load_hardware("h100"), load_stack("fused"))
    batch, context = 8.0 * np.arange(1, 513), np.round(np.linspace(100, 131_072, 512))
    cases = {name: name for name in TECHNIQUES if not parse(name).refuses(d)}
    for name, text in (cases | {"of three axes": THREE}).items():
        began = time.process_time()
        list(grid_seconds(parse(text), d, batch, context))
        rate = batch.size * context.size / (time.process_time() - began)
        asked = ASKED.get(name, PRESET)
        print(
            f"{name:14s} {rate:12,.0f} points/s of {asked:9,d}{'' if rate >= asked else '  slow'}"
        )
    wide = Deployment(load_model("llama3-70b"), load_hardware("h100"), load_stack("fused"))
    uniform = _seconds("snapkv:budget=1000", wide)
    layers = "; ".join(f"{i}: snapkv:budget={1000 + i}" for i in range(80))
    print(
        f"80 different layers take {_seconds(layers, wide) / uniform:.1f} times a uniform 80's time"
    )


def _seconds(text: str, d: Deployment) -> float:
    t, batch, context = parse(text), 8.0 * np.arange(1, 33), np.linspace(2e3, 1e5, 32)
    began = time.process_time()
    for _ in range(3):
        list(grid_seconds(t, d, batch, context))
    return time.process_time() - began


def document(names: Iterable[str] = ()) -> str:
    """Return the page of names, axes and refusals.

    Parameters
    ----------
    names : terms to list; all if none are given.
    """
    named = set(names) or terms().keys()
    lines = [
        "# Techniques and how they compose",
        "",
        "Written by `python -m benchmarks.compositions --docs`; do not edit.",
        "",
        "This page explains the notation of `--technique`, lists all techniques, and shows which",
        "of them cannot be combined.",
        "",
        "A technique has four axes: *selection* (which cached tokens are kept and read), *storage*",
        "(formats of keys and values), *placement* (GPU, host, CPU) and *drafting* (what proposes",
        "tokens). Terms are joined by `+`. Ranges of layers, counted from 0, are separated by `;`:",
        "",
        "```",
        f"kvsim predict --model llama3-8b --gpu a6000 \\\n  --technique '{THREE}'",
        "kvsim predict --model llama2-7b --gpu a6000 \\",
        "  --technique '0-1: full; 2-31: kcache:n=64 + bits=4'",
        "```",
        "",
        "Drafting applies to the whole model: write it with the terms of all layers, or in a",
        "clause without layers. A setting without a name belongs to `grouped` (`bits`,",
        "`value_bits`) or `place` (`host_share`, `cpu_share`, ...). A number of tokens to keep or",
        "read that is between 0 and 1 is a share of each sequence's prompt",
        "(`snapkv:budget=0.25`); plans for traces use shares. The JSON file of a plan stands for",
        "the technique that it chose.",
        "",
        "A technique acts on the layers that have their own cache, and a note names the layers",
        "that it does not change. Layers with a state (gated DeltaNet, KDA, Mamba, Mamba-2,",
        "lightning attention, short convolutions) run unchanged; drafting keeps one more state per",
        "draft. Layers that share an earlier layer's cache (Gemma 3n) read it as that layer keeps",
        "it. With an indexer (DeepSeek-V3.2, GLM-5), attention reads those of the kept tokens that",
        "the indexer chooses.",
        "",
        "## Names",
        "",
        "| name | sets | meaning |",
        "|---|---|---|",
    ]
    for name, kind in terms().items():
        if name not in named:
            continue
        axes = ", ".join(part.axis for part in kind().pieces()) or "–"
        about = (kind.__doc__ or "").partition("\n\n")[0]
        lines.append(f"| `{name}` | {axes} | {' '.join(about.split())} |")
    lines += ["", "## Pairs that are refused", ""]
    lines += [
        "These pairs are refused on a grouped-query model.",
        "",
        "| pair | reason |",
        "|---|---|",
    ]
    for text in pairs():
        reason = refusal(text, "GQA")
        if reason:
            lines.append(f"| `{text}` | {reason} |")
    many = len(pairs())
    axes = ", ".join(f"{len(v)} for {k}" for k, v in AXES.items())
    lines += ["", f"All {many} pairs were tried ({axes})."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
