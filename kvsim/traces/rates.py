"""A trace at a given request rate, repeated where it would be over too soon for a steady load."""

from math import ceil
from typing import Any

import numpy as np

from kvsim.errors import InputError
from kvsim.traces.requests import CONDUCT, Requests

LEAST_S = 120.0  # that a load lasts, so that sequences in flight settle [s]
MOST_REQUESTS = 100_000


def at_rate(requests: Requests, per_second: float) -> tuple[Requests, int]:
    """The requests at a mean rate, and how often the trace was repeated for that.

    Bursts stay: arrivals are those of the trace, closer together or further apart. A repetition
    has prompts of its own, so that it finds none of its prefixes in a cache.

    Parameters
    ----------
    per_second
        Mean arrival rate. [requests/s]

    Raises
    ------
    InputError
        For a trace whose requests all arrive at once: it has no rate.
    """
    if requests.duration <= 0:
        raise InputError(
            "--req-s: the requests of this trace all arrive at once; expected a trace with arrival "
            "times, as kvsim traces generate makes"
        )
    count = len(requests)
    one = requests.scaled(per_second * requests.duration / (count - 1))
    period = count / per_second  # the gap before a repetition is the mean gap [s]
    copies = min(ceil(LEAST_S / period), max(1, MOST_REQUESTS // count))
    return (one if copies == 1 else _repeated(one, copies, period)), copies


def _repeated(requests: Requests, copies: int, period: float) -> Requests:
    arrival = (np.arange(copies)[:, None] * period + requests.arrival).ravel()
    prompt, generate = np.tile(requests.prompt, copies), np.tile(requests.generate, copies)
    kept: dict[str, Any] = {
        name: np.tile(column, copies)
        for name in CONDUCT
        if (column := getattr(requests, name)) is not None
    }
    if requests.parent is not None:
        behind = np.arange(copies)[:, None] * len(requests) + requests.parent
        kept["parent"] = np.where(requests.parent >= 0, behind, -1).ravel()
    if requests.block_ids is None or requests.block_start is None:
        return Requests(arrival, prompt, generate, **kept)
    own = int(requests.block_ids.max(initial=-1)) + 1
    ids = (np.arange(copies)[:, None] * own + requests.block_ids).ravel()
    ends = np.arange(copies)[:, None] * requests.block_start[-1] + requests.block_start[1:]
    start = np.concatenate([[0], ends.ravel()])
    return Requests(arrival, prompt, generate, ids, start, requests.block_tokens, **kept)
