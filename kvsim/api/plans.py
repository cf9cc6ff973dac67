"""``kvsim plan``: choose a deployment, a technique and its settings for a service or a batch."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvsim.api.cost import EXPLAINED, announce_cost, count_passes
from kvsim.api.deployments import (
    UBATCH,
    build_admission,
    build_deployments,
    build_layouts,
    keep_where_needed,
    largest_loss,
)
from kvsim.api.traffic import ServedRequests, build_traffic, read_scale
from kvsim.console import print_note
from kvsim.emit.engines import check_engines, write_settings
from kvsim.emit.served import serve_prediction
from kvsim.errors import InfeasibleError, InputError
from kvsim.inputs import TokenLengths
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import GIB
from kvsim.models.model import Model
from kvsim.options import ENGINE_SHARE, HOST_SHARE, Inputs, takes_options
from kvsim.planner.fleet.demand import count_work
from kvsim.planner.load import Load, ServiceLevel, draw_load, load_of_trace
from kvsim.planner.question import (
    DEFAULT_TPOT,
    DEFAULT_TTFT,
    Admission,
    PlanLimits,
    Question,
    Workload,
)
from kvsim.planner.remedies import (
    explain_choice,
    explain_no_service,
    raise_defaults,
)
from kvsim.planner.service import (
    ServicePlan,
    ServiceQuestion,
    ServiceSearch,
    plan_classes,
)
from kvsim.report.plan_service import make_result, serve_choice
from kvsim.report.result import Result
from kvsim.serving.rules import Rules
from kvsim.serving.servable import describe_left_out, within_context
from kvsim.techniques.released import engine_refusal
from kvsim.traces.read import load as load_trace
from kvsim.traces.requests import Requests

if TYPE_CHECKING:
    from kvsim.planner.plan import ChosenPlan


@takes_options("plan", "model", "gpu", "prompt", "generate", "batch")
def plan(inputs: Inputs) -> "Result[ChosenPlan] | Result[ServicePlan]":
    """Choose the technique, its settings and the deployment that perform best within the limits.

    By default a service is planned: requests arrive over time, and the plan maximises the request
    rate at which the TTFT and TPOT targets are met. With ``offline=True`` one batch of equal
    requests is planned, for throughput, latency or cost.

    Returns
    -------
    Result
        ``.choice`` has the technique, its settings and the batch; ``.rows`` compares it with full
        KV and with the alternatives; ``.answer.changes`` says what would perform better.

    Raises
    ------
    InputError
        If an argument is unknown, malformed or out of range; the message names the argument and
        says what was expected.
    InfeasibleError
        If nothing meets the limits; the message says which changes would help.

    Examples
    --------
    >>> best = plan("llama3.1-8b", "h100", offline=True, only="full,fp8", max_loss=0.04)
    >>> best.choice.technique, best.choice.batch > 100
    ('fp8', True)
    """
    check_engines(inputs.emit)
    if inputs.total_gpus is not None:
        return _plan_service(inputs, build_layouts(inputs))
    deployments = build_deployments(inputs)
    return (_plan_equal if inputs.offline else _plan_service)(inputs, deployments)


def _plan_service(inputs: Inputs, deployments: list[Deployment]) -> Result[ServicePlan]:
    question = _build_question(inputs, deployments, announce=True)

    def ask(changes: Mapping[str, str]) -> ServiceQuestion | None:
        """The question with some options changed; None where they cannot be."""
        shorter = set(changes) == {"prompt"}
        # other prompts could be shorter than the cached prefix that they include
        fixed = shorter and (inputs.prompt.kind != "mean" or inputs.cached)
        fixed = fixed or (not shorter and "total_gpus" in inputs.given)
        if inputs.trace is not None or fixed or ("stack" in changes and "stack" in inputs.given):
            return None
        try:
            other = Inputs(inputs.command, {**inputs.given, **changes})
            return _build_question(other, deployments if shorter else build_deployments(other))
        except (InputError, InfeasibleError):
            return None

    search = raise_defaults(ServiceSearch(question))
    found = search.solve()
    if found is None:
        raise explain_no_service(search, ask)
    _note_experts(inputs, found.choice.carried.deployment)
    settings = []
    if inputs.emit:
        settings = write_settings(inputs.emit, serve_choice(found.choice))
    classes = plan_classes(search.q) if inputs.per_class else []
    turns = list(explain_choice(search, ask)) if inputs.explain else []
    return make_result(found, settings, inputs.pareto, classes, turns)


def _build_question(
    inputs: Inputs, deployments: list[Deployment], announce: bool = False
) -> ServiceQuestion:
    """Build the planner's question about a service; announce its cost if it is large."""
    model, most = deployments[0].model, inputs.max_model_len or 0
    if inputs.trace is None:
        traffic = build_traffic(inputs, inputs.prompt, inputs.generate, model.max_context)
        load = draw_load(traffic, "")
        words = describe_load(inputs, inputs.lengths == "equal", load.requests)
        requests, left_out = within_context(load.requests, model, most)
        clause, caution = describe_left_out(left_out, len(load.requests), model, most)
        words += clause
        load = replace(load, requests=requests, words=words, left_out=left_out, caution=caution)
    else:
        load = read_load(inputs, model)
    if announce:
        count, passes = len(deployments), count_passes(load.requests, inputs.max_tokens)
        more = EXPLAINED[0] + count * EXPLAINED[1] if inputs.explain else 0
        work = 0 if load.requests.block_ids is None else count_work(load.requests)
        announce_cost(inputs, len(load.requests), count, work, passes, more)
    mean = max(round(load.prompt), 1), max(round(load.generate), 1)
    workload, admission = Workload(*mean, inputs.batch, service=True), build_admission(inputs)
    longest = max(zip(load.requests.prompt, load.requests.generate, strict=True), key=sum)
    questions = tuple(
        _ask(inputs, d, workload, admission, (int(longest[0]), int(longest[1])))
        for d in deployments
    )
    limits, tokens = questions[0].limits, inputs.max_tokens
    sure = max(inputs.sure, 0.5)  # with 0, as with 0.5, predictions are taken to be exact
    return ServiceQuestion(
        questions,
        load,
        ServiceLevel(limits.ttft, limits.tpot, inputs.percentile / 100, sure),
        Rules(max_seqs=inputs.max_seqs or 0, max_tokens=tokens or 0, max_model_len=most),
        tuned=tuple(x for x in ("max_tokens", "max_seqs") if x not in inputs.given),
        total_gpus=inputs.total_gpus or 0,
        research=bool(inputs.research),
        given=tuple(x for x in ("ttft", "tpot") if x in inputs.given),
    )


def read_load(inputs: Inputs, model: Model) -> Load:
    """Read the trace that a service is planned for, without requests that exceed the context.

    Parameters
    ----------
    inputs
        The options of ``kvsim plan``.
    model
        The model, whose maximum context decides which requests an engine rejects.

    Returns
    -------
    Load
        The accepted requests, their description and the number of rejected ones.
    """
    found = load_trace(inputs.trace)
    print_note(*found.notes)
    reuse = "prefixes found as the trace repeats them"
    reuse = reuse if found.requests.block_ids is not None else "no prefix reuse"
    words, most = f"requests of {inputs.trace}, {reuse}", inputs.max_model_len or 0
    requests, left_out = found.requests, 0
    if len(requests):
        requests, left_out = within_context(requests, model, most)
    clause, caution = describe_left_out(left_out, len(found.requests), model, most)
    words += clause
    asked = None
    if inputs.rate is not None and len(requests):
        clock = read_scale(inputs) == "clock"
        asked = ServedRequests(requests, inputs.trace, (), clock=clock).at_rate(inputs.rate)
    return replace(load_of_trace(requests, words, left_out, asked), caution=caution)


def describe_load(inputs: Inputs, equal: bool, requests: Requests) -> str:
    """Describe generated requests in words: their lengths and the share found in the prefix cache.

    Parameters
    ----------
    inputs
        The options of ``kvsim plan``.
    equal
        Whether all requests have the same lengths.
    requests
        The generated requests, whose 90th percentiles are reported.
    """
    prompt = inputs.prompt
    both = prompt, inputs.generate
    if equal:
        said = f"prompts of {prompt.first:,} and answers of {inputs.generate.first:,} tokens"
    elif all(x.kind == "mean" for x in both):
        long, longer = (_p90(x) for x in (requests.prompt, requests.generate))
        prompts = f"{prompt.first:,} tokens on average (p90 {long})"
        answers = f"{inputs.generate.first:,} (p90 {longer})"
        if prompt.first == 1 and long == "1":
            prompts = "1 token"
        if inputs.generate.first == 1 and longer == "1":
            answers = "1"
        said = f"prompts of {prompts} and answers of {answers}, as in sample:chat"
    else:
        said = f"prompts {_say(prompt)} and answers {_say(inputs.generate)}"
    if inputs.burst not in (None, 1):
        said += f", gaps with a coefficient of variation of {inputs.burst:g}"
    if inputs.turns:
        return f"{said}, conversations of {inputs.turns} turns"
    if inputs.cached:
        return f"{said}, {inputs.cached:,} tokens of each in the cache"
    if inputs.hit_rate:
        return f"{said}, {100 * inputs.hit_rate:g} % of each in the cache"
    return f"{said}, no prefix reuse"


def _p90(tokens: NDArray[np.int64]) -> str:
    """The 90th percentile of token counts, formatted with three significant digits."""
    return f"{int(float(f'{np.percentile(tokens, 90):.3g}')):,}"


def _say(asked: TokenLengths) -> str:
    if asked.kind == "range":
        return f"of {asked.first:,} to {asked.second:,} tokens"
    if asked.kind == "percentiles":
        return f"of {asked.first:,} tokens (median) and {asked.second:,} (95th percentile)"
    if asked.kind == "sample":
        return f"as in sample:{asked.sample}"
    return f"of {asked.first:,} tokens on average"


def _plan_equal(inputs: Inputs, deployments: list[Deployment]) -> "Result[ChosenPlan]":
    from kvsim.planner.local_search import can_fill_drive  # with a solver that services do without
    from kvsim.planner.plan import plan_among
    from kvsim.report import plan as report

    for name, asked in (("--prompt", inputs.prompt), ("--generate", inputs.generate)):
        if asked.kind != "mean":
            raise InputError(f"{name}: got {asked}; --offline expected one number of tokens")
    prompt, generate, context = (
        inputs.prompt.first,
        inputs.generate.first,
        deployments[0].model.max_context,
    )
    if "prompt" not in inputs.given and prompt + generate > context > generate:
        prompt = context - generate
    sizes = prompt, generate, inputs.batch
    one = Requests(np.zeros(1), np.array(sizes[:1]), np.array(sizes[1:2]))
    within_context(one, deployments[0].model)
    workload, admission = Workload(*sizes, service=False), build_admission(inputs)
    own = deployments[0].stack.family
    if own == "flexgen" and not (admission.only or engine_refusal(own, deployments[0])):
        admission = replace(admission, engine=own)  # no other engine has its times
    questions = [_ask(inputs, d, workload, admission, sizes[:2]) for d in deployments]
    if inputs.disk is not None and not any(map(can_fill_drive, questions)):
        raise InputError(
            "--disk: none of the techniques that may be planned keeps anything there; expected "
            "flexgen or offload among them, as --engine flexgen has for OPT models, or no --disk"
        )
    result = plan_among(questions)
    _note_experts(inputs, result.choice.deployment)
    settings = []
    if inputs.emit:
        share = result.limits.gpu_memory / result.choice.deployment.hardware.gpu_memory
        settings = write_settings(inputs.emit, serve_prediction(result.choice, share))
    return report.make_result(result, settings, inputs.pareto, inputs.explain, inputs.jobs or 0)


def _ask(
    inputs: Inputs,
    deployment: Deployment,
    workload: Workload,
    admission: Admission,
    longest: tuple[int, int],
) -> Question:
    """Build the planner's question for one deployment, moving experts to the host if necessary."""
    limits = _build_limits(inputs, deployment)
    where = keep_where_needed(inputs, deployment, longest, limits.gpu_memory)
    return Question(where, workload, inputs.objective, limits, admission)


def _note_experts(inputs: Inputs, deployment: Deployment) -> None:
    """Print how many layers' experts were moved to host memory, if kvsim chose the number."""
    many = len(deployment.host.experts)
    if many and inputs.n_cpu_moe in (None, "auto") and inputs.override_tensor is None:
        each = deployment.stack.time.prompt_pass
        passes = f"; --ubatch-size {each:g}: copied once per pass" if each == UBATCH else ""
        print_note(f"--n-cpu-moe {many}, the smallest number with which the model fits{passes}")


def _build_limits(inputs: Inputs, deployment: Deployment) -> PlanLimits:
    """Collect the memory, latency and quality limits from the options and the hardware."""
    h, none, offline = deployment.hardware, float("inf"), inputs.offline
    usable = h.gpu_memory * (inputs.gpu_memory_utilization or ENGINE_SHARE)
    if inputs.gpu_memory is not None:
        usable = inputs.gpu_memory
        if usable > h.gpu_memory:
            got, most = f"{usable / GIB:.12g}", f"{h.gpu_memory / GIB:.3f} GiB of {h.name}"
            raise InputError(f"--gpu-memory: got {got}; expected at most the {most}")
    usual = HOST_SHARE if inputs.host_memory is None else 1.0  # what is given is there to be used
    ttft, tpot = (none, none) if offline else (DEFAULT_TTFT, DEFAULT_TPOT)
    return PlanLimits(
        gpu_memory=usable,
        host_memory=h.host_memory * (inputs.host_memory_utilization or usual),
        ttft=ttft if inputs.ttft is None else inputs.ttft,
        tpot=tpot if inputs.tpot is None else inputs.tpot,
        loss=largest_loss(inputs),
        disk=h.disk_memory or none,
    )
