"""How each model family of Hugging Face writes its ``config.json``: one entry of FAMILIES each.

An entry gives the fields that its files may leave out, with the defaults of its model class in
transformers, and a function that reads what differs from Llama as fields of
:class:`kvsim.models.model.Model`.
"""

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, NamedTuple

from kvsim.models import hybrids, recent
from kvsim.models.fields import Fields, shown


def _nothing(fields: Fields) -> dict[str, Any]:
    return {}


def _biases(fields: Fields) -> dict[str, Any]:
    attention = fields.flag("attention_bias", False)
    mlp = fields.flag("mlp_bias", False)
    return {"qkv_bias": attention, "out_bias": attention, "mlp_bias": mlp}


def _experts(fields: Fields, field: str = "num_experts") -> dict[str, Any]:
    experts = fields.integer(field)
    active = fields.integer("num_experts_per_tok")
    if active > experts:
        raise fields.error(
            "num_experts_per_tok",
            f"is {active}, expected at most the {experts} experts",
            "correct one of the two",
        )
    width = fields.integer("moe_intermediate_size", "intermediate_size")
    return {"experts": experts, "experts_active": active, "expert_ffn": width}


def _qwen2_moe(fields: Fields) -> dict[str, Any]:
    experts = _experts(fields)
    shared = fields.integer("shared_expert_intermediate_size")
    if shared % experts["expert_ffn"]:
        raise fields.error(
            "shared_expert_intermediate_size",
            f"is {shared}, expected a multiple of moe_intermediate_size {experts['expert_ffn']}",
        )
    shared_experts = shared // experts["expert_ffn"]
    return experts | {"qkv_bias": True, "shared_experts": shared_experts, "shared_gate": True}


def _deepseek(fields: Fields) -> dict[str, Any]:
    fields.must("attention_bias", False, "biases of latent attention are not counted")
    nope, rope = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    return _experts(fields, "n_routed_experts") | {
        "shared_experts": fields.integer("n_shared_experts", default=0),
        "q_rank": fields.integer("q_lora_rank", default=0),
        "kv_rank": fields.integer("kv_lora_rank"),
        "head_dim": nope + rope,
        "nope_dim": nope,
        "rope_dim": rope,
        "value_dim": fields.integer("v_head_dim"),
    }


def _qwen_experts(fields: Fields) -> dict[str, Any]:
    """Experts beside one with a gate, which biases of Qwen2 do not come with."""
    own = _qwen2_moe(fields)
    # where all layers are routed, a dense one (of a draft head) is as wide as a token's experts
    dense = fields.integer("intermediate_size", default=own["experts_active"] * own["expert_ffn"])
    return own | {"qkv_bias": False, "ffn": dense}


def _glm4_experts(fields: Fields) -> dict[str, Any]:
    shared = {"shared_experts": fields.integer("n_shared_experts", default=0, low=0)}
    return _experts(fields, "n_routed_experts") | shared


def _kimi(fields: Fields) -> dict[str, Any]:
    """Latent attention as DeepSeek's, with names of its own for the experts."""
    own = {
        "n_routed_experts": fields.integer("num_experts"),
        "num_experts_per_tok": fields.integer("num_experts_per_token"),
        "n_shared_experts": fields.integer("num_shared_experts", default=0, low=0),
    }
    renamed = Fields(fields.values | own, fields.where, fields.prefix)
    return _deepseek(renamed) | {"router_bias": True}


def _gpt_oss(fields: Fields) -> dict[str, Any]:
    experts = _experts(fields, "num_local_experts")
    return _biases(fields) | experts | {"sinks": True, "expert_biases": True}


def _layer_norm(biased: bool) -> dict[str, Any]:
    """What the families before Llama share: two MLP matrices, LayerNorm and mostly biases."""
    biases = {"qkv_bias": biased, "out_bias": biased, "mlp_bias": biased}
    return biases | {"gated": False, "norm_bias": True}


def _opt(fields: Fields) -> dict[str, Any]:
    fields.must("do_layer_norm_before", True, "norms after the block are not counted")
    if fields.integer("word_embed_proj_dim", "hidden_size") != fields.integer("hidden_size"):
        raise fields.error(
            "word_embed_proj_dim", "differs from hidden_size, expected the same", "choose another"
        )
    positions = (
        fields.integer("max_position_embeddings") + 2
    )  # OPT leaves the first two rows unused
    return _layer_norm(fields.flag("enable_bias", True)) | {"learned_positions": positions}


def _gpt_neox(fields: Fields) -> dict[str, Any]:
    attention = fields.flag("attention_bias", True)
    return _layer_norm(True) | {"qkv_bias": attention, "out_bias": attention}


def _phi(fields: Fields) -> dict[str, Any]:
    fields.must("qk_layernorm", False, "norms of queries and keys with biases are not counted")
    return _layer_norm(True) | {"head_bias": True, "norms": 1}


def _bloom(fields: Fields) -> dict[str, Any]:
    ffn = 4 * fields.integer("hidden_size", "n_embed")
    return _layer_norm(True) | {"ffn": ffn, "embedding_norm": True}


def _falcon(fields: Fields) -> dict[str, Any]:
    heads = fields.integer("num_attention_heads", "n_head")
    grouped = fields.flag("new_decoder_architecture", False)
    multi_query = fields.flag("multi_query", True) and not grouped
    norms = fields.integer("num_ln_in_parallel_attn", default=2 if grouped else 1)
    return _layer_norm(fields.flag("bias", False)) | {
        # multi_query wins over num_kv_heads: Falcon-7B gives 71 and has one
        "kv_heads": 1 if multi_query else fields.integer("num_kv_heads", default=heads),
        "ffn": fields.integer("ffn_hidden_size", default=4 * fields.integer("hidden_size")),
        "norms": norms if fields.flag("parallel_attn", True) else 2,
    }


class Family(NamedTuple):
    """What sets one ``model_type`` apart."""

    defaults: dict[str, Any]  # of fields that its files may leave out
    read: Callable[[Fields], dict[str, Any]]  # what differs from Llama, as fields of Model


_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_QWEN: dict[str, Any] = {"use_sliding_window": False, "max_window_layers": 28}
_GEMMA = _TIED | {"head_dim": 256}
_GEMMA3 = _GEMMA | {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "_sliding_window_pattern": 6,
}
_INDEXED: dict[str, Any] = {"router_bias": True}
_GLM5: dict[str, Any] = {"index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048}
_ALTERNATE: dict[str, Any] = {"_sliding_window_pattern": 2}
FAMILIES = {
    "llama": Family({}, _biases),
    "granite": Family({}, _biases),
    "mistral": Family({}, _nothing),
    "mixtral": Family({}, lambda f: _experts(f, "num_local_experts")),
    "qwen2": Family(_QWEN, lambda f: {"qkv_bias": True}),
    "qwen2_moe": Family(_QWEN, _qwen2_moe),
    "qwen3": Family(_QWEN | {"head_dim": 128}, lambda f: _biases(f) | {"qk_norm": True}),
    "qwen3_moe": Family(_QWEN, lambda f: _biases(f) | _experts(f) | {"qk_norm": True}),
    "gemma": Family(_GEMMA, _biases),
    "gemma2": Family(_GEMMA | _ALTERNATE, lambda f: _biases(f) | {"norms": 4}),
    "gemma3_text": Family(_GEMMA3, lambda f: _biases(f) | {"norms": 4, "qk_norm": True}),
    "phi": Family({}, _phi),
    "phi3": Family({}, _nothing),
    "deepseek_v2": Family({}, _deepseek),
    "deepseek_v3": Family({}, lambda f: _deepseek(f) | {"router_bias": True}),
    "deepseek_v32": Family({}, lambda f: _deepseek(f) | _INDEXED | hybrids.indexed(f)),
    "glm_moe_dsa": Family(_GLM5, lambda f: _deepseek(f) | _INDEXED | hybrids.indexed(f)),
    "kimi_linear": Family({}, lambda f: _kimi(f) | hybrids.kimi_delta(f)),
    "qwen3_next": Family(_QWEN, lambda f: _biases(f) | _qwen_experts(f) | hybrids.gated_delta(f)),
    "qwen3_5_text": Family(_QWEN, lambda f: _biases(f) | hybrids.gated_delta(f)),
    "qwen3_5_moe_text": Family(
        _QWEN, lambda f: _biases(f) | _qwen_experts(f) | hybrids.gated_delta(f)
    ),
    "nemotron_h": Family({}, hybrids.nemotron),
    "jamba": Family({}, hybrids.jamba),
    "bamba": Family({}, hybrids.expanded_mamba),
    "granitemoehybrid": Family({}, hybrids.granite),
    "lfm2": Family(_TIED, hybrids.short_convolution),
    "minimax": Family({}, lambda f: _experts(f, "num_local_experts") | hybrids.lightning(f)),
    "minimax_text_01": Family(
        {}, lambda f: _experts(f, "num_local_experts") | hybrids.lightning(f)
    ),
    "gemma3n_text": Family(_TIED, lambda f: _biases(f) | hybrids.gemma3n(f)),
    "kimi_k2": Family({}, lambda f: _deepseek(f) | {"router_bias": True}),
    "glm4_moe": Family({}, lambda f: _glm4_experts(f) | recent.glm4(f)),
    "glm4_moe_lite": Family({}, lambda f: _deepseek(f) | {"router_bias": True}),
    "minimax_m2": Family(
        {},
        lambda f: _experts(f, "num_local_experts") | recent.wide_norms(f) | {"router_bias": True},
    ),
    "olmo3": Family({}, recent.wide_norms),
    "seed_oss": Family({"attention_bias": True}, recent.query_biases),
    "smollm3": Family(_TIED, _biases),
    "ernie4_5": Family(_TIED, recent.ernie),
    "ernie4_5_moe": Family(_TIED, recent.ernie),
    "qwen3_vl_text": Family(_QWEN, lambda f: _biases(f) | {"qk_norm": True}),
    "qwen3_vl_moe_text": Family(_QWEN, lambda f: _biases(f) | _experts(f) | {"qk_norm": True}),
    "gpt_oss": Family(
        _ALTERNATE | {"attention_bias": True, "head_dim": 64},
        _gpt_oss,
    ),
    "opt": Family(_TIED, _opt),
    "gpt_neox": Family({}, _gpt_neox),
    "falcon": Family(_TIED | {"max_position_embeddings": 2048}, _falcon),
    "bloom": Family(_TIED | {"seq_length": 2048}, _bloom),
}
_LLAMA = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)
# A model with such a field is not Llama-shaped, whatever else it has.
_NOT_LLAMA = (
    "num_experts", "num_local_experts", "n_routed", "moe_", "kv_lora", "v_head_dim", "linear_",
    "mamba", "ssm", "hybrid", "swa_", "layers_block_type", "num_kv_shared",
)  # fmt: skip


def find_family(fields: Fields) -> tuple[str, Family, list[str]]:
    """The ``model_type``, how to read it and what had to be assumed."""
    name = fields.values.get("model_type")
    near = get_close_matches(str(name), FAMILIES, n=3) or ["llama", "qwen3", "deepseek_v3"]
    known = f"expected one of {len(FAMILIES)} families such as {', '.join(near)}"
    if not isinstance(name, str):
        problem = "is missing" if name is None else f"is {shown(name)}"
        raise fields.error("model_type", f"{problem}, {known}")
    if name in FAMILIES:
        return name, FAMILIES[name], []
    missing = [f"it has no {field}" for field in _LLAMA if field not in fields.values]
    strange = [f"it has {field}" for field in fields.values if field.startswith(_NOT_LLAMA)]
    if missing or strange:
        problem = f"is {shown(name)}, which cannot be read as Llama ({(missing + strange)[0]})"
        raise fields.error("model_type", f"{problem}, {known}", "choose another model")
    note = f"model_type {shown(name)} is not known: read as Llama-shaped"
    return name, FAMILIES["llama"], [note]
