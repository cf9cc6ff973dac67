"""Limits that leave room for what replay needs besides."""

from dataclasses import replace

import numpy as np

from kvsim.planner.workload import PlanLimits

TIGHTER = 2e-5  # of a memory: shares are written with six digits


def lowered(limits: PlanLimits, over: tuple[float, float]) -> PlanLimits:
    """Less memory than there is, so that what replay needs besides fits."""
    gpu, host = (x if np.isfinite(x) else 0.0 for x in over)
    return replace(
        limits,
        gpu_memory=(limits.gpu_memory - 1.1 * gpu) * (1 - TIGHTER),
        host_memory=(limits.host_memory - 1.1 * host) * (1 - TIGHTER),
    )
