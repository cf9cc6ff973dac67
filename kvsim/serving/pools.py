"""Prefill and decode on replicas of their own, with the cache moved between them.

The pool that reads prompts never waits for the other one, so it is played first; what it hands over
arrives at the decoding pool when the cache does.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.serving.costs import StepCosts
from kvsim.serving.idle import fits
from kvsim.serving.pools_turns import play_both
from kvsim.serving.records import FINISHED, NONE, REFUSED, Integers, World
from kvsim.serving.routes import LEAST_LOADED, ROUTES
from kvsim.serving.rules import NIC_RATE
from kvsim.serving.simulate import Run, play_world
from kvsim.serving.world import world_of
from kvsim.traces.requests import Requests

TRANSFERS = ("layers", "whole")


@frozen
class TwoPools:
    """Replicas by what they do, and how caches go from one to the other.

    Parameters
    ----------
    prefill, decode : replicas that read prompts, and that decode.
    transfer : ``whole`` sends a cache when its prompt is read, ``layers`` each layer's once it is
        there, so that only the last layer's is left then; layers without a cache send nothing.
    rate : of each replica's network in one direction. [B/s]

    Raises
    ------
    InputError
        If a pool is empty, or the way of transfer is unknown.
    """

    prefill: int
    decode: int
    transfer: str = TRANSFERS[0]
    rate: float = NIC_RATE

    def __post_init__(self) -> None:
        if self.prefill < 1 or self.decode < 1:
            raise InputError(
                f"--prefill-replicas: got {self.prefill} with {self.decode} others; expected at "
                f"least 1 and fewer than --replicas"
            )
        if self.transfer not in TRANSFERS:
            raise InputError(
                f"--transfer: got {self.transfer[:40]!r}; expected {' or '.join(TRANSFERS)}"
            )


def simulate_pools(
    requests: Requests,
    costs: StepCosts,
    pools: TwoPools,
    route: str = ROUTES[0],
    rate: Array | None = None,
    told: Callable[[int], None] = lambda done: None,
) -> Run:
    """Play a trace on two pools.

    Parameters
    ----------
    route : which replica reads a request's prompt; the one with the fewest unfinished requests
        decodes it.
    rate : tokens per decoding round of each request; None for the technique's mean. (n,)

    Returns
    -------
    Run
        Its replicas are those that read prompts, then those that decode. The memories of prefix
        blocks are the first ones'.

    Raises
    ------
    InputError
        For an unknown route, or rules that the technique cannot keep.
    """
    each = np.full(len(requests), costs.rate) if rate is None else rate
    reading = world_of(requests, costs, pools.prefill, each)
    first: Any = reading.requests
    first.status[~fits(reading)] = REFUSED  # the decoding pool must hold all of it
    first.generate[:] = 1
    alone = costs.with_rules(replace(costs.rules, **WITHOUT_PREFIXES))
    if requests.depends:
        return _run_with_turns(requests, costs, alone, reading, (pools, route, each, told))
    play_world(reading, costs, (ROUTES.index(route), np.inf), told)
    ready = handed_over(reading, alone, pools)
    rows = np.flatnonzero((first.status == FINISHED) & (requests.generate > 1))
    order = rows[np.argsort(ready[rows], kind="stable")]
    arrival: Any = ready[order]
    coming = Requests(
        arrival, requests.prompt[order], requests.generate[order],
        priority=None if requests.priority is None else requests.priority[order],
    )  # fmt: skip
    decoding = world_of(coming, alone, pools.decode, each[order])
    second: Any = decoding.requests
    second.made, second.handed = 1, True
    second.first = first.first[order]
    play_world(decoding, alone, (LEAST_LOADED, np.inf), told)
    return Run(requests, costs, _together(requests, reading, decoding, order))


def _run_with_turns(
    requests: Requests, costs: StepCosts, alone: StepCosts, reading: World, how: tuple[Any, ...]
) -> Run:
    """The same where turns follow others, or clients hang up: both pools are played together."""
    pools, route, each, told = how
    plain = Requests(
        requests.arrival, requests.prompt, requests.generate, priority=requests.priority
    )
    decoding = world_of(plain, alone, pools.decode, each)
    first: Any = reading.requests
    second: Any = decoding.requests
    second.made, second.handed = 1, True
    second.status[first.status == REFUSED] = REFUSED
    rate = pools.rate / costs.deployment.gpus
    decoding = play_both(
        reading, decoding, costs, (ROUTES.index(route), pools.transfer, rate), told
    )
    rows = np.flatnonzero((first.status == FINISHED) & (requests.generate > 1))
    sent = decoding._replace(requests=second[rows])
    return Run(requests, costs, _together(requests, reading, sent, rows))


WITHOUT_PREFIXES: dict[str, Any] = {
    "prefix_caching": False, "host_cache": 0.0, "nvme_cache": 0.0, "remote_cache": 0.0,
    "cache_ttl": np.inf, "cache_block": 0, "prefix_load": "split", "nvme_read": 6.8e9,
    "nvme_write": 4.0e9, "nic": NIC_RATE,
}  # fmt: skip
"""Rules of replicas that only decode."""


def handed_over(reading: World, costs: StepCosts, pools: TwoPools) -> Array:
    """When each request's cache has left the replica that read its prompt. (n,) [s]

    Each replica sends its caches in the order in which their prompts were read.
    """
    requests: Any = reading.requests
    layers = max(costs.deployment.model.cached_layers, 1)
    rate = pools.rate / costs.deployment.gpus
    blocks = -(-requests.prompt.astype(np.int64) // costs.rules.block_tokens)
    size = costs.tables.gpu_bytes[blocks]
    free = np.zeros(pools.prefill)
    ready = np.full(requests.size, np.nan)
    order = np.argsort(requests.first, kind="stable")
    order = order[requests.status[order] == FINISHED]
    firsts, starts, senders = (
        np.asarray(requests[name]).tolist() for name in ("first", "started", "replica")
    )
    for i in order.tolist():
        sender, read, begin = senders[i], firsts[i], firsts[i]
        if pools.transfer == "layers":
            begin = starts[i]
            read += size[i] / layers / rate
        ready[i] = free[sender] = max(max(begin, free[sender]) + size[i] / rate, read)
    return ready


def _together(requests: Requests, reading: World, decoding: World, order: Integers) -> World:
    """One world of both pools' replicas, with what became of each request."""
    records: Any = reading.requests
    second: Any = decoding.requests
    records.generate = requests.generate
    for name in ("last", "made", "status"):
        kept = records[name]
        kept[order] = second[name]
    records.preempted[order] += second.preempted
    decoded = second.replica != NONE  # else its client hung up while the cache was on its way
    records.replica[order[decoded]] = second.replica[decoded] + len(reading.replicas)  # type: ignore[arg-type]
    sides: Any = (reading, decoding)
    joined: dict[str, Any] = {
        name: np.concatenate([np.asarray(getattr(side, name)) for side in sides]).view(np.recarray)
        for name in ("replicas", "bins")
    }
    gaps = np.concatenate([side.gaps for side in sides])
    return reading._replace(gaps=gaps, **joined)
