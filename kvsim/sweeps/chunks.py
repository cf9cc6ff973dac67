"""How a sweep is divided into chunks, and the columns that each kind of sweep answers with.

A chunk carries everything that its evaluation needs, so that any process with the same version of
kvsim computes the same bytes from it.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np

from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Hardware, Stack
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.models.model import Model
from kvsim.sweeps.plugins import Plugin
from kvsim.sweeps.spec import POINT_AXES, SPREAD, Spec, Value
from kvsim.techniques import parse
from kvsim.traces.read import load
from kvsim.traces.requests import Requests


@frozen
class Points:
    """Consecutive points of the grid of batches and contexts, in which contexts vary faster.

    Points are sent to other processes, so they are stored as two axes and a range.

    Attributes
    ----------
    batches, contexts
        Values of the axes; of batches, only those that occur.
    first, size
        Index of the first point in the grid of these axes, and the number of points.
    """

    batches: Array
    contexts: Array
    first: int
    size: int

    @property
    def spread(self) -> tuple[Array, Array]:
        """Batch and context of each point. (n,)"""
        row, column = np.divmod(np.arange(self.first, self.first + self.size), self.contexts.size)
        return self.batches[row], self.contexts[column]


def divide_points(batches: Array, contexts: Array, most: int) -> Iterator[Points]:
    """Divide the grid of two axes into ranges of limited size.

    Parameters
    ----------
    batches, contexts
        The values of the axes; contexts vary faster.
    most
        Largest number of points in a range.

    Yields
    ------
    Points
        The ranges in order; together they contain every point once.
    """
    width, total = contexts.size, batches.size * contexts.size
    for first in range(0, total, most):
        size = min(most, total - first)
        row, last = first // width, (first + size - 1) // width
        yield Points(batches[row : last + 1].copy(), contexts, first - row * width, size)


@frozen
class Case:
    """The inputs that a chunk is evaluated with.

    Attributes
    ----------
    values
        The value of each axis that chunks are split by.
    points
        Batches and contexts of a prediction; None for other kinds of sweeps.
    """

    values: dict[str, Value]
    model: Model
    hardware: tuple[Hardware, ...]
    stack: Stack
    points: Points | None
    requests: Requests | None

    def deployment(self, gpu: int = 0, tp: int = 0) -> Deployment:
        """Build the deployment of the model on one of the GPUs.

        Parameters
        ----------
        gpu
            Index of the GPU in ``hardware``.
        tp
            Tensor-parallel GPUs; 0 for the value of the case.

        Returns
        -------
        Deployment
            The model, hardware and stack.

        Raises
        ------
        InputError
            If the model cannot be divided so, or weights have no such format.
        """
        degree = tp or int(self.values["tp"])
        pp, dp, ep = (int(self.values.get(name, 1)) for name in SPREAD)
        weights = str(self.values["weights"])
        return Deployment(self.model, self.hardware[gpu], self.stack, weights, degree, pp, dp, ep)

    def number(self, name: str) -> float:
        """Look up the value of a numeric axis.

        Parameters
        ----------
        name
            The axis.

        Returns
        -------
        float
            The value, in the axis's unit.
        """
        return float(self.values[name])


SEPARATOR = "+"  # between the GPUs that a fleet may consist of
Columns = dict[str, Any]


def _columns(text: str) -> dict[str, type]:
    """Columns from words ``name:type``; a word without a type names a number."""
    types = {"": float, "int": int, "str": str, "bool": bool}
    words = (word.partition(":") for word in text.split())
    return {name: types[kind] for name, _, kind in words}


COLUMNS: dict[str, dict[str, type]] = {
    "predict": _columns(
        """batch:int context:int ttft_s tpot_s decode_tok_s gpu_bytes host_bytes fits:bool
        reason:str"""
    ),
    "plan": _columns(
        """technique:str batch:int ttft_s tpot_s output_tok_s gpu_bytes host_bytes
        usd_per_million_tokens reason:str"""
    ),
    "simulate": _columns(
        """finished:int refused:int ttft_p50_s ttft_p90_s ttft_p99_s tpot_p50_s tpot_p90_s
        tpot_p99_s latency_p99_s good_share goodput_per_s output_tok_s busy_share kv_peak_share
        prefix_hit_share preemptions:int usd hosts_used:str reason:str"""
    ),
    "capacity": _columns(
        """fleet:str replicas:int gpus:int usd_per_hour ttft_s tpot_s relaxation_usd_per_hour
        likelihood hosts_used:str reason:str"""
    ),
}
"""Result columns of each kind of sweep. Missing results are null, and ``reason`` says why.

``hosts_used`` names the GPUs whose host memory holds caches, separated by ``SEPARATOR``.
"""


def no_answer(kind: str, reason: str) -> Columns:
    """Build the row of a case without an answer.

    Parameters
    ----------
    kind
        A key of ``COLUMNS``.
    reason
        Why there is none.

    Returns
    -------
    dict
        Empty texts and NaN by column, and the reason.
    """
    return {name: "" if of is str else np.nan for name, of in COLUMNS[kind].items()} | {
        "reason": reason
    }


CHUNK_POINTS = 2**15  # points of a chunk at most


@frozen
class SweepChunk:
    """The unit of work of a sweep: one value of every axis except those evaluated together.

    Attributes
    ----------
    index
        Position of the chunk in the sweep.
    kind
        Kind of the sweep: a key of ``COLUMNS``.
    case
        Inputs of the evaluation.
    plugins
        The user's technique files, which the evaluating process loads first.
    """

    index: int
    kind: str
    case: Case
    plugins: tuple[Plugin, ...]

    @property
    def points(self) -> int:
        """Number of points in the chunk."""
        return 1 if self.case.points is None else self.case.points.size


def divide_sweep(spec: Spec, plugins: tuple[Plugin, ...]) -> Iterator[SweepChunk]:
    """Divide a sweep into chunks.

    Models, profiles and traces are read once each.

    Parameters
    ----------
    spec
        The sweep.
    plugins
        The user's own technique files.

    Yields
    ------
    SweepChunk
        The chunks in order.

    Raises
    ------
    InputError
        If a name is unknown or a file cannot be read.
    """
    model, hardware = lru_cache(None)(load_model), lru_cache(None)(load_hardware)
    stack = lru_cache(None)(load_stack)
    trace = lru_cache(4)(lambda name: load(name).requests)
    index = 0
    for values in spec.combinations():
        named = {name: str(value) for name, value in values.items()}
        gpus = named["gpu"].split(SEPARATOR) if spec.kind == "capacity" else [named["gpu"]]
        for points in _points(spec):
            case = Case(
                values=values,
                model=model(named["model"]),
                hardware=tuple(hardware(gpu) for gpu in gpus),
                stack=stack(named["stack"]),
                points=points,
                requests=trace(named["trace"]) if "trace" in named else None,
            )
            yield SweepChunk(index, spec.kind, case, plugins)
            index += 1


def check(spec: Spec) -> None:
    """Refuse a sweep whose models, profiles, techniques or traces cannot be read.

    Parameters
    ----------
    spec
        The sweep.

    Raises
    ------
    InputError
        Naming the first of them.
    """
    readers: dict[str, Callable[[str], object]] = {
        "model": load_model,
        "stack": load_stack,
        "technique": parse,
        "trace": load,
    }
    for axis, reader in readers.items():
        for value in spec.axes.get(axis, ()):
            reader(str(value))
    for value in spec.axes["gpu"]:
        several = str(value).split(SEPARATOR) if spec.kind == "capacity" else [str(value)]
        for gpu in several:
            load_hardware(gpu)


def _points(spec: Spec) -> Iterator[Points | None]:
    """Points of each chunk of a prediction; other kinds of sweeps have one chunk without points."""
    if spec.kind != "predict":
        yield None
        return
    batches, contexts = (np.array(spec.axes[name], float) for name in POINT_AXES)
    yield from divide_points(batches, contexts, CHUNK_POINTS)


def count(spec: Spec) -> int:
    """Count the chunks of a sweep.

    Parameters
    ----------
    spec
        The sweep.

    Returns
    -------
    int
        Number of chunks.
    """
    several = sum(1 for _ in islice(_points(spec), 10**6))
    return several * len(spec.combinations())
