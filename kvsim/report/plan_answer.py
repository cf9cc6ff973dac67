"""The verdict on a plan: what to run, what it gives, what limits it, and what would change it."""

from collections.abc import Iterator
from dataclasses import asdict
from math import isfinite

from kvsim.machines.deployment import Deployment
from kvsim.planner.advice import NoPlanError
from kvsim.planner.likely import SURE
from kvsim.planner.outlook import LABELS, Binding
from kvsim.planner.plan import ChosenPlan
from kvsim.planner.rivals import Rival
from kvsim.prediction.generate import Prediction
from kvsim.report import evidence, hostlink, units
from kvsim.report.acceptable import released, what_it_loses
from kvsim.report.answer import Answer, verdict
from kvsim.report.json import Row, number
from kvsim.report.kernels import slower_kernels
from kvsim.report.names import SPOKEN, given, label, params
from kvsim.report.plan_settings import name_of, narrowed, ranges_of, settings_to_paste, times
from kvsim.report.reasons import why

OTHERS = 5  # other deployments that are told, best per GPU first
SAME = 0.005  # relative gain below which nothing is gained
FEWEST = 1.02  # of full KV's rate, to say that a technique is faster


def answered(plan: ChosenPlan, bound_by: str) -> Answer:
    """The answer of ``kvsim plan``.

    Parameters
    ----------
    bound_by : what the choice spends most of its time on.
    """
    p, d = plan.choice, plan.choice.deployment
    instead = _instead(plan)
    loses = what_it_loses(p.technique, plan.evidence)
    more = [_narrowed(plan), instead, loses, _unserved(plan), _targets(plan)]
    more.append(why(bound_by, p.generate, plan.question.workload.service))
    said = verdict([_run(plan), _against_full(plan)], more)
    others = [instead] if instead not in said else []
    return Answer(
        verdict=said,
        figures=_figures(p),
        changes=[*filter(None, [_safer(plan)]), *others, *_changes(plan), *slower_kernels(p)],
        runner_up=_runner_up(plan),
        settings=list(settings_to_paste(plan)),
        evidence=[*_quality(plan), *evidence.on_card(d, label(p.technique))],
        assumed=[*evidence.assumed(d, float(p.host_bytes[0]), bound_by), *hostlink.said(p)],
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
    lead = "Run" if released(name) else "Best is"  # what no engine has cannot simply be run
    what = f"{lead} {SPOKEN.get(p.technique.name, name)} on {_machine(p)}, {together}"
    return f"{what}: {times(p)}, {memory} of {capacity}{also}."


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
        return f"Nothing lossless is faster{more if close else ''}."
    ratio = float(p.output_tok_s[0]) / float(base.output_tok_s[0])
    batch = units.whole(number(base.batch))
    if ratio < 1:
        return f"Full KV gives {units.times(1 / ratio)} that, but misses a limit."
    return f"That is {units.times(ratio)} full KV at batch {batch}."


def _narrowed(plan: ChosenPlan) -> str:
    """That weights are narrower than they were published, and that those do not do, if so."""
    d = plan.choice.deployment
    if not narrowed(d):
        return ""
    whole = f"--weights {d.model.released}"
    if whole in [_change(plan, none) for none in plan.impossible]:
        return f"With {whole} there is no plan; {d.weights} weights change the output."
    return f"{d.weights} weights change the output."


def _instead(plan: ChosenPlan) -> str:
    """The best of the other deployments that were asked for, against the choice."""
    if plan.others:
        return f"{_compared(plan, max(plan.others, key=lambda other: _worth(other)))}."
    if plan.impossible:
        return f"{_change(plan, plan.impossible[0])} has no plan within the limits."
    return ""


def _compared(plan: ChosenPlan, other: Prediction) -> str:
    """A plan on another deployment, in a clause."""
    ratio = units.times(_worth(other) / _worth(plan.choice))
    some = max(other.deployment.gpus, plan.choice.deployment.gpus) > 1
    each = f"{ratio} per GPU" if some else f"{ratio} that"
    host = number(other.host_bytes)
    also = f" with {units.size(host)} of host memory" if host else ""
    name = SPOKEN.get(other.technique.name, label(other.technique))
    batch = units.whole(number(other.batch))
    return (
        f"{_change(plan, other.deployment)} ({name}, batch {batch}{also}): "
        f"{units.rate(number(other.output_tok_s))} output tok/s, {each}"
    )


def _worth(prediction: Prediction) -> float:
    """Output per GPU. [tokens/s]"""
    return float(prediction.output_tok_s[0]) / prediction.deployment.gpus


def _change(plan: ChosenPlan, other: Deployment) -> str:
    """The options in which a deployment differs from the choice's."""
    chosen = plan.choice.deployment
    options = {
        f"--gpu {other.hardware.name}": other.hardware.name != chosen.hardware.name,
        f"--weights {other.weights}": other.weights != chosen.weights,
    }
    before = asdict(chosen.parallelism)
    options |= {f"--{k} {n}": n != before[k] for k, n in asdict(other.parallelism).items()}
    return " ".join(option for option, differs in options.items() if differs)


def _unserved(plan: ChosenPlan) -> str:
    """That the choice is nothing that can be served today, if so."""
    return "" if released(label(plan.choice.technique)) else "No serving engine has it."


def _targets(plan: ChosenPlan) -> str:
    """The targets that the plan was asked to keep, and how sure it keeps them."""
    kept = plan.likely.kept
    asked = [
        f"{name.upper()} {units.seconds(getattr(plan.limits, name))}"
        + (f" ({units.likelihood(kept[name])})" if name in kept else "")
        for name in ("ttft", "tpot")
        if isfinite(getattr(plan.limits, name))
    ]
    told = "Targets (likelihood)" if kept else "Targets kept"
    return f"{told}: {', '.join(asked)}." if asked else ""


def _quality(plan: ChosenPlan) -> list[str]:
    """Where the loss of a lossy choice is known from."""
    t = plan.choice.technique
    return [] if t.exact else [f"Quality of {label(t)}: {plan.evidence}."]


def _safer(plan: ChosenPlan) -> str:
    """What keeps the targets nearly surely, where the choice may miss one."""
    likely, share = plan.likely, units.likelihood(SURE)
    if likely.sure or plan.question.workload.batch is not None:
        return ""
    if likely.safer is None:
        return f"No batch of it keeps the targets with a likelihood of {share}."
    p = likely.safer
    batch = units.whole(number(p.batch))
    lost = 1 - float(p.output_tok_s[0]) / float(plan.choice.output_tok_s[0])
    return (
        f"At batch {batch} it keeps the targets with a likelihood of {share}: {times(p)}, "
        f"{units.percent(lost)} less throughput."
    )


def _changes(plan: ChosenPlan) -> Iterator[str]:
    """What would bring more, but for what ``_instead`` says: each tried, with its figures."""
    if plan.waves is not None:
        waves = plan.waves
        size = units.whole(number(waves.prediction.batch))
        yield (
            f"Run the batch as {waves.count} waves of {size} with {name_of(waves.prediction)}: "
            f"{units.rate(waves.output_tok_s)} output tok/s in all."
        )
    for none in plan.impossible if plan.others else plan.impossible[1:]:
        yield f"{_change(plan, none)} has no plan within the limits."
    for other in sorted(plan.others, key=_worth, reverse=True)[1:OTHERS]:
        yield f"{_compared(plan, other)}."
    for advice in plan.advice:
        caution = f"; {advice.caution}" if advice.caution else ""
        yield f"{advice}{caution}."
    for binding in plan.binding:
        if binding.gain_without > SAME:
            yield _binding(plan, binding)
    for what, gain in plan.prices.items():
        if gain > SAME:
            yield f"{what[0].upper()}{what[1:]} would bring {_more(plan, gain)}."
    for knee in plan.knees[-1:]:
        p = knee.prediction
        if float(p.ttft_s[0]) < 0.9 * float(plan.choice.ttft_s[0]):
            yield (
                f"At batch {units.whole(number(p.batch))} the first token comes after "
                f"{units.seconds(number(p.ttft_s))}, for at most "
                f"{units.percent(knee.given_up)} less."
            )


def _more(plan: ChosenPlan, gain: float) -> str:
    """A gain of the objective, which may be less of it."""
    if plan.objective == "throughput":
        return f"{units.percent(gain)} more throughput"
    return f"{units.percent(gain / (1 + gain))} less {plan.objective}"


def _binding(plan: ChosenPlan, b: Binding) -> str:
    more, name = _more(plan, b.gain_without), b.technique
    if b.limit == "loss" and plan.limits.loss > 0:
        option = b.option or "--lossy"
        return f"Techniques whose loss is not known ({option}) could bring {more}: {name}."
    if b.limit == "loss":
        return f"Allowing loss of quality ({b.option or '--lossy'}) could bring {more}: {name}."
    if b.limit == "assumed":
        return (
            f"Speculation ({name}) could bring {more}; pass --acceptance once you have "
            f"measured yours."
        )
    option = {"ttft": "--ttft none", "tpot": "--tpot none"}.get(b.limit, "")
    told = f" ({option})" if option else ""
    return f"Without the limit on {LABELS[b.limit]}{told}: {more}, with {name}."


def _runner_up(plan: ChosenPlan) -> str:
    found = [a for a in plan.alternatives if a.allowed] or list(plan.alternatives)
    if not found:
        return ""
    best: Rival = found[0]
    p = best.prediction
    needs = f" (needs {' '.join(best.needs)})" if best.needs else ""
    text = best.reason if best.reason.startswith(("is ", "its ")) else f"not chosen: {best.reason}"
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
