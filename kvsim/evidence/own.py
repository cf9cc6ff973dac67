"""Rows that you measured yourself: seven columns, spelt out as those of the papers' tables."""

from collections.abc import Mapping, Sequence

from kvsim.errors import InputError
from kvsim.machines.hardware import DEFAULT_STACK

RUN = ("model", "gpu", "technique", "batch", "prompt", "generate")
"""Columns of a run; one more names the metric and holds what was measured."""
MORE = ("stack", "tp", "weights", "note")
"""Columns that may be there."""
METRICS = (
    "ttft_ms", "tpot_ms", "decode_tok_s", "decode_latency_s", "prefill_ms", "step_ms", "peak_gib",
    "max_batch",
)  # fmt: skip
"""What may be measured; a papers' table knows more."""


def is_own(header: Sequence[str]) -> bool:
    """Whether a table is one of runs, and none of a paper's."""
    return "gpu" in header and "hardware" not in header


def metric_of(name: str, header: Sequence[str]) -> str:
    """The column that holds what was measured.

    Raises
    ------
    InputError
        If a column of the run is missing, or there is not exactly one metric.
    """
    listed = f"{','.join(RUN)} and one of {', '.join(METRICS)}"
    for column in RUN:
        if column not in header:
            raise InputError(f"{name!r}: column {column} is missing; expected {listed}")
    found = [column for column in header if column not in (*RUN, *MORE)]
    if len(found) != 1 or found[0] not in METRICS:
        got = ", ".join(found) or "none"
        raise InputError(f"{name!r}: got {got} beside the run's columns; expected {listed}")
    return found[0]


def widened(name: str, metric: str, row: Mapping[str, str]) -> dict[str, str]:
    """One row as a paper's table has it: compared with its prediction, never fitted to."""
    technique, _, settings = row["technique"].strip().partition(":")
    params = [part for part in settings.split(",") if part.strip()]
    params += [f"{key}={row[key].strip()}" for key in ("tp", "weights") if row.get(key, "").strip()]
    return {
        "paper": name, "table": "", "model": row["model"], "hardware": row["gpu"],
        "stack": row.get("stack", "").strip() or DEFAULT_STACK, "technique": technique,
        "params": ";".join(params), "batch": row["batch"], "prompt": row["prompt"],
        "generate": row["generate"], "metric": metric, "published": row[metric],
        "use": "check", "note": row.get("note", ""),
    }  # fmt: skip
