"""Predictions over a grid, and the functions that compute the other kinds of sweeps.

Those are imported when asked for: a worker that predicts needs neither planner nor simulator.
"""

from collections.abc import Callable

import numpy as np

from kvsim.engine.timeline import makespan
from kvsim.errors import InputError
from kvsim.graph import Array, Number, Point
from kvsim.machines.deployment import Deployment
from kvsim.prediction.generate import round_seconds
from kvsim.prediction.memory import phases, prefill_point, tier_bytes
from kvsim.sweeps.cases import Case, Columns, no_answer
from kvsim.techniques import parse
from kvsim.techniques.technique import Technique

POINTS_PER_CALL = 2**13  # points evaluated together: intermediate arrays stay in the CPU's cache


def predict_case(case: Case) -> Columns:
    """Predict times and memory at every batch and context of a case.

    TTFT is of a prompt of the context's length, TPOT of a token decoded at that context.

    Parameters
    ----------
    case
        The model, card, technique and points.

    Returns
    -------
    dict
        Arrays by the columns of ``predict``; the reason says why a case has no predictions.
    """
    assert case.points is not None
    batch, context = case.points.spread
    try:
        d, t = case.deployment(), parse(str(case.values["technique"]))
        reason = t.refuses_released(d)
    except InputError as problem:
        reason = str(problem)
    if reason:
        none = no_answer("predict", reason)
        return none | {"batch": batch, "context": context}
    parts = [
        _predicted(t, d, batch[i : i + POINTS_PER_CALL], context[i : i + POINTS_PER_CALL])
        for i in range(0, batch.size, POINTS_PER_CALL)
    ]
    found: Columns = {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
    whole = batch % t.tiles() == 0
    for name in ("ttft_s", "tpot_s", "decode_tok_s", "gpu_bytes", "host_bytes", "fits"):
        found[name] = np.where(whole, found[name], np.nan)
    return found | {"batch": batch, "context": context, "reason": ""}


def _predicted(
    technique: Technique, deployment: Deployment, batch: Array, context: Array
) -> dict[str, Array]:
    def spread(values: Number) -> Array:
        return np.broadcast_to(np.asarray(values, float), batch.shape)

    tpot = spread(
        round_seconds(technique, deployment, Point(batch, context, 1.0, context, context + 1.0))
    )
    ttft = spread(
        makespan(technique.prefill(deployment, prefill_point(batch, context, 1.0)), deployment)
    )
    both = phases(technique, deployment, batch, context, 2.0)
    gpu, host = (
        np.maximum(*(spread(tier_bytes(phase, tier)) for phase in both)) for tier in ("gpu", "host")
    )
    host = host * deployment.gpus
    fits = (gpu <= deployment.hardware.gpu_memory) & (host <= deployment.hardware.host_memory)
    return {
        "ttft_s": ttft, "tpot_s": tpot, "decode_tok_s": batch / tpot, "gpu_bytes": gpu,
        "host_bytes": host, "fits": fits,
    }  # fmt: skip


def evaluator(kind: str) -> Callable[[Case], Columns]:
    """Choose the function that computes a kind of sweep.

    Parameters
    ----------
    kind
        A key of ``COLUMNS``.

    Returns
    -------
    callable
        Turns a case into its columns.
    """
    if kind == "predict":
        return predict_case
    from kvsim.sweeps import answers

    return {
        "plan": answers.plan_case,
        "simulate": answers.simulate_case,
        "capacity": answers.find_fleet,
    }[kind]
