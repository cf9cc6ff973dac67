"""What the simulator says of samples, on a machine whose numbers change."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from kvsim.engine.roofline import seconds
from kvsim.evidence.machine.samples import Sample
from kvsim.graph import Array, Channel, Number, Op
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Hardware


def predicted(samples: Sequence[Sample], deployment: Deployment) -> Array:
    """What the simulator says of every sample, ops of one kind in one evaluation. [s]"""
    out = np.empty(len(samples))
    order = sorted(range(len(samples)), key=lambda i: _kind(samples[i].op))
    for _, group in groupby(order, key=lambda i: _kind(samples[i].op)):
        rows = list(group)
        out[rows] = seconds(_stacked([samples[i].op for i in rows]), deployment)
    return out


def _kind(op: Op) -> tuple[str, str, str, float, tuple[str, ...]]:
    return op.stream, op.kernel, op.dtype, float(op.launches), tuple(sorted(op.bytes))


def _stacked(ops: Sequence[Op]) -> Op:
    """Ops of one kind as one whose work is an array."""

    def column(values: Iterable[Number]) -> Array:
        return np.array([float(np.asarray(v)) for v in values])

    first = ops[0]
    moved: dict[Channel, Number] = {c: column(op.bytes[c] for op in ops) for c in first.bytes}
    return replace(
        first,
        flops=column(op.flops for op in ops),
        bytes=moved,
        rows=column(op.rows for op in ops),
        size=column(op.size for op in ops),
    )


def with_rates(hardware: Hardware, numbers: Mapping[str, float]) -> Hardware:
    """A machine with other numbers under some of its file's keys."""
    flops, links, cpu = dict(hardware.flops), dict(hardware.links), hardware.cpu_flops
    for key, value in numbers.items():
        table, _, name = key.partition(".")
        if key == "compute.cpu_fp32_FLOPps":
            cpu = value
        elif table == "compute":
            flops[name.removesuffix("_FLOPps")] = value
        else:
            changed = {"bandwidth" if name == "bandwidth_Bps" else "latency": value}
            links[table] = replace(links[table], **changed)
    return replace(hardware, flops=flops, links=links, cpu_flops=cpu)
