"""The technique, settings and batch for equal requests or for a trace."""

from typing import TYPE_CHECKING

from kvsim.api.deployments import build_admission, build_deployments, largest_loss
from kvsim.api.engines import check_engines, write_settings
from kvsim.console import print_note, print_progress
from kvsim.errors import InputError
from kvsim.options import ENGINE_SHARE, Inputs, takes_options

if TYPE_CHECKING:
    from kvsim.machines.deployment import Deployment
    from kvsim.planner.plan import ChosenPlan
    from kvsim.planner.question import PlanLimits
    from kvsim.planner.trace import TracePlan
    from kvsim.report.result import Result


@takes_options("plan", "model", "gpu", "prompt", "generate", "batch")
def plan(inputs: Inputs) -> "Result[ChosenPlan] | Result[TracePlan]":
    """Choose the technique, settings and batch for equal requests, or for a trace on one replica.

    Returns
    -------
    Result
        The plan and its alternatives.

    Raises
    ------
    InputError
        For what the command would refuse.
    InfeasibleError
        If nothing meets the limits; the text says what would.
    """
    check_engines(inputs.emit)
    deployments = build_deployments(inputs)
    if inputs.trace is None:
        return _plan_equal(inputs, deployments)
    if len(deployments) > 1:
        raise InputError(
            "--trace with several --gpu, --tp, --pp, --dp, --ep or --weights: expected one of each"
        )
    return _plan_trace(inputs, deployments[0])


def _plan_equal(inputs: Inputs, deployments: "list[Deployment]") -> "Result[ChosenPlan]":
    from kvsim.emit.served import serve_prediction
    from kvsim.planner.alternatives import NoPlanError
    from kvsim.planner.plan import plan_among
    from kvsim.planner.question import Question, Workload
    from kvsim.report.plan import make_result

    sizes = inputs.prompt, inputs.generate, inputs.batch
    workload, admission = Workload(*sizes, service=not inputs.offline), build_admission(inputs)
    questions = [
        Question(d, workload, inputs.objective, _build_limits(inputs, d), admission)
        for d in deployments
    ]
    try:
        result = plan_among(questions)
    except NoPlanError as none:
        none.deployment = deployments[0]
        raise
    settings = []
    if inputs.emit:
        share = result.limits.gpu_memory / result.choice.deployment.hardware.gpu_memory
        settings = write_settings(inputs.emit, serve_prediction(result.choice, share))
    return make_result(result, inputs.line(), settings, inputs.pareto, inputs.explain)


def _plan_trace(inputs: Inputs, where: "Deployment") -> "Result[TracePlan]":
    from kvsim.emit.served import serve_costs
    from kvsim.planner.trace import make_trace_plan
    from kvsim.report.plan_trace import make_result
    from kvsim.serving.rules import Rules
    from kvsim.traces.read import load

    limits = _build_limits(inputs, where)
    rules = Rules(max_seqs=inputs.max_seqs, max_tokens=inputs.max_tokens).scale_to(where)
    found = load(inputs.trace)
    for note in found.notes:
        print_note(note)
    requests = found.requests.scaled(1.0 if inputs.rate is None else inputs.rate)
    if inputs.per_class and requests.depends:
        print_note("--per-class: turns of sessions come when the trace says, no client hangs up")
    admission = build_admission(inputs)
    result = make_trace_plan(
        where,
        requests,
        inputs.objective,
        limits,
        admission,
        rules,
        inputs.per_class,
        print_progress,
    )
    lanes = result.choice.lanes
    if inputs.emit and len(lanes) > 1:
        raise InputError("--emit: no engine runs several techniques; omit --per-class")
    share = limits.gpu_memory / where.hardware.gpu_memory
    settings = write_settings(inputs.emit, serve_costs(lanes[0], share)) if inputs.emit else []
    return make_result(result, inputs.trace, inputs.line(), settings)


def _build_limits(inputs: Inputs, deployment: "Deployment") -> "PlanLimits":
    """What a plan must stay within, as the options and the hardware say."""
    from kvsim.planner.question import DEFAULT_TPOT, DEFAULT_TTFT, GIB, PlanLimits

    h, none, offline = deployment.hardware, float("inf"), inputs.offline
    usable = h.gpu_memory * (1.0 if offline else ENGINE_SHARE)
    if inputs.gpu_memory is not None:
        usable = inputs.gpu_memory
        if usable > h.gpu_memory:
            got, most = f"{usable / GIB:.12g}", f"{h.gpu_memory / GIB:.3f} GiB of {h.name}"
            raise InputError(f"--gpu-memory: got {got}; expected at most the {most}")
    ttft, tpot = (none, none) if offline else (DEFAULT_TTFT, DEFAULT_TPOT)
    return PlanLimits(
        gpu_memory=usable,
        host_memory=h.host_memory,
        ttft=ttft if inputs.ttft is None else inputs.ttft,
        tpot=tpot if inputs.tpot is None else inputs.tpot,
        loss=largest_loss(inputs),
    )
