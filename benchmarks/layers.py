"""Losses of layers added up, beside what mixed plans really lose; takes half an hour or more.

    python -m benchmarks.layers DIR [--plans 40] [--seed 16] [--windows 8] [--prompt 256]
        [--scored 16]

Measures SmolLM2-135M layer by layer (``kvsim validate quality --per-layer``), draws plans that
nothing was fitted to, and runs them on the same weights. All goes into DIR as soon as it is
measured; the same call goes on where an earlier one was stopped.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import numpy as np

from kvsim.api.validations import validate_layers
from kvsim.graph import Array
from kvsim.quality.layers import LayerLosses, Widths, assign, load
from kvsim.techniques import parse
from kvsim.validate.quality.measure import OpenedCheckpoint, executed
from kvsim.validate.quality.settings import Reading
from kvsim.validate.quality.text import read_text

MODEL = "smollm2-135m"
BEST = (2.25, 2.5, 3.0, 3.5)  # mean bits of plans that a programme chooses


def plans(losses: LayerLosses, count: int, seed: int = 16) -> Iterator[tuple[str, Widths]]:
    """The programme's own, and plans by chance of every mean width."""
    for bits in BEST:
        yield f"best of {bits:g} bits", assign(losses, bits)
    random = np.random.default_rng(seed)
    shape = losses.alone.shape[0], losses.alone.shape[2]
    for case in range(count):
        weights = random.dirichlet(np.ones(len(losses.bits)))
        yield f"by chance, {case}", random.choice(len(losses.bits), shape, p=weights)


def run(folder: Path, count: int, seed: int, reading: Reading) -> dict[str, Array]:
    """What every plan loses by window, from the file or measured now. (windows,) [nat per token]"""
    layers, ran = folder / "layers.json", folder / "plans.jsonl"
    sizes = reading.windows, reading.prompt, reading.scored
    if not layers.exists():
        batch, prompt, generate = sizes
        validate_layers(MODEL, batch=batch, prompt=prompt, generate=generate, out=layers)
    losses = load(layers)
    lines = ran.read_text().splitlines() if ran.exists() else []
    found = {line["plan"]: np.array(line["loss"]) for line in map(json.loads, lines)}
    todo = [(name, widths) for name, widths in plans(losses, count, seed) if name not in found]
    uniform = [
        (f"{b} bits everywhere", np.full_like(plans_shape(losses), i))
        for i, b in enumerate(losses.bits)
    ]
    todo += [(name, widths) for name, widths in uniform if name not in found]
    if todo:
        opened = OpenedCheckpoint.open(MODEL, "cpu", "a6000")
        decoder, texts, _ = opened.read(read_text(None), reading, reading.length)
        for name, widths in todo:
            technique = parse(losses.notation(widths))
            (found[name],) = executed(decoder, reading, texts, [technique])
            with ran.open("a") as file:
                file.write(json.dumps({"plan": name, "loss": found[name].tolist()}) + "\n")
            print(name, f"{found[name].mean():.4g}", flush=True)
    return found


def plans_shape(losses: LayerLosses) -> Widths:
    """Widths of keys and values of every layer, all the narrowest. (2, layers)"""
    return np.zeros((losses.alone.shape[0], losses.alone.shape[2]), dtype=np.int64)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plans", type=int, default=40)
    parser.add_argument("--seed", type=int, default=16)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--scored", type=int, default=16)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    found = run(
        asked.folder, asked.plans, asked.seed, Reading(asked.windows, asked.prompt, asked.scored)
    )
    losses = load(asked.folder / "layers.json")
    expected, inside = {}, 0
    print(f"{'plan':<18}{'bits':>6}{'expected':>10}{'measured':>10}{'interval':>18}")
    for name, widths in plans(losses, asked.plans, asked.seed):
        mean, low, high = losses.expected(widths)
        real = float(found[name].mean())
        expected[name] = mean
        inside += low <= real <= high
        bits = np.take(losses.bits, widths).mean()
        print(f"{name:<18}{bits:>6.2f}{mean:>10.3g}{real:>10.3g}{low:>9.3g} -{high:>7.3g}")
    chance = [name for name in expected if name.startswith("by chance")]
    off = [abs(expected[n] / found[n].mean() - 1) for n in chance]
    right = apart = 0
    for one, other in combinations(chance, 2):
        gap = found[one] - found[other]
        if abs(gap.mean()) > 2 * gap.std(ddof=1) / np.sqrt(gap.size):
            apart += 1
            right += (expected[one] > expected[other]) == (gap.mean() > 0)
    two = found[f"{losses.bits[0]} bits everywhere"].mean()
    print(f"\nmedian error {np.median(off):.1%} (10 % asked), at worst {max(off):.1%}")
    print(f"order right in {right} of {apart} pairs further apart than two standard errors (90 %)")
    print(f"inside their interval: {inside} of {len(expected)}")
    print(
        f"best of 2.5 bits against {losses.bits[0]} bits everywhere: "
        f"{found['best of 2.5 bits'].mean() / two:.3f} (a third asked)"
    )


if __name__ == "__main__":
    main()
