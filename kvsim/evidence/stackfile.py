"""Writing profiles and stacks as files that the loader reads back: the one place that does."""

from collections.abc import Mapping
from types import MappingProxyType

from kvsim.evidence.leastsquares import Fit
from kvsim.files import toml_lines
from kvsim.machines.hardware import Stack


def fitted_text(stack: Stack, base: str, fit: Fit, rows: str, error: str, today: str) -> str:
    """Format a fitted stack as a TOML file that extends another stack.

    Parameters
    ----------
    stack
        The stack that was fitted.
    base
        Its name, or the path of its file.
    fit
        The fitted numbers and their errors.
    rows
        Which rows it was fitted to, in words.
    error
        Its measured error on other rows, in words.
    today
        Date of the fit.

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
        "fit": f"{rows}; residuals in %: {residuals}{told}",
    }
    return numbers_text(head, fit.values, sources)


def numbers_text(
    head: Mapping[str, object],
    numbers: Mapping[str, float],
    sources: Mapping[str, str],
    digits: int = 6,
    flags: Mapping[str, bool] = MappingProxyType({}),
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

    Returns
    -------
    str
        Text of the file.
    """
    tables: dict[str, dict[str, object]] = {}
    for key, value in numbers.items():
        folder, _, name = key.rpartition(".")
        tables.setdefault(folder, {})[name] = float(f"{value:.{digits}g}")
    for key, flag in flags.items():
        folder, _, name = key.rpartition(".")
        tables.setdefault(folder, {})[name] = flag
    parts = [toml_lines(head)]
    parts += [f"[{folder}]\n{toml_lines(entries)}" for folder, entries in tables.items()]
    parts.append(f"[source]\n{toml_lines(sources, quoted=True)}")
    return "\n".join(parts)


def _error_text(error: float) -> str:
    return "unknown" if error != error else f"{error:.2g}"
