"""Tokens that each request's decoding rounds yield, where rounds draft and verify."""

import numpy as np

from kvsim.graph import Array
from kvsim.serving.costs import StepCosts
from kvsim.serving.state import Integers


def drawn_rate(costs: StepCosts, generate: Integers, seed: int) -> Array:
    """Mean tokens per round of each request, its rounds drawn one by one. (n,)

    A round accepts drafts up to the first that fails. Each fails independently with the one
    probability at which rounds yield the technique's mean. Techniques without drafts yield one.
    """
    gamma = int(getattr(costs.technique, "gamma", 0))
    if gamma == 0:
        return np.ones(generate.size)
    accept = _probability(costs.rate - 1, gamma)
    random = np.random.default_rng(seed)
    rounds, left = np.zeros(generate.size), np.asarray(generate - 1, dtype=float)
    while (left > 0).any():
        fails = random.geometric(max(1 - accept, 1e-12), generate.size)  # trials to the first
        rounds += left > 0
        left -= np.minimum(fails - 1, gamma) + 1.0
    more = generate - 1
    return np.divide(more, rounds, out=np.ones(generate.size), where=rounds > 0)


def _probability(accepted: float, gamma: int) -> float:
    """Acceptance of one draft at which ``accepted`` of gamma are accepted before one fails."""
    from scipy.optimize import brentq

    def excess(p: float) -> float:
        return float(sum(p**k for k in range(1, gamma + 1)) - accepted)

    return 1.0 if excess(1.0) <= 0 else float(brentq(excess, 0.0, 1.0))
