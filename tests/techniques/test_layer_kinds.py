"""Layers with states, indexers and shared caches: bytes and FLOPs by hand, and who acts on them."""

from functools import cache

import numpy as np
import pytest

from kvsim.engine.timeline import steady_seconds
from kvsim.errors import InputError
from kvsim.graph import Op, Point
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import from_config, load_model
from kvsim.models.kinds import LayerShape
from kvsim.prediction.generate import Prediction
from kvsim.prediction.memory import decode_point, prefill_point
from kvsim.serving.passes import Passes
from kvsim.techniques import TECHNIQUES, parse
from kvsim.techniques.axes.base import LayerPass
from kvsim.techniques.steps import layer_ops

EVERYWHERE = ("full", "offload", "snapkv", "kivi", "fp8", "h2o", "flexgen", "mtp")


@cache
def deployment(model: str, stack: str = "fused", tp: int = 1) -> Deployment:
    return Deployment(load_model(model), load_hardware("h100"), load_stack(stack), "fp16", tp)


def layer(d: Deployment, p: Point, shape: LayerShape, text: str = "full") -> dict[str, Op]:
    at = LayerPass(d, p, shape, parse(text).parts[0])
    return {op.name: op for op in layer_ops(at)}


def shape(d: Deployment, mixer: str) -> LayerShape:
    return next(s for s in d.model.shapes() if s.mixer == mixer)


def test_a_gated_delta_layer_decodes() -> None:
    """Qwen3-Next: 32 heads of 128 x 128 in fp32; 16 key heads; batch 2.

    Input product: values 4096, keys and queries 2 x 2048, gate 4096, two numbers per head.
    State: 2 MiB read and written per sequence; 7 FLOPs per number: fade, recall 2, add 2, read 2.
    """
    d = deployment("qwen3-next-80b-a3b")
    ops = layer(d, Point(2.0, 900.0, 1.0, 800.0, 1000.0), shape(d, "recurrent"))
    assert ops["in"].flops == 2 * 2 * 2048 * (4096 + 2 * 2048 + 4096 + 64)
    number = 32 * 128 * 128
    assert ops["state"].flops == 7 * 2 * number
    assert ops["state"].bytes["hbm"] == 2 * 2 * 4 * number + 2 * 2 * (8192 + 4096)
    assert ops["convolution"].bytes["hbm"] == 2 * 2 * 2 * 8192 + 2 * 2 * 2 * 3 * 8192
    assert ops["out"].flops == 2 * 2 * 4096 * 2048
    assert ops["experts_up"].flops == 2 * 2 * 10 * 2048 * 2 * 512


def test_a_mamba_layer_reads_a_prompt_in_chunks() -> None:
    """Nemotron Nano 2: 128 heads of 80 x 128; 8 groups; chunks of 128; one prompt of 1024.

    Within a chunk scores and their weighing: 2 x 128 x (128 + 80) per head and token; between
    chunks the state is made and read: 2 x 2 x 80 x 128 per head and token. Eight chunks' states of
    5 MiB are written and read, and the one at the end.
    """
    d = deployment("nemotron-nano-9b-v2")
    ops = layer(d, prefill_point(1.0, 1024.0, 10.0), shape(d, "recurrent"))
    assert ops["state"].flops == 1024 * 128 * (2 * 128 * 208 + 4 * 80 * 128)
    states = 2 * 4 * 128 * 80 * 128 * (8 + 1)
    assert ops["state"].bytes["hbm"] == states + 2 * 2 * 1024 * (12288 + 10240)
    assert set(ops) == {"pointwise", "in", "convolution", "state", "attn", "out"}  # no MLP
    assert ops["attn"].flops == 0


def test_an_indexer_scores_all_and_attention_reads_the_best() -> None:
    """DeepSeek-V3.2 at 100,000 tokens: 132 bytes of each for the indexer, 2048 latents of 576."""
    d = deployment("deepseek-v3.2")
    p = Point(1.0, 99_999.0, 1.0, 90_000.0, 100_100.0)
    ops = layer(d, p, shape(d, "attention"))
    assert ops["index"].flops == 2 * 64 * 128 * 100_000
    queries = 64 * (128 + 2)
    assert ops["index"].bytes["hbm"] == 132 * (100_000 + 1) + queries
    assert ops["attn"].flops == 2 * 128 * 2048 * (512 + 512 + 64)
    own, heads = 2 * 576, 2 * 2 * 128 * 192
    assert ops["attn"].bytes["hbm"] == 2 * 576 * 2048 + own + heads
    held = parse("full").resident(d, p)["gpu"]
    assert held["index keys"] == 61 * 132 * 100_000
    short = layer(d, Point(1.0, 999.0, 1.0, 900.0, 1100.0), shape(d, "attention"))
    dense = layer(deployment("deepseek-v3"), Point(1.0, 999.0, 1.0, 900.0, 1100.0), LayerShape())
    assert short["attn"] == dense["attn"]  # nothing to choose yet


@pytest.mark.parametrize("model", ["qwen3-next-80b-a3b", "nemotron-nano-9b-v2", "lfm2-1.2b"])
def test_states_do_not_grow_and_techniques_leave_them_alone(model: str) -> None:
    d, plain = deployment(model), parse("full")
    states = [
        parse(text).resident(d, decode_point(4.0, tokens, 100.0, 50.0))["gpu"]["state"]
        for text in EVERYWHERE[:-1]
        for tokens in (1000.0, 50_000.0)
    ]
    assert set(states) == {4 * d.model.state_bytes}
    p = decode_point(4.0, 5000.0, 100.0, 50.0)
    for text in TECHNIQUES:
        t = parse(text)
        if not t.refuses(d):
            ops = t.attend(d, p, shape(d, "recurrent"))
            assert ops == plain.attend(d, p, shape(d, "recurrent")), text
    kept, every = d.model.cached_layers, d.model.layers
    assert f"acts on {kept} of {every} layers" in parse("kivi").notes(d, p)[0]
    assert not any("acts on" in note for note in plain.notes(d, p))


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_shards_share_states(tp: int) -> None:
    """Key heads and low-rank gates are on every GPU; all else divides."""
    for model in ("qwen3-next-80b-a3b", "nemotron-nano-9b-v2", "kimi-linear-48b-a3b"):
        whole = load_model(model)
        shard = whole.shard(tp)
        assert shard.recurrence is not None and whole.recurrence is not None
        assert shard.recurrence.matrix_bytes * tp == whole.recurrence.matrix_bytes
        assert shard.parameters * tp >= whole.parameters
        assert shard.parameters * tp < 1.25 * whole.parameters


@pytest.mark.parametrize("text", EVERYWHERE)
@pytest.mark.parametrize("model", ["qwen3-next-80b-a3b", "gemma-3n-e4b", "deepseek-v3.2"])
def test_longer_contexts_take_longer(model: str, text: str) -> None:
    d = deployment(model)
    contexts = np.array([1000.0, 8000.0, 64_000.0, 500_000.0])
    took = [
        steady_seconds(parse(text).cycle(d, Point(8.0, c, 1.0, c, c + 1.0)).steps[-1], d)
        for c in contexts
    ]
    assert (np.diff(np.ravel(np.asarray(took, dtype=float))) >= 0).all()


STATES = {
    "model_type": "qwen3_next", "hidden_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
    "linear_num_value_heads": 4, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_conv_kernel_dim": 4, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "vocab_size": 100, "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}  # fmt: skip
LETTERS = {
    "model_type": "nemotron_h", "hidden_size": 64, "hybrid_override_pattern": "M-*E",
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
    "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2,
    "conv_kernel": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "use_bias": False,
    "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64,
    "vocab_size": 100, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip


def test_lists_of_layers_are_read() -> None:
    mixers = [s.mixer for s in from_config(STATES, "x").shapes()]
    assert mixers == ["recurrent"] * 3 + ["attention"]
    listed = from_config(STATES | {"layer_types": ["full_attention", "linear_attention"] * 2}, "x")
    assert [s.mixer for s in listed.shapes()] == ["attention", "recurrent"] * 2
    words = {"layers_block_type": ["mamba", "mlp", "attention", "moe"]}
    letters = from_config(LETTERS, "x")
    assert letters == from_config(
        {k: v for k, v in LETTERS.items() if k != "hybrid_override_pattern"} | words, "x"
    )
    assert [(s.mixer, s.mlp, s.routed) for s in letters.shapes()] == [
        ("recurrent", False, False),
        ("none", True, False),
        ("attention", False, False),
        ("none", True, True),
    ]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (STATES | {"layer_types": ["full_attention", "magic"] * 2}, "layer_types"),
        (STATES | {"layer_types": ["full_attention"] * 3}, "num_hidden_layers"),
        (STATES | {"layer_types": ["linear_attention"] * 4}, "no layer with a cache"),
        (STATES | {"linear_key_head_dim": 0}, "linear_key_head_dim"),
        (LETTERS | {"hybrid_override_pattern": "M-X*"}, "hybrid_override_pattern"),
        (LETTERS | {"use_bias": True}, "use_bias"),
        (LETTERS | {"num_hidden_layers": 5}, "num_hidden_layers"),
        (LETTERS | {"moe_latent_size": 8}, "moe_latent_size"),
        (LETTERS | {"moe_shared_expert_intermediate_size": 65}, "multiple"),
    ],
)
def test_bad_layers_are_named_in_one_line(config: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        from_config(config, "x")
    assert "\n" not in str(caught.value)


def test_layers_that_share_a_cache_are_treated_like_its_owner() -> None:
    d = deployment("gemma-3n-e4b")
    assert set(d.model.owners.values()) == {18, 19} and min(d.model.owners) == 20
    assert not parse("0-9: full; 10-: kivi").refuses(d)
    assert parse("0-19: full; 20-: kivi").refuses(d).startswith("layer 20 shares layer 18's cache")
    assert "cannot be treated differently" in parse("pyramidkv").refuses(d)


def test_every_hook_takes_every_kind() -> None:
    """Prediction, largest batch, serving costs and a plan's layers come from one statement."""
    for model in ("nemotron-nano-9b-v2", "gemma-3n-e2b", "deepseek-v2-lite"):
        d = deployment(model)
        found = Prediction(parse("offload"), d, np.array([4.0]), 4000, 8)
        assert 0 < float(found.tpot_s[0]) < 1 and float(found.max_batch[0]) > 4
        passes = Passes(parse("offload"), d)
        alone = passes.round(np.array([4.0]), np.array([4000.0]))
        step = parse("offload").cycle(d, Point(4.0, 4000.0, 1.0, 4000.0, 4001.0)).steps[0]
        assert float(alone[0]) == pytest.approx(
            float(np.ravel(steady_seconds(step, d))[0]), rel=1e-9
        )
