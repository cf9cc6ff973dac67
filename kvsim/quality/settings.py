"""Settings on which a technique's quality depends, and which of two settings is gentler.

Evidence about one setting speaks for every setting that is at least as gentle, and evidence that
a gentle setting loses much speaks against every harsher one.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import get_args

import numpy as np

from kvsim.frozen import frozen
from kvsim.techniques.axes.base import Family, Part
from kvsim.techniques.technique import Technique

PERPLEXITY = "relative perplexity"
FACTS = "of the planted facts"
"""Units of a measured loss: what it is a share of."""

FAMILIES: tuple[Family, ...] = tuple(reversed(get_args(Family)))  # the harshest first


@frozen
class Harshness:
    """The quality-relevant part of a setting."""

    kind: str  # technique, or what several have in common
    family: Family
    numbers: Mapping[str, float]  # by setting; larger is gentler for all of them

    def at_least_as_gentle(self, other: "Harshness") -> bool:
        """Whether this setting loses no more than another.

        Parameters
        ----------
        other
            The harshness to compare with.
        """
        return self.kind == other.kind and all(
            self.numbers[key] >= value for key, value in other.numbers.items()
        )


def family(technique: Technique) -> Family:
    """Return the family of a technique's loss, from the harshest selection of its layers.

    Evidence never crosses from one family to another.

    Parameters
    ----------
    technique
        The KV-cache technique.
    """
    found = {parts.selection.family for parts in technique.parts}
    return next(one for one in FAMILIES if one in found)


def harshness(technique: Technique, length: float, budget: float | None = None) -> Harshness:
    """Return a technique's settings as far as its losses depend on them.

    A class says by ``gentler`` which way each of its settings is gentler, or by ``prompt_budget``
    how many tokens it attends to. Of a technique that says neither only the same setting counts.

    Parameters
    ----------
    length : cached tokens, which the budget of an eviction is a share of. [tokens]
    budget : that share where it is known; otherwise it follows from the settings.
    """
    kind, numbers = str(technique), {}
    if len(technique.terms) == 1:
        (term,) = technique.terms
        own = term.for_prompt(length) if isinstance(term, Part) else term
        attended = own.prompt_budget()
        if attended is not None:
            share = float(np.max(attended)) / length if budget is None else budget
            return Harshness(term.name, family(technique), {"budget": min(share, 1.0)})
        signs = {f.name: f.metadata["gentler"] for f in fields(term) if f.metadata["gentler"]}
        if signs:
            kind = term.evidence_kind or term.name
        numbers = {k: sign * float(np.max(term.settings[k])) for k, sign in signs.items()}
    return Harshness(kind, family(technique), numbers)
