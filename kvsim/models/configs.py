"""Models from the catalogue or from any Hugging Face ``config.json``.

A field that cannot be right raises :class:`kvsim.errors.InputError` with one line that names file
and field.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import cast

from kvsim.errors import InputError
from kvsim.files import CONFIG, read_json
from kvsim.models.catalogue import (
    NamedModel,
    cached_config,
    catalogue_config,
    catalogue_entry,
    find_exact,
    find_model,
    is_path,
    unknown_model,
)
from kvsim.models.families import FamilyFields, ModelFields, find_family
from kvsim.models.fields import Fields, value_text
from kvsim.models.kinds import Mixer
from kvsim.models.model import LayerShape, Model


def released_format(stated: object) -> str:
    """Name the weight format that a ``quantization_config`` describes.

    Parameters
    ----------
    stated
        The ``quantization_config``, or None.

    Returns
    -------
    str
        A name of ``--weights``: fp16 without a ``quantization_config``, empty if it is not known.
    """
    if stated is None:
        return "fp16"
    if not isinstance(stated, Mapping):
        return ""
    method, bits = stated.get("quant_method"), stated.get("bits")
    if method == "fp8":
        return "fp8-block" if stated.get("weight_block_size") else "fp8"
    if method in ("gptq", "awq"):
        return "int4" if bits == 4 else "int8" if bits == 8 else ""
    if method == "modelopt":
        return {"FP8": "fp8", "NVFP4": "nvfp4"}.get(str(stated.get("quant_algo")), "")
    if method == "bitsandbytes":
        return (
            "int4" if stated.get("load_in_4bit") else "int8" if stated.get("load_in_8bit") else ""
        )
    if method == "compressed-tensors":
        return _compressed_format(stated.get("config_groups"))
    return "mxfp4" if method == "mxfp4" else ""


def _compressed_format(groups: object) -> str:
    """The format that the first group of a compressed-tensors checkpoint describes."""
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    if not isinstance(weights, Mapping) or not isinstance(first, Mapping):
        return ""
    kind, bits = weights.get("type"), weights.get("num_bits")
    if kind == "float" and bits == 8:
        inputs = first.get("input_activations")
        dynamic = isinstance(inputs, Mapping) and inputs.get("dynamic") is True
        block = weights.get("strategy") == "block"
        return "fp8-block" if block else "fp8-dynamic" if dynamic else "fp8"
    if kind == "float" and bits == 4:
        return "nvfp4" if weights.get("group_size") == 16 else "mxfp4"
    if kind == "int" and bits == 4:
        return "int4-g32" if weights.get("group_size") == 32 else "int4"
    return "int8" if kind == "int" and bits == 8 else ""


MAX_CONFIG_LAYERS = 1000
MAX_HEAD_DIM = 4096  # eight times the largest of a released model
STORED_AS = ("float32", "float16", "bfloat16", "float", "half", "auto", "float8_e4m3fn", "uint8")
"""Names of ``torch_dtype`` that a decoder's configuration may state."""
ENCODER_DECODERS = (
    *("t5", "mt5", "umt5", "bart", "mbart", "pegasus", "whisper", "marian", "blenderbot", "led"),
    *("fsmt", "m2m_100", "switch_transformers"),
)
LOW_BIT_METHODS = (
    *("hqq", "aqlm", "quip", "vptq", "spqr", "eetq", "quanto", "bitnet", "higgs", "torchao"),
    *("exl2", "auto-round"),
)
"""Quantisation methods whose formats are not modelled: as 16 bit they would be 2 to 8 times off."""
MEND = "give a config.json, a directory that holds one, or a name from the catalogue"


def load_model(name_or_path: str | Mapping[str, object]) -> Model:
    """Load a model by its name, from the path of a configuration, or from a parsed one.

    A name is one of the catalogue, a Hugging Face id or an Ollama tag; a suffix such as ``-AWQ``
    sets the format of the weights. A path is a ``config.json`` under any name or a directory that
    holds one. The catalogue comes first; write ``./name`` for a path that is also a name in it.
    Other ids are looked up in the local Hugging Face cache.

    Parameters
    ----------
    name_or_path
        Name, id or path; or the fields of a ``config.json``.

    Returns
    -------
    Model
        The model.

    Raises
    ------
    InputError
        If there is no such model, several have the name, or its configuration cannot be used.

    Examples
    --------
    >>> load_model("meta-llama/Llama-3.1-8B-Instruct").name
    'llama3.1-8b'
    >>> load_model("Qwen/Qwen3-8B-AWQ").released
    'awq'
    """
    if isinstance(name_or_path, Mapping):
        title = str(name_or_path.get("_name_or_path") or name_or_path.get("model_type") or "model")
        return from_config(name_or_path, title.rstrip("/").rpartition("/")[2])
    found = _catalogue_model(name_or_path)
    if found is None:
        return read_model(*read_config(name_or_path))
    return _shipped_model(*found)


@cache  # what ships stays as it is while kvsim runs
def _shipped_model(name: str, weights: str, repository: str) -> Model:
    model, own = read_model(catalogue_config(name), name, name), catalogue_entry(name)["hf_id"]
    if weights == "fp8" and not repository:  # as --weights fp8
        published = replace(model, repository=own)
        weights = published.fp8_format
        repository = published.checkpoint(weights)
    if weights not in ("", model.released):
        repository = repository or stand_in(own, weights)
    return replace(model, released=weights or model.released, repository=repository or own)


CHECKPOINT_OF = "_CHECKPOINT_OF_"


def stand_in(repository: str, weights: str) -> str:
    """Return a placeholder for the name of a checkpoint, to be filled in by the user.

    Parameters
    ----------
    repository
        Hugging Face id of the model in its published format.
    weights
        Format of the checkpoint's weights.

    Returns
    -------
    str
        The placeholder for command lines.

    Examples
    --------
    >>> stand_in("Qwen/Qwen3-8B", "awq")
    'AWQ_CHECKPOINT_OF_Qwen3-8B'
    """
    return f"{weights.upper().replace('-', '_')}{CHECKPOINT_OF}{repository.rpartition('/')[2]}"


def read_config(name_or_path: str) -> tuple[Mapping[str, object], str, str]:
    """Read a model's configuration.

    Parameters
    ----------
    name_or_path
        Name, id or path.

    Returns
    -------
    tuple[Mapping[str, object], str, str]
        Its fields, the model's name, and the configuration's name in messages.

    Raises
    ------
    InputError
        If there is no such model or its configuration is no JSON object.
    """
    found = _catalogue_model(name_or_path)
    if found is not None:
        return catalogue_config(found.name), found.name, found.name
    where = repr(name_or_path)
    path = _find_file(name_or_path)
    config = read_json(path, CONFIG, strict=False)
    if not isinstance(config, dict):
        problem = f"holds a {type(config).__name__}, expected an object"
        raise InputError(f"{where}: {problem}; give a Hugging Face config.json")
    if path.name != "config.json":
        title = path.stem
    elif path.parent.parent.name == "snapshots":
        title = name_or_path.strip().rpartition("/")[2]
    else:
        title = path.resolve().parent.name
    return config, title or where, where


def from_config(config: Mapping[str, object], name: str) -> Model:
    """Build the model that a parsed ``config.json`` describes.

    Parameters
    ----------
    config
        The parsed fields.
    name
        Name of the model, also for messages.

    Returns
    -------
    Model
        The model.
    """
    return read_model(config, name, name)


def compress(layers: Sequence[LayerShape]) -> tuple[tuple[tuple[LayerShape, ...], int], ...]:
    """Group layers into repeated blocks, greedily from the first layer.

    Parameters
    ----------
    layers
        Every layer in order.

    Returns
    -------
    tuple[tuple[tuple[LayerShape, ...], int], ...]
        Blocks of layers, each with its repetitions.
    """
    groups: list[tuple[tuple[LayerShape, ...], int]] = []
    rest = tuple(layers)
    while rest:
        size, count = 1, 1
        for length in range(1, len(rest) // 2 + 1):
            repeats = 1
            while rest[repeats * length : (repeats + 1) * length] == rest[:length]:
                repeats += 1
            if repeats > 1 and length * repeats > size * count:
                size, count = length, repeats
        groups.append((rest[:size], count))
        rest = rest[size * count :]
    return tuple(groups)


def _catalogue_model(typed: str) -> NamedModel | None:
    """The catalogue model that a name refers to; None for an existing path."""
    exact = find_exact(typed)
    return exact if exact is not None or is_path(typed) else find_model(typed)


def _find_file(name: str) -> Path:
    """The configuration at a path, which need not be readable."""
    try:
        path = Path(name).expanduser()
        if name and path.is_dir():
            path = path / "config.json"
            if not path.exists():
                raise InputError(f"{name!r}: the directory holds no config.json; {MEND}")
        if name and path.exists():
            return path
    except (OSError, RuntimeError, ValueError) as error:  # closed, name too long, no such ~user
        if isinstance(error, InputError):
            raise
        reason = getattr(error, "strerror", "") or str(error)[:100]
        raise InputError(f"{_quoted(name)}: cannot be opened ({reason}); {MEND}") from None
    if name.endswith(".json") or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise InputError(f"{_quoted(name)}: there is no such file or directory; {MEND}")
    cached = cached_config(name)
    if cached is None:
        raise unknown_model(name)
    return cached


def _quoted(name: str) -> str:
    """A path for a message, shortened in the middle."""
    return repr(name if len(name) <= 200 else f"{name[:60]}...{name[-60:]}")


def read_model(config: Mapping[str, object], name: str, where: str) -> Model:
    """Build the model that a parsed configuration describes.

    Parameters
    ----------
    config
        The parsed fields of a ``config.json``.
    name
        Name to give the model.
    where
        Name of the configuration in error messages.

    Returns
    -------
    Model
        The model.

    Raises
    ------
    FieldError
        For the first field that is missing or invalid.
    """
    f = Fields(config, where)
    if config.get("is_encoder_decoder") is True or config.get("model_type") in ENCODER_DECODERS:
        problem = f"is {value_text(config.get('model_type'))}, an encoder with a decoder"
        raise f.error("model_type", problem, "give a model that only decodes")
    dtype = config.get("torch_dtype", config.get("dtype"))
    if isinstance(dtype, str) and dtype.removeprefix("torch.") not in STORED_AS:
        problem = f"is {value_text(dtype)}, expected one of {', '.join(STORED_AS)}"
        raise f.error("torch_dtype" if "torch_dtype" in config else "dtype", problem)
    stated = config.get("quantization_config")
    method = stated.get("quant_method") if isinstance(stated, Mapping) else None
    if method in LOW_BIT_METHODS:
        problem = f"is {value_text(method)}, whose weights kvsim does not model"
        raise f.error(
            "quantization_config.quant_method",
            problem,
            "remove quantization_config and give --weights with the nearest format",
        )
    notes: list[str] = []
    if "text_config" in f.values:
        text = f.values["text_config"]
        if not isinstance(text, Mapping):
            raise f.error("text_config", f"is {value_text(text)}, expected an object")
        # the checkpoint ties its embedding at the top, the text model need not repeat it
        tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        f = Fields({**tied, **text}, where, "text_config.")
        notes.append("multimodal: only its text_config was read")
    title, family, assumed = find_family(f)
    notes += assumed
    left_out = [key for key in family.defaults if key not in f.values and key[0] != "_"]
    if left_out:
        notes.append(f"missing, so the defaults of {title} are used: {', '.join(left_out)}")
    f = f.with_defaults(family.defaults)
    layers = _layers(f)
    hidden = f.integer("hidden_size", "n_embed", "d_model")
    heads = f.integer("num_attention_heads", "n_head", "n_heads")
    max_context = _context(f)
    fields = family.read(f)
    if "kv_heads" not in fields:
        fields["kv_heads"] = f.integer("num_key_value_heads", default=heads)
    if "ffn" not in fields:
        fields["ffn"] = f.integer("intermediate_size", "ffn_dim")
    if "head_dim" not in fields:
        fields["head_dim"] = _head_dim(f, hidden, heads)
    if heads % fields["kv_heads"]:
        problem = f"is {heads}, expected a multiple of the {fields['kv_heads']} key-value heads"
        raise f.error("num_attention_heads", problem, "correct one of the two")
    shapes = _shapes(f, layers, max_context, fields)
    layer_kinds = ("mixers", "mlps", "routed")
    own = cast(ModelFields, {key: x for key, x in fields.items() if key not in layer_kinds})
    released = released_format(f.values.get("quantization_config", stated))
    if not released:
        notes.append("its quantization_config is not known: the weights are taken to be in fp16")
    return Model(
        name=name,
        family=title,
        hidden=hidden,
        heads=heads,
        vocab=f.integer("vocab_size"),
        max_context=max_context,
        layout=compress(shapes),
        tied=f.flag("tie_word_embeddings", False),
        released=released or "fp16",
        notes=tuple(notes),
        **own,
    )


def _context(fields: Fields) -> int:
    """Read the longest context that engines take, with what YaRN makes of the one stated. [tokens]

    A configuration with YaRN states the context before or after stretching; after linear or dynamic
    scaling it is the stretched one that stands there, or ``max_sequence_length`` has it. Other
    kinds (``llama3``, ``longrope``) are released with the stretched context.
    """
    stated = fields.integer(
        "max_position_embeddings", "seq_length", "model_max_length", "max_seq_len"
    )
    name = next((n for n in ("rope_scaling", "rope_parameters") if n in fields.values), "")
    if not name:
        return stated
    scaling = fields.values[name]
    if not isinstance(scaling, Mapping):
        raise fields.error(name, f"is {value_text(scaling)}, expected an object")
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in ("linear", "dynamic"):
        return max(stated, fields.integer("max_sequence_length", default=stated))
    if kind != "yarn":
        return stated
    inner = Fields(scaling, fields.where, f"{fields.prefix}{name}.")
    before = inner.integer("original_max_position_embeddings", default=stated)
    factor = inner.values.get("factor", 1.0)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor <= 1e6:
        raise inner.error("factor", f"is {value_text(factor)}, expected a number from 1 to 1e6")
    return max(stated, int(before * factor))


def _head_dim(fields: Fields, hidden: int, heads: int) -> int:
    if "head_dim" not in fields.values and hidden % heads:
        problem = f"is {hidden}, expected a multiple of the {heads} heads"
        raise fields.error("hidden_size", problem, "correct it or add head_dim")
    return fields.integer("head_dim", default=hidden // heads, high=MAX_HEAD_DIM)


def _layers(fields: Fields) -> int:
    """Number of layers; some families list them instead."""
    listed = fields.values.get("layers_block_type", fields.values.get("hybrid_override_pattern"))
    count = len(listed) if isinstance(listed, list | str) else None
    return fields.integer(
        "num_hidden_layers", "n_layer", "n_layers", default=count, high=MAX_CONFIG_LAYERS
    )


def _shapes(fields: Fields, layers: int, max_context: int, found: FamilyFields) -> list[LayerShape]:
    """Shape of every layer, from what the family's reader ``found``."""
    everywhere: list[Mixer] = ["attention"] * layers
    mixers = found.get("mixers", everywhere)
    mlps = found.get("mlps", [True] * layers)
    routed = found.get("routed", None)
    if routed is None:
        routed = _routed(fields, layers) if found.get("experts") else [False] * layers
    for listed in (mixers, mlps, routed):
        if len(listed) != layers:
            problem = f"is {layers}, and {len(listed)} layers are listed"
            raise fields.error("num_hidden_layers", problem, "correct one of the two")
    if "attention" not in mixers:
        problem = "has no layer with a cache of keys and values"
        raise fields.error("layer_types", problem, "choose another model")
    plain = {"recurrent", "none"} & set(mixers)
    windows = [None] * layers if plain else _windows(fields, layers, max_context)
    return [LayerShape(*each) for each in zip(windows, routed, mixers, mlps, strict=True)]


def _windows(fields: Fields, layers: int, max_context: int) -> list[int | None]:
    """The sliding window of every layer; a window that the context cannot fill is none."""
    window = (
        fields.integer("sliding_window", "attention_chunk_size", default=0)
        if fields.flag("use_sliding_window", True)
        else 0
    )
    first = fields.integer("max_window_layers", default=0, low=0)
    period = fields.integer("sliding_window_pattern", "_sliding_window_pattern", default=0)
    local = [i >= first and (period == 0 or (i + 1) % period > 0) for i in range(layers)]
    types = fields.values.get("layer_types")
    if types is not None:
        kinds = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or any(kind not in kinds for kind in types):
            raise fields.error("layer_types", f"is {value_text(types)}, expected a list of {kinds}")
        if len(types) != layers:
            raise fields.error("layer_types", f"has {len(types)} entries, expected {layers}")
        local = [kind == "sliding_attention" for kind in types]
        if any(local) and not window:
            raise fields.error(
                "sliding_window", "is not set, expected one for layer_types", "add it"
            )
    return [window if slides and 0 < window < max_context else None for slides in local]


def _routed(fields: Fields, layers: int) -> list[bool]:
    """Indices of the layers with routed experts, from a list or the family's own fields."""
    types = fields.values.get("mlp_layer_types")
    if isinstance(types, list):
        return [kind == "sparse" for kind in types]
    first = fields.integer("first_k_dense_replace", default=0, low=0)
    every = fields.integer("moe_layer_freq", default=1)
    step = fields.integer("decoder_sparse_step", default=1)
    dense = fields.values.get("mlp_only_layers", [])
    if not isinstance(dense, list):
        raise fields.error("mlp_only_layers", f"is {value_text(dense)}, expected a list of layers")
    return [
        i >= first and i % every == 0 and (i + 1) % step == 0 and i not in dense
        for i in range(layers)
    ]
