"""Ops with their durations, and what a timeline knows of a step before it is played."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvsim.engine.roofline import channel_seconds, everywhere
from kvsim.frozen import frozen
from kvsim.graph import Number, Op
from kvsim.machines.deployment import Deployment


@frozen
class Timed:
    """An op with its durations, computed once per step."""

    op: Op
    duration: Number
    active: NDArray[np.bool] | bool  # where it has work
    waits: tuple[tuple[str, int, bool], ...]  # op name, layers back, in the previous step
    host: Number  # time of the host to issue it [s]
    lead: Number  # from the host's turn to it until it starts, if nothing else holds it up [s]


def distinct(layers: list[list[Timed]]) -> list[list[Timed]]:
    """Each of the layers once, where repetitions are the same list."""
    return list({id(layer): layer for layer in layers}.values())


def following_loads(early: list[tuple[str, ...]]) -> list[dict[str, int]]:
    """For every layer and each early op, the next layer that has it, around the end."""
    found: list[dict[str, int]] = [{} for _ in early]
    if not any(early):
        return found
    nearest: dict[str, int] = {}
    for index in (*range(len(early) - 1, -1, -1), *range(len(early) - 1, -1, -1)):
        found[index] = dict(nearest)
        nearest |= dict.fromkeys(early[index], index)
    return found


def together(first: Timed, then: Timed) -> Timed:
    """Two ops one right after the other as the second one, which others may wait for.

    Where the first ends before the host has issued the second, the gap comes before both: their
    end is the same, and what else holds up the first one fills it as it would have filled the gap.
    """
    active = first.active is True or then.active is True or np.logical_or(first.active, then.active)
    took, host, lead = first.duration + then.duration, first.host + then.host, first.lead
    gap = host - first.duration
    if not everywhere(gap <= lead):
        lead = np.maximum(lead, gap)
    return Timed(then.op, took, active, first.waits, host, lead)


def wait_of(text: str) -> tuple[str, int, bool]:
    """Read "attn", "attn@-2" or "topk@step-1"."""
    name, _, lag = text.partition("@")
    return name, -int(lag or 0) if not lag.startswith("step") else 0, lag.startswith("step")


def shared(layer: tuple[Op, ...], deployment: Deployment) -> Number:
    """Time the busiest of the channels that several streams use needs for one layer. [s]"""
    if len({op.stream for op in layer}) < 2:
        return 0.0
    streams: dict[str, set[str]] = {}
    busy: dict[str, Number] = {}
    for op in layer:
        for channel, needs in channel_seconds(op, deployment).items():
            streams.setdefault(channel, set()).add(op.stream)
            busy[channel] = busy.get(channel, 0.0) + needs
    return latest([0.0, *(busy[c] for c, users in streams.items() if len(users) > 1)])


def latest(clocks: Iterable[Number]) -> Number:
    """The latest of some clocks, element by element. [s]"""
    found, *rest = clocks
    for clock in rest:
        found = np.maximum(found, clock)
    return found
