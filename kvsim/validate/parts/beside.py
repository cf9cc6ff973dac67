"""Layers with random weights and a full cache of their own, beside the model that verifies."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvsim.techniques import parse
from kvsim.validate.model.architecture import Architecture
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.model.weights import random_weights
from kvsim.validate.techniques.full import Full

if TYPE_CHECKING:
    from kvsim.validate.parts.composed import Composed


class DraftLayers:
    """What they cost is real, what they propose is not.

    Parameters
    ----------
    arch : the layers, with an embedding and a head that need not be used.
    """

    def __init__(self, run: "Composed", arch: Architecture) -> None:
        target = run.decoder
        self.weights = random_weights(arch, target.device, target.dtype)
        self.decoder = Decoder(arch, self.weights, target.length, target.counter)
        self.cache = Full(parse("full"), self.decoder, run.lengths, run.capacity - run.prompt)

    def positions(self, begins: list[int], new: int) -> Tensor:
        """Of new tokens, (sequences, new)."""
        device = self.decoder.device
        return torch.tensor(begins, device=device)[:, None] + torch.arange(new, device=device)

    def through(self, hidden: Tensor, begins: list[int]) -> Tensor:
        """Hidden states (sequences, new, hidden) through all layers, in place."""
        positions = self.positions(begins, hidden.shape[1])
        rows = slice(0, len(begins))
        step = self.decoder.step(rows, tuple(begins), positions, "draft")
        for index, weights in enumerate(self.weights.layers):
            self.decoder.layer(index, weights, hidden, step, self.cache.attend)
        return hidden

    def matrices(self) -> list[Tensor]:
        """Those of all layers."""
        every = [m for w in self.weights.layers for m in (w.qkv, w.out, w.up, w.down)]
        return [next(iter(m.tensors())) for m in every]

    def kv(self) -> list[Tensor]:
        """Keys and values of every token that they have read."""
        return self.cache.resident()["gpu"]["kv"]
