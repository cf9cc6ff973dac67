"""Predictions stay what they were at commit fa08390, but for corrections that are listed.

``predictions.csv.gz`` holds 2,000 predictions, drawn so that every technique meets every stack
and every model; ``reproduced.csv.gz`` the prediction of every row of ``kvsim reproduce``. An eighth
of the first is compared in every run, all of it by ``make.py test --all``.
"""

import csv
import gzip
import os
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsim.evidence import published
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.prediction.generate import Prediction
from kvsim.techniques import parse

FOLDER = Path(__file__).parent
COLUMNS = ("ttft_s", "decode_s", "gpu_bytes", "host_bytes", "max_batch")
SAME = 1e-12  # relative
PARTS = 8
CHOSEN = range(PARTS) if "KVSIM_ALL_TESTS" in os.environ else [3]

Row = dict[str, str]


@cache
def rows(name: str) -> list[Row]:
    with gzip.open(FOLDER / f"{name}.csv.gz", "rt", newline="") as file:
        return list(csv.DictReader(file))


@cache
def corrections() -> list[dict[str, Any]]:
    with (FOLDER / "corrections.toml").open("rb") as file:
        listed: list[dict[str, Any]] = tomllib.load(file).get("correction", [])
    return listed


def corrected(row: Row, column: str) -> bool:
    """Whether a listed correction says that this number of this row differs."""
    named = row | {"technique": row.get("technique", "").partition(":")[0]}
    return any(
        column in one["columns"]
        and all(named.get(k) in v for k, v in one.items() if k not in ("columns", "reason"))
        for one in corrections()
    )


def predicted(row: Row) -> Prediction:
    hardware, stack = load_hardware(row["gpu"]), load_stack(row["stack"])
    d = Deployment(load_model(row["model"]), hardware, stack, row["weights"], int(row["tp"]))
    batch = np.array([float(row["batch"])])
    return Prediction(parse(row["technique"]), d, batch, int(row["prompt"]), int(row["generate"]))


@pytest.mark.parametrize("part", CHOSEN)
def test_predictions_are_as_they_were(part: int) -> None:
    moved = []
    for row in rows("predictions")[part::PARTS]:
        if all(corrected(row, column) for column in COLUMNS):
            continue
        now = predicted(row)
        for column in COLUMNS:
            before, after = float(row[column]), float(np.ravel(getattr(now, column))[0])
            if abs(after - before) > SAME * abs(before) and not corrected(row, column):
                moved.append(f"{row} {column}: {before:.17g} became {after:.17g}")
    assert not moved, "\n".join(moved[:20])


@pytest.mark.parametrize("paper", sorted({row["paper"] for row in rows("reproduced")}))
def test_published_rows_are_predicted_as_they_were(paper: str) -> None:
    now = [published.predict(row) for row in published.read(paper)]
    for row in rows("reproduced"):
        if row["paper"] == paper and not corrected(row, row["metric"]):
            before = float(row["predicted"])
            assert now[int(row["row"])] == pytest.approx(before, rel=SAME, nan_ok=True), row


def test_every_correction_covers_something_and_says_why() -> None:
    for one in corrections():
        assert one["reason"].endswith(".")
        both = [*rows("predictions"), *rows("reproduced")]
        for column in one["columns"]:
            named = [row for row in both if column in row or column == row.get("metric")]
            assert any(corrected(row, column) for row in named), one
