"""Accepted drafts per round by position, for any number of drafts.

A round accepts drafts up to the first that fails, so the share of rounds that reach a position
falls with it, and the best number of drafts lies where one more costs what it brings.
"""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from math import exp, log
from typing import TYPE_CHECKING

import numpy as np

from kvsim.files import TABLE, read_records
from kvsim.frozen import frozen
from kvsim.techniques.acceptance import find_accepted, load_summaries

if TYPE_CHECKING:
    from kvsim.traces.attention import Acceptance

MOST_DRAFTS = 16
WITHIN_80 = 1.2816  # standard deviations below which one in ten lies
MAX_IMAGINARY_PART = 1e-9  # imaginary part below which a root is a real one


@frozen
class Positions:
    """Accepted drafts of a round of 1, 2, ... ``MOST_DRAFTS`` drafts, on average.

    Attributes
    ----------
    accepted
        Mean accepted drafts by the number of drafts, that number less one as the index. (16,)
    source
        Where they come from, in words.
    most
        Drafts of a round that were measured at most; more are not planned.
    spreads
        Relative standard deviations of tokens per round between models and texts, by the number
        of drafts like ``accepted``; empty where the acceptance is the model's own.
    """

    accepted: tuple[float, ...]
    source: str
    most: int = MOST_DRAFTS
    spreads: tuple[float, ...] = ()

    def likely_rate(self, gamma: int) -> float:
        """Compute accepted over drafted tokens that nine in ten models and texts reach.

        Parameters
        ----------
        gamma
            Drafted tokens per round. [tokens]
        """
        if not gamma or not self.spreads:
            return self.rate(gamma)
        tokens = (1 + self.rate(gamma) * gamma) * exp(-WITHIN_80 * self.spreads[gamma - 1])
        return max(tokens - 1, 0.0) / gamma

    def rate(self, gamma: int) -> float:
        """Compute accepted over drafted tokens of a round.

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
    """Each draft fails independently with one probability: that which gives the rate at a gamma.

    Parameters
    ----------
    rate : accepted over drafted tokens.
    gamma : drafts per round when it was seen.
    """
    each = probability(rate, gamma)
    found = tuple(_geometric(each, n) for n in range(1, MOST_DRAFTS + 1))
    return Positions(found, source, gamma)


def from_rates(rates: Mapping[int, float], source: str) -> Positions:
    """Fit accepted drafts by position through some known rates; geometric beyond the last.

    Parameters
    ----------
    rates
        Accepted over drafted tokens by drafts per round.
    source
        Where the rates come from, for the answer.
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
    """Return accepted drafts by position as a trace measured them.

    Parameters
    ----------
    found
        Acceptance of a trace, for its first few draft lengths.
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
    """A method's acceptance on this model, or the mean of others."""
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
