"""Traces drawn from the metrics of a vLLM or SGLang server, and requests read from its logs.

Read are answers of Prometheus' HTTP API to a range query (`/api/v1/query_range`, resultType matrix)
and texts of an engine's `/metrics`, taken one after another. A request counts when it has finished;
the trace's arrivals are earlier by what it took, which the histograms do not tell.
"""

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import numpy as np

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.traces import synthetic
from kvsim.traces.requests import LONGEST_REQUEST, Floats, Integers, Requests
from kvsim.traces.synthetic import Lengths

METRIC_LINE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+([^\s]+)(?:\s+-?\d+)?")
LABEL = re.compile(r'(?<![a-zA-Z0-9_])([a-zA-Z_][a-zA-Z0-9_]*+)="((?:[^"\\]|\\.)*+)"')
MAX_LINE_CHARS = 10_000  # characters of a line
MOST_LENGTH = 1e9  # upper bound of a bucket [tokens]
MOST_COUNTED = 1e15  # of a counter, and seconds of a clock
DRAWN_BLOCK = 16  # tokens of the prefix blocks that are drawn
DEPTH = 0.5  # of a prompt that is used again, where it is used again
DISTANCE = 20.0  # requests since the prefix was seen
MAX_COUNTED_REQUESTS = 10**8
TILTS = (0.02, 50.0)


@frozen
class EngineMetrics:
    """Names of an engine's Prometheus metrics.

    Attributes
    ----------
    prompt, generate
        Histograms of prompt and generated lengths, without the suffix ``_bucket``.
    hits, queries
        Names that the counters of prefix-cache hits and look-ups may have; the first one that
        exists is used.
    """

    prompt: str
    generate: str
    hits: tuple[str, ...]
    queries: tuple[str, ...]


METRICS_BY_ENGINE = {
    "vllm": EngineMetrics(
        "vllm:request_prompt_tokens",
        "vllm:request_generation_tokens",
        ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_hits"),
        ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_queries"),
    ),
    "sglang": EngineMetrics(
        "sglang:prompt_tokens_histogram",
        "sglang:generation_tokens_histogram",
        ("sglang:cached_tokens_total",),
        ("sglang:prompt_tokens_total",),
    ),
}

Series = tuple[str, Mapping[str, str], Floats, Floats]
"""A name, its labels, times [s] and values."""


@frozen
class LengthHistogram:
    """Lengths of requests, counted between consecutive scrapes of an engine's metrics.

    Attributes
    ----------
    times
        Times of the scrapes. (t + 1,) [s]
    edges
        Upper bounds of the buckets; the last one is infinite. (b,) [tokens]
    counts
        Number of requests by interval between scrapes and by bucket. (t, b)
    total
        Sum of all lengths; 0 if it is not known. [tokens]
    """

    times: Floats
    edges: Floats
    counts: Floats
    total: float


def read_matrix(document: Any, where: str) -> list[Series]:
    """Read the time series of a Prometheus range query.

    Parameters
    ----------
    document
        Parsed JSON answer of ``/api/v1/query_range``.
    where
        Name of the file in messages.

    Returns
    -------
    list of Series
        Name, labels, times and values of each series.

    Raises
    ------
    InputError
        If it is not such an answer.
    """
    try:
        if document["data"]["resultType"] != "matrix":
            raise ValueError
        found: list[Series] = []
        for entry in document["data"]["result"]:
            labels = {str(k): str(v) for k, v in entry["metric"].items()}
            values = np.array([(float(t), float(v)) for t, v in entry["values"]], float)
            found.append((labels.pop("__name__", ""), labels, values[:, 0], values[:, 1]))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        raise InputError(
            f"{where}: no answer of a range query (/api/v1/query_range); expected a matrix in data"
        ) from None
    return found


def read_scrapes(texts: list[str], where: list[str], every: float) -> list[Series]:
    """Read the time series of several scrapes of ``/metrics`` that were taken at equal intervals.

    Parameters
    ----------
    texts
        Texts of the scrapes in order.
    where
        Name of each text in messages.
    every
        Interval between two scrapes. [s]

    Returns
    -------
    list of Series
        Name, labels, times and values of each series.

    Raises
    ------
    InputError
        If a line is not in Prometheus' text format.
    """
    values: dict[tuple[str, tuple[tuple[str, str], ...]], dict[int, float]] = {}
    for i, (text, place) in enumerate(zip(texts, where, strict=True)):
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            found = METRIC_LINE.fullmatch(line.strip()) if len(line) <= MAX_LINE_CHARS else None
            try:
                value = float(found[3]) if found else float("nan")
            except ValueError:
                found = None
            if not found:
                raise InputError(f"{place}, line {number}: no metric; expected NAME{{..}} VALUE")
            labels = tuple(sorted(LABEL.findall(found[2] or "")))
            values.setdefault((found[1], labels), {})[i] = value
    return [
        (
            name,
            dict(labels),
            np.array(sorted(at), float) * every,
            np.array([at[i] for i in sorted(at)]),
        )
        for (name, labels), at in values.items()
    ]


def draw_requests(series: list[Series], where: str, seed: int) -> tuple[Requests, list[str]]:
    """Draw a trace that agrees with the metrics of a vLLM or SGLang server.

    Parameters
    ----------
    series
        Time series of the engine's metrics.
    where
        Name of the file in messages.
    seed
        Seed of the random numbers.

    Returns
    -------
    tuple of Requests and list of str
        The trace, and remarks on properties that the metrics do not contain.

    Raises
    ------
    InputError
        If there are no histograms of lengths, or no request was counted.
    """
    engine = next(
        (e for e in METRICS_BY_ENGINE.values() if _named_series(series, f"{e.prompt}_bucket")), None
    )
    if engine is None:
        names = " or ".join(f"{e.prompt}_bucket" for e in METRICS_BY_ENGINE.values())
        raise InputError(f"{where}: no histogram of prompts; expected {names}")
    both = (engine.prompt, engine.generate)
    used = [f"{name}_{part}" for name in both for part in ("bucket", "sum")]
    used += [*engine.hits, *engine.queries]
    _check_counted([one for one in series if one[0] in used], where)
    grid = _looks(series, both, where)
    prompt, generate = (_histogram(series, name, grid, where) for name in both)
    each = np.rint(np.diff(np.cumsum(prompt.counts.sum(axis=1)), prepend=0.0)).astype(np.int64)
    count = int(each.sum())
    if not 0 < count <= MAX_COUNTED_REQUESTS:
        raise InputError(
            f"{where}: {count:,} requests finished between the first sample and the last; expected "
            f"1 to {MAX_COUNTED_REQUESTS:,}"
        )
    random = np.random.default_rng(seed)
    start = np.repeat(prompt.times[:-1], each)
    arrival = np.sort(start + random.random(count) * np.repeat(np.diff(prompt.times), each))
    lengths = [_lengths(h, each, random) for h in (prompt, generate)]
    hits, queries = (_counted(series, names) for names in (engine.hits, engine.queries))
    share = min(hits / queries, 1.0) if queries else 0.0
    notes = [
        "requests are counted when they finish; arrivals are drawn at those times",
        "prompt and generated lengths are drawn independently, as histograms are separate",
    ]
    if share <= 0:
        return Requests(arrival - arrival[0], lengths[0], lengths[1]), notes
    depth = max(share, DEPTH)
    drawn_prefixes = synthetic.reuse(DRAWN_BLOCK, share / depth, depth, DISTANCE)
    ids, begin = drawn_prefixes.draw(random, lengths[0])
    notes.append(f"prefixes: {share:.1%} of prompt tokens were hits; which ones is not known")
    return Requests(arrival - arrival[0], lengths[0], lengths[1], ids, begin, DRAWN_BLOCK), notes


def _named_series(series: list[Series], name: str) -> list[Series]:
    return [s for s in series if s[0] == name]


def _increments(times: Floats, values: Floats, grid: Floats) -> Floats:
    """Increments of a counter between the times of a grid; a restart resets it to 0."""
    grown = np.diff(values, prepend=values[:1])
    grown = np.where(grown < 0, values, grown)
    total = np.interp(grid, times, np.cumsum(grown))
    return np.asarray(np.diff(total))


def _check_counted(series: list[Series], where: str) -> None:
    """Refuse timestamps that do not increase and values that are not counts."""
    for name, _, times, values in series:
        sound = (values >= 0) & (values <= MOST_COUNTED)
        rising = (np.diff(times) > 0).all() and (np.abs(times) <= MOST_COUNTED).all()
        if not (sound.all() and rising):
            raise InputError(
                f"{where}: {name} has times that do not increase, or values that are not "
                f"counts; expected a counter, which starts at 0 or above"
            )


def _looks(series: list[Series], names: tuple[str, ...], where: str) -> Floats:
    """Times at which any of the histograms was scraped. [s]"""
    found = [times for name in names for _, _, times, _ in _named_series(series, f"{name}_bucket")]
    grid = np.unique(np.concatenate(found))
    if len(grid) < 2:
        raise InputError(
            f"{where}: only one sample of the metrics; expected a range query, or several texts"
        )
    return np.asarray(grid)


def _histogram(series: list[Series], name: str, grid: Floats, where: str) -> LengthHistogram:
    """A histogram over time, summed over all instances."""
    found = _named_series(series, f"{name}_bucket")
    if not found:
        raise InputError(f"{where}: {name}_bucket is missing; query it too")
    by_edge: dict[float, Floats] = {}
    for _, labels, times, values in found:
        try:
            edge = float(labels["le"].replace("+Inf", "inf"))
        except (KeyError, ValueError):
            edge = float("nan")
        if not (0 <= edge <= MOST_LENGTH or edge == float("inf")):
            raise InputError(f"{where}: label le of {name}_bucket is not a number of tokens")
        grown = _increments(times, values, grid)
        by_edge[edge] = by_edge.get(edge, np.zeros(len(grid) - 1)) + grown
    edges = np.array(sorted(by_edge))
    cumulative = np.maximum.accumulate(np.stack([by_edge[e] for e in edges], axis=1), axis=1)
    counts = np.diff(cumulative, axis=1, prepend=0.0)
    if not counts.sum():
        raise InputError(f"{where}: {name}_bucket counts no request; query a time with traffic")
    return LengthHistogram(grid, edges, counts, _counted(series, (f"{name}_sum",)))


def _counted(series: list[Series], names: tuple[str, ...]) -> float:
    """Growth of the counter that has one of the names."""
    for name in names:
        found = _named_series(series, name)
        if found:
            ends = (np.array([times[0], times[-1]]) for _, _, times, _ in found)
            return float(
                sum(_increments(t, v, e)[0] for (_, _, t, v), e in zip(found, ends, strict=True))
            )
    return 0.0


def _lengths(h: LengthHistogram, each: Integers, random: np.random.Generator) -> Integers:
    """Lengths of each step's requests in its histogram's proportions, with the known mean."""
    lower = np.maximum(np.concatenate([[0.0], h.edges[:-1]]) + 1, 1)
    upper = np.where(np.isfinite(h.edges), h.edges, 2 * lower)
    buckets = []
    for step, count in enumerate(each):
        shares = h.counts[step] if h.counts[step].sum() > 0 else h.counts.sum(axis=0)
        upto = np.cumsum(shares) / shares.sum()
        evenly = (np.arange(count) + random.random()) / max(count, 1)
        found = np.searchsorted(upto, evenly % 1.0, side="left")
        buckets.append(random.permutation(np.minimum(found, len(upper) - 1)))
    bucket = np.concatenate(buckets)
    within = random.random(bucket.size)
    low, high = lower[bucket], np.maximum(upper[bucket], lower[bucket])

    def tilted(power: float) -> Floats:
        return np.asarray(low * (high / low) ** (within**power))

    mean = h.total / h.counts.sum() if h.total and h.counts.sum() else 0.0
    first, last = TILTS
    while mean and last / first > 1.001:  # a larger power makes requests shorter
        middle = (first * last) ** 0.5
        if tilted(middle).mean() > mean:
            first = middle
        else:
            last = middle
    power = (first * last) ** 0.5 if mean else 1.0
    return np.maximum(np.rint(tilted(power)), 1).astype(np.int64)


PROMPT_KEYS = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
GENERATE_KEYS = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
ACCESS = re.compile(
    r"\S++ \S++ [^\[]*+\[(?P<time>[^\]]{1,64}+)\] "
    r'"(?P<method>[A-Z]{1,20}+) (?P<path>[^\s"]++)[^"]*+" (?P<status>\d{3}) '
)
SERVED = re.compile(r"completions|generate|messages|responses")
CLOCK = "%d/%b/%Y:%H:%M:%S %z"


def read_spans(documents: list[object], where: str) -> tuple[Requests, list[str]]:
    """Read requests from OpenTelemetry spans that have token counts.

    Parameters
    ----------
    documents
        Parsed files in the JSON encoding of OTLP.
    where
        Name of the files in messages.

    Returns
    -------
    tuple of Requests and list of str
        The trace, and remarks on spans that were left out.

    Raises
    ------
    InputError
        If no span has token counts.
    """
    rows = []
    left_out = 0
    for document in documents:
        for span in _spans(document):
            found = _attributes(span)
            prompt, generate = (
                next((found[k] for k in keys if k in found), None)
                for keys in (PROMPT_KEYS, GENERATE_KEYS)
            )
            try:
                if prompt is None or generate is None:
                    continue
                row = (int(span["startTimeUnixNano"]) * 1e-9, int(prompt), int(generate))
            except (KeyError, OverflowError, TypeError, ValueError):
                left_out += 1
                continue
            if all(1 <= tokens <= LONGEST_REQUEST for tokens in row[1:]):
                rows.append(row)
            else:
                left_out += 1
    if not rows:
        raise InputError(
            f"{where}: no span with {PROMPT_KEYS[0]} and {GENERATE_KEYS[0]}; is tracing on?"
        )
    rows.sort()
    arrival = np.array([row[0] for row in rows])
    prompt_tokens, generated = (np.array([row[i] for row in rows], np.int64) for i in (1, 2))
    notes = [f"{left_out:,} spans without a start or tokens were omitted"] if left_out else []
    return Requests(arrival - arrival[0], prompt_tokens, generated), notes


def _spans(document: object) -> Iterator[dict[str, Any]]:
    """Every span of an OTLP document; missing parts are skipped."""
    if not isinstance(document, dict):
        return
    for resource in document.get("resourceSpans") or []:
        for scope in (resource or {}).get("scopeSpans") or []:
            yield from (s for s in (scope or {}).get("spans") or [] if isinstance(s, dict))


def _attributes(span: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for entry in span.get("attributes") or []:
        if isinstance(entry, dict) and isinstance(entry.get("value"), dict):
            found[str(entry.get("key"))] = next(iter(entry["value"].values()), None)
    return found


def read_access_log(
    lines: Iterator[str], lengths: Lengths, where: str, seed: int
) -> tuple[Requests, list[str]]:
    """Read arrival times from an access log in the common or combined log format, and draw lengths.

    Parameters
    ----------
    lines
        Lines of the log.
    lengths
        Joint distribution of prompt and generated lengths. [tokens]
    where
        Name of the log in messages.
    seed
        Seed of the random numbers.

    Returns
    -------
    tuple of Requests and list of str
        The trace, and remarks on lines that were left out.

    Raises
    ------
    InputError
        If no line is a successful POST to a completions endpoint.
    """
    times, skipped = [], 0
    for line in lines:
        found = ACCESS.match(line)
        try:
            when = datetime.strptime(found["time"], CLOCK).timestamp() if found else None
        except ValueError:
            when = None
        if found is None or when is None:
            skipped += bool(line.strip())
        elif (
            found["method"] == "POST" and found["status"][0] == "2" and SERVED.search(found["path"])
        ):
            times.append(when)
    if not times:
        raise InputError(
            f"{where}: no answered POST to a completions endpoint in the common log format; "
            f"check the file"
        )
    arrival = np.sort(np.array(times))
    prompt, generate = lengths.draw(np.random.default_rng(seed), len(arrival))
    notes = [f"lengths are drawn from --lengths: {where} has arrivals only"]
    if skipped:
        notes.append(f"{skipped:,} lines of another format were omitted")
    return Requests(arrival - arrival[0], prompt, generate), notes
