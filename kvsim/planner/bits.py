"""Bits of every layer's keys and values within a mean, as a programme over measured losses."""

from collections.abc import Mapping
from itertools import product

import numpy as np

from kvsim import solver
from kvsim.errors import InfeasibleError
from kvsim.quality.evidence import Evidence
from kvsim.quality.layers import LayerLosses, Widths
from kvsim.quality.settings import PERPLEXITY
from kvsim.techniques import parse
from kvsim.techniques.technique import Technique

GAP = 1e-6  # relative
SECONDS = 20.0
BITS_STEP = 0.125  # bits on average between two choices that a plan may take


Choices = dict[tuple[int, int, int], solver.Variable]


def build(losses: LayerLosses, mean_bits: float) -> tuple[solver.Problem, Choices]:
    """The programme, and which width each side (keys, values) of each layer takes in it."""
    each = losses.alone.mean(axis=-1)
    sides, widths, layers = (range(n) for n in each.shape)
    problem = solver.create_problem("bits")
    x = {
        key: problem.add_variable("x_{}_{}_{}".format(*key), 0, 1, solver.INTEGER)
        for key in product(sides, widths, layers)
    }
    scale = float(each.max()) or 1.0
    problem.setObjective(solver.add_up(float(each[key]) / scale * v for key, v in x.items()))
    for s, i in product(sides, layers):
        problem.addConstraint(solver.add_up(x[s, b, i] for b in widths) == 1, f"one_{s}_{i}")
    used = solver.add_up(losses.bits[b] * v for (_, b, _), v in x.items())
    problem.addConstraint(used <= mean_bits * len(sides) * len(layers), "bits")
    return problem, x


def assign(losses: LayerLosses, mean_bits: float) -> Widths:
    """Widths with the least loss whose mean is at most ``mean_bits``: indices, (2, layers).

    Raises
    ------
    InfeasibleError
        If even the narrowest widths are wider.
    """
    problem, x = build(losses, mean_bits)
    if not solver.solve(problem, GAP, SECONDS).has_values:
        raise InfeasibleError(
            f"--bits: got {mean_bits:g}; the narrowest width that was measured is {losses.bits[0]}"
        )
    chosen = np.zeros((losses.alone.shape[0], losses.alone.shape[2]), dtype=np.int64)
    for (s, b, i), v in x.items():
        if v.value() > 0.5:
            chosen[s, i] = b
    return chosen


def offered(losses: LayerLosses) -> Mapping[Technique, Evidence]:
    """The best widths at every mean between the narrowest and the widest, and what they lose.

    A KL divergence is the growth of log-perplexity on text that the model with full-precision KV
    would write itself, which makes the loss a relative perplexity.
    """
    narrowest, widest = losses.bits[0], losses.bits[-1]
    found: dict[Technique, Evidence] = {}
    for step in range(round((widest - narrowest) / BITS_STEP) + 1):
        widths = assign(losses, narrowest + step * BITS_STEP)
        notation = losses.notation(widths)
        loss, low, high = (float(np.expm1(kl)) for kl in losses.expected(widths))
        windows = losses.alone.shape[-1]
        source = f"layers alone, {windows} windows of {losses.text.split(';')[0]}, {losses.date}"
        mean = np.array(losses.bits)[widths].mean()
        worst = f"{mean:.3g} bits on average, expected from the losses of single layers"
        found[parse(notation)] = Evidence("expected", loss, low, high, PERPLEXITY, worst, source)
    return found
