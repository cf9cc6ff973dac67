"""Error of the stacks that nothing was fitted to, on rows that others measured.

    python -m benchmarks.published

The rows are those of `kvsim reproduce`, on another stack than the one fitted to them. The stacks'
``error`` fields quote what this prints.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvsim.evidence.predicted import PublishedRow, predict
from kvsim.evidence.published import read

RATES = ("decode_tok_s", "decode_latency_s")


class Group(NamedTuple):
    """Speeds of one paper's runs, and the unfitted stack that should describe them."""

    title: str
    paper: str
    table: str
    stack: str
    technique: str = "full"
    weights: str = "fp16"


GROUPS = (
    Group("KCache table 3, KV", "kcache", "3", "fused"),
    Group("KCache table 3, KCache", "kcache", "3", "fused", "kcache"),
    Group("gpt-fast README, A100, fp16", "engines", "weights", "fused"),
    Group("gpt-fast README, A100, int8", "engines", "weights", "fused", weights="int8"),
    Group("gpt-fast README, A100, int4", "engines", "weights", "fused", weights="int4-g32"),
    Group("SpeCache table 3, full", "specache", "3", "hf-eager"),
    Group("H2O logs, FlexGen engine on the GPU", "engines", "logs", "flexgen"),
)


def rows(group: Group) -> list[PublishedRow]:
    """The group's rows, each run once."""
    found = [
        row
        for row in read(group.paper)
        if (row.table, row.technique, row.options.get("weights", "fp16"))
        == (group.table, group.technique, group.weights)
        and row.metric in RATES
        and not row.note.startswith("derived")
    ]
    if not found:
        raise LookupError(f"no rows of {group.title}")
    return found


def speed_error(row: PublishedRow, stack: str) -> float:
    """Predicted over measured throughput, less one."""
    ratio = predict(replace(row, stack=stack)) / row.published
    return ratio - 1 if row.metric == "decode_tok_s" else 1 / ratio - 1


def main() -> None:
    print("predicted over measured tokens/s, less one: mean, lowest and highest, in %")
    for group in GROUPS:
        chosen = rows(group)
        for stack in ("ideal", group.stack):
            errors = 100 * np.array([speed_error(row, stack) for row in chosen])
            size = f"{np.abs(errors).mean():5.1f} {errors.min():+6.1f} {errors.max():+6.1f}"
            print(f"{group.title:38s} {len(chosen):2d} rows  {stack:8s} {size}")


if __name__ == "__main__":
    main()
