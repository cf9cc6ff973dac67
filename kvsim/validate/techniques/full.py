"""Keys and values of every token on the GPU."""

import torch
from torch import Tensor

from kvsim.techniques.technique import Technique
from kvsim.validate.model.attention import Pass, attend, visible
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.parts.base import Implementation, Resident, put


class Full(Implementation):
    """One cache, allocated for the whole generation."""

    eager_reason = ""

    def __init__(
        self, technique: Technique, decoder: Decoder, lengths: list[int], generate: int
    ) -> None:
        super().__init__(technique, decoder, lengths, generate)
        self.k = [self.empty(self.capacity) for _ in self.shapes]
        self.v = [torch.zeros_like(k) for k in self.k]

    def prompt_tiles(self, layer: int, most: int) -> list[slice]:
        """As many whole prompts as that, or one in chunks."""
        return self.whole_prompt_tiles(slice(0, self.batch), most)

    def prefill(
        self, layer: int, tensor: Tensor, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor:
        """Chunks go straight into the cache."""
        return self.attend(layer, tensor, queries, keys, values, step)

    def attend(
        self, layer: int, tensor: Tensor, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor:
        """Append and attend to everything."""
        with self.counter.op("attn") as record:
            put(self.k[layer], keys, step)
            put(self.v[layer], values, step)
            record.writes(keys, values)
            most = self.capacity if step.fixed else step.length
            cached_keys, cached_values = (
                c[step.rows, :, :most] for c in (self.k[layer], self.v[layer])
            )
            seen = visible(step, most, self.shapes[layer].window)
            return attend(record, queries, cached_keys, cached_values, seen)

    def resident(self) -> Resident:
        """Keys and values of every layer, at full length."""
        return {"gpu": {"kv": [*self.k, *self.v]}}
