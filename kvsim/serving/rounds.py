"""Tokens that each request's decoding rounds yield, where rounds draft and verify."""

import numpy as np

from kvsim.errors import InputError
from kvsim.graph import Array
from kvsim.serving.costs import StepCosts
from kvsim.serving.records import Integers
from kvsim.techniques import parse
from kvsim.techniques.technique import Technique
from kvsim.traces.attention import Acceptance, AttentionTrace


def find_acceptance(technique: Technique, trace: AttentionTrace) -> Acceptance | None:
    """Return what a trace measured of a technique's drafts.

    Parameters
    ----------
    technique : the technique.
    trace : measurements by technique.

    Returns
    -------
    Acceptance or None
        None for a technique that does not draft.

    Raises
    ------
    InputError
        If the technique drafts and the trace has nothing on it with these settings.
    """
    if not technique.drafts:
        return None
    for found in trace.acceptance:
        other = parse(found.technique)
        if _drafts(other) == _drafts(technique):
            return found
    known = ", ".join(found.technique for found in trace.acceptance) or "none"
    raise InputError(f"--acceptance: nothing measured for {technique}; the file has {known}")


def with_acceptance(technique: Technique, measured: Acceptance | None) -> Technique:
    """Return a technique with the mean acceptance that was measured.

    Parameters
    ----------
    technique : the technique.
    measured : what was measured of its drafts; None leaves it as it is.

    Raises
    ------
    InputError
        If its settings say another one, or its gamma was not measured.
    """
    if measured is None:
        return technique
    gamma = technique.drafts
    if not isinstance(technique.settings["acceptance"], str):
        raise InputError(
            f"--acceptance: {technique.name} sets "
            f"acceptance={technique.settings['acceptance']}; leave out one"
        )
    return technique.with_rounds(acceptance=(measured.tokens(gamma) - 1) / gamma)


def _drafts(technique: Technique) -> str:
    """The technique whatever the length and the acceptance of its rounds."""
    return str(technique.with_rounds(drafts=1, acceptance=1.0))


def draw_rates(
    costs: StepCosts, generate: Integers, seed: int, measured: Acceptance | None = None
) -> Array:
    """Draw the mean tokens per decoding round of each request, round by round.

    Without a measurement, a round accepts drafts up to the first that fails, and each fails
    independently with the one probability at which rounds yield the technique's mean. Techniques
    without drafts yield one token per round.

    Parameters
    ----------
    costs : step costs of the technique in the deployment.
    generate : tokens that each request generates. (n,) [tokens]
    seed : seed of the random numbers.
    measured : acceptance by position, where it was measured.

    Returns
    -------
    array
        Tokens per round of each request. (n,) [tokens]
    """
    gamma = costs.technique.drafts
    if gamma == 0:
        return np.ones(generate.size)
    random = np.random.default_rng(seed)
    accept = 0.0 if measured else _probability(costs.rate - 1, gamma)

    def draw(count: int) -> Integers:
        """Tokens of so many rounds."""
        if measured:
            return measured.draw(random, gamma, count)
        fails = random.geometric(max(1 - accept, 1e-12), count)  # trials to the first
        return np.asarray(np.minimum(fails - 1, gamma) + 1)

    rounds, left = np.zeros(generate.size), np.asarray(generate - 1)
    going = np.flatnonzero(left > 0)
    while going.size:
        rounds[going] += 1
        left[going] -= draw(going.size)
        going = going[left[going] > 0]
    more = generate - 1
    return np.divide(more, rounds, out=np.ones(generate.size), where=rounds > 0)


def _probability(accepted: float, gamma: int) -> float:
    """Acceptance of one draft at which ``accepted`` of gamma are accepted before one fails."""
    from scipy.optimize import brentq

    def excess(p: float) -> float:
        return float(sum(p**k for k in range(1, gamma + 1)) - accepted)

    return 1.0 if excess(1.0) <= 0 else float(brentq(excess, 0.0, 1.0))
