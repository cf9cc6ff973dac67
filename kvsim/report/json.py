"""The JSON output of all commands, which has common fields and those of the command.

``schema/answer.schema.json`` in this folder is its JSON Schema.
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
    """Convert a value to a number that JSON can represent.

    Parameters
    ----------
    value
        A number, an array whose first element is used, or None.

    Returns
    -------
    float, int or None
        An integer if the value is whole; None if it is not finite.
    """
    scalar = np.nan if value is None else float(np.ravel(value)[0])
    if not np.isfinite(scalar):
        return None
    return int(scalar) if scalar.is_integer() else scalar


def pick(found: object, *names: str) -> Row:
    """Collect attributes of an object in a dictionary.

    Parameters
    ----------
    found
        The object.
    *names
        Names of the attributes; values other than texts and booleans become numbers.
    """
    values = {name: getattr(found, name) for name in names}
    return {k: v if isinstance(v, str | bool) else number(v) for k, v in values.items()}


def resident_bytes(prediction: "Prediction") -> Row:
    """Collect peak memory on GPU and host, and on the drive if the machine has one. [B]

    Parameters
    ----------
    prediction
        A prediction for one batch.
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
    """Combine the fields of a command with the fields that all commands have.

    Parameters
    ----------
    command
        The equivalent command line.
    fields
        Fields of the command; a list becomes the field ``rows``.
    verdict
        The answer in one or two sentences; None for lists.
    notes
        Caveats about the numbers.
    evidence
        Measurements that support the answer.
    data
        ISO date of the newest measurement that the answer depends on; None if there is none.

    Returns
    -------
    dict
        What ``--json`` prints.

    Raises
    ------
    ValueError
        If a field of the command has the name of a common field.
    """
    own = fields if isinstance(fields, dict) else {"rows": list(fields)}
    if taken := own.keys() & set(COMMON):
        raise ValueError(f"fields of {command} under common names: {', '.join(sorted(taken))}")
    common = (__version__, SCHEMA, command, data, verdict, list(notes), list(evidence))
    return dict(zip(COMMON, common, strict=True)) | own


def print_json(value: Row) -> None:
    """Print a dictionary as JSON.

    Parameters
    ----------
    value
        A result of :func:`envelope`, without infinite numbers or NaN.
    """
    print(json.dumps(value, indent=2, allow_nan=False))
