"""`kvsim plan`: the technique, settings and batch for equal requests or for a trace."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsim.commands.arguments import count, either, gib, number, option, seconds, tokens
from kvsim.commands.options import (
    GpuOption,
    HostOption,
    JsonOption,
    MaxSeqsOption,
    MaxTokensOption,
    ModelOption,
    StackOption,
    TpOption,
    WeightsOption,
    deployment,
    say_written,
)
from kvsim.errors import InputError

if TYPE_CHECKING:
    from kvsim.machines.deployment import Deployment
    from kvsim.planner.plan import Limits
    from kvsim.techniques.base import Technique


def plan(
    model: ModelOption,
    gpu: GpuOption,
    prompt: Annotated[
        str | None, option("--prompt", "N", "Prompt tokens; 2048 if not given.")
    ] = None,
    generate: Annotated[
        str | None, option("--generate", "N", "Tokens to generate; 128 if not given.")
    ] = None,
    batch: Annotated[
        str | None, option("--batch", "N|auto", "Batch size; chosen if not given.")
    ] = None,
    trace: Annotated[
        str | None, option("--trace", "FILE", "Plan for a request trace instead, or sample:NAME.")
    ] = None,
    rate: Annotated[
        str | None, option("--rate", "X", "The trace X times as fast, for one replica's share.")
    ] = None,
    per_class: Annotated[
        bool, typer.Option("--per-class", help="Let requests of a trace differ in technique.")
    ] = False,
    max_seqs: MaxSeqsOption = "256",
    max_tokens: MaxTokensOption = "2048",
    objective: Annotated[
        str, option("--objective", "WHAT", "throughput, latency or cost.")
    ] = "throughput",
    lossy: Annotated[bool, typer.Option("--lossy", help="Admit lossy techniques.")] = False,
    max_loss: Annotated[
        str | None, option("--max-loss", "0..1", "Quality that may be lost; unknown counts as 1.")
    ] = None,
    acceptance: Annotated[
        str | None, option("--acceptance", "0..1", "Share of drafted tokens you saw accepted.")
    ] = None,
    ttft: Annotated[
        str | None, option("--ttft", "TIME", "Longest time to first token, as 2s or 500ms.")
    ] = None,
    tpot: Annotated[
        str | None, option("--tpot", "TIME", "Longest time per token, as 50ms.")
    ] = None,
    gpu_memory: Annotated[
        str | None, option("--gpu-memory", "GIB", "GPU memory to use; all if not given.")
    ] = None,
    host_memory: HostOption = None,
    stack: StackOption = "fused",
    tp: TpOption = "1",
    weights: WeightsOption = "fp16",
    json: JsonOption = False,
    report: Annotated[str | None, option("--report", "FILE", "Write an HTML page there.")] = None,
) -> None:
    """Choose technique, settings and batch for a workload or trace."""
    from kvsim.planner.plan import Limits
    from kvsim.report import page, units
    from kvsim.techniques import candidates

    if lossy and max_loss is not None:
        raise InputError("--lossy and --max-loss: both are given; expected at most one of them")
    equal = {"--prompt": prompt, "--generate": generate, "--batch": batch}
    for name, value in equal.items():
        if trace is not None and value is not None:
            raise InputError(f"{name} and --trace: both are given; a trace has its own lengths")
    if trace is None and (per_class or rate is not None):
        lonely = "--per-class" if per_class else "--rate"
        raise InputError(f"{lonely}: there is no trace; expected --trace FILE with it")
    if report is not None:
        page.check_target(report)
    where = deployment(model, gpu, stack, tp, weights, host_memory)
    hardware = where.hardware
    usable = hardware.gpu_memory if gpu_memory is None else gib("--gpu-memory", gpu_memory)
    if usable > hardware.gpu_memory:
        most = f"at most the {units.gib(hardware.gpu_memory, 3)} GiB of {hardware.name}"
        raise InputError(f"--gpu-memory: got {gpu_memory}; expected {most}")
    loss = 0.0 if max_loss is None else number("--max-loss", max_loss, share=True)
    limits = Limits(
        gpu_memory=usable,
        host_memory=hardware.host_memory,
        ttft=seconds("--ttft", either(ttft, "none"), 60),
        tpot=seconds("--tpot", either(tpot, "none"), 1),
        loss=1.0 if lossy else loss,
    )
    accepted = None if acceptance is None else number("--acceptance", acceptance, share=True)
    some = candidates(accepted)
    page_path = None if report is None else Path(report)
    if trace is None:
        lengths = (
            tokens("--prompt", either(prompt, "2048")),
            tokens("--generate", either(generate, "128")),
        )
        size = None if batch in (None, "auto") else count("--batch", str(batch), ", or auto")
        _for_equal(where, (*lengths, size), objective, limits, some, page_path, json)
    else:
        speed = number("--rate", either(rate, "1"))
        engine = count("--max-seqs", max_seqs), count("--max-tokens", max_tokens)
        _for_trace(where, trace, speed, engine, per_class, objective, limits, some, page_path, json)


def _for_equal(
    where: "Deployment",
    workload: tuple[int, int, int | None],
    objective: str,
    limits: "Limits",
    some: "list[Technique]",
    report: Path | None,
    json: bool,
) -> None:
    from kvsim.planner.options import Workload
    from kvsim.planner.plan import make_plan
    from kvsim.report import names
    from kvsim.report import plan as shown
    from kvsim.report.json import print_json

    result = make_plan(where, Workload(*workload), objective, limits, some)
    answer, heading = shown.plan(result), names.deployment(where)
    if report is not None:
        shown.write_page(report, heading, answer, result)
        say_written(report)
    if json:
        print_json(answer)
    else:
        shown.show(heading, answer)


def _for_trace(
    where: "Deployment",
    trace: str,
    rate: float,
    engine: tuple[int, int],
    per_class: bool,
    objective: str,
    limits: "Limits",
    some: "list[Technique]",
    report: Path | None,
    json: bool,
) -> None:
    from kvsim.planner.trace import make_trace_plan
    from kvsim.report import names, plan_trace
    from kvsim.report.json import print_json
    from kvsim.serving.rules import Rules
    from kvsim.traces.read import load

    rules = Rules(max_seqs=engine[0], max_tokens=engine[1])
    found = load(trace)
    for note in found.notes:
        print(f"kvsim: {note}", file=sys.stderr)
    requests = found.requests.scaled(rate)
    result = make_trace_plan(where, requests, objective, limits, some, rules, per_class, _tell)
    answer = plan_trace.row(result)
    heading = names.deployment(where)
    if report is not None:
        plan_trace.write_page(report, heading, trace, answer, result)
        say_written(report)
    if json:
        print_json(answer)
    else:
        plan_trace.show(heading, trace, answer)


def _tell(what: str) -> None:
    """Progress, for somebody who watches."""
    if sys.stderr.isatty():
        print(f"kvsim: {what}", file=sys.stderr)
