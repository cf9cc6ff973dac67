"""How families with layers of several kinds write their ``config.json``.

Each reader returns fields of :class:`kvsim.models.model.Model` and, under ``mixers`` and ``mlps``,
what mixes tokens in every layer and whether an MLP follows.
"""

from collections.abc import Mapping
from typing import Any

from kvsim.models.fields import Fields, shown
from kvsim.models.kinds import Indexer, Mixer, Recurrence

ATTENTION = ("full_attention", "attention", "sliding_attention")
STATE = ("linear_attention", "mamba", "conv")
LETTERS: Mapping[str, tuple[Mixer, bool, bool]] = {  # mixer, MLP, routed
    "M": ("recurrent", False, False),
    "*": ("attention", False, False),
    "-": ("none", True, False),
    "E": ("none", True, True),
}
BLOCKS = {
    "mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*",
    "mlp": "-", "moe": "E",
}  # fmt: skip


def kinds(fields: Fields, names: object) -> list[Mixer]:
    """The mixers that a list of layer types names.

    Raises
    ------
    FieldError
        If a type is neither attention nor a state.
    """
    known = (*ATTENTION, *STATE)
    if not isinstance(names, list) or any(name not in known for name in names):
        raise fields.error("layer_types", f"is {shown(names)}, expected a list of {known}")
    return ["attention" if name in ATTENTION else "recurrent" for name in names]


def every(fields: Fields, name: str) -> list[Mixer]:
    """States, with attention in every so many-th layer, where no list of types says otherwise."""
    if "layer_types" in fields.values:
        return kinds(fields, fields.values["layer_types"])
    layers, period = fields.integer("num_hidden_layers"), fields.integer(name, default=4)
    return ["recurrent" if (i + 1) % period else "attention" for i in range(layers)]


def gated_delta(fields: Fields) -> dict[str, Any]:
    """Qwen3-Next and Qwen3.5: gated DeltaNet beside gated attention."""
    heads, width = (fields.integer(f"linear_{x}") for x in ("num_value_heads", "value_head_dim"))
    state = Recurrence(
        "delta",
        heads,
        width,
        fields.integer("linear_key_head_dim"),
        fields.integer("linear_num_key_heads"),
        fields.integer("linear_conv_kernel_dim"),
        gates=heads * width + 2 * heads,
        vectors=2 * heads + width,
    )
    mixers = every(fields, "full_attention_interval")
    return {"recurrence": state, "mixers": mixers, "gated_attention": True, "qk_norm": True}


def kimi_delta(fields: Fields) -> dict[str, Any]:
    """Kimi Linear: KDA beside latent attention; its lists count layers from 1."""
    own = fields.values.get("linear_attn_config")
    if not isinstance(own, dict):
        raise fields.error("linear_attn_config", f"is {shown(own)}, expected an object of fields")
    f = Fields(own, fields.where, f"{fields.prefix}linear_attn_config.")
    heads, width = f.integer("num_heads"), f.integer("head_dim")
    layers, whole = fields.integer("num_hidden_layers"), own.get("full_attn_layers")
    if not isinstance(whole, list) or not all(isinstance(x, int) for x in whole):
        raise f.error("full_attn_layers", f"is {shown(whole)}, expected a list of layers")
    state = Recurrence(
        "delta",
        heads,
        width,
        width,
        heads,
        f.integer("short_conv_kernel_size"),
        gates=heads + 2 * width,
        gate_rank=width,
        vectors=heads + heads * width + width,
    )
    mixers = ["attention" if i + 1 in whole else "recurrent" for i in range(layers)]
    return {"recurrence": state, "mixers": mixers}


def _mamba(fields: Fields, prefix: str, inner: int, heads: int) -> Recurrence:
    """Mamba-2 under the names that Bamba and Granite give its fields."""
    return Recurrence(
        "decay",
        heads,
        inner // heads,
        fields.integer(f"{prefix}d_state"),
        fields.integer(f"{prefix}n_groups"),
        fields.integer(f"{prefix}d_conv"),
        conv_bias=fields.flag(f"{prefix}conv_bias", True),
        gates=inner + heads,
        vectors=3 * heads + inner,
        chunk=fields.integer(f"{prefix}chunk_size", default=256),
    )


def expanded_mamba(fields: Fields) -> dict[str, Any]:
    """Mamba-2 whose width is a multiple of the hidden size (Bamba, Granite 4)."""
    fields.must("mamba_proj_bias", False, "biases of these products are not counted")
    inner = fields.integer("mamba_expand") * fields.integer("hidden_size")
    state = _mamba(fields, "mamba_", inner, fields.integer("mamba_n_heads"))
    if "attn_layer_indices" not in fields.values:
        return {"recurrence": state, "mixers": kinds(fields, fields.values.get("layer_types"))}
    whole, layers = fields.values["attn_layer_indices"], fields.integer("num_hidden_layers")
    if not isinstance(whole, list):
        raise fields.error("attn_layer_indices", f"is {shown(whole)}, expected a list of layers")
    mixers = ["attention" if i in whole else "recurrent" for i in range(layers)]
    return {"recurrence": state, "mixers": mixers}


def jamba(fields: Fields) -> dict[str, Any]:
    """Jamba: Mamba with attention in every eighth layer, experts in every second."""
    fields.must("mamba_proj_bias", False, "biases of these products are not counted")
    inner = fields.integer("mamba_expand") * fields.integer("hidden_size")
    states, rank = fields.integer("mamba_d_state"), fields.integer("mamba_dt_rank")
    state = Recurrence(
        "selective",
        inner,
        1,
        states,
        1,
        fields.integer("mamba_d_conv"),
        conv_bias=fields.flag("mamba_conv_bias", True),
        gates=inner,
        step_rank=rank,
        # biases of the steps, rates of fading, the skip; norms of steps, keys and queries
        vectors=inner + inner * states + inner + rank + 2 * states,
    )
    layers = range(fields.integer("num_hidden_layers"))
    found: dict[str, Any] = {
        "recurrence": state,
        "mixers": ["attention" if own else "recurrent" for own in _turns(fields, "attn", layers)],
    }
    experts = fields.integer("num_experts")
    if experts == 1:
        return found
    return found | {
        "experts": experts,
        "experts_active": fields.integer("num_experts_per_tok", high=experts),
        "expert_ffn": fields.integer("intermediate_size"),
        "routed": _turns(fields, "expert", layers),
    }


def _turns(fields: Fields, what: str, layers: range) -> list[bool]:
    """Which layers are of a kind that comes once in every so many."""
    period = fields.integer(f"{what}_layer_period")
    offset = fields.integer(f"{what}_layer_offset", low=0, high=period - 1)
    return [i % period == offset for i in layers]


def granite(fields: Fields) -> dict[str, Any]:
    """Granite 4: Mamba-2 or attention, then experts beside a shared one, or that alone."""
    shared, own = fields.integer("shared_intermediate_size"), expanded_mamba(fields)
    experts = fields.integer("num_local_experts", default=0, low=0)
    if not experts:
        return own | {"ffn": shared}
    width = fields.integer("intermediate_size")
    if shared % width:
        problem = f"is {shared}, expected a multiple of the experts' width {width}"
        raise fields.error("shared_intermediate_size", problem)
    active = fields.integer("num_experts_per_tok", high=experts)
    return own | {
        "experts": experts, "experts_active": active, "expert_ffn": width,
        "shared_experts": shared // width,
    }  # fmt: skip


def nemotron(fields: Fields) -> dict[str, Any]:
    """Nemotron-H: every layer is one thing, and a letter or a word says which."""
    fields.must("use_bias", False, "biases of these products are not counted")
    pattern = fields.values.get("hybrid_override_pattern")
    blocks = fields.values.get("layers_block_type")
    if isinstance(blocks, list):
        pattern = "".join(BLOCKS.get(str(block), "?") for block in blocks)
    if not isinstance(pattern, str) or set(pattern) - set(LETTERS):
        named = "layers_block_type" if blocks is not None else "hybrid_override_pattern"
        expected = f"expected the letters {' '.join(LETTERS)} or the words of them"
        raise fields.error(named, f"is {shown(blocks or pattern)}, {expected}")
    heads, width = fields.integer("mamba_num_heads"), fields.integer("mamba_head_dim")
    state = Recurrence(
        "decay",
        heads,
        width,
        fields.integer("ssm_state_size"),
        fields.integer("n_groups"),
        fields.integer("conv_kernel"),
        conv_bias=fields.flag("use_conv_bias", True),
        gates=heads * width + heads,
        vectors=3 * heads + heads * width,
        chunk=fields.integer("chunk_size", default=128),
    )
    found: dict[str, Any] = {
        "recurrence": state,
        "mixers": [LETTERS[x][0] for x in pattern],
        "mlps": [LETTERS[x][1] for x in pattern],
        "routed": [LETTERS[x][2] for x in pattern],
        "gated": False,  # squared ReLU between two matrices
        "norms": 1,
    }
    if "E" not in pattern:
        return found
    if fields.values.get("moe_latent_size"):
        raise fields.error("moe_latent_size", "is set, and experts in a latent space are not read")
    width, shared = (fields.integer(f"moe_{x}intermediate_size") for x in ("", "shared_expert_"))
    if shared % width:
        problem = f"is {shared}, expected a multiple of the experts' width {width}"
        raise fields.error("moe_shared_expert_intermediate_size", problem)
    return found | {
        "experts": fields.integer("n_routed_experts"),
        "experts_active": fields.integer("num_experts_per_tok"),
        "expert_ffn": width,
        "shared_experts": shared // width * fields.integer("n_shared_experts", default=1),
        "router_bias": True,
    }


def short_convolution(fields: Fields) -> dict[str, Any]:
    """LFM2: gated convolutions over three tokens, whose state is two tokens."""
    fields.must("conv_bias", False, "biases of these products are not counted")
    hidden = fields.integer("hidden_size")
    state = Recurrence(
        "convolution", hidden, 1, 0, 1, fields.integer("conv_L_cache"), gates=2 * hidden
    )
    layers, whole = fields.integer("num_hidden_layers"), fields.values.get("full_attn_idxs")
    if isinstance(whole, list):
        mixers: list[Mixer] = ["attention" if i in whole else "recurrent" for i in range(layers)]
    else:
        mixers = kinds(fields, fields.values.get("layer_types"))
    width = fields.integer("intermediate_size", "block_ff_dim")
    if fields.flag("block_auto_adjust_ff_dim", True):  # two thirds, to a multiple
        step = fields.integer("block_multiple_of", default=256)
        width = step * -(-(2 * width // 3) // step)
    return {"recurrence": state, "mixers": mixers, "ffn": width, "qk_norm": True}


def lightning(fields: Fields) -> dict[str, Any]:
    """MiniMax-Text-01: lightning attention with a gate, softmax attention in every eighth layer."""
    heads, width = fields.integer("num_attention_heads"), fields.integer("head_dim")
    inner = heads * width
    block = fields.integer("block_size", default=256)
    state = Recurrence(
        "decay", heads, width, width, heads, 0, gates=inner, vectors=inner, chunk=block
    )
    listed = fields.values.get("attn_type_list")
    if isinstance(listed, list):
        return {
            "recurrence": state,
            "mixers": ["attention" if one else "recurrent" for one in listed],
        }
    return {"recurrence": state, "mixers": kinds(fields, fields.values.get("layer_types"))}


def indexed(fields: Fields) -> dict[str, Any]:
    """DeepSeek-V3.2 and GLM-5: an indexer beside latent attention."""
    names = ("index_n_heads", "index_head_dim", "index_topk")
    return {"indexer": Indexer(*(fields.integer(name) for name in names))}


def gemma3n(fields: Fields) -> dict[str, Any]:
    """Gemma 3n: the last layers share caches; four hidden states, an embedding in every layer.

    ``side`` has LAuReL's two products, the gate and the product of the layer's embedding, and
    AltUp's router; ``once`` projects that embedding and AltUp's hidden states in and out.
    """
    layers, hidden = fields.integer("num_hidden_layers"), fields.integer("hidden_size")
    states, width = (
        fields.integer("altup_num_inputs"),
        fields.integer("hidden_size_per_layer_input"),
    )
    shared = fields.integer("num_kv_shared_layers", low=0, high=layers - 1)
    ffn = fields.values.get("intermediate_size")
    if isinstance(ffn, list) and len(set(ffn)) == 1:
        ffn = ffn[0]
    if not isinstance(ffn, int):
        raise fields.error("intermediate_size", f"is {shown(ffn)}, expected one width")
    return {
        "mixers": ["attention"] * (layers - shared) + ["shared"] * shared,
        "norms": 4,
        "qk_norm": True,
        "ffn": ffn,
        "side": 2 * fields.integer("laurel_rank") + 2 * width + states,
        "once": layers * width + 2 * (states - 1) * hidden,
        "tables": fields.integer("vocab_size_per_layer_input") * layers * width + width,
        "vectors": 4 * hidden + states**3 + states**2,
    }
