"""InfLLM, GEAR and MiKV: settings that turn them into others, and what no real run shows.

b sequences, s tokens, hk = KV heads x D, r rank, R residual, H query heads.
"""

from dataclasses import replace
from math import log

import numpy as np
import pytest

from kvsim.engine.buffers import merge
from kvsim.graph import Op, Point
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack, with_numbers
from kvsim.models.configs import load_model
from kvsim.models.model import LayerShape
from kvsim.prediction.generate import Prediction
from kvsim.prediction.memory import decode_point, prefill_point
from kvsim.techniques import parse
from kvsim.techniques.axes.base import LayerPass
from kvsim.techniques.memory import layer_cache
from tests.support.arithmetic import B, deployment, last_layer, moved, number
from tests.support.steps import (
    CLEAN,
    PHASES,
    assert_same,
    step_of,
    total,
)
from tests.support.steps import deployment as limit

MODELS = ["llama2-7b", "llama3-8b", "gemma-2-2b", "deepseek-v2-lite"]
LLAMA3 = 4096 * B  # bytes that one token of the batch takes in a layer: 2 x 2 x 8 heads x 128


def ops(text: str, p: Point, model: str = "llama3-8b") -> dict[str, Op]:
    return last_layer(text, deployment(model), p)


def once(text: str, p: Point, stack: str = "fused") -> dict[str, float]:
    """What all layers share on the GPU of one part."""
    d = deployment("llama3-8b", stack)
    (parts,) = parse(text).parts
    at = LayerPass(d, p, d.shard.layout[0][0][0], parts)
    found = merge(*(piece.shared_buffers(at) for piece in parts.by_axis()))
    return {name: number(size) for name, size in found["gpu"].items()}


def held(text: str, p: Point, model: str = "llama3-8b", tier: str = "gpu") -> dict[str, float]:
    """One layer's buffers."""
    d = deployment(model)
    at = LayerPass(d, p, d.shard.layout[-1][0][-1], parse(text).parts[0])
    return {name: number(size) for name, size in layer_cache(at)[tier].items()}  # type: ignore[index]


# limits


@pytest.mark.parametrize("stack", CLEAN)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("model", MODELS[:3])
def test_infllm_that_attends_to_every_block_does_what_full_does(
    model: str, phase: str, stack: str
) -> None:
    d, p = limit(model, stack), PHASES[phase]
    step, plain = (step_of(parse(text), d, p) for text in ("infllm:k=400,local=256", "full"))
    for layer, other in zip(step.groups[-1].layers, plain.groups[-1].layers, strict=True):
        (expected,) = (op for op in other if op.name == "attn")
        parts = [op for op in layer if op.name in ("local", "attn")]
        assert_same(sum(op.flops for op in parts), expected.flops)
        assert_same(sum(op.bytes["hbm"] for op in parts), expected.bytes["hbm"])
    assert (total(step, d, "topk", "relevance") == 0).all()
    if not p.prefill:
        assert (total(step, d, "fetch") == 0).all()


def test_mikv_at_one_width_reads_what_kivi_without_a_residual_reads() -> None:
    p = decode_point(B, 2000, 100, 47)
    one, other = ops("mikv:salient=1,high=4,group=64", p), ops("kivi:bits=4,group=64,residual=0", p)
    assert moved(one["attn"]) == pytest.approx(moved(other["attn"]), rel=1e-12)
    assert moved(one["quantise"]) == pytest.approx(moved(other["quantise"]), rel=1e-12)
    assert one["attn"].kernel == other["attn"].kernel == "lowbit"


# InfLLM


def test_infllm_fetches_blocks_that_its_cache_lacks() -> None:
    # 16000 tokens: 16000 - 128 - 4096 = 11776 = 92 blocks of 128 and none left over
    p = decode_point(B, 15000, 2000, 999)
    assert number(p.length) == 16000
    layer, fetch = ops("infllm", p), ops("infllm", p)["fetch"]
    missing = B * 16 * (1 - 32 / 92)  # 16 of 92 chosen; chance finds 32 of 92
    assert moved(fetch, "h2d") == pytest.approx(missing * 128 * 4096, rel=1e-12)
    latency = deployment("llama3-8b").hardware.links["h2d"].latency
    assert number(fetch.fixed) == pytest.approx(2 * (missing - 1) * latency, rel=1e-12)
    assert moved(layer["gather"]) == pytest.approx(2 * B * 16 * (1 - 16 / 92) * 128 * 4096)
    assert moved(layer["store"], "d2h") == LLAMA3  # one token's worth leaves per token
    assert layer["store"].launches == 2 / 128
    # 4 keys of 8 heads x 128 per block; 32 query heads
    assert moved(layer["relevance"]) == B * 92 * 4 * 2 * 1024
    assert number(layer["relevance"].flops) == 2 * B * 32 * 128 * 92 * 4
    # 4096 local tokens, then 128 first ones and 16 x 128
    assert number(layer["local"].flops) == 4 * B * 32 * 128 * 4096
    assert number(layer["attn"].flops) == 4 * B * 32 * 128 * (128 + 2048)
    assert moved(layer["attn"]) == LLAMA3 * (128 + 2048)
    assert moved(layer["represent"]) == B * 4096 * (2 * 1024 + 4 * 32)
    assert number(layer["represent"].flops) == 2 * B * 32 * 128 * 4096


def test_infllm_reuses_at_least_what_it_is_told() -> None:
    p = decode_point(B, 15000, 2000, 999)
    for reuse, share in ((0.9, 0.9), (0.1, 32 / 92), (1, 1)):
        size = moved(ops(f"infllm:reuse={reuse}", p)["fetch"], "h2d")
        assert size == pytest.approx(LLAMA3 * 128 * 16 * (1 - share), rel=1e-12)
    assert moved(ops("infllm:cached=92", p)["fetch"], "h2d") == 0
    assert moved(ops("infllm:cached=0", p)["fetch"], "h2d") == pytest.approx(
        LLAMA3 * 128 * 16 * (1 - 16 / 92), rel=1e-12
    )


def test_infllm_on_both_sides() -> None:
    p = decode_point(B, 15000, 2000, 999)
    assert held("infllm", p) == {
        "kv": LLAMA3 * (128 + 4096 + 128),  # with a block that is filling up
        "representatives": B * 92 * 4 * 2 * 1024,
        "block cache": LLAMA3 * 32 * 128,
        "fetched blocks": LLAMA3 * 16 * 128,
        "scores": 2 * B * 32 * (4096 + 128),
    }
    assert held("infllm", p, tier="host") == {"kv": LLAMA3 * 92 * 128}


@pytest.mark.parametrize(("reuse", "held_blocks"), [(0, 32), (0.5, 32), (0.9, 40), (1, 16)])
def test_infllm_prefill_sums_over_chunks(reuse: float, held_blocks: int) -> None:
    """Against a loop over chunks of 128 queries, at each of which one more block exists."""
    p, n, k = prefill_point(B, 128 + 4096 + 128 * 400, 100), 400, 16
    text = f"infllm:chunk=128,cached={held_blocks},reuse={reuse}"
    layer = ops(text, p)
    assert moved(layer["store"], "d2h") == LLAMA3 * 128 * n
    later = range(held_blocks + 1, n + 1)
    missing = sum(k * (1 - max(reuse, held_blocks / i)) for i in later)
    fetched = held_blocks + missing  # what fits comes in once
    size = moved(layer["fetch"], "h2d")
    assert size == pytest.approx(LLAMA3 * 128 * fetched, rel=0.01)  # a sum against its integral
    if reuse == 0:  # 16 x (368 - 32 ln 12.5)
        exactly = 32 + 16 * (368 - 32 * log(12.5))
        assert size == pytest.approx(LLAMA3 * 128 * exactly, rel=1e-12)
    looked = sum(i for i in range(n + 1) if i > k)
    assert moved(layer["relevance"]) == pytest.approx(B * looked * 4 * 2 * 1024, rel=0.01)


# GEAR


def test_gear_orthonormalises_two_factors_of_every_head_one_by_one() -> None:
    p = prefill_point(B, 2000, 200)
    plain = limit("llama3-8b", "zipcache-hf")
    slow = replace(plain, stack=with_numbers(plain.stack, {"packed_cache.qr_s": 1.0}))
    none = replace(plain, stack=with_numbers(plain.stack, {"packed_cache.qr_s": 0.0}))
    times = [last_layer("gear", d, p)["power_iteration"].fixed for d in (slow, none)]
    assert [number(t) for t in times] == [2 * 2 * 8 * B, 0.0]  # K and V, both factors, 8 heads
    assert number(last_layer("gear:rank=0", slow, p)["power_iteration"].fixed) == 0
    generated = last_layer("gear", slow, decode_point(B, 2000, 200, 133))["power_iteration"]
    assert number(generated.fixed) == 2 * 2 * 8 * B / 64


def test_gear_alone_attends_to_prompts_without_a_fused_kernel() -> None:
    d, p = limit("llama3-8b", "zipcache-hf"), prefill_point(B, 2000, 200)
    eager, flash = (moved(last_layer(t, d, p)["attn"]) for t in ("gear", "gear:rank=0"))
    assert eager - flash == d.stack.attention.score_bytes * B * 32 * 2000**2


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_gear_first_packs_all_query_heads_at_once(phase: str) -> None:
    p = prefill_point(B, 2000, 200) if phase == "prefill" else decode_point(B, 2000, 200, 133)
    tokens = 2000 if phase == "prefill" else 2134 / 20  # all anew once in 20 steps
    rank = 40 if phase == "prefill" else 42  # 0.02 x 2000 and 2134, less than 4096 channels
    layer = ops("gear-first", p)
    numbers = 4 * 2048 * B * tokens  # 4 query heads per KV head
    assert moved(layer["outliers"]) == pytest.approx(156 * numbers, rel=1e-12)
    assert moved(layer["quantise"]) == pytest.approx(64 * numbers, rel=1e-12)
    op = layer["power_iteration"]
    # 3 loops of 2 products for K and for V, each over half of the numbers, in fp32
    assert number(op.flops) == pytest.approx(12 * 2 * rank * numbers / 2, rel=1e-12)
    assert moved(op) == pytest.approx(12 * 4 * numbers / 2, rel=1e-12)
    assert op.dtype == "fp32"
    assert ("correct" in layer) is (phase == "decode")
    error = once("gear-first", p)["error"]
    assert error == (4 * 4096 * B * 2000 if phase == "prefill" else 0)


def test_gear_first_keeps_all_query_heads() -> None:
    p = decode_point(B, 2000, 200, 133)
    numbers = 4 * 2048 * B * 2134
    assert held("gear-first", p) == pytest.approx(
        {
            "kv": numbers / 2 + 2 * 20 * 4 * 2048 * B,  # 20 tokens wait in fp16
            "factors": 2 * B * 42 * (2 * 2134 + 2 * 4096),
            "outliers": 0.02 * numbers * (2 + 8),
        }
    )
    correct = ops("gear-first", p)["correct"]
    assert number(correct.flops) == 2 * 42 * numbers
    assert moved(correct) == 12 * numbers + 2 * B * 42 * (2 * 2134 + 2 * 4096)


def test_snapkv_drafts_take_a_layer_out_of_its_pages() -> None:
    p, d = prefill_point(B, 8192, 90), deployment("llama2-7b")
    parts = (
        parse(f"magicdec:draft={name},budget=2048").parts[0] for name in ("streamingllm", "snapkv")
    )
    plain, draft = (
        number(own.drafting.scratch(LayerPass(d, p, LayerShape(), own))) for own in parts
    )
    layer = 16384 * B  # bytes per token: 2 x 2 x 4096
    scores = B * 32 * 32 * 8192  # 32 queries
    assert draft - plain == layer * 8192 + max(8 * scores, 2 * scores + 2.5 * layer * 2048)


# MiKV


def test_mikv_prefill_writes_the_whole_score_matrix() -> None:
    p = prefill_point(B, 2000, 200)
    layer = ops("mikv", p)
    assert moved(layer["scores"]) == 4 * B * 32 * 2000**2 + 8 * B * 32 * 2000
    assert moved(layer["balance"]) == 2 * B * 2000 * (32 * 128 + 1024)  # maxima of Q and K
    assert once("mikv", p)["score matrix"] == 2 * B * 32 * 2000**2
    # an eager stack counts its scores itself
    assert once("mikv", p, "hf-eager")["score matrix"] == 0
    probes = ops("zipcache", p)["probe"]  # a tenth of the queries
    assert moved(layer["scores"]) > 4 * moved(probes)


def test_kivi_attends_to_prompts_as_the_code_does_that_ran_it() -> None:
    def prefill(technique: str, stack: str) -> float:
        d = Deployment(load_model("llama3-8b"), load_hardware("a100-80g"), load_stack(stack))
        return float(Prediction(parse(technique), d, np.array([8.0]), 3072, 1).prefill_s[0])

    kivi, mikv, full = "kivi:bits=2,group=64,residual=256", "mikv:salient=0.8,high=4,low=2", "full"
    assert prefill(kivi, "zipcache-hf") > 1.4 * prefill(full, "zipcache-hf")
    assert prefill(kivi, "zipcache-hf") < prefill(mikv, "zipcache-hf")
    assert prefill(kivi, "fused") < 1.1 * prefill(full, "fused")  # a fused kernel reads its prompt


def test_gear_first_orthonormalises_two_factors_of_every_sequence() -> None:
    p = prefill_point(B, 2000, 200)
    plain = limit("llama3-8b", "zipcache-hf")
    slow = replace(plain, stack=with_numbers(plain.stack, {"packed_cache.qr_s": 1.0}))
    fixed = last_layer("gear-first", slow, p)["power_iteration"].fixed
    tall, wide = (1 + 40 / 13 * (1 + rows / 5500) for rows in (2000, 4096))
    assert number(fixed) == pytest.approx(2 * B * (tall + wide), rel=1e-12)  # K and V
    without = last_layer("gear-first:rank=0,outliers=0", slow, p)
    assert "power_iteration" not in without or number(without["power_iteration"].fixed) == 0
