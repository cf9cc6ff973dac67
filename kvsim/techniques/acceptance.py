"""How many drafts a round accepts, by method, model and kind of text: a library of summaries.

A summary holds two numbers. ``first`` is the chance that a round's first draft is accepted;
``kept`` times it is the chance of the second one where the first was, and so on. Rounds end at the
first draft that fails, so that the share of rounds in which a draft is accepted falls with its
position. ``python -m benchmarks.drafts --write`` makes the file from measured rows; each line says
how many, at how many drafts, and how far they lie from the curve.

A round accepts drafts up to the first that fails, so the share of rounds that reach a position
falls with it, and the best number of drafts lies where one more costs what it brings.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from math import exp, log
from typing import TYPE_CHECKING

import numpy as np

from kvsim.files import TABLE, read_records
from kvsim.frozen import frozen

if TYPE_CHECKING:
    from kvsim.traces.attention import Acceptance


TASKS = ("mixed", "chat", "code", "knowledge", "math", "summary")
"""Kinds of text; ``mixed`` is the mean of all."""


ONE_MODEL = 0.25
"""Spread taken between models where one alone was measured."""


@frozen
class AcceptanceSummary:
    """Acceptance of one method on one model and kind of text, summarised from measurements.

    Attributes
    ----------
    method, model, task, temperature : conditions of the measurements; ``model`` as in kvsim or on
        its Hugging Face page.
    shape : chain, tree, block or heads.
    first, kept : see above.
    spread : relative standard deviation of measured tokens per round from the fitted curve.
    rows, drafts : number of measurements, and the smallest and largest number of drafts per round.
    source : source of the measurements.
    """

    method: str
    model: str
    task: str
    temperature: str
    shape: str
    first: float
    kept: float
    spread: float
    rows: int
    drafts: str
    source: str


@frozen
class AcceptedDrafts:
    """Shares of rounds in which the first, second, ... draft is accepted, with their source.

    Attributes
    ----------
    shares : share of rounds by position of the draft; non-increasing.
    spread : relative standard deviation of tokens per round between models and texts.
    source : description of the source.
    """

    shares: tuple[float, ...]
    spread: float
    source: str


def find_accepted(
    method: str,
    drafts: int,
    task: str = "mixed",
    model: str = "",
    shape: str = "",
    without: str = "",
) -> AcceptedDrafts | None:
    """Look up the acceptance of a method by position.

    The model's own measurements are used if there are any for that kind of text; otherwise those of
    all models, each with the same weight.

    Parameters
    ----------
    method : as the notation writes it.
    drafts : tokens drafted in a row per round. [tokens]
    task : one of ``TASKS``.
    model : name in kvsim; empty for any model.
    shape : chain, tree, block or heads; empty for the first that the method has.
    without : a model to leave out, for validation.

    Returns
    -------
    AcceptedDrafts or None
        None if nothing was measured.
    """
    rows = [s for s in load_summaries() if s.method == method and s.model != without]
    rows = [s for s in rows if s.shape == (shape or rows[0].shape)]
    here = [s for s in rows if task in ("mixed", s.task)]
    some = here or rows
    own = [s for s in some if s.model == model]
    if not some or not drafts:
        return None
    curves = _by_model(own or some, drafts)
    tokens = 1.0 + curves.sum(axis=1)
    within = float(np.mean([s.spread for s in own or some]))
    between = ONE_MODEL * (not own)
    if len(tokens) > 1:  # few models tell little of the next one: close to Student's t
        n = len(tokens)
        between = float(np.std(np.log(tokens), ddof=1)) * (n + 1) / (n - 1)
    kinds = "" if task == "mixed" else f", {task}"
    if task != "mixed" and not here:
        kinds = f"; as {task} was not measured"
    said = own[0].model if own else f"average of {len(tokens)} model{'s' * (len(tokens) > 1)}"
    shares = tuple(float(x) for x in curves.mean(axis=0))
    return AcceptedDrafts(shares, float(np.hypot(within, between)), f"{method}, {said}{kinds}")


def _by_model(some: Sequence[AcceptanceSummary], drafts: int) -> np.ndarray:
    """Return the shares by position, one row per model. (models, drafts)"""
    models = dict.fromkeys(s.model for s in some)
    return np.array([
        np.mean([position_shares(s.first, s.kept, drafts) for s in some if s.model == m], axis=0)
        for m in models
    ])  # fmt: skip


def position_shares(first: float, kept: float, drafts: int) -> np.ndarray:
    """Return the share of rounds in which the first, second, ... draft is accepted.

    Parameters
    ----------
    first : probability that the first draft is accepted.
    kept : ratio between the acceptance probabilities of successive drafts, each given that all
        earlier ones were accepted.
    drafts : drafted tokens per round. [tokens]

    Returns
    -------
    array
        Share of rounds by draft, 0 to 1. (drafts,)
    """
    return np.cumprod(np.minimum(first * kept ** np.arange(drafts), 1.0))


def methods() -> Iterable[str]:
    """Return the methods for which acceptance was measured."""
    return dict.fromkeys(s.method for s in load_summaries())


@cache
def load_summaries() -> tuple[AcceptanceSummary, ...]:
    """Load the shipped library of acceptance measurements."""
    file = files("kvsim.techniques") / "acceptance.csv"
    kinds = {"first": float, "kept": float, "spread": float, "rows": int}
    return tuple(
        AcceptanceSummary(**{key: kinds.get(key, str)(cell) for key, cell in row.items()})
        for _, row in read_records(str(file), TABLE)
    )


MOST_DRAFTS = 16
WITHIN_80 = 1.2816  # standard deviations below which one in ten lies
MAX_IMAGINARY_PART = 1e-9  # imaginary part below which a root is a real one


@frozen
class Positions:
    """Mean number of accepted drafts for rounds of 1, 2, ... ``MOST_DRAFTS`` drafts.

    Attributes
    ----------
    accepted
        Mean accepted drafts of a round of i + 1 drafts at index i. (16,)
    source
        Description of the source.
    most
        Largest number of drafts that was measured; plans do not use more.
    spreads
        Relative standard deviations of tokens per round between models and texts, by the number
        of drafts like ``accepted``; empty where the acceptance is the model's own.
    """

    accepted: tuple[float, ...]
    source: str
    most: int = MOST_DRAFTS
    spreads: tuple[float, ...] = ()

    def likely_rate(self, gamma: int) -> float:
        """Compute the acceptance that nine in ten models and texts reach or exceed.

        Parameters
        ----------
        gamma
            Drafted tokens per round. [tokens]

        Returns
        -------
        float
            Accepted over drafted tokens, 0 to 1.
        """
        if not gamma or not self.spreads:
            return self.rate(gamma)
        tokens = (1 + self.rate(gamma) * gamma) * exp(-WITHIN_80 * self.spreads[gamma - 1])
        return max(tokens - 1, 0.0) / gamma

    def rate(self, gamma: int) -> float:
        """Compute the ratio of accepted to drafted tokens of a round.

        Parameters
        ----------
        gamma
            Drafted tokens per round. [tokens]

        Returns
        -------
        float
            0 without drafts.
        """
        return min(1.0, self.accepted[gamma - 1] / gamma) if gamma else 0.0


def from_rate(rate: float, gamma: int, source: str) -> Positions:
    """Extend a known rate to other numbers of drafts, if each draft fails independently.

    Parameters
    ----------
    rate
        Accepted over drafted tokens, 0 to 1.
    gamma
        Drafts per round at which the rate was measured. [tokens]
    source
        Where the rate comes from, for the answer.

    Returns
    -------
    Positions
        Mean accepted drafts of rounds of 1, 2, ... drafts.
    """
    each = probability(rate, gamma)
    found = tuple(_geometric(each, n) for n in range(1, MOST_DRAFTS + 1))
    return Positions(found, source, gamma)


def from_rates(rates: Mapping[int, float], source: str) -> Positions:
    """Interpolate the mean accepted drafts of a round between numbers of drafts with known rates.

    Between these it is linear. Beyond the last each further draft adds less by a constant factor.

    Parameters
    ----------
    rates
        Accepted over drafted tokens, 0 to 1, by drafts per round.
    source
        Where the rates come from, for the answer.

    Returns
    -------
    Positions
        Mean accepted drafts of rounds of 1, 2, ... drafts.
    """
    known = sorted(rates)
    if len(known) == 1:
        return from_rate(rates[known[0]], known[0], source)
    places, values = [0, *known], [0.0, *(rates[g] * g for g in known)]
    last, before = known[-1], places[-2]
    slope = max(0.0, (values[-1] - values[-2]) / (last - before))
    each = min(probability(rates[last], last), 1.0)
    found = []
    for n in range(1, MOST_DRAFTS + 1):
        if n <= last:
            i = next(i for i, place in enumerate(places) if place >= n)
            part = (n - places[i - 1]) / (places[i] - places[i - 1])
            found.append(values[i - 1] + part * (values[i] - values[i - 1]))
        else:
            found.append(found[-1] + slope * each ** (n - last))
    return Positions(tuple(found), source, last)


def from_measured(found: "Acceptance") -> Positions:
    """Extend the mean accepted drafts that were measured with a trace.

    Parameters
    ----------
    found
        Acceptance of a trace, for its first few numbers of drafts.

    Returns
    -------
    Positions
        Mean accepted drafts of rounds of 1, 2, ... drafts, extended beyond the measured ones.
    """
    rates = {g: (found.tokens(g) - 1) / g for g in range(1, len(found.reached) + 1)}
    heat = "greedily" if found.temperature == 0 else f"at temperature {found.temperature:g}"
    return from_rates(rates, f"measured, {heat}")


def probability(rate: float, gamma: int) -> float:
    """Find the acceptance of one draft at which a round accepts a given share of its drafts.

    Parameters
    ----------
    rate
        Accepted over drafted tokens.
    gamma
        Drafted tokens per round. [tokens]

    Returns
    -------
    float
        Acceptance of each draft, from 0 to 1.
    """
    if rate <= 0 or rate >= 1:
        return min(max(rate, 0.0), 1.0)
    found = np.roots([*[1.0] * gamma, -rate * gamma])  # one of them is positive (Descartes)
    return float(found.real[(abs(found.imag) < MAX_IMAGINARY_PART) & (found.real > 0)].item())


def _geometric(each: float, gamma: int) -> float:
    return float(sum(each**k for k in range(1, gamma + 1)))


def published(model: str, draft: str, context: float) -> Positions | None:
    """Look up measured rates of a model and a draft, averaged over their texts.

    Parameters
    ----------
    model
        Name of the model.
    draft
        Name of the draft.
    context
        Context asked for; rows at the nearest one count. [tokens]

    Returns
    -------
    Positions | None
        None without such rows.
    """
    rows = [r for r in _rows() if r["model"] == model and r["draft"] == draft]
    if not rows:
        return _from_library(model, draft)
    contexts = {float(r["context_tokens"]) for r in rows}
    near = min(contexts, key=lambda c: abs(log(c / max(context, 1.0))))
    here = [r for r in rows if float(r["context_tokens"]) == near]
    gammas = sorted({int(r["gamma"]) for r in here})
    rates = {}
    for gamma in gammas:
        some = [float(r["rate"]) for r in here if int(r["gamma"]) == gamma]
        rates[gamma] = sum(some) / len(some)
    texts = ", ".join(dict.fromkeys(r["text"] for r in here))
    return from_rates(rates, f"published for {model} at {near:.0f} tokens ({texts})")


def _from_library(model: str, draft: str) -> Positions | None:
    """Return a method's measured acceptance on this model, or the mean over other models."""
    found = [find_accepted(draft, n, model=model) for n in range(1, MOST_DRAFTS + 1)]
    if found[-1] is None:
        return None
    accepted = tuple(float(x) for x in np.cumsum(found[-1].shares))
    spreads = tuple(one.spread for one in found if one)  # models differ more in later drafts
    some = [s for s in load_summaries() if s.method == draft]
    own = [s for s in some if s.model == model]
    most = max(int(s.drafts.split()[-1]) for s in own or some)
    source = f"measured, {found[-1].source}"
    return Positions(accepted, source, min(most, MOST_DRAFTS), spreads)


@cache
def _rows() -> tuple[dict[str, str], ...]:
    file = files("kvsim.quality") / "acceptance.csv"
    return tuple(row for _, row in read_records(str(file), TABLE))
