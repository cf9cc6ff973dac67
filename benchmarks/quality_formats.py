"""Summaries of published scores by format of weights or cache, and what admits at which limit.

    python -m benchmarks.quality_formats SHARED [--write]

Reads ``measured/quality_formats.csv`` of a folder that does not ship, pools the scores of each
model, format and kind of benchmark, and with ``--write`` stores the summaries in
``kvsim/quality/formats.csv``; no row of a table is copied. Then each model is left out in turn:
what would be admitted on it, and what it truly loses.
"""

import argparse
import csv
from collections import defaultdict
from dataclasses import fields
from math import sqrt
from pathlib import Path

from kvsim.quality.evidence import Pooled, Score, bound_loss, pool_scores, usual_questions

KIND_WORDS = {
    "retrieval": ("needle", "mrcr", "retrieval"),
    "long generation": ("aime", "gpqa", "livecodebench", "math500"),
}
LEFT_OUT = ("spinquant",)  # licensed for other uses than this
SHIPPED = Path("kvsim/quality/formats.csv")
LIMIT = 0.02


def kind_of(row: dict[str, str]) -> str:
    """The kind of a row's benchmark."""
    name = row["benchmark"].lower()
    if row["better"] == "lower":
        return "perplexity"
    found = [kind for kind, words in KIND_WORDS.items() if any(w in name for w in words)]
    return found[0] if found else "short answers"


def part_of(row: dict[str, str]) -> tuple[str, str] | None:
    """The part that is quantised, and kvsim's name of its format; None where it has none."""
    what, form, method = row["quantised"], row["format"], row["method"].lower()
    if what in ("kv", "kv+attention"):
        if "exllama" in row["source"]:  # its fp8 is cut to five bits of exponent
            return None
        if form == "fp8":
            return "cache", "fp8"
        if form.startswith("mxfp4"):
            return "cache", "fp4"
        if "kivi" in row["source"] or "quanto" in row["source"]:
            return "cache", f"kivi:bits={form[3:]}" if form in ("int2", "int4") else "other"
        if "turboquant" in row["source"]:
            return "cache", f"turboquant {form}"
        return "cache", form
    if what in ("weights", "weights+activations"):
        if form in ("fp8", "int8", "nvfp4", "mxfp4"):
            return "weights", form
        if form.startswith("gguf "):
            return "weights", form.removeprefix("gguf ")
        if form == "int4" and what == "weights" and "rtn" not in method:
            return "weights", "int4"
    return None


def loss_of(row: dict[str, str]) -> tuple[float, float, float]:
    """Relative loss of a row, its standard error, and the questions behind it."""
    base, value = float(row["baseline"]), float(row["value"])
    if row["better"] == "lower":
        return value / base - 1, 0.002, 1.0
    top = 100.0 if max(base, value) > 1.5 else 1.0
    n = float(row["n"]) if row["n"] else usual_questions(row["benchmark"])
    p, q = min(base / top, 1.0), min(value / top, 1.0)
    return 1 - value / base, sqrt((p * (1 - p) + q * (1 - q)) / n) / max(p, 1e-6), n


def summaries(path: Path) -> list[Pooled]:
    """Pooled losses by model, part, format and kind."""
    scores: list[Score] = []
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            part = part_of(row)
            if part is None or row["source"] in LEFT_OUT or "16 bit" not in row["baseline_format"]:
                continue
            if float(row["baseline"]) <= 0 or row["model"].startswith("not read"):
                continue
            who = row["kvsim_model"] or row["model"], row["attention"].split()[0].strip(",")
            where = row["benchmark"], row["source"]
            scores.append((*who, *part, kind_of(row), *loss_of(row), *where))
    return sorted(pool_scores(scores), key=lambda p: (p.part, p.format, p.model, p.kind))


def main() -> None:
    """Write the summaries, and leave one model out at a time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("shared", type=Path)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    every = summaries(asked.shared / "measured" / "quality_formats.csv")
    if asked.write:
        lines = [",".join(f.name for f in fields(Pooled)), *(p.line() for p in every)]
        SHIPPED.write_text("\n".join(lines) + "\n", encoding="utf-8")
    trials = harmful = passed = 0
    models = sorted({(p.model, p.part, p.format) for p in every})
    print("admitted at 2 %, with the model's own scores and without them:")
    admitted: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for model, part, form in models:
        mine = [p for p in every if (p.model, p.part, p.format) == (model, part, form)]
        rest = [p for p in every if p.model != model]
        attention = mine[0].attention
        own = bound_loss(every, model, attention, part, form)
        admitted[part, form].append(own is not None and own.bound <= LIMIT)
        blind = bound_loss(rest, model, attention, part, form)
        for limit in (0.005, 0.01, 0.02, 0.05, 0.1):
            truly = any(p.loss - 1.64 * p.error > limit for p in mine)
            trials += 1
            harmful += truly
            passed += truly and blind is not None and blind.bound <= limit
    for (part, form), some in admitted.items():
        print(f"  {part} {form}: {sum(some)} of {len(some)} models")
    print(f"left out: {trials} trials, {harmful} harmful, {passed} of them admitted")


if __name__ == "__main__":
    main()
