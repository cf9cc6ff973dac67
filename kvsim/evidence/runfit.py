"""Fitting a stack to a measured serving run.

A run at one load cannot tell every number of a stack, and a fit that moves all of them makes other
loads worse. So the shipped numbers are the prior: a number moves only if the run's first requests
determine it, and the changed stack replaces the shipped one only if it predicts the other requests
better. Whichever of the two is kept, its errors on those are its evidence on this card.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from kvsim.errors import InputError
from kvsim.evidence.leastsquares import FAR_OFF, list_confused
from kvsim.evidence.loadtests import check_possible
from kvsim.evidence.logs import MeasuredRun
from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Stack
from kvsim.machines.profiles import number_of, with_numbers
from kvsim.serving.costs import StepCosts
from kvsim.serving.outcome import Outcome
from kvsim.serving.rules import Rules
from kvsim.serving.simulate import simulate
from kvsim.techniques.technique import Technique

JACKKNIFE_BLOCKS = 8  # parts of a run, in order of arrival; their spread is a number's error
FEWEST_REQUESTS = 2 * JACKKNIFE_BLOCKS  # requests that a fit sees, and that it is checked on
SURE = 0.02  # what a part's mean is worth: relative error of a simulation whose stack is right
DETERMINED = 0.5  # uncertainty over that of the shipped number, below which a run tells a number
SIGNIFICANT = 2.0  # standard errors that a number must move by
DERIVATIVE_STEP = 0.3  # of a derivative, in standard deviations of the shipped number
TURNS = 8  # of the search


@frozen
class Move:
    """Numbers of a stack that a fit changes together.

    Attributes
    ----------
    keys
        Keys of the numbers in the stack file.
    spread
        Standard deviation of the prior: in seconds for a time; for a share, that of its logarithm.
    """

    keys: tuple[str, ...]
    spread: float

    @property
    def free(self) -> int:
        """Sign of the change that has no bound: -1 (smaller) for a share, 1 (larger) for a time."""
        return 1 if self.keys[0].endswith("_s") else -1

    def moved(self, stack: Stack, place: float) -> dict[str, float]:
        """Return the numbers at a distance from the stack's own.

        Parameters
        ----------
        stack
            The stack that the fit begins with.
        place
            Distance, in standard deviations of the shipped numbers; times grow with it, at least
            to 0, shares by its exponential, up to 1.

        Returns
        -------
        dict[str, float]
            Value by key, of times in s.
        """
        found = {}
        for key in self.keys:
            own = number_of(stack, key)
            if key.endswith("_s"):
                found[key] = float(max(0.0, own + self.spread * place))
            else:
                found[key] = float(np.clip(own * np.exp(self.spread * place), 0.02, 1.0))
        return found


def list_terms(deployment: Deployment, technique: Technique) -> tuple[Move, ...]:
    """List the numbers of a stack that a measured run can determine.

    These are the rates of products and of attention, and the fixed times of a pass.

    Parameters
    ----------
    deployment
        Model, card and engine; the weight format decides which products there are.
    technique
        The technique of the run, which decides the kernel class of attention.

    Returns
    -------
    tuple of Move
        The numbers, grouped by what the run cannot tell apart.
    """
    products = {deployment.weight_format.kernel, deployment.mixer_stored("qkv").kernel}
    if deployment.model.experts:
        products.add(deployment.weight_format.kernel.replace("gemm", "experts"))
    reading = "latent" if deployment.model.latent else "attention"
    reading += "-fp8" if technique.name == "fp8" else ""
    return (
        Move(tuple(f"kernel.{name}.memory" for name in sorted(products)), 0.3),
        Move(tuple(f"kernel.{name}.compute" for name in sorted(products)), 0.3),
        Move((f"kernel.{reading}.memory",), 0.3),
        Move(("time.step_s",), 2e-3),
        Move(("time.sequence_s",), 50e-6),
    )


Verdict = Literal["moved", "agrees", "not told"]


@frozen
class RunFit:
    """Result of fitting a stack to a measured run.

    Attributes
    ----------
    stack
        The stack to use: the fitted one, or the original if the fit was refused.
    numbers
        Fitted value of every key.
    errors
        Standard errors by key; infinite where the run does not determine the number.
    verdicts
        By key, whether the number moved, and if not why.
    confused
        Pairs of keys whose effects the run cannot tell apart.
    refused
        Why the fitted stack is not used; empty if it is used.
    before, after
        The run as simulated with the original stack, and with ``stack``.
    """

    stack: Stack
    numbers: dict[str, float]
    errors: dict[str, float]
    verdicts: dict[str, Verdict]
    confused: tuple[tuple[str, str], ...]
    refused: str
    before: Outcome
    after: Outcome

    @property
    def moved(self) -> tuple[str, ...]:
        """Keys that the run moves."""
        return tuple(key for key, verdict in self.verdicts.items() if verdict == "moved")


def simulate_run(
    run: MeasuredRun, technique: Technique, deployment: Deployment, rules: Rules
) -> Outcome:
    """Simulate the arrivals of a measured run.

    Parameters
    ----------
    run
        The measured run.
    technique
        The technique that it used.
    deployment
        The model, card and engine that it ran on.
    rules
        The engine's batching rules.

    Returns
    -------
    Outcome
        Times of every request in the simulation.
    """
    longest = int((run.requests.prompt + run.requests.generate).max())
    rules = replace(rules, max_model_len=longest)  # the engine did take all of them
    costs = StepCosts(technique, deployment, rules, longest, int(run.requests.prompt.max()))
    return Outcome(simulate(run.requests, costs))


def fit_run(
    run: MeasuredRun, technique: Technique, deployment: Deployment, rules: Rules, count: int
) -> RunFit:
    """Fit a stack to the first requests of a measured run, and judge it by the others.

    All arrivals are simulated, because those that come later compete with the first.

    Parameters
    ----------
    run
        The measured run.
    technique
        The technique that it used.
    deployment
        The model, card and engine that it ran on; its stack is the prior.
    rules
        The engine's batching rules.
    count
        How many requests, in order of arrival, are fitted to. [requests]

    Returns
    -------
    RunFit
        The stack to use, and how well each predicts the other requests.

    Raises
    ------
    InputError
        If there are too few requests to fit to, or to check, or if half of them had their tokens
        faster than the hardware can make them.
    """
    total = len(run.requests)
    if not FEWEST_REQUESTS <= count <= total - FEWEST_REQUESTS:
        raise InputError(
            f"--fit-first: got {count} of {total} requests; expected from {FEWEST_REQUESTS} to "
            f"{total - FEWEST_REQUESTS}, as {FEWEST_REQUESTS} are needed to fit and "
            f"{FEWEST_REQUESTS} others to check: give a longer run"
        )
    more = run.requests.generate > 1
    if more.any():
        gaps = (run.last - run.first)[more] / (run.requests.generate[more] - 1)
        per_token = float(np.median(gaps))
        check_possible("--from-run, half of the requests", per_token, technique, deployment)
    search = _Search(run, technique, deployment, rules, count)
    terms = list_terms(deployment, technique)
    places, errors, kept, confused = search.settle(terms)
    settled = zip(terms, places, strict=True)
    numbers = {k: v for t, p in settled for k, v in t.moved(deployment.stack, p).items()}
    told = {}
    for term, error in zip(terms, errors, strict=True):
        for key in term.keys:
            each = term.spread if key.endswith("_s") else term.spread * numbers[key]
            told[key] = float(each * error)
    verdicts: dict[str, Verdict] = {
        key: "moved" if term in kept else "agrees" if error < DETERMINED else "not told"
        for term, error in zip(terms, errors, strict=True)
        for key in term.keys
    }
    before, refused = search.outcome({}), ""
    after, stack = before, deployment.stack
    moved = {k: float(v) for k, v in numbers.items() if verdicts[k] == "moved"}
    if moved:
        after = search.outcome(moved)
        refused = _worse(run, before, after, slice(count, None))
        stack = deployment.stack if refused else with_numbers(deployment.stack, moved)
        after = before if refused else after
    return RunFit(stack, numbers, told, verdicts, confused, refused, before, after)


class _Search:
    """The run's first requests as residuals of a stack's numbers."""

    def __init__(
        self,
        run: MeasuredRun,
        technique: Technique,
        deployment: Deployment,
        rules: Rules,
        count: int,
    ) -> None:
        self.run, self.technique, self.where, self.rules = run, technique, deployment, rules
        self.count = count
        self.block = np.arange(count) * JACKKNIFE_BLOCKS // count
        self._known: dict[tuple[tuple[str, float], ...], Outcome] = {}

    def outcome(self, numbers: dict[str, float]) -> Outcome:
        """Simulate the run with some of the stack's numbers changed; what was asked before is kept.

        Parameters
        ----------
        numbers
            Changed numbers by their keys in the stack, of times in s.
        """
        key = tuple(sorted(numbers.items()))
        if key not in self._known:
            where = replace(self.where, stack=with_numbers(self.where.stack, numbers))
            self._known[key] = simulate_run(self.run, self.technique, where, self.rules)
        return self._known[key]

    def residuals(self, terms: Sequence[Move], places: Array) -> Array:
        """Compute by how much predicted times are off, as means over parts of the run.

        A single request's time jumps as it is scheduled otherwise; those of a part hardly do.

        Parameters
        ----------
        terms
            What may move.
        places
            Distance of each term from the shipped number, in its standard deviations, shape
            (terms,).

        Returns
        -------
        Array
            Mean logarithm of predicted over measured times to the first token, per token and of the
            whole request, shape (3, parts).
        """
        numbers: dict[str, float] = {}
        for term, place in zip(terms, places, strict=True):
            if place:
                numbers |= term.moved(self.where.stack, place)
        each = np.log(ratios(self.run, self.outcome(numbers), slice(0, self.count)))
        return np.array([each[:, self.block == b].mean(axis=1) for b in range(JACKKNIFE_BLOCKS)]).T

    def settle(
        self, terms: Sequence[Move]
    ) -> tuple[Array, Array, list[Move], tuple[tuple[str, str], ...]]:
        """Move the number that explains most, then the next, while the run determines all of them.

        Parameters
        ----------
        terms
            What may move.

        Returns
        -------
        tuple
            Places and standard errors of all terms, in standard deviations of the shipped numbers;
            the terms that move; and keys whose effects the run confuses.
        """
        kept: list[Move] = []
        places = np.zeros(len(terms))
        confused: tuple[tuple[str, str], ...] = ()
        errors = np.full(len(terms), np.inf)
        while True:
            residuals = self.residuals(terms, places)
            slopes, weights, precision = self._linear(terms, places, residuals)
            pull = slopes.reshape(len(terms), -1) @ (weights * residuals).ravel() + places
            alone = np.diag(precision)
            spread, _ = self._spread(slopes, weights, precision, residuals)
            moving = np.array([term in kept for term in terms])
            errors = np.where(moving, errors, spread)
            gain = np.where(moving, -1.0, pull**2 / alone)
            best = int(np.argmax(gain))
            if gain[best] <= 0:
                break
            tried = [*kept, terms[best]]
            there, known, pairs = self._fit(tried)
            if np.any(np.abs(there) < SIGNIFICANT * known) or np.any(known > DETERMINED):
                errors[best] = known[-1]
                break
            kept, confused = tried, pairs
            where = [terms.index(term) for term in kept]
            places = np.zeros(len(terms))
            places[where], errors[where] = there, known
        return places, errors, kept, confused

    def _fit(self, terms: Sequence[Move]) -> tuple[Array, Array, tuple[tuple[str, str], ...]]:
        """Gauss-Newton from the shipped numbers, requests far off counting less."""
        places = np.zeros(len(terms))
        residuals = self.residuals(terms, places)
        slopes, weights, precision = self._linear(terms, places, residuals)
        for _ in range(TURNS):
            pull = slopes.reshape(len(terms), -1) @ (weights * residuals).ravel() + places
            move = -np.linalg.solve(precision, pull)
            for share in (1.0, 0.5, 0.25):
                there = places + share * move
                tried = self.residuals(terms, there)
                if self._loss(tried, there, weights) < self._loss(residuals, places, weights):
                    break
            else:
                break
            done = np.max(np.abs(there - places)) < 0.02
            places, residuals = there, tried
            slopes, weights, precision = self._linear(terms, places, residuals)
            if done:
                break
        spread, covariance = self._spread(slopes, weights, precision, residuals)
        return places, spread, list_confused([term.keys[0] for term in terms], covariance)

    def _linear(
        self, terms: Sequence[Move], places: Array, residuals: Array
    ) -> tuple[Array, Array, Array]:
        """Slopes of the residuals, what each counts, and the precision with the prior's."""
        slopes = np.empty((len(terms), *residuals.shape))
        for i in range(len(terms)):
            aside = np.zeros(len(terms))
            aside[i] = terms[i].free * DERIVATIVE_STEP
            slopes[i] = (self.residuals(terms, places + aside) - residuals) / aside[i]
        weights = (1 + (residuals / FAR_OFF) ** 2) ** -0.5 / SURE**2
        flat = slopes.reshape(len(terms), -1)
        return slopes, weights, flat * weights.ravel() @ flat.T + np.eye(len(terms))

    @staticmethod
    def _loss(residuals: Array, places: Array, weights: Array) -> float:
        return float(np.sum(weights * residuals**2) + places @ places)

    def _spread(
        self, slopes: Array, weights: Array, precision: Array, residuals: Array
    ) -> tuple[Array, Array]:
        """Standard errors by leaving out one part of the run after the other."""
        shifts = []
        for block in range(JACKKNIFE_BLOCKS):
            mine = np.where(np.arange(JACKKNIFE_BLOCKS) == block, weights, 0.0)
            flat = slopes.reshape(len(slopes), -1)
            less = precision - flat * mine.ravel() @ flat.T
            shifts.append(np.linalg.solve(less, flat @ (mine * residuals).ravel()))
        jackknife = (JACKKNIFE_BLOCKS - 1) / JACKKNIFE_BLOCKS * np.sum(np.square(shifts), axis=0)
        covariance = np.linalg.inv(precision)
        return np.sqrt(jackknife + np.diag(covariance)), covariance


def ratios(run: MeasuredRun, found: Outcome, rows: slice) -> Array:
    """Compute predicted over measured times of requests.

    Parameters
    ----------
    run
        The measured run.
    found
        The simulation of its arrivals.
    rows
        The requests to compare, in order of arrival.

    Returns
    -------
    array
        TTFT, time per token and latency, (3, requests); 1 where there is no second token.
    """
    arrival, more = run.requests.arrival[rows], run.requests.generate[rows] - 1
    first, last = run.first[rows], run.last[rows]
    tokens, gaps = found.tpot_s[rows], (last - first) / np.maximum(more, 1)
    several = (more > 0) & (gaps > 0)
    each = np.where(several, tokens / np.where(several, gaps, 1.0), 1.0)
    return np.array(
        [found.ttft_s[rows] / (first - arrival), each, found.latency_s[rows] / (last - arrival)]
    )


def _worse(run: MeasuredRun, before: Outcome, after: Outcome, rows: slice) -> str:
    """Why a changed stack is no better on some requests; empty if it is."""
    old, new = (np.abs(list(errors(run, x, rows).values())) for x in (before, after))
    far = [np.abs(np.log(ratios(run, x, rows))) for x in (before, after)]
    typical = [100 * float(np.expm1(np.median(x))) for x in far]
    if new.mean() < old.mean() and new.max() <= old.max() and far[1].mean() < far[0].mean():
        return ""
    return (
        f"on held-out requests its statistics are {100 * new.mean():.1f} % off on "
        f"average (before: {100 * old.mean():.1f} %), at worst {100 * new.max():.1f} % (before: "
        f"{100 * old.max():.1f} %), and a request's times {typical[1]:.1f} % at the median "
        f"(before: {typical[0]:.1f} %)"
    )


def errors(run: MeasuredRun, found: Outcome, rows: slice) -> dict[str, float]:
    """Compute relative errors of the statistics of some requests.

    Parameters
    ----------
    run
        The measured run.
    found
        The simulation of its arrivals.
    rows
        The requests to compare, in order of arrival.

    Returns
    -------
    dict
        Predicted over measured, less one, by statistic: means and quantiles of TTFT, TPOT and
        latency.
    """
    arrival, more = run.requests.arrival[rows], run.requests.generate[rows] - 1
    ttft, latency = run.first[rows] - arrival, run.last[rows] - arrival
    several = more > 0
    tpot = (run.last[rows] - run.first[rows])[several] / more[several]
    p_ttft, p_tpot = found.ttft_s[rows], found.tpot_s[rows][several]
    return {
        "ttft_mean": float(p_ttft.mean() / ttft.mean() - 1),
        "ttft_p50": float(np.median(p_ttft) / np.median(ttft) - 1),
        "tpot_mean": float(p_tpot.mean() / tpot.mean() - 1),
        "latency_p90": float(
            np.quantile(found.latency_s[rows], 0.9) / np.quantile(latency, 0.9) - 1
        ),
    }
