"""A run over time: what arrived, waited, ran and was in use in each stretch of it."""

import numpy as np

from kvsim.graph import Array
from kvsim.serving.records import BINS
from kvsim.serving.simulate import Run
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
    bins, replicas = run.bins, run.replicas.size
    width = float(run.replicas.bin_width.max())
    used = min(max(int(np.ceil(run.replicas.clock.max(initial=0.0) / width)), 1), BINS)
    joined = -(-used // STRETCHES)
    firsts = [np.arange(0, BINS, round(width / own)) for own in run.replicas.bin_width]

    def total(values: Array) -> Array:
        """Sum over replicas in each stretch. (r, BINS, ...) to (stretches, ...)"""
        found = np.zeros(values.shape[1:])
        for own, first in zip(values, firsts, strict=True):  # bins that become one
            found[: first.size] += np.add.reduceat(own, first)
        return np.asarray(np.add.reduceat(found[:used], np.arange(0, used, joined)))

    busy, use = total(bins.seconds), total(bins.use)
    width *= joined
    start = width * np.arange(len(busy))
    edges = np.append(start, start[-1] + width)
    last = run.progress.last[np.isfinite(run.progress.last)]
    arrived, left = (np.histogram(times, edges)[0] for times in (run.progress.arrival, last))
    kept = np.divide(total(bins.cache), busy, out=np.zeros(busy.size), where=busy > 0)
    return {
        "start_s": start,
        "arrivals_per_s": arrived / width,
        "finished_per_s": left / width,
        "prompt_tok_s": total(bins.prompt) / width,
        "waiting": total(bins.waiting) / width,
        "running": total(bins.running) / width,
        "kv_share": kept / max(int(run.world.limits.gpu), 1),
        "busy_share": busy / (width * replicas),
        **dict(zip(RESOURCES, use.T / (width * replicas), strict=True)),
    }
