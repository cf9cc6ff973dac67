"""A plan in the form that engines take, and its parts of sentences."""

from collections.abc import Iterator

from kvsim.emit.engines import emit
from kvsim.emit.replica import of_prediction
from kvsim.machines.deployment import WEIGHTS, Deployment
from kvsim.planner.advice import NARROW
from kvsim.planner.likely import SURE
from kvsim.planner.plan import ChosenPlan
from kvsim.prediction.generate import Prediction
from kvsim.report import evidence, hostlink, units
from kvsim.report.acceptable import released, titles
from kvsim.report.clauses import within
from kvsim.report.json import Row, number
from kvsim.report.names import given, label, params, spoken


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
    name = label(p.technique)
    if narrowed(p.deployment):
        yield f"{p.deployment.weights} weights: {NARROW}."
    able = released(name)
    if not able:
        what = spoken(p.technique)
        yield f"No serving engine has {what}; kvsim's own implementation: `kvsim validate`."
        other = plan.engine_best
        if other is not None:
            runs = released(other.technique.name)
            yield (
                f"The best that an engine runs as released: {name_of(other)}, batch "
                f"{units.whole(number(other.batch))}: {times(other)} ({', '.join(runs)})."
            )
        return
    yield f"Engines that run it: {titles(able)}."
    if "vllm" in able and plan.question.workload.service:
        share = plan.question.limits.gpu_memory / p.deployment.hardware.gpu_memory
        found = emit("vllm", of_prediction(p, share))
        yield "vLLM: " + found.line
        safer = plan.likely.safer
        if safer is not None:
            size = units.whole(number(safer.batch))
            sure = units.likelihood(SURE)
            yield f"For a likelihood of {sure} to keep the targets: --max-num-seqs {size}."
        yield from (f"vLLM has no setting for {what}." for what in found.missing)
