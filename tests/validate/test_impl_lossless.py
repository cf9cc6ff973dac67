"""Techniques that lose nothing: the tokens and logits of full KV, several prompts."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from kvsim.errors import InputError
from kvsim.graph import Number
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.techniques import parse
from kvsim.techniques.axes.base import LayerPass
from kvsim.techniques.papers.kvpr import Place
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.run import Generation
from tests.support.decoders import decoder, prompts
from tests.support.runs import assert_same_run

MODELS = ("llama", "opt", "mistral", "qwen3")
LENGTHS = (25, 25, 25, 25)
GENERATE = 16


@cache
def on_a_machine(model: str) -> Decoder:
    plain = decoder(model)
    stated = Deployment(plain.arch.model, load_hardware("a6000"), load_stack("kvsim"))
    return replace(plain, deployment=stated)


@cache
def results(
    text: str, model: str, lengths: tuple[int, ...] = LENGTHS, chunk: int = 8192
) -> Generation:
    """A complete run that has kept its logits."""
    given = prompts(*lengths)
    run = Generation(on_a_machine(model), parse(text), given, GENERATE, keep=True, chunk=chunk)
    run.complete()
    return run


def assert_full(text: str, model: str, lengths: tuple[int, ...] = LENGTHS) -> None:
    assert_same_run(results(text, model, lengths), results("full", model, lengths))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "text",
    [
        "offload", "offload:host_share=0.5", "offload:schedule=column,parts=1",
        "offload:schedule=column,parts=4", "offload:host_share=0",
        "flexgen:weights_gpu=50,cache_gpu=50,parts=2",
        "kcache:n=41", "kcache:n=1000,gpu_layers=1", "kcache:n=41,gpu_layers=3",
        "streamingllm:sink=4,recent=37", "streamingllm:sink=0,recent=500",
        "h2o:heavy=20,recent=21", "snapkv:budget=60,window=8",
    ],
)  # fmt: skip
def test_the_whole_context_is_full_kv(text: str, model: str) -> None:
    if model == "mistral" and text.startswith(("h2o", "snapkv")):
        with pytest.raises(InputError, match="sliding windows"):
            results(text, model)
        return
    assert_full(text, model)


@pytest.mark.parametrize("model", ["llama", "opt"])
def test_kvpr_at_every_split(model: str) -> None:
    lengths = (12, 12, 12)
    for split in range(13):
        assert_full(f"kvpr:split={split}", model, lengths)


@pytest.mark.parametrize("settings", ["offload", "offload:schedule=column,parts=1", "kvpr:split=5"])
def test_a_single_layer(settings: str) -> None:
    """The next visit is the same layer's, and needs the token that this one stores."""
    whole = on_a_machine("llama")
    weights = replace(whole.weights, layers=whole.weights.layers[:1])
    one = replace(whole, arch=whole.arch.cut(1), weights=weights)
    given = prompts(*LENGTHS)
    run, full = (Generation(one, parse(t), given, GENERATE, keep=True) for t in (settings, "full"))
    run.complete(), full.complete()
    assert_same_run(run, full)


@pytest.mark.parametrize("settings", ["", "split=1000", "split=5,schedule=column,parts=2"])
@pytest.mark.parametrize("model", MODELS)
def test_kvpr_by_its_own_split_and_by_columns(settings: str, model: str) -> None:
    assert_full(f"kvpr:{settings}", model)


@pytest.mark.parametrize("settings", ["", "schedule=column,parts=2"])
@pytest.mark.parametrize("model", ["llama", "opt"])
def test_a_split_that_grows_with_the_context(settings: str, model: str, monkeypatch: Any) -> None:
    def half(place: Place, at: LayerPass) -> Number:
        return np.floor(at.p.context / 2)

    monkeypatch.setattr("kvsim.validate.techniques.kvpr.choose_split", half)
    lengths = (30, 30, 30, 30)
    given = prompts(*lengths)
    run = Generation(on_a_machine(model), parse(f"kvpr:{settings}"), given, GENERATE, keep=True)
    impl: Any = run.impl
    split = impl.placements[0].rows[0, 0].split
    assert [split(n) for n in (30, 33, 40)] == [15, 16, 20]
    run.complete()
    assert_same_run(run, results("full", model, lengths))
