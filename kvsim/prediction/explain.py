"""Breakdown of the time of a decoding round, and its bottleneck."""

from collections.abc import Iterable

import numpy as np

from kvsim.engine.roofline import (
    all_ops,
    host_seconds,
    overhead_seconds,
    peak_seconds,
    resource_seconds,
    seconds,
    seconds_of,
)
from kvsim.graph import Number, Op, Step
from kvsim.machines.deployment import Deployment
from kvsim.prediction.generate import Prediction

LIMITS = {
    "hbm": "GPU memory bandwidth",
    "dram": "host memory bandwidth",
    "h2d": "host-to-GPU link",
    "d2h": "GPU-to-host link",
    "link": "GPU-to-GPU link",
    "disk_read": "reads from the disk",
    "disk_write": "writes to the disk",
    "compute": "arithmetic",
    "unpack": "arithmetic that unpacks the cache",
    "cpu": "host arithmetic",
}
SMALL_PRODUCTS = "small matrix products"
LAUNCHES = "launch time"
SERVER = "host work for requests, next to the GPU"


def breakdown(steps: Iterable[Step], deployment: Deployment) -> dict[str, Number]:
    """Compute the time of each op over all layers of some passes, overlapped or not.

    Parameters
    ----------
    steps
        The passes.
    deployment
        Model, machine and software stack.

    Returns
    -------
    dict[str, Number]
        Time by op name. [s]
    """
    total: dict[str, Number] = {}
    for step in steps:
        for op, count in all_ops(step):
            total[op.name] = total.get(op.name, 0.0) + count * seconds(op, deployment)
    return total


def bound_by(passes: Iterable[tuple[Step, float]], deployment: Deployment) -> str:
    """Name the bottleneck of some forward passes.

    Passes follow each other, so each counts with the stream that is busiest in it.

    Parameters
    ----------
    passes
        Each pass, in scalars, with how often it runs.
    deployment
        Model, machine and software stack.

    Returns
    -------
    str
        The resource or fixed cost that limits most of the time, in words.
    """
    total: dict[str, float] = {}
    for step, times in passes:
        busy = _busy(step, deployment)
        busiest = max(busy.values(), key=lambda limits: sum(limits.values()))
        for limit, took in busiest.items():
            total[limit] = total.get(limit, 0.0) + times * took
    return max(total, key=total.__getitem__)


def _busy(step: Step, deployment: Deployment) -> dict[str, dict[str, float]]:
    """Time of each stream of a pass by what binds its ops. [s]"""
    busy: dict[str, dict[str, float]] = {"host": {"kernel launches": 0.0}}
    for op, count in all_ops(step):
        resources = resource_seconds(op, deployment)
        took = _scalar(seconds_of(op, deployment, resources))
        if took == 0.0:
            continue
        needs = {name: _scalar(need) for name, need in resources.items()}
        needs[LAUNCHES] = _scalar(overhead_seconds(op, deployment))
        limit = LIMITS.get(max(needs, key=needs.__getitem__), LAUNCHES)
        if limit == LIMITS["compute"] and _fills_few_tiles(op, needs, deployment):
            limit = SMALL_PRODUCTS
        limit = SERVER if op.name == "server" else limit
        on = busy.setdefault(op.stream, {})
        on[limit] = on.get(limit, 0.0) + count * took
        if op.stream == "gpu":
            busy["host"]["kernel launches"] += count * _scalar(host_seconds(op, deployment))
    return busy


def _fills_few_tiles(op: Op, needs: dict[str, float], deployment: Deployment) -> bool:
    """Whether an op computes longer than it reads only because its tiles have few rows.

    Such a kernel takes as long for one row as for a tile of them: more rows add throughput, which
    they do not where arithmetic limits.
    """
    full = _scalar(peak_seconds(op, deployment)["compute"] * op.slower)
    return full / deployment.stack.kernel(op.kernel).compute < needs.get("hbm", 0.0)


def _scalar(value: Number) -> float:
    return float(value.flat[0]) if isinstance(value, np.ndarray) else float(value)


def binding(prediction: Prediction) -> str:
    """Name the bottleneck of a prediction.

    Parameters
    ----------
    prediction
        The prediction, of a single batch size.

    Returns
    -------
    str
        The resource or fixed cost that limits most of the time, in words.
    """
    return bound_by(prediction.passes(), prediction.deployment)
