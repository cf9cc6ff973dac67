"""Samples of microbenchmarks, and the file that stores them.

A sample is an op as the simulator states it and how long it took, so that the fit predicts it by
the same roofline as everything else. The file has one JSON object per line: what ran where, then
the samples of one benchmark after another, each closed by a line that says it is complete.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvsim.errors import InputError
from kvsim.files import SAMPLES_FILE, read_bytes
from kvsim.frozen import frozen
from kvsim.graph import Op
from kvsim.journal import Journal

SAMPLES_VERSION = 1
MAX_SAMPLE_NUMBER = 1e30  # of a number in a sample
Case = Mapping[str, object]


@frozen
class Sample:
    """One op that was timed several times.

    Attributes
    ----------
    benchmark
        Name of the benchmark.
    case
        What distinguishes it from the benchmark's other samples, such as a batch size.
    op
        The op's work; all numbers are scalars.
    runs
        Measured times. [s]
    host_s
        Time that the host took to issue the op, if it runs ahead of a GPU; else 0. [s]
    """

    benchmark: str
    case: Case  # what tells it from the benchmark's other samples
    op: Op
    runs: tuple[float, ...]
    host_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Median of its runs. [s]"""
        return float(np.median(self.runs))

    @property
    def spread(self) -> float:
        """Half the interquartile range of the runs, relative to their median."""
        low, high = np.quantile(self.runs, (0.25, 0.75))
        return float((high - low) / 2 / self.seconds)

    @property
    def error(self) -> float:
        """Relative standard error of the median, estimated from the spread of the runs."""
        return 1.2533 * self.spread / 0.6745 / float(np.sqrt(len(self.runs)))

    def row(self) -> dict[str, object]:
        """Return the sample as a JSON object, which :func:`sample` parses."""
        names = ("name", "stream", "kernel", "dtype", "flops", "bytes", "rows", "launches")
        op: dict[str, object] = {name: getattr(self.op, name) for name in names}
        op["bytes"] = dict(self.op.bytes)
        if np.isfinite(self.op.size):
            op["size"] = self.op.size
        if self.op.unpacked:
            op["unpacked"] = self.op.unpacked
        found: dict[str, object] = {"benchmark": self.benchmark, "case": dict(self.case), "op": op}
        found |= {"seconds": self.seconds, "spread": self.spread, "runs": list(self.runs)}
        return found | ({"host_s": self.host_s} if self.host_s else {})


def sample(row: Mapping[str, Any]) -> Sample:
    """Parse a sample from its row in a log.

    Parameters
    ----------
    row
        The row, as ``Sample.row`` wrote it.

    Returns
    -------
    Sample
        The sample.

    Raises
    ------
    ValueError, KeyError, TypeError
        If the row is not a sample.
    """
    op, runs = Op(**row["op"]), tuple(row["runs"])
    host = row.get("host_s", 0.0)
    numbers = (op.flops, op.rows, op.launches, op.unpacked, *op.bytes.values(), host, *runs)
    texts = (row["benchmark"], op.name, op.stream, op.kernel, op.dtype)
    sound = all(type(n) in (int, float) and 0 <= n < MAX_SAMPLE_NUMBER for n in numbers) and bool(
        runs
    )
    if not (sound and all(isinstance(text, str) for text in texts) and min(runs) > 0):
        raise ValueError("no sample")
    return Sample(row["benchmark"], dict(row["case"]), op, runs, host)


class Log(Journal[Sample]):
    """A file of samples, written benchmark by benchmark."""

    def __init__(self, path: Path, header: Mapping[str, object]) -> None:
        super().__init__(path, {"samples": SAMPLES_VERSION, **header}, Sample.row, sample)


def read_samples(path: Path) -> tuple[dict[str, object], list[Sample]]:
    """Read a file of samples: its header, and the samples of its finished benchmarks.

    Parameters
    ----------
    path
        A file that ``kvsim calibrate`` wrote.

    Returns
    -------
    header : dict
        Description of the measured machine and software.
    samples : list of Sample
        The samples of all finished benchmarks.

    Raises
    ------
    InputError
        If it cannot be read, or is no such file.
    """
    text = read_bytes(path, SAMPLES_FILE)
    try:
        header = json.loads(text.partition(b"\n")[0])
        if header.pop("samples") != SAMPLES_VERSION:
            raise ValueError
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise InputError(f"{path}: not a file of samples that kvsim calibrate wrote") from None
    log = Log(path, header)
    log.read(text)
    return header, log.items
