"""Which techniques and settings a plan may choose, and the evidence of their quality."""

from collections.abc import Iterable, Mapping
from dataclasses import field
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from kvsim.errors import InputError, unknown
from kvsim.files import check_type
from kvsim.files.kinds import ATTENTION
from kvsim.frozen import frozen
from kvsim.machines.deployment import Deployment
from kvsim.planner.engines import ENGINES, lacks
from kvsim.quality.acceptance import (
    MOST_DRAFTS,
    Positions,
    from_measured,
    from_rate,
    published,
)
from kvsim.quality.evidence import Evidence, evidence
from kvsim.quality.measured import QualityRun
from kvsim.techniques import TECHNIQUES, parse
from kvsim.techniques.technique import Technique, compose

if TYPE_CHECKING:
    from kvsim.traces.attention import Acceptance

DIGITS = 4  # of an acceptance
FIRST_DRAFTS = (0, 1, 2, 4, 7, 11, 16)  # per round; those beside the best are tried after

GIVEN = ("eagle", "mtp", "draft", "ngram")
"""Techniques whose drafts come from weights trained for one model, or from text that repeats."""
WITH_MTP = ("deepseek_v3", "deepseek_v32", "glm4_moe", "mimo", "qwen3_next")
"""Families of models (Hugging Face's ``model_type``) published with prediction modules."""


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
    rate: float | None = None
    seen_at: int = 0
    accepted: "tuple[Acceptance, ...]" = ()

    def __post_init__(self) -> None:
        for option, names in (("--only", self.only), ("--without", self.without)):
            for name in names:
                if name not in TECHNIQUES:
                    raise unknown(f"technique in {option}", name, TECHNIQUES)
        if self.engine and self.engine not in ENGINES:
            raise unknown("engine", self.engine, ENGINES)
        if self.only and not self._left():
            raise InputError("--only, --without and --engine leave no technique; drop one of them")

    def _left(self) -> list[str]:
        runs = ENGINES.get(self.engine, tuple(TECHNIQUES))
        named = [n for n in TECHNIQUES if not self.only or n in self.only]
        return [n for n in named if n not in self.without and n in runs]

    def check(self, deployment: Deployment) -> None:
        """Refuse losses of layers measured on another model, and engines that cannot run there.

        Raises
        ------
        InputError
            For either.
        """
        model = deployment.model.name
        reason = lacks(self.engine, deployment) if self.engine else ""
        if reason:
            raise InputError(f"--engine {self.engine}: {reason}; omit --engine or name another")
        if self.layered and model != self.layered_for:
            raise InputError(
                f"--quality: layers were measured on {self.layered_for}, which says nothing of "
                f"{model}; measure it with `kvsim validate --quality --per-layer --model "
                f"{quote(model)}`"
            )

    def candidates(self) -> list[Technique]:
        """The techniques that are left, with their defaults."""
        if self.techniques is not None:
            named = [t for t in self.techniques if not self.only or t.name in self.only]
        else:
            named = [parse(name) for name in self._left()]
        asked = self.only or self.engine  # by name, which widths of layers have none of
        return named if asked else [*named, *self.layered]

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
        if not self._has_drafter(technique, deployment):
            return []
        options = technique.options(deployment, prompt, generate)
        if differ and len(technique.terms) == 1:
            shares = technique.terms[0].options_of_shares(deployment, prompt, generate)
            options = [compose(term) for term in shares]
        found = [x for x in options if self._worth(x)]
        if "gamma" not in technique.settings:
            return found
        every: list[Technique] = []
        for some in _once(found):
            positions = self.positions(some, deployment, prompt + generate / 2)
            if positions is None:
                every += [x for x in found if _without_drafts(x) == _without_drafts(some)]
            else:
                gammas = FIRST_DRAFTS
                every += [_drafting(some, g, positions.rate(g)) for g in gammas]
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
        return [_drafting(technique, g, positions.rate(g)) for g in some if 0 <= g <= MOST_DRAFTS]

    def _has_drafter(self, technique: Technique, deployment: Deployment) -> bool:
        """Whether what drafts exists: heads and draft models are trained, texts may not repeat.

        Prediction modules come with some models; all else the user has to name or to measure.
        """
        if technique.name not in GIVEN or technique.name in self.only:
            return True
        if any(parse(found.technique).name == technique.name for found in self.accepted):
            return True
        return technique.name == "mtp" and deployment.model.family in WITH_MTP

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
        return published(deployment.model.name, draft, context)

    def evidence(self, technique: Technique, deployment: Deployment, length: float) -> Evidence:
        """The evidence of a setting's loss on a model."""
        if technique in self.layered:
            return self.layered[technique]
        return evidence(technique, deployment.model, length, self.runs)

    def loss(self, found: Evidence) -> float:
        """As a limit sees it: nothing known is no loss where the unknown is welcome."""
        return self.harm(found) if self.unmeasured else found.column

    def harm(self, found: Evidence) -> float:
        """The loss by the evidence; 0 where there is no evidence."""
        if found.kind == "none" or found.missing:
            return found.loss if found.loss > 0 else 0.0  # a loss of which nothing is known is NaN
        return found.column


def _once(found: Iterable[Technique]) -> list[Technique]:
    """One of each that differ in more than drafts per round."""
    kinds = {str(_without_drafts(t)): t for t in found}
    return list(kinds.values())


def _without_drafts(technique: Technique) -> tuple[str, dict[str, Any]]:
    """Name and settings; of several terms a setting has its term's name before it."""
    drafts = ("gamma", "acceptance")
    kept = {k: v for k, v in technique.settings.items() if k.rpartition(".")[2] not in drafts}
    return technique.name, kept


def _drafting(technique: Technique, gamma: int, rate: float) -> Technique:
    return technique.with_rounds(gamma, round(rate, DIGITS))


def read_acceptance(text: str) -> "tuple[float | None, int, tuple[Acceptance, ...]]":
    """What ``--acceptance`` says: a rate, a rate at some drafts (0.8@4), or a measured file.

    Raises
    ------
    InputError
        If it is none of these.
    """
    if text.endswith(".json"):
        from kvsim.traces.attentionfile import load

        found = load(Path(text)).acceptance
        if not found:
            raise InputError(f"--acceptance: {text} measured no acceptance; see docs/quality.md")
        return None, 0, found
    rate, _, at = text.partition("@")
    try:
        value, gamma = float(rate), int(at) if at else 0
    except ValueError:
        value, gamma = -1.0, 0
    if not 0 <= value <= 1 or (at and not 1 <= gamma <= MOST_DRAFTS):
        check_type(text, ATTENTION)
        raise InputError(
            f"--acceptance: got {text[:40]!r}; expected the share of drafts that were accepted, as "
            f"0.8 or 0.8@4 (seen at 4 drafts per round), or a file of `kvsim validate --quality`"
        )
    return value, gamma, ()
