"""GGUF files: their metadata as a Hugging Face configuration, their tensors widened to fp32."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvsim.errors import InputError, unknown
from kvsim.validate.model.gguf_header import check_header

FAMILIES = ("llama", "qwen2", "qwen3")
FIELDS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
"""Fields of a config.json and what GGUF calls them, behind the name of the family."""
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Names of Hugging Face and of GGUF."""


class Gguf:
    """A GGUF file as a source of weights."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.where = str(path)
        try:
            check_header(path)
            reader = GGUFReader(path)
        except InputError:
            raise
        except (ValueError, IndexError, KeyError, OSError, RecursionError, TypeError) as error:
            problem = " ".join(str(error).split())[:200]
            expected = "expected a GGUF file; fetch it again"
            raise InputError(f"{path}: not readable as GGUF ({problem}), {expected}") from None
        self._fields = {name: field.contents() for name, field in reader.fields.items()}
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.family = str(self._fields.get("general.architecture"))
        if self.family not in FAMILIES:
            raise unknown(f"architecture in {path}", self.family, FAMILIES, "these can be run")
        if (
            "rope_freqs.weight" in self._tensors
            or self._value("rope.scaling.type", "none") != "none"
        ):
            raise InputError(
                f"{path}: its positions are stretched, which is not read from GGUF; give the "
                f"model's Hugging Face directory"
            )

    def config(self) -> dict[str, Any]:
        """What a ``config.json`` would say."""
        known = {ours: self._value(theirs) for ours, theirs in FIELDS.items()}
        config = {key: value for key, value in known.items() if value is not None}
        if "token_embd.weight" not in self._tensors:
            raise InputError(f"{self.where}: tensor 'token_embd.weight' is missing; fetch it again")
        config["vocab_size"] = int(self._tensors["token_embd.weight"].shape[-1])
        tied = "output.weight" not in self._tensors
        return config | {"model_type": self.family, "tie_word_embeddings": tied}

    @property
    def tokeniser(self) -> dict[str, Any]:
        """What the file says about its tokeniser, without its prefix."""
        prefix = "tokenizer.ggml."
        fields = self._fields.items()
        return {k.removeprefix(prefix): value for k, value in fields if k.startswith(prefix)}

    def shapes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Shape and number format of every tensor; GGUF lists the fastest dimension first."""
        return {
            _hugging_face(name): (tuple(map(int, reversed(t.shape))), f"GGUF {t.tensor_type.name}")
            for name, t in self._tensors.items()
        }

    def read(self, name: str) -> Tensor:
        """One tensor, widened; rows of queries and keys back in the order of Hugging Face.

        Raises
        ------
        InputError
            If its number format is one that cannot be read.
        """
        from gguf import dequantize

        tensor = self._tensors[_gguf(name)]
        try:
            numbers = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        except (NotImplementedError, ValueError, TypeError):
            raise InputError(
                f"{self.where}: tensor {tensor.name!r} is stored as {tensor.tensor_type.name}, "
                f"which is not read; give a file with fp16, bf16, or Q4 to Q8 weights"
            ) from None
        heads = {"q_proj": "attention.head_count", "k_proj": "attention.head_count_kv"}
        for part, key in heads.items():
            if self.family == "llama" and part in name:
                numbers = _unpaired(numbers, int(self._value(key)))
        return numbers

    def _value(self, key: str, default: Any = None) -> Any:
        return self._fields.get(f"{self.family}.{key}", default)


def _unpaired(rows: Tensor, heads: int) -> Tensor:
    """llama.cpp turns neighbouring rows of a head together, Hugging Face its two halves."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _hugging_face(name: str) -> str:
    return _renamed(name, {v: k for k, v in NAMES.items()}, "blk.", "model.layers.")


def _gguf(name: str) -> str:
    return _renamed(name, NAMES, "model.layers.", "blk.")


def _renamed(name: str, names: Mapping[str, str], old: str, new: str) -> str:
    """``blk.3.attn_q.weight`` to ``model.layers.3.self_attn.q_proj.weight``, or back."""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith(old):
        return f"{names.get(stem, stem)}.{kind}"
    layer, _, part = stem.removeprefix(old).partition(".")
    return f"{new}{layer}.{names.get(part, part)}.{kind}"
