"""Prediction intervals of whole runs: they hold 80 % of measured numbers, group by group."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from kvsim.evidence import ledger
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from tests.support.places import SHARED

D = Deployment(load_model("llama3.1-8b"), load_hardware("h100"), load_stack("vllm"))


def line(
    rows: int = 50, low: float = 0.9, high: float = 1.2, model: str = "llama3.1-8b"
) -> ledger.LedgerEntry:
    return ledger.LedgerEntry(
        "vllm", "0.18", "decode", "h100", "full", rows, 0.05, 0.1, low, high,
        ledger.HELD_OUT_RUN, "runs", float(np.sqrt(low * high)), "served", "16 bit", "dense", "one",
        model,
    )  # fmt: skip


def interval(*lines: ledger.LedgerEntry) -> tuple[float, float]:
    known = ledger.evidence_for(D, "full", "decode", lines, "served")
    return known.low, known.high


def test_many_rows_of_the_same_mechanisms_give_their_own_quantiles() -> None:
    assert interval(line()) == pytest.approx((0.9, 1.2), rel=0.03)


def test_rows_of_other_kinds_tell_nothing() -> None:
    other = replace(line(500, 2.0, 4.0), kind="launch")
    one_device = replace(line(500, 2.0, 4.0), held_out=ledger.ONE_DEVICE)
    assert interval(line(), other, one_device) == interval(line())


def test_a_ledger_keeps_runs_by_their_source_and_renews_the_rest(tmp_path: Path) -> None:
    place, run, model = tmp_path / "ledger.csv", line(), replace(line(), held_out="model")
    ledger.update(place, [run, model])
    ledger.update(place, [replace(x, rows=7, source="others") for x in (run, model)])
    text = place.read_text()
    assert [text.count(f",{held_out},") for held_out in ("run", "model")] == [2, 1]
    assert text.count(",others,") == 2


def test_without_runs_of_the_model_something_stays_unknown() -> None:
    for model, name in (("llama3.1-8b", "rerun"), ("qwen2.5-7b", "unseen")):
        unknown = float(np.exp(ledger.WEIGHTS[name]))
        found = interval(line(50, 0.999, 1.001, model))
        assert found == pytest.approx((1 / unknown, unknown), rel=0.01)


def test_few_rows_or_those_of_another_model_give_a_wider_interval() -> None:
    widths = [np.divide(*interval(x)[::-1]) for x in (line(), line(3), line(model="qwen2.5-7b"))]
    assert widths[0] < widths[1] < widths[2]


def test_an_interval_holds_eight_in_ten_where_it_ends_at_the_prediction() -> None:
    """The range from the prediction on leaves a fifth of slower runs out, not a tenth.

    The answer itself, which may be any, takes a little of that fifth.
    """
    low, high = interval(line(low=1.5, high=3.0))
    assert low == pytest.approx(np.exp(-ledger.WEIGHTS["rerun"]), rel=1e-3)
    middle, spread = np.log(np.sqrt(1.5 * 3.0)), np.log(3.0 / 1.5) / 2 / ledger.WITHIN_80
    assert np.log(high) == pytest.approx(middle + 0.94 * spread, abs=0.15 * spread)


def test_measured_runs_lie_within_their_intervals_group_by_group() -> None:
    """Groups hold 80 %, two binomial standard errors aside, where half of a page's runs are known.

    Runs whose own lines are in the ledger may be held somewhat more often, as may those whose
    neighbours are missing, but none too seldom.
    """
    if not (SHARED / "measured" / "engines.csv").exists():
        pytest.skip("KVSIM_SHARED names no folder of measured runs")
    from benchmarks import truth_intervals as coverage
    from benchmarks import truth_weights as weights
    from benchmarks.truth_rows import read_rows
    from benchmarks.truth_runs import Said, predict_rows

    rows = [r for r in read_rows(SHARED) if coverage.counts(r)]
    # in a process of its own, as it takes gigabytes that later tests would be told to have used
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as apart:
        said = apart.submit(predict_rows, rows, SHARED / "measured" / "traces").result()
    pairs = [(r, s) for r, s in zip(rows, said, strict=True) if isinstance(s, Said)]
    whole = coverage.of_group(pairs)
    assert 0.77 <= whole.share <= 0.84
    assert whole.width <= 2.2
    half = [g for g in weights.judged_runs(pairs) if g.hold_out == weights.HALF]
    new = weights.held("", weights.HALF, [(g, ledger.WEIGHTS) for g in half])
    assert 0.77 <= new.share <= 0.84
    assert new.outside <= new.groups / 20
    for shared in coverage.HOLD_OUTS.values():
        share = coverage.of_group(coverage.held_out(pairs, shared)).share
        assert 0.77 <= share <= 0.90, shared  # wider where rows are missing, not too narrow
