"""Stacks of engines that their host or old kernels hold up, fitted to public runs, and held out.

    python -m benchmarks.host_engines ../shared           # numbers, residuals, held-out errors
    python -m benchmarks.host_engines ../shared --write   # and the ledger's lines of these stacks

Rows: those of ``measured/engines.csv`` in the folder. Numbers start where nothing but their kind is
known, and are drawn there where rows do not tell. What is printed goes into the stack's file by
hand, with its uncertainty; held out are whole models and whole prompt lengths.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from benchmarks.entries import entry_of
from benchmarks.truth_rows import Row, read_rows
from benchmarks.truth_runs import METRICS, deployment_of
from kvsim.evidence import ledger
from kvsim.graph import Array
from kvsim.machines.hardware import Stack
from kvsim.machines.profiles import load_stack, with_numbers

STARTED = 128  # tokens of a prompt below which AutoAWQ's rows are those of a cold engine
LEDGER = Path("kvsim/evidence/ledger.csv")
NOISE = 0.03  # relative error of a row's own
DRAWN = 0.7  # relative change of a number that counts as much as a row that is off by NOISE
LONG = 60_000  # tokens above which Qwen2.5 ran in vLLM with other settings


@dataclass(frozen=True)
class Case:
    """A stack, the engine whose rows it is fitted to, and its numbers' start and bounds."""

    engine: str
    bounds: Mapping[str, tuple[float, float, float]]  # keys joined by "|" share one number
    holds: tuple[str, ...]  # what is held out as a whole: attributes of a row
    source: str = ""  # that the rows are of, if the engine has several


LAUNCH, MODULE, FLOOR = (10e-6, 1e-6, 40e-6), (50e-6, 1e-9, 200e-6), (25e-6, 1e-9, 200e-6)
FULL, HALF = (0.8, 0.05, 1.0), (0.4, 0.05, 1.0)
MARLIN = ("kernel.gemm-int4", "kernel.gemm-awq", "kernel.gemm-int8")
CASES = {
    "hf-fa2": Case(
        "HF transformers",
        {
            "time.launch_s": LAUNCH, "time.step_s": (4e-3, 1e-6, 20e-3),
            "kernel.cache-copy.memory": HALF,
            "kernel.gemm-int4.memory": HALF, "kernel.gemm-int4.floor_s": FLOOR,
            "kernel.gemm-int4.host_s": MODULE, "kernel.gemm-awq.memory": HALF,
            "kernel.gemm-awq.floor_s": FLOOR, "kernel.gemm-awq.host_s": MODULE,
            "kernel.gemm-int8.memory": HALF, "kernel.gemm-int8.host_s": MODULE,
        },
        ("model", "prompt"),
    ),
    "tinychat": Case(
        "TinyChat",
        {"time.launch_s": LAUNCH, "kernel.gemm.memory|kernel.gemm-int4.memory": FULL},
        ("model", "card"),
        "tinychat",
    ),
    "autoawq": Case(
        "AutoAWQ",
        {
            "kernel.attention.walk_s": (25e-9, 1e-9, 1e-6),
            "kernel.gemm-int4.memory": FULL, "kernel.gemm-int4.compute": HALF,
            "attention.score_bytes": (28.0, 1.0, 160.0),
        },
        ("model", "prompt"),
    ),
    "vllm-0.6": Case(
        "vLLM",
        {
            "time.step_s": (1.5e-3, 1e-4, 1e-2),
            "|".join(f"{k}.memory" for k in MARLIN): FULL,
            "|".join(f"{k}.floor_s" for k in MARLIN): (5e-6, 1e-9, 1e-4),
        },
        ("model", "prompt", "weights"),
        "qwen2.5-vllm",
    ),
    "vllm-0.10": Case(
        "vLLM",
        {
            # rows hardly tell the first, and no kernel reaches the whole bandwidth
            "kernel.gemm-fp8.memory": (0.8, 0.05, 0.9), "kernel.gemm-fp8.compute": HALF,
            "kernel.attention.memory|kernel.prompt.memory": FULL,
            "sums.direct_s": (5e-6, 1e-7, 1e-4),
        },
        ("model", "batch"),
        "rocm-vllm-mi300x",
    ),
    "splitwise": Case(
        "Splitwise",
        {
            "time.launch_s": LAUNCH, "time.sequence_s": (4e-4, 1e-6, 2e-3),
            "kernel.gemm.memory": FULL,
        },
        ("model", "tp"),
    ),
}  # fmt: skip


def usable(row: Row, case: Case) -> bool:
    """Whether a row is a speed of the case that the stack can explain.

    TTFT of Transformers is of another card and no stated version; AutoAWQ's shortest prompts hold
    the start-up of its first pass, and its GEMV is another kernel; prompts of Splitwise's runtime
    are bound by sums that no number here is of.
    """
    if row.engine != case.engine or case.source not in ("", row.source) or row.table != "speed":
        return False
    starts = row.metric == "prefill_tok_s" and row.batch * row.prompt < STARTED
    other = "GEMV" in row.version or "setting" in row.note or row.asked == "prefill"
    return row.version != "" and not (row.drafts or starts or other or row.prompt > LONG)


def stated(stack: Stack, values: Mapping[str, float]) -> Stack:
    """A stack with numbers replaced, whatever its card."""
    each = {key: value for keys, value in values.items() for key in keys.split("|")}
    cards = {name: with_numbers(card, each) for name, card in stack.cards.items()}
    return replace(with_numbers(stack, each), cards=cards)


def said(rows: Sequence[Row], stack: Stack) -> Array:
    """What a stack says of some rows."""
    found = []
    for row in rows:
        d = replace(deployment_of(row, "fused"), stack=stack.offline)
        found.append(METRICS[row.metric](row, d))
    return np.array(found)


def fit(
    rows: Sequence[Row], base: Stack, case: Case
) -> tuple[Stack, dict[str, tuple[float, float]]]:
    """Fit a stack's numbers to rows; each number with its standard error."""
    start = {key: first for key, (first, _, _) in case.bounds.items()}
    measured = np.array([r.value for r in rows])

    def at(place: Array) -> Stack:
        values = {key: number * p for (key, number), p in zip(start.items(), place, strict=True)}
        return stated(base, values)

    def residuals(place: Array) -> Array:
        off = np.log(said(rows, at(place)) / measured) / NOISE
        return np.concatenate([off, (place - 1) / DRAWN])

    low, high = (np.array([case.bounds[k][i] / v for k, v in start.items()]) for i in (1, 2))
    best = least_squares(
        residuals, np.ones(len(start)), bounds=(low, high), diff_step=1e-3, max_nfev=30
    )
    spread = np.sqrt(np.diag(np.linalg.pinv(best.jac.T @ best.jac)))
    told = {k: (v * p, v * s) for (k, v), p, s in zip(start.items(), best.x, spread, strict=True)}
    return at(best.x), told


def held_out(rows: Sequence[Row], base: Stack, case: Case, shared: str) -> Array:
    """Predictions of rows by fits that did not see those that share an attribute with them."""
    key = attrgetter(shared)
    found = np.empty(len(rows))
    for group in {key(r) for r in rows}:
        kept = [r for r in rows if key(r) != group]
        stack, _ = fit(kept, base, case)
        mine = [i for i, r in enumerate(rows) if key(r) == group]
        found[mine] = said([rows[i] for i in mine], stack)
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("shared", type=Path)
    options.add_argument("--write", action="store_true", help="write the ledger's lines")
    options.add_argument("--only", default="", help="one stack")
    chosen = options.parse_args()
    every = read_rows(chosen.shared)
    for name, case in CASES.items():
        if chosen.only not in ("", name):
            continue
        rows, base = [r for r in every if usable(r, case)], load_stack(name)
        measured = np.array([r.value for r in rows])
        stack, told = fit(rows, base, case)
        print(f"{name}: {len(rows)} rows")
        for key, (value, error) in told.items():
            print(f"  {key:28s} {value:.4g} +- {error:.2g}")
        _print_errors("shipped", said(rows, base), measured)
        _print_errors("fitted", said(rows, stack), measured)
        for group in case.holds:
            apart = held_out(rows, base, case, group)
            _print_errors(f"held out by {group}", apart, measured)
            if chosen.write:
                _write(name, base.version, group, rows, apart)
    if chosen.write:
        _write_memory([r for r in every if r.metric == "peak_gib"])


def _print_errors(title: str, predicted: Array, measured: Array) -> None:
    off = np.abs(predicted / measured - 1)
    median, p90 = np.quantile(off, (0.5, 0.9))
    print(f"  {title:22s} {100 * median:.1f} % at the median, {100 * p90:.1f} % for nine in ten")


def _write(name: str, version: str, apart: str, rows: Sequence[Row], predicted: Array) -> None:
    """The ledger's line of one stack: a speed's error is that of the time it stands for."""
    faster = np.array([r.faster for r in rows])
    measured = np.array([r.value for r in rows])
    ratio = np.where(faster, predicted / measured, measured / predicted)
    cards = {r.card for r in rows}
    entry = entry_of(
        np.ones(len(rows)), ratio, engine=load_stack(name).family, version=version, kind="request",
        device=cards.pop() if len(cards) == 1 else ledger.ANY, technique="full", held_out=apart,
        source=", ".join(sorted({r.source for r in rows})),
    )  # fmt: skip
    ledger.update(LEDGER, [entry])


def _write_memory(rows: Sequence[Row]) -> None:
    """Peak memory, of which nothing is fitted."""
    base = load_stack("hf-fa2")
    entry = entry_of(
        said(rows, base), np.array([r.value for r in rows]), engine=base.name, version=base.version,
        kind="memory", device=rows[0].card, technique="full", held_out="row",
        source=rows[0].source,
    )  # fmt: skip
    ledger.update(LEDGER, [entry])


if __name__ == "__main__":
    main()
