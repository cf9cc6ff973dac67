"""Break-even points with full KV by context, batch, acceptance and host link."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Link
from kvsim.prediction.generate import Prediction
from kvsim.techniques.technique import Technique

CONTEXTS = 4  # points of the sum over the generated tokens
PROMPT_POINTS = tuple(256 * 2**i for i in range(12))
BATCH_POINTS = tuple(2**i for i in range(11))
ACCEPTANCES = tuple(i / 10 for i in range(11))
LINK_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # times the profile's host link
AXIS_TITLES = {
    "prompt": "prompt [tokens]",
    "batch": "batch",
    "acceptance": "accepted over drafted tokens",
    "link": "host link, times the profile's",
}
EVEN = 0.01  # relative difference that is none
MOVES = 1e-6  # relative change of a ratio that makes an axis worth showing


@frozen
class BreakEven:
    """Decoding speed relative to full KV along one axis.

    Attributes
    ----------
    axis
        Varied quantity, one of ``AXIS_TITLES``.
    values
        Values on the axis, ascending, in the axis's unit. (n,)
    ratio
        Tokens per second, divided by those of full KV at the same value; NaN where one of the two
        does not fit in memory. (n,)
    """

    axis: str
    values: Array
    ratio: Array

    @property
    def crossings(self) -> list[float]:
        """Values on the axis where the ratio crosses 1, by interpolation of its logarithm.

        A crossing counts only if the ratio differs from 1 by more than ``EVEN`` on both sides.
        """
        found = []
        gain = np.log(self.ratio)
        grid = self.values if self.axis == "acceptance" else np.log(self.values)
        before: int | None = None
        for here in range(len(gain)):
            if not np.isfinite(gain[here]):
                before = None
            elif abs(gain[here]) > EVEN:
                if before is not None and gain[before] * gain[here] < 0:
                    found.append(self._passed(grid, gain, before, here))
                before = here
        return found

    def _passed(self, grid: Array, gain: Array, first: int, last: int) -> float:
        """Where the sign changes between two points."""
        toward = gain[first : last + 1] * gain[last]  # below 0 before the change, above after it
        i = first + int(np.flatnonzero((toward[:-1] <= 0) & (toward[1:] > 0))[0])
        at = grid[i] + (grid[i + 1] - grid[i]) * gain[i] / (gain[i] - gain[i + 1])
        return float(at if self.axis == "acceptance" else np.exp(at))


def break_evens(prediction: Prediction, full: Technique) -> Iterator[BreakEven]:
    """Compare a prediction with full KV along every axis that matters for its technique.

    Parameters
    ----------
    prediction
        The prediction, of which the first batch is used.
    full
        The technique that stores the full KV cache.

    Yields
    ------
    BreakEven
        One comparison per axis.
    """
    d, batch = prediction.deployment, float(prediction.batch[0])
    t, prompt = prediction.technique, prediction.prompt
    speed = _Speeds(full, prediction.generate)
    prompts = [p for p in PROMPT_POINTS if p + prediction.generate <= d.model.max_context]
    yield from _make("prompt", prompts, [speed.ratio(t, d, batch, p) for p in prompts])
    by_batch = gains_by_batch(prediction, full)
    if by_batch is not None:
        yield by_batch
    yield from _acceptances(prediction, speed)
    ratios = [speed.ratio(t, linked(d, factor), batch, prompt) for factor in LINK_FACTORS]
    if np.ptp(ratios) > MOVES * abs(ratios[0]):
        yield from _make("link", LINK_FACTORS, ratios)


def gains_by_batch(prediction: Prediction, full: Technique) -> BreakEven | None:
    """Compare decoding with full KV at every batch size that fits.

    Parameters
    ----------
    prediction
        The prediction.
    full
        The technique that stores the full KV cache.

    Returns
    -------
    BreakEven or None
        The comparison; None if fewer than two batch sizes fit.
    """
    t, speed = prediction.technique, _Speeds(full, prediction.generate)
    batches = [b for b in BATCH_POINTS if b % t.tiles() == 0]
    ratios = [speed.ratio(t, prediction.deployment, b, prediction.prompt) for b in batches]
    return next(_make("batch", batches, ratios), None)


def break_even_acceptance(prediction: Prediction, full: Technique) -> float | None:
    """Find the acceptance at which speculative decoding is as fast as full KV.

    Parameters
    ----------
    prediction
        The prediction.
    full
        Full KV.

    Returns
    -------
    float | None
        0 if it is always faster, infinite if it never is, None for a technique without drafts.
    """
    for found in _acceptances(prediction, _Speeds(full, prediction.generate)):
        always = 0.0 if np.nanmax(found.ratio) > 1 + EVEN else float("inf")
        return found.crossings[0] if found.crossings else always
    return None


def _acceptances(prediction: Prediction, speed: "_Speeds") -> Iterator[BreakEven]:
    """The axis of acceptance, for techniques that draft."""
    t = prediction.technique
    if "acceptance" in t.settings:
        point = prediction.deployment, float(prediction.batch[0]), prediction.prompt
        ratios = [speed.ratio(t.changed(acceptance=a), *point) for a in ACCEPTANCES]
        yield from _make("acceptance", ACCEPTANCES, ratios)


def linked(deployment: Deployment, factor: float) -> Deployment:
    """Return a deployment with faster or slower links between host and GPU.

    Parameters
    ----------
    deployment
        Model, machine and software stack.
    factor
        Factor on the bandwidth in both directions.

    Returns
    -------
    Deployment
        The changed copy; latencies stay the same.
    """
    links = {
        name: Link(link.bandwidth * factor, link.latency) if name in ("h2d", "d2h") else link
        for name, link in deployment.hardware.links.items()
    }
    return replace(deployment, hardware=replace(deployment.hardware, links=links))


@frozen
class _Speeds:
    full: Technique
    generate: int

    def ratio(self, technique: Technique, d: Deployment, batch: float, prompt: int) -> float:
        """Compute the decoding speed over that of full KV.

        Parameters
        ----------
        technique
            Technique.
        d
            Model on GPUs.
        batch
            Sequences in the batch. [sequences]
        prompt
            Prompt of each. [tokens]

        Returns
        -------
        float
            Tokens per second over those of full KV; NaN where one of them does not fit.
        """
        found = [
            Prediction(t, d, np.array([float(batch)]), prompt, self.generate, CONTEXTS)
            for t in (technique, self.full)
        ]
        if not all(p.fits[0] for p in found):
            return float("nan")
        mine, base = (float(p.rate_tok_s[0]) for p in found)
        return mine / base


def _make(axis: str, values: Sequence[float], ratios: Sequence[float]) -> Iterator[BreakEven]:
    if np.isfinite(ratios).sum() > 1:
        yield BreakEven(axis, np.array(values, dtype=float), np.array(ratios))
