"""What kernels reach of the rate at which instructions issue, with programs that are made up."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

from kvsim.validate.bench import device as devices
from kvsim.validate.machine import find_device
from kvsim.validate.session import rates
from kvsim.validate.session.rates import Code, Launched, instructions

NAMES = ["out", "SPLIT", "WORDS", "BLOCK"]
WARPS = 4


def launched(name: str, *numbers: int) -> Launched:
    kernel = SimpleNamespace(__name__=name, arg_names=NAMES)
    return Launched(kernel, (6, 2), (None, *numbers), {})


def test_the_main_loop_counts_as_often_as_it_turns() -> None:
    program = Code(32, 0, 1000, (700, 100))
    words, others = launched("runs", 256, 32, 64), launched("runs", 256, 0, 64)
    assert instructions(words, (program, WARPS)) == 12 * WARPS * (1000 - 800 + 8 * 100)
    alone = Code(32, 0, 1000, (300,))
    assert instructions(others, (alone, WARPS)) == 12 * WARPS * (1000 + 3 * 300)
    straight = Code(32, 0, 50, ())
    assert instructions(launched("quantise_block"), (straight, WARPS)) == 12 * WARPS * 50
    assert instructions(launched("select"), (alone, WARPS)) is None, "its turns follow from numbers"
    assert instructions(words, None) is None


def test_every_kernel_has_its_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU kernels have twins of PyTorch's, which launch nothing."""
    monkeypatch.setattr(rates, "MAX_MOVED_BYTES", 1e6)
    monkeypatch.setattr(rates, "BUDGET", 1e-3)
    place = devices.place(find_device("cpu"), quick=True)
    rows = []
    with torch.inference_mode():
        for name, work in rates.largest(place):
            row = rates.rate(name, work, place.device, {"hbm": 1e9, "h2d": 1e9}, lambda _: None)
            rows.append(rates.of_issue(row, 1e12))
    assert {row["kernel"].partition(",")[0] for row in rows} == set(rates.KERNELS)
    for row in rows:
        reached = max(row["bytes"].get(c, 0.0) for c in ("hbm", "h2d")) / row["seconds"] / 1e9
        assert row["share_of_bandwidth"] == pytest.approx(reached)
        assert row["share_of_issue"] is None


def test_shares_of_issue_follow_from_clock_and_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(multi_processor_count=100)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    issue = rates.issue_rate(torch.device("cuda", 0), "1200 to 1500")
    assert issue == 100 * 4 * 1.5e9
    assert rates.issue_rate(torch.device("cuda", 0), "") == 0.0
    row = {"instructions": 3e8, "seconds": 1e-3}
    assert rates.of_issue(row, issue)["share_of_issue"] == pytest.approx(0.5)
