"""``kvsim calibrate``: measure a machine, or fit a software stack to measurements."""

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
from kvsim.evidence.machine.fit import fit_samples
from kvsim.evidence.machine.profile import (
    Machine,
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
from kvsim.graph import Array
from kvsim.machines.hardware import DEFAULT_STACK
from kvsim.machines.profiles import load_hardware, load_stack, stack_names
from kvsim.options import Inputs, takes_options
from kvsim.report.calibrate import (
    FittedMachine,
    calibrate_from_run,
    make_machine_result,
    make_table_result,
)
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
    """Measure this machine, or fit a software stack to measurements, and write the profile.

    Exactly one source is given: ``device`` measures this machine and writes a hardware profile
    together with a stack; ``from_run`` fits a stack to the request log of a server, ``from_ops`` to
    measured kernels, and ``from_serving`` to load tests; ``from_bundle`` reads what ``make.py gpu``
    measured on another machine.

    Returns
    -------
    Result
        The fitted numbers with standard errors, and the errors of predictions made with them.

    Raises
    ------
    InputError
        If an argument is unknown, malformed or out of range; the message names the argument and
        says what was expected.

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
    """Fit a software stack to the request log of a server.

    Parameters
    ----------
    log
        The log: JSON of a benchmark client, a CSV or JSONL table, or a run that ``kvsim simulate
        --out`` wrote.
    model, gpu, technique
        The model, the GPU and the technique of the server.
    out
        TOML file for the fitted stack; None to write none.
    options
        Further keywords of :func:`calibrate`, such as ``fit_first`` or ``max_seqs``.

    Returns
    -------
    Result
        Errors of predicted times before and after the fit, and the numbers that the log determines.

    Raises
    ------
    InputError
        If the log cannot be read or has too few requests.

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
        raise InputError(f"--technique: got {got!r}; expected the technique of the server")
    if inputs.out is not None:
        check_target(inputs.out, "--out")
    run = read_run(inputs.from_run)
    if run.left_out:
        print_note(f"{run.left_out} requests failed or did not finish and are omitted")
    base = inputs.stack or DEFAULT_STACK
    where = build_deployment(inputs, stack=base)
    base = base if base.endswith(".toml") else where.stack.family
    limits = inputs.select("max_seqs", "max_tokens", "block_tokens", "blocks", "prefix_caching")
    rules = Rules(**limits)
    first = inputs.fit_first
    print_note(f"fitting to the first {first} of {len(run.requests)} requests")
    return calibrate_from_run(run, techniques[0], where, rules, first, base, inputs.out)


def _start(inputs: Inputs) -> str:
    """Name the stack that a fit starts from, whose numbers stay where no row determines them."""

    engine: str = inputs.engine
    return inputs.stack or (engine if engine in stack_names() else DEFAULT_STACK)


def _fit_operators(inputs: Inputs) -> Row:
    """Fit a stack to measured kernels of one engine on one GPU, and write it."""

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
    fitted = {one.name for one in found}
    others = [(fit.class_name(r), len(r)) for r in table.rows if fit.class_name(r) not in fitted]
    told = ", ".join(f"{name} ({count} rows)" for name, count in others)
    if not found:
        least = fit.MIN_CLASS_ROWS
        raise InputError(f"--from-ops: no class has {least} rows: {told}; give more rows")
    if others:
        print_note(f"not fitted, base numbers kept: {told}")
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
        raise InputError(f"--engine: the files have no rows for {engine!r}, only for {known}")
    raise InputError(f"--gpu: the files hold {', '.join(gpus)}; name one")


def _class_row(found: ClassFit, before: Array) -> Row:
    """Compare errors of a kernel class on held-out shapes before and after the fit.

    The fit is refused where neither the median nor the 90th percentile of the errors is smaller.
    """

    off = errors_of(found)
    known = bool(np.isfinite(off).all())
    was = np.abs(before / found.rows.took - 1)
    refused = ""
    if known and all(np.quantile(off, q) >= np.quantile(was, q) for q in (0.5, 0.9)):
        refused = f"it is {_percents(off)} off on shapes that it did not see, as shipped "
        refused += _percents(was)
    return {
        "class": found.name,
        "rows": len(found.rows),
        **_error_fields(off if known else None, was),
        "refused": refused,
        "numbers": _number_rows(found.fit),
    }


def _error_fields(off: Array | None, before: Array) -> Row:
    """Median and 90th percentile of relative errors, held out and before the fit."""

    return {
        f"{part}_{name}": None if errors is None else float(np.quantile(errors, q))
        for name, errors in (("error", off), ("before", before))
        for part, q in (("median", 0.5), ("p90", 0.9))
    }


def _number_rows(fit: Fit) -> Row:
    """Return fitted numbers, standard errors, and whether the rows determine them."""

    return {
        key: {"value": value, "error": number(fit.errors[key]), "known": key not in fit.unknown}
        for key, value in fit.values.items()
    }


def _fit_load_tests(inputs: Inputs) -> Row:
    """Fit an engine's host times to a table of load tests, and write the stack."""

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
    """Measure a device, and write its hardware profile and stack."""
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
    with log.resume_locked():
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
    done = _fit_machine(out, log.items, machine, notes, on_gpu, today)
    return make_machine_result(done, inputs.out)


def _fit_bundle(inputs: Inputs) -> Result[Row]:
    """Fit a profile and a stack to what ``make.py gpu`` measured on another machine."""

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
        return make_machine_result(found, out)


def fit_session(state: SessionState) -> FittedMachine | None:
    """Fit a hardware profile and a stack to the samples of a ``make.py gpu`` session.

    Parameters
    ----------
    state
        The session's folder. Its profile and stack are replaced.

    Returns
    -------
    FittedMachine or None
        None if the session has no calibration samples.
    """

    facts, profile = state.read("facts"), profile_of(state)
    log = profile.with_suffix(".samples.jsonl") if profile else Path()
    if facts is None or profile is None or not log.is_file():
        return None
    sizes = {"gpu_memory": "memory_B", "host_memory": "host_memory_B"}
    sizes |= {"context_memory": "context_B", "cache": "cache_B"}
    given = {name: facts[key] for name, key in sizes.items()}
    suspicions, day = facts["suspicions"], facts.get("date", str(date.today()))
    notes = (*facts["conditions"], *suspicions)
    machine = Machine(facts["device"], notes=notes, **given)
    samples = read_samples(log)[1]
    return _fit_machine(profile, samples, machine, suspicions, bool(facts["cuda"]), day)


def _fit_machine(
    out: Path,
    samples: Sequence[Sample],
    machine: Machine,
    suspicions: Sequence[str],
    on_gpu: bool,
    day: str,
) -> FittedMachine:
    """Fit a hardware profile and a stack to samples, and write both files."""

    fit = fit_samples(samples)
    with replacing_all(out, stack_path(out)) as (profile, stack):  # the stack goes first
        write_draft(stack, stack_text(fit, machine, day))
        write_draft(profile, hardware_text(fit, machine, day))
        load_stack(stack)  # what cannot be read back is not kept
        load_hardware(profile)
    return FittedMachine(out, machine, fit, len(samples), suspicions, on_gpu, day)


def stack_path(profile: Path) -> Path:
    """Return the path of the stack file that belongs to a hardware profile.

    Parameters
    ----------
    profile
        Path of the profile, such as ``mine.toml``.

    Returns
    -------
    Path
        Path in the same folder, such as ``mine.stack.toml``.
    """
    return profile.with_suffix(".stack.toml")


def written_files(profile: Path) -> tuple[Path, Path, Path]:
    """Return the paths of all files that a calibration writes.

    Parameters
    ----------
    profile
        Path of the hardware profile.

    Returns
    -------
    tuple of Path
        The profile, the stack and the samples, in the same folder.
    """
    return profile, stack_path(profile), profile.with_suffix(".samples.jsonl")


def check_place(out: Path) -> None:
    """Check, before anything is measured, that the files of a calibration can be written.

    Parameters
    ----------
    out
        Path of the hardware profile.

    Raises
    ------
    InputError
        If a file cannot be written, saying why.
    """
    check_target(out, "--out", (".toml",))
    for beside in written_files(out)[1:]:
        check_target(beside, f"--out, whose {beside.name} is written too")


def check_same(out: Path, device: str) -> None:
    """Check that an existing profile, which would be replaced, is of the same device.

    Parameters
    ----------
    out
        Path of the hardware profile.
    device
        Name of the device to be measured.

    Raises
    ------
    InputError
        If the file is a profile of another device, or no profile.
    """

    if out.exists():
        with own_output():
            there = load_hardware(out)
        if there.device != device:
            name = there.device or there.title
            raise InputError(
                f"--out: {out} is a profile of {name}, this is {device}; choose another place"
            )
