"""Where an engine's own kernels make an answer slow: which class is told, and when nothing is."""

from re import findall

import numpy as np
import pytest

from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.prediction.generate import Prediction
from kvsim.report.caveats import slower_kernels
from kvsim.techniques import parse


def told(
    model: str, gpu: str, stack: str, weights: str, tp: int = 1, generate: int = 128
) -> list[str]:
    d = Deployment(load_model(model), load_hardware(gpu), load_stack(stack), weights, tp)
    return slower_kernels(Prediction(parse("full"), d, np.array([64.0]), 2048, generate))


def test_untuned_experts_are_told_with_both_times() -> None:
    """vLLM's fp8 experts on Hopper were measured some four times slower than the others'."""
    (said,) = told("deepseek-v3", "h200", "vllm", "fp8", tp=8)
    assert "vLLM's fp8 experts take" in said and "in a decoding round" in said
    assert "(--stack sglang)." in said or "(--stack trtllm)." in said
    mine, whole, theirs, blocks = map(float, findall(r"([\d.]+) ms", said))
    assert mine > 2 * theirs and "--weights fp8-block" in said and whole > 2 * blocks
    (read,) = told("qwen3-30b-a3b", "b200", "sglang", "released", generate=1)
    assert "in a prefill pass" in read


@pytest.mark.parametrize(
    ("model", "gpu", "stack"),
    [
        ("llama3.1-8b", "h100", "vllm"),  # all engines are alike
        ("deepseek-v3", "gh200", "vllm"),  # no kernel was measured on this card
        ("deepseek-v3", "h200", "fused"),  # no engine's kernels
    ],
)
def test_nothing_is_told_without_rows_of_both_on_the_card(model: str, gpu: str, stack: str) -> None:
    assert told(model, gpu, stack, "fp8", tp=8) == []
