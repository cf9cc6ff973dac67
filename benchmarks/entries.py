"""Rows of a benchmark as one line of the ledger."""

from typing import Final

import numpy as np

from kvsim.evidence.ledger import LedgerEntry
from kvsim.graph import Array

MIN_SPREAD_ROWS = 3  # rows below which a spread says little
PLACES: Final = "hazen"
"""Where n sorted rows stand among the quantiles: in the middle of n equal shares, as in
``weighted_range``. NumPy's default puts the first and the last at the very ends, as if no further
row could lie beyond them: of eight rows, 62 % of the next ones would lie within its 80 %. Weibull's
places held 85 % of all runs and were wider. Lines of kernels and papers in the ledger still have
NumPy's quantiles, until their fits are run again."""


def entry_of(predicted: Array, measured: Array, *, tail: float = 0.1, **fields: str) -> LedgerEntry:
    """Summarise rows that no fit saw as one line of the ledger.

    Parameters
    ----------
    predicted, measured
        One value per row, both in the same unit.
    tail
        Share of the rows below and above the interval.
    **fields
        What the rows are of, as in ``LedgerEntry``: ``engine``, ``version``, ``kind``, ``device``,
        ``technique``, ``held_out`` and ``source``; if known, ``load``, ``weights``, ``experts``,
        ``gpus`` and ``model``.

    Returns
    -------
    LedgerEntry
        The entry, its figures rounded to four digits.
    """
    off, ratio = np.abs(predicted / measured - 1), measured / predicted
    ends = np.quantile(ratio, (tail, 1 - tail, 0.5), method=PLACES)
    figures = [*np.quantile(off, (0.5, 0.9)), *ends]
    median, p90, low, high, middle = (float(f"{x:.4g}") for x in figures)
    return LedgerEntry(
        rows=int(off.size), median=median, p90=p90, low=low, high=high, middle=middle, **fields
    )
