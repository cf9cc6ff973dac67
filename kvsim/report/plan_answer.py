"""The verdict on a plan: what to run, what it gives, what limits it, and why."""

from collections.abc import Iterator
from math import isfinite

from kvsim.machines.deployment import Deployment
from kvsim.planner.alternatives import LABELS, Alternative, NoPlanError
from kvsim.planner.plan import ChosenPlan
from kvsim.planner.question import DEFAULT_TPOT, DEFAULT_TTFT
from kvsim.prediction.generate import Prediction
from kvsim.report import evidence, hostlink, units
from kvsim.report.acceptable import released, what_it_loses
from kvsim.report.answer import Answer, verdict
from kvsim.report.json import Row, number
from kvsim.report.kernels import slower_kernels
from kvsim.report.names import SPOKEN, given, label, params
from kvsim.report.plan_changes import SAME, changes, instead, priced
from kvsim.report.plan_settings import name_of, narrowed, ranges_of, settings_to_paste, times
from kvsim.report.reasons import why

CLAUSES = "is ", "its ", "takes ", "costs ", "the choice "  # that reasons begin with


def answered(plan: ChosenPlan, bound_by: str) -> Answer:
    """The answer of ``kvsim plan``.

    Parameters
    ----------
    bound_by : what the choice spends most of its time on.
    """
    p, d = plan.choice, plan.choice.deployment
    loses = what_it_loses(p.technique, plan.evidence)
    more = [instead(plan), loses, _unserved(plan), _targets(plan)]
    more.append(why(bound_by, p.generate, plan.question.workload.service))
    said = verdict([_waves(plan), _run(plan), _against_full(plan), _narrowed(d)], more)
    return Answer(
        verdict=said,
        figures=_figures(p),
        changes=[*changes(plan, said), *slower_kernels(p)],
        runner_up=_runner_up(plan),
        settings=list(settings_to_paste(plan)),
        evidence=[*_quality(plan), *evidence.on_card(d, label(p.technique))],
        assumed=[
            *evidence.assumed(d.hardware, float(p.host_bytes[0]), bound_by),
            *hostlink.said(p),
        ],
    )


def unanswered(none: NoPlanError) -> Answer:
    """Where nothing is within the limits: the gentlest change that does, and the others."""
    first = none.advice[0] if none.advice else None
    needed = ["No plan meets the limits."]
    if first is not None:
        needed.append(f"{first} does." if first.prediction else f"Try {first}.")
    return Answer(
        verdict=verdict(needed),
        changes=[*(f"{a}." for a in none.advice), *_relaxations(none)],
    )


def _relaxations(none: NoPlanError) -> Iterator[str]:
    for name, value in none.relaxations.items():
        amount = units.size(value) if name.endswith("memory") else units.seconds(value)
        yield f"{LABELS[name]} of {amount} would do, all else as it is."


def _machine(prediction: Prediction) -> str:
    d = prediction.deployment
    count = f"{d.gpus} x " if d.gpus > 1 else ""
    return f"{count}{d.hardware.name} with {d.weights} weights"


def _run(plan: ChosenPlan) -> str:
    p = plan.choice
    memory = units.size(number(p.gpu_bytes))
    capacity = units.size(p.deployment.hardware.gpu_memory)
    host = number(p.host_bytes)
    also = f" and {units.size(host)} of host memory" if host else ""
    batch = units.whole(number(p.batch))
    unit = "sequence" if batch == "1" else "sequences"
    together = f"{batch} {unit} at once" if plan.question.workload.service else f"batch {batch}"
    name = label(p.technique)
    lead = "Run" if released(p) else "Best is"  # what no engine has cannot simply be run
    lead = "At once, the best is" if plan.waves is not None else lead
    what = f"{lead} {SPOKEN.get(p.technique.name, name)} on {_machine(p)}, {together}"
    each = " each" if p.deployment.gpus > 1 else ""
    cost = f", {priced(p)}" if plan.objective == "cost" else ""
    return f"{what}: {times(p)}{cost}, {memory} of {capacity}{each}{also}."


def _waves(plan: ChosenPlan) -> str:
    """That a given batch is better run as smaller ones in turn, if so."""
    waves = plan.waves
    if waves is None:
        return ""
    size = units.whole(number(waves.prediction.batch))
    faster = units.times(waves.output_tok_s / float(plan.choice.output_tok_s[0]))
    return (
        f"Run {waves.count} waves of {size} with {name_of(waves.prediction)}: "
        f"{units.rate(waves.output_tok_s)} output tok/s in all, {faster} one batch's."
    )


def _against_full(plan: ChosenPlan) -> str:
    """How the choice compares with full KV, where it is something else."""
    base, p = plan.baseline, plan.choice
    if base is None:
        share = plan.limits.gpu_memory / p.deployment.hardware.gpu_memory
        within = f" in {share:.2g} of the GPU's memory" if share < 1 else ""
        return f"Full KV does not fit{within}."
    if p.technique.name == "full":
        if plan.limits.loss > 0:
            return ""
        better = plan.solver.optimum.technique
        error = units.percent(plan.question.between(better, p.technique))
        more = f" by more than {error}, the known error"
        close = max(plan.solver.given_up, plan.solver.gap or 0.0) > SAME
        best = "cheaper" if plan.objective == "cost" else "faster"
        return f"Nothing lossless is {best}{more if close else ''}."
    if plan.waves is not None:
        return ""
    ratio = float(p.output_tok_s[0]) / float(base.output_tok_s[0])
    batch, asked = number(base.batch), plan.question.workload.batch
    if asked is not None and batch != asked:
        no = f"Full KV does not fit at batch {asked}"
        return f"{no}; at batch {units.whole(batch)} it gives {units.times(1 / ratio)} that."
    if ratio < 1:
        return f"Full KV gives {units.times(1 / ratio)} that, but misses a limit."
    return f"That is {units.times(ratio)} full KV at batch {units.whole(batch)}."


def _narrowed(deployment: Deployment) -> str:
    """That weights are narrower than they were published, if so."""
    if not narrowed(deployment):
        return ""
    return f"How much quality {deployment.weights} weights lose is not known."


def _unserved(plan: ChosenPlan) -> str:
    """That the choice is nothing that can be served today, if so."""
    return "" if released(plan.choice) else "No serving engine has it."


def _targets(plan: ChosenPlan) -> str:
    """The targets that the plan was asked to keep, and how sure it keeps them."""
    kept = plan.likely.kept
    asked = [
        f"{name.upper()} {units.seconds(getattr(plan.limits, name))}"
        + (f" ({units.likelihood(kept[name])})" if name in kept else "")
        for name in ("ttft", "tpot")[: min(plan.choice.generate, 2)]
        if isfinite(getattr(plan.limits, name))
    ]
    usual = (plan.limits.ttft, plan.limits.tpot) == (DEFAULT_TTFT, DEFAULT_TPOT)
    told = f"{'Default targets' if usual else 'Targets'}{' (likelihood)' if kept else ' kept'}"
    return f"{told}: {', '.join(asked)}." if asked else ""


def _quality(plan: ChosenPlan) -> list[str]:
    """Where the loss of a lossy choice is known from."""
    t = plan.choice.technique
    return [] if t.exact else [f"Quality of {label(t)}: {plan.evidence}."]


def _runner_up(plan: ChosenPlan) -> str:
    found = [a for a in plan.alternatives if a.allowed] or list(plan.alternatives)
    if not found:
        return ""
    best: Alternative = found[0]
    p = best.prediction
    needs = f" (needs {' '.join(best.needs)})" if best.needs else ""
    text = best.reason if best.reason.startswith(CLAUSES) else f"not chosen: {best.reason}"
    return f"{name_of(p)}{needs} at batch {units.whole(number(p.batch))}: {times(p)}; {text}."


def _figures(prediction: Prediction) -> Row:
    return {
        "technique": given(
            {"technique": prediction.technique.name, "params": params(prediction.technique)}
        ),
        "batch": number(prediction.batch),
        "ttft_s": number(prediction.ttft_s),
        "tpot_s": number(prediction.tpot_s),
        "output_tok_s": number(prediction.output_tok_s),
        "gpu_bytes": number(prediction.gpu_bytes),
        "host_bytes": number(prediction.host_bytes),
        "ranges": ranges_of(prediction),
    }
