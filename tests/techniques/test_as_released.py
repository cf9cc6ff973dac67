"""Techniques as their release runs them, where it differs from the paper."""

import numpy as np

from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.prediction.generate import Prediction
from kvsim.techniques import parse

PLACE = Deployment(load_model("llama3.1-8b"), load_hardware("a100-80g"), load_stack("fused"))
RELEASED = "shadowkv:budget=2048,hit=0.6,local=4,prefill=sequence"


def test_shadowkv_as_released_serves_what_its_page_reports() -> None:
    fits = {
        text: Prediction(parse(text), PLACE, np.array([24.0]), 122_880, 128, contexts=2).fits[0]
        for text in (RELEASED, "shadowkv:budget=2048")
    }
    assert list(fits.values()) == [True, False]
