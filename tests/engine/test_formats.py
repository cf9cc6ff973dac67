"""Closed forms of cache sizes: the published cells, and the techniques that allocate by them."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.engine.formats import (
    Format,
    bytes_per_number,
    compression_ratio,
    kivi,
    mixed_bits,
    mixed_parameters,
)
from kvsim.graph import Point
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.prediction.generate import Prediction
from kvsim.prediction.memory import prefill_point
from kvsim.techniques import parse
from kvsim.techniques.papers.kvpr import optimal_split

GIB = 2.0**30

# SpeCache, table 1: context -> bits, group, printed size; LLaMA-2 4k, Mistral 32k, LLaMA-3 8k.
SPECACHE_CELLS = [
    (4096, 2, 32, "0.22"),
    (4096, 2, 64, "0.19"),
    (32768, 2, 32, "0.19"),
    (32768, 2, 64, "0.16"),
    (32768, 1, 32, "0.13"),
    (32768, 1, 64, "0.10"),
    (8192, 2, 32, "0.20"),
    (8192, 2, 64, "0.17"),
    (8192, 1, 32, "0.14"),
    (8192, 1, 64, "0.11"),
]
# KVPR, tables 3 and 4, batch 64: model -> prompt, generated, cache and the baseline's peak [GiB].
KVPR_ROWS = {
    "opt-6.7b": [
        (128, 32, "5.0", 14.427),
        (128, 128, "8.0", 14.708),
        (256, 32, "9.0", 16.337),
        (256, 128, "12.0", 16.618),
        (512, 32, "17.0", 20.154),
        (512, 128, "20.0", 20.576),
    ],
    "opt-13b": [
        (128, 32, "7.812", 26.083),
        (128, 128, "12.500", 26.434),
        (256, 32, "14.062", 28.087),
        (256, 128, "18.750", 28.439),
        (512, 32, "26.562", 32.851),
        (512, 128, "31.250", 34.146),
    ],
}


def ideal(model: str) -> Deployment:
    return Deployment(load_model(model), load_hardware("a100-80g"), load_stack("ideal"))


def held(technique: str, d: Deployment, p: Point, *buffers: str, tier: Any = "gpu") -> float:
    """Resident bytes of the named buffers."""
    named = parse(technique).resident(d, p)[tier]
    return sum(float(np.asarray(named[name])) for name in buffers)


def decoding(batch: int, length: int) -> Point:
    """The pass that ends with ``length`` cached tokens."""
    return Point(batch, length - 1.0, 1.0, length / 2, float(length))


@pytest.mark.parametrize("model", ["llama2-7b", "llama3-8b", "mistral-7b-v0.2"])
@pytest.mark.parametrize(("context", "bits", "group", "printed"), SPECACHE_CELLS)
def test_kivi_and_specache_allocate_what_that_table_prints(
    model: str, context: int, bits: int, group: int, printed: str
) -> None:
    d, p = ideal(model), decoding(3, context)
    full = held("full", d, p, "kv")
    of_kivi = held(f"kivi:bits={bits},group={group},residual=128", d, p, "kv")
    settings = f"specache:bits={bits},group={group},k=64,residual=64"
    of_specache = held(settings, d, p, "kv", "fetched pairs")
    assert of_kivi / full == pytest.approx(of_specache / full, rel=1e-12)
    assert f"{of_kivi / full:.2f}" == printed
    assert held(settings, d, p, "kv", tier="host") == full
    new = held(settings, d, p, "new tokens")  # the output token and the guess, not in the table
    assert new / full == pytest.approx(2 / context, rel=1e-12)


@pytest.mark.parametrize(("salient", "tokens"), [(0.6, 840), (0.8, 3072), (0.6, 4096)])
@pytest.mark.parametrize("model", ["llama2-7b", "llama3-8b"])
def test_zipcache_allocates_by_that_ratio(model: str, salient: float, tokens: int) -> None:
    """Per part of the split, algorithms 1 and 2 make two numbers per channel of K and one of V.

    The tables' ratios count four per channel and four per token, where algorithm 1 has two per
    token; what is really kept compresses within 0.5 % of them from 840 tokens on.
    """
    d, p = ideal(model), prefill_point(8, tokens, 100)
    width = d.model.kv_heads * d.model.head_dim
    bits = mixed_bits(round(salient * tokens) / tokens, 4, 2)  # whole tokens are salient
    kept = 2 * (2 * width + width) + 2 * 8 * tokens
    packed = held(f"zipcache:salient={salient}", d, p, "kv")
    ratio = held("full", d, p, "kv") / packed
    assert ratio == pytest.approx(compression_ratio(8, width, tokens, bits, kept), rel=1e-12)
    counted = compression_ratio(8, width, tokens, bits, mixed_parameters(8, width, tokens))
    assert ratio == pytest.approx(counted, rel=5e-3)


def test_zipcache_keeps_channels_of_every_window() -> None:
    """Algorithm 3: a hundred tokens are packed by themselves; 49 wait in the window."""
    d, width = ideal("llama3-8b"), 8 * 128
    p = Point(8, 1349.0, 1.0, 1000, 1500.0)
    packed = held("zipcache:salient=0.6", d, p, "kv") / d.model.layers
    channels = 4 * 2 * 3 * width  # the prompt and three windows, in two parts each
    numbers = 8 * 2 * width * 1300 * 3.2 / 8
    assert packed == pytest.approx(numbers + 2 * (channels + 2 * 8 * 1300), rel=1e-12)
    window = held("zipcache:salient=0.6", d, p, "fp16 window") / d.model.layers
    assert window == 8 * 2 * width * 100 * 2


@pytest.mark.parametrize("length", [4096, 32768])
def test_quantspec_allocates_both_halves_and_its_double_buffer(length: int) -> None:
    d, p = ideal("llama2-7b-32k-instruct"), decoding(1, length)
    kv16 = held("full", d, p, "kv")
    expected = kv16 * (0.5 + 1 / 64) + kv16 * 256 / length
    assert held("quantspec", d, p, "kv") == pytest.approx(expected, rel=1e-12)


def test_flexgen_groups_of_64_at_4_bits() -> None:
    d, p = ideal("opt-13b"), decoding(4, 1024)
    assert bytes_per_number(4, 64) == 0.5625
    packed = held("offload:bits=4", d, p, "kv", tier="host")
    assert f"{held('full', d, p, 'kv') / packed:.2f}" == "3.56"


@pytest.mark.parametrize("model", KVPR_ROWS)
def test_kvpr_tables_3_and_4(model: str) -> None:
    d = ideal(model)
    for prompt, generate, printed, _ in KVPR_ROWS[model]:
        size = held("full", d, decoding(64, prompt + generate), "kv") / GIB
        decimals = len(printed.partition(".")[2])
        assert f"{size:.{decimals}f}" == printed


def peak_gib(model: str, prompt: int, generate: int) -> float:
    """Weights, layer 0 and two device buffers; then logits, or one layer's eager attention.

    Of an attention score fp16 product, fp32 softmax and its fp16 copy are alive, over the static
    cache's maximum length; of a hidden state five copies. 0.022 GiB is a constant of all rows.
    """
    m, batch = load_model(model), 64
    logits = 2 * 2 * m.vocab
    attention = 5 * 2 * m.hidden + (2 + 4 + 2) * m.heads * (prompt + generate)
    cache = 3 * 4 * m.hidden * batch * (prompt + generate)
    alive = batch * prompt * max(logits, attention)
    return (2 * m.parameters + cache + alive) / GIB + 0.022


@pytest.mark.parametrize("model", KVPR_ROWS)
def test_predicted_peak_memory_of_the_baseline(model: str) -> None:
    stack = load_stack("hf-offload-static")
    d = Deployment(load_model(model), load_hardware("a100-40g"), stack)
    for prompt, generate, *_ in KVPR_ROWS[model]:
        predicted = Prediction(parse("offload"), d, np.array([64.0]), prompt, generate)
        allocated = (
            predicted.gpu_bytes[0] - stack.memory.context_memory
        )  # what PyTorch's counter sees
        assert allocated / GIB == pytest.approx(peak_gib(model, prompt, generate), rel=0.01)


@pytest.mark.parametrize(("hidden", "share"), [(4096, "0.704"), (5120, "0.656"), (7168, "0.576")])
def test_split_of_the_released_constants(hidden: int, share: str) -> None:
    assert f"{optimal_split(1.0, hidden, 32e9, 312e12):.3f}" == share


@given(
    st.integers(2, 400),
    st.sampled_from([768, 2048, 4096, 5120, 7168, 12288]),
    st.floats(4e9, 900e9),
    st.floats(2e13, 2e15),
    st.booleans(),
)
def test_the_split_is_where_equation_10_is_smallest(
    context: int, hidden: int, link: float, flops: float, activations: bool
) -> None:
    """Brute force over every split; with the activations' time (columns) and without (rows)."""
    batch, half = 8, 2

    def seconds(split: float) -> float:
        inputs = batch * split * hidden * half / link
        recompute = 4 * batch * split * hidden**2 / flops
        rest = 2 * batch * (context - split) * hidden * half / link
        return inputs * activations + max(recompute, rest)

    best = min(seconds(split) for split in range(context + 1))
    split = optimal_split(context, hidden, link, flops)
    assert 0 <= split <= context
    assert seconds(float(split)) <= best * (1 + 1e-12)
    rounded = min(seconds(float(np.floor(split))), seconds(float(np.ceil(split))))
    assert rounded == pytest.approx(best, rel=1e-12)


@given(st.integers(1, 3000), st.sampled_from([32, 64, 128]), st.sampled_from([1, 2, 4]))
def test_a_kivi_cache_read_token_by_token(tokens: int, residual: int, bits: int) -> None:
    """Keys wait until a block is full; values are packed as soon as ``residual`` follow them."""
    waiting_keys, packed_keys, waiting_values, packed_values = 0, 0, 0, 0
    for _ in range(tokens):
        waiting_keys, waiting_values = waiting_keys + 1, waiting_values + 1
        if waiting_keys == residual:
            waiting_keys, packed_keys = 0, packed_keys + residual
        if waiting_values > residual:
            waiting_values, packed_values = residual, packed_values + 1
    packed, fresh = packed_keys + packed_values, waiting_keys + waiting_values
    expected = 128 * (packed * (bits / 8 + 4 / 64) + fresh * 2)
    assert kivi(bits, 64, residual).read(128, 128, tokens) == pytest.approx(expected)


@given(st.integers(256, 3000))
def test_a_quantspec_buffer_holds_one_to_two_groups(tokens: int) -> None:
    """Both halves roll over together: at least 128 and at most 255 tokens stay in fp16."""
    stored = Format(8, 128, k_tail=128, v_tail=128, k_block=128, v_block=128)
    fresh = 128 + tokens % 128
    expected = 2 * 64 * ((tokens - fresh) * (1 + 4 / 128) + fresh * 2)
    assert stored.read(64, 64, tokens) == pytest.approx(expected)
