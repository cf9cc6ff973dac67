"""What would change a plan: other deployments, limits, batches and hardware, each with its gain."""

from collections.abc import Iterator
from dataclasses import asdict
from shlex import quote

from kvsim.machines.deployment import Deployment
from kvsim.planner.alternatives import LABELS, NARROW, score
from kvsim.planner.plan import ChosenPlan
from kvsim.planner.sensitivity import LIKELY_ENOUGH, Binding
from kvsim.prediction.generate import Prediction
from kvsim.report import units
from kvsim.report.acceptable import released
from kvsim.report.json import number
from kvsim.report.names import SPOKEN, label
from kvsim.report.plan_settings import times

OTHERS = 5  # other deployments that are told, best per GPU first
SAME = 0.005  # relative gain below which nothing is gained
NEARLY_ALL = 1.2  # times a gain of loosening a limit: what lifting it brings is about as much
CERTAIN = 0.99  # chance of keeping a target, from which on an earlier first token is no news


def instead(plan: ChosenPlan) -> str:
    """The best of the other deployments that were asked for, against the choice."""
    if plan.others:
        return f"{_compared(plan, max(plan.others, key=lambda other: _worth(plan, other)))}."
    if plan.impossible:
        return f"{_change(plan, plan.impossible[0])} has no plan within the limits."
    return ""


def _compared(plan: ChosenPlan, other: Prediction) -> str:
    """A plan on another deployment, in a clause."""
    ratio = units.times(_worth(plan, other) / _worth(plan, plan.choice))
    several = max(other.deployment.gpus, plan.choice.deployment.gpus) > 1
    if plan.objective == "throughput":
        rate = f"{units.rate(number(other.output_tok_s))} output tok/s"
        told = f"{rate}, {ratio} {'per GPU' if several else 'that'}"
    elif plan.objective == "cost":
        told = f"{priced(other)}, {_more_or_less(plan, other)} cost"
    else:
        told = f"{times(other)}, {_more_or_less(plan, other)} latency"
    host = number(other.host_bytes)
    also = f" with {units.size(host)} of host memory" if host else ""
    name = SPOKEN.get(other.technique.name, label(other.technique))
    batch = units.whole(number(other.batch))
    return f"{_change(plan, other.deployment)} ({name}, batch {batch}{also}): {told}"


def _more_or_less(plan: ChosenPlan, other: Prediction) -> str:
    """How an objective that should be small compares with the choice's."""
    ratio = _worth(plan, plan.choice) / _worth(plan, other)
    return f"{units.percent(abs(ratio - 1))} {'more' if ratio > 1 else 'less'}"


def priced(prediction: Prediction) -> str:
    """What a million generated tokens cost."""
    return f"{units.usd(float(prediction.usd_per_million()[0]))} per million output tokens"


def _worth(plan: ChosenPlan, prediction: Prediction) -> float:
    """The objective, more is better; throughput is per GPU."""
    return score(plan.question, prediction)


def _change(plan: ChosenPlan, other: Deployment) -> str:
    """The options in which a deployment differs from the choice's."""
    chosen = plan.choice.deployment
    options = {
        f"--gpu {quote(other.hardware.name)}": other.hardware.name != chosen.hardware.name,
        f"--weights {other.weights}": other.weights != chosen.weights,
    }
    before = asdict(chosen.parallelism)
    options |= {f"--{k} {n}": n != before[k] for k, n in asdict(other.parallelism).items()}
    return " ".join(option for option, differs in options.items() if differs)


def changes(plan: ChosenPlan, told: str) -> Iterator[str]:
    """What would bring more, each tried, with its figures.

    Parameters
    ----------
    told : the verdict, whose sentences are not said again.
    """
    if safer := _safer(plan):
        yield safer
    lines = [f"{_change(plan, none)} has no plan within the limits." for none in plan.impossible]
    best = sorted(plan.others, key=lambda p: _worth(plan, p), reverse=True)[:OTHERS]
    lines = [*(f"{_compared(plan, other)}." for other in best), *lines]
    yield from (line for line in lines if line not in told)
    yield from _advised(plan)
    for binding in plan.binding:
        if binding.gain_without > SAME:
            yield _binding(plan, binding)
    lifted = {f"a 10 % looser {LABELS[b.limit]}": b.gain_without for b in plan.binding}
    for what, gain in plan.prices.items():
        if gain > SAME and lifted.get(what, float("inf")) > NEARLY_ALL * gain:
            yield f"{what[0].upper()}{what[1:]} would bring {_more(plan, gain)}."
    for knee in plan.knees[-1:]:
        p = knee.prediction
        early = float(p.ttft_s[0]) < 0.9 * float(plan.choice.ttft_s[0])
        if early and plan.likely.kept.get("ttft", 0.0) < CERTAIN:
            yield (
                f"At batch {units.whole(number(p.batch))} the first token comes after "
                f"{units.seconds(number(p.ttft_s))}, for at most "
                f"{units.percent(knee.given_up)} less."
            )


def _advised(plan: ChosenPlan) -> Iterator[str]:
    """Other weights and more GPUs, and once what narrower weights cost."""
    for advice in plan.advice:
        caution = advice.caution if advice.caution != NARROW else ""
        yield f"{advice}{'; ' * bool(caution)}{caution}."
    if any(advice.caution == NARROW for advice in plan.advice):
        yield f"{NARROW[0].upper()}{NARROW[1:]}."


def _safer(plan: ChosenPlan) -> str:
    """What keeps the targets nearly surely, where the choice may miss one."""
    likely, share = plan.likely, units.likelihood(LIKELY_ENOUGH)
    if likely.sure or plan.question.workload.batch is not None:
        return ""
    if likely.safer is None:
        return f"No batch of it keeps the targets with a likelihood of {share}."
    p = likely.safer
    batch = units.whole(number(p.batch))
    vllm = "vllm" in released(p) and plan.question.workload.service
    option = f" (vLLM: --max-num-seqs {batch})" if vllm else ""
    lost = 1 - float(p.output_tok_s[0]) / float(plan.choice.output_tok_s[0])
    return (
        f"At batch {batch}{option} it keeps the targets with a likelihood of {share}: {times(p)}, "
        f"{units.percent(lost)} less throughput."
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
    with_it = SPOKEN.get(name, name)
    return f"Without the limit on {LABELS[b.limit]}{told}: {more}, with {with_it}."
