"""Kernels that the stack ``kvsim`` states, against those that a real step dispatches."""

import pytest

pytest.importorskip("torch")

from benchmarks.launches import DIFFER, every, launches


@pytest.mark.parametrize("text", every())
def test_stated_kernels_are_those_dispatched(text: str) -> None:
    found = launches(text)
    assert "decode" in found
    name = text.partition(":")[0]
    for kind, one in found.items():
        if (name, kind) in DIFFER:
            assert one.off != 0.0
        else:
            assert one.real[0] == pytest.approx(one.stated[0], abs=0.5), kind
        assert (
            one.real[1] - one.stated[1] < 30
        )  # a pass has few kernels besides those of its layers
