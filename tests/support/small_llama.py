"""The architecture of a Llama of a few small layers, whose shapes the caller chooses."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from kvsim.validate.model.architecture import Architecture, load_architecture


def small_llama(heads: tuple[int, int], head_dim: int, layers: int, vocab: int) -> Architecture:
    """Hidden states of 256 numbers.

    Parameters
    ----------
    heads : query heads, and KV heads.
    """
    with TemporaryDirectory() as folder:
        return load_architecture(str(small_config(Path(folder), heads, head_dim, layers, vocab)))


def small_config(
    folder: Path, heads: tuple[int, int], head_dim: int, layers: int, vocab: int
) -> Path:
    """The same as a configuration in a folder, which commands take as a model."""
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256,
        "intermediate_size": 256, "num_hidden_layers": layers, "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1], "head_dim": head_dim, "vocab_size": vocab,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip
    place = folder / "config.json"
    place.write_text(json.dumps(config))
    return place
