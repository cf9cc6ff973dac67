"""Lines of the shipped ledger from published tables: errors on rows that no stack was fitted to."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from benchmarks.entries import MIN_SPREAD_ROWS, entry_of
from kvsim.evidence.leastsquares import Fit, Parameter, fit_ratio
from kvsim.evidence.ledger import LedgerEntry
from kvsim.evidence.predicted import PublishedRow, predict
from kvsim.evidence.published import METRIC_KINDS, mechanisms, summarise
from kvsim.graph import Array
from kvsim.machines.hardware import Stack
from kvsim.machines.profiles import load_stack, number_of

WEIGHT = 3.0  # models and prompts that the other tables together count for
NO_TABLES = 0.1**2  # mean squared error where no other table was measured
RATES = {"decode_tok_s", "speedup"}  # larger is faster: turned into times
TINY = 1e-300


Cells = dict[tuple[str, int], Array]  # logarithms of measured over predicted by model and prompt
Tables = dict[tuple[str, str, str, str], Cells]  # by stack, card, technique and kind


def entries(pairs: Iterable[tuple[PublishedRow, float]]) -> list[LedgerEntry]:
    """Errors by stack, card, technique and kind, of rows with use ``check``.

    Parameters
    ----------
    pairs : rows with their predictions.
    """
    tables, found = _tables(pairs), []
    for key, cells in tables.items():
        stack, device, technique, kind = key
        ratio = np.exp(np.concatenate(list(cells.values())))
        if ratio.size < MIN_SPREAD_ROWS:
            continue
        entry = entry_of(
            1 / ratio, np.ones(ratio.size), engine=stack, version="", kind=kind, device=device,
            technique=technique, held_out="row", source="published tables",
        )  # fmt: skip
        low, high = (float(f"{x:.4g}") for x in interval(cells, _usual(tables, key)))
        found.append(replace(entry, low=low, high=high))
    return found


def _tables(pairs: Iterable[tuple[PublishedRow, float]]) -> Tables:
    rows: dict[tuple[str, str, str, str], dict[tuple[str, int], list[float]]] = {}
    for row, predicted in pairs:
        if row.use == "check" and row.metric in METRIC_KINDS:
            key = (row.stack, row.hardware, row.technique, METRIC_KINDS[row.metric])
            power = -1.0 if row.metric in RATES else 1.0
            cells = rows.setdefault(key, {})
            cells.setdefault((row.model, row.prompt), []).append(
                power * float(np.log(row.published / predicted))
            )
    return {k: {c: np.array(x) for c, x in cells.items()} for k, cells in rows.items()}


def _usual(tables: Tables, key: tuple[str, str, str, str]) -> float:
    """Mean squared error of the other stacks' tables of that kind, each counting alike."""
    others = [cells for k, cells in tables.items() if k[0] != key[0] and k[3] == key[3]]
    return float(np.mean([_square(cells, 0.0) for cells in others])) if others else NO_TABLES


def _square(cells: Cells, centre: float) -> float:
    return float(np.mean([np.mean((x - centre) ** 2) for x in cells.values()]))


def interval(cells: Cells, usual: float) -> tuple[float, float]:
    """Factors on a prediction that hold 80 % of rows like those of a table.

    Rows of one model and prompt are one observation. Few of them say little of the spread, which is
    therefore drawn towards that of the other tables, and Student's distribution widens it.

    Parameters
    ----------
    usual : mean squared logarithm of the other tables.
    """
    from scipy.stats import t as student

    count = len(cells)
    centre = sum(float(x.mean()) for x in cells.values()) / (count + WEIGHT)
    spread = (WEIGHT * usual + count * _square(cells, centre)) / (WEIGHT + count)
    new = spread * (1 + 1 / (count + WEIGHT))
    half = float(student.ppf(0.9, WEIGHT + count)) * float(np.sqrt(new))
    return float(np.exp(centre - half)), float(np.exp(centre + half))


def coverage(pairs: Iterable[tuple[PublishedRow, float]]) -> tuple[float, float]:
    """Share of rows within the interval from the other models and prompts of their table.

    Tables count alike; then the share that tenth and ninetieth percentiles hold.
    """
    tables = _tables(pairs)
    held: list[tuple[float, float]] = []
    for key, cells in tables.items():
        inside, plain = [], []
        for left in cells if len(cells) > 1 else ():
            others = {c: x for c, x in cells.items() if c != left}
            low, high = np.log(interval(others, _usual(tables, key)))
            inside += list((low <= cells[left]) & (cells[left] <= high))
            low, high = np.quantile(np.concatenate(list(others.values())), (0.1, 0.9))
            plain += list((low <= cells[left]) & (cells[left] <= high))
        if inside:
            held.append((float(np.mean(inside)), float(np.mean(plain))))
    return tuple(np.mean(held, axis=0)) if held else (float("nan"), float("nan"))


def refitted(
    rows: Iterable[PublishedRow],
) -> dict[tuple[str, str], tuple[int, float, float]]:
    """Rows, mean and worst error where no row of their mechanism was fitted to.

    Each stack's free numbers are fitted again to its rows without those of one range of contexts,
    one way of grouping heads or one technique; what the rows left do not tell is as in the stack
    that it extends. Anomalies are left out on both sides.
    """
    groups: dict[tuple[str, str], list[float]] = {}
    stacks: dict[str, list[PublishedRow]] = {}
    for row in rows:
        if row.use != "anomaly" and row.metric in METRIC_KINDS:
            stacks.setdefault(row.stack, []).append(row)
    for name, own in stacks.items():
        stack = load_stack(name)
        for which in sorted({key for row in own for key in mechanisms(row)}) if stack.free else ():
            out = [row for row in own if which in mechanisms(row)]
            kept = [replace(row, use="fit") for row in own if which not in mechanisms(row)]
            if len(kept) <= len(stack.free):
                continue
            numbers = fit_told_numbers(kept, stack)
            off = [abs(predict(row, numbers) / row.published - 1) for row in out]
            groups.setdefault(which, []).extend(off)
    return summarise(groups)


def fit_told_numbers(rows: list[PublishedRow], stack: Stack) -> dict[str, float]:
    """A stack's numbers by some rows; those that they do not tell are the base's."""
    base, others = load_stack(stack.extends or stack.name), dict[str, float]()
    free = dict(stack.free)
    while free:
        fit = fit_stack(rows, replace(stack, free=free), others)
        if not fit.unknown:
            return {**others, **fit.values}
        worst = max(fit.unknown, key=lambda k: fit.errors[k] / max(abs(fit.values[k]), TINY))
        others[worst] = number_of(base, worst)
        del free[worst]
    return others


def fit_stack(
    rows: Iterable[PublishedRow], stack: Stack, others: Mapping[str, float] | None = None
) -> Fit:
    """Fit a stack's free numbers to its rows of use ``fit``.

    Parameters
    ----------
    rows
        Published rows; those of other stacks and uses are ignored.
    stack
        The stack to fit.
    others
        Numbers that are not those of the stack's file, and not fitted.

    Returns
    -------
    Fit
        The free numbers and their errors.
    """
    chosen = [row for row in rows if row.use == "fit" and row.ran_on(stack)]
    parameters = [Parameter(k, number_of(stack, k), *b) for k, b in stack.free.items()]
    measured = np.array([row.published for row in chosen])

    def predicted(numbers: dict[str, float]) -> Array:
        return np.array([predict(row, {**(others or {}), **numbers}) for row in chosen])

    return fit_ratio(predicted, measured, parameters)
