"""What of a technique's settings its quality depends on, and which settings are gentler.

Evidence about one setting speaks for every setting that is at least as gentle, and evidence that
a gentle setting loses much speaks against every harsher one.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import numpy as np

from kvsim.frozen import frozen
from kvsim.techniques.axes.base import Part
from kvsim.techniques.technique import Technique

PERPLEXITY = "relative perplexity"
FACTS = "of the planted facts"
"""Units of a measured loss: what it is a share of."""

Family = Literal["packing", "selection", "eviction"]

MORE, LESS = 1, -1  # a larger number is gentler; a smaller one is

GENTLER: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "kivi": {"bits": MORE, "group": LESS, "residual": MORE},
        "specache": {
            "bits": MORE,
            "group": LESS,
            "k": MORE,
            "residual": MORE,
            "speculative": LESS,
        },
        "zipcache": {"salient": MORE, "high": MORE, "low": MORE, "probe": MORE, "window": MORE},
        "mikv": {"salient": MORE, "high": MORE, "low": MORE, "group": LESS},
        "gear": {"bits": MORE, "group": LESS, "residual": MORE, "rank": MORE, "outliers": MORE},
        "gear-first": {"bits": MORE, "residual": MORE, "rank": MORE, "outliers": MORE},
        "quantspec": {"group": LESS, "residual": MORE},
        "kcache": {"n": MORE, "gpu_layers": MORE},
        "fp8": {},
        "packed on the host": {"bits": MORE},
    }
)
"""By technique: the settings that quality depends on, and which way is gentler."""

HOSTS = ("offload", "kvpr", "flexgen")  # pack what they copy in one way
BUDGETS = ("h2o", "streamingllm", "snapkv", "pyramidkv", "infllm")


@frozen
class Harshness:
    """A setting as far as quality is concerned."""

    kind: str  # technique, or what several have in common
    family: Family
    numbers: Mapping[str, float]  # by setting; larger is gentler for all of them

    def at_least_as_gentle(self, other: "Harshness") -> bool:
        """Whether what the other loses is more than this can lose."""
        return self.kind == other.kind and all(
            self.numbers[key] >= value for key, value in other.numbers.items()
        )


def family(technique: Technique) -> Family:
    """How a technique loses quality: it drops tokens, reads some of them, or stores fewer bits.

    Evidence never crosses from one family to another. InfLLM keeps everything but attends to blocks
    that its own representatives find: its published losses are those of evictions, and so are the
    demands on its evidence.
    """
    chosen = [parts.selection for parts in technique.parts]
    if technique.name == "infllm" or any(one.evicts != "never" for one in chosen):
        return "eviction"
    return "selection" if any(one.chooses for one in chosen) else "packing"


def harshness(technique: Technique, length: float, budget: float | None = None) -> Harshness:
    """A technique's settings, for contexts of some length.

    Parameters
    ----------
    length : cached tokens, which the budget of an eviction is a share of. [tokens]
    budget : that share where it is known; otherwise it follows from the settings.
    """
    name = technique.name
    if name in BUDGETS:
        share = kept(technique, length) / length if budget is None else budget
        return Harshness(name, family(technique), {"budget": min(share, 1.0)})
    kind = "packed on the host" if name in HOSTS else name
    if kind not in GENTLER:  # no order of gentler settings is stated: only the same setting counts
        kind = str(technique)
    signs = GENTLER.get(kind, {})
    numbers = {key: sign * float(np.max(technique.settings[key])) for key, sign in signs.items()}
    return Harshness(kind, family(technique), numbers)


def kept(technique: Technique, length: float) -> float:
    """Tokens that an eviction keeps, or attends to, of so many in a prompt. [tokens]"""
    (term,) = technique.terms
    settings = term.for_prompt(length).settings if isinstance(term, Part) else term.settings
    s = {key: float(np.max(v)) for key, v in settings.items() if not isinstance(v, str)}
    if technique.name == "h2o":
        return s["heavy"] + s["recent"]
    if technique.name == "streamingllm":
        return s["sink"] + s["recent"]
    if technique.name in ("snapkv", "pyramidkv"):
        return s["budget"]
    return s["initial"] + s["local"] + s["k"] * s["block"]
