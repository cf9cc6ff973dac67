"""Duration of ops by the roofline model.

Every duration is a maximum of affine functions of the work, so rates saturate with size:
a transfer of n bytes takes ``latency + n / bandwidth``, a matrix product over m rows runs at
``m / (m + half_size)`` of its peak, and a kernel's floor adds to its work. Few columns leave units
of the GPU idle, whether they compute or load: n of them reach ``n / (n + half_columns)`` of both
rates. A class may add a share of the resources that are not the slowest one.
"""

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from kvsim.graph import Number, Op, Step
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Kernel

COPY_STREAMS = ("h2d", "d2h", "disk_read", "disk_write")
ARITHMETIC = ("compute", "cpu")
SMOOTH = 4.0  # how sharply one limit gives way to the other
MANY_ROWS = 1e9  # rows of a product of which none is padding; a size may be infinite


def channel_seconds(op: Op, deployment: Deployment) -> dict[str, Number]:
    """Compute how long an op occupies each memory or link at its full rate.

    Parameters
    ----------
    op
        The kernel, copy or piece of host work.
    deployment
        Model, machine and software stack.

    Returns
    -------
    dict[str, Number]
        Time by name of the memory or link. [s]
    """
    return {name: op.times * n / deployment.bandwidth[name] for name, n in op.bytes.items()}


def peak_seconds(op: Op, deployment: Deployment) -> dict[str, Number]:
    """Compute the time each resource needs for its part of an op at its full rate.

    ``compute`` is the arithmetic of the GPU, ``cpu`` that of the host.

    Parameters
    ----------
    op
        The kernel, copy or piece of host work.
    deployment
        Model, machine and software stack.

    Returns
    -------
    dict[str, Number]
        Time by channel, and by "compute" or "cpu" for arithmetic. [s]
    """
    needs = channel_seconds(op, deployment)
    if not _is_zero(op.flops):
        on_host = op.stream == "cpu"
        peak = deployment.hardware.cpu_flops if on_host else deployment.flops(op.dtype)
        needs["cpu" if on_host else "compute"] = op.times * op.flops / peak
    return needs


def resource_seconds(op: Op, deployment: Deployment) -> dict[str, Number]:
    """Compute the time each resource needs for its part of an op; the longest one counts.

    A kernel class reaches its share of every channel's rate; a copy only loses on the host link,
    the memories at its ends are far faster.

    Parameters
    ----------
    op
        The kernel, copy or piece of host work.
    deployment
        Model, machine and software stack.

    Returns
    -------
    dict[str, Number]
        Time by resource at the rates that the kernel class reaches. [s]
    """
    kernel = deployment.stack.kernel(op.kernel)
    slower = op.slower
    if kernel.half_columns:
        slower = slower * (1.0 + kernel.half_columns / np.maximum(op.columns, 1.0))
    needs: dict[str, Number] = {}
    for name, peak in peak_seconds(op, deployment).items():
        if name in ARITHMETIC:
            rows = np.maximum(op.size, 1.0)
            fill = 1.0 + kernel.half_size / rows
            if kernel.tile_rows:
                fill = fill + tiled(rows, kernel.tile_rows) - 1.0
            if kernel.tile_columns and name == "compute":
                fill = fill * waves(op, kernel, deployment.hardware.units)
            needs[name] = slower * peak * fill / kernel.compute
        else:
            copied = op.stream in COPY_STREAMS and name not in COPY_STREAMS
            share = 1.0 if copied else kernel.memory
            if kernel.unit_rate and name == "hbm":
                share = share / crowding(deployment, kernel)
            needs[name] = slower * peak / share
    each = kernel.unpack_ops or deployment.stack.packed_cache.unpack_ops
    if each and not _is_zero(op.unpacked):
        # work per number, whatever the number of queries; one instruction per lane and clock is
        # half of the rate that counts a product and a sum
        needs["unpack"] = slower * each * op.times * op.unpacked / (deployment.flops("fp32") / 2)
    return needs


def tiled(rows: Number, tile: float) -> Number:
    """Compute the ratio of the rows of whole tiles to the rows of a product.

    Parameters
    ----------
    rows
        Rows of the product.
    tile
        Rows of one tile; products of fewer rows use tiles of the next power of two.

    Returns
    -------
    Number
        A factor of at least 1.
    """
    rows = np.minimum(rows, MANY_ROWS)
    each = np.minimum(tile, 2.0 ** np.ceil(np.log2(rows)))
    return each * np.ceil(rows / each) / rows


def waves(op: Op, kernel: Kernel, units: float) -> Number:
    """Compute how much longer a product takes because its last wave of tiles leaves units idle.

    Parameters
    ----------
    op
        The product.
    kernel
        Its kernel class, with the rows and columns of a tile.
    units
        Units of the GPU, each of which computes a tile at a time.

    Returns
    -------
    Number
        A factor of at least 1.
    """
    if not units:
        return 1.0
    rows, columns = (np.clip(n, 1.0, MANY_ROWS) for n in (op.size, op.columns))
    tiles = np.ceil(rows / kernel.tile_rows) * np.ceil(columns / kernel.tile_columns)
    factor: Number = np.ceil(tiles / units) * units / tiles
    return factor


def crowding(deployment: Deployment, kernel: Kernel) -> float:
    """Compute by how much loads slow down because the GPU's units have too few of them in flight.

    Parameters
    ----------
    deployment
        Model, machine and software stack.
    kernel
        Kernel class, with the highest rate at which one unit loads.

    Returns
    -------
    float
        A factor of at least 1: a smooth maximum of the memory's time and that of the units.
    """
    units = deployment.hardware.units
    if not units:
        return 1.0
    need = kernel.memory * deployment.bandwidth["hbm"] / (units * kernel.unit_rate)
    return float((1.0 + need**SMOOTH) ** (1 / SMOOTH))


def overhead_seconds(op: Op, deployment: Deployment) -> Number:
    """Compute the part of an op's time that does not depend on how many bytes it moves.

    Parameters
    ----------
    op
        The kernel, copy or piece of host work.
    deployment
        Model, machine and software stack.

    Returns
    -------
    Number
        Floors of kernels, gaps between them, latencies of copies and times of scattered rows. [s]
    """
    kernel = deployment.stack.kernel(op.kernel)
    if op.stream == "gpu":
        each = deployment.stack.time.gap
    else:
        each = deployment.hardware.links[op.stream].latency if op.stream in COPY_STREAMS else 0.0
    floor = kernel.floor * op.issued  # below 1: the work of one step in several
    rows = op.rows * deployment.stack.selection.gather_row
    return op.times * (op.fixed + rows + (floor + op.launches * each))


def host_seconds(op: Op, deployment: Deployment) -> Number:
    """Compute the host's time to issue an op on the GPU.

    Parameters
    ----------
    op
        The kernel, copy or piece of host work.
    deployment
        Model, machine and software stack.

    Returns
    -------
    Number
        Its launches, and the code around them. [s]
    """
    kernel = deployment.stack.kernel(op.kernel)
    each = deployment.stack.time.launch + kernel.launch
    return op.times * (op.host + op.launches * each + op.issued * kernel.host)


def seconds(op: Op, deployment: Deployment) -> Number:
    """Compute the duration of an op on an otherwise idle machine.

    Parameters
    ----------
    op
        The kernel, copy or piece of host work.
    deployment
        Model, machine and software stack.

    Returns
    -------
    Number
        Zero where it has no work. [s]
    """
    return seconds_of(op, deployment, resource_seconds(op, deployment))


def seconds_of(op: Op, deployment: Deployment, resources: Mapping[str, Number]) -> Number:
    """Compute the duration of an op from its time on each resource.

    Parameters
    ----------
    op
        The kernel, copy or piece of host work.
    deployment
        Model, machine and software stack.
    resources
        Time by resource, as `resource_seconds` returns it. [s]

    Returns
    -------
    Number
        Zero where it has no work. [s]
    """
    needs = list(resources.values())
    total: Number = needs[0] if needs else 0.0
    for need in needs[1:]:
        total = np.maximum(total, need)
    added = deployment.stack.kernel(op.kernel).added
    if added and len(needs) > 1:
        total = total + added * (sum(needs) - total)
    if not _is_zero(op.chain):
        total = np.maximum(total, op.times * op.chain)
    total = total + overhead_seconds(op, deployment)
    some: list[NDArray[np.bool]] = []  # work that may be nothing at some points
    for work in (op.flops, op.rows, op.fixed, op.host, *op.bytes.values()):
        if isinstance(work, np.ndarray):
            if all_nonzero(work):
                return total
            some.append(work > 0)
        elif work > 0:
            return total
    if not some:
        return 0.0
    return np.where(np.logical_or.reduce(np.broadcast_arrays(*some)), total, 0.0)


def power_limit_seconds(step: Step, deployment: Deployment) -> Number:
    """Compute how much longer a pass takes as the power limit lowers the clock of a busy GPU.

    A GPU that was idle computes at its full rates for some tens of milliseconds. Ops limited by
    memory do not reach the power limit, so only those limited by arithmetic count.

    Parameters
    ----------
    step
        The forward pass, which begins on an idle machine.
    deployment
        Model, machine and software stack.

    Returns
    -------
    Number
        Zero for machines of which no limit is known. [s]
    """
    hardware = deployment.hardware
    if hardware.sustained >= 1.0:
        return 0.0
    computing: Number = 0.0
    for op, times in all_ops(step):
        if op.stream == "gpu":
            needs = resource_seconds(op, deployment)
            compute = needs.pop("compute", 0.0)
            longest: Number = 0.0
            for need in needs.values():
                longest = np.maximum(longest, need)
            computing = computing + times * np.where(compute >= longest, compute, 0.0)
    return np.maximum(0.0, computing - hardware.boost) * (1.0 / hardware.sustained - 1.0)


def all_nonzero(values: Number | NDArray[np.bool] | bool) -> bool:
    """Tell whether no value is 0 or false; for a plan several times as fast as ``np.all``.

    Parameters
    ----------
    values
        Work or times of any shape, never negative.

    Returns
    -------
    bool
        Whether every operating point has some.
    """
    return int(np.count_nonzero(values)) == np.size(values)


def _is_zero(number: Number) -> bool:
    return not isinstance(number, np.ndarray) and number == 0.0


def all_ops(step: Step) -> Iterator[tuple[Op, int]]:
    """Yield every distinct op of a step with the number of times it runs.

    Parameters
    ----------
    step
        The forward pass.

    Yields
    ------
    tuple[Op, int]
        The op, and its runs in all layers.
    """
    layers: dict[int, tuple[tuple[Op, ...], int]] = {}  # by identity: blocks repeat layers
    for group in step.groups:
        for layer in group.layers:
            _, times = layers.get(id(layer), (layer, 0))
            layers[id(layer)] = layer, times + group.count
    ops: dict[int, tuple[Op, int]] = {}  # layers share ops
    for layer, count in (*layers.values(), (step.head, 1)):
        for op in layer:
            _, times = ops.get(id(op), (op, 0))
            ops[id(op)] = op, times + count
    yield from ops.values()
