"""A sweep in chunks: what each computes, as the bytes of a Parquet file with one row group.

A chunk holds all it needs, so that any process with the same kvsim computes the same bytes.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from io import BytesIO
from itertools import islice
from typing import Any

import numpy as np

from kvsim.frozen import frozen
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.sweeps.cases import COLUMNS, SEPARATOR, Case, Columns, Points, divide_points
from kvsim.sweeps.evaluate import evaluator
from kvsim.sweeps.plugins import Plugin, install
from kvsim.sweeps.spec import POINT_AXES, Spec
from kvsim.techniques import parse
from kvsim.traces.read import load
from kvsim.version import __version__

CHUNK_POINTS = 2**15  # points of a chunk at most


@frozen
class SweepChunk:
    """Points with one value of every axis but those that are evaluated together.

    Attributes
    ----------
    index
        Its place in the sweep.
    kind
        What is computed: a key of ``COLUMNS``.
    case
        What it is computed for.
    plugins
        The user's own technique files, which the process that computes it loads first.
    """

    index: int
    kind: str
    case: Case
    plugins: tuple[Plugin, ...]

    @property
    def points(self) -> int:
        """How many points it has."""
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
        "model": load_model, "stack": load_stack, "technique": parse, "trace": load,
    }  # fmt: skip
    for axis, reader in readers.items():
        for value in spec.axes.get(axis, ()):
            reader(str(value))
    for value in spec.axes["gpu"]:
        several = str(value).split(SEPARATOR) if spec.kind == "capacity" else [str(value)]
        for gpu in several:
            load_hardware(gpu)


def _points(spec: Spec) -> Iterator[Points | None]:
    """The points of a prediction's chunks; other kinds have one chunk without any."""
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


def compute(chunk: SweepChunk) -> tuple[str, bytes]:
    """Compute a chunk.

    Parameters
    ----------
    chunk
        The chunk; its plugins are loaded first.

    Returns
    -------
    version : str
        The version of kvsim that computed it.
    content : bytes
        The Parquet file with its rows.
    """
    install(chunk.plugins)
    return __version__, _parquet(chunk, evaluator(chunk.kind)(chunk.case))


def _parquet(chunk: SweepChunk, found: Columns) -> bytes:
    """A table with one row group: the axes, then the results; the same bytes for the same rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = COLUMNS[chunk.kind]
    rows = max(np.size(found[name]) for name in columns)
    arrays: dict[str, Any] = {}

    def add_text(name: str, text: str) -> None:
        """A column of one text."""
        zeros = pa.array(np.zeros(rows, np.int32))
        arrays[name] = pa.DictionaryArray.from_arrays(zeros, pa.array([text], pa.string()))

    for name, value in chunk.case.values.items():
        if isinstance(value, str):
            add_text(name, value)
        else:
            arrays[name] = pa.array(np.full(rows, value))
    texts = [name for name, value in chunk.case.values.items() if isinstance(value, str)]
    for name, kind in columns.items():
        values = found[name]
        if kind is str:
            add_text(name, values)
            texts.append(name)
        else:
            spread = np.broadcast_to(np.asarray(values, float), rows)
            known = np.isfinite(spread)
            arrays[name] = pa.array(np.where(known, spread, 0.0).astype(kind), mask=~known)
    out = BytesIO()
    pq.write_table(
        pa.table(arrays), out, row_group_size=max(rows, 1), compression="zstd", use_dictionary=texts
    )
    return out.getvalue()
