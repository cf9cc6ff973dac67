"""Host times of an engine from tables of load tests: (isl, osl, concurrency, ttft, tpot) per row.

A request's latency is predicted as its tokens times a decode step of all sequences in flight, plus
the prompts of those sequences. What the kernels do not explain of it is time of the host: so much
per step and per sequence after the GPU's work, so much per prompt that a pass over it takes at
least, and so much per token in the process that sends the text, which no request can outrun.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from pathlib import Path

import numpy as np

from kvsim.engine.ops import issue_seconds
from kvsim.engine.timeline import makespan, steady_seconds
from kvsim.errors import InputError, unknown
from kvsim.evidence.leastsquares import BLIND, Fit, Parameter, fit_ratio, robust_loss
from kvsim.files import TABLE, read_records
from kvsim.frozen import frozen
from kvsim.graph import Array, Point
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Stack
from kvsim.machines.profiles import load_hardware, load_stack, number_of, with_numbers
from kvsim.models.configs import load_model
from kvsim.prediction.generate import Prediction
from kvsim.prediction.memory import prefill_point
from kvsim.prediction.pool import pool
from kvsim.techniques import parse
from kvsim.techniques.technique import Technique

HOST_PARAMETERS = (
    Parameter("time.step_s", 2e-4, 0.0, 20e-3),
    Parameter("time.sequence_s", 1e-5, 0.0, 300e-6),
    Parameter("server.token_s", 100e-6, 0.0, 1e-3),
    Parameter("server.prompt_s", 15e-3, 0.0, 0.1),
)
"""What load tests tell of a stack."""

HOST_TIMES = tuple(p.name for p in HOST_PARAMETERS)
START_FACTORS = (0.5, 1.5)  # times each first guess: work that is hidden tells nothing of itself
NOTHING = 1e-12  # [s]
IMPOSSIBLE_SHARE = 0.5  # of the least time per token that the hardware's full rates allow
SHORT = 16  # tokens of the sequence that this time is of

PRECISIONS = {
    "fp8": ("fp8", "fp8"),
    "bf16": ("fp16", "full"),
    "fp16": ("fp16", "full"),
    "bfloat16": ("fp16", "full"),
}
"""Weights and cache by a table's precision."""

NUMBER_COLUMNS = ("tp", "isl", "osl", "concurrency", "ttft_ms", "tpot_ms")
LOAD_TEST_COLUMNS = ("device", "model", "precision", *NUMBER_COLUMNS)
RANGE_COLUMN = "random_range_ratio"
"""Column that a table may have: lengths were drawn evenly between this share of isl and osl and the
whole, as ``--random-range-ratio`` of the engines' serving benchmarks says."""


@frozen
class LoadTest:
    """One row of a table of load tests, in which the number of requests in flight is constant.

    Attributes
    ----------
    where
        File and line, for messages.
    device
        Name of the GPU profile.
    model
        Name of the model in the catalogue.
    precision
        Format of weights and cache, a key of ``PRECISIONS``.
    tp
        Tensor-parallel GPUs.
    prompt, generate
        Mean lengths. [tokens]
    sequences
        Requests in flight on one replica.
    latency
        Mean time of a request. [s]
    per_token
        Mean time per token after the first. [s]
    """

    where: str
    device: str
    model: str
    precision: str
    tp: int
    prompt: float
    generate: float
    sequences: float
    latency: float
    per_token: float


def read_load_tests(path: Path, engine: str, model: str | None = None) -> list[LoadTest]:
    """Read the load tests of one engine from a table.

    Parameters
    ----------
    path
        The table, as CSV.
    engine
        The engine whose rows are read; rows without an engine count as its own.
    model
        Read only the rows of this model, if given.

    Returns
    -------
    list of LoadTest
        The rows in the order of the file.

    Raises
    ------
    InputError
        For a missing column, an unknown precision or a bad number, naming the line; or if no row is
        left.
    """
    found = []
    for line, row in read_records(path, TABLE):
        for column in LOAD_TEST_COLUMNS:
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
    for name in (*NUMBER_COLUMNS, "dp", RANGE_COLUMN):
        text = row.get(name) or "1"
        try:
            numbers[name] = float(text)
        except ValueError:
            numbers[name] = -1.0
        most, expected = (
            (1.0, "above 0 and at most 1") if name == RANGE_COLUMN else (1e12, "above 0")
        )
        if not 0 < numbers[name] <= most:
            raise InputError(f"{where}, {name}: got {text[:40]!r}; expected a number {expected}")
    mean = (1.0 + numbers[RANGE_COLUMN]) / 2
    prompt, generate = (max(1.0, mean * numbers[name]) for name in ("isl", "osl"))
    took = numbers["ttft_ms"] + (generate - 1) * numbers["tpot_ms"]
    model = row["model"].removesuffix("-Instruct")  # the shapes are those of the base model
    return LoadTest(
        where,
        row["device"],
        model,
        row["precision"],
        int(numbers["tp"]),
        prompt,
        generate,
        numbers["concurrency"] / numbers["dp"],
        1e-3 * took,
        1e-3 * numbers["tpot_ms"],
    )


@frozen
class Kernels:
    """Predicted GPU times of load tests without the host's, and how many sequences run at once.

    All arrays have one element per load test.

    Attributes
    ----------
    step
        Time of a decoding step of all running sequences. [s]
    prefill
        Time to read one prompt. [s]
    issued
        Least time that the host needs to issue the pass over a prompt. [s]
    running
        Sequences that the cache has space for.
    asked
        Sequences in flight, including those that wait.
    generate
        Generated tokens per sequence. [tokens]
    around
        Time of a request outside the engine: its server, tokeniser and client. [s]
    sync
        Host time of one synchronisation. [s]
    """

    step: Array
    prefill: Array
    issued: Array
    running: Array
    asked: Array
    generate: Array
    around: Array
    sync: float

    def select(self, chosen: Array) -> "Kernels":
        """Select some of the load tests.

        Parameters
        ----------
        chosen
            Boolean mask or indices of the load tests.

        Returns
        -------
        Kernels
            The same quantities for the selected load tests.
        """
        arrays = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "sync"}
        return replace(self, **{name: values[chosen] for name, values in arrays.items()})

    def latencies(self, host: Mapping[str, float]) -> Array:
        """Predict the latency of a request in each load test.

        Sequences without room wait, so that a request takes longer in proportion. The process that
        sends text works beside the engine all the time; over a run the slower of the two counts,
        and requests wait for it before they start.

        Parameters
        ----------
        host
            Host times of the engine by their keys; those left out are 0. [s]

        Returns
        -------
        array
            Latency per load test. [s]

        References
        ----------
        P. J. Denning and J. P. Buzen, "The operational analysis of queueing network models", ACM
        Computing Surveys 10 (1978): asymptotic bounds. https://doi.org/10.1145/356733.356735
        """
        sending = host.get("server.token_s", 0.0) * self.running
        each = np.maximum(self.per_token(host), sending)
        return np.asarray(self.asked / self.running * self.generate * each + self.around)

    def per_token(self, host: Mapping[str, float]) -> Array:
        """Predict the time per output token of a running request in each load test.

        The prompts of the other requests are read in between. A prompt takes no less than the
        host's work beside it, and than issuing its kernels.

        Parameters
        ----------
        host
            Host times of the engine by their keys; those left out are 0. [s]

        Returns
        -------
        array
            Time per output token, per load test. [s]
        """
        said = {name: host.get(name, 0.0) for name in HOST_TIMES}
        alone = said["time.step_s"] + said["time.sequence_s"] * self.running
        if said["time.sequence_s"]:  # the host waits for the tokens before it issues more
            alone = alone + self.sync
        first = self.prefill + said["time.step_s"] + said["time.sequence_s"]
        prompt = np.maximum(np.maximum(first, self.issued), said["server.prompt_s"])
        return np.asarray(self.step + alone + self.running * prompt / self.generate)

    def latencies_then_per_token(self, host: Mapping[str, float]) -> Array:
        """Predict the latencies of all load tests, followed by their times per token.

        Parameters
        ----------
        host
            Host times of the engine by their keys; those left out are 0. [s]

        Returns
        -------
        array
            Two values per load test: all latencies come first. [s]
        """
        return np.concatenate([self.latencies(host), self.per_token(host)])


def predict_kernels(rows: Sequence[LoadTest], stack: Stack) -> Kernels:
    """Predict the GPU's work in each load test, leaving the stack's host times out.

    Parameters
    ----------
    rows
        The load tests.
    stack
        The engine's stack; its kernels' numbers are used.

    Returns
    -------
    Kernels
        Times of a decode step and a prompt, and the sequences that run at once, per load test.
    """
    nothing = dict.fromkeys((*HOST_TIMES, "time.issue_s"), 0.0)
    bare = replace_numbers(stack, nothing, {r.device for r in rows})
    step, prefill, issued, running, around = (np.empty(len(rows)) for _ in range(5))
    groups: dict[tuple[str, str, str, int], list[int]] = {}
    for i, r in enumerate(rows):
        groups.setdefault((r.device, r.model, r.precision, r.tp), []).append(i)
    for (device, *_), chosen in groups.items():
        here = [rows[i] for i in chosen]
        t, d = _served(here[0], bare)
        prompt = np.array([r.prompt for r in here])
        generate = np.array([r.generate for r in here])
        batch = np.array([min(r.sequences, max(1.0, np.floor(_room(t, d, r)))) for r in here])
        p = Point(batch, prompt + generate / 2, 1.0, prompt, prompt + generate)
        running[chosen] = batch
        step[chosen] = sum(steady_seconds(s, d) for s in t.cycle(d, p).steps)
        reading = t.prefill(d, prefill_point(1.0, prompt, generate))
        prefill[chosen] = makespan(reading, d)
        own = replace(d, stack=stack.for_gpu(device))
        issued[chosen] = issue_seconds(own, reading.groups, prompt)
        around[chosen] = own.stack.server.request_overhead(prompt)
    asked, generate = np.array([(r.sequences, r.generate) for r in rows]).T
    return Kernels(step, prefill, issued, running, asked, generate, around, stack.time.sync)


def _served(row: LoadTest, stack: Stack) -> tuple[Technique, Deployment]:
    """What a load test was measured on."""
    weights, technique = PRECISIONS[row.precision]
    d = Deployment(load_model(row.model), load_hardware(row.device), stack, weights, row.tp)
    return parse(technique), d


def check_possible(
    where: str, per_token: float, technique: Technique, deployment: Deployment
) -> None:
    """Check that tokens are not generated faster than the deployment can.

    Parameters
    ----------
    where
        Description of the measurement, for the message.
    per_token
        Measured time per token. [s]
    technique, deployment
        Technique and deployment of the measurement.

    Raises
    ------
    InputError
        If it is less than half of the time that one sequence needs at the full rates of the
        hardware, which GPU caches or several tokens per message cannot explain.
    """
    ideal = replace(deployment, stack=load_stack("ideal"))
    least = float(Prediction(technique, ideal, np.ones(1), SHORT, SHORT).tpot_s[0])
    if per_token < IMPOSSIBLE_SHARE * least:
        raise InputError(
            f"{where}: {1e3 * per_token:.3g} ms per token, where {deployment.hardware.name} needs "
            f"{1e3 * least:.3g} ms or more for {deployment.model.name}; correct the model, GPU, "
            f"tp, weights or times"
        )


def _room(technique: Technique, deployment: Deployment, row: LoadTest) -> float:
    """Sequences of a row that the cache has room for at once."""
    found = pool(technique, deployment, int(row.prompt), int(row.generate))
    return found.tokens / found.length


def predict_latencies(rows: Sequence[LoadTest], stack: Stack) -> Array:
    """Predict the latency of a request in each load test with a stack's own host times.

    Parameters
    ----------
    rows
        The load tests, on any cards.
    stack
        The engine's stack, whose numbers for each card are used.

    Returns
    -------
    array
        Latency per load test. [s]
    """
    out = np.empty(len(rows))
    for device in {r.device for r in rows}:
        here = [i for i, r in enumerate(rows) if r.device == device]
        found = predict_kernels([rows[i] for i in here], stack)
        out[here] = found.latencies(host_times(stack.for_gpu(device)))
    return out


def host_times(stack: Stack) -> dict[str, float]:
    """Collect the host times of a stack.

    Parameters
    ----------
    stack
        The stack of an engine.

    Returns
    -------
    dict
        Time by key of the stack file, for each of ``HOST_TIMES``. [s]
    """
    return {name: number_of(stack, name) for name in HOST_TIMES}


def fit_host(rows: Sequence[LoadTest], stack: Stack) -> Fit:
    """Fit an engine's host times to measured latencies and times per token.

    A time that the rows do not determine stays as the stack has it: the one known worst is left
    out, until the rows determine all others.

    Parameters
    ----------
    rows
        The load tests.
    stack
        The stack to start from.

    Returns
    -------
    Fit
        The host times, with infinite errors for those that the rows do not determine.

    Raises
    ------
    InputError
        As ``check_possible``, for each row.
    """
    slowest_first = sorted(rows, key=lambda row: -row.per_token)
    for row in {(r.device, r.model, r.precision, r.tp): r for r in slowest_first}.values():
        check_possible(row.where, row.per_token, *_served(row, stack))
    return _fitted(predict_kernels(rows, stack), rows, _own_host_times(rows, stack))


def _own_host_times(rows: Sequence[LoadTest], stack: Stack) -> dict[str, float]:
    """The stack's own host times on the rows' first card. [s]"""
    return host_times(stack.for_gpu(rows[0].device))


def _fitted(gpu: Kernels, rows: Sequence[LoadTest], kept: Mapping[str, float]) -> Fit:
    free: tuple[Parameter, ...] = HOST_PARAMETERS
    measured = np.array([[r.latency, r.per_token] for r in rows]).T.ravel()
    while free:
        found = [
            fit_ratio(
                lambda values: gpu.latencies_then_per_token({**kept, **values}),
                measured,
                [replace(p, start=p.start * s) for p, s in zip(free, scales, strict=True)],
                robust=True,
            )
            for scales in product(START_FACTORS, repeat=len(free))
        ]
        best = min(found, key=robust_loss)
        doubt = {p.name: best.errors[p.name] / max(best.values[p.name], NOTHING) for p in free}
        worst = max(doubt, key=doubt.__getitem__)
        if doubt[worst] <= BLIND:
            break
        free = tuple(p for p in free if p.name != worst)
    else:
        best = Fit({}, {}, gpu.latencies_then_per_token(kept) / measured - 1, ())
    missing = [p.name for p in HOST_PARAMETERS if p not in free]
    return replace(
        best,
        values=best.values | {name: kept[name] for name in missing},
        errors=best.errors | dict.fromkeys(missing, float("inf")),
    )


def replace_numbers(stack: Stack, numbers: Mapping[str, float], devices: set[str]) -> Stack:
    """Replace numbers of a stack and of its variants for some cards.

    Parameters
    ----------
    stack
        The stack to start from.
    numbers
        New values by key of the stack file.
    devices
        Names of the GPU profiles whose variants are changed.

    Returns
    -------
    Stack
        The stack with the new numbers.
    """
    cards = {name: with_numbers(stack.for_gpu(name), numbers) for name in devices}
    return replace(with_numbers(stack, numbers), cards=cards)


def predict_held_out(rows: Sequence[LoadTest], stack: Stack) -> Array:
    """Predict each model's latencies with host times fitted to the other models.

    Where a single model was measured, lengths of prompts and outputs stand in for models.

    Parameters
    ----------
    rows
        The load tests.
    stack
        The stack to start from.

    Returns
    -------
    array
        Latency per load test, predicted without its own model. [s]
    """
    several = len({r.model for r in rows}) > 1
    part = [(r.model,) if several else (r.prompt, r.generate) for r in rows]
    gpu, kept = predict_kernels(rows, stack), _own_host_times(rows, stack)
    out = np.empty(len(rows))
    for which in sorted(set(part)):
        chosen = np.array([p == which for p in part])
        left = [r for r, p in zip(rows, part, strict=True) if p != which]
        values = _fitted(gpu.select(~chosen), left, kept).values
        out[chosen] = gpu.select(chosen).latencies(values)
    return out
