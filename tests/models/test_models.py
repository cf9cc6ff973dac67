"""The catalogue reproduces the published models, and a shard holds its part of one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.engine.buffers import layer_weights
from kvsim.errors import InputError
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.catalogue import catalogue_entry, model_names
from kvsim.models.configs import compress, load_model
from kvsim.models.model import LayerShape

FULL = LayerShape()
ROUTED = LayerShape(routed=True)


def test_the_catalogue_holds_the_checked_models() -> None:
    names = model_names()
    assert len(names) >= 300
    assert sum(not catalogue_entry(name)["recalled"] for name in names) >= 250
    assert names == [name.lower() for name in names]
    assert {"llama2-7b", "llama3.1-8b", "qwen3-30b-a3b", "deepseek-v3", "bloom-176b"} <= set(names)


def test_a_catalogue_model_has_its_published_parameters() -> None:
    for name in model_names():
        model, entry = load_model(name), catalogue_entry(name)
        assert entry["hf_id"].count("/") == 1
        assert entry["source"]
        exact = {entry["published"], entry["counted"]} - {None}
        if name in ("opt-66b", "opt-175b"):  # no exact figure is public
            assert not exact
        else:
            assert exact == {model.parameters} or (not exact and entry["stated"]), name
        assert model.active_parameters <= model.parameters
        assert all("text_config" in note for note in model.notes), "nothing else may be assumed"


STATED = [name for name in model_names() if catalogue_entry(name)["stated"]]
NOT_COUNTED = 0.025  # vision projectors and unused keys and values; Kimi says 48B of its 49.1


def _number(text: str) -> tuple[float, float]:
    """A rounded count, and half of its last digit."""
    unit = {"M": 1e6, "B": 1e9}[text[-1]]
    digits = len(text[:-1].partition(".")[2])
    return float(text[:-1]) * unit, unit * 10.0**-digits / 2


def test_counts_are_what_their_makers_state() -> None:
    """Makers count the embedding, the LM head, both or neither among active parameters."""
    for name in STATED:
        model, entry = load_model(name), catalogue_entry(name)
        assert entry["stated"] is not None
        total, half = _number(entry["stated"])
        assert abs(model.parameters - total) <= max(half, NOT_COUNTED * total)
        if entry["stated_active"]:
            active, half = _number(entry["stated_active"])
            table = model.hidden * model.vocab
            close = [abs(model.active_parameters + k * table - active) <= half for k in (-1, 0, 1)]
            assert any(close)


def test_enough_models_have_layers_of_other_kinds() -> None:
    kinds = [{s.mixer for s in load_model(name).shapes()} for name in model_names()]
    assert sum("recurrent" in some for some in kinds) >= 15
    assert sum("shared" in some for some in kinds) == 2
    assert sum(load_model(name).indexer is not None for name in model_names()) >= 2


@pytest.mark.parametrize(
    ("name", "kv", "state"),
    [
        # 12 layers, 2 KV heads of 256: 2 * 2 * 2 * 256 * 12; 36 states of 32 x 128 x 128 in fp32
        # and of 3 tokens x 8192 channels in two bytes
        ("qwen3-next-80b-a3b", 24576, 36 * (4 * 32 * 128 * 128 + 2 * 3 * 8192)),
        # 7 latents of 576; 20 states of 32 x 128 x 128 and 3 tokens x 12288 channels
        ("kimi-linear-48b-a3b", 8064, 20 * (4 * 32 * 128 * 128 + 2 * 3 * 12288)),
        # 4 layers, 8 heads of 128; 27 states of 128 x 80 x 128; 10240 + 2 x 8 x 128 channels
        ("nemotron-nano-9b-v2", 16384, 27 * (4 * 128 * 80 * 128 + 2 * 3 * 12288)),
        # 61 latents of 576, and 128 fp8 numbers with a scale for the indexer
        ("deepseek-v3.2", 61 * (1152 + 132), 0),
        # of 35 layers 15 share: 20 layers, 2 heads of 256
        ("gemma-3n-e4b", 20 * 2048, 0),
        # 4 layers, 8 heads of 128; 28 states of 8192 x 16, and 3 tokens x 8192 channels
        ("jamba-v0.1", 16384, 28 * (4 * 8192 * 16 + 2 * 3 * 8192)),
        # 6 layers, 8 heads of 64; 10 states of two tokens
        ("lfm2-1.2b", 12288, 10 * 2 * 2 * 2048),
    ],
)
def test_cache_of_a_token_and_state_of_a_sequence(name: str, kv: int, state: int) -> None:
    model = load_model(name)
    assert (model.kv_bytes_per_token, model.state_bytes) == (kv, state)


@pytest.mark.parametrize(
    ("name", "gib"),
    [("gpt-oss-20b", 12.8), ("gpt-oss-120b", 60.8)],  # model card, table 1: checkpoint sizes
)
def test_mxfp4_experts_have_the_published_size(name: str, gib: float) -> None:
    deployment = Deployment(load_model(name), load_hardware("h100"), load_stack("ideal"), "mxfp4")
    m = deployment.model
    size = sum(layer_weights(deployment, shape) for shape in m.shapes()) + 4 * m.vocab * m.hidden
    assert size / 2**30 == pytest.approx(gib, rel=0.005)


def nvfp4(name: str) -> float:
    """Bytes of all layers with NVFP4 weights."""
    d = Deployment(load_model(name), load_hardware("b200"), load_stack("ideal"), "nvfp4")
    return sum(layer_weights(d, shape) for shape in d.model.shapes())


def test_nvfp4_weights_are_codes_and_a_scale_per_16() -> None:
    """As the published layout has them: uint8 (outputs, inputs / 2), fp8 (outputs, inputs / 16)."""
    qkv, out, mlp = (4096, 4096 + 2 * 1024), (4096, 4096), [(4096, 14336)] * 2 + [(14336, 4096)]
    stored = sum(outputs * (inputs / 2 + inputs / 16) for inputs, outputs in (qkv, out, *mlp))
    assert nvfp4("llama3.1-8b") == pytest.approx(32 * stored, rel=1e-3)  # norms are few


def test_nvfp4_checkpoints_have_the_published_size() -> None:
    """Every product but the LM head's; the card says 40 GB (Llama-3.1-70B-Instruct-NVFP4-W4A4)."""
    m = load_model("llama3.1-70b")
    assert (nvfp4(m.name) + 4 * m.vocab * m.hidden) / 2**30 == pytest.approx(40, rel=0.0125)


def test_mixtures_of_experts_have_nvfp4_in_their_mlps_alone() -> None:
    name = "deepseek-v3"
    plain = Deployment(load_model(name), load_hardware("b200"), load_stack("ideal"))
    m = plain.model
    # 58 layers of 256 experts and a shared one, 3 dense ones; numbers of their three matrices
    mlps = 3 * m.hidden * (58 * 257 * 2048 + 3 * 18432)
    whole = sum(layer_weights(plain, shape) for shape in m.shapes())
    assert nvfp4(name) == pytest.approx(whole - mlps * (2 - 9 / 16), rel=1e-6)


ACTIVE = """
mixtral-8x7b 12748853248, mixtral-8x22b 38955423744, qwen3-30b-a3b 3041867776,
deepseek-v2-lite 2451435008, deepseek-v3 36625618432, kimi-k2 31687095808,
gpt-oss-20b 3608307264, gpt-oss-120b 5132849472, llama3.1-8b 7504924672,
llama3.2-1b 1235814400, opt-1.3b 1311559680, phi-2 2648611840
"""
"""An embedding is multiplied with where it is tied, and only looked up where it is not."""
CACHED = """
llama2-7b 524288, llama3.1-8b 131072, llama3.1-405b 516096, mistral-7b-v0.1 131072,
mixtral-8x7b 131072, qwen2.5-0.5b 12288, qwen3-4b 147456, gemma-3-27b 507904,
phi-3-mini-4k 393216, falcon-7b 8192, gpt-oss-20b 49152, opt-13b 819200,
deepseek-v2-lite 31104, deepseek-v3 70272
"""
"""Bytes of a token in two-byte numbers."""


def test_active_parameters_and_cache_of_a_token() -> None:
    for name, parameters in map(str.split, ACTIVE.split(",")):
        assert load_model(name).active_parameters == int(parameters), name
    for name, size in map(str.split, CACHED.split(",")):
        model = load_model(name)
        assert 2 * model.kv_width * model.layers == model.kv_bytes_per_token == int(size), name


def _local(window: int, routed: bool = False) -> LayerShape:
    return LayerShape(window, routed)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama2-7b", (((FULL,), 32),)),
        ("mistral-7b-v0.1", (((_local(4096),), 32),)),
        ("mistral-7b-v0.2", (((FULL,), 32),)),
        ("phi-3-mini-4k", (((_local(2047),), 32),)),
        ("phi-3-mini-128k", (((FULL,), 32),)),  # its window is longer than its context
        ("qwen2.5-7b", (((FULL,), 28),)),  # use_sliding_window is false
        ("gemma-2-2b", (((_local(4096), FULL), 13),)),
        ("gemma-3-1b", (((*[_local(512)] * 5, FULL), 4), ((_local(512),), 2))),
        ("gemma-3-12b", (((*[_local(1024)] * 5, FULL), 8),)),
        ("gpt-oss-20b", (((_local(128, True), LayerShape(routed=True)), 12),)),
        ("mixtral-8x7b", (((ROUTED,), 32),)),
        ("deepseek-v2-lite", (((FULL,), 1), ((ROUTED,), 26))),
        ("deepseek-v3", (((FULL,), 3), ((ROUTED,), 58))),
    ],
)
def test_layouts(name: str, layout: tuple[tuple[tuple[LayerShape, ...], int], ...]) -> None:
    assert load_model(name).layout == layout


@given(st.lists(st.sampled_from([FULL, ROUTED, _local(8)]), max_size=40))
def test_a_compressed_layout_lists_the_same_layers(layers: list[LayerShape]) -> None:
    layout = compress(layers)
    assert [layer for block, count in layout for layer in block * count] == layers


@pytest.mark.parametrize("tp", [2, 4, 8, 16])
@pytest.mark.parametrize("name", ["llama3.1-70b", "qwen3-235b-a22b", "deepseek-v3"])
def test_shards_hold_the_whole_model(name: str, tp: int) -> None:
    model = load_model(name)
    shard = model.shard(tp)
    assert (shard.layout, shard.hidden, shard.head_dim) == (
        model.layout,
        model.hidden,
        model.head_dim,
    )
    assert shard.heads * tp == model.heads
    assert shard.kv_width * tp >= model.kv_width
    assert shard.parameters * tp >= model.parameters
    # copied are at most norms, router, latents and the KV heads that are fewer than the GPUs
    assert shard.parameters * tp < 1.2 * model.parameters


def test_kv_heads_and_latents_are_copied_when_there_are_too_few() -> None:
    assert load_model("llama3.1-70b").shard(8).kv_heads == 1
    assert load_model("llama3.1-70b").shard(16).kv_heads == 1
    latent = load_model("deepseek-v3")
    assert latent.shard(8).kv_width == latent.kv_width == 576


def test_a_shard_must_divide_the_heads() -> None:
    with pytest.raises(InputError, match=r"phi-3-medium-4k: 10 KV heads .* --tp 4"):
        load_model("phi-3-medium-4k").shard(4)
    assert load_model("phi-3-medium-4k").shard(2).kv_heads == 5
    model = load_model("llama2-7b")
    assert model.shard(1) is model
    with pytest.raises(InputError, match=r"llama2-7b: 32 heads .* --tp 3; choose"):
        model.shard(3)
