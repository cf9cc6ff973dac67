"""A plan in the form that engines take, and its parts of sentences."""

from collections.abc import Iterator

from kvsim.emit.engines import emit
from kvsim.emit.served import serve_prediction
from kvsim.machines.deployment import WEIGHTS, Deployment
from kvsim.planner.plan import ChosenPlan
from kvsim.prediction.generate import Prediction
from kvsim.report import evidence, hostlink, units
from kvsim.report.acceptable import released, titles
from kvsim.report.clauses import within
from kvsim.report.json import Row, number
from kvsim.report.names import given, label, params, spoken

SERVERS = "vllm", "sglang", "trtllm"  # engines whose command a plan gives, each with a stack


def narrowed(deployment: Deployment) -> bool:
    """Whether weights have fewer bytes than they were published with."""
    mine, released = (WEIGHTS[x] for x in (deployment.weights, deployment.model.released))
    return mine.bytes(4096, 4096) < 0.9 * released.bytes(4096, 4096)


def name_of(prediction: Prediction) -> str:
    """A technique with its settings, as the command line takes it."""
    t = prediction.technique
    return "full KV" if t.name == "full" else given({"technique": label(t), "params": params(t)})


def times(prediction: Prediction) -> str:
    """TTFT, TPOT and throughput with their ranges."""
    row = {"ttft_s": number(prediction.ttft_s), "tpot_s": number(prediction.tpot_s)}
    row["ranges"] = ranges_of(prediction)  # type: ignore[assignment]
    parts = [f"TTFT {within(row, 'ttft_s')}"]
    if prediction.generate > 1:
        parts.append(f"TPOT {within(row, 'tpot_s')}")
    parts.append(f"{units.rate(number(prediction.output_tok_s))} output tok/s")
    return ", ".join(parts)


def ranges_of(prediction: Prediction) -> Row:
    """Where both times lie, as the ledger knows. [s]"""
    d, name = prediction.deployment, prediction.technique.name
    times = number(prediction.ttft_s), number(prediction.tpot_s)
    return hostlink.widened(evidence.ranges(d, name, *times), prediction)


def settings_to_paste(plan: ChosenPlan) -> Iterator[str]:
    """The choice in the form an engine takes, or that none has it."""
    p = plan.choice
    able = released(p)
    if not able:
        yield f"Only kvsim's own implementation has {spoken(p.technique)}: `kvsim validate`."
        other = plan.engine_best
        if other is not None:
            yield (
                f"The best that an engine runs as released: {name_of(other)}, batch "
                f"{units.whole(number(other.batch))}: {times(other)} ({titles(released(other))})."
            )
        return
    yield f"Engines that run it: {titles(able)}."
    asked = plan.question.admission.engine
    engine = asked if asked in SERVERS else "vllm"
    if engine in able and plan.question.workload.service:
        share = plan.question.limits.gpu_memory / p.deployment.hardware.gpu_memory
        found, title = emit(engine, serve_prediction(p, share)), titles([engine])
        yield f"{title}: {found.line}"
        yield from (f"{title} has no setting for {what}." for what in found.missing)
        own = p.deployment.stack.name.partition("@")[0]
        if own in SERVERS and own != engine:
            yield f"Times are {titles([own])}'s; `--stack {engine}` predicts {title}'s."
