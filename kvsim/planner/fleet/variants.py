"""More ways to run what is on the shortlist: other memories for prefix blocks, prefill apart.

A closed estimate knows neither, so both are simulated. They are tried where the trace says which
prompts share a prefix: without that no cache is found again.
"""

from dataclasses import field, replace
from typing import Any

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.planner.fleet.shortlist import Rated
from kvsim.serving.pools import TwoPools
from kvsim.serving.rules import NIC_RATE
from kvsim.serving.world import limits_of
from kvsim.traces.requests import Requests

VARIED = 4  # of the shortlist's best, with each memory; others with all that there is, and none
APART = 2  # of the shortlist's best, with prefill and decode apart
RATIOS = ((1, 1), (2, 1), (1, 2))  # engines that read prompts and engines that decode


@frozen
class Extras:
    """What replicas may use besides GPU memory.

    Attributes
    ----------
    host, drive
        Host memory and NVMe space for prefix blocks, for each GPU; 0: none. [B]
    rates
        Settings of ``Rules`` for the drive.
    apart
        Whether engines may read prompts only, or decode only.
    nic
        Network of each engine in one direction. [B/s]
    """

    host: float = 0.0
    drive: float = 0.0
    rates: dict[str, Any] = field(default_factory=dict)
    apart: bool = False
    nic: float = NIC_RATE


def varied(rated: list[Rated], requests: Requests, extras: Extras) -> list[Rated]:
    """The shortlist with its variants.

    Techniques whose caches cannot be shared are played without prefix caching.
    """
    found: list[Rated] = []
    for place, x in enumerate(rated):
        kept = [_with_memory(x, *sizes, extras) for sizes in _memories(extras)]
        usable = [y for y in (x, *kept) if _shares(y, requests)]
        if not usable:
            found.append(_unshared(x))
            continue
        found += usable if place < VARIED else usable[:1] + usable[1:][-1:]
        if extras.apart and place < APART:
            found += [_apart(usable[-1], *ratio, extras.nic) for ratio in RATIOS]
    return found


def _memories(extras: Extras) -> list[tuple[float, float]]:
    """Host memory and drive, each GPU's, from the least to all. [B]"""
    some = [(extras.host, 0.0), (extras.host, extras.drive)]
    return [x for x in dict.fromkeys(some) if any(x)]


def _with_memory(x: Rated, host: float, drive: float, extras: Extras) -> Rated:
    """The same with prefix blocks in other memories, all loaded: engines do not recompute them."""
    costs, gpus = x.configuration.costs, x.configuration.costs.deployment.gpus
    rates = extras.rates if drive else {}
    rules = replace(
        costs.rules, host_cache=host * gpus, nvme_cache=drive * gpus, prefix_load="load", **rates
    )
    return replace(x, configuration=replace(x.configuration, costs=costs.with_rules(rules)))


def _unshared(x: Rated) -> Rated:
    costs = x.configuration.costs
    rules = replace(costs.rules, prefix_caching=False)
    return replace(x, configuration=replace(x.configuration, costs=costs.with_rules(rules)))


def _apart(x: Rated, prefill: int, decode: int, nic: float) -> Rated:
    one, engines = x.configuration, prefill + decode
    several = replace(
        one, price=one.price * engines, reserved=one.reserved * engines,
        power=one.power * engines, apart=TwoPools(prefill, decode, rate=nic),
    )  # fmt: skip
    return replace(x, configuration=several, needed=x.needed / engines)


def _shares(x: Rated, requests: Requests) -> bool:
    """Whether prompts can share the technique's cache."""
    costs = x.configuration.costs
    if not costs.rules.prefix_caching:
        return True
    try:
        limits_of(costs, requests)
    except InputError:
        return False
    return True
