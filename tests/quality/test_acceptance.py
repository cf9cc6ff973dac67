"""Accepted drafts by position, and how many of them nine in ten models and texts reach."""

import pytest

from kvsim.techniques.acceptance import MOST_DRAFTS, published


def test_of_few_drafts_models_differ_less_than_of_many() -> None:
    found = published("deepseek-v3", "mtp", 4096)
    assert found is not None and len(found.spreads) == MOST_DRAFTS
    assert found.spreads[0] < found.spreads[3] < found.spreads[7]
    assert 0.4 < found.likely_rate(1) < found.rate(1) < 0.9
    assert found.likely_rate(0) == 0.0


@pytest.mark.parametrize("drafts", [1, 4])
def test_a_model_that_was_measured_itself_differs_from_text_to_text_alone(drafts: int) -> None:
    own, other = (published(model, "eagle3", 4096) for model in ("llama3.1-8b", "qwen2.5-7b"))
    assert own is not None and other is not None
    assert own.source.endswith("llama3.1-8b") and "average of" in other.source
    assert 0 < own.spreads[drafts - 1] < 0.2
