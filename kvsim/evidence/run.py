"""A stack fitted to a measured serving run: production logs instead of a GPU."""

from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from kvsim.errors import InputError
from kvsim.evidence.leastsquares import Fit, Parameter, fit_ratio
from kvsim.files import read_json_lines
from kvsim.files.kinds import RUN_LOG
from kvsim.graph import Array
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import with_numbers
from kvsim.serving.costs import StepCosts
from kvsim.serving.outcome import Outcome
from kvsim.serving.rules import Rules
from kvsim.serving.simulate import simulate
from kvsim.techniques.base import Technique
from kvsim.traces.requests import Requests

FREE = (
    Parameter("kernel.gemm.memory", 0.85, 0.4, 1.0),
    Parameter("kernel.gemm.compute", 0.8, 0.3, 1.0),
    Parameter("time.step_s", 1e-3, 0.0, 1e-2),
)
"""What a run can tell of a stack: weights' bandwidth, prompts' arithmetic, a step's fixed time."""

FIELDS = {
    "arrival": ("arrival_time", "arrival_s", "arrival"),
    "queued": ("queued_ts", "queued_s"),
    "first": ("first_token_ts", "first_token_s", "first_token_time"),
    "last": ("last_token_ts", "last_token_s", "last_token_time"),
    "prompt": ("input_toks", "prompt_tokens", "input_length"),
    "generate": ("output_toks", "generate_tokens", "output_length"),
}
COARSE = 4  # nodes per octave of the tables that the fit reads


@dataclass(frozen=True)
class MeasuredRun:
    """Requests in order of arrival, and when their tokens came."""

    requests: Requests
    first: Array  # first token (n,) [s]
    last: Array  # last token (n,) [s]


def read_run(path: Path) -> MeasuredRun:
    """A run's log, one JSON object per line.

    Arrivals may be on another clock than the tokens if ``queued_ts`` is there: the clocks are
    set so that no request is queued before it arrives.

    Raises
    ------
    InputError
        Naming the line and field that is missing, not a number, or out of order.
    """
    found = list(read_json_lines(path, RUN_LOG))
    rows = [_row(f"{path}, line {number}", entry) for number, entry in found]
    if not rows:
        raise InputError(f"{path}: no requests; expected one JSON object per line")
    table = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    arrival = table["arrival"]
    if np.isfinite(table["queued"]).all():
        arrival = arrival + (table["queued"] - arrival).min()
    order = np.argsort(arrival, kind="stable")
    begin = arrival[order[0]]
    first, last = table["first"][order] - begin, table["last"][order] - begin
    early = np.flatnonzero((first <= arrival[order] - begin) | (last < first))
    if early.size:
        raise InputError(
            f"{path}, line {order[early[0]] + 1}: first_token_ts before arrival or after "
            f"last_token_ts; expected arrival < first token <= last token, on one clock"
        )
    prompt, generate = (table[k][order].astype(np.int64) for k in ("prompt", "generate"))
    return MeasuredRun(Requests(arrival[order] - begin, prompt, generate), first, last)


def _row(where: str, found: dict[str, Any]) -> dict[str, float]:
    row = {}
    for role, names in FIELDS.items():
        value = next((found[name] for name in names if name in found), None)
        if value is None and role == "queued":
            row[role] = np.nan
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise InputError(f"{where}, {names[0]}: got {value!r}; expected a number ({role})")
        if role in ("prompt", "generate") and not (value >= 1 and value == int(value)):
            raise InputError(f"{where}, {names[0]}: got {value!r}; expected whole tokens from 1")
        row[role] = float(value)
    return row


def simulated(
    run: MeasuredRun, t: Technique, d: Deployment, rules: Rules, coarse: bool = False
) -> Outcome:
    """What kvsim says of the run's arrivals."""
    longest = int((run.requests.prompt + run.requests.generate).max())
    costs = StepCosts(t, d, rules, longest, int(run.requests.prompt.max()))
    if coarse:
        costs = costs.with_density(COARSE)
    return Outcome(simulate(run.requests, costs))


def fit_run(run: MeasuredRun, t: Technique, d: Deployment, rules: Rules, count: int) -> Fit:
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
    arrival = run.requests.arrival[:count]

    def predict(numbers: dict[str, float]) -> Array:
        where = replace(d, stack=with_numbers(d.stack, numbers))
        p = simulated(run, t, where, rules, coarse=True).run.progress
        return np.concatenate([p.first[:count] - arrival, p.last[:count] - arrival])

    measured = np.concatenate([run.first[:count] - arrival, run.last[:count] - arrival])
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
