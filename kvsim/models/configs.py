"""Models from the catalogue or from any Hugging Face ``config.json``.

A field that cannot be right raises :class:`kvsim.errors.InputError` with one line that names file
and field.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypedDict

from kvsim.errors import InputError, unknown
from kvsim.files import CONFIG, read_json
from kvsim.models.families import find_family
from kvsim.models.fields import Fields, value_text
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
    return "mxfp4" if method == "mxfp4" else ""


MAX_CONFIG_LAYERS = 1000
MEND = "give a config.json, a directory that holds one, or a name from the catalogue"


class CatalogueEntry(TypedDict):
    """Where a model of the catalogue comes from."""

    hf_id: str
    published: int | None  # parameters of the published checkpoint, where known exactly
    counted: int | None  # those of the transformers class made from the configuration
    stated: str | None  # what its makers say, rounded as they do: "31.6B"
    stated_active: str | None  # the same of the parameters that a token meets
    source: str


def load_model(name_or_path: str) -> Model:
    """Load a model by its catalogue name, its Hugging Face id, or the path of a configuration.

    A path is a ``config.json`` under any name or a directory that holds one. The catalogue comes
    first; ``./name`` makes a path of a name that is in it.

    Parameters
    ----------
    name_or_path
        Name, id or path.

    Raises
    ------
    InputError
        If there is no such model, or its configuration cannot be used.
    """
    name = _catalogue_name(name_or_path)
    return read_model(*read_config(name_or_path)) if name is None else _shipped_model(name)


@cache  # what ships stays as it is while kvsim runs
def _shipped_model(name: str) -> Model:
    return read_model(*read_config(name))


def read_config(name_or_path: str) -> tuple[dict[str, Any], str, str]:
    """Read a model's configuration.

    Parameters
    ----------
    name_or_path
        Name, id or path.

    Returns
    -------
    tuple[dict[str, Any], str, str]
        Its fields, the model's name, and what messages call the configuration.

    Raises
    ------
    InputError
        If there is no such model or its configuration is no JSON object.
    """
    name = _catalogue_name(name_or_path)
    if name is not None:
        return _catalogue_config(name), name, name
    where = repr(name_or_path)
    path = _find_file(name_or_path)
    config = read_json(path, CONFIG, strict=False)
    if not isinstance(config, dict):
        problem = f"holds a {type(config).__name__}, expected an object of fields"
        raise InputError(f"{where}: {problem}; give a Hugging Face config.json")
    title = path.resolve().parent.name if path.name == "config.json" else path.stem
    return config, title or where, where


def model_names() -> list[str]:
    """The names of the catalogue."""
    return list(_catalogue())


@cache
def _catalogue() -> tuple[str, ...]:
    names = [file.name for file in (files("kvsim") / "models" / "catalogue").iterdir()]
    return tuple(sorted(n.removesuffix(".json") for n in names if n.endswith(".json")))


def catalogue_entry(name: str) -> CatalogueEntry:
    """Return where the shape of a catalogue model comes from.

    Parameters
    ----------
    name
        Catalogue name or Hugging Face id.
    """
    found = _catalogue_name(name)
    if found is None:
        raise unknown("model", name, model_names())
    entry = _catalogue_config(found)["kvsim"]
    return {
        "hf_id": entry["hf_id"],
        "published": entry.get("published_parameters"),
        "counted": entry.get("counted_parameters"),
        "stated": entry.get("stated_parameters"),
        "stated_active": entry.get("stated_active_parameters"),
        "source": entry["source"],
    }


def from_config(config: Mapping[str, Any], name: str) -> Model:
    """Build the model that a parsed ``config.json`` describes.

    Parameters
    ----------
    config
        The parsed fields.
    name
        Name of the model, also for messages.
    """
    return read_model(config, name, name)


def compress(layers: Sequence[LayerShape]) -> tuple[tuple[tuple[LayerShape, ...], int], ...]:
    """Group layers into repeated blocks, from the front on those that cover most layers.

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


def _catalogue_name(name: str) -> str | None:
    wanted = name.lower()
    return wanted if wanted in _catalogue() else _names_by_hf_id().get(wanted)


def _catalogue_config(name: str) -> dict[str, Any]:
    shipped = files("kvsim") / "models" / "catalogue" / f"{name}.json"
    config: dict[str, Any] = read_json(str(shipped), CONFIG)
    return config


@cache
def _names_by_hf_id() -> dict[str, str]:
    return {_catalogue_config(name)["kvsim"]["hf_id"].lower(): name for name in model_names()}


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
    raise unknown("model", name, model_names(), "or give a path to a config.json")


def _quoted(name: str) -> str:
    """A path for a message, without its middle if it is long."""
    return repr(name if len(name) <= 200 else f"{name[:60]}...{name[-60:]}")


def read_model(config: Mapping[str, Any], name: str, where: str) -> Model:
    """Build the model that a parsed configuration describes.

    Parameters
    ----------
    config
        The parsed fields.
    name
        Name of the model.
    where
        What messages call the configuration.

    Raises
    ------
    FieldError
        For the first field that cannot be right.
    """
    f = Fields(config, where)
    stated = config.get("quantization_config")
    notes: list[str] = []
    if "text_config" in f.values:
        text = f.values["text_config"]
        if not isinstance(text, Mapping):
            raise f.error("text_config", f"is {value_text(text)}, expected an object of fields")
        # the checkpoint ties its embedding at the top, the text model need not repeat it
        tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        f = Fields({**tied, **text}, where, "text_config.")
        notes.append("multimodal: only its text_config was read")
    title, family, assumed = find_family(f)
    notes += assumed
    left_out = [key for key in family.defaults if key not in f.values and key[0] != "_"]
    if left_out:
        notes.append(f"left out, so the defaults of {title}: {', '.join(left_out)}")
    f = f.with_defaults(family.defaults)
    layers = _layers(f)
    hidden = f.integer("hidden_size", "n_embed")
    heads = f.integer("num_attention_heads", "n_head")
    max_context = f.integer("max_position_embeddings", "seq_length", "model_max_length")
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
        **fields,
    )


def _head_dim(fields: Fields, hidden: int, heads: int) -> int:
    if "head_dim" not in fields.values and hidden % heads:
        problem = f"is {hidden}, expected a multiple of the {heads} heads"
        raise fields.error("hidden_size", problem, "correct it or add head_dim")
    return fields.integer("head_dim", default=hidden // heads)


def _layers(fields: Fields) -> int:
    """How many there are; some families list them all instead."""
    listed = fields.values.get("layers_block_type", fields.values.get("hybrid_override_pattern"))
    count = len(listed) if isinstance(listed, list | str) else None
    return fields.integer("num_hidden_layers", "n_layer", default=count, high=MAX_CONFIG_LAYERS)


def _shapes(
    fields: Fields, layers: int, max_context: int, found: dict[str, Any]
) -> list[LayerShape]:
    """The kind of every layer, by what the family has ``found`` out about them."""
    mixers = found.pop("mixers", ["attention"] * layers)
    mlps = found.pop("mlps", [True] * layers)
    routed = found.pop("routed", None)
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
        fields.integer("sliding_window", default=0)
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
    """Which layers of a mixture-of-experts model have one: by a list or a family's own fields."""
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
