"""Stacks of engines that their host or old kernels hold up, fitted to public runs, and held out.

    python -m benchmarks.host_engines ../shared           # numbers, residuals, held-out errors
    python -m benchmarks.host_engines ../shared --write   # and the ledger's lines of these stacks

Rows: those of ``measured/engines.csv`` in the folder. Numbers start where nothing but their kind is
known, and are drawn there where rows do not tell. What is printed goes into the stack's file by
hand, with its uncertainty; held out are whole models and whole prompt lengths.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class Case:
    """A stack, the engine whose rows it is fitted to, and its numbers' start and bounds."""

    engine: str
    bounds: Mapping[str, tuple[float, float, float]]
    holds: tuple[Any, ...]  # what is held out as a whole


def _model(row: Row) -> object:
    return row.model


def _length(row: Row) -> object:
    return row.prompt


LAUNCH, MODULE, FLOOR = (10e-6, 1e-6, 40e-6), (50e-6, 1e-9, 200e-6), (25e-6, 1e-9, 200e-6)
FULL, HALF = (0.8, 0.05, 1.0), (0.4, 0.05, 1.0)
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
        (_model, _length),
    ),
    "tinychat": Case(
        "TinyChat",
        {
            "time.launch_s": LAUNCH, "kernel.gemm.memory": FULL,
            "kernel.gemm-int4.memory": FULL, "kernel.gemm-int4.compute": FULL,
        },
        (_model,),
    ),
    "autoawq": Case(
        "AutoAWQ",
        {
            "kernel.attention.walk_s": (25e-9, 1e-9, 1e-6),
            "kernel.gemm-int4.memory": FULL, "kernel.gemm-int4.compute": HALF,
            "attention.score_bytes": (28.0, 1.0, 160.0),
        },
        (_model, _length),
    ),
}  # fmt: skip


def usable(row: Row, case: Case) -> bool:
    """Whether a row is a speed of the case that the stack can explain.

    TTFT of Transformers is of another card and no stated version; AutoAWQ's shortest prompts hold
    the start-up of its first pass.
    """
    if row.engine != case.engine or row.table != "speed" or row.drafts:
        return False
    starts = row.metric == "prefill_tok_s" and row.batch * row.prompt < STARTED
    return row.version != "" and not starts


def said(rows: Sequence[Row], stack: Stack) -> Array:
    """What a stack says of some rows."""
    found = []
    for row in rows:
        d = replace(deployment_of(row, "fused"), stack=stack)
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
        return with_numbers(base, values)

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


def held_out(rows: Sequence[Row], base: Stack, case: Case, key: Callable[[Row], object]) -> Array:
    """Predictions of rows by fits that did not see those that share a key with them."""
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
            _print_errors(f"held out by {group.__name__[1:]}", apart, measured)
            if chosen.write:
                _write(name, base.version, group.__name__[1:], rows, apart)
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
        np.ones(len(rows)), ratio, engine=name, version=version, kind="request",
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
