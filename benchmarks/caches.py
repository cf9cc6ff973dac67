"""Low-bit caches as engines ship them: what their kernels take, fitted to measured pairs.

    KVSIM_SHARED=... python -m benchmarks.caches           # errors, also held out by source
    KVSIM_SHARED=... python -m benchmarks.caches --write   # and kvsim/techniques/caches.csv

Rows: static batches of ``measured/low_bit_caches.csv`` whose card and model are known, kernels of
releases and of the main branch. Pages that name neither are taken to be Qwen3-8B on an H100.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import csv
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.prediction.generate import Prediction
from kvsim.techniques import parse
from kvsim.techniques.papers import cache
from kvsim.techniques.papers.cache import CacheKernel, load_kernels

Row = dict[str, str]
TABLE = Path("kvsim/techniques/caches.csv")
STACKS = {"vLLM": "vllm", "SGLang": "sglang", "TensorRT-LLM": "trtllm"}
CARDS = {"A800 40G": "a100-40g", "not said": "h100"}
MODELS = {"not said": "qwen3-8b"}
BOTH = "vllm-turboquant-blog and vllm-53060 (main), static batches"
GROUPS: Mapping[str, tuple[str, ...]] = {
    BOTH: ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"),
    "vllm-38378 and vllm-40633, model and card assumed": (
        "int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "int2_per_token_head",
    ),
    "trtllm-1397, per-tensor int8 of 2024": ("int8",),
}  # fmt: skip
"""Formats that share a fixed time per layer and a time per token walked."""


def main() -> None:
    place = Path(os.environ["KVSIM_SHARED"]) / "measured" / "low_bit_caches.csv"
    with place.open(newline="") as file:
        rows = [r for r in csv.DictReader(file) if _used(r)]
    found: dict[str, CacheKernel] = {k.format + k.engine: k for k in load_kernels()}
    for source, formats in GROUPS.items():
        mine = [r for r in rows if r["technique"] in formats]
        fitted = fit(mine, formats, source)
        found |= {k.format + k.engine: k for k in fitted}
        print_errors(mine, fitted, source)
        for left in dict.fromkeys(r["source"] for r in mine):
            others = [r for r in mine if r["source"] != left]
            if others:
                known = {r["technique"] for r in others}
                unseen = [r for r in mine if r["source"] == left and r["technique"] in known]
                print_errors(unseen, fit(others, formats, source), f"  without {left}")
    if "--write" in sys.argv:
        names = [f.name for f in fields(CacheKernel)]
        with TABLE.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(names)
            writer.writerows([getattr(k, n) for n in names] for k in found.values())


def _used(row: Row) -> bool:
    alone = row["batch"].isdigit() or (row["of"] == "tpot_s" and row["card"] == "not said")
    return row["engine"] in STACKS and alone and "PR 53060" not in row["engine_version"]


def predict_ratio(row: Row, kernels: Sequence[CacheKernel]) -> float:
    """Predict the speed-up of a cache over one of 16 bits.

    Parameters
    ----------
    row : of low_bit_caches.csv.
    kernels : in place of the shipped ones.
    """
    shipped = cache.find_kernel
    cache.find_kernel = lambda _, name: next((k for k in kernels if k.format == name), None)  # type: ignore[assignment]
    try:
        card = CARDS.get(row["card"], row["card"])
        model = load_model(MODELS.get(row["model"], row["model"]))
        stack = load_stack(STACKS[row["engine"]]).for_gpu(card)
        d = Deployment(model, load_hardware(card), stack, "fp16", int(row["tp"]))
        batch = np.array([float(row["batch"] or row["requests"])])
        sizes = int(row["prompt"]), int(row["generate"])
        low, full = (
            Prediction(parse(t), d, batch, *sizes, contexts=2)
            for t in (f"cache:format={row['technique']}", "full")
        )
        if row["of"] == "tpot_s":
            return float(full.tpot_s[0] / low.tpot_s[0])
        return float((full.prefill_s + full.decode_s)[0] / (low.prefill_s + low.decode_s)[0])
    finally:
        cache.find_kernel = shipped


def fit(rows: Sequence[Row], formats: Sequence[str], source: str) -> list[CacheKernel]:
    """Fit a group of formats: a time per layer and per token walked, operations of each format.

    A format without rows gets the mean of the others' operations.

    Parameters
    ----------
    rows : measured pairs.
    formats : of the group.
    source : for the table.
    """
    base = [k for k in load_kernels() if k.format in formats and k.engine in STACKS.values()]
    base = [next(k for k in base if k.format == f) for f in formats]
    seen = [f for f in formats if any(r["technique"] == f for r in rows)]
    several = len({r["prompt"] for r in rows}) > 2  # contexts, without which no walk is told

    def kernels(x: np.ndarray) -> list[CacheKernel]:
        each = dict(zip(seen, x[2:], strict=True))
        return [
            replace(
                k,
                layer_s=round(float(x[0]) * 1e-5, 8),
                walk_s=round(float(x[1]) * 1e-9 * several, 12),
                unpack_ops=round(10 * float(each.get(k.format, np.mean(x[2:]))), 2),
                source=source,
            )
            for k in base
        ]

    def misfit(x: np.ndarray) -> list[float]:
        some = kernels(x)
        return [float(np.log(predict_ratio(r, some) / float(r["value"]))) for r in rows]

    start = [1.0, 5.0, *[1.0] * len(seen)]
    found = least_squares(
        misfit, start, bounds=(0, np.inf), loss="soft_l1", f_scale=0.1, diff_step=0.03, max_nfev=20
    )
    return kernels(found.x)


def print_errors(rows: Sequence[Row], kernels: Sequence[CacheKernel], title: str) -> None:
    """Print how far speed-ups are off, and how many signs are right.

    Parameters
    ----------
    rows : measured pairs.
    kernels : that predict them.
    title : of the line.
    """
    said = np.array([predict_ratio(r, kernels) for r in rows])
    true = np.array([float(r["value"]) for r in rows])
    off, clear = np.abs(said / true - 1), np.abs(true - 1) > 0.05
    signs = np.mean((said > 1) == (true > 1), where=clear) if clear.any() else np.nan
    print(
        f"{title}: {len(rows)} rows, median {np.median(off):.1%}, "
        f"p90 {np.quantile(off, 0.9):.1%}, signs right beyond 5 %: {signs:.0%} of {clear.sum()}"
    )


if __name__ == "__main__":
    main()
