"""`kvsim plan`: the technique, settings and batch for equal requests or for a trace."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsim.cli.admission import (
    AcceptanceOption,
    EngineOption,
    LossyOption,
    MaxLossOption,
    OnlyOption,
    QualityOption,
    WithoutOption,
    admission,
    largest_loss,
)
from kvsim.cli.arguments import count, either, number, option
from kvsim.cli.emit import EmitOption, engines, settings, show
from kvsim.cli.options import (
    DpOption,
    EpOption,
    HostOption,
    JsonOption,
    MaxSeqsOption,
    MaxTokensOption,
    ModelOption,
    PpOption,
    StackOption,
    command_line,
    say_written,
)
from kvsim.cli.plan_asked import deployments_of, limits_of, workload_of
from kvsim.errors import InputError
from kvsim.files import check_target
from kvsim.machines.hardware import DEFAULT_STACK, RELEASED

if TYPE_CHECKING:
    from kvsim.machines.deployment import Deployment
    from kvsim.planner.question import Admission, PlanLimits, Question


def plan(
    model: ModelOption,
    gpu: Annotated[
        str, option("--gpu", "NAME|PATH,..", "From `kvsim gpus`, or a file; several are compared.")
    ],
    prompt: Annotated[
        str | None,
        option("--prompt", "N", "Prompt tokens, 2048 if not given; 4k is 4,000, 4K 4,096."),
    ] = None,
    generate: Annotated[
        str | None, option("--generate", "N", "Tokens to generate; 128 if not given.")
    ] = None,
    batch: Annotated[
        str | None, option("--batch", "N|auto", "Sequences at once; chosen if not given.")
    ] = None,
    offline: Annotated[
        bool,
        typer.Option("--offline", help="One batch from an idle GPU; no targets, all the memory."),
    ] = False,
    trace: Annotated[
        str | None, option("--trace", "FILE", "Plan for a request trace instead, or sample:NAME.")
    ] = None,
    rate: Annotated[
        str | None,
        option("--rate", "X", "Scale the arrival rate by X: 0.25 for one of four replicas."),
    ] = None,
    per_class: Annotated[
        bool, typer.Option("--per-class", help="Let requests of a trace differ in technique.")
    ] = False,
    max_seqs: MaxSeqsOption = "256",
    max_tokens: MaxTokensOption = "2048",
    objective: Annotated[
        str, option("--objective", "WHAT", "throughput, latency or cost.")
    ] = "throughput",
    only: OnlyOption = None,
    without: WithoutOption = None,
    engine: EngineOption = None,
    lossy: LossyOption = False,
    max_loss: MaxLossOption = None,
    quality: QualityOption = None,
    acceptance: AcceptanceOption = None,
    ttft: Annotated[
        str | None, option("--ttft", "TIME", "Longest time to first token, as 500ms; 2s, or none.")
    ] = None,
    tpot: Annotated[
        str | None, option("--tpot", "TIME", "Longest time per token, as 50ms; 100ms, or none.")
    ] = None,
    gpu_memory: Annotated[
        str | None, option("--gpu-memory", "GIB", "GPU memory to use; 90 % if not given.")
    ] = None,
    host_memory: HostOption = None,
    stack: StackOption = DEFAULT_STACK,
    tp: Annotated[
        str, option("--tp", "N,..|auto", "Tensor-parallel GPUs: 1, 2, 4, 8; several are compared.")
    ] = "1",
    pp: PpOption = "1",
    dp: DpOption = "1",
    ep: EpOption = "1",
    weights: Annotated[
        str, option("--weights", "F,..|auto", "As in `predict`; several are compared.")
    ] = RELEASED,
    emit: EmitOption = None,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="Plans from the lowest TPOT to most throughput too.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Where another technique would be chosen, too.")
    ] = False,
    json: JsonOption = False,
    report: Annotated[str | None, option("--report", "FILE", "Write an HTML page there.")] = None,
) -> None:
    """Choose technique, settings and batch for a workload or trace."""
    from kvsim.planner.question import Question

    wanted = engines(emit)
    if report is not None:
        check_target(report, "--report")
    first, *rest = deployments_of(model, gpu, stack, tp, weights, host_memory, (pp, dp, ep))
    most_loss = largest_loss(max_loss, lossy)
    limits = limits_of(first, gpu_memory, ttft, tpot, most_loss, offline)
    admitted = admission(only, without, engine, lossy, quality, acceptance)
    page_path = None if report is None else Path(report)
    if trace is not None:
        if pareto or explain:
            lonely = "--pareto" if pareto else "--explain"
            raise InputError(f"{lonely} and --trace: both are given; it is for equal requests")
        if rest:
            raise InputError(
                "--trace with several --gpu, --tp, --pp, --dp, --ep or --weights: expected one of "
                "each"
            )
        speed = number("--rate", either(rate, "1"))
        rules = count("--max-seqs", max_seqs), count("--max-tokens", max_tokens)
        traced = (
            trace,
            speed,
            rules,
            per_class,
            objective,
            limits,
            admitted,
            page_path,
            json,
            wanted,
        )
        _for_trace(first, *traced)
        return
    workload = workload_of(prompt, generate, batch, offline)
    more = [name for name, given in (("pareto", pareto), ("explain", explain)) if given]
    asked = [
        Question(
            d, workload, objective,
            limits_of(d, gpu_memory, ttft, tpot, most_loss, offline), admitted,
        )
        for d in (first, *rest)
    ]  # fmt: skip
    _for_equal(asked, page_path, json, wanted, more)


def _for_equal(
    asked: "list[Question]",
    report: Path | None,
    json: bool,
    wanted: list[str],
    more: list[str],
) -> None:
    from kvsim.planner.alternatives import NoPlanError
    from kvsim.planner.plan import plan_among
    from kvsim.report import names
    from kvsim.report import plan as shown
    from kvsim.report.json import envelope, print_json

    try:
        result = plan_among(asked)
    except NoPlanError as none:
        from kvsim.report import plan_none
        from kvsim.report.plan_answer import unanswered

        if report is not None:
            plan_none.unplanned(none, asked[0].deployment, command_line()).write(report)
            say_written(report)
        if json:
            told = unanswered(none).verdict
            print_json(envelope(command_line(), plan_none.no_plan(none), verdict=told))
        raise
    found = shown.planned(result, command_line())
    answer, heading = found.row, names.deployment(result.choice.deployment)
    if wanted:
        from kvsim.emit.served import serve_prediction
        from kvsim.report.emitted import with_flags

        share = result.limits.gpu_memory / result.choice.deployment.hardware.gpu_memory
        answer["settings"] = settings(wanted, serve_prediction(result.choice, share))
        found = replace(found, answer=with_flags(found.answer, answer["settings"]))
        answer["answer"] = found.answer.row()
    if report is not None:
        found.write(report)
        say_written(report)
    if more:
        from kvsim.report import plan_more
    if "pareto" in more:
        answer["pareto"] = plan_more.front(result)
    if "explain" in more:
        answer["flips"] = plan_more.flips(result)
    if json:
        print_json(found.envelope())
        return
    shown.show(heading, answer)
    if "pareto" in more:
        plan_more.show_front(answer["pareto"])
    if "explain" in more:
        plan_more.show_flips(answer["flips"])
    show(answer.get("settings", []))


def _for_trace(
    where: "Deployment",
    trace: str,
    rate: float,
    engine: tuple[int, int],
    per_class: bool,
    objective: str,
    limits: "PlanLimits",
    admission: "Admission",
    report: Path | None,
    json: bool,
    wanted: list[str],
) -> None:
    from kvsim.emit.served import serve_costs
    from kvsim.planner.trace import make_trace_plan
    from kvsim.report import names, plan_trace
    from kvsim.report.json import print_json
    from kvsim.serving.rules import Rules
    from kvsim.traces.read import load

    rules = Rules(max_seqs=engine[0], max_tokens=engine[1]).over(where)
    found = load(trace)
    for note in found.notes:
        print(f"kvsim: {note}", file=sys.stderr)
    requests = found.requests.scaled(rate)
    if per_class and requests.depends:
        print(
            "kvsim: --per-class: turns of sessions come when the trace says, no client hangs up",
            file=sys.stderr,
        )
    args = requests, objective, limits, admission, rules, per_class, _tell
    result = make_trace_plan(where, *args)
    answer = plan_trace.row(result)
    heading = names.deployment(where)
    if report is not None:
        plan_trace.write_page(report, heading, trace, answer, result, command_line())
        say_written(report)
    lanes = result.choice.lanes
    if wanted and len(lanes) > 1:
        raise InputError("--emit: no engine runs several techniques; omit --per-class")
    if wanted:
        share = limits.gpu_memory / where.hardware.gpu_memory
        answer["settings"] = settings(wanted, serve_costs(lanes[0], share))
    if json:
        print_json(plan_trace.envelope(result, answer, command_line()))
    else:
        plan_trace.show(heading, trace, answer)
        show(answer.get("settings", []))


def _tell(what: str) -> None:
    """Progress, for somebody who watches."""
    if sys.stderr.isatty():
        print(f"kvsim: {what}", file=sys.stderr)
