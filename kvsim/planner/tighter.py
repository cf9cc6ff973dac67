"""Limits as the programme of placement has them, and with room for what replay needs besides."""

from dataclasses import replace

import numpy as np

from kvsim.graph import Array
from kvsim.machines.deployment import Deployment
from kvsim.planner.programme import Programme
from kvsim.planner.workload import PlanLimits, Workload
from kvsim.prediction.memory import left_for_caches

TIGHTER = 2e-5  # of a memory: shares are written with six digits


def lowered(limits: PlanLimits, over: tuple[float, float]) -> PlanLimits:
    """Less memory than there is, so that what replay needs besides fits."""
    gpu, host = (x if np.isfinite(x) else 0.0 for x in over)
    return replace(
        limits,
        gpu_memory=(limits.gpu_memory - 1.1 * gpu) * (1 - TIGHTER),
        host_memory=(limits.host_memory - 1.1 * host) * (1 - TIGHTER),
    )


def rounded(programme: Programme) -> Programme:
    """With the room in memory that rounding of shares needs."""
    gpu, host = programme.memory
    return replace(programme, memory=(gpu * (1 - TIGHTER), host * (1 - TIGHTER)))


def kept_outside(deployment: Deployment, given: float, weights: Array, beside: Array) -> float:
    """What an engine keeps outside its share of memory, of all that is held, at most. [B]

    Parameters
    ----------
    given : the memory that the limit is about. [B]
    weights, beside : weights, and these with workspace and context, at each peak. (m,) [B]
    """
    kept = [
        left_for_caches(deployment, given, b, w) + b
        for w, b in zip(weights.tolist(), beside.tolist(), strict=True)
    ]
    return float(max(kept)) - given


def time_limits(
    workload: Workload, limits: PlanLimits, reads: float, rounds: Array
) -> dict[str, tuple[Array, float]]:
    """TTFT and TPOT as sums of passes: by limit the weight of each phase, and the bound. [s]

    Parameters
    ----------
    reads : passes that read prompts, in one turn of the batch.
    rounds : of decoding, in each phase after that. (c,)
    """
    found = {}
    count = max(workload.generate - 1, 1)
    mean = rounds / count
    if np.isfinite(limits.ttft):
        waits = mean if workload.service else np.zeros_like(rounds)
        found["ttft"] = (np.concatenate([[1.0], waits]), limits.ttft)
    if np.isfinite(limits.tpot) and rounds.size:
        others = (reads - 1) / count if workload.service else 0.0
        found["tpot"] = (np.concatenate([[others], mean]), limits.tpot)
    return found
