"""Batches at which mixes of places are looked for."""

import numpy as np

from kvsim.graph import Array
from kvsim.planner.choose import distinct
from kvsim.planner.options import GROWTH
from kvsim.planner.question import Question
from kvsim.planner.shares import Shares, placed

BATCHES = 8  # of the relaxation


def grid(question: Question, streams: bool) -> Array:
    """The batch that is asked for, or a geometric grid up to the largest that fits somehow.

    Parameters
    ----------
    streams : whether weights may be streamed.
    """
    w, d, limits = question.workload, question.deployment, question.limits
    if w.batch is not None:
        return np.array([float(w.batch)])
    most = 1.0
    for s in (Shares(), Shares(host=1.0)):
        room = limits.gpu_memory, limits.host_memory
        for streamed in (0.0, 1.0) if streams else (0.0,):
            found = w.largest(placed(s, w.prompt, streamed), d, *room)
            most = max(most, float(np.max(found)))
    count = min(BATCHES, int(np.log(most) / np.log(GROWTH)) + 2)
    steps = np.round(np.geomspace(1.0, most, count))
    return distinct(np.concatenate([steps, 2 * np.ceil(steps[steps > 1] / 2)]))
