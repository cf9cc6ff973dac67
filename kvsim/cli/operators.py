"""`kvsim calibrate --from-ops` and `--from-serving`: a stack from tables that others measured."""

import sys
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from kvsim.errors import InputError
from kvsim.machines.hardware import DEFAULT_STACK


def start(engine: str) -> str:
    """The stack that a fit starts from: classes without rows keep its numbers."""
    from kvsim.machines.profiles import stack_names

    return engine if engine in stack_names() else DEFAULT_STACK


def calibrate_operators(
    files: list[Path], engine: str, gpu: str | None, version: str | None, share: float, out: Path,
    base: str,
) -> dict[str, Any]:  # fmt: skip
    """Fit a stack to measured operators of one engine on one GPU and write it.

    Raises
    ------
    InputError
        If the files cannot be used, or hold several GPUs and none was named.
    """
    from kvsim.evidence.ops import fit, rows, write
    from kvsim.files import check_target, replace_text
    from kvsim.machines.profiles import load_hardware, load_stack

    check_target(out, "--out", (".toml",))
    hardware = load_hardware(gpu or _only_gpu(rows.pairs(files), engine))
    table = rows.read_ops(files, engine, hardware, version)
    for reason, count in table.rejected.items():
        print(f"kvsim: {count:,} rows {reason}; left out", file=sys.stderr)
    stack = load_stack(base).on(hardware.name)
    found = fit.fit_table(table, hardware, stack, round(1 / share) if share else 0)
    few = [f"{fit.class_name(r)} ({len(r)} rows)" for r in table.rows if len(r) < fit.FEWEST]
    if not found:
        told = ", ".join(few)
        raise InputError(f"--from-ops: no class has {fit.FEWEST} rows, but {told}; give more rows")
    if few:
        print(f"kvsim: too few to fit, base numbers kept: {', '.join(few)}", file=sys.stderr)
    replace_text(out, write.card_text(table, found, stack.name, str(date.today())))
    return {
        "engine": engine, "version": table.version, "gpu": hardware.name,
        "rows": sum(len(f.rows) for f in found), "left_out": dict(table.rejected),
        "classes": [_class_row(f) for f in found],
    }  # fmt: skip


def _only_gpu(pairs: list[tuple[str, str]], engine: str) -> str:
    gpus = sorted({device for device, one in pairs if one == engine})
    if len(gpus) == 1:
        return gpus[0]
    known = ", ".join(sorted({one for _, one in pairs}))
    if not gpus:
        raise InputError(f"--engine: no row of {engine!r}; the files hold {known}")
    raise InputError(f"--gpu: the files hold {', '.join(gpus)}; name one")


def _class_row(found: Any) -> dict[str, Any]:
    from kvsim.evidence.ops.write import errors_of

    off = errors_of(found)
    known = bool(np.isfinite(off).all())
    return {
        "class": found.name, "rows": len(found.rows),
        "median_error": float(np.median(off)) if known else None,
        "p90_error": float(np.quantile(off, 0.9)) if known else None,
        "numbers": {
            key: {"value": value, "error": _finite(found.fit.errors[key]),
                  "known": key not in found.fit.unknown}
            for key, value in found.fit.values.items()
        },
    }  # fmt: skip


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def calibrate_load_tests(path: Path, engine: str, base: str, out: Path) -> dict[str, Any]:
    """Fit an engine's host times to a table of load tests and write the stack."""
    from kvsim.evidence import loadtests
    from kvsim.evidence.stackfile import fitted_text
    from kvsim.files import check_target, replace_text
    from kvsim.machines.profiles import load_stack

    check_target(out, "--out", (".toml",))
    rows = loadtests.read_load_tests(path, engine)
    devices = sorted({r.device for r in rows})
    stack = load_stack(base)
    found = loadtests.fit_host(rows, stack)
    measured = np.array([r.latency for r in rows])
    off = np.abs(loadtests.held_out_by_model(rows, stack) / measured - 1)
    told = (
        f"latency of load tests that no fit saw (held out by model): {100 * np.median(off):.2g} % "
        f"at the median, {100 * np.quantile(off, 0.9):.2g} % for nine in ten"
    )
    said = f"{len(rows)} load tests of {engine} on {', '.join(devices)} ({path.name})"
    one = stack.on(devices[0]) if len(devices) == 1 else stack
    bare = replace(found, residuals=found.residuals[:0])
    replace_text(out, fitted_text(one, one.name, bare, said, told, str(date.today())))
    return {
        "engine": engine, "gpus": devices, "rows": len(rows),
        "median_error": float(np.median(off)), "p90_error": float(np.quantile(off, 0.9)),
        "numbers": {k: {"value": v, "error": _finite(found.errors[k]),
                        "known": k not in found.unknown} for k, v in found.values.items()},
    }  # fmt: skip


def show(answer: dict[str, Any], out: str) -> None:
    """The fit as a table on standard output."""
    print(f"{answer['engine']}: {answer['rows']:,} rows fitted, written to {out}")
    if "classes" not in answer:
        _show_numbers(answer["numbers"])
        print(
            f"held out by model: {100 * answer['median_error']:.2g} % at the median, "
            f"{100 * answer['p90_error']:.2g} % for nine in ten"
        )
        return
    for row in answer["classes"]:
        told = "nothing held out"
        if row["median_error"] is not None:
            told = (
                f"{100 * row['median_error']:.2g} % at the median and "
                f"{100 * row['p90_error']:.2g} % for nine in ten on shapes that no fit saw"
            )
        print(f"{row['class']}: {row['rows']:,} rows, {told}")
        _show_numbers(row["numbers"])


def _show_numbers(numbers: dict[str, dict[str, Any]]) -> None:
    for key, found in numbers.items():
        spread = "unknown" if found["error"] is None else f"{found['error']:.2g}"
        note = "" if found["known"] else "  not determined by these rows"
        print(f"  {key:34s} {found['value']:10.4g} +- {spread}{note}")
