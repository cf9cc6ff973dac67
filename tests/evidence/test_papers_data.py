"""The published tables are whole, and every row names things that kvsim knows."""

import csv
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

import kvsim

FOLDER = Path(kvsim.__file__).parent / "evidence" / "papers"
COLUMNS = (
    "paper", "table", "model", "hardware", "stack", "technique", "params", "batch", "prompt",
    "generate", "metric", "published", "use", "note",
)  # fmt: skip

# numbers that each table prints and that are not withheld
COUNTS = {
    "kcache": {"3": 35},
    "kvpr": {
        "2": 12, "2 without hiding": 6, "3": 36, "4": 24, "5": 4, "text 4.1": 1,
        "text A.4": 2,
    },
    "quantspec": {"4": 38, "5": 10, "6a": 10, "6b": 10, "6c": 10, "6d": 10},
    "specache": {"1": 28, "2": 18, "3": 16, "4": 2, "C": 22},
    "zipcache": {
        "1": 3, "1 channelwise": 1, "1 tokenwise": 1, "3": 22, "A": 10, "B": 14, "appendix A": 2,
        "appendix A tokenwise": 1,
    },
    "minference": {"end to end": 16},
    "r-kv": {"efficiency": 44},
    "engines": {"logs": 3, "tensor parallel": 3, "weights": 8},
}  # fmt: skip
# measurements that stacks may be fitted to; "derived" rows repeat others
FITTED = {
    ("kcache", "3"): 6, ("kvpr", "2"): 2, ("kvpr", "4"): 4, ("kvpr", "5"): 2,
    ("quantspec", "4"): 3, ("quantspec", "6a"): 10, ("specache", "3"): 3, ("specache", "4"): 1,
    ("zipcache", "A"): 2, ("engines", "weights"): 2, ("minference", "end to end"): 5,
}  # fmt: skip
ANOMALIES = {
    ("kvpr", "3"): 12, ("kvpr", "text 4.1"): 1, ("kvpr", "text A.4"): 1, ("quantspec", "5"): 1,
    ("quantspec", "6b"): 2, ("minference", "end to end"): 3,
    ("specache", "3"): 3, ("zipcache", "3"): 4, ("zipcache", "A"): 1, ("zipcache", "B"): 3,
}  # fmt: skip


@cache
def rows(name: str) -> list[dict[str, str]]:
    with (FOLDER / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        lines = csv.DictReader(file, strict=True)
        assert tuple(lines.fieldnames or ()) == COLUMNS
        return list(lines)


def test_every_file_is_listed() -> None:
    assert {file.stem for file in FOLDER.glob("*.csv")} == set(COUNTS)


@pytest.mark.parametrize("name", COUNTS)
def test_tables_are_whole(name: str) -> None:
    found = rows(name)
    assert all(set(row) == set(COLUMNS) and None not in row.values() for row in found)
    assert Counter(row["table"] for row in found) == COUNTS[name]
    sources = {"gpt-fast", "h2o"} if name == "engines" else {name}
    assert {row["paper"] for row in found} == sources


@pytest.mark.parametrize("name", COUNTS)
def test_throughput_repeats_latency(name: str) -> None:
    """Rows called derived follow from others: tokens per second from the row above."""
    found = rows(name)
    for above, row in pairwise(found):
        if row["note"].startswith("derived: batch"):
            tokens = int(row["batch"]) * (int(row["generate"]) - 1)
            assert above["metric"] == "decode_latency_s", row
            assert above["use"] == row["use"], row
            assert float(row["published"]) == pytest.approx(
                tokens / float(above["published"]), rel=1e-4
            )


def test_uses_are_as_agreed() -> None:
    """Few rows are fitted to; only documented rows are anomalies."""
    fitted: Counter[tuple[str, str]] = Counter()
    anomalies: Counter[tuple[str, str]] = Counter()
    for name in COUNTS:
        for row in rows(name):
            assert row["use"] in ("fit", "check", "anomaly"), row
            key = (name, row["table"])
            fitted[key] += row["use"] == "fit" and not row["note"].startswith("derived")
            anomalies[key] += row["use"] == "anomaly"
    assert +fitted == FITTED
    assert +anomalies == ANOMALIES
