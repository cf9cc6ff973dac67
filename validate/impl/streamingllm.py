"""Attention sinks and a window of recent tokens, with positions counted within the cache."""

from dataclasses import replace

import torch
from torch import Tensor

from kvsim.techniques.base import Technique
from kvsim.validate.impl.base import Resident, SmallRun
from kvsim.validate.impl.eviction import Evicting
from kvsim.validate.model.attention import Pass, attend, visible
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.model.rope import rotate


class Streamingllm(Evicting):
    """Recent tokens keep their distance to the query; sinks move along with it.

    A key at position i turned by j more is the key at position i + j, so only the sinks are turned
    again, from the keys they had in the prompt. Learned positions (OPT) are added to the hidden
    states and cannot move: there, tokens keep those of the text.
    """

    @classmethod
    def small_settings(cls, run: SmallRun) -> list[str]:
        """Half of the prompt stays."""
        return [f"sink=4,recent={2 * max(1, run.prompt // 4)}"]

    def __init__(
        self, technique: Technique, decoder: Decoder, lengths: list[int], generate: int
    ) -> None:
        settings = technique.settings
        sink, recent = int(settings["sink"]), int(settings["recent"])
        super().__init__(technique, decoder, lengths, generate, sink, recent)
        rope = decoder.arch.rope
        self._lengths = torch.tensor(lengths, device=decoder.device)
        self.turns, self.sinks = None, None
        if rope and sink and self.capacity > self.budget:
            plain = replace(rope, scale=1.0)
            self.turns = plain.table(self.capacity, decoder.device, decoder.dtype)
            self.sinks = torch.zeros_like(self.all_k[..., :sink, :])

    def filled(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """The first tokens and the latest of every sequence."""
        held = self.ring(self._lengths).clamp_min(0)
        self.keep(layer, keys, values, held[:, None].expand(-1, keys.shape[1], -1))
        if self.sinks is not None:
            self.sinks[layer] = self.k[layer][:, :, : self.sink]

    def attend(
        self, layer: int, tensor: Tensor, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor:
        """Replace the oldest recent token, turn the sinks, attend to the whole cache."""
        cached_keys, cached_values = self.k[layer], self.v[layer]
        if not layer and self.sinks is not None and step.length > self.budget:
            self._turn_sinks(step)
        with self.tally.op("attn") as marks:
            self.append(cached_keys, keys, step)
            self.append(cached_values, values, step)
            marks.writes(keys, values)
            count = min(step.length, self.slots)
            held: int | Tensor = count
            if self.shapes[layer].window:
                held = self.ring(step.positions[:, 0] + 1)[:, :count]
            seen = visible(step, held, self.shapes[layer].window)
            return attend(
                marks, queries, cached_keys[:, :, :count], cached_values[:, :, :count], seen
            )

    def resident(self) -> Resident:
        """What is kept, and the sinks' keys once more."""
        tensors = super().resident()
        if self.sinks is not None:
            tensors["gpu"]["sink keys"] = [self.sinks]
        return tensors

    def _turn_sinks(self, step: Pass) -> None:
        """Move all layers' sinks as far as tokens have been evicted, this step's one included."""
        assert self.turns is not None
        assert self.sinks is not None
        keys = self.all_k[..., : self.sink, :]
        with self.tally.op("turn") as marks:
            if min(step.starts) <= self.budget:  # some sequence evicts for the first time
                fresh = step.positions <= self.budget
                self.sinks.copy_(torch.where(fresh[..., None, None], keys, self.sinks))
            away = (step.positions + 1 - self.budget).clamp_min(0)
            cos, sin = (table[away].unsqueeze(1) for table in self.turns)
            keys.copy_(rotate(self.sinks, cos, sin))
            marks.reads(self.sinks)
            marks.writes(keys)
