"""Kernels that the stack ``kvsim`` states, against those that a real step dispatches."""

import pytest

pytest.importorskip("torch")

from benchmarks.launches import DIFFER, every, launches
from kvsim.techniques import steps
from kvsim.validate.kernels import topk

FEW = 30  # kernels of a pass besides those of its layers
MORE = {"ngram": 40, "kvzip": 40}
"""Where every pass also looks for its last tokens in the text, or the prompt is embedded again."""


@pytest.mark.parametrize("text", every())
def test_stated_kernels_are_those_dispatched(text: str) -> None:
    found = launches(text)
    assert "decode" in found
    name = text.partition(":")[0]
    for kind, one in found.items():
        if (name, kind) in DIFFER:
            assert one.off != 0.0 or "at random" in DIFFER[name, kind]
        else:
            assert one.real[0] == pytest.approx(one.stated[0], abs=0.5), kind
        assert one.real[1] - one.stated[1] < MORE.get(name, FEW)


def test_long_contexts_are_ranked_by_more_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "specache:k=16"
    few = launches(text)["decode"]
    for module in (steps, topk):  # as if the small run's context were a long one
        monkeypatch.setattr(module, "RANKED_ALONE", 64)
    many = launches(text)["decode"]
    assert many.stated[0] == few.stated[0] + 10
    assert many.real[0] == pytest.approx(many.stated[0], abs=0.5)
