"""What techniques state against scalar arithmetic from the papers and the released code.

Techniques with an implementation are held to what real runs compute, move and keep, in
tests/validate/test_impl_counts.py; here is what no such run shows.

b sequences, s tokens, h hidden, hk = KV heads x D, I width of the MLP, V vocabulary, L layers.
"""

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.engine import attention
from kvsim.graph import Point
from kvsim.models.configs import load_model
from kvsim.techniques import parse
from tests.support.arithmetic import (
    B,
    S,
    decoding,
    deployment,
    gemms,
    moved,
    number,
)


@pytest.mark.parametrize("model", ["llama2-7b", "mistral-7b-v0.2", "opt-6.7b"])
@pytest.mark.parametrize("q", [1, 5])
def test_decoding_layer(model: str, q: int) -> None:
    d, t = deployment(model), parse("full")
    m = d.model
    h, hk, width, mlps = m.hidden, m.kv_heads * m.head_dim, m.ffn, 3 if m.gated else 2
    step = t.forward(d, decoding(new=q))
    layer = {op.name: op for op in step.groups[0].layers[0]}
    linear = h * (h + 2 * hk) + h * h + mlps * h * width
    assert sum(number(op.flops) for op in gemms(layer)) == 2 * B * q * linear
    outputs = (h + 2 * hk) + h + (mlps - 1) * width + h
    states = 2 * B * q * (3 * h + width + outputs)  # every product's inputs and outputs
    biases = 2 * outputs if m.qkv_bias else 0  # of OPT, on every product
    assert sum(moved(op) for op in gemms(layer)) == 2 * linear + biases + states
    pairs = sum(S + i + 1 for i in range(q))
    assert number(layer["attn"].flops) == 4 * B * m.heads * m.head_dim * pairs
    cache = 4 * B * (S + q) * hk
    assert moved(layer["attn"]) == cache + 4 * B * q * hk + 2 * 2 * B * q * h
    assert number(step.head[0].flops) == 2 * B * q * h * m.vocab
    assert sum(group.count for group in step.groups) == m.layers


@given(st.integers(0, 60), st.integers(1, 60), st.integers(1, 80))
def test_pairs_of_queries_and_keys(context: int, new: int, window: int) -> None:
    d, p = deployment("llama2-7b"), Point(1, float(context), float(new), 1, 200)
    assert attention.query_key_pairs(d, p, None) == sum(context + i + 1 for i in range(new))
    seen = sum(min(window, context + i + 1) for i in range(new))
    assert attention.query_key_pairs(d, p, window) == seen


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_touched_experts_by_enumeration(tokens: int) -> None:
    model = replace(load_model("mixtral-8x7b"), experts=5, experts_active=2)
    d = replace(deployment("mixtral-8x7b"), model=model)
    choices = list(combinations(range(5), 2))
    touched = np.mean([len(set().union(*draw)) for draw in product(choices, repeat=tokens)])
    p = Point(tokens, 100.0, 1.0, 100, 200)
    layer = {op.name: op for op in parse("full").forward(d, p).groups[0].layers[0]}
    for name, inputs, outputs in (("up", 4096, 2 * 14336), ("down", 14336, 4096)):
        op = layer[f"experts_{name}"]
        states = 2 * 2 * tokens * (inputs + outputs)  # two experts per token
        assert moved(op) == pytest.approx(touched * 2 * inputs * outputs + states, rel=1e-12)
        assert number(op.flops) == 2 * 2 * tokens * inputs * outputs


@pytest.mark.parametrize(
    ("stack", "text", "words"),
    [
        ("flexgen", "kivi", "unpacks a layer to fp16 before attention, moving 8 bytes"),
        ("flexgen", "flexgen:bits=4", "unpack what arrives from the host"),
        ("hf-specache", "kivi", "in 4 passes at 80% of memory bandwidth"),
        ("fused", "kivi", "unpacks in registers (1.8 vector operations"),
    ],
)
def test_a_low_bit_answer_says_which_kernels_it_stands_for(
    stack: str, text: str, words: str
) -> None:
    (note,) = parse(text).notes(deployment("opt-6.7b", stack), decoding())
    assert note.startswith("the low-bit cache assumes ") and words in note


def test_kvpr_says_what_every_gpu_of_a_group_loads() -> None:
    """Two GPUs halve keys and values but not the layer's input, which is then no smaller."""
    whole = deployment("opt-6.7b")
    for tp, words in ((1, "100 of"), (2, "split 100: with 1 query heads per KV head and 2")):
        (note,) = parse("kvpr:split=100").notes(replace(whole, tp=tp), decoding())
        assert note.startswith(words)
        assert ("GPUs that each load the layer's whole input" in note) is (tp == 2)
    wide = replace(whole.model, kv_heads=64, heads=64)  # still smaller on two GPUs
    (note,) = parse("kvpr:split=100").notes(replace(whole, model=wide, tp=2), decoding())
    assert "each of 2 GPUs loads the layer's whole input, 4096 numbers per token" in note
