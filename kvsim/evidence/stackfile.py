"""Writing profiles and stacks as files that the loader reads back: the one place that does."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from kvsim.evidence.leastsquares import Fit
from kvsim.files import toml_lines
from kvsim.graph import Array
from kvsim.machines.hardware import Checked, Stack
from kvsim.machines.profiles import load_stack, numbers_apart
from kvsim.machines.schema import CHECKED_FIGURES

REPEATED = 0.015
"""Least relative half-width of an interval: 23 load tests that were run twice differ by 0.7 % in
TPOT on average and by 4.3 % at worst (aiconfigurator-core 0.12.0)."""


def fitted_text(
    stack: Stack,
    base: str,
    fit: Fit,
    rows: str,
    error: str,
    today: str,
    checked: Checked | None = None,
) -> str:
    """Format a fitted stack as a TOML file that extends another stack.

    Parameters
    ----------
    stack
        The stack that the fit started from.
    base
        Its name, or the path of its file.
    fit
        The fitted numbers and their errors.
    rows
        Description of the rows that were fitted.
    error
        Its measured error on other rows, in words.
    today
        Date of the fit.
    checked
        Errors in a run, on requests that the fit did not use.

    Returns
    -------
    str
        Text of the file, with the source of every number.
    """
    residuals = ", ".join(f"{100 * r:+.1f}" for r in fit.residuals)
    sources = {
        key: f"fitted on {today} to {rows}: {value:.4g} +- {_error_text(fit.errors[key])}"
        + ("; not determined by these rows" if key in fit.unknown else "")
        for key, value in fit.values.items()
    }
    confused = [f"{a} from {b}" for a, b in fit.confused]
    told = f"; these rows do not separate {', '.join(confused)}" if confused else ""
    head = {
        "title": f"{stack.title}, fitted",
        "basis": "calibrated",
        "error": error,
        "extends": base,
        "fit": f"{rows}{f'; residuals in %: {residuals}' if residuals else ''}{told}",
    }
    below = numbers_apart(stack, load_stack(base)) if base != stack.name else {}
    numbers = {k: v for k, v in below.items() if not isinstance(v, bool)} | fit.values
    flags = {key: value for key, value in below.items() if isinstance(value, bool)}
    sources = dict.fromkeys(numbers, f"as in {stack.name}") | sources
    if checked is None:
        return numbers_text(head, numbers, sources, flags=flags)
    figures = {"checked.rows": float(checked.rows)} | {
        f"checked.{kind}_{figure}": value
        for kind, each in checked.off.items()
        for figure, value in zip(CHECKED_FIGURES, each, strict=True)
    }
    sources |= dict.fromkeys(figures, f"rows that the fit did not see, {today}")
    texts = {f"checked.{key}": getattr(checked, key) for key in ("device", "model", "technique")}
    return numbers_text(head, numbers | figures, sources, flags=flags, texts=texts)


def measure_errors(ratios: Mapping[str, Array], where: tuple[str, str, str]) -> Checked:
    """Summarise how far a stack was off on rows that no fit saw.

    Parameters
    ----------
    ratios
        Measured over predicted times, by kind: ttft, tpot, latency. (n,) each
    where
        Names of the card, the model and the technique.

    Returns
    -------
    Checked
        Median and 90th percentile of the error, and an interval of the ratio, by kind.
    """
    off = {}
    for kind, ratio in ratios.items():
        low, high = np.quantile(ratio, (0.1, 0.9))
        low, high = min(low, 1 - REPEATED), max(high, 1 + REPEATED)
        median, p90 = np.quantile(np.abs(1 / ratio - 1), (0.5, 0.9))
        off[kind] = float(median), float(p90), float(low), float(high)
    rows = max(ratio.size for ratio in ratios.values())
    return Checked(*where, int(rows), off)


def numbers_text(
    head: Mapping[str, object],
    numbers: Mapping[str, float],
    sources: Mapping[str, str],
    digits: int = 6,
    flags: Mapping[str, bool] = MappingProxyType({}),
    texts: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Format a profile or a stack as TOML.

    Parameters
    ----------
    head
        Entries of the file before its first table.
    numbers
        Values by dotted key, as ``"hbm.bandwidth_Bps"``.
    sources
        Where each number comes from, by the same keys.
    digits
        Significant digits of the numbers.
    flags
        Switches by dotted key.
    texts
        Texts by dotted key.

    Returns
    -------
    str
        Text of the file.
    """
    tables: dict[str, dict[str, object]] = {}
    for key, value in numbers.items():
        folder, _, name = key.rpartition(".")
        tables.setdefault(folder, {})[name] = float(f"{value:.{digits}g}")
    for key, said in {**flags, **texts}.items():
        folder, _, name = key.rpartition(".")
        tables.setdefault(folder, {})[name] = said
    parts = [toml_lines(head)]
    parts += [f"[{folder}]\n{toml_lines(entries)}" for folder, entries in tables.items()]
    parts.append(f"[source]\n{toml_lines(sources, quoted=True)}")
    return "\n".join(parts)


def _error_text(error: float) -> str:
    return "unknown" if error != error else f"{error:.2g}"
