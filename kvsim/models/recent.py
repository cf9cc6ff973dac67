"""Families of 2025 and 2026 that differ from Llama in names, biases and norms alone."""

from typing import Any

from kvsim.models.fields import Fields


def wide_norms(fields: Fields) -> dict[str, Any]:
    """Norms over all heads' queries and over all their keys (OLMo 3, MiniMax-M2)."""
    heads = fields.integer("num_attention_heads")
    own = fields.integer("num_key_value_heads", default=heads)
    width = fields.integer("head_dim", default=fields.integer("hidden_size") // heads)
    return {"vectors": (heads + own) * width}


def query_biases(fields: Fields) -> dict[str, Any]:
    """Biases of queries, keys and values without one of the output (GLM-4.5, Seed-OSS)."""
    return {
        "qkv_bias": fields.flag("attention_bias", False),
        "out_bias": fields.flag("attention_out_bias", False),
        "mlp_bias": fields.flag("mlp_bias", False),
    }


def glm4(fields: Fields) -> dict[str, Any]:
    """GLM-4.5 to 4.7: grouped queries, shared experts, a bias of the router."""
    norms = {"qk_norm": fields.flag("use_qk_norm", False), "router_bias": True}
    return query_biases(fields) | norms


def ernie(fields: Fields) -> dict[str, Any]:
    """ERNIE 4.5: one flag for all biases, and names of its own for the experts."""
    biased = fields.flag("use_bias", False)
    biases = {"qkv_bias": biased, "out_bias": biased, "mlp_bias": biased, "head_bias": biased}
    experts = fields.integer("moe_num_experts", default=0, low=0)
    if not experts:
        return biases
    layers = fields.integer("num_hidden_layers")
    first = fields.integer("moe_layer_start_index", default=1, low=0)
    last = fields.values.get("moe_layer_end_index", -1)
    end = layers - 1 if not isinstance(last, int) or last < 0 else last
    step = fields.integer("moe_layer_interval", default=1)
    return biases | {
        "experts": experts,
        "experts_active": fields.integer("moe_k", high=experts),
        "expert_ffn": fields.integer("moe_intermediate_size"),
        "shared_experts": fields.integer("moe_num_shared_experts", default=0, low=0),
        "router_bias": True,
        "routed": [first <= i <= end and (i + 1) % step == 0 for i in range(layers)],
    }
