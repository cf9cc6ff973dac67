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
from kvsim.engine import ops as blocks
from kvsim.engine.ops import output_ops
from kvsim.engine.roofline import seconds
from kvsim.graph import Point
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.prediction.memory import prefill_point
from kvsim.techniques import compose, parse
from kvsim.techniques.axes.base import LayerPass
from kvsim.techniques.papers.kvpr import Kvpr, Place, choose_split
from tests.support.arithmetic import (
    B,
    S,
    decoding,
    deployment,
    gemms,
    last_layer,
    moved,
    number,
    through,
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


def test_a_sliding_window_bounds_flops_reads_and_memory() -> None:
    d, p = deployment("gemma-2-9b"), decoding(context=8000)
    local, everywhere = parse("full").forward(d, p).groups[0].layers
    for layer, seen in ((local, 4096), (everywhere, 8001)):
        (op,) = (op for op in layer if op.name == "attn")
        assert number(op.flops) == 4 * B * 16 * 256 * seen
        assert moved(op) == 4 * B * 8 * 256 * (seen + 1) + 4 * B * 16 * 256
    kv = parse("full").resident(d, p)["gpu"]["kv"]
    assert kv == 21 * 4 * B * 8 * 256 * (4096 + 8001)


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


def test_latent_attention_takes_the_cheaper_form() -> None:
    d = deployment("deepseek-v2-lite")
    heads, rank, rope, nope, values = 16, 512, 64, 128, 128
    for p, pairs in ((decoding(), S + 1), (prefill_point(B, 2000, 100), 2000 * 2001 / 2)):
        layer = last_layer("full", d, p)
        length, q = number(p.length), number(p.new)
        up = rank * heads * (nope + values)
        expanded = 2 * B * length * up + 2 * B * heads * pairs * (nope + rope + values)
        absorbed = 2 * B * q * up + 2 * B * heads * pairs * (rank + rope + rank)
        assert (absorbed < expanded) is (not p.prefill)
        stated = number(layer["kv_up"].flops) + number(layer["attn"].flops)
        assert stated == pytest.approx(min(expanded, absorbed), rel=1e-12)
        assert moved(layer["attn"]) >= 2 * B * (rank + rope) * length
    kv = parse("full").resident(d, decoding())["gpu"]["kv"]
    assert kv == 27 * 2 * B * (rank + rope) * (S + 1)


@pytest.mark.parametrize(("model", "passes"), [("llama2-7b", 3), ("mistral-7b-v0.2", 11)])
def test_eager_attention_passes_over_the_cache(model: str, passes: int) -> None:
    """Concatenation 2; grouped heads 1 read, G writes and G reads instead of one read."""
    d, m = deployment(model, "hf-eager"), load_model(model)
    op, hk = last_layer("full", d, decoding())["attn"], m.kv_heads * m.head_dim
    scores = d.stack.attention.score_bytes * B * m.heads * (S + 1)
    assert moved(op) == passes * 4 * B * (S + 1) * hk + 4 * B * hk + 4 * B * m.hidden + scores


@pytest.mark.parametrize("model", ["opt-6.7b", "opt-13b"])
@pytest.mark.parametrize(("stack", "layers"), [("ideal", 0), ("hf-offload-static", 1)])
def test_kvpr_bytes_and_recomputation(model: str, stack: str, layers: int) -> None:
    """A static cache moves its maximum length, and layer 0 stays on the GPU."""
    d, split, p = deployment(model, stack), 300, decoding()
    h, count, length = d.model.hidden, d.model.layers - layers, S + 100 if layers else S
    step = compose(Kvpr(split)).cycle(d, p).steps[0]
    assert through(step, "h2d") == count * (2 * B * split * h + 4 * B * (length - split) * h)
    assert through(step, "d2h") == count * 4 * B * h
    (op,) = (op for op in step.groups[-1].layers[0] if op.name == "recompute")
    assert number(op.flops) == 4 * B * split * h * h
    assert moved(op) == 2 * (h * 2 * h + 2 * h) + 2 * B * split * (h + 2 * h)  # with OPT's biases


@pytest.mark.parametrize(("model", "batch"), [("opt-6.7b", 32), ("opt-30b", 32), ("llama2-7b", 1)])
def test_kvpr_balances_gpu_and_link(model: str, batch: int) -> None:
    """No other split makes the longer of the two shorter, the head spread over the layers."""
    d, p = deployment(model), Point(batch, 1000.0, 1.0, 1000, 1100)
    head = sum(number(seconds(op, d)) for op in output_ops(d, p)) / d.model.layers

    def longest(split: float) -> float:
        (layer,) = compose(Kvpr(split)).forward(d, p).groups[0].layers
        lanes = ([op for op in layer if op.stream == lane] for lane in ("gpu", "h2d"))
        gpu, link = (sum(number(seconds(op, d)) for op in lane) for lane in lanes)
        return max(gpu + head, link)

    (parts,) = parse("kvpr").parts
    assert isinstance(parts.placement, Place)
    at = LayerPass(d, p, d.model.layout[0][0][0], parts)
    chosen = number(choose_split(parts.placement, at))
    assert longest(chosen) == min(longest(float(split)) for split in range(0, 1001))
    assert (chosen < 1000) is (model != "opt-6.7b")  # there the link is the longer one throughout


def test_flexgen_widens_packed_weights_before_their_product() -> None:
    """14.5 bytes per weight at 85 % of a T4's 320 GB/s; fp16 weights need nothing."""
    for weights, each in (("int4", 14.5), ("fp16", 0.0)):
        d = Deployment(load_model("opt-6.7b"), load_hardware("t4"), load_stack("flexgen"), weights)
        op = blocks.gemm(d, "up", 8.0, (4096, 16384))
        expected = each * 4096 * 16384 / (0.85 * d.bandwidth["hbm"])
        assert number(op.fixed) == pytest.approx(expected, rel=1e-12)


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


def test_dms_and_medusa_memories() -> None:
    """10,000 tokens, of which all of the latest 256 and an eighth of others; five heads."""
    d, p = deployment("llama3-8b"), Point(4, 9999, 1.0, 9000, 10100)
    kept, heads = (parse(text).resident(d, p)["gpu"] for text in ("dms", "medusa"))
    assert number(kept["kv"]) == 32 * 4 * (256 + 9744 / 8) * 4096
    assert number(heads["draft weights"]) == 5 * 2 * 4096 * (4096 + 128256)


@pytest.mark.parametrize(
    ("text", "name", "read", "scores"),
    [
        # keys and queries in fp16, and a number per block
        ("xattention:block=128,stride=8", "antidiagonals", (1024 + 4096) * 8192, 32 * 64 * 64 / 2),
        # twice the keys, for the last block's queries and for means; fp32 scores, twice
        (
            "flexprefill:block=128", "last_block", 2 * 1024 * 8192 + 4096 * (128 + 8192),
            4 * 32 * (128 * 8192 + 64 * 64) / 2,
        ),
    ],
)  # fmt: skip
def test_estimates_of_a_prompt(text: str, name: str, read: float, scores: float) -> None:
    step = (
        parse(text)
        .cycle(deployment("llama3-8b"), Point(2, 0, 8192, 8192, 8300, prefill=True))
        .steps[-1]
    )
    ops = {op.name: op for group in step.groups for layer in group.layers for op in layer}
    assert moved(ops[name]) == 2 * 2 * (read + 2 * scores)
