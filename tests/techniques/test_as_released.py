"""Techniques as their release runs them, where it differs from the paper."""

import numpy as np
import pytest

from kvsim.errors import InputError
from kvsim.graph import Point
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.prediction.generate import Prediction
from kvsim.prediction.memory import prefill_point
from kvsim.techniques import parse

PLACE = Deployment(load_model("llama3.1-8b"), load_hardware("a100-80g"), load_stack("fused"))
RELEASED = "shadowkv:budget=2048,hit=0.6,local=4,prefill=sequence"


def test_shadowkv_as_released_serves_what_its_page_reports() -> None:
    fits = {
        text: Prediction(parse(text), PLACE, np.array([24.0]), 122_880, 128, contexts=2).fits[0]
        for text in (RELEASED, "shadowkv:budget=2048")
    }
    assert list(fits.values()) == [True, False]


def test_shadowkv_fetches_what_the_step_before_has_not() -> None:
    point = Point(8.0, 60_000.0, 1.0, 60_000.0, 60_100.0)
    moved = []
    for hit in (0.0, 0.6, 1.0):
        step = parse(f"shadowkv:hit={hit}").forward(PLACE, point)
        ops = [op for group in step.groups for layer in group.layers for op in layer]
        moved.append(next(op.bytes["h2d"] for op in ops if op.name == "fetch"))
    assert moved[1] == pytest.approx(0.4 * moved[0]) and moved[2] == 0


def test_pyramidkv_puts_the_window_on_top_as_released() -> None:
    point = Point(1.0, 4000.0, 1.0, 4000.0, 4100.0)
    paper, released = (
        parse(text).resident(PLACE, point)["gpu"]["kv"]
        for text in ("pyramidkv:budget=256", "pyramidkv:budget=256,window=on-top")
    )
    each = 4 * 1024 * 32  # bytes of a token in all layers
    assert released - paper == pytest.approx(8 * each, rel=0.02)
    with pytest.raises(InputError, match="give budget in tokens"):
        parse("pyramidkv:budget=0.25,window=on-top")
    with pytest.raises(InputError, match="expected"):
        parse("pyramidkv:window=below")


def test_r_kv_compares_the_keys_of_one_sequence_as_released() -> None:
    cuts = []
    for text in ("r-kv", "r-kv:redundancy=first"):
        step = parse(text).prefill(PLACE, prefill_point(64.0, 4000.0, 100.0))
        ops = [op for group in step.groups for layer in group.layers for op in layer]
        cuts.append(next(op.flops for op in ops if op.name == "redundancy"))
    asked = 2.0 * 128 * 64 * 32 * 8 * 4000  # of the latest eight queries, 32 heads each
    assert cuts[0] - asked == pytest.approx(64 * (cuts[1] - asked))


def test_kvzip_cuts_nothing_before_all_layers_have_repeated_the_prompt() -> None:
    reading = prefill_point(2.0, 4000.0, 100.0)
    kept = parse("kvzip:budget=1000").resident(PLACE, reading)["gpu"]
    whole = parse("full").resident(PLACE, reading)["gpu"]
    assert kept["kv"] + kept["kv before the cut"] == pytest.approx(whole["kv"])
    decoding = Point(2.0, 4000.0, 1.0, 4000.0, 4100.0)
    assert "kv before the cut" not in parse("kvzip:budget=1000").resident(PLACE, decoding)["gpu"]
