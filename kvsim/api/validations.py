"""``kvsim validate``: run techniques in PyTorch and compare them with their predictions."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import date
from hashlib import sha256
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from kvsim.api.calibrations import fit_session, stack_path
from kvsim.console import print_note
from kvsim.errors import InputError, require
from kvsim.evidence.machine.profile import with_error
from kvsim.files import TOML_PROFILE, check_target, own_output, read_text, replace_text
from kvsim.inputs import format_plain
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Hardware, Stack
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.options import Inputs, takes_options
from kvsim.quality.layers import assign, write
from kvsim.quality.planfile import read_plan
from kvsim.report import validate_times as report
from kvsim.report.result import Result
from kvsim.report.session import make_result
from kvsim.techniques import parse, parse_several
from kvsim.techniques.technique import Technique
from kvsim.traces import attention
from kvsim.validate.counts.expected import RandomPrompts
from kvsim.validate.session.state import unpack
from kvsim.validate.session.work import all_units
from kvsim.validate.times.compared import Compared, SkippedPoint, keep_points, summarise
from kvsim.version import __version__

Step = TypeVar("Step")

DEFAULT_MODEL = "smollm2-135m"
MAX_WINDOWS, MIN_SCORED = 8, 16
"""Windows of the text that a plan's loss is measured on at most, tokens scored of each at least."""


def measured_stack(gpu: str) -> Stack:
    """Load the stack that was calibrated together with a hardware profile.

    Parameters
    ----------
    gpu
        Name or path of the profile.

    Returns
    -------
    Stack
        The stack file in the same folder; if there is none, the stack of kvsim's own kernels.
    """

    beside = stack_path(Path(gpu))
    return load_stack(beside if beside.exists() else "kvsim")


@takes_options("validate")
def validate(inputs: Inputs) -> Result[Any]:
    """Run techniques in PyTorch and compare FLOPs, bytes, memory and tokens with predictions.

    If ``gpu`` is a profile that :func:`calibrate` measured on this device, times are compared as
    well.

    Returns
    -------
    Result
        The comparison; ``.passed`` is False if a count differs without explanation or an error is
        too large.

    Raises
    ------
    InputError
        If an argument is unknown, malformed or out of range; the message names the argument and
        says what was expected.

    Examples
    --------
    >>> validate(model="smollm2-135m", layers=2, technique="kivi").passed  # doctest: +SKIP
    True
    """
    if inputs.from_bundle is not None:
        return _show_bundle(inputs)
    if inputs.plan is not None or inputs.quality:
        return _validate_as_before(inputs)
    techniques = _parse_techniques(inputs)

    hardware, limit = load_hardware(inputs.gpu), inputs.max_error
    require("torch")
    if hardware.device:
        return _compare_times(inputs, hardware, techniques)
    if limit is not None:
        raise InputError(
            f"--gpu: {inputs.gpu} was not measured here, and times can only be compared on the "
            f"machine that was; kvsim calibrate --device {quote(inputs.device)} measures it"
        )
    return _compare_counts(inputs, hardware, techniques)


def _show_bundle(inputs: Inputs) -> Result[Any]:
    """Show the results of a ``make.py gpu`` session, without a GPU or PyTorch."""

    with TemporaryDirectory() as folder, own_output():  # what is unpacked is read and replaced
        state = unpack(inputs.from_bundle, Path(folder))
        fit_session(state)
        return make_result(state, all_units("cuda:0"))


def _validate_as_before(inputs: Inputs) -> Result[Any]:
    """Run the subcommand that an older spelling of the options stands for."""
    names = ["model", "device", "batch", "prompt", "generate", "gpu", "text"]
    run, more = validate_plan, {"file": inputs.plan}
    if inputs.per_layer:
        run, more, names = validate_layers, {}, [*names, "out", "bits"]
    elif inputs.quality:
        run, more, names = validate_quality, {}, [*names, "out", "technique"]
    given = {name: inputs.given[name] for name in names if name in inputs.given}
    found: Result[Any] = run(**given, **more)
    return found


def _print_notes(steps: Iterable[Step | str]) -> Iterator[Step]:
    """Print the remarks among the steps of a measurement, and yield the others."""
    for step in steps:
        if isinstance(step, str):
            print_note(step)
        else:
            yield step


def _parse_techniques(inputs: Inputs) -> list[Technique]:
    return [] if inputs.technique == "all" else parse_several(inputs.technique)


def _compare_counts(inputs: Inputs, hardware: Hardware, techniques: list[Technique]) -> Result[Any]:
    import torch

    from kvsim.report import validate as report
    from kvsim.validate.counts.check import (
        CannotRun,
        CheckedTechnique,
        check,
        check_workload,
        rehearse,
        representative,
        sort_runnable,
    )
    from kvsim.validate.machine import find_device
    from kvsim.validate.model.attention import kernels
    from kvsim.validate.model.checkpoint import open_model
    from kvsim.validate.techniques import check_known

    where = find_device(inputs.device)
    check_known(techniques)
    arch, source = open_model(inputs.model or DEFAULT_MODEL)
    arch = arch.cut(inputs.layers) if inputs.layers else arch
    work = RandomPrompts(inputs.batch or 2, inputs.prompt or 96, inputs.generate or 16)
    check_workload(arch, source, work, where)
    d = Deployment(arch.model, hardware, load_stack("kvsim"))
    for technique in techniques:
        rehearse(arch, technique, work, d)
    if not techniques:
        every = representative(arch.model, work)
        techniques, refused = sort_runnable(arch, every, lambda t: (t, work), d)
        print_note(*(f"left out: {error}" for error in refused))
    found: list[CheckedTechnique] = []
    failed: list[CannotRun] = []
    for step in check(arch, source, techniques, work, where, d):
        if isinstance(step, CheckedTechnique):
            found.append(step)
        elif isinstance(step, CannotRun):
            failed.append(step)
            print_note(f"left out: {step.technique} cannot run here: {step.reason}")
        else:
            print_note(step)
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu"
    weights = "random weights" if source is None else "its own weights"
    depth = f"{arch.model.layers} layer{'s' * (arch.model.layers > 1)}"
    title = f"{arch.model.name}, {depth}, {weights}, on {name}: "
    title += f"batch {work.batch}, prompt {work.prompt}, generate {work.generate}"
    about = {
        "model": arch.model.name,
        "layers": arch.model.layers,
        "weights": "random" if source is None else source.where,
        "device": inputs.device,
        "device_name": name,
        "torch": torch.__version__,
        "attention": kernels(arch.model, where),
        "batch": work.batch,
        "prompt": work.prompt,
        "generate": work.generate,
    }
    return report.make_result(found, title, about, failed)


def _compare_times(
    inputs: Inputs, hardware: Hardware, techniques: Sequence[Technique]
) -> Result[Any]:
    """Run techniques over a grid of points and compare measured with predicted times."""

    import torch

    from kvsim.validate.bench import device as devices
    from kvsim.validate.machine import find_device
    from kvsim.validate.techniques import check_known
    from kvsim.validate.times.points import Grid, compare_times

    where = find_device(inputs.device)
    check_known(techniques)
    if where.type == "cpu":
        torch.set_num_threads(devices.compute_threads())
    here = devices.describe(where)
    if hardware.device != here.name:
        raise InputError(
            f"--gpu: {inputs.gpu} was measured on {hardware.device}, this is {here.name}; "
            f"kvsim calibrate --device {quote(inputs.device)} measures this one"
        )
    place = devices.place(where, quick=False)
    beside, stack = stack_path(Path(inputs.gpu)), measured_stack(inputs.gpu)
    grid = Grid.for_device(where).reduced(inputs.points)
    found: list[Compared] = []
    missing: list[SkippedPoint] = []
    profile = sha256(f"{hardware} {stack}".encode()).hexdigest()
    about = {"device": here.name, "profile": profile, "kvsim": __version__}
    kept = keep_points(beside.with_name(f"{Path(inputs.gpu).stem}.points.jsonl"), about)
    with kept.resume_locked():
        if kept.done:
            print_note(f"continuing after {len(kept.done)} that {kept.path} holds")
        whole = False
        try:
            for step in compare_times(grid, techniques, where, place.half, hardware, stack, kept):
                if isinstance(step, Compared):
                    found.append(step)
                elif isinstance(step, SkippedPoint):
                    missing.append(step)
                else:
                    print_note(step)
            whole = True
        finally:
            if found and not whole:
                off = 100 * summarise(found).median
                print_note(
                    f"{len(found)} comparisons so far, {format_plain(off, 2)} % off at the median; "
                    f"they are in {kept.path}, and the same command continues"
                )
        if not found:
            raise InputError(f"--techniques: none could run; {missing[0].reason}")
        summary, suspicious = summarise(found), devices.suspicions(devices.describe(where))
        answer = report.times_fields(found, missing, summary, here.name, suspicious)
        if inputs.points == "all" and beside.exists():
            known = report.describe_error(answer, str(date.today()))
            with own_output():
                text = read_text(beside, TOML_PROFILE)
                replace_text(beside, with_error(text, known))
        if len(found) == len(kept.done):  # else it holds what another command asked for
            kept.remove()
    limit = inputs.max_error
    passed = limit is None or summary.median <= limit
    return replace(report.make_result(answer), passed=passed)


@takes_options("validate quality", "model")
def validate_quality(inputs: Inputs) -> Result[Any]:
    """Measure perplexity, attention weights and accepted drafts of techniques on a text.

    Returns
    -------
    Result
        Loss of each technique relative to the full cache.

    Examples
    --------
    >>> validate_quality("./my-model", technique="kivi", out="quality.json")  # doctest: +SKIP
    """
    techniques = _parse_techniques(inputs)
    require("torch")
    from kvsim.report.validate import make_trace_result
    from kvsim.validate.counts.check import sort_runnable
    from kvsim.validate.quality.measure import OpenedCheckpoint, measure
    from kvsim.validate.quality.settings import (
        Reading,
        check_reading,
        list_default_techniques,
        sort_out,
        widest_run,
    )
    from kvsim.validate.quality.text import read_text

    if inputs.out is not None:
        check_target(inputs.out, "--out")
    sort_out(techniques)
    read = read_text(inputs.text)
    opened = OpenedCheckpoint.open(inputs.model, inputs.device, inputs.gpu)
    reading = Reading(inputs.batch, inputs.prompt, inputs.generate)
    some = techniques or list_default_techniques(opened.arch.model, reading.prompt)
    able, refused = sort_runnable(
        opened.arch, some, lambda t: widest_run(t, reading), opened.machine
    )
    for error in refused:
        if techniques:
            raise error
        print_note(f"left out: {error}")
    settings = sort_out(able)
    length = check_reading(opened.arch, reading, bool(settings.drafts), opened.device)
    decoder, texts, about = opened.read(read, reading, length)
    facts = opened.facts(read, reading)
    for trace in _print_notes(measure(decoder, settings, reading, texts, about, facts)):
        if inputs.out is not None:
            attention.write(inputs.out, trace)
    return make_trace_result(trace)


@takes_options("validate layers", "model")
def validate_layers(inputs: Inputs) -> Result[Any]:
    """Measure the loss from quantising the keys or the values of one layer at a time.

    With ``bits``, an assignment of widths to layers with that mean is computed from these losses
    and run as well.

    Returns
    -------
    Result
        Loss by layer and width, and that of the assignment.

    Examples
    --------
    >>> validate_layers("./my-model", bits=3)  # doctest: +SKIP
    """
    require("torch")
    from kvsim.report.validate import Executed, make_layer_result
    from kvsim.validate.quality.measure import (
        OpenedCheckpoint,
        executed,
        keep_losses,
        measure_layers,
    )
    from kvsim.validate.quality.settings import Reading, check_reading
    from kvsim.validate.quality.text import read_text

    if inputs.out is not None:
        check_target(inputs.out, "--out")
    read = read_text(inputs.text)
    opened = OpenedCheckpoint.open(inputs.model, inputs.device, inputs.gpu)
    reading = Reading(inputs.batch, inputs.prompt, inputs.generate)
    length = check_reading(opened.arch, reading, False, opened.device)
    decoder, texts, about = opened.read(read, reading, length)
    head = opened.arch.model.head_dim
    group = max(g for g in (8, 16, 32, 64) if head % g == 0 or g == 8)
    sizes = [inputs.batch, inputs.prompt, inputs.generate]
    so_far, plan = None, None
    if inputs.out is not None:
        so_far = keep_losses(Path(inputs.out), {**about, "sizes": sizes, "group": group})
    with so_far.resume_locked() if so_far else nullcontext():
        if so_far and so_far.done:
            print_note(f"{len(so_far.done)} runs are done already ({so_far.path})")
        steps = measure_layers(decoder, reading, texts, group, about, so_far=so_far)
        for losses in _print_notes(steps):
            if inputs.out is not None:
                write(inputs.out, losses)
            if so_far:
                so_far.remove()
    if inputs.bits is not None:
        widths = assign(losses, inputs.bits)
        notation = losses.notation(widths)
        print_note(f"running {notation}")
        (measured,) = executed(decoder, reading, texts, [parse(notation)])
        plan = Executed(inputs.bits, widths, measured)
    return make_layer_result(losses, plan)


@takes_options("validate plan", "file")
def validate_plan(inputs: Inputs) -> Result[Any]:
    """Run the plan of a ``kvsim plan --json`` file, and compare loss, times and memory with it.

    Returns
    -------
    Result
        Measured and planned values, for the plan and for the full cache.

    Raises
    ------
    InputError
        If the plan is for another model, cannot run here, or needs more memory than there is.

    Examples
    --------
    >>> validate_plan("plan.json", device="cuda:0")  # doctest: +SKIP
    """

    path, gpu = inputs.file, inputs.gpu
    plan = read_plan(path)
    require("torch")
    from kvsim.report import validate as report
    from kvsim.validate.bench import device as devices
    from kvsim.validate.counts.check import SLACK, check_workload, rehearse
    from kvsim.validate.machine import find_device
    from kvsim.validate.model.checkpoint import open_packaged
    from kvsim.validate.model.decoder import Decoder
    from kvsim.validate.model.weights import load_weights, random_weights
    from kvsim.validate.planned import measure_loss, time_plan
    from kvsim.validate.quality.measure import OpenedCheckpoint
    from kvsim.validate.quality.settings import Reading, check_reading
    from kvsim.validate.quality.text import read_text
    from kvsim.validate.techniques import check_known

    where, hardware = find_device(inputs.device), load_hardware(gpu)
    check_known([plan.technique])
    model = inputs.model or plan.model
    arch, source = open_packaged(model)
    machine = Deployment(arch.model, hardware, measured_stack(gpu))
    reason = plan.technique.refuses(machine)
    if reason:
        raise InputError(f"--plan: {path!r} cannot run on {arch.model.name}: {reason}")
    work = RandomPrompts(
        inputs.batch or plan.batch, inputs.prompt or plan.prompt, inputs.generate or plan.generate
    )
    check_workload(arch, source, work, where)
    rehearse(arch, plan.technique, work, machine)
    left_out: list[str] = []
    loss = None
    if source is None:
        left_out.append("loss: random weights are not meaningful; give a checkpoint as --model")
    elif plan.technique.drafts:
        left_out.append("loss: drafts are verified, so that full KV's tokens are kept")
    else:
        windows, scored = min(work.batch, MAX_WINDOWS), max(work.generate, MIN_SCORED)
        reading = Reading(windows, work.prompt, scored)
        length = check_reading(arch, reading, False, where)
        opened = OpenedCheckpoint(model, arch, source, where, machine)
        decoder, texts, _ = opened.read(read_text(inputs.text), reading, length)
        print_note(f"loss: {reading.description.partition(';')[0]}")
        loss = measure_loss(decoder, plan.technique, reading, texts)
    half = devices.place(where, quick=False).half
    weights = (
        load_weights(arch, source, where, half) if source else random_weights(arch, where, half)
    )
    runner = Decoder(arch, weights, work.prompt + work.generate + SLACK, deployment=machine)
    here = devices.describe(where).name
    known = hardware.device == here
    if not known:
        left_out.append(
            f"predicted times: {gpu} was not measured on this machine ({here}); "
            f"`kvsim calibrate --device {quote(inputs.device)}` measures it"
        )
    (times,) = _print_notes(time_plan(runner, plan.technique, work))
    found = times.compared(machine, work, known)
    kind = "random weights" if source is None else "its own weights"
    sizes = f"batch {work.batch}, prompt {work.prompt}, generate {work.generate}"
    title = f"{arch.model.name}, {kind}, on {here}: {sizes}"
    outcome = report.PlanRun(plan, title, work, loss, found, left_out)
    return report.make_plan_result(outcome)
