"""Splitwise's A100 measurements, which the project does not hold, against their stack."""

import csv
from collections import defaultdict
from statistics import median

import numpy as np
import pytest

from kvsim.graph import Array
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.prediction.generate import Prediction
from kvsim.techniques import parse
from tests.support.places import SHARED

MEASURED = SHARED / "measured" / "splitwise_a100.csv"
BROKEN = (2, 64)  # GPUs and batch whose prompts are reported to take a tenth of half the batch

needs = pytest.mark.skipif(not MEASURED.exists(), reason=f"needs {MEASURED.name}")


def errors() -> tuple[Array, Array]:
    """Relative errors of prompt and token times, one per configuration."""
    runs: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    with MEASURED.open() as file:
        for r in csv.DictReader(file):
            key = (r["model"], r["tensor_parallel"], r["prompt_size"], r["batch_size"],
                   r["token_size"])  # fmt: skip
            runs[key].append((float(r["prompt_time"]), float(r["token_time"])))
    hardware, stack = load_hardware("a100-80g"), load_stack("splitwise")
    off = []
    for (model, *numbers), times in runs.items():
        tp, prompt, batch, generate = (int(n) for n in numbers)
        if (tp, batch) == BROKEN:
            continue
        d = Deployment(load_model(model), hardware, stack, tp=tp)
        p = Prediction(parse("full"), d, np.array([float(batch)]), prompt, generate, contexts=16)
        took = np.array([median(column) for column in zip(*times, strict=True)])
        off.append(1e3 * np.array([p.prefill_s[0], p.tpot_s[0]]) / took - 1)
    prefill, decode = np.abs(np.array(off)).T
    return prefill, decode


@needs
def test_decode_and_prefill_of_other_peoples_gpus() -> None:
    prefill, decode = errors()
    assert decode.size > 70
    assert decode.mean() < 0.06 and decode.max() < 0.15
    assert prefill.mean() < 0.12 and prefill.max() < 0.40  # what the stack's file says
