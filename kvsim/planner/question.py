"""What is asked of a plan: equal requests, limits, admitted techniques and an objective.

Requests all have one prompt length and one number of generated tokens. A technique is admitted by
the user's options, by the engine that must run it, and by the evidence of its quality on the model.
Two techniques differ only where the difference exceeds the known error of predictions.
"""

from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from functools import cached_property
from math import ceil, floor, log10
from pathlib import Path
from shlex import quote

import numpy as np

from kvsim.errors import InputError, unknown
from kvsim.evidence.ledger import known_difference
from kvsim.files import ATTENTION_FILE, check_type
from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.machines.deployment import WEIGHT_FORMATS, Deployment
from kvsim.prediction.generate import Prediction
from kvsim.prediction.memory import largest_batch
from kvsim.prediction.service import Service
from kvsim.quality.evidence import Evidence, evidence, weights_evidence
from kvsim.quality.measured import QualityRun
from kvsim.techniques import TECHNIQUES, parse
from kvsim.techniques.acceptance import (
    MOST_DRAFTS,
    Positions,
    from_measured,
    from_rate,
    load_summaries,
    published,
)
from kvsim.techniques.heads import HEADS, lacks_head
from kvsim.techniques.papers.cache import FORMATS
from kvsim.techniques.papers.kvpr import Place
from kvsim.techniques.released import CACHE, ENGINES, FULL, engine_refusal
from kvsim.techniques.technique import Technique, compose
from kvsim.traces.attention import Acceptance

# workload and limits

GIB = 2.0**30
DEFAULT_TTFT, DEFAULT_TPOT = (
    2.0,
    0.1,
)  # what an interactive service is asked for unless the user says [s]


@frozen
class Workload:
    """Equal requests.

    Attributes
    ----------
    prompt, generate
        Tokens of each. [tokens]
    batch
        Sequences at once; None to have it chosen.
    service
        Whether requests keep coming (continuous batching), or one batch starts on an idle GPU.
    """

    prompt: int
    generate: int
    batch: int | None = None
    service: bool = False

    def predict(
        self, technique: Technique, deployment: Deployment, batch: Array, contexts: int = 0
    ) -> Prediction:
        """What a technique does for it at some batches."""
        kind = Service if self.service else Prediction
        return kind(technique, deployment, batch, self.prompt, self.generate, contexts)

    def largest(
        self, technique: Technique, deployment: Deployment, gpu: float, host: float
    ) -> Array:
        """Find the largest batch whose buffers fit in memory, for each setting. [sequences]

        Parameters
        ----------
        technique
            The technique, possibly with arrays as settings.
        deployment
            Model, machine and software stack.
        gpu, host
            Memory that may be used on a GPU and on the host. [B]
        """
        return largest_batch(
            technique, deployment, self.prompt, self.generate, gpu, host, served=self.service
        )

    @property
    def length(self) -> int:
        """Tokens of a sequence at its end. [tokens]"""
        return self.prompt + self.generate


@frozen
class PlanLimits:
    """What a plan must stay within; infinite where the user set nothing."""

    gpu_memory: float  # per GPU [B]
    host_memory: float  # [B]
    ttft: float = np.inf  # [s]
    tpot: float = np.inf  # [s]
    loss: float = 0.0  # relative, in the unit of the evidence; 0: the tokens of full-precision KV
    assumed: float = 0.0  # 0: nothing rests on an unmeasured acceptance rate
    disk: float = np.inf  # where the machine has a drive [B]

    def finite(self, without: str = "") -> dict[str, float]:
        """The limits that are set, by column."""
        return {k: v for k, v in vars(self).items() if np.isfinite(v) and k != without}

    def stated(self) -> dict[str, float]:
        """All limits by column, that of a drive only where there is one."""
        return {k: v for k, v in vars(self).items() if k != "disk" or np.isfinite(v)}

    def hard(self) -> dict[str, float]:
        """Those that memory and time set, not what the user is willing to accept."""
        return {k: v for k, v in self.finite().items() if k not in ("loss", "assumed")}


# engines


# admission

ACCEPTANCE_DIGITS = 4  # of an acceptance
FIRST_DRAFTS = (0, 1, 2, 4, 7, 11, 16)  # per round; those beside the best are tried after
OWN_CACHES = [parse(f"{CACHE}:format={name}") for name in FORMATS]
"""Formats of the cache that engines have under their own names; elsewhere they are refused."""
NEEDS_DRAFTER = (
    "eagle", "eagle2", "eagle3", "p-eagle", "dflash", "medusa", "mtp", "draft", "ngram", "suffix",
    "lookahead",
)  # fmt: skip
"""Techniques whose drafts come from weights trained for one model, or from text that repeats."""


@frozen
class Admission:
    """What the user lets a plan consider.

    Attributes
    ----------
    techniques
        What to consider, in place of every technique of the registry.
    only, without
        Names of techniques; no ``only`` means all.
    engine
        One of ``ENGINES``, or nothing.
    unmeasured
        Whether settings are welcome of whose quality nothing is known.
    runs
        Measured quality; what ships if None.
    layered, layered_for
        Widths of every layer with their measured loss, and the model that they were measured on.
    judges_weights
        Whether weights are held to the same limit of loss; not where the user named their format.
    rate, seen_at
        Accepted over drafted tokens, and the drafts per round at which the user saw it (0: those
        that the technique drafts by default).
    accepted
        What an attention trace measured of drafts.
    """

    techniques: tuple[Technique, ...] | None = None
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    engine: str = ""
    unmeasured: bool = False
    runs: tuple[QualityRun, ...] | None = None
    layered: Mapping[Technique, Evidence] = field(default_factory=dict)
    layered_for: str = ""
    judges_weights: bool = False
    rate: float | None = None
    seen_at: int = 0
    accepted: "tuple[Acceptance, ...]" = ()

    def __post_init__(self) -> None:
        for option, names in (("--only", self.only), ("--without", self.without)):
            for name in names:
                if name not in (*TECHNIQUES, *FORMATS):
                    raise unknown(f"technique in {option}", name, [*TECHNIQUES, *FORMATS])
        if self.engine and self.engine not in ENGINES:
            raise unknown("engine", self.engine, ENGINES)
        if self.only and not self._left():
            raise InputError("--only, --without and --engine leave no technique; drop one of them")

    def _left(self) -> list[str]:
        runs = ENGINES.get(self.engine, tuple(TECHNIQUES))
        named = [n for n in TECHNIQUES if n in runs and TECHNIQUES[n].planned]
        if self.only:  # a stack without the format's kernel refuses it
            named = [n for n in dict.fromkeys([*named, *FORMATS]) if n in self.only]
        return [n for n in named if n not in self.without]

    def check(self, deployment: Deployment) -> None:
        """Refuse losses of layers measured on another model, and engines that cannot run there.

        Raises
        ------
        InputError
            For either.
        """
        model = deployment.model.name
        reason = engine_refusal(self.engine, deployment) if self.engine else ""
        if reason:
            raise InputError(f"--engine {self.engine}: {reason}; omit --engine or name another")
        if self.layered and model != self.layered_for:
            raise InputError(
                f"--quality: layers were measured on {self.layered_for}, which says nothing of "
                f"{model}; measure it with `kvsim validate quality --per-layer --model "
                f"{quote(model)}`"
            )

    def candidates(self) -> list[Technique]:
        """The techniques that are left, with their defaults."""
        return list(self._candidates)

    @cached_property
    def _candidates(self) -> list[Technique]:
        if self.techniques is not None:
            named = [t for t in self.techniques if not self.only or t.name in self.only]
        else:
            named = [parse(name) for name in self._left()]
        if self.only or self.engine:  # by name, which these have none of
            return named
        barred = self.techniques or CACHE in self.without
        stored = (
            [] if barred else [t for t in OWN_CACHES if t.settings["format"] not in self.without]
        )
        return [*named, *stored, *self.layered]

    def settings(
        self,
        technique: Technique,
        deployment: Deployment,
        prompt: int,
        generate: int,
        differ: bool = False,
    ) -> list[Technique]:
        """Settings of a technique worth considering, array-valued ones along the first axis.

        Parameters
        ----------
        differ : whether requests have many lengths, of which those are the means; budgets are then
            shares of each prompt.
        """
        if technique in self.layered:
            return [technique]
        if not self.has_drafter(technique, deployment):
            return []
        options = technique.options(deployment, prompt, generate)
        if differ and len(technique.terms) == 1:
            shares = technique.terms[0].options_of_shares(deployment, prompt, generate)
            options = [compose(term) for term in shares]
        found = [x for x in options if self._worth(x)]
        if "gamma" not in technique.settings:
            return found
        every: list[Technique] = []
        for some in _distinct_settings(found):
            positions = self.positions(some, deployment, prompt + generate / 2)
            if positions is None:
                every += [x for x in found if _without_drafts(x) == _without_drafts(some)]
            else:
                gammas = sorted({*(g for g in FIRST_DRAFTS if g <= positions.most), positions.most})
                every += [_with_drafts(some, g, positions.likely_rate(g)) for g in gammas]
        return every

    def neighbours(
        self, technique: Technique, deployment: Deployment, context: float
    ) -> list[Technique]:
        """The same technique with a draft more, or less."""
        positions = (
            self.positions(technique, deployment, context)
            if "gamma" in technique.settings
            else None
        )
        if positions is None:
            return []
        some = (technique.drafts + step for step in (-2, -1, 1, 2))
        return [
            _with_drafts(technique, g, positions.likely_rate(g))
            for g in some
            if 0 <= g <= positions.most
        ]

    def has_drafter(self, technique: Technique, deployment: Deployment) -> bool:
        """Whether what drafts exists: heads and draft models are trained, texts may not repeat.

        Prediction modules come with some models, and heads were published and measured for some;
        all else the user has to name or to measure.
        """
        if lacks_head(technique, deployment):
            return False
        if technique.name in ("mtp", deployment.draft_model[0]):
            return not technique.drafting.lacks(deployment.model)
        if technique.name not in NEEDS_DRAFTER or technique.name in self.only:
            return True
        if any(parse(found.technique).name == technique.name for found in self.accepted):
            return True
        asked = (technique.name, deployment.model.name)
        return asked[0] in HEADS and any((s.method, s.model) == asked for s in load_summaries())

    def describe_refusals(self, deployment: Deployment) -> str:
        """Why none of the techniques runs on a deployment; empty if one does."""
        refused = [
            (t.name, t.refuses_released(deployment) or lacks_head(t, deployment))
            for t in self.candidates()
        ]
        if not all(reason for _, reason in refused):
            return ""
        return " and ".join(f"{name} cannot run here: {reason}" for name, reason in refused[:2])

    def _worth(self, technique: Technique) -> bool:
        """Whether the placement programme leaves anything to these settings.

        It knows every share, streams weights at any batch and balances what is recomputed.
        """
        s = technique.settings
        placed = technique.name in ("offload", "kvpr") and not self.only
        balanced = isinstance(s.get("split"), str)
        return not (placed and (s["schedule"] == "column" or balanced))

    def positions(
        self, technique: Technique, deployment: Deployment, context: float
    ) -> Positions | None:
        """Accepted drafts of a technique by position, if anybody measured them."""
        for found in self.accepted:
            if _without_drafts(parse(found.technique)) == _without_drafts(technique):
                return from_measured(found)
        if self.rate is not None:
            seen = self.seen_at or int(parse(technique.name).settings["gamma"])
            return from_rate(self.rate, seen, f"your rate of {self.rate:g} at {seen} drafts")
        draft = str(technique.settings.get("draft", technique.name))
        like = getattr(technique.drafting, "like", "")  # where none of its own is measured
        model = deployment.model.name
        return published(model, draft, context) or (
            published(model, like, context) if like else None
        )

    def evidence(self, technique: Technique, deployment: Deployment, length: float) -> Evidence:
        """Look up the evidence for a setting's loss of quality on the deployment's model.

        Parameters
        ----------
        technique
            The technique with its settings.
        deployment
            Model, machine and software stack.
        length
            Length at which the loss counts. [tokens]
        """
        if technique in self.layered:
            return self.layered[technique]
        return evidence(technique, deployment.model, length, self.runs)

    def loss(self, found: Evidence) -> float:
        """As a limit sees it: nothing known is no loss where the unknown is welcome."""
        return self.harm(found) if self.unmeasured else found.column

    def harm(self, found: Evidence) -> float:
        """The loss by the evidence; 0 where there is no evidence."""
        if found.unknown:
            return found.loss if found.loss > 0 else 0.0  # a loss of which nothing is known is NaN
        return found.column


def _distinct_settings(found: Iterable[Technique]) -> list[Technique]:
    """One of each that differ in more than drafts per round."""
    kinds = {str(_without_drafts(t)): t for t in found}
    return list(kinds.values())


def _without_drafts(technique: Technique) -> tuple[str, dict[str, object]]:
    """Name and settings; of several terms a setting has its term's name before it."""
    drafts = ("gamma", "acceptance")
    kept = {k: v for k, v in technique.settings.items() if k.rpartition(".")[2] not in drafts}
    return technique.name, kept


def _with_drafts(technique: Technique, gamma: int, rate: float) -> Technique:
    return technique.with_rounds(gamma, round(rate, ACCEPTANCE_DIGITS))


def read_acceptance(text: str) -> "tuple[float | None, int, tuple[Acceptance, ...]]":
    """What ``--acceptance`` says: a rate, a rate at some drafts (0.8@4), or a measured file.

    Raises
    ------
    InputError
        If it is none of these.
    """
    if text.endswith(".json"):
        from kvsim.traces.attention import load

        found = load(Path(text)).acceptance
        if not found:
            raise InputError(f"--acceptance: {text} contains no acceptance; see docs/quality.md")
        return None, 0, found
    rate, _, at = text.partition("@")
    try:
        value, gamma = float(rate), int(at) if at else 0
    except ValueError:
        value, gamma = -1.0, 0
    if not 0 <= value <= 1 or (at and not 1 <= gamma <= MOST_DRAFTS):
        check_type(text, ATTENTION_FILE)
        raise InputError(
            f"--acceptance: got {text[:40]!r}; expected the share of drafts that were accepted, as "
            f"0.8 or 0.8@4 (seen at 4 drafts per round), or a file of `kvsim validate quality`"
        )
    return value, gamma, ()


# weights

PUBLISHED = {"gpt_oss": "mxfp4", "deepseek_v3": "fp8-block"}
"""Formats in which families of models were published: nothing is lost by them."""

GGUF = "q8_0", "q6_k", "q4_k_m"
"""Types of GGUF files that people choose first, the gentlest first."""


def narrower_formats(deployment: Deployment) -> list[str]:
    """Formats of weights with fewer bits that the GPU takes, the gentlest first.

    Parameters
    ----------
    deployment
        The model with its weights as they are.
    """
    model, now = deployment.model, deployment.weights
    if deployment.stack.weights.gguf:
        return [n for n in GGUF if WEIGHT_FORMATS[n].bits < WEIGHT_FORMATS[now].bits]
    own = PUBLISHED.get(model.family)
    every = list(dict.fromkeys([*([own] if own else []), model.fp8_format, "int8", "int4"]))
    if now != "fp16":
        every = ["int4"] if now.startswith("fp8") else []
    return [n for n in every if not n.startswith("fp8") or "fp8" in deployment.hardware.flops]


# known differences


# the question

OBJECTIVES = ("throughput", "latency", "cost")
MIXED = "mixed placement"


@frozen
class Question:
    """The question of a plan: equal requests on one deployment, under limits."""

    deployment: Deployment
    workload: Workload
    objective: str
    limits: PlanLimits
    admission: Admission = field(default_factory=Admission)
    error: float | None = None  # between any two techniques; as the ledger says if None

    def __post_init__(self) -> None:
        check_objective(self.objective, self.deployment)
        self.admission.check(self.deployment)

    def between(self, one: Technique, other: Technique) -> float:
        """Known relative error between two techniques."""
        return known_difference(self.deployment, one, other) if self.error is None else self.error

    @cached_property
    def weights_evidence(self) -> Evidence:
        """The evidence of the loss by the weights' format."""
        return weights_evidence(self.deployment.model, self.deployment.weights)

    @property
    def weights_lose(self) -> bool:
        """Whether the weights alone lose more than is admitted."""
        admission = self.admission
        return admission.judges_weights and admission.loss(self.weights_evidence) > self.limits.loss

    def with_limits(self, **changes: float) -> "Question":
        """The same question under other limits."""
        return replace(self, limits=replace(self.limits, **changes))


def check_objective(objective: str, deployment: Deployment) -> None:
    """Refuse what is no objective, and costs on hardware without a price."""
    if objective not in OBJECTIVES:
        expected = ", ".join(OBJECTIVES)
        raise InputError(f"--objective: got {objective[:40]!r}; expected one of {expected}")
    if objective == "cost" and deployment.hardware.price is None:
        raise InputError(
            f"--objective cost: {deployment.hardware.name} has no price; expected a GPU with USD/h "
            f"in `kvsim gpus`, or a profile with price.usd_per_hour"
        )


def simplicity_rank(technique: Technique) -> tuple[int, ...]:
    """How simple a technique is: lossless before lossy, nothing done to the cache before one."""
    several = not technique.uniform or len(technique.terms) > 1
    return (0 if technique.exact else 1, 0 if technique.name == FULL else 2 if several else 1)


def needed_option(found: Evidence) -> str:
    """The option of the command line that would admit a loss."""
    if found.unknown:
        return "--lossy"
    return f"--max-loss {np.ceil(found.bound * 100) / 100:g}"


def does_nothing(technique: Technique) -> bool:
    """Recomputes or drafts nothing: offload or full KV by another name."""
    s = technique.settings
    return (technique.name == "kvpr" and s["split"] == 0) or (
        "gamma" in s and not technique.drafts and technique.exact
    )


def technique_label(technique: Technique) -> str:
    """A name, one for all mixed placements."""
    return technique.name if technique.uniform and technique.name != Place.name else MIXED


def relative_gain(before: float, after: float) -> float:
    """Relative improvement of an objective, which is negative where more is better."""
    return max(0.0, float(before / after - 1 if before > 0 else after / before - 1))


def format_seconds(seconds: float) -> str:
    """A time with the unit that people would say."""
    if seconds < 1:
        return f"{format_number(seconds * 1e3)} ms"
    minutes = f"{format_number(seconds / 60)} min"
    return f"{format_number(seconds)} s" if seconds < 120 else minutes


def format_number(value: float) -> str:
    """A number with three digits, or all of its whole ones."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def round_up(seconds: float) -> float:
    """A time rounded up to two digits. [s]"""
    step = 10.0 ** (floor(log10(seconds)) - 1)
    return float(ceil(seconds / step - 1e-9) * step)


def show_time(seconds: float) -> str:
    """A time as options take it."""
    value, unit = (seconds, "s") if seconds >= 1 else (1e3 * seconds, "ms")
    return format_number(value).replace(",", "") + unit
