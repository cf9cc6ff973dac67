"""A run over time: what arrived, waited, ran and was in use in each stretch of it."""

import numpy as np

from kvsim.graph import Array
from kvsim.serving.simulate import Run
from kvsim.serving.state import BINS, SERIES
from kvsim.serving.tables import RESOURCES

STRETCHES = 128  # at most: a line of more tells a reader no more


def over_time(run: Run) -> dict[str, Array]:
    """Means over equal stretches of time, of all replicas together.

    Returns
    -------
    dict
        ``start_s`` of each stretch [s]; requests that arrived and finished, and prompt tokens
        read, per second; ``waiting``  requests and ``running`` sequences, summed over replicas;
        ``kv_share`` of the memory for caches while a replica computes; and, from 0 to 1,
        ``busy_share`` and the use of each resource at its full rate.
    """
    width, total = float(run.fleet.width.max()), np.zeros(run.fleet.series.shape[1:])
    for series, own in zip(run.fleet.series, run.fleet.width, strict=True):
        first = np.arange(0, BINS, round(width / own))  # of those that become one
        total[: first.size] += np.add.reduceat(series, first)
    used = min(max(int(np.ceil(run.fleet.clock.max(initial=0.0) / width)), 1), BINS)
    joined = -(-used // STRETCHES)
    total = np.add.reduceat(total[:used], np.arange(0, used, joined))
    width *= joined
    start = width * np.arange(len(total))
    columns = dict(zip((*SERIES, *RESOURCES), total.T, strict=True))
    replicas, busy = run.fleet.clock.size, columns["seconds"]
    edges = np.append(start, start[-1] + width)
    last = run.progress.last[np.isfinite(run.progress.last)]
    arrived, left = (np.histogram(times, edges)[0] for times in (run.requests.arrival, last))
    kept = np.divide(columns["cache"], busy, out=np.zeros(busy.size), where=busy > 0)
    return {
        "start_s": start,
        "arrivals_per_s": arrived / width,
        "finished_per_s": left / width,
        "prompt_tok_s": columns["prompt"] / width,
        "waiting": columns["waiting"] / width,
        "running": columns["running"] / width,
        "kv_share": kept / max(run.engine.gpu, 1),
        "busy_share": busy / (width * replicas),
        **{name: columns[name] / (width * replicas) for name in RESOURCES},
    }
