"""Machines measured, and stacks fitted to runs and tables that were measured elsewhere."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory

import numpy as np

from kvsim.api.deployments import build_deployment
from kvsim.console import print_note
from kvsim.errors import InputError, require
from kvsim.evidence import loadtests
from kvsim.evidence.leastsquares import Fit
from kvsim.evidence.logs import read_run
from kvsim.evidence.machine.fit import Calibration, fit_samples
from kvsim.evidence.machine.profile import (
    Machine,
    find_datasheet,
    hardware_text,
    stack_text,
    with_error,
)
from kvsim.evidence.machine.samples import Log, Sample, read_samples
from kvsim.evidence.ops import fit, rows
from kvsim.evidence.ops.fit import ClassFit, errors_of
from kvsim.evidence.stackfile import fitted_text, measure_errors
from kvsim.files import (
    SAMPLES_FILE,
    TOML_PROFILE,
    check_target,
    own_output,
    read_text,
    replace_text,
    replacing_all,
    write_draft,
)
from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.machines.hardware import DEFAULT_STACK
from kvsim.machines.profiles import load_hardware, load_stack, stack_names
from kvsim.options import Inputs, takes_options
from kvsim.report import calibrate as report
from kvsim.report.calibrate import calibrate_from_run, make_table_result
from kvsim.report.json import Row, number
from kvsim.report.result import Result
from kvsim.report.session import describe_errors
from kvsim.report.units import format_number
from kvsim.serving.rules import Rules
from kvsim.techniques import parse_several
from kvsim.validate.processor import Processor
from kvsim.validate.session.state import SessionState, unpack
from kvsim.validate.session.work import all_units, profile_of

MIN_HELD_OUT = 0.05
"""Share of the shapes that is held out at least, if any is."""


@takes_options("calibrate", "out")
def calibrate(inputs: Inputs) -> Result[Row]:
    """Measure this machine, or fit a stack to a run or to tables, and write what was found.

    Returns
    -------
    Result
        The numbers found and their errors.

    Raises
    ------
    InputError
        For what the command would refuse.

    Examples
    --------
    >>> calibrate("mine.toml", device="cuda:0", quick=True)  # doctest: +SKIP
    """

    sources = inputs.device, inputs.from_run, inputs.from_ops, inputs.from_serving
    if sum(source is not None for source in (*sources, inputs.from_bundle)) != 1:
        raise InputError(
            "calibrate: expected one of --device cpu|cuda:N, --from-run LOG, --from-ops F.csv, "
            "--from-serving F.csv and --from-bundle F.tar.gz"
        )
    if inputs.from_bundle is not None:
        return _fit_bundle(inputs)
    if inputs.device is not None:
        return _measure_machine(inputs)
    if inputs.from_run is not None:
        return _fit_run(inputs)
    if inputs.engine is None:
        raise InputError("calibrate: --engine is missing; name the rows' engine, such as vllm")
    fit = _fit_operators if inputs.from_ops is not None else _fit_load_tests
    return make_table_result(fit(inputs), str(inputs.out))


def calibrate_run(
    log: str | Path,
    model: str,
    gpu: str,
    out: str | Path | None = None,
    technique: str = "full",
    **options: object,
) -> Result[Row]:
    """Fit a stack to the request log of a serving run; write it if ``out`` is given.

    Parameters
    ----------
    log
        The run's log.
    model, gpu, technique
        What was served, on which card, and how.
    options
        Others of ``calibrate``, as ``fit_first`` or ``max_seqs``.

    Returns
    -------
    Result
        Errors before and after the fit, and the numbers that the run determines.

    Raises
    ------
    InputError
        For a log that cannot be read, or too few requests.

    Examples
    --------
    >>> calibrate_run("bench.json", "llama3-8b", "rtx4090", "mine.toml")  # doctest: +SKIP
    """
    return calibrate(from_run=log, model=model, gpu=gpu, out=out, technique=technique, **options)


def _fit_run(inputs: Inputs) -> Result[Row]:
    if inputs.model is None or inputs.gpu is None:
        needed = "--from-run needs --model and --gpu"
        raise InputError(f"calibrate: {needed}; see kvsim calibrate --help")
    techniques = parse_several(inputs.technique)
    if len(techniques) != 1:
        got = inputs.technique[:40]
        raise InputError(f"--technique: got {got!r}; expected the one that was served")
    if inputs.out is not None:
        check_target(inputs.out, "--out")
    run = read_run(inputs.from_run)
    if run.left_out:
        print_note(f"{run.left_out} requests failed or did not finish and are omitted")
    base = inputs.stack or DEFAULT_STACK
    where = build_deployment(inputs, stack=base)
    base = base if base.endswith(".toml") else where.stack.family
    rules = Rules(
        max_seqs=inputs.max_seqs,
        max_tokens=inputs.max_tokens,
        block_tokens=inputs.block_tokens,
        blocks=inputs.blocks,
        prefix_caching=inputs.prefix_caching,
    )
    first = inputs.fit_first
    print_note(f"fitting to the first {first} of {len(run.requests)} requests")
    return calibrate_from_run(run, techniques[0], where, rules, first, base, inputs.out)


def _start(inputs: Inputs) -> str:
    """The stack that a fit starts from: classes without rows keep its numbers."""

    engine: str = inputs.engine
    return inputs.stack or (engine if engine in stack_names() else DEFAULT_STACK)


def _fit_operators(inputs: Inputs) -> Row:
    """Fit a stack to measured operators of one engine on one GPU and write it."""

    files, engine, share = inputs.from_ops, inputs.engine, inputs.hold_out
    if 0 < share < MIN_HELD_OUT:
        raise InputError(f"--hold-out: got {share:g}; expected 0, or from {MIN_HELD_OUT} to 0.5")
    check_target(inputs.out, "--out", (".toml",))
    hardware = load_hardware(inputs.gpu or _only_gpu(rows.pairs(files), engine))
    table = rows.read_ops(files, engine, hardware, inputs.version)
    for reason, count in table.rejected.items():
        print_note(f"{count:,} rows {reason} and are omitted")
    stack = load_stack(_start(inputs)).for_gpu(hardware.name)
    found = fit.fit_table(table, hardware, stack, round(1 / share) if share else 0)
    few = [
        f"{fit.class_name(r)} ({len(r)} rows)" for r in table.rows if len(r) < fit.MIN_CLASS_ROWS
    ]
    if not found:
        told = ", ".join(few)
        raise InputError(
            f"--from-ops: no class has {fit.MIN_CLASS_ROWS} rows: {told}; give more rows"
        )
    if few:
        print_note(f"too few to fit, base numbers kept: {', '.join(few)}")
    rows_of = [_class_row(f, fit.predict_rows(f.rows, hardware, stack)) for f in found]
    for row in rows_of:
        if row["refused"]:
            print_note(f"{row['class']}: the fit is refused, {row['refused']}")
    better = [f for f, row in zip(found, rows_of, strict=True) if not row["refused"]]
    replace_text(inputs.out, fit.card_text(table, better, stack.name, str(date.today())))
    return {
        "engine": engine,
        "version": table.version,
        "gpu": hardware.name,
        "rows": sum(len(f.rows) for f in found),
        "left_out": dict(table.rejected),
        "classes": rows_of,
    }


def _only_gpu(pairs: list[tuple[str, str]], engine: str) -> str:
    gpus = sorted({device for device, one in pairs if one == engine})
    if len(gpus) == 1:
        return gpus[0]
    known = ", ".join(sorted({one for _, one in pairs}))
    if not gpus:
        raise InputError(f"--engine: no row of {engine!r}; the files hold {known}")
    raise InputError(f"--gpu: the files hold {', '.join(gpus)}; name one")


def _class_row(found: ClassFit, before: Array) -> Row:
    """A class's errors on held-out shapes, beside those of the stack as it was.

    The fit is refused where it is no better than that; without rows held out that cannot be known.
    """

    off = errors_of(found)
    known = bool(np.isfinite(off).all())
    was = np.abs(before / found.rows.took - 1)
    refused = ""
    if known and not (
        np.median(off) < np.median(was) or np.quantile(off, 0.9) < np.quantile(was, 0.9)
    ):
        refused = (
            f"it is {_percents(off)} off on shapes that it did not see, as shipped {_percents(was)}"
        )
    return {
        "class": found.name,
        "rows": len(found.rows),
        **_error_fields(off if known else None, was),
        "refused": refused,
        "numbers": _number_rows(found.fit),
    }


def _error_fields(off: Array | None, before: Array) -> Row:
    """Errors that are held out, if any are, and those of the stack as it was."""

    return {
        f"{part}_{name}": None if errors is None else float(np.quantile(errors, q))
        for name, errors in (("error", off), ("before", before))
        for part, q in (("median", 0.5), ("p90", 0.9))
    }


def _number_rows(fit: Fit) -> Row:
    """Fitted numbers, their standard errors, and whether the rows determine them."""

    return {
        key: {"value": value, "error": number(fit.errors[key]), "known": key not in fit.unknown}
        for key, value in fit.values.items()
    }


def _fit_load_tests(inputs: Inputs) -> Row:
    """Fit an engine's host times to a table of load tests and write the stack."""

    path, engine, out = inputs.from_serving, inputs.engine, inputs.out
    check_target(out, "--out", (".toml",))
    rows = loadtests.read_load_tests(path, engine)
    devices = sorted({r.device for r in rows})
    stack = load_stack(_start(inputs))
    found = loadtests.fit_host(rows, stack)
    measured = np.array([r.latency for r in rows])
    before = np.abs(loadtests.predict_latencies(rows, stack) / measured - 1)
    apart = loadtests.predict_held_out(rows, stack)
    off = np.abs(apart / measured - 1)
    better = np.median(off) < np.median(before) and np.quantile(off, 0.9) < np.quantile(before, 0.9)
    refused = ""
    if not better:
        held_out, shipped = _percents(off), f"those of {stack.name} {_percents(before)}"
        refused = f"held out, the fitted times are {held_out} off, {shipped}"
    if refused:
        print_note(f"The fit is refused, and {stack.name}'s host times stay: {refused}")
        found = replace(found, values={}, errors={})
        apart, off = loadtests.predict_latencies(rows, stack), before
    told = f"latency of load tests held out by model: {_percents(off)}"
    source = f"{len(rows)} load tests of {engine} on {', '.join(devices)} ({path.name})"
    one = stack.for_gpu(devices[0]) if len(devices) == 1 else stack
    bare = replace(found, residuals=found.residuals[:0])
    base = inputs.stack if inputs.stack and inputs.stack.endswith(".toml") else one.family
    checked = None
    if len(devices) == 1 and len({r.model for r in rows}) == 1:
        where = devices[0], rows[0].model, "fp8" if rows[0].precision == "fp8" else "full"
        checked = measure_errors({"latency": measured / apart}, where)
    replace_text(out, fitted_text(one, base, bare, source, told, str(date.today()), checked))
    return {
        "engine": engine,
        "gpus": devices,
        "rows": len(rows),
        **_error_fields(off, before),
        "refused": refused,
        "numbers": _number_rows(found),
    }


def _percents(off: Array) -> str:
    median, p90 = (format_number(100 * float(np.quantile(off, q)), 2) for q in (0.5, 0.9))
    return f"{median} % (median) and {p90} % (90th percentile)"


def _measure_machine(inputs: Inputs) -> Result[Row]:
    """Measure a device, and fit its profile and the stack beside it."""
    device, out, quick = inputs.device, inputs.out, inputs.quick

    check_place(out)
    require("torch")
    import torch

    from kvsim.validate.bench import device as devices
    from kvsim.validate.bench.suite import run_suite
    from kvsim.validate.machine import find_device

    where = find_device(device)
    if where.type == "cpu":
        Processor.detect().bind()
        torch.set_num_threads(devices.compute_threads())
    found = devices.describe(where)
    check_same(out, found.name)
    place = devices.place(where, quick)
    in_use = devices.context_memory(where)
    samples = out.with_suffix(".samples.jsonl")
    log = Log(samples, devices.header(found, quick))
    with log.held():
        if log.done:
            print_note(f"continuing after {len(log.done)} finished units of measurements")
        try:
            run_suite(place, log, print_note)
        except KeyboardInterrupt:
            print_note(f"{len(log.items)} measurements are in {samples}; run it again to continue")
            raise
    notes = devices.suspicions(devices.describe(where))
    host = devices.host_memory()
    conditions = (*devices.conditions(found, place), *notes)
    machine = Machine(found.name, found.memory, host, in_use, place.cache, conditions)
    on_gpu, today = where.type == "cuda", str(date.today())
    return _fit_machine(out, log.items, machine, notes, on_gpu, today).result(inputs)


def _fit_bundle(inputs: Inputs) -> Result[Row]:
    """Fit a profile and a stack to what a session has measured on another machine."""

    bundle, out = inputs.from_bundle, inputs.out
    check_place(out)
    with TemporaryDirectory() as folder, own_output():  # what is unpacked is read and replaced
        state = unpack(bundle, Path(folder))
        found = fit_session(state)
        if found is None:
            raise InputError(
                f"--from-bundle: {bundle} holds no calibration; "
                f"make.py gpu --resume {quote(str(bundle))} continues"
            )
        check_same(out, found.machine.name)
        known = describe_errors(state, all_units("cuda:0"))
        with replacing_all(*written_files(out)) as drafts:  # the stack and the samples go first
            kinds = (TOML_PROFILE, TOML_PROFILE, SAMPLES_FILE)
            for draft, made, kind in zip(drafts, written_files(found.out), kinds, strict=True):
                text = read_text(made, kind)
                if known and draft is drafts[1]:
                    text = with_error(text, f"{known}; {found.day}")
                write_draft(draft, text)
        return found.result(inputs)


def fit_session(state: SessionState) -> "FittedMachine | None":
    """Fit the samples of a session anew, as these are what it has measured.

    Parameters
    ----------
    state
        What the session has found. Its profile and stack are replaced.

    Returns
    -------
    FittedMachine or None
        None where there is no calibration, or a full bundle has left its samples out.
    """

    facts, profile = state.read("facts"), profile_of(state)
    log = profile.with_suffix(".samples.jsonl") if profile else Path()
    if facts is None or profile is None or not log.is_file():
        return None
    machine = Machine(
        facts["device"],
        facts["memory_B"],
        facts["host_memory_B"],
        facts["context_B"],
        facts["cache_B"],
        (*facts["conditions"], *facts["suspicions"]),
    )
    day = facts.get("date", str(date.today()))
    return _fit_machine(
        profile, read_samples(log)[1], machine, facts["suspicions"], bool(facts["cuda"]), day
    )


@frozen
class FittedMachine:
    """A profile and a stack that have been written, and the fit that they hold."""

    out: Path
    machine: Machine
    fit: Calibration
    samples: int
    suspicions: Sequence[str]
    on_gpu: bool
    day: str

    def result(self, inputs: Inputs) -> Result[Row]:
        """Tell what was found."""

        one = self.machine
        sheet = find_datasheet(one.name, one.gpu_memory) if self.on_gpu else None
        fields = report.machine_fields(
            self.fit, one, sheet, self.suspicions, self.samples, inputs.out
        )
        return report.make_machine_result(fields, one.notes)


def _fit_machine(
    out: Path,
    samples: Sequence[Sample],
    machine: Machine,
    suspicions: Sequence[str],
    on_gpu: bool,
    day: str,
) -> FittedMachine:
    """Fit a profile and a stack to samples, and write both."""

    fit = fit_samples(samples)
    with replacing_all(out, stack_path(out)) as (profile, stack):  # the stack goes first
        write_draft(stack, stack_text(fit, machine, day))
        write_draft(profile, hardware_text(fit, machine, day))
        load_stack(stack)  # what cannot be read back is not kept
        load_hardware(profile)
    return FittedMachine(out, machine, fit, len(samples), suspicions, on_gpu, day)


def stack_path(profile: Path) -> Path:
    """Return the path of the stack that is calibrated together with a profile.

    Parameters
    ----------
    profile
        The profile's file.

    Returns
    -------
    Path
        The stack's file, beside it.
    """
    return profile.with_suffix(".stack.toml")


def written_files(profile: Path) -> tuple[Path, Path, Path]:
    """Name the files of a calibration.

    Parameters
    ----------
    profile
        Where the hardware profile is written.

    Returns
    -------
    tuple of Path
        The profile, and beside it the stack and the samples.
    """
    return profile, stack_path(profile), profile.with_suffix(".samples.jsonl")


def check_place(out: Path) -> None:
    """Refuse a place that no profile could be written to, before anything is measured.

    Parameters
    ----------
    out
        The profile's file; the stack and the samples are written beside it.

    Raises
    ------
    InputError
        Saying what is in the way.
    """
    check_target(out, "--out", (".toml",))
    for beside in written_files(out)[1:]:
        check_target(beside, f"--out, whose {beside.name} is written too")


def check_same(out: Path, device: str) -> None:
    """Refuse to replace the profile of another device.

    Parameters
    ----------
    out
        The profile's file.
    device
        Name of the device to be measured.

    Raises
    ------
    InputError
        If there is one, or something that is no profile.
    """

    if out.exists():
        with own_output():
            there = load_hardware(out)
        if there.device != device:
            name = there.device or there.title
            raise InputError(
                f"--out: {out} is a profile of {name}, this is {device}; choose another place"
            )
