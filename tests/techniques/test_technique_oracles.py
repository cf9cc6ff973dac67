"""What techniques state against scalar arithmetic from the papers and the released code.

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


@pytest.mark.parametrize(("share", "bits", "size"), [(1, 16, 2), (0.25, 16, 2), (1, 4, 0.5625)])
def test_offload_moves_what_is_on_the_host(share: float, bits: int, size: float) -> None:
    d = deployment("mistral-7b-v0.2")
    step = parse(f"offload:host_share={share},bits={bits}").cycle(d, decoding()).steps[0]
    assert through(step, "h2d") == pytest.approx(32 * share * 2 * size * B * S * 8 * 128)
    assert through(step, "d2h") == pytest.approx(32 * share * 2 * size * B * 8 * 128)


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


def test_columns_spread_a_layers_weights_over_the_tiles() -> None:
    d, p = deployment("opt-13b"), decoding()
    h, given = 5120, {"offload:schedule=column,parts=4": 1, "flexgen:weights_gpu=25,parts=4": 0.75}
    for technique, share in given.items():
        layer = last_layer(technique, d, p)
        assert moved(layer["load_weights"], "h2d") == share * 2 * 12 * h * h / 4
        step = parse(technique).cycle(d, p).steps[0]
        cache = 40 * 4 * B * S * h
        assert through(step, "h2d") == pytest.approx(40 * share * 24 * h * h + cache, rel=1e-12)
    layer = last_layer("flexgen:states_gpu=0,parts=4", d, p)
    assert moved(layer["load_states"], "h2d") == moved(layer["store_states"], "d2h") == 2 * h


@pytest.mark.parametrize("model", ["llama2-7b", "mistral-7b-v0.2"])
def test_kcache(model: str) -> None:
    d, n, heads = deployment(model), 64, 32
    hk = d.model.kv_heads * 128
    layer = last_layer(f"kcache:n={n}", d, decoding())
    own = 2 * B * hk + 2 * B * heads * 128  # new keys, and queries
    assert moved(layer["scores"]) == 2 * B * (S + 1) * hk + own
    assert number(layer["scores"].flops) == 2 * B * heads * 128 * (S + 1)
    assert moved(layer["topk"]) == 4 * B * heads * (S + 1)  # fp16 scores out and in again
    assert moved(layer["fetch_v"], "h2d") == 2 * B * heads * n * 128
    assert number(layer["fetch_v"].rows) == B * heads * n
    assert number(layer["attn"].flops) == 2 * B * heads * n * 128
    assert moved(layer["attn"]) == 2 * B * heads * (n * 128 + n + 128)  # values, weights, outputs
    assert moved(layer["store_v"], "d2h") == 2 * B * hk
    t = parse(f"kcache:n={n},gpu_layers=2")
    prompts = t.prefill(d, prefill_point(B, S, 100))
    assert through(prompts, "d2h") == 30 * 2 * B * S * hk
    held = t.resident(d, decoding())
    keys, values_here = 32 * 2 * B * (S + 1) * hk, 2 * 2 * B * (S + 1) * hk
    assert held["gpu"]["kv"] == keys + values_here
    assert held["host"]["kv"] == 30 * 2 * B * (S + 1) * hk


def test_specache_on_mistral() -> None:
    d, t = deployment("mistral-7b-v0.2"), parse("specache:bits=1,group=32,k=64")
    p = replace(decoding(context=1022), batch=1)
    hk = 8 * 128
    step = t.cycle(d, p).steps[0]
    assert f"{through(step, 'h2d') / 1e6:.2f}" == "8.39"
    assert f"{through(step, 'd2h') / 1e3:.0f}" == "131"
    layer = {op.name: op for op in step.groups[0].layers[0]}
    assert number(layer["prefetch"].rows) == 2 * 8 * 64  # 256 B each
    one = sum(number(op.flops) for op in gemms(last_layer("full", d, p)))
    assert sum(number(op.flops) for op in gemms(layer)) == 2 * one
    size = 1 / 8 + 4 / 32
    assert moved(layer["quantise"]) == 2 * hk * (2 + size)  # the output token alone
    # both new tokens in fp16 (algorithm 3); of 1022 the last 62 keys and 64 values are not packed
    packed = hk * (960 + 958) * size + hk * (64 + 66) * 2
    own = 2 * 4 * hk + 2 * 4 * 32 * 128
    assert moved(layer["attn"]) == packed + 4 * hk * 64 + own
    assert "prefetch@step-1" in layer["attn"].after
    prompts = t.prefill(d, prefill_point(1, S, 100))
    assert through(prompts, "d2h") == 32 * 4 * S * hk
    assert len(t.predecoding(d, p)) == 1
    assert last_layer("specache:speculative=false", d, p)["attn_again"].after == ("prefetch",)


def test_zipcache() -> None:
    d, prompt = deployment("llama3-8b"), 2000
    hk, heads, own = 1024, 32, 4 * B * (1024 + 4096)
    layer = last_layer("zipcache:probe=0.1", d, prefill_point(B, prompt, 100))
    pairs = 0.1 * prompt * prompt
    assert number(layer["probe"].flops) == pytest.approx(2 * B * heads * 128 * pairs)
    # keys and probing queries; scores out and in, before and after the softmax; fp32 saliency out
    probed = 2 * B * hk * prompt + 2 * B * heads * 128 * 200 + 8 * B * heads * pairs
    assert moved(layer["probe"]) == pytest.approx(probed + 4 * B * 8 * prompt)
    layer = last_layer("zipcache:salient=0.6", d, decoding(context=2049, prompt=prompt))
    # of each precision two numbers per channel of K, one of V; two per token (algorithms 1, 2)
    packed = B * 2 * hk * 2000 * 3.2 / 8 + 2 * (2 * 3 * hk + 2 * B * 2000)
    assert moved(layer["attn"]) == pytest.approx(packed + 4 * B * hk * 50 + own)
    numbers = 2 * (2 * 3 * hk + 2 * B * 100)  # written once per window of a hundred
    assert moved(layer["quantise"]) == pytest.approx(B * 2 * hk * (2 + 0.4) + numbers / 100)


def test_zipcache_probes_a_tenth_of_the_decoded_tokens() -> None:
    """Algorithm 3: 5 recent and 5 random tokens in a hundred compute scores over packed keys."""
    op = last_layer("zipcache", deployment("llama3-8b"), decoding())["probe"]
    assert moved(op) <= 0.1 * 2 * B * 1024 * (S + 1) + 0.1 * 8 * B * 32 * (S + 1)


def test_quantspec_cycle() -> None:
    d, t = deployment("llama2-7b"), parse("quantspec:gamma=4,acceptance=0.9")
    h, width = 4096, 11008
    cycle = t.cycle(d, decoding(context=1152))
    assert number(cycle.tokens) == 1 + 4 * 0.9
    layers = [{op.name: op for op in step.groups[0].layers[0]} for step in cycle.steps]
    assert [number(layer["qkv"].size) for layer in layers] == [B] * 4 + [5 * B]
    draft, *_, verify = layers
    quarter, half = 0.5 + 4 / 128, 1 + 4 / 128  # bytes per number
    for layer, size, q in ((draft, quarter, 1), (verify, half, 5)):
        read = 2 * h * (1024 * size + (128 + q) * 2)  # 1152 tokens are nine groups, one in fp16
        assert moved(layer["attn"]) == B * read + q * (4 * B * h + 4 * B * h)
    mlp = moved(draft["up"]) + moved(draft["down"]) - 2 * B * (h + 2 * width + width + h)
    assert mlp == 3 * h * width * (0.5 + 2 / 128)
    assert moved(draft["qkv"]) == moved(last_layer("full", d, decoding())["qkv"])
    assert moved(verify["quantise"]) == pytest.approx(4.6 * B * 2 * h * (2 + half))
    assert number(t.resident(d, decoding())["gpu"]["draft weights"]) == 32 * 3 * h * width * (
        0.5 + 2 / 128
    )


def test_magicdec_holds_a_second_cache_of_a_quarter_of_the_context() -> None:
    d, length = deployment("llama2-7b"), 8192
    p = Point(1, length - 1.0, 1.0, 8102, length)
    held = parse(f"magicdec:budget={length // 4}").resident(d, p)["gpu"]
    total = sum(number(size) for name, size in held.items() if name != "workspace")
    assert total == pytest.approx(2 * d.model.parameters + 1.25 * 32 * 4 * length * 4096, rel=1e-4)


def test_what_is_kept_is_what_is_read() -> None:
    d, p, own = deployment("llama3-8b"), decoding(context=S + 50), 4 * B * (1024 + 4096)
    given = {"h2o:heavy=90,recent=110": 200, "streamingllm:sink=4,recent=252": 256}
    for technique, kept in (given | {"snapkv:budget=256": 256 + 51, "full": S + 51}).items():
        assert moved(last_layer(technique, d, p)["attn"]) == 4 * B * 1024 * kept + own
        assert number(parse(technique).resident(d, p)["gpu"]["kv"]) == 32 * 4 * B * 1024 * kept
    observe = last_layer("snapkv:budget=256,window=32", d, prefill_point(B, S, 100))["observe"]
    assert number(observe.flops) == 2 * B * 32 * 128 * 32 * S


def test_fp8_and_fastdecode() -> None:
    d, own = deployment("llama2-7b"), 8 * B * 4096
    assert moved(last_layer("fp8", d, decoding())["attn"]) == 2 * B * (S + 1) * 4096 + own
    half, layer = B / 2, last_layer("fastdecode", d, decoding())  # two halves alternate
    assert moved(layer["attn"], "dram") == 4 * half * (S + 1) * 4096 + 4 * half * 4096
    assert moved(layer["send_qkv"], "d2h") == 2 * half * 4096 + 4 * half * 4096
    assert moved(layer["return_out"], "h2d") == 2 * half * 4096


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
