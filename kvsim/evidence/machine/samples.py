"""What microbenchmarks measured, and the file that keeps it while they run.

A sample is an op as the simulator states it and how long it took, so that the fit predicts it by
the same roofline as everything else. The file has one JSON object per line: what ran where, then
the samples of one benchmark after another, each closed by a line that says it is complete.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from kvsim.errors import InputError
from kvsim.files import SAMPLES_FILE, append, own_output, read_bytes, replace_text, truncate
from kvsim.frozen import frozen
from kvsim.graph import Op

SAMPLES_VERSION = 1
MAX_SAMPLE_NUMBER = 1e30  # of a number in a sample
Case = Mapping[str, object]
NONE: Mapping[str, str] = MappingProxyType({})


@frozen
class Sample:
    """One op, timed several times."""

    benchmark: str
    case: Case  # what tells it from the benchmark's other samples
    op: Op  # its work, all numbers scalars
    runs: tuple[float, ...]  # [s]
    host_s: float = 0.0  # what the host took to issue it, where it runs ahead of a GPU [s]

    @property
    def seconds(self) -> float:
        """Median of its runs. [s]"""
        return float(np.median(self.runs))

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles over the median."""
        low, high = np.quantile(self.runs, (0.25, 0.75))
        return float((high - low) / 2 / self.seconds)

    @property
    def error(self) -> float:
        """Relative standard error of the median, as its runs scatter."""
        return 1.2533 * self.spread / 0.6745 / float(np.sqrt(len(self.runs)))

    def row(self) -> dict[str, object]:
        """Read back by ``sample``."""
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


@dataclass
class Log:
    """Samples on disk: what was finished before, and what is added now.

    Parameters
    ----------
    header : what ran where; a log can only go on where it began.
    """

    path: Path
    header: Mapping[str, object]
    done: dict[str, list[Sample]] = field(default_factory=dict)  # by benchmark
    conditions: dict[str, Mapping[str, str]] = field(default_factory=dict)  # it was measured under

    @classmethod
    def open(cls, path: Path, header: Mapping[str, object]) -> "Log":
        """Start a log, or go on with one; what its last benchmark left unfinished is dropped.

        Parameters
        ----------
        path
            The file.
        header
            What ran where; a log can only go on where it began.

        Returns
        -------
        Log
            The log, with the benchmarks that are finished already.

        Raises
        ------
        InputError
            If the place cannot be written, or holds something else or samples of another machine.
        """
        first = json.dumps({"samples": SAMPLES_VERSION, **header}) + "\n"
        if not path.exists():
            replace_text(path, first)
            return cls(path, header)
        with own_output():
            text = read_bytes(path, SAMPLES_FILE)
        log = cls(path, header)
        if text.partition(b"\n")[0] != first.encode().rstrip():
            raise InputError(f"{path}: {_obstacle(text, header)}; move it away, or choose another")
        kept = log._read(text, len(first.encode()))
        if kept < len(text):
            truncate(path, kept)
        return log

    def append(
        self, benchmark: str, samples: Sequence[Sample], conditions: Mapping[str, str] = NONE
    ) -> None:
        """Keep a finished benchmark; on disk before this returns.

        Parameters
        ----------
        conditions : driver, clocks and temperature while it was measured, where they are known.

        Raises
        ------
        InputError
            If the disk is full or the place has become unwritable.
        """
        lines = [json.dumps(s.row()) for s in samples]
        over = {"done": benchmark, "samples": len(samples)}
        lines.append(json.dumps(over | ({"conditions": dict(conditions)} if conditions else {})))
        append(self.path, "\n".join(lines) + "\n")
        self.done[benchmark], self.conditions[benchmark] = list(samples), dict(conditions)

    @property
    def samples(self) -> list[Sample]:
        """The samples of all parts that are done, in the order of parts."""
        return [s for samples in self.done.values() for s in samples]

    def _read(self, text: bytes, start: int) -> int:
        """Take over every finished benchmark; where the last of them ends in the file. [B]"""
        place = end = start
        found: list[Sample] = []
        for line in text[start:].splitlines(keepends=True):
            place += len(line)
            try:
                row = json.loads(line)
                if "done" not in row:
                    found.append(sample(row))
                    continue
                benchmark, conditions = row["done"], row.get("conditions", {})
            except (ValueError, KeyError, TypeError, RecursionError):
                break
            known = isinstance(benchmark, str) and isinstance(conditions, dict)
            if not (line.endswith(b"\n") and known):
                break
            self.done[benchmark], found, end = found, [], place
            self.conditions[benchmark] = conditions
        return end


def read_samples(path: Path) -> tuple[dict[str, object], list[Sample]]:
    """Read a log: its header, and the samples of its finished benchmarks.

    Parameters
    ----------
    path
        The file.

    Returns
    -------
    header : dict
        What ran where.
    samples : list of Sample
        The samples of all finished benchmarks.

    Raises
    ------
    InputError
        If it cannot be read, or is no log.
    """
    text = read_bytes(path, SAMPLES_FILE)
    try:
        header = json.loads(text.partition(b"\n")[0])
        if header.pop("samples") != SAMPLES_VERSION:
            raise ValueError
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise InputError(f"{path}: not a file of samples that kvsim calibrate wrote") from None
    log = Log(path, header)
    log._read(text, len(text.partition(b"\n")[0]) + 1)
    return header, log.samples


def _obstacle(text: bytes, header: Mapping[str, object]) -> str:
    """What is in the way of a log."""
    try:
        found = json.loads(text.partition(b"\n")[0])
        found.pop("samples")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return "there is another file"
    differs = [k for k in header if found.get(k) != header[k]]
    which = differs[0] if differs else "format"
    return f"samples of another run ({which} was {str(found.get(which))[:60]!r})"
