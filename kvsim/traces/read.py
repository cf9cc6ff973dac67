"""Reading traces of any known format, in pieces or whole, and writing them atomically."""

import gzip
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import field, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import InputError, unknown
from kvsim.files import check_target, replacing
from kvsim.frozen import frozen
from kvsim.traces import formats
from kvsim.traces.containers import BLOCK_KEY, column_names, row_chunks, stated_block_tokens
from kvsim.traces.formats import SECONDS_PER_UNIT, TRACE_FORMATS, TraceFormat
from kvsim.traces.requests import Floats, Integers, Requests
from kvsim.traces.rules import LONGEST_TIME, LeftOut, RowChunk, RowPolicy, TraceColumn
from kvsim.traces.source import Source, find

READ_OPTIONS = re.compile("--(columns|format|time-unit|chars-per-token|sort|skip-bad|block-tokens)")
CONVERT = (
    "this command has none of these options: use kvsim traces convert, and give what it writes"
)
"""What a command that reads any trace says where only options could help."""
Conduct = dict[str, Floats]
"""Columns on turns, classes and aborts by role: a value for each row. (n,)"""


@frozen
class ReadOptions:
    """How to read a trace.

    Attributes
    ----------
    format
        A name from `formats.TRACE_FORMATS`; empty: from the columns.
    columns
        Column of each role (arrival, prompt, generate, blocks, and those of `CONDUCT_DEFAULTS`),
        for files of no known format.
    time_unit
        Unit of arrivals: s, ms, us, ns or date; empty: the format's, or s.
    block_tokens
        Prompt tokens per prefix block; 0: the format's. [tokens]
    chars_per_token
        Characters per token, for traces of text; 0 if not given.
    sort
        Sort by arrival; else a trace that is not sorted is an error.
    skip_bad
        Leave out rows that break a rule and count them; else the first is an error.
    """

    format: str = ""
    columns: dict[str, str] = field(default_factory=dict)
    time_unit: str = ""
    block_tokens: int = 0
    chars_per_token: float = 0.0
    sort: bool = False
    skip_bad: bool = False


@frozen
class Trace:
    """A trace that was read.

    Attributes
    ----------
    requests
        The requests, sorted by arrival.
    name
        Name that the user gave.
    format
        Its format.
    left_out
        Rows that are not among the requests.
    notes
        Remarks for the user, one line each.
    """

    requests: Requests
    name: str
    format: str
    left_out: LeftOut
    notes: tuple[str, ...]


@frozen
class TracePart:
    """Consecutive requests of a trace, with arrivals and ids of prefix blocks as in the file.

    Attributes
    ----------
    arrival
        Arrivals. (n,) [s]
    prompt, generate
        Lengths. (n,) [tokens]
    block_ids
        Prefix blocks of all requests, one after another; None without blocks. (m,)
    block_counts
        Number of prefix blocks of each request; None without blocks. (n,)
    conduct
        Columns on turns, classes and aborts, by name. (n,) each
    """

    arrival: Floats
    prompt: Integers
    generate: Integers
    block_ids: Integers | None
    block_counts: Integers | None
    conduct: Conduct = field(default_factory=dict)


class Reader:
    """Reads a trace in parts, so that it need not fit in memory.

    Parameters
    ----------
    source
        A path, or ``sample:NAME``.
    options
        How to read it; by default the format is recognised by its columns.

    Raises
    ------
    InputError
        If the file is not a trace of a known format. While reading: for the first row that breaks a
        rule, or if arrivals descend or change their unit.
    """

    def __init__(self, source: str, options: ReadOptions | None = None) -> None:
        self.options = options or ReadOptions()
        self.source = find(source)
        self.layout = _layout(self.source, self.options)
        self.left_out = LeftOut()
        self._origin: float | None = None  # first arrival, in the file's unit
        self._last = -np.inf
        self._rows = 0

    def parts(self) -> Iterator[TracePart]:
        """Yield the requests in the order of the file.

        Yields
        ------
        TracePart
            Consecutive requests, with arrivals in seconds from the first one of the trace.

        Raises
        ------
        InputError
            For the first row that breaks a rule, unless such rows are left out; or if no row is
            left.
        """
        layout = self.layout
        policy = RowPolicy(
            self.source.name, self.options.skip_bad, layout.failed, layout.block_tokens
        )
        found = False
        for chunk in row_chunks(self.source, layout):
            kept = policy.keep(chunk, self.left_out)
            if kept.any():
                found = True
                yield self._build_part(chunk, kept)
        if not found:
            left = self.left_out.total
            what = f"all {left} rows were omitted" if left else "no rows below the header"
            raise InputError(f"{self.source.name}: {what}; expected at least one request")

    def notes(self) -> tuple[str, ...]:
        """Return remarks for the user on the rows read so far, one line each."""
        name, notes = self.source.name, []
        for rule, count in self.left_out.counts.items():
            notes.append(f"omitted {count} rows [{rule}], the first: {self.left_out.first[rule]}")
        if not self.layout.arrival:
            notes.append(f"{name}: no arrival times; all requests arrive at 0 s, as one batch")
        if self.layout.chars_per_token:
            rate = f"{self.layout.chars_per_token:g} characters per token"
            notes.append(f"{name}: token counts are estimates, {rate}")
        return tuple(notes)

    def _build_part(self, chunk: RowChunk, kept: NDArray[np.bool_]) -> TracePart:
        places = chunk.positions[kept]
        arrival = self._arrivals(chunk.arrival, kept, chunk.place, places)
        per = self.layout.chars_per_token or 1.0
        prompt, generate = (
            np.ceil(column.values[kept] / per).astype(np.int64)
            for column in (chunk.prompt, chunk.generate)
        )
        conduct = {role: column.values[kept] for role, column in chunk.conduct.items()}
        if "parent" in conduct:  # without ids of their own, requests are numbered from 0
            conduct.setdefault("id", self._rows + np.flatnonzero(kept).astype(float))
        self._rows += kept.size
        if chunk.blocks is None:
            return TracePart(arrival, prompt, generate, None, None, conduct)
        ids = chunk.blocks.ids[np.repeat(kept, chunk.blocks.counts)]
        return TracePart(arrival, prompt, generate, ids, chunk.blocks.counts[kept], conduct)

    def _arrivals(
        self, column: TraceColumn, kept: NDArray[np.bool_], place: str, places: Integers
    ) -> Floats:
        if column.nanoseconds is not None:
            exact = column.nanoseconds[kept]
            self._origin = int(exact[0]) if self._origin is None else self._origin
            arrival = np.asarray((exact - self._origin) * 1e-9)
        else:
            raw = column.values[kept]
            self._origin = float(raw[0]) if self._origin is None else self._origin
            self._check_unit(column.name, raw, place, places)
            arrival = (raw - self._origin) * SECONDS_PER_UNIT[self.layout.unit]
        if not self.options.sort:
            self._check_order(column.name, arrival, place, places)
        arrival = np.asarray(arrival, dtype=np.float64)
        if np.ptp(arrival) > LONGEST_TIME or abs(arrival[-1]) > LONGEST_TIME:
            years = max(np.ptp(arrival), abs(arrival[-1])) / (365 * 86400)
            raise InputError(
                f"{self.source.name}, column {column.name!r}: arrivals span {years:.3g} years in "
                f"unit {self.layout.unit}; expected at most 10; give the unit with --time-unit"
            )
        return arrival

    def _check_order(self, name: str, arrival: Floats, place: str, places: Integers) -> None:
        before = np.concatenate([[self._last], arrival[:-1]])
        descends = np.flatnonzero(arrival < before)
        if len(descends):
            row = descends[0]
            raise InputError(
                f"{self.source.name}, {place} {places[row]}, column {name!r}: arrives "
                f"{before[row] - arrival[row]:.6g} s before the request above it; expected "
                "ascending arrivals; sort them with --sort"
            )
        self._last = float(arrival[-1])

    def _check_unit(self, name: str, raw: Floats, place: str, places: Integers) -> None:
        """Refuse arrivals whose unit changes within the file."""
        jump = unit_changes(raw, float(self._origin or 0.0))
        if jump is not None:
            raise InputError(
                f"{self.source.name}, {place} {places[jump]}, column {name!r}: "
                f"{raw[jump]:.10g} after {raw[jump - 1] if jump else self._origin:.10g}, as if the "
                "unit changed there (s, ms, us or ns); expected one unit; convert the rows"
            )


def load(source: str, options: ReadOptions | None = None) -> Trace:
    """Read a whole trace.

    Parameters
    ----------
    source
        A path, or ``sample:NAME``.
    options
        How to read it; by default the format is recognised by its columns.

    Returns
    -------
    Trace
        The requests, and the rows that were left out.

    Raises
    ------
    InputError
        If the trace cannot be read; one line says what, where and how to mend it.
    """
    try:
        reader = Reader(source, options)
        parts = list(reader.parts())
    except InputError as fault:
        if options is None and READ_OPTIONS.search(str(fault)):
            raise InputError(f"{fault}; {CONVERT}") from None
        raise
    arrival, prompt, generate = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("arrival", "prompt", "generate")
    )
    requests = Requests(np.zeros(arrival.size), prompt, generate)
    if reader.layout.blocks:
        ids = np.concatenate([p.block_ids for p in parts if p.block_ids is not None])
        counts = np.concatenate([p.block_counts for p in parts if p.block_counts is not None])
        start = np.concatenate([[0], np.cumsum(counts)])
        blocks = ids, start, reader.layout.block_tokens
        requests = Requests(requests.arrival, prompt, generate, *blocks)
    conduct = {role: np.concatenate([p.conduct[role] for p in parts]) for role in parts[0].conduct}
    parts.clear()
    if reader.options.sort:
        order = np.argsort(arrival, kind="stable")
        arrival, requests = arrival[order] - arrival[order[0]], requests.take(order)
        conduct = {role: values[order] for role, values in conduct.items()}
    known = resolve_conduct(conduct, source)
    if requests.block_ids is not None:
        known["block_ids"] = renumbered(requests.block_ids)
    requests = replace(requests, arrival=arrival, **known)
    return Trace(requests, source, reader.layout.name, reader.left_out, reader.notes())


def renumbered(ids: Integers) -> Integers:
    """Renumber ids as 0, 1, ... in the order of their first appearance.

    Parameters
    ----------
    ids
        Any ids. (n,)

    Returns
    -------
    array
        The new ids. (n,)
    """
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    numbers = np.empty(len(first), dtype=np.int64)
    numbers[np.argsort(first)] = np.arange(len(first))
    return numbers[inverse]


def resolve_conduct(conduct: Conduct, name: str) -> dict[str, Any]:
    """Resolve the columns on turns, priority classes and aborts of a whole trace.

    Sessions and parents become indices of rows, and columns without information are dropped.

    Parameters
    ----------
    conduct
        Columns by role, as a :class:`Reader` returns them.
    name
        Name of the file, for messages.

    Returns
    -------
    dict[str, Any]
        Keyword arguments of ``Requests``.

    Raises
    ------
    InputError
        If a turn comes before the one that it follows.
    """
    found: dict[str, Any] = {}
    if "session" in conduct:
        found["parent"] = _previous_turns(conduct["session"])
    elif "parent" in conduct:
        found["parent"] = _parent_rows(conduct, name)
    if "parent" in found and (found["parent"] < 0).all():
        del found["parent"]
    if "parent" in found and conduct.get("think", np.zeros(1)).any():
        found["think"] = conduct["think"]
    if conduct.get("priority", np.zeros(1)).any():
        found["priority"] = conduct["priority"].astype(np.int64)
    if np.isfinite(conduct.get("abort_after", np.array([np.inf]))).any():
        found["abort_after"] = conduct["abort_after"]
    return found


def _previous_turns(session: Floats) -> Integers:
    """The last earlier row of the same session, or -1. (n,)"""
    parent = np.full(session.size, -1, np.int64)
    order = np.argsort(session, kind="stable")
    same = session[order][1:] == session[order][:-1]  # never for rows without a session
    parent[order[1:][same]] = order[:-1][same]
    return parent


def _parent_rows(conduct: Conduct, name: str) -> Integers:
    """The row of each one's parent, or -1 where the trace has none. (n,)"""
    own, wanted = conduct["id"], conduct["parent"]
    order = np.argsort(own, kind="stable")
    place = np.minimum(np.searchsorted(own[order], wanted), own.size - 1)
    there = own[order[place]] == wanted
    parent = np.where(there, order[place], -1)
    late = np.flatnonzero(parent >= np.arange(own.size))
    if late.size:
        raise InputError(
            f"{name}: request {late[0] + 1} follows request {parent[late[0]] + 1}, which does not "
            f"precede it in the file; put each turn after the one it follows"
        )
    return parent.astype(np.int64)


def unit_changes(raw: Floats, origin: float) -> int | None:
    """Find the row from which arrivals seem to be in another unit than before.

    Epochs of the years 2001 to 2128 in s, ms, us and ns lie a factor 1000 apart, so their size
    tells the unit. Times from 0 are taken for another unit where they jump to about 1000, 10^6 or
    10^9 times the time before and the gaps that follow grow by about as much.

    Parameters
    ----------
    raw
        Arrivals as the file has them.
    origin
        First arrival, which tells epochs from times that begin at 0.

    Returns
    -------
    int | None
        None if there is no such row.
    """
    if origin >= 1e9:
        other = np.flatnonzero(np.abs(np.log10(np.maximum(raw, 1e-9) / origin)) > 2)
        return int(other[0]) if len(other) else None
    behind, ahead = raw[3:-4], raw[4:-3]  # three gaps on either side to judge by
    with np.errstate(divide="ignore", invalid="ignore"):
        candidates = np.flatnonzero((behind > 0) & (ahead > 500 * behind)) + 4
    for row in candidates.tolist():
        gap_before = (raw[row - 1] - raw[0]) / (row - 1)
        gap_after = (raw[-1] - raw[row]) / (len(raw) - 1 - row)
        for factor in (1e3, 1e6, 1e9):
            lands = raw[row] / (factor * (raw[row - 1] + gap_before))
            if 0.8 < lands < 1.25 and factor / 3 < gap_after / max(gap_before, 1e-12) < factor * 3:
                return int(row)
    return None


def _layout(source: Source, options: ReadOptions) -> TraceFormat:
    names = column_names(source)
    if options.columns:
        if options.format:
            raise InputError("give either --columns or --format, not both")
        layout = formats.named(source.name, names, options.columns, options.time_unit or "s")
    else:
        layout = formats.choose(source.name, names, options.format)
        if options.time_unit:
            if options.time_unit not in SECONDS_PER_UNIT:
                raise unknown("time unit", options.time_unit, SECONDS_PER_UNIT)
            layout = replace(layout, unit=options.time_unit)
    if layout.name == "sharegpt":
        if not options.chars_per_token:
            raise InputError(
                f"{source.name}: holds text, not token counts; estimate them with "
                "--chars-per-token 4, or write counts with your model's tokenizer"
            )
        layout = replace(layout, chars_per_token=options.chars_per_token)
    elif options.chars_per_token:
        raise InputError(
            f"--chars-per-token: has no effect on {source.name}, which holds token counts; omit it"
        )
    if options.block_tokens and not layout.blocks:
        raise InputError(
            f"{source.name} has no prefix blocks; omit --block-tokens (of kvsim simulate: "
            "--hash-block-tokens)"
        )
    if layout.blocks:
        stated = stated_block_tokens(source)
        tokens = options.block_tokens or stated or layout.block_tokens
        if not tokens:
            raise InputError(
                f"{source.name}, column {layout.blocks!r}: tokens per prefix block are not stated; "
                "give them with --block-tokens (of kvsim simulate: --hash-block-tokens)"
            )
        layout = replace(layout, block_tokens=tokens)
    return layout


TRACE_ENDINGS = (".parquet", ".csv", ".csv.gz", ".jsonl", ".jsonl.gz")
PIECE_ROWS = 1 << 17  # requests per piece


def check_ending(path: Path, endings: tuple[str, ...] = TRACE_ENDINGS) -> None:
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
    holds = TRACE_FORMATS["mooncake"].block_tokens if kind == "jsonl" else 0
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
    """Split a trace into parts of limited size, such as a :class:`Reader` returns.

    Parameters
    ----------
    requests
        The trace.

    Yields
    ------
    TracePart
        Consecutive requests.
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
    found = {name: getattr(requests, role) for role, name in TRACE_FORMATS["kvsim"].conduct}
    return {name: column for name, column in found.items() if column is not None}


def write_parquet(
    path: Path,
    parts: Iterable[TracePart],
    block_tokens: int,
    told: Callable[[int], None] = lambda rows: None,
    further: tuple[str, ...] = (),
) -> int:
    """Write the parts of a trace to a Parquet file as they arrive.

    Parameters
    ----------
    path
        Path of the file.
    parts
        Consecutive requests; ids of prefix blocks are written unchanged.
    block_tokens
        Tokens per prefix block; 0 for none. [tokens]
    told
        Function that is called with the number of requests written so far.
    further
        Names of the columns in ``conduct`` of every part that are written.

    Returns
    -------
    int
        Number of requests.

    Raises
    ------
    InputError
        If the file cannot be written; also errors from reading the parts. Nothing is left behind.
    """
    import pyarrow as pa
    from pyarrow import parquet

    own = TRACE_FORMATS["kvsim"]
    names = [own.arrival, own.prompt, own.generate]
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
    own = TRACE_FORMATS["kvsim"]
    return ",".join([own.arrival, own.prompt, own.generate, *further]) + "\n"


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
