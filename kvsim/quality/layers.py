"""Losses of single layers whose keys or values alone are stored in fewer bits.

Losses of layers add up, and to more than that where they are large: the sum to a power, times a
factor, both fitted to runs of all layers alike. A profile holds for its own checkpoint. Attention
mass is no substitute: the first layers may have little and lose most.

The widths of all layers within a mean are chosen by a programme over these losses.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import date
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import InfeasibleError, InputError
from kvsim.files import ATTENTION_FILE, read_json, replace_text
from kvsim.frozen import frozen
from kvsim.graph import Array, Number
from kvsim.quality.evidence import Evidence
from kvsim.quality.measured import PERPLEXITY
from kvsim.techniques import parse
from kvsim.techniques.technique import Technique

if TYPE_CHECKING:  # pulp, which a rented GPU's image has not: only a choice of widths needs it
    from kvsim import solver

Widths = NDArray[np.int64]
LAYER_LOSSES_FORMAT = "kvsim layer losses 1"
CACHE_SIDES = ("keys", "values")
ADDING = 0.35
"""By which sums of layers are off at most, relative: 44 mixed plans on SmolLM2-135M were off by
27 % at worst, 8 with fewer tokens by 32 % (docs/quality.md)."""
Z_95 = 1.96  # standard errors to either side: 95 %


@frozen
class LayerLosses:
    """Measured loss of quantising the cache layer by layer: KL divergence from fp16. [nat/token]

    Attributes
    ----------
    model, weights, text, settings, date
        The model, the source of its weights, the text, the settings, and the date.
    bits
        Widths that were tried, ascending. (b,) [bit]
    group
        Number of elements that share a scale.
    alone
        Loss with only the keys (index 0) or values (1) of one layer at one width, by window of
        text. (2, b, layers, windows)
    uniform
        Loss with the keys and values of all layers at one width. (b, windows)
    """

    model: str
    weights: str
    text: str
    settings: str
    date: str
    bits: tuple[int, ...]
    group: int
    alone: Array
    uniform: Array

    @cached_property
    def growth(self) -> tuple[float, float]:
        """Factor and exponent by which summed losses of single layers predict that of all together.

        Fitted to ``uniform``; the exponent is 1 if fewer than two widths lose anything.
        """
        sums, whole = self._uniform()
        known = (sums > 0) & (whole > 0)
        if not known.any():
            return 1.0, 1.0
        logs, power = np.log(sums[known]), 1.0
        if np.ptp(logs) > 0:
            found = float(np.polyfit(logs, np.log(whole[known]), 1)[0])
            power = found if found > 0 else 1.0  # more loss in layers is never less in all
        return float(np.exp((np.log(whole[known]) - power * logs).mean())), power

    def expected(self, widths: Widths) -> tuple[float, float, float]:
        """Predict the loss of a choice of widths.

        Parameters
        ----------
        widths
            Index into ``bits`` for the keys (row 0) and values (row 1) of every layer. (2, layers)

        Returns
        -------
        loss, low, high : float
            KL divergence and its 95 % interval. [nat/token]
        """
        side, layer = np.indices(widths.shape)
        windows = self.alone[side, widths, layer].sum(axis=(0, 1))
        added = float(windows.mean())
        mean = float(self._grown(added))
        windows = windows * (mean / added if added else 1.0)
        error = float(windows.std(ddof=1) / np.sqrt(windows.size)) if windows.size > 1 else mean
        sums, whole = self._uniform()
        some = sums > 0
        spread = float(np.abs(whole[some] / self._grown(sums[some]) - 1).max(initial=0.0))
        off = float(np.hypot(Z_95 * error, mean * max(spread, ADDING)))
        return mean, max(0.0, mean - off), mean + off

    def _grown(self, added: Number) -> Number:
        """Joint loss of layers whose separate losses have this sum. [nat per token]"""
        factor, power = self.growth
        return factor * added**power

    def _uniform(self) -> tuple[Array, Array]:
        """Sum of the separate losses and measured joint loss of each uniform width. (b,) each"""
        return self.alone.sum(axis=(0, 2)).mean(axis=-1), self.uniform.mean(axis=-1)

    def notation(self, widths: Widths) -> str:
        """Write a choice of widths in the notation that ``kvsim.techniques.parse`` reads.

        Parameters
        ----------
        widths
            Index into the bits for keys and values of each layer.

        Returns
        -------
        str
            Neighbours that agree stand as one range.
        """
        each = [(self.bits[k], self.bits[v]) for k, v in widths.T]
        found, first = [], 0
        for i in range(1, len(each) + 1):
            if i == len(each) or each[i] != each[first]:
                place = f"{first}" if i - 1 == first else f"{first}-{i - 1}"
                k, v = each[first]
                found.append(f"{place}: grouped:bits={k},value_bits={v},group={self.group}")
                first = i
        return "; ".join(found)


def write(path: Path, found: LayerLosses) -> None:
    """Write losses as a JSON file, atomically.

    Parameters
    ----------
    path
        Path of the file.
    found
        Losses of each layer.
    """
    made: dict[str, object] = {"format": LAYER_LOSSES_FORMAT} | asdict(found)
    made |= {"bits": list(found.bits), "alone": found.alone.tolist()}
    made |= {"uniform": found.uniform.tolist()}
    replace_text(path, json.dumps(made, allow_nan=False) + "\n")


def is_one(given: object) -> bool:
    """Tell whether a parsed file holds losses of layers.

    Parameters
    ----------
    given
        The parsed JSON.

    Returns
    -------
    bool
        Whether its ``format`` says so.
    """
    return isinstance(given, dict) and given.get("format") == LAYER_LOSSES_FORMAT


def load(path: Path) -> LayerLosses:
    """Read the losses of layers from a file.

    Parameters
    ----------
    path
        A file that :func:`write` wrote.

    Returns
    -------
    LayerLosses
        The losses.

    Raises
    ------
    InputError
        If the file holds something else.
    """
    return parse_losses(read_json(path, ATTENTION_FILE), path)


def parse_losses(given: Any, path: Path) -> LayerLosses:
    """Parse the losses of layers that a file holds.

    Parameters
    ----------
    given
        The parsed file.
    path
        Path of the file, for messages.

    Returns
    -------
    LayerLosses
        The losses.

    Raises
    ------
    InputError
        If the file holds something else.
    """
    if not is_one(given):
        raise InputError(f'{path}: expected a JSON object with "format": "{LAYER_LOSSES_FORMAT}"')
    names = LayerLosses.__dataclass_fields__
    missing = sorted(names.keys() - given.keys())
    if missing:
        raise InputError(f"{path}: {missing[0]} is missing; measure with `kvsim validate quality`")
    try:
        alone, uniform = (np.array(given[k], dtype=float) for k in ("alone", "uniform"))
        bits, group = tuple(int(b) for b in given["bits"]), int(given["group"])
        date.fromisoformat(given["date"])
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: {error}; expected the numbers of --per-layer") from None
    good = alone.ndim == 4 and alone.shape[:2] == (2, len(bits))
    good = good and uniform.shape == (len(bits), alone.shape[-1])
    if not good or not (np.isfinite(alone).all() and np.isfinite(uniform).all()):
        raise InputError(
            f"{path}: alone has shape {alone.shape}; expected finite numbers, (2, widths, layers, "
            f"windows), and uniform (widths, windows)"
        )
    words = {k: str(given[k]) for k in ("model", "weights", "text", "settings", "date")}
    return LayerLosses(**words, bits=bits, group=group, alone=alone, uniform=uniform)


GAP = 1e-6  # relative
SECONDS = 20.0
BITS_STEP = 0.125  # bits on average between two choices that a plan may take


Choices = dict[tuple[int, int, int], "solver.Variable"]


def build(losses: LayerLosses, mean_bits: float) -> "tuple[solver.Problem, Choices]":
    """Build the integer programme that assigns a width to the keys and values of every layer.

    Parameters
    ----------
    losses
        Measured losses.
    mean_bits
        Upper limit of the mean width. [bit]

    Returns
    -------
    problem : Problem
        Minimise the summed losses; each side of each layer takes one width.
    choices
        Its binary variables: which width the keys and values of each layer take.
    """
    from kvsim import solver

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
    """Find the widths with the least loss for a mean width.

    Parameters
    ----------
    losses
        Measured losses.
    mean_bits
        Upper limit of the mean width. [bit]

    Returns
    -------
    array
        Index into ``losses.bits`` for the keys (row 0) and values (row 1) of every layer.
        (2, layers)

    Raises
    ------
    InfeasibleError
        If ``mean_bits`` is below the narrowest width.
    """
    from kvsim import solver

    problem, x = build(losses, mean_bits)
    if not solver.solve(problem, GAP, SECONDS).has_values:
        raise InfeasibleError(
            f"--bits: got {mean_bits:g}; expected at least {losses.bits[0]}, the narrowest width "
            "that was measured"
        )
    chosen = np.zeros((losses.alone.shape[0], losses.alone.shape[2]), dtype=np.int64)
    for (s, b, i), v in x.items():
        if v.value() > 0.5:
            chosen[s, i] = b
    return chosen


def offered(losses: LayerLosses) -> Mapping[Technique, Evidence]:
    """Return the assignments of widths that a plan may choose from, with their predicted losses.

    There is one per mean width, the one with the least loss. A KL divergence equals the growth of
    log-perplexity on text that the full-precision model would write itself, so the loss is stated
    as one of perplexity.

    Parameters
    ----------
    losses
        Measured losses.

    Returns
    -------
    dict
        Evidence by technique, from the narrowest to the widest mean in steps of ``BITS_STEP``.
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
