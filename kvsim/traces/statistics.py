"""Statistics of a trace: load, burstiness, lengths and prefix reuse."""

import numpy as np

from kvsim.frozen import frozen
from kvsim.traces.requests import Floats, Integers, Requests

PERCENTILES = (1, 5, 25, 50, 75, 90, 95, 99)
MINUTE = 60.0


@frozen
class LengthStatistics:
    """Statistics of prompt or generated lengths. [tokens]

    Attributes
    ----------
    total, mean
        Sum and mean.
    least, most
        Shortest and longest.
    percentiles
        Length by percentile, such as 50 for the median.
    """

    total: int
    mean: float
    least: int
    most: int
    percentiles: dict[int, float]


@frozen
class Reuse:
    """Hits of an infinite prefix cache on a trace.

    A block is a hit if an earlier request has it and all blocks before it in its prompt are hits.

    Attributes
    ----------
    block_tokens
        Prompt tokens per block. [tokens]
    blocks, unique
        Number of prefix blocks of all requests, and of different ones.
    hit_rate
        Share of blocks that are hits.
    token_share
        Share of prompt tokens that are in such blocks.
    request_share
        Share of requests with at least one hit.
    """

    block_tokens: int
    blocks: int
    unique: int
    hit_rate: float
    token_share: float
    request_share: float


@frozen
class Statistics:
    """Summary statistics of a trace; None if it is too short.

    Attributes
    ----------
    requests
        Requests.
    duration
        From the first arrival to the last. [s]
    rate
        Gaps between arrivals / duration. [requests/s]
    gap_cv
        Standard deviation / mean of the gaps between arrivals; 1 for a Poisson process.
    dispersion
        Variance / mean of the arrivals per whole minute; 1 for a Poisson process.
    simultaneous
        Share of requests that arrive at the same instant as the one before.
    prompt, generate
        LengthStatistics.
    correlation
        Spearman's rank correlation of prompt and generated length.
    reuse
        Prefix reuse; None without prefix blocks.
    """

    requests: int
    duration: float
    rate: float | None
    gap_cv: float | None
    dispersion: float | None
    simultaneous: float
    prompt: LengthStatistics
    generate: LengthStatistics
    correlation: float | None
    reuse: Reuse | None


def describe(requests: Requests) -> Statistics:
    """Compute the statistics of a trace.

    Parameters
    ----------
    requests
        The trace, with at least one request.

    Returns
    -------
    Statistics
        Rates, lengths, burstiness and prefix reuse.
    """
    gaps = np.diff(requests.arrival)
    moving = bool(len(gaps)) and requests.duration > 0
    return Statistics(
        requests=len(requests),
        duration=requests.duration,
        rate=len(gaps) / requests.duration if moving else None,
        gap_cv=float(gaps.std() / gaps.mean()) if moving else None,
        dispersion=dispersion(requests.arrival, MINUTE),
        simultaneous=float((gaps == 0).mean()) if len(gaps) else 0.0,
        prompt=_lengths(requests.prompt),
        generate=_lengths(requests.generate),
        correlation=rank_correlation(requests.prompt, requests.generate),
        reuse=reuse(requests),
    )


def dispersion(arrival: Floats, window: float) -> float | None:
    """Compute variance over mean of the arrivals per whole window.

    Parameters
    ----------
    arrival
        Ascending arrivals. [s]
    window
        Length of a window. [s]

    Returns
    -------
    float | None
        None for fewer than two windows.
    """
    windows = int((arrival[-1] - arrival[0]) / window)
    if windows < 2:
        return None
    counts, _ = np.histogram(arrival - arrival[0], windows, (0.0, windows * window))
    return float(counts.var() / counts.mean())


def rank_correlation(first: Integers, second: Integers) -> float | None:
    """Compute Spearman's rank correlation.

    Parameters
    ----------
    first
        Values, shape (n,).
    second
        Values, shape (n,).

    Returns
    -------
    float | None
        None if either never varies.
    """
    if len(first) < 2 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(np.corrcoef(ranks(first), ranks(second))[0, 1])


def ranks(values: Integers | Floats) -> Floats:
    """Rank values from 1; equal values get their mean rank.

    Parameters
    ----------
    values
        Values. (n,)

    Returns
    -------
    array
        Ranks. (n,)
    """
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    highest = np.cumsum(counts)
    shared: Floats = (highest - (counts - 1) / 2)[inverse]
    return shared


def leading_hits(requests: Requests) -> Integers:
    """Count the blocks of each request that an infinite prefix cache would have.

    Parameters
    ----------
    requests
        The trace.

    Returns
    -------
    Integers
        Blocks, shape (n,).
    """
    ids, start = requests.block_ids, requests.block_start
    if ids is None or start is None:
        return np.zeros(len(requests), dtype=np.int64)
    fresh = np.zeros(len(ids) + 1, dtype=np.int64)
    fresh[np.unique(ids, return_index=True)[1] + 1] = 1
    misses = np.cumsum(fresh)  # fresh blocks before each place
    owner = np.repeat(np.arange(len(requests)), np.diff(start))
    leading = misses[1:] == misses[start[:-1]][owner]
    return np.bincount(owner[leading], minlength=len(requests)).astype(np.int64)


def reuse(requests: Requests) -> Reuse | None:
    """Compute the prefix reuse of a trace with an infinite cache.

    Parameters
    ----------
    requests
        The trace.

    Returns
    -------
    Reuse | None
        None without prefix blocks.
    """
    if requests.block_ids is None or not len(requests.block_ids):
        return None
    hits = leading_hits(requests)
    tokens = np.minimum(hits * requests.block_tokens, requests.prompt)
    return Reuse(
        block_tokens=requests.block_tokens,
        blocks=len(requests.block_ids),
        unique=len(np.unique(requests.block_ids)),
        hit_rate=float(hits.sum() / len(requests.block_ids)),
        token_share=float(tokens.sum() / requests.prompt.sum()),
        request_share=float((hits > 0).mean()),
    )


def _lengths(tokens: Integers) -> LengthStatistics:
    marks = np.percentile(tokens, PERCENTILES)
    return LengthStatistics(
        total=int(tokens.sum()),
        mean=float(tokens.mean()),
        least=int(tokens.min()),
        most=int(tokens.max()),
        percentiles=dict(zip(PERCENTILES, marks.tolist(), strict=True)),
    )
