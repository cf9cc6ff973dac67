"""Logs of serving runs as the tools that measure them write them.

Read are results of ``vllm bench serve``, of SGLang's ``bench_serving`` and of TensorRT-LLM's
``benchmark_serving`` with their details, files of ``kvsim simulate --out``, and JSON lines with one
request each. docs/logs.md shows an example of every one.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TypeGuard, cast

import numpy as np

from kvsim.errors import InputError
from kvsim.files import RESULT, RUN_LOG, check_input, open_input, parse_json, read_text
from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.traces.requests import Requests

LOG_FIELDS = {
    "arrival": ("arrival_time", "arrival_s", "arrival"),
    "queued": ("queued_ts", "queued_s"),
    "first": ("first_token_ts", "first_token_s", "first_token_time"),
    "last": ("last_token_ts", "last_token_s", "last_token_time"),
    "prompt": ("input_toks", "prompt_tokens", "input_length"),
    "generate": ("output_toks", "generate_tokens", "output_length"),
}
DETAILS = ("input_lens", "output_lens", "ttfts", "itls")
"""Lists of a benchmark's result, one entry per request."""
ASK = "save them: vllm --save-result --save-detailed, sglang --output-details, trtllm --save-result"
PARQUET = b"PAR1"
MAX_LOG_NUMBER = 1e15  # of any number in a log; seconds on some clock, tokens


@frozen
class MeasuredRun:
    """A measured run: requests in order of arrival, and when their tokens came.

    Attributes
    ----------
    requests
        The requests that finished. (n,)
    first
        Arrival of the first token, from the start of the trace. (n,) [s]
    last
        Arrival of the last token, from the start of the trace. (n,) [s]
    left_out
        Requests that failed or did not finish.
    model
        Name of the model in the log.
    """

    requests: Requests
    first: Array
    last: Array
    left_out: int = 0
    model: str = ""


@frozen
class _Log:
    """What a reader found, on one clock and in the file's order."""

    arrival: Array  # [s]
    prompt: Array  # [tokens]
    generate: Array  # [tokens]
    first: Array  # [s]
    last: Array  # [s]
    where: Sequence[str]  # of each request, for messages
    left_out: int = 0
    model: str = ""


def read_run(path: Path) -> MeasuredRun:
    """Read the log of a serving run in any of the known formats.

    Parameters
    ----------
    path
        A benchmark's result, JSON lines of requests, or the Parquet file of ``kvsim simulate``.

    Returns
    -------
    MeasuredRun
        Requests in order of arrival; the first one arrives at 0 s.

    Raises
    ------
    InputError
        Naming the place and field that is missing, not a number, or out of order.
    """
    with open_input(path, RUN_LOG) as file:
        is_parquet = file.read(len(PARQUET)) == PARQUET
    log = _simulated(path) if is_parquet else _from_text(path)
    if not len(log.arrival):
        raise InputError(f"{path}: no finished requests; expected at least one")
    order = np.argsort(log.arrival, kind="stable")
    begin = log.arrival[order[0]]
    early = np.flatnonzero((log.first <= log.arrival) | (log.last < log.first))
    if early.size:
        raise InputError(
            f"{path}, {log.where[early[0]]}: first_token_ts before arrival or after "
            f"last_token_ts; expected arrival < first token <= last token, on one clock"
        )
    prompt, generate = (tokens[order].astype(np.int64) for tokens in (log.prompt, log.generate))
    requests = Requests(log.arrival[order] - begin, prompt, generate)
    first, last = log.first[order] - begin, log.last[order] - begin
    return MeasuredRun(requests, first, last, log.left_out, log.model)


def _from_text(path: Path) -> _Log:
    if path.suffix == ".csv":
        raise InputError(
            f"{path}: expected a log with times of individual requests; a table of runs as CSV "
            f"goes to kvsim reproduce"
        )
    objects = list(_objects(path))
    if not objects:
        raise InputError(f"{path}: no requests; expected a benchmark's result or JSON lines")
    if _is_result(objects[0][1]):
        if len(objects) > 1:
            raise InputError(
                f"{path}: results of {len(objects)} runs; expected one, keep the line of one run"
            )
        return _result(path, objects[0][1])
    return _requests(path, objects)


def _objects(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """Objects and their lines; one that is printed over many lines is a benchmark's result."""
    text, expected = read_text(path, RUN_LOG), "a benchmark's result or one JSON object per line"
    lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if lines and lines[0][1].rstrip() == "{":
        lines = [(1, text)]
    for number, line in lines:
        where = f"{path}, line {number}"
        found = parse_json(line, where, expected)
        if not isinstance(found, dict):
            raise InputError(f"{where}: {type(found).__name__}; expected {expected}")
        yield number, found


# results of benchmarks


def _is_result(found: Mapping[str, object]) -> bool:
    return any(name in found for name in (*DETAILS, "mean_ttft_ms", "request_throughput"))


def _result(path: Path, found: Mapping[str, object]) -> _Log:
    """One object of lists, as all three benchmarks write it."""
    lists = {name: _list(path, found, name) for name in DETAILS}
    count = len(lists["ttfts"])
    errors = _list(path, found, "errors") if found.get("errors") else [""] * count
    starts: list[object] | None = None
    sizes = {name: len(values) for name, values in lists.items()} | {"errors": len(errors)}
    if found.get("start_times") is not None:
        starts = _list(path, found, "start_times")
        sizes["start_times"] = len(starts)
    if len(set(sizes.values())) > 1:
        said = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise InputError(
            f"{path}: lists of unequal length ({said}); expected one entry per request"
        )
    where, served, rows = [], [], []
    for i in range(count):
        at = f"request {i + 1}"
        prompt, generate, ttft = (
            _number(path, f"{at}, {name}", lists[name][i]) for name in DETAILS[:3]
        )
        if ttft < 0:
            raise InputError(f"{path}, {at}, ttfts: got {ttft:g}; expected seconds, not below 0")
        if errors[i] or generate < 1 or not ttft:
            continue
        if prompt < 1 or prompt % 1 or generate % 1:
            raise InputError(
                f"{path}, {at}: got {prompt:g} tokens in, {generate:g} out; expected whole numbers "
                f"from 1"
            )
        gaps = lists["itls"][i]
        if not isinstance(gaps, list):
            raise InputError(f"{path}, {at}, itls: got {str(gaps)[:40]!r}; expected a list of gaps")
        numbers = [_number(path, f"{at}, itls", gap) for gap in gaps]
        if min(numbers, default=0.0) < 0:
            raise InputError(
                f"{path}, {at}, itls: got {min(numbers):g}; expected seconds, not below 0"
            )
        rows.append((prompt, generate, ttft, sum(numbers)))
        where.append(at)
        served.append(i)
    prompts, generated, ttfts, rests = np.array(rows, float).reshape(-1, 4).T
    if starts is not None:
        start = np.array([_number(path, "start_times", starts[i]) for i in served], float)
    else:
        start = _starts(path, found, ttfts + rests)
    first = start + ttfts
    model = found.get("model_id") or found.get("model") or found.get("tokenizer_id") or ""
    model, failed = model if isinstance(model, str) else "", count - len(served)
    return _Log(start, prompts, generated, first, first + rests, where, failed, model)


def _starts(path: Path, found: Mapping[str, object], took: Array) -> Array:
    """When requests began that a result does not time: all at once, or as others ended.

    Without a rate a benchmark sends everything at once, or keeps ``max_concurrency`` requests
    running: each of the others begins when one ends.
    """
    rate = found.get("request_rate", "inf")
    if isinstance(rate, int | float) and isfinite(rate):
        raise InputError(
            f"{path}: {rate:g} requests a second, but no start_times; measure with a version that "
            f"saves them (vLLM 0.11 or newer), or with an infinite rate"
        )
    most = found.get("max_concurrency") or len(took)
    most = int(_number(path, "max_concurrency", most))
    ends: list[float] = []
    starts = []
    for each in took:
        start = heapq.heappop(ends) if len(ends) >= max(most, 1) else 0.0
        starts.append(start)
        heapq.heappush(ends, start + float(each))
    return np.array(starts)


def _list(path: Path, found: Mapping[str, object], name: str) -> list[object]:
    values = found.get(name)
    if not isinstance(values, list):
        raise InputError(f"{path}: no list {name}, so no times of individual requests; {ASK}")
    return values


def _number(path: Path, where: str, value: object) -> float:
    if not _is_number(value):
        raise InputError(f"{path}, {where}: got {str(value)[:40]!r}; expected a number")
    return float(value)


def _is_number(value: object) -> TypeGuard[float]:
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and abs(cast(float, value)) <= MAX_LOG_NUMBER


# kvsim's own


def _simulated(path: Path) -> _Log:
    """What ``kvsim simulate --out`` wrote: requests that did not finish are left out."""
    from pyarrow import ArrowException
    from pyarrow.parquet import read_table

    names = ("arrival_s", "prompt_tokens", "generate_tokens", "first_token_s", "last_token_s")
    try:
        table = read_table(check_input(path, RESULT), columns=[*names, "status"])
        finished = np.array([status == "finished" for status in table["status"].to_pylist()], bool)
        columns = [np.asarray(table[name].cast("float64").to_numpy())[finished] for name in names]
    except InputError:
        raise
    except (ArrowException, OSError, KeyError, ValueError, IndexError):
        listed = ", ".join((*names, "status"))
        raise InputError(f"{path}: no file of kvsim simulate --out; expected {listed}") from None
    arrival, prompt, generate, first, last = columns
    rows = [f"row {n + 1}" for n in np.flatnonzero(finished)]
    for name, values in zip(names, columns, strict=True):
        least = 1 if "tokens" in name else -MAX_LOG_NUMBER
        for row in np.flatnonzero(~((values >= least) & (values <= MAX_LOG_NUMBER)))[:1]:
            raise InputError(f"{path}, {rows[row]}, {name}: got {values[row]:g}; expected a number")
    return _Log(arrival, prompt, generate, first, last, rows, int((~finished).sum()))


# one request per line


def _requests(path: Path, objects: Sequence[tuple[int, dict[str, object]]]) -> _Log:
    """Requests with their times.

    Arrivals may be on another clock than the tokens if ``queued_ts`` is there: the clocks are set
    so that no request is queued before it arrives.
    """
    where = [f"line {number}" for number, _ in objects]
    rows = [_row(f"{path}, line {number}", found) for number, found in objects]
    table = {name: np.array([row[name] for row in rows]) for name in LOG_FIELDS}
    arrival = table["arrival"]
    if np.isfinite(table["queued"]).all():
        arrival = arrival + (table["queued"] - arrival).min()
    times = table["first"], table["last"]
    return _Log(arrival, table["prompt"], table["generate"], *times, where)


def _row(where: str, found: Mapping[str, object]) -> dict[str, float]:
    row = {}
    for role, names in LOG_FIELDS.items():
        value = next((found[name] for name in names if name in found), None)
        if value is None and role == "queued":
            row[role] = np.nan
            continue
        if not _is_number(value):
            got = str(value)[:40]
            raise InputError(f"{where}, {names[0]}: got {got!r}; expected a number ({role})")
        if role in ("prompt", "generate") and not (value >= 1 and value == int(value)):
            raise InputError(f"{where}, {names[0]}: got {value!r}; expected whole tokens from 1")
        row[role] = float(value)
    return row
