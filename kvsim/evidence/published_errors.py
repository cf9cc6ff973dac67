"""Lines of the ledger from published tables: errors on the rows that no stack was fitted to."""

from collections.abc import Iterable

import numpy as np

from kvsim.evidence.ledger import FEWEST, LedgerEntry, entry_of
from kvsim.evidence.published import PublishedRow

TIMES = {
    "step_ms": "decode", "decode_latency_s": "decode", "prefill_ms": "prefill",
    "decode_tok_s": "decode", "speedup": "decode", "peak_gib": "memory",
}  # fmt: skip
RATES = {"decode_tok_s", "speedup"}  # larger is faster: turned into times
# ranges of contexts with errors of their own [tokens]
LENGTHS = ((0, 2048), (2048, 16_384), (16_384, 10**9))


def entries(pairs: Iterable[tuple[PublishedRow, float]]) -> list[LedgerEntry]:
    """Errors by stack, card, technique and kind, of rows with use ``check``.

    Parameters
    ----------
    pairs : rows with their predictions.
    """
    groups: dict[tuple[str, str, str, str], list[tuple[float, float]]] = {}
    for row, predicted in pairs:
        if row.use == "check" and row.metric in TIMES:
            key = (row.stack, row.hardware, row.technique, TIMES[row.metric])
            power = -1.0 if row.metric in RATES else 1.0
            groups.setdefault(key, []).append((predicted**power, row.published**power))
    return [
        entry_of(
            np.array([p for p, _ in found]), np.array([m for _, m in found]),
            engine=stack, version="", kind=kind, device=device, technique=technique,
            held_out="row", source="published tables",
        )
        for (stack, device, technique, kind), found in groups.items()
        if len(found) >= FEWEST
    ]  # fmt: skip


def by_mechanism(
    pairs: Iterable[tuple[PublishedRow, float]],
) -> dict[tuple[str, str], tuple[int, float, float]]:
    """Rows, mean and worst error by held-out context length, head grouping and technique."""
    groups: dict[tuple[str, str], list[float]] = {}
    for row, predicted in pairs:
        if row.use != "check" or row.metric not in TIMES:
            continue
        model = row.deployment().model
        length = next(i for i, (low, high) in enumerate(LENGTHS) if low <= row.prompt < high)
        names = ("below 2k", "2k to 16k", "above 16k")
        grouped = "grouped heads" if model.queries_per_kv > 1 else "one query per KV head"
        keys = (("context", names[length]), ("heads", grouped), ("technique", row.technique))
        for key in keys:
            groups.setdefault(key, []).append(abs(predicted / row.published - 1))
    return {
        key: (len(off), float(np.mean(off)), float(np.max(off)))
        for key, off in sorted(groups.items())
    }
