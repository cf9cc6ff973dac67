"""Budgets as shares of each prompt: the same as so many tokens, whoever reads them."""

from itertools import pairwise

import numpy as np
import pytest

from kvsim.errors import InputError
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.prediction.generate import Prediction
from kvsim.quality.measured import harshness
from kvsim.serving.costs import StepCosts
from kvsim.serving.rules import Rules
from kvsim.techniques import parse
from kvsim.validate.run import Generation
from tests.support.decoders import decoder, prompts

SAME = {  # of a prompt of 4096 tokens
    "snapkv:budget=0.25": "snapkv:budget=1024",
    "snapkv:budget=0.25 + kivi:bits=4": "snapkv:budget=1024 + kivi:bits=4",
    "h2o:heavy=0.1,recent=0.2": "h2o:heavy=410,recent=820",
    "streamingllm:recent=0.125": "streamingllm:recent=512",
    "quest:budget=0.125": "quest:budget=512",
    "infllm:k=0.125,local=0.125": "infllm:k=4,local=512",
    "shadowkv:budget=0.125": "shadowkv:budget=512",
    "magicdec:budget=0.25": "magicdec:budget=1024",
    "magicdec:draft=snapkv,budget=0.25": "magicdec:draft=snapkv,budget=1024",
}


def deployment() -> Deployment:
    return Deployment(load_model("llama3.1-8b"), load_hardware("a6000"), load_stack("fused"))


@pytest.mark.parametrize("text", SAME)
def test_a_share_of_the_prompt_is_so_many_tokens(text: str) -> None:
    d, batch = deployment(), np.array([1.0, 8.0])
    share, tokens = (Prediction(parse(t), d, batch, 4096, 16) for t in (text, SAME[text]))
    for name in ("ttft_s", "tpot_s", "gpu_bytes", "host_bytes"):
        np.testing.assert_array_equal(getattr(share, name), getattr(tokens, name), name)


def test_layers_of_pyramidkv_have_their_shares() -> None:
    d, batch = deployment(), np.array([4.0])
    share, tokens = (
        Prediction(parse(f"pyramidkv:budget={x}"), d, batch, 4096, 16) for x in (0.25, 1024)
    )
    np.testing.assert_allclose(share.gpu_bytes, tokens.gpu_bytes, rtol=1e-4)  # rounded by layer
    every = parse("pyramidkv:budget=0.6").parts[0].selection
    budgets = [
        every.for_layer(i, d).for_prompt(1000).settings["budget"] for i in range(d.model.layers)
    ]
    assert budgets[0] == 1000 and budgets[-1] == 30  # never more than the prompt
    assert all(a >= b for a, b in pairwise(budgets))


def test_snapkv_keeps_its_window_of_a_short_prompt() -> None:
    (term,) = parse("snapkv:budget=0.125,window=32").terms
    assert term.for_prompt(100).settings["budget"] == 32  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["snapkv:budget=-0.1", "snapkv:budget=1.5", "h2o:recent=0"])
def test_other_fractions_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="between 0 and 1 a share of each prompt"):
        parse(text)


def test_every_request_of_a_trace_keeps_its_own_share() -> None:
    d, rules = deployment(), Rules()
    args = d, rules, 32768, 32000
    full, quarter, mean = (
        StepCosts(parse(t), *args).room.decode_bytes
        for t in ("full", "snapkv:budget=0.25", "snapkv:budget=1024")
    )
    some = np.array([64, 256, 2048])  # blocks: 1024, 4096 and 32768 tokens
    np.testing.assert_allclose(quarter[some] / full[some], 0.25, rtol=5e-3)  # and the newest
    np.testing.assert_allclose(mean[some] / full[some], [1.0, 0.25, 1 / 32], rtol=5e-3)


def test_evidence_knows_the_share_at_any_length() -> None:
    for length in (2000, 40000):
        assert harshness(parse("h2o:heavy=0.1,recent=0.1"), length).numbers["budget"] == 0.2


@pytest.mark.parametrize(
    ("share", "tokens"),
    [
        ("snapkv:budget=0.4,window=8", "snapkv:budget=24,window=8"),
        ("h2o:heavy=0.2,recent=0.2", "h2o:heavy=12,recent=12"),
        ("magicdec:budget=0.4,gamma=2", "magicdec:budget=24,gamma=2"),
    ],
)
def test_real_runs_keep_that_share(share: str, tokens: str) -> None:
    found = []
    for text in (share, tokens):
        run = Generation(decoder("llama"), parse(text), prompts(60, 60), 6, keep=True)
        run.complete()
        found.append(run.tokens)
    assert (np.asarray(found[0]) == np.asarray(found[1])).all()
