"""Sentences on which engines run techniques, and how much quality they lose."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvsim.emit.flags import MANUALS, turboquant
from kvsim.machines.gguf import BASES
from kvsim.machines.profiles import load_stack
from kvsim.prediction.generate import Prediction
from kvsim.quality.evidence import Evidence, evidence
from kvsim.quality.measured import FACTS, PERPLEXITY
from kvsim.report import units
from kvsim.report.names import (
    SPOKEN,
    distinct_names,
    join_words,
    label,
    name_technique,
    technique_fields,
)
from kvsim.techniques.released import ENGINES, FULL, engines_running
from kvsim.techniques.technique import Technique

KNOWN_BY = {
    "measured": "as measured on this model",
    "expected": "from the losses of its layers, measured on this model",
    "published": "in published tests of this model",
    "published elsewhere": "in published tests of similar models",
}
MAX_TOLD = 3  # losses that a terminal tells
OF_REQUESTS = {
    "cachegen": 'vLLM with LMCache (remote_serde: "cachegen")',
    "cascade": "vLLM (--no-disable-cascade-attn)",
}
"""What runs techniques that depend on what requests share, which a plan does not know (2026-11):
docs.lmcache.ai, "CacheGen"; docs.vllm.ai, "Engine Arguments"."""
OFFLOADED = "hf-offload-static"
OFFLOAD_NOTE = (
    "offload moves the active cache. For stored prefixes, use `kvsim simulate --host-cache`."
)


def name_engines(prediction: Prediction) -> str:
    """Name the released engines that run a prediction.

    Parameters
    ----------
    prediction
        The prediction.

    Returns
    -------
    str
        The engines and the options that choose them; empty if none runs it.
    """
    technique = prediction.technique
    able = list_engines(prediction)
    told = [join_titles(able)] if able else []
    if "hf" in able and _is_not_released(prediction):
        told[0] += f" (--stack {OFFLOADED} predicts its offloaded cache)"
    told += [OF_REQUESTS[technique.name]] if technique.name in OF_REQUESTS else []
    own = turboquant(technique.terms)  # some widths only, so that plans do not choose it unasked
    told += [f"vLLM as {own} (--technique {own} predicts its measured speed)"] if own else []
    if not told and technique.name in ENGINES["hf"]:
        told = [f"{join_titles(['hf'])} (--stack hf-sdpa predicts its times)"]
    return ", ".join(told)


def _is_not_released(prediction: Prediction) -> bool:
    """Whether an offloaded cache is predicted otherwise than Hugging Face's own."""
    return prediction.technique.name == "offload" and prediction.deployment.stack.name != OFFLOADED


def describe_offloaded(prediction: Prediction) -> str:
    """Describe how fast the offloaded cache of Hugging Face is, if another one is predicted.

    Parameters
    ----------
    prediction
        The prediction, of which the first batch is used.

    Returns
    -------
    str
        One sentence; empty where the stack is another engine's, or has that cache.
    """
    d = prediction.deployment
    if d.stack.family.partition("-")[0] != "hf" or not _is_not_released(prediction):
        return ""
    own = replace(prediction, deployment=replace(d, stack=load_stack(OFFLOADED)))
    took = f"TPOT {units.seconds(float(own.tpot_s[0]))}"
    if prediction.generate == 1:
        took = f"TTFT {units.seconds(float(own.ttft_s[0]))}"
    return f"The offloaded cache of Hugging Face itself has {took} (--stack {OFFLOADED})."


def list_engines(prediction: Prediction) -> list[str]:
    """List the engines that can run a prediction.

    Parameters
    ----------
    prediction
        The prediction.

    Returns
    -------
    list of str
        Names such as ``vllm``.
    """
    return engines_running(label(prediction.technique), prediction.deployment)


def join_titles(engines: Sequence[str]) -> str:
    """Format the names of engines for text.

    Parameters
    ----------
    engines
        Names such as ``vllm``.

    Returns
    -------
    str
        Titles such as ``vLLM and TensorRT-LLM``.
    """
    return join_words([MANUALS[x].title if x in MANUALS else "FlexGen" for x in engines])


def describe_engines(found: Sequence[Prediction]) -> Iterator[str]:
    """Describe which engines run each technique.

    Parameters
    ----------
    found
        The predictions.

    Yields
    ------
    str
        Sentences.
    """
    names = {name_technique(p.technique): name_engines(p) for p in found}
    some = {name: engines for name, engines in names.items() if name != SPOKEN[FULL]} or names
    together: dict[str, list[str]] = {}
    for name, engines in some.items():
        together.setdefault(engines, []).append(name)
    none = together.pop("", [])
    listed = [
        f"{join_words(alike)} {'run' if len(alike) > 1 else 'runs'} in {engines}"
        for engines, alike in together.items()
    ]
    said = [f"{'; '.join(listed)}."] if listed else []
    if none:
        said.append(f"No serving engine implements {join_words(none, 'or')}.")
    typed = [p for p in found if p.deployment.weights in BASES and p.technique.name == FULL]
    if typed:
        longest = max(p.prompt + p.generate for p in typed)
        said.append(f"Ollama runs it as llama.cpp does: set num_ctx to {longest} or more.")
    yield " ".join(said)
    if "offload" in names:
        yield OFFLOAD_NOTE


def describe_quality(found: Sequence[Prediction]) -> Iterator[str]:
    """Describe the known quality loss of each lossy technique, with sources.

    Parameters
    ----------
    found
        The predictions.

    Yields
    ------
    str
        A sentence for each lossy technique and setting.
    """
    for p, name, known in _losses(found):
        if known.kind == "none":
            model = p.deployment.model.name
            yield (
                f"Quality of {name}: no loss was measured on {model} or a similar model. "
                "`kvsim validate quality` measures it."
            )
        else:
            yield f"Quality of {name}{_measured_with(known, p)}: {known}."


def summarize_quality(found: Sequence[Prediction]) -> Iterator[str]:
    """Summarise the known quality losses of lossy techniques, without sources.

    Parameters
    ----------
    found
        The predictions.

    Yields
    ------
    str
        One sentence, or none if all techniques are lossless.
    """
    known = [*_losses(found)]
    told = [
        f"{_summarize_loss(name, loss)}{_measured_with(loss, p)}"
        for p, name, loss in known
        if loss.kind != "none"
    ]
    more = [f"{len(told) - MAX_TOLD} more with --verbose"] if len(told) > MAX_TOLD else []
    unknown = [name for _, name, loss in known if loss.kind == "none"]
    last = [f"unknown for {join_words(unknown)} (`kvsim validate quality` measures it)"]
    told = [*told[:MAX_TOLD], *more, *(last if unknown else [])]
    if told:
        yield f"Quality: {'; '.join(told)}."


def _summarize_loss(name: str, found: Evidence) -> str:
    """A loss without its source, such as ``with kivi, scores lower by 6.1 %``."""
    if abs(found.loss) >= UNNOTICED or not found.low < 0 < found.high:
        return f"with {name}, {str(found).partition(': ')[0]}"
    what = {PERPLEXITY: "perplexity", FACTS: "how many planted facts are found"}
    within = units.percent(max(-found.low, found.most))
    scores = what.get(found.unit, "scores")
    return f"{name} does not change {scores} measurably (95 % interval ±{within})"


def _losses(found: Sequence[Prediction]) -> Iterator[tuple[Prediction, str, Evidence]]:
    """Yield each lossy technique once, with its name and the evidence of its quality loss."""
    lossy = {str(p.technique): p for p in reversed(found) if not p.technique.exact}
    some = [*reversed(lossy.values())]
    names = distinct_names([technique_fields(p.technique) for p in some])
    for p, name in zip(some, names, strict=True):
        yield p, name, evidence(p.technique, p.deployment.model, p.prompt + p.generate)


UNNOTICED = 0.0005  # relative loss that scores do not show
WITH_CONFIDENCE = " with 95 % confidence"  # that a loss is below its bound (``UPPER``)


def phrase_loss(found: Evidence) -> str:
    """Describe a quality loss in a clause.

    Parameters
    ----------
    found
        The evidence.

    Returns
    -------
    str
        For example ``scores 1.2 % lower (up to 3 %)``.
    """
    if found.kind == "lossless":
        return "no loss of quality"
    if found.unknown:
        return "loss of quality unknown"
    what = "perplexity" if found.unit == PERPLEXITY else "scores"
    most = units.percent(max(found.bound, 0.0))
    if found.loss < UNNOTICED:
        text = f"no measured loss of {what} (at most {most}{WITH_CONFIDENCE})"
    else:
        worse = "higher" if found.unit == PERPLEXITY else "lower"
        text = f"{what} {units.percent(found.loss)} {worse} (up to {most})"
    if found.untried:
        text += f"; not tested on {join_words(found.untried, 'or')}"
    return text


def describe_loss(technique: Technique, found: Evidence) -> str:
    """Describe the quality loss of a recommended technique.

    Parameters
    ----------
    technique
        The technique.
    found
        The evidence for this model.

    Returns
    -------
    str
        One sentence; empty if the technique is lossless.
    """
    if technique.exact:
        return ""
    if found.unknown:
        return "Its loss of quality is unknown."
    loss, where = units.percent(found.loss), KNOWN_BY.get(found.kind, found.kind)
    if found.loss <= 0:
        most = f", {units.percent(found.bound)} at most" if found.bound > 0 else ""
        return f"No loss on average{most}, {where}."
    low, high = (f"{100 * share:.1f}" for share in (found.low, found.most))
    known = f"{loss} ({low} to {high} %)" if found.high > found.low else loss
    if found.unit == PERPLEXITY:
        return f"Its perplexity is {known} higher, {where}."
    if found.unit == FACTS:
        return f"It finds {known} fewer of the facts planted in a text, {where}."
    return f"Its scores are {known} lower, {where}."


def _measured_with(known: Evidence, prediction: Prediction) -> str:
    """With which harsher settings a loss was measured, if not with those requested."""
    found, mine = (
        dict(part.split("=", 1) for part in spec.partition(":")[2].split(",") if "=" in part)
        for spec in (known.worst.partition(", ")[0], str(prediction.technique))
    )
    other = [key for key, value in found.items() if mine.get(key, value) != value]
    measured, asked = (", ".join(f"{k} {x[k]}" for k in other) for x in (found, mine))
    return f" with {measured} ({asked} was not measured)" if other else ""
