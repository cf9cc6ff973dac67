"""Faults of a Hugging Face ``config.json``."""

from pathlib import Path

from kvsim.errors import InputError
from kvsim.models.configs import read_config, read_model
from kvsim.models.fields import FieldError

# A sound value for each field that may be wrong, so that the fields read after it are checked too.
SOUND = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "model_type": "llama",
    "num_local_experts": 8,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 1024,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
MOST = 100  # fields of one file that are mended in turn


def faults(file: Path) -> tuple[list[str], list[str]]:
    """Every wrong field: each is put right in memory, and the configuration read again."""
    found: list[str] = []
    mended: set[str] = set()
    try:
        config, name, where = read_config(str(file))
    except InputError as fault:
        return [str(fault)], []
    for _ in range(MOST):
        try:
            model = read_model(config, name, where)
        except FieldError as fault:
            found.append(str(fault))
            if fault.field in mended:
                break
            mended.add(fault.field)
            config = _mended(config, fault)
        except InputError as fault:
            found.append(str(fault))
            break
        else:
            return found, list(model.notes) if not found else []
    return found, []


def _mended(config: dict[str, object], fault: FieldError) -> dict[str, object]:
    """The configuration with a sound value for one field, or without it."""
    inner = config.get("text_config")
    if fault.prefix and isinstance(inner, dict):
        return config | {"text_config": _mended(inner, FieldError("", fault.field))}
    left = {key: value for key, value in config.items() if key != fault.field}
    return left | ({fault.field: SOUND[fault.field]} if fault.field in SOUND else {})
