"""What ``--json`` prints: one envelope for all commands, on standard output and nothing else there.

``schema/answer.schema.json`` beside this file says what every answer has, and what each command
adds to it.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.version import __version__

if TYPE_CHECKING:
    from kvsim.prediction.generate import Prediction

SCHEMA = 1
"""Version of the envelope: it is raised when a key goes, or when its meaning changes."""

COMMON = ("kvsim", "schema", "command", "data", "verdict", "notes", "evidence")
"""Keys that every answer has, before those of its command."""

Row = dict[str, Any]
"""A result under its contract names: text, numbers, lists and rows, as JSON has them."""


def number(value: Any) -> float | int | None:
    """Convert a value to a JSON number.

    Parameters
    ----------
    value
        Number, array whose first element counts, or None.

    Returns
    -------
    float, int or None
        None where it is not finite; an integer where it is whole.
    """
    scalar = np.nan if value is None else float(np.ravel(value)[0])
    if not np.isfinite(scalar):
        return None
    return int(scalar) if scalar.is_integer() else scalar


def pick(found: object, *names: str) -> Row:
    """Take attributes of an object under their own names.

    Parameters
    ----------
    found
        What was computed.
    *names
        Attributes: text and truth values stay, all others become numbers.
    """
    values = {name: getattr(found, name) for name in names}
    return {k: v if isinstance(v, str | bool) else number(v) for k, v in values.items()}


def resident_bytes(prediction: "Prediction") -> Row:
    """Take the peak memory of each tier, the drive's where the machine has one.

    Parameters
    ----------
    prediction
        Prediction of one batch.
    """
    drive = ("disk_bytes",) if prediction.deployment.hardware.disk_memory else ()
    return pick(prediction, "gpu_bytes", "host_bytes", *drive)


def envelope(
    command: str,
    fields: Row | Sequence[Row],
    *,
    verdict: str | None = None,
    notes: Sequence[str] = (),
    evidence: Sequence[str] = (),
    data: str | None = None,
) -> Row:
    """The answer of a command as ``--json`` prints it.

    Parameters
    ----------
    command
        The command line that gives it.
    fields
        The command's own fields, none of them under a common name; a list becomes ``rows``.
    verdict
        The answer in a sentence or two; None where a command lists what is known.
    notes
        What a reader should know before using the numbers.
    evidence
        What was measured that bears on them.
    data
        Date of the newest measurement that the answer stands on, as 2026-11-22; None if none.

    Raises
    ------
    ValueError
        If a field has a common name.
    """
    own = fields if isinstance(fields, dict) else {"rows": list(fields)}
    if taken := own.keys() & set(COMMON):
        raise ValueError(f"fields of {command} under common names: {', '.join(sorted(taken))}")
    common = (__version__, SCHEMA, command, data, verdict, list(notes), list(evidence))
    return dict(zip(COMMON, common, strict=True)) | own


def print_json(value: Row) -> None:
    """Print an envelope; a number that is not finite is an error.

    Parameters
    ----------
    value
        Answer as :func:`envelope` makes it.
    """
    print(json.dumps(value, indent=2, allow_nan=False))
