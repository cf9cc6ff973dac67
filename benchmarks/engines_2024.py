"""Stacks of the engines of 2024, each fitted to six static batches of one model: for engines.py."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.entries import entry_of
from kvsim.errors import InputError
from kvsim.evidence import ledger
from kvsim.evidence.leastsquares import Parameter, fit_ratio
from kvsim.evidence.ops.fit import stack_text
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Stack
from kvsim.machines.profiles import load_hardware, load_stack, with_numbers
from kvsim.models.configs import load_model
from kvsim.prediction.generate import Prediction
from kvsim.prediction.pool import pool
from kvsim.techniques import parse

OLD = {"vllm-2024": "vllm", "trtllm-2024": "tensorrt-llm", "mii-2024": "deepspeed-mii"}
KERNELS = "trtllm@a100-80g"  # the oldest that were measured; the six batches fit them best
BATCHES = (
    (1, 128, 128, 1), (1, 1024, 1024, 64), (1, 2048, 2048, 16),
    (4, 128, 128, 1), (4, 1024, 1024, 16), (4, 512, 512, 64),
)  # fmt: skip
"""The six rows of Llama-2-7B that a stack of 2024 is fitted to: GPUs, prompt, generate, batch."""

ALIKE = {"tensorrt-llm", "deepspeed-mii"}
"""Engines whose batches held one prompt many times: sixteen sequences of Mixtral take 1.3 times the
time per token of one, less than reading all experts takes, so that all went to the same ones."""

OLD_FREE = (
    Parameter("time.step_s", 1e-3, 0.0, 0.1),
    Parameter("time.sequence_s", 1e-5, 0.0, 1e-3),
    Parameter("kernel.attention.compute", 0.05, 0.002, 1.0),
    Parameter("sums.direct_s", 2e-5, 0.0, 1e-3),
)


OFFLINE = dict.fromkeys(("server.token_s", "server.prompt_s"), 0.0)
"""Static batches ran without a server."""

SET = {
    "mii-2024": (
        "kernel.attention.compute",
        0.65 / 128,
        "set, not fitted: its paged attention is FlashAttention-2's kernel for prompts, where one "
        "new token fills one of a tile's 128 rows and each query head reads for itself; a tile "
        "reaches some 65 % of the peak. Grouped heads save no time in it. The mechanism was chosen "
        "with the errors on the other batches in sight",
    ),
}
"""Numbers of an engine that its source tells and that six batches of ungrouped heads cannot."""


def write_old(folder: Path, name: str, engine: str, place: Path, today: str) -> ledger.LedgerEntry:
    """An engine of 2024 fitted to six of its static batches, and its error on all others."""
    with (folder / "measured" / "argonne_a100.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if r["engine"] == engine and _known(r["model"])]
    known = {SET[name][0]: SET[name][1]} if name in SET else {}
    base = with_numbers(load_stack(KERNELS), {"sums.ring_s": 1.0} | OFFLINE | known)
    free = tuple(p for p in OLD_FREE if p.name not in known)
    fitted, seen = [], set()
    for i, r in enumerate(rows):
        key = tuple(int(r[c]) for c in ("gpus", "prompt", "generate", "batch"))
        if r["model"] == "meta-llama/Llama-2-7b-hf" and key in BATCHES and key not in seen:
            fitted.append(i)
            seen.add(key)
    measured = np.array([float(r["request_s"]) for r in rows])
    chosen = [rows[i] for i in fitted]
    fit = fit_ratio(lambda v: _batches(chosen, with_numbers(base, v)), measured[fitted], free)
    others = np.setdiff1d(np.arange(len(rows)), fitted)
    unseen = _batches([rows[i] for i in others], with_numbers(base, fit.values))
    today_off = np.abs(_batches(rows, load_stack("fused")) / measured - 1)
    off = np.abs(unseen / measured[others] - 1)
    print(
        f"{name}: fused {100 * today_off.mean():.1f} % mean; fitted to {len(fitted)} rows, "
        f"others {100 * off.mean():.1f} % mean, {spread(off)}"
    )
    said = (
        f"{len(fitted)} static batches of Llama-2-7B on A100-40G (argonne-lcf/LLM-Inference-Bench)"
    )
    own = {k: (v, f"fitted on {today} to {said}: {v:.3g} +- {fit.errors[k]:.2g}"
               + ("; not determined by these rows" if k in fit.unknown else ""))
           for k, v in fit.values.items()}  # fmt: skip
    own |= {key: (value, "static batches ran without a server") for key, value in OFFLINE.items()}
    own |= {key: (value, SET[name][2]) for key, value in known.items()}
    own["sums.ring_s"] = (1.0, "no ring: sums.direct_s is what these engines' sums take")
    head = {
        "title": f"{engine} of 2024, kernels of TensorRT-LLM 1.0, host times and sums fitted",
        "basis": "calibrated",
        "error": f"request time of {len(others)} other static batches (other models, 1 to 4 GPUs): "
        f"{100 * off.mean():.2g} % on average, {100 * np.quantile(off, 0.9):.2g} % for nine in ten",
        "extends": KERNELS,
        "version": "2024",
        "fit": f"{said}, mean residual {100 * np.abs(fit.residuals).mean():.2g} %",
    }
    place.write_text(
        stack_text(head, {k: v for k, (v, _) in own.items()}, {k: t for k, (_, t) in own.items()})
    )
    return entry_of(
            unseen, measured[others], engine=name, version="2024", kind="request",
            device="a100-40g", technique="full", held_out="model and GPUs",
            source="argonne-lcf/LLM-Inference-Bench",
    )  # fmt: skip


def _known(model: str) -> bool:
    try:
        load_model(model)
    except InputError:
        return False
    return True


def _batches(rows: list[dict[str, str]], stack: Stack) -> np.ndarray:
    """Time of whole static batches; what the cache has no room for waits for the others. [s]"""
    out = np.empty(len(rows))
    full = parse("full")
    groups: dict[tuple[str, int, int, int], list[int]] = {}
    for i, r in enumerate(rows):
        key = (r["model"], int(r["gpus"]), int(r["prompt"]), int(r["generate"]))
        groups.setdefault(key, []).append(i)
    for (model, gpus, prompt, generate), chosen in groups.items():
        d = Deployment(load_model(model), load_hardware("a100-40g"), stack, "fp16", gpus)
        together = max(1.0, np.floor(pool(full, d, prompt, generate).concurrency))
        m = d.model
        if m.experts and rows[chosen[0]]["engine"] in ALIKE:
            d = replace(d, model=replace(m, experts=m.experts_active))
        batch = np.array([float(rows[i]["batch"]) for i in chosen])
        waves, rest = np.divmod(batch, together)
        sizes = np.concatenate([np.full(1, together), np.maximum(rest, 1.0)])
        times = Prediction(full, d, sizes, prompt, generate, contexts=6).request_s
        out[chosen] = waves * times[0] + np.where(rest > 0, times[1:], 0.0)
    return out


def spread(off: np.ndarray) -> str:
    return f"{100 * np.median(off):.1f} / {100 * np.quantile(off, 0.9):.1f} %"
