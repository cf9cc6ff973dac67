"""Clocks while a GPU is measured, on a driver that is not there."""

from collections.abc import Mapping
from itertools import count
from pathlib import Path
from threading import Event

from kvsim.evidence.machine.samples import Log
from kvsim.validate.bench.device import watched


def test_what_was_seen_is_a_range_per_field() -> None:
    turns, enough = count(), Event()

    def ask() -> Mapping[str, str]:
        turn = next(turns)
        if turn == 3:
            enough.set()
        return {"clocks.sm": str(1980 - 15 * min(turn, 3)), "driver_version": "580.159.03"}

    with watched(ask, every=0.001) as since:
        assert enough.wait(10)
        found = since()
    assert found == {"clocks.sm": "1935 to 1980", "driver_version": "580.159.03"}


def test_what_is_over_at_once_is_looked_at_once() -> None:
    with watched(lambda: {"clocks.sm": "1200"}, every=60.0) as since:
        assert since() == since() == {"clocks.sm": "1200"}


def test_conditions_are_kept_with_each_benchmark(tmp_path: Path) -> None:
    """Another patch of the driver goes on with the same samples, and says so."""
    place = tmp_path / "samples.jsonl"
    Log(place, {"device": "a"}).resume().append("memory", [], {"driver_version": "580.159.03"})
    log = Log(place, {"device": "a"}).resume()
    log.append("gemm", [], {"driver_version": "580.159.04"})
    log.append("launch", [])
    versions = {
        name: kept.get("driver_version")
        for name, kept in Log(place, {"device": "a"}).resume().conditions.items()
    }
    assert versions == {"memory": "580.159.03", "gemm": "580.159.04", "launch": None}
