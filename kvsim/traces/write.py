"""Writing traces as Parquet, CSV or JSON lines, atomically."""

import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import repeat
from pathlib import Path

import numpy as np

from kvsim.errors import InputError
from kvsim.files import check_target, replacing
from kvsim.traces.containers import BLOCK_KEY
from kvsim.traces.formats import FORMATS
from kvsim.traces.read import Conduct, TracePart
from kvsim.traces.requests import Requests

ENDINGS = (".parquet", ".csv", ".csv.gz", ".jsonl", ".jsonl.gz")
PIECE_ROWS = 1 << 17  # requests per piece


def check_ending(path: Path, endings: tuple[str, ...] = ENDINGS) -> None:
    """Check that a file name has the extension of a writable format.

    Parameters
    ----------
    path
        Path of the file.
    endings
        Endings of names that can be written.

    Raises
    ------
    InputError
        If it does not, or the folder is not there.
    """
    if not path.name.endswith(endings):
        raise InputError(f"{path}: cannot be written; expected a name in {', '.join(endings)}")
    check_target(path, "OUT")


def write(path: Path, requests: Requests) -> None:
    """Write a trace in the format of the file's extension.

    Parquet keeps everything. CSV has no prefix blocks. JSON lines are in Mooncake's layout, with
    blocks of 512 tokens, so that other tools read them.

    Parameters
    ----------
    path
        Path of the file.
    requests
        The trace.

    Raises
    ------
    InputError
        If the form cannot hold the trace or the place cannot be written.
    """
    check_ending(path)
    own = _conduct(requests)
    if own and ".jsonl" in path.name:
        raise InputError(
            f"{path}: jsonl is in Mooncake's layout, which holds no turns, classes or aborts; "
            "choose a name in .parquet or .csv"
        )
    if path.suffix == ".parquet":
        write_parquet(path, pieces(requests), requests.block_tokens, further=tuple(own))
        return
    kind = "jsonl" if ".jsonl" in path.name else "csv"
    holds = FORMATS["mooncake"].block_tokens if kind == "jsonl" else 0
    if requests.block_tokens not in (0, holds):
        what = f"only blocks of {holds} tokens" if holds else "no prefix blocks"
        raise InputError(
            f"{path}: {kind} holds {what}, the trace has blocks of {requests.block_tokens}; "
            "choose a name in .parquet"
        )
    rows = _json_lines if kind == "jsonl" else _csv_lines
    with replacing(path) as draft, draft.open("wb") as plain:
        # Neither name nor time in the header: the same bytes every time.
        packed = gzip.GzipFile("", "wb", fileobj=plain, mtime=0) if path.suffix == ".gz" else None
        with packed or nullcontext(plain) as file:
            if kind == "csv":
                file.write(_header(own).encode())
            for first in range(0, len(requests), PIECE_ROWS):
                some = requests[first : first + PIECE_ROWS]
                more = {name: column[first : first + PIECE_ROWS] for name, column in own.items()}
                file.write("".join(rows(some, more)).encode())


def pieces(requests: Requests) -> Iterator[TracePart]:
    """Split a trace into pieces, as a reader hands them out.

    Parameters
    ----------
    requests
        The trace.
    """
    for first in range(0, len(requests), PIECE_ROWS):
        some = requests[first : first + PIECE_ROWS]
        counts = None if some.block_start is None else np.diff(some.block_start)
        conduct = {
            n: column[first : first + PIECE_ROWS] for n, column in _conduct(requests).items()
        }
        yield TracePart(some.arrival, some.prompt, some.generate, some.block_ids, counts, conduct)


def _conduct(requests: Requests) -> Conduct:
    """Columns on turns, classes and aborts, by their names in kvsim's own format."""
    found = {name: getattr(requests, role) for role, name in FORMATS["kvsim"].conduct}
    return {name: column for name, column in found.items() if column is not None}


def write_parquet(
    path: Path,
    parts: Iterable[TracePart],
    block_tokens: int,
    told: Callable[[int], None] = lambda rows: None,
    further: tuple[str, ...] = (),
) -> int:
    """Write pieces as they arrive, and return the number of requests.

    Parameters
    ----------
    path
        Where to.
    parts
        Requests in order; prefix blocks keep the ids they have.
    block_tokens
        Tokens per prefix block; 0 for none. [tokens]
    told
        Called with the requests written so far.
    further
        Names of the columns in ``conduct`` of every part.

    Raises
    ------
    InputError
        If the place cannot be written, or whatever reading the parts raises; nothing is left.
    """
    import pyarrow as pa
    from pyarrow import parquet

    own = FORMATS["kvsim"]
    names = [own.arrival[0][0], own.prompt[0], own.generate[0]]
    kinds: list[object] = [pa.float64(), pa.int64(), pa.int64()]
    if block_tokens:
        names, kinds = [*names, own.blocks], [*kinds, pa.list_(pa.int64())]
    names, kinds = [*names, *further], [*kinds, *(pa.float64() for _ in further)]
    fields = [pa.field(name, kind, nullable=False) for name, kind in zip(names, kinds, strict=True)]
    schema = pa.schema(fields, {BLOCK_KEY: str(block_tokens)} if block_tokens else None)
    done = 0
    with replacing(path) as draft, parquet.ParquetWriter(draft, schema, compression="zstd") as file:
        for part in parts:
            columns = [pa.array(part.arrival), pa.array(part.prompt), pa.array(part.generate)]
            if part.block_counts is not None:
                starts = np.concatenate([[0], np.cumsum(part.block_counts)]).astype(np.int32)
                columns.append(pa.ListArray.from_arrays(starts, pa.array(part.block_ids)))
            columns += [pa.array(part.conduct[name], pa.float64()) for name in further]
            file.write_batch(pa.record_batch(columns, schema=schema))
            done += len(part.arrival)
            told(done)
    return done


def _header(further: Iterable[str]) -> str:
    own = FORMATS["kvsim"]
    return ",".join([own.arrival[0][0], own.prompt[0], own.generate[0], *further]) + "\n"


def _csv_lines(requests: Requests, further: Conduct) -> Iterator[str]:
    columns = [requests.arrival, requests.prompt, requests.generate, *further.values()]
    for row in zip(*(column.tolist() for column in columns), strict=True):
        yield ",".join("" if value == np.inf else repr(value) for value in row) + "\n"


def _json_lines(requests: Requests, further: Conduct) -> Iterator[str]:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    blocks = (ids.tolist() for ids in requests.blocks()) if requests.block_tokens else repeat(None)
    times = np.round(requests.arrival * 1e3, 6).tolist()
    columns = (times, requests.prompt.tolist(), requests.generate.tolist(), blocks)
    for row in zip(*columns, strict=False):
        kept = row if row[-1] is not None else row[:-1]
        yield json.dumps(dict(zip(names, kept, strict=False))) + "\n"
