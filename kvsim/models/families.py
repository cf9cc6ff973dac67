"""How each model family of Hugging Face writes its ``config.json``: one entry of FAMILIES each.

An entry gives the fields that its files may leave out, with the defaults of its model class in
transformers, and a function that reads what differs from Llama as fields of
:class:`kvsim.models.model.Model`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import NamedTuple, TypedDict

from kvsim.models.fields import Fields, value_text
from kvsim.models.kinds import Indexer, Mixer, Recurrence


class ModelFields(TypedDict, total=False):
    """Keyword arguments of :class:`kvsim.models.model.Model` in which a family differs from Llama.

    Their meanings are those of the attributes of the same names in ``Model``.
    """

    kv_heads: int
    head_dim: int
    ffn: int
    qk_norm: bool
    wide_norms: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    head_bias: bool
    norm_bias: bool
    gated: bool
    gated_attention: bool
    norms: int
    sinks: bool
    embedding_norm: bool
    learned_positions: int
    vectors: int
    side: int
    once: int
    tables: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    experts: int
    experts_active: int
    expert_ffn: int
    expert_biases: bool
    shared_experts: int
    shared_gate: bool
    router_bias: bool
    recurrence: Recurrence
    indexer: Indexer


class FamilyFields(ModelFields, total=False):
    """Result of reading a family's configuration: fields of ``Model``, and the kind of each layer.

    Attributes
    ----------
    mixers
        Attention or another mixer, by layer.
    mlps
        Whether each layer has an MLP.
    routed
        Whether each layer's MLP is a mixture of experts.
    """

    mixers: list[Mixer]
    mlps: list[bool]
    routed: list[bool]


FAMILIES_WITH_MTP = (
    *("deepseek_v3", "deepseek_v32", "glm4_moe", "glm_moe_dsa", "mimo"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
)
"""Families of models (Hugging Face's ``model_type``) published with prediction modules."""


def wide_norms(fields: Fields) -> FamilyFields:
    """Read norms over all heads' queries and over all their keys (OLMo 3, MiniMax-M2).

    Parameters
    ----------
    fields
        The model's ``config.json``: the number of heads, of KV heads, and their width.

    Returns
    -------
    FamilyFields
        ``wide_norms``, and in ``vectors`` the parameters of both norms of a layer.
    """
    heads = fields.integer("num_attention_heads")
    own = fields.integer("num_key_value_heads", default=heads)
    width = fields.integer("head_dim", default=fields.integer("hidden_size") // heads)
    return {"vectors": (heads + own) * width, "wide_norms": True}


def query_biases(fields: Fields) -> FamilyFields:
    """Read biases of queries, keys and values without one of the output (GLM-4.5, Seed-OSS).

    Parameters
    ----------
    fields
        The model's ``config.json``: flags, each False where it is missing.

    Returns
    -------
    FamilyFields
        ``qkv_bias``, ``out_bias`` and ``mlp_bias``.
    """
    return {
        "qkv_bias": fields.flag("attention_bias", False),
        "out_bias": fields.flag("attention_out_bias", False),
        "mlp_bias": fields.flag("mlp_bias", False),
    }


def glm4(fields: Fields) -> FamilyFields:
    """Read GLM-4.5 to 4.7: biases, norms of queries and keys, and a bias of the router.

    Parameters
    ----------
    fields
        The model's ``config.json``: flags of biases, and of norms of queries and keys.

    Returns
    -------
    FamilyFields
        Biases and norms; the experts are read by another function.
    """
    norms: FamilyFields = {"qk_norm": fields.flag("use_qk_norm", False), "router_bias": True}
    return query_biases(fields) | norms


def ernie(fields: Fields) -> FamilyFields:
    """Read ERNIE 4.5: one flag for all biases, and names of its own for the experts.

    Parameters
    ----------
    fields
        The model's ``config.json``: ``use_bias``, and fields that begin with ``moe_``, of which
        dense models have none.

    Returns
    -------
    FamilyFields
        Biases; with experts also how many, their width, and which layers route to them.
    """
    biased = fields.flag("use_bias", False)
    biases: FamilyFields = {
        "qkv_bias": biased,
        "out_bias": biased,
        "mlp_bias": biased,
        "head_bias": biased,
    }
    if not fields.integer("moe_num_experts", default=0, low=0):
        return biases
    layers = fields.integer("num_hidden_layers")
    first = fields.integer("moe_layer_start_index", default=1, low=0)
    last = fields.values.get("moe_layer_end_index", -1)
    end = layers - 1 if not isinstance(last, int) or last < 0 else last
    step = fields.integer("moe_layer_interval", default=1)
    return (
        biases
        | _experts(fields, "moe_num_experts", "moe_k")
        | {
            "shared_experts": fields.integer("moe_num_shared_experts", default=0, low=0),
            "router_bias": True,
            "routed": [first <= i <= end and (i + 1) % step == 0 for i in range(layers)],
        }
    )


ATTENTION_LAYER_TYPES = ("full_attention", "attention", "sliding_attention")
STATE = ("linear_attention", "mamba", "conv")
LETTERS: Mapping[str, tuple[Mixer, bool, bool]] = {  # mixer, MLP, routed
    "M": ("recurrent", False, False),
    "*": ("attention", False, False),
    "-": ("none", True, False),
    "E": ("none", True, True),
}
BLOCK_LETTERS = {"mamba": "M", "linear_attention": "M", "mlp": "-", "moe": "E"}
BLOCK_LETTERS |= {"attention": "*", "full_attention": "*"}


def kinds(fields: Fields, names: object) -> list[Mixer]:
    """Translate a configuration's list of layer types to mixers.

    Parameters
    ----------
    fields
        The configuration, for error messages.
    names
        Value of its ``layer_types``, one per layer.

    Returns
    -------
    list of Mixer
        "attention" or "recurrent" for each layer.

    Raises
    ------
    FieldError
        If a type is neither attention nor recurrent.
    """
    known = (*ATTENTION_LAYER_TYPES, *STATE)
    if not isinstance(names, list) or any(name not in known for name in names):
        raise fields.error("layer_types", f"is {value_text(names)}, expected a list of {known}")
    return _attention_where(name in ATTENTION_LAYER_TYPES for name in names)


def _attention_where(attends: Iterable[object]) -> list[Mixer]:
    return ["attention" if one else "recurrent" for one in attends]


def interleaved_mixers(fields: Fields, name: str) -> list[Mixer]:
    """Return recurrent mixers with attention every N layers, unless layer types are listed.

    Parameters
    ----------
    fields
        Fields of the configuration.
    name
        Field that holds the period of attention layers.

    Returns
    -------
    list[Mixer]
        Mixer of each layer.
    """
    if "layer_types" in fields.values:
        return kinds(fields, fields.values["layer_types"])
    layers, period = fields.integer("num_hidden_layers"), fields.integer(name, default=4)
    return _attention_where((i + 1) % period == 0 for i in range(layers))


def gated_delta(fields: Fields) -> FamilyFields:
    """Read Qwen3-Next and Qwen3.5: layers with gated DeltaNet [1]_ or with gated attention.

    Parameters
    ----------
    fields
        The model's ``config.json``: fields that begin with ``linear_``, and the interval of layers
        with attention.

    Returns
    -------
    FamilyFields
        The recurrence of a layer, and the mixer of each layer.

    References
    ----------
    .. [1] S. Yang et al., Gated Delta Networks, https://arxiv.org/abs/2412.06464
    """
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
    mixers = interleaved_mixers(fields, "full_attention_interval")
    return {"recurrence": state, "mixers": mixers, "gated_attention": True, "qk_norm": True}


def kimi_delta(fields: Fields) -> FamilyFields:
    """Read Kimi Linear [1]_: KDA beside latent attention.

    Parameters
    ----------
    fields
        The model's ``config.json``: ``linear_attn_config``, whose lists count layers from 1.

    Returns
    -------
    FamilyFields
        The recurrence of a layer, with one gate for each channel, and the mixer of each layer.

    References
    ----------
    .. [1] Kimi Linear, https://arxiv.org/abs/2510.26692
    """
    own = fields.values.get("linear_attn_config")
    if not isinstance(own, dict):
        raise fields.error("linear_attn_config", f"is {value_text(own)}, expected an object")
    f = Fields(own, fields.where, f"{fields.prefix}linear_attn_config.")
    heads, width = f.integer("num_heads"), f.integer("head_dim")
    layers, whole = fields.integer("num_hidden_layers"), own.get("full_attn_layers")
    if not isinstance(whole, list) or not all(isinstance(x, int) for x in whole):
        raise f.error("full_attn_layers", f"is {value_text(whole)}, expected a list of layers")
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
    mixers = _attention_where(i + 1 in whole for i in range(layers))
    return {"recurrence": state, "mixers": mixers}


def _mamba(fields: Fields, heads: int, width: int, names: Sequence[str], chunk: int) -> Recurrence:
    """Mamba-2; names of state, groups, convolution, its bias and chunk, and the usual chunk."""
    inner, (*sizes, biased, chunked) = heads * width, names
    state, groups, convolution = map(fields.integer, sizes)
    return Recurrence(
        "decay",
        heads,
        width,
        state,
        groups,
        convolution,
        conv_bias=fields.flag(biased, True),
        gates=inner + heads,
        vectors=3 * heads + inner,
        chunk=fields.integer(chunked, default=chunk),
    )


def expanded_mamba(fields: Fields) -> FamilyFields:
    """Read Mamba-2 whose width is a multiple of the hidden size (Bamba, Granite 4).

    Parameters
    ----------
    fields
        The model's ``config.json``: ``mamba_expand`` times the hidden size is the width of the
        mixer.

    Returns
    -------
    FamilyFields
        The recurrence of a layer, and the mixer of each layer.
    """
    fields.must("mamba_proj_bias", False, "biases of these products are not counted")
    inner = fields.integer("mamba_expand") * fields.integer("hidden_size")
    heads = fields.integer("mamba_n_heads")
    names = [f"mamba_{x}" for x in ("d_state", "n_groups", "d_conv", "conv_bias", "chunk_size")]
    state = _mamba(fields, heads, inner // heads, names, 256)
    if "attn_layer_indices" not in fields.values:
        return {"recurrence": state, "mixers": kinds(fields, fields.values.get("layer_types"))}
    whole, layers = fields.values["attn_layer_indices"], fields.integer("num_hidden_layers")
    if not isinstance(whole, list):
        raise fields.error(
            "attn_layer_indices", f"is {value_text(whole)}, expected a list of layers"
        )
    mixers = _attention_where(i in whole for i in range(layers))
    return {"recurrence": state, "mixers": mixers}


def jamba(fields: Fields) -> FamilyFields:
    """Read Jamba [1]_: Mamba with attention in every eighth layer, experts in every second.

    Parameters
    ----------
    fields
        The model's ``config.json``: fields that begin with ``mamba_``, ``attn_layer_`` and
        ``expert_layer_``.

    Returns
    -------
    FamilyFields
        The recurrence of a layer, mixers, and which layers route to experts.

    References
    ----------
    .. [1] O. Lieber et al., Jamba, https://arxiv.org/abs/2403.19887
    """
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
    found: FamilyFields = {
        "recurrence": state,
        "mixers": _attention_where(_periodic_layers(fields, "attn", layers)),
    }
    if fields.integer("num_experts") == 1:
        return found
    experts = _experts(fields, width="intermediate_size")
    return found | experts | {"routed": _periodic_layers(fields, "expert", layers)}


def _periodic_layers(fields: Fields, what: str, layers: range) -> list[bool]:
    """Indices of layers at a fixed interval."""
    period = fields.integer(f"{what}_layer_period")
    offset = fields.integer(f"{what}_layer_offset", low=0, high=period - 1)
    return [i % period == offset for i in layers]


def granite(fields: Fields) -> FamilyFields:
    """Read Granite 4: Mamba-2 or attention, then a shared expert with or without routed ones.

    Parameters
    ----------
    fields
        The model's ``config.json``: the fields of ``expanded_mamba``, and the widths of the routed
        experts and of the shared one.

    Returns
    -------
    FamilyFields
        The recurrence, mixers and experts; a shared expert that is wider than the routed ones
        counts as several of their width.
    """
    shared, own = fields.integer("shared_intermediate_size"), expanded_mamba(fields)
    if not fields.integer("num_local_experts", default=0, low=0):
        return own | {"ffn": shared}
    experts = _experts(fields, "num_local_experts", width="intermediate_size")
    own["shared_experts"] = _count_shared(fields, "shared_intermediate_size", experts["expert_ffn"])
    return own | experts


def nemotron(fields: Fields) -> FamilyFields:
    """Read Nemotron-H: each layer is a mixer, attention or an MLP alone.

    Parameters
    ----------
    fields
        The model's ``config.json``: ``hybrid_override_pattern`` names layers by letters of
        ``LETTERS``, or ``layers_block_type`` by words.

    Returns
    -------
    FamilyFields
        The recurrence; of each layer its mixer, whether it has an MLP, and whether that is routed.
    """
    fields.must("use_bias", False, "biases of these products are not counted")
    pattern = fields.values.get("hybrid_override_pattern")
    blocks = fields.values.get("layers_block_type")
    if isinstance(blocks, list):
        pattern = "".join(BLOCK_LETTERS.get(str(block), "?") for block in blocks)
    if not isinstance(pattern, str) or set(pattern) - set(LETTERS):
        named = "layers_block_type" if blocks is not None else "hybrid_override_pattern"
        expected = f"expected the letters {' '.join(LETTERS)} or their names"
        raise fields.error(named, f"is {value_text(blocks or pattern)}, {expected}")
    heads, width = fields.integer("mamba_num_heads"), fields.integer("mamba_head_dim")
    names = "ssm_state_size", "n_groups", "conv_kernel", "use_conv_bias", "chunk_size"
    state = _mamba(fields, heads, width, names, 128)
    found: FamilyFields = {
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
        raise fields.error("moe_latent_size", "is set: experts in a latent space are not supported")
    experts = _experts(fields, "n_routed_experts")
    shared = _count_shared(fields, "moe_shared_expert_intermediate_size", experts["expert_ffn"])
    found["shared_experts"] = shared * fields.integer("n_shared_experts", default=1)
    return found | experts | {"router_bias": True}


def short_convolution(fields: Fields) -> FamilyFields:
    """Read LFM2: gated convolutions over three tokens, whose state is two tokens.

    Parameters
    ----------
    fields
        The model's ``config.json``: the length of the convolutions, and which layers attend.

    Returns
    -------
    FamilyFields
        The recurrence of a layer, mixers, and the adjusted width of the MLP.
    """
    fields.must("conv_bias", False, "biases of these products are not counted")
    hidden = fields.integer("hidden_size")
    state = Recurrence(
        "convolution", hidden, 1, 0, 1, fields.integer("conv_L_cache"), gates=2 * hidden
    )
    layers, whole = fields.integer("num_hidden_layers"), fields.values.get("full_attn_idxs")
    if isinstance(whole, list):
        mixers = _attention_where(i in whole for i in range(layers))
    else:
        mixers = kinds(fields, fields.values.get("layer_types"))
    width = fields.integer("intermediate_size", "block_ff_dim")
    if fields.flag("block_auto_adjust_ff_dim", True):  # two thirds, to a multiple
        step = fields.integer("block_multiple_of", default=256)
        width = step * -(-(2 * width // 3) // step)
    return {"recurrence": state, "mixers": mixers, "ffn": width, "qk_norm": True}


def lightning(fields: Fields) -> FamilyFields:
    """Read MiniMax-Text-01 [1]_: lightning attention, with softmax attention in every eighth layer.

    Parameters
    ----------
    fields
        The model's ``config.json``: heads, their width, and the tokens that lightning attention
        processes together.

    Returns
    -------
    FamilyFields
        The recurrence of a layer, and the mixer of each layer.

    References
    ----------
    .. [1] MiniMax-01, https://arxiv.org/abs/2501.08313
    """
    heads, width = fields.integer("num_attention_heads"), fields.integer("head_dim")
    inner = heads * width
    block = fields.integer("block_size", default=256)
    state = Recurrence(
        "decay", heads, width, width, heads, 0, gates=inner, vectors=inner, chunk=block
    )
    listed = fields.values.get("attn_type_list")
    if isinstance(listed, list):
        return {"recurrence": state, "mixers": _attention_where(listed)}
    return {"recurrence": state, "mixers": kinds(fields, fields.values.get("layer_types"))}


def indexed(fields: Fields) -> FamilyFields:
    """Read the indexer of DeepSeek-V3.2 and GLM-5, which selects the tokens that attention reads.

    Parameters
    ----------
    fields
        The model's ``config.json``: heads of the indexer, their width, and how many tokens it
        selects.

    Returns
    -------
    FamilyFields
        ``indexer``.
    """
    names = ("index_n_heads", "index_head_dim", "index_topk")
    return {"indexer": Indexer(*(fields.integer(name) for name in names))}


def gemma3n(fields: Fields) -> FamilyFields:
    """Read Gemma 3n, which has four hidden states per token, and an embedding in every layer.

    The last layers share the caches of earlier ones. ``side`` contains LAuReL's two products, the
    gate and the product of the layer's embedding, and AltUp's router; ``once`` contains the
    projections of that embedding and of AltUp's hidden states.

    Parameters
    ----------
    fields
        The model's ``config.json``: ``num_kv_shared_layers``, and widths of AltUp, LAuReL and the
        layers' embeddings.

    Returns
    -------
    FamilyFields
        Mixers, and the parameters that a Llama layer does not have.
    """
    layers, hidden = fields.integer("num_hidden_layers"), fields.integer("hidden_size")
    states, width = (
        fields.integer("altup_num_inputs"),
        fields.integer("hidden_size_per_layer_input"),
    )
    shared = fields.integer("num_kv_shared_layers", low=0, high=layers - 1)
    mixers: list[Mixer] = ["attention"] * (layers - shared)
    mixers += ["shared"] * shared
    ffn = fields.values.get("intermediate_size")
    if isinstance(ffn, list) and len(set(ffn)) == 1:
        ffn = ffn[0]
    if not isinstance(ffn, int):
        raise fields.error("intermediate_size", f"is {value_text(ffn)}, expected one width")
    return {
        "mixers": mixers,
        "norms": 4,
        "qk_norm": True,
        "ffn": ffn,
        "side": 2 * fields.integer("laurel_rank") + 2 * width + states,
        "once": layers * width + 2 * (states - 1) * hidden,
        "tables": fields.integer("vocab_size_per_layer_input") * layers * width + width,
        "vectors": 4 * hidden + states**3 + states**2,
    }


def _no_values(fields: Fields) -> FamilyFields:
    return {}


def _biases(fields: Fields) -> FamilyFields:
    attention = fields.flag("attention_bias", False)
    mlp = fields.flag("mlp_bias", False)
    return {"qkv_bias": attention, "out_bias": attention, "mlp_bias": mlp}


def _experts(
    fields: Fields,
    count: str = "num_experts",
    active: str = "num_experts_per_tok",
    width: str = "moe_intermediate_size",
) -> FamilyFields:
    """Routed experts, from the fields that hold their number, those per token and their width."""
    experts, chosen = fields.integer(count), fields.integer(active)
    if chosen > experts:
        problem = f"is {chosen}, expected at most the {experts} experts"
        raise fields.error(active, problem, "correct one of the two")
    inner = fields.integer(width, "intermediate_size")
    return {"experts": experts, "experts_active": chosen, "expert_ffn": inner}


def _count_shared(fields: Fields, name: str, width: int) -> int:
    """How many experts of a width a shared one is as wide as."""
    shared = fields.integer(name)
    if shared % width:
        raise fields.error(name, f"is {shared}, expected a multiple of the experts' width {width}")
    return shared // width


def _qwen2_moe(fields: Fields) -> FamilyFields:
    experts = _experts(fields)
    shared = _count_shared(fields, "shared_expert_intermediate_size", experts["expert_ffn"])
    return experts | {"qkv_bias": True, "shared_experts": shared, "shared_gate": True}


def _deepseek(fields: Fields) -> FamilyFields:
    return _glm4_experts(fields) | _latent(fields)


def _latent(fields: Fields) -> FamilyFields:
    """Multi-head latent attention (DeepSeek-V2 and later, MiniCPM3)."""
    fields.must("attention_bias", False, "biases of latent attention are not counted")
    nope, rope = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    return {
        "q_rank": fields.integer("q_lora_rank", default=0),
        "kv_rank": fields.integer("kv_lora_rank"),
        "head_dim": nope + rope,
        "nope_dim": nope,
        "rope_dim": rope,
        "value_dim": fields.integer("v_head_dim"),
    }


def _qwen_experts(fields: Fields) -> FamilyFields:
    """Experts beside one with a gate, which biases of Qwen2 do not come with."""
    own = _qwen2_moe(fields)
    # where all layers are routed, a dense one (of a draft head) is as wide as a token's experts
    dense = fields.integer("intermediate_size", default=own["experts_active"] * own["expert_ffn"])
    return own | {"qkv_bias": False, "ffn": dense}


def _llama4(fields: Fields) -> FamilyFields:
    """Llama 4: one expert beside a shared one, and attention in chunks but for each fourth layer.

    A query of a chunk attends to half of it on average and to all of it at most: as a window.
    """
    layers = range(fields.integer("num_hidden_layers"))
    step = fields.integer("interleave_moe_layer_step", default=1)
    experts = _experts(fields, "num_local_experts", width="intermediate_size")
    return (
        _biases(fields)
        | experts
        | {
            "shared_experts": 1,
            "ffn": fields.integer("intermediate_size_mlp"),
            "routed": [(i + 1) % step == 0 for i in layers],
        }
    )


def _cohere(fields: Fields) -> FamilyFields:
    """Command R: one norm per layer; Command R+ norms every head's queries and keys."""
    normed: FamilyFields = wide_norms(fields) if fields.flag("use_qk_norm", False) else {}
    return _biases(fields) | normed | {"norms": 1}


def _mosaic(fields: Fields) -> FamilyFields:
    """MPT: two MLP matrices, and no biases."""
    fields.must("no_bias", True, "biases of these products are not counted")
    width = fields.integer("hidden_size", "d_model")
    return {"gated": False, "ffn": fields.integer("expansion_ratio", default=4) * width}


def _bailing(fields: Fields) -> FamilyFields:
    """Ling 2.0: grouped queries with norms, shared experts, a bias of the router."""
    shared = fields.integer("num_shared_experts", default=0, low=0)
    normed: FamilyFields = {"shared_experts": shared, "qk_norm": True, "router_bias": True}
    return _biases(fields) | _experts(fields) | normed


def _phi_experts(fields: Fields) -> FamilyFields:
    """Phi-3.5-MoE: LayerNorms, and biases of attention and of the LM head."""
    biased = fields.flag("attention_bias", True)
    biases: FamilyFields = {
        "qkv_bias": biased,
        "out_bias": biased,
        "head_bias": True,
        "norm_bias": True,
    }
    return _experts(fields, "num_local_experts") | biases


def _glm4_experts(fields: Fields) -> FamilyFields:
    shared: FamilyFields = {"shared_experts": fields.integer("n_shared_experts", default=0, low=0)}
    return _experts(fields, "n_routed_experts") | shared


def _kimi(fields: Fields) -> FamilyFields:
    """Latent attention as DeepSeek's, with names of its own for the experts."""
    shared: FamilyFields = {
        "shared_experts": fields.integer("num_shared_experts", default=0, low=0),
        "router_bias": True,
    }
    return _experts(fields, active="num_experts_per_token") | _latent(fields) | shared


def _gpt_oss(fields: Fields) -> FamilyFields:
    experts = _experts(fields, "num_local_experts")
    return _biases(fields) | experts | {"sinks": True, "expert_biases": True}


def _layer_norm(biased: bool) -> FamilyFields:
    """Features common to families before Llama: two MLP matrices, LayerNorm and mostly biases."""
    biases: FamilyFields = {"qkv_bias": biased, "out_bias": biased, "mlp_bias": biased}
    return biases | {"gated": False, "norm_bias": True}


def _opt(fields: Fields) -> FamilyFields:
    fields.must("do_layer_norm_before", True, "norms after the block are not counted")
    if fields.integer("word_embed_proj_dim", "hidden_size") != fields.integer("hidden_size"):
        raise fields.error(
            "word_embed_proj_dim", "differs from hidden_size, expected the same", "choose another"
        )
    positions = (
        fields.integer("max_position_embeddings") + 2
    )  # OPT leaves the first two rows unused
    return _layer_norm(fields.flag("enable_bias", True)) | {"learned_positions": positions}


def _gpt_neox(fields: Fields) -> FamilyFields:
    attention = fields.flag("attention_bias", True)
    return _layer_norm(True) | {"qkv_bias": attention, "out_bias": attention}


def _phi(fields: Fields) -> FamilyFields:
    fields.must("qk_layernorm", False, "norms of queries and keys with biases are not counted")
    return _layer_norm(True) | {"head_bias": True, "norms": 1}


def _bloom(fields: Fields) -> FamilyFields:
    ffn = 4 * fields.integer("hidden_size", "n_embed")
    return _layer_norm(True) | {"ffn": ffn, "embedding_norm": True}


def _falcon(fields: Fields) -> FamilyFields:
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
    """How the configurations of one ``model_type`` are read.

    Attributes
    ----------
    defaults
        Values of fields that its files may leave out.
    read
        Reads in which fields of ``Model`` a configuration differs from Llama.
    """

    defaults: Mapping[str, object]
    read: Callable[[Fields], FamilyFields]


_TIED: dict[str, object] = {"tie_word_embeddings": True}
_QWEN: dict[str, object] = {"use_sliding_window": False, "max_window_layers": 28}
_GEMMA = _TIED | {"head_dim": 256}
_GEMMA3 = _GEMMA | {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "_sliding_window_pattern": 6,
}
_INDEXED: FamilyFields = {"router_bias": True}
_GLM5: dict[str, object] = {"index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048}
_ALTERNATE: dict[str, object] = {"_sliding_window_pattern": 2}
MODEL_FAMILIES = {
    "llama": Family({}, _biases),
    "granite": Family({}, _biases),
    "mistral": Family({}, _no_values),
    "mixtral": Family({}, lambda f: _experts(f, "num_local_experts")),
    "qwen2": Family(_QWEN, lambda f: {"qkv_bias": True}),
    "qwen2_moe": Family(_QWEN, _qwen2_moe),
    "qwen3": Family(_QWEN | {"head_dim": 128}, lambda f: _biases(f) | {"qk_norm": True}),
    "qwen3_moe": Family(_QWEN, lambda f: _biases(f) | _experts(f) | {"qk_norm": True}),
    "gemma": Family(_GEMMA, _biases),
    "gemma2": Family(_GEMMA | _ALTERNATE, lambda f: _biases(f) | {"norms": 4}),
    "gemma3_text": Family(_GEMMA3, lambda f: _biases(f) | {"norms": 4, "qk_norm": True}),
    "phi": Family({}, _phi),
    "phi3": Family({}, _no_values),
    "deepseek_v2": Family({}, _deepseek),
    "deepseek_v3": Family({}, lambda f: _deepseek(f) | {"router_bias": True}),
    "deepseek_v32": Family({}, lambda f: _deepseek(f) | _INDEXED | indexed(f)),
    "glm_moe_dsa": Family(_GLM5, lambda f: _deepseek(f) | _INDEXED | indexed(f)),
    "kimi_linear": Family({}, lambda f: _kimi(f) | kimi_delta(f)),
    "qwen3_next": Family(_QWEN, lambda f: _biases(f) | _qwen_experts(f) | gated_delta(f)),
    "qwen3_5_text": Family(_QWEN, lambda f: _biases(f) | gated_delta(f)),
    "qwen3_5_moe_text": Family(_QWEN, lambda f: _biases(f) | _qwen_experts(f) | gated_delta(f)),
    "nemotron_h": Family({}, nemotron),
    "jamba": Family({}, jamba),
    "bamba": Family({}, expanded_mamba),
    "granitemoehybrid": Family({}, granite),
    "lfm2": Family(_TIED, short_convolution),
    "minimax": Family({}, lambda f: _experts(f, "num_local_experts") | lightning(f)),
    "minimax_text_01": Family({}, lambda f: _experts(f, "num_local_experts") | lightning(f)),
    "gemma3n_text": Family(_TIED, lambda f: _biases(f) | gemma3n(f)),
    "kimi_k2": Family({}, lambda f: _deepseek(f) | {"router_bias": True}),
    "glm4_moe": Family({}, lambda f: _glm4_experts(f) | glm4(f)),
    "glm4_moe_lite": Family({}, lambda f: _deepseek(f) | {"router_bias": True}),
    "minimax_m2": Family(
        {}, lambda f: _experts(f, "num_local_experts") | wide_norms(f) | {"router_bias": True}
    ),
    "olmo3": Family({}, wide_norms),
    "seed_oss": Family({"attention_bias": True}, query_biases),
    "smollm3": Family(_TIED, _biases),
    "ernie4_5": Family(_TIED, ernie),
    "ernie4_5_moe": Family(_TIED, ernie),
    "qwen3_vl_text": Family(_QWEN, lambda f: _biases(f) | {"qk_norm": True}),
    "qwen3_vl_moe_text": Family(_QWEN, lambda f: _biases(f) | _experts(f) | {"qk_norm": True}),
    "gpt_oss": Family(_ALTERNATE | {"attention_bias": True, "head_dim": 64}, _gpt_oss),
    "llama4_text": Family({"attention_chunk_size": 8192, "_sliding_window_pattern": 4}, _llama4),
    "olmo2": Family({}, wide_norms),
    "cohere": Family(_TIED, _cohere),
    "cohere2": Family(_TIED | {"_sliding_window_pattern": 4}, _cohere),
    "internlm2": Family({}, _no_values),
    "baichuan": Family({}, _no_values),
    "minicpm": Family(_TIED, _no_values),
    "minicpm3": Family(_TIED, _latent),
    "glm": Family({"attention_bias": True}, query_biases),
    "glm4": Family({"attention_bias": True}, lambda f: query_biases(f) | {"norms": 4}),
    "deepseek": Family({}, _glm4_experts),
    "granitemoe": Family({}, lambda f: _biases(f) | _experts(f, "num_local_experts")),
    "phimoe": Family({}, _phi_experts),
    "bailing_moe_v2": Family({}, _bailing),
    "hunyuan_v1_moe": Family(_TIED, lambda f: _experts(f) | {"shared_experts": 1, "qk_norm": True}),
    "mimo": Family(_QWEN, lambda f: {"qkv_bias": True}),
    "nemotron": Family({}, lambda f: {"gated": False, "norm_bias": True}),
    "stablelm": Family({}, lambda f: _biases(f) | {"norm_bias": True}),
    "exaone4": Family({}, lambda f: _biases(f) | {"qk_norm": True}),
    "starcoder2": Family(_TIED, lambda f: _layer_norm(f.flag("use_bias", True))),
    "mpt": Family(_TIED, _mosaic),
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
    "num_experts",
    "num_local_experts",
    "n_routed",
    "moe_",
    "kv_lora",
    "v_head_dim",
    "linear_",
    "mamba",
    "ssm",
    "hybrid",
    "swa_",
    "layers_block_type",
    "num_kv_shared",
)


def find_family(fields: Fields) -> tuple[str, Family, list[str]]:
    """Find the family of a configuration.

    A configuration of an unknown family is read as a Llama if its fields are those of one.

    Parameters
    ----------
    fields
        Fields of the configuration.

    Returns
    -------
    tuple of str, Family and list of str
        The ``model_type``, its family, and remarks on assumptions.

    Raises
    ------
    FieldError
        If the family is unknown and its fields differ from Llama's.
    """
    name = fields.values.get("model_type")
    near = get_close_matches(str(name), MODEL_FAMILIES, n=3) or ["llama", "qwen3", "deepseek_v3"]
    known = f"expected one of {len(MODEL_FAMILIES)} families such as {', '.join(near)}"
    if not isinstance(name, str):
        problem = "is missing" if name is None else f"is {value_text(name)}"
        raise fields.error("model_type", f"{problem}, {known}")
    if name in MODEL_FAMILIES:
        return name, MODEL_FAMILIES[name], []
    missing = [f"it has no {field}" for field in _LLAMA if field not in fields.values]
    strange = [f"it has {field}" for field in fields.values if field.startswith(_NOT_LLAMA)]
    if missing or strange:
        why = (missing + strange)[0]
        problem = f"is {value_text(name)}, which cannot be treated as a Llama ({why})"
        raise fields.error("model_type", f"{problem}, {known}", "choose another model")
    note = f"model_type {value_text(name)} is not known: treated as a Llama"
    return name, MODEL_FAMILIES["llama"], [note]
