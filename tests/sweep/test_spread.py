"""Sweeps over stages, copies of attention and groups of experts."""

from pathlib import Path

import numpy as np
import pytest

from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.prediction.generate import Prediction
from kvsim.techniques import parse
from tests.support.commands import run

GRID = """
kind = "predict"
[grid]
model = ["mixtral-8x7b"]
gpu = ["h100"]
stack = ["fused"]
tp = [2]
dp = [1, 2]
ep = [1, 4]
technique = ["full"]
batch = [8]
context = [1024]
"""


def test_every_way_of_spreading_is_what_predict_says_or_refused(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    place, out = tmp_path / "grid.toml", tmp_path / "out"
    place.write_text(GRID)
    result = run("sweep", str(place), "--out", str(out))
    assert result.code == 0, result
    table = pq.read_table(out).to_pandas()
    assert len(table) == 4
    for _, row in table.iterrows():
        if row.dp == 1 and row.ep == 4:
            assert row.reason.startswith("--ep: got 4") and np.isnan(row.tpot_s)
            continue
        d = Deployment(load_model("mixtral-8x7b"), load_hardware("h100"), load_stack("fused"),
                       load_model("mixtral-8x7b").released, 2, 1, row.dp, row.ep)  # fmt: skip
        p = Prediction(parse("full"), d, np.array([8.0]), 1024, 2)
        assert (row.ttft_s, row.tpot_s, row.gpu_bytes) == pytest.approx(
            (float(p.ttft_s[0]), float(p.tpot_s[0]), float(p.gpu_bytes[0])), rel=1e-9
        )
