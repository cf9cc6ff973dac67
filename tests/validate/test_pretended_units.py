"""Every unit of ``make.py gpu`` on a GPU that is pretended, from its facts to its report."""

from pathlib import Path
from unittest.mock import patch

import pytest

pytest.importorskip("torch")

from kvsim.report.session import make_result
from kvsim.validate.counts import check
from kvsim.validate.registry import IMPLEMENTATIONS
from kvsim.validate.session.state import SessionState
from kvsim.validate.session.work import all_units
from tests.support.pretended_session import run_unit
from tests.support.small_llama import small_config

ORDER = ("facts", "ceilings", "compile", "sanitizer", "counts", "calibration", "point")


@pytest.fixture
def small(tmp_path: Path) -> dict[str, str]:
    """Units whose own sizes are a GPU's, with a small model's configuration instead."""
    (tmp_path / "model").mkdir()
    model = small_config(tmp_path / "model", (4, 2), 64, 1, 256)
    return {"counts": f"counts {model} 1", "point": "point full"}


def run(state: SessionState, names: list[str]) -> None:
    for name in names:
        state.write(name, run_unit(name, state, state.folder.parent / "model" / "config.json"))


def test_units_run_one_after_another(tmp_path: Path, small: dict[str, str]) -> None:
    """With two techniques; Triton's kernels give zeros here, and are in ``test_pretended``."""
    state = SessionState.open(tmp_path, "pretended")
    few = ("full", "specache")
    with patch.object(check, "IMPLEMENTATIONS", few):
        run(state, [small.get(kind, kind) for kind in ORDER])
    counted = state.read(small["counts"])
    assert counted
    assert {t["technique"].partition(":")[0] for t in counted["techniques"]} == set(few)
    point = state.read(small["point"])
    assert point and [p["technique"] for p in point["found"]] == ["full"]
    calibrated = state.read("calibration")
    assert calibrated and calibrated["device"] == "Pretended GPU"
    units = all_units("cuda:0")
    kinds = {unit.name.split()[0] for unit in units}
    assert kinds == {*ORDER, "kernels"}, "a unit that this does not run"
    make_result(state, units).write(tmp_path / "index.html")
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    for said in (
        f"of {len(units)} units are done",
        "Pretended GPU",
        "Ceilings",
        "Best shares of the",
    ):
        assert said in page


def test_every_technique_is_counted_and_timed(tmp_path: Path, small: dict[str, str]) -> None:
    state = SessionState.open(tmp_path, "pretended")
    points = [f"point {name}" for name in IMPLEMENTATIONS if name not in ("draft", "cascade")]
    run(state, ["calibration", small["counts"], *points])
    counted = state.read(small["counts"])
    assert counted
    named = {t["technique"].partition(":")[0] for t in counted["techniques"]}
    assert len(named) >= 20
    found = {name: state.read(name) for name in points}
    assert all(point and (point["found"] or point["left"]) for point in found.values())
    assert sum(bool(point and point["found"]) for point in found.values()) >= 20
