"""A stack fitted to a measured serving run: production logs instead of a GPU."""

from dataclasses import replace

import numpy as np

from kvsim.errors import InputError
from kvsim.evidence.leastsquares import Fit, Parameter, fit_ratio
from kvsim.evidence.logs import MeasuredRun
from kvsim.graph import Array
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import with_numbers
from kvsim.serving.costs import StepCosts
from kvsim.serving.outcome import Outcome
from kvsim.serving.rules import Rules
from kvsim.serving.simulate import simulate
from kvsim.techniques.technique import Technique

FREE = (
    Parameter("kernel.gemm.memory", 0.85, 0.4, 1.0),
    Parameter("kernel.gemm.compute", 0.8, 0.3, 1.0),
    Parameter("time.step_s", 1e-3, 0.0, 1e-2),
)
"""What a run can tell of a stack: weights' bandwidth, prompts' arithmetic, a step's fixed time."""

COARSE = 4  # nodes per octave of the tables that the fit reads


def simulated(
    run: MeasuredRun,
    technique: Technique,
    deployment: Deployment,
    rules: Rules,
    coarse: bool = False,
) -> Outcome:
    """What kvsim says of the run's arrivals."""
    longest = int((run.requests.prompt + run.requests.generate).max())
    costs = StepCosts(technique, deployment, rules, longest, int(run.requests.prompt.max()))
    if coarse:
        costs = costs.with_density(COARSE, work=False)
    return Outcome(simulate(run.requests, costs))


def fit_run(
    run: MeasuredRun, technique: Technique, deployment: Deployment, rules: Rules, count: int
) -> Fit:
    """Numbers of the stack that bring the first requests' times closest to the measured ones.

    All arrivals are played, because those who come later compete with the first; but only the
    times of the first ``count`` requests are looked at.

    Raises
    ------
    InputError
        If there are fewer than five requests to fit to, or none is left to check.
    """
    if not 5 <= count < len(run.requests):
        raise InputError(
            f"--fit-first: got {count}; expected from 5 to {len(run.requests) - 1}, so that some "
            f"of the {len(run.requests)} requests remain to check the fit"
        )
    arrival, more = run.requests.arrival[:count], run.requests.generate[:count] - 1
    several = more > 0

    def times(first: Array, last: Array) -> Array:
        """TTFT, latency and, of requests with several tokens, TPOT; means count like all. [s]"""
        tpot = (last - first)[several] / more[several]
        kinds = [kind for kind in (first - arrival, last - arrival, tpot) if kind.size]
        return np.concatenate([*kinds, *(np.full(kind.size, kind.mean()) for kind in kinds)])

    def predict(numbers: dict[str, float]) -> Array:
        where = replace(deployment, stack=with_numbers(deployment.stack, numbers))
        p = simulated(run, technique, where, rules, coarse=True).run.progress
        return times(p.first[:count], p.last[:count])

    measured = times(run.first[:count], run.last[:count])
    return fit_ratio(predict, measured, FREE, smooth=False)


def errors(run: MeasuredRun, found: Outcome, rows: slice) -> dict[str, float]:
    """Relative errors of some requests' statistics, predicted over measured less one."""
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
