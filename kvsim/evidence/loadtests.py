"""Host times of an engine from tables of load tests: (isl, osl, concurrency, ttft, tpot) per row.

A request's latency is predicted as its tokens times a decode step of all sequences in flight, plus
the prompts of those sequences. What the kernels do not explain of it is time of the host: so much
per step, and so much per sequence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kvsim.engine.timeline import makespan, steady
from kvsim.errors import InputError, unknown
from kvsim.evidence.leastsquares import Fit, Parameter, fit_ratio
from kvsim.files import read_records
from kvsim.files.kinds import TABLE
from kvsim.graph import Array, Point
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Stack
from kvsim.machines.profiles import load_hardware, with_numbers
from kvsim.models.configs import load_model
from kvsim.prediction.memory import prefill_point
from kvsim.techniques import parse

FREE = (
    Parameter("time.step_s", 2e-4, 0.0, 20e-3),
    Parameter("time.sequence_s", 1e-5, 0.0, 300e-6),
)
"""What load tests tell of a stack."""

PRECISIONS = {
    "fp8": ("fp8", "fp8"), "bf16": ("fp16", "full"), "fp16": ("fp16", "full"),
    "bfloat16": ("fp16", "full"),
}  # fmt: skip
"""Weights and cache by a table's precision."""

COLUMNS = ("device", "model", "precision", "tp", "isl", "osl", "concurrency", "ttft_ms", "tpot_ms")


@dataclass(frozen=True)
class LoadTest:
    """One row of a table of load tests."""

    where: str  # file and line
    device: str
    model: str
    precision: str
    tp: int
    prompt: float  # [tokens]
    generate: float  # [tokens]
    sequences: float  # in flight on one replica
    latency: float  # of a request [s]


def read_load_tests(path: Path, engine: str, model: str | None = None) -> list[LoadTest]:
    """Rows of one engine; ``model`` only, where given.

    Raises
    ------
    InputError
        For a missing column, an unknown model or number, naming the line; or if no row is left.
    """
    found = []
    for line, row in read_records(path, TABLE):
        for column in COLUMNS:
            if column not in row:
                raise InputError(f"{path}: column {column} is missing; add it to the header")
        where = f"{path.name}, line {line}"
        if row.get("engine", engine) != engine:
            continue
        if row["precision"] not in PRECISIONS:
            raise unknown(f"precision in {where}:", row["precision"], PRECISIONS)
        found.append(_load_test(where, row))
    rows = [r for r in found if model in (None, r.model)]
    if not rows:
        raise InputError(f"{path}: no row of engine {engine!r}; correct --engine or the table")
    return rows


def _load_test(where: str, row: Mapping[str, str]) -> LoadTest:
    numbers = {}
    for name in ("tp", "isl", "osl", "concurrency", "ttft_ms", "tpot_ms", "dp"):
        text = row.get(name) or "1"
        try:
            numbers[name] = float(text)
        except ValueError:
            numbers[name] = -1.0
        if not 0 < numbers[name] < 1e12:
            raise InputError(f"{where}, {name}: got {text[:40]!r}; expected a number above 0")
    took = numbers["ttft_ms"] + (numbers["osl"] - 1) * numbers["tpot_ms"]
    model = row["model"].removesuffix("-Instruct")  # the shapes are those of the base model
    return LoadTest(
        where, row["device"], model, row["precision"], int(numbers["tp"]),
        numbers["isl"], numbers["osl"], numbers["concurrency"] / numbers["dp"], 1e-3 * took,
    )  # fmt: skip


def latencies(rows: Sequence[LoadTest], stack: Stack) -> Array:
    """What a request of each row takes. [s]"""
    out = np.empty(len(rows))
    groups: dict[tuple[str, str, str, int], list[int]] = {}
    for i, r in enumerate(rows):
        groups.setdefault((r.device, r.model, r.precision, r.tp), []).append(i)
    for (device, model, precision, tp), chosen in groups.items():
        weights, technique = PRECISIONS[precision]
        d = Deployment(load_model(model), load_hardware(device), stack, weights, tp)
        here = [rows[i] for i in chosen]
        batch = np.array([r.sequences for r in here])
        prompt = np.array([r.prompt for r in here])
        generate = np.array([r.generate for r in here])
        t = parse(technique)
        length = prompt + generate
        p = Point(batch, prompt + generate / 2, 1.0, prompt, length)
        step = sum(steady(s, d) for s in t.cycle(d, p).steps)
        prefill = makespan(t.prefill(d, prefill_point(1.0, prompt, generate)), d)
        out[chosen] = generate * step + batch * prefill
    return out


def fit_host(rows: Sequence[LoadTest], stack: Stack) -> Fit:
    """Host time per step and per sequence that explain measured latencies best."""
    measured = np.array([r.latency for r in rows])
    devices = {r.device for r in rows}

    def predict(numbers: dict[str, float]) -> Array:
        return latencies(rows, changed(stack, numbers, devices))

    return fit_ratio(predict, measured, FREE, robust=True)


def changed(stack: Stack, numbers: Mapping[str, float], devices: set[str]) -> Stack:
    """A stack with other numbers, on each of the cards too."""
    cards = {name: with_numbers(stack.on(name), numbers) for name in devices}
    return replace(with_numbers(stack, numbers), cards=cards)


def held_out_by_model(rows: Sequence[LoadTest], stack: Stack) -> Array:
    """Latencies of each model by host times fitted to the other models; one model: by its halves.

    Where a single model was measured, even and odd rows stand in for models. [s]
    """
    models = sorted({r.model for r in rows})
    part = [models.index(r.model) if len(models) > 1 else i % 2 for i, r in enumerate(rows)]
    out = np.empty(len(rows))
    devices = {r.device for r in rows}
    for which in sorted(set(part)):
        known = [r for r, p in zip(rows, part, strict=True) if p != which]
        chosen = [i for i, p in enumerate(part) if p == which]
        values = fit_host(known, stack).values
        out[chosen] = latencies([rows[i] for i in chosen], changed(stack, values, devices))
    return out
