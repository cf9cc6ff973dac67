"""Another CPU, emulated: numbers changed by one unit in the last place.

Processors differ in how they round sums of products. With ``KVSIM_ULPS=SEED`` in the environment
the weights of the tests' decoders, and the hidden states that every forward pass begins with, are
moved to a neighbouring number or left alone, at random and anew in every pass. Every comparison of
real runs has to hold with that too.
"""

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from kvsim.validate.model.decoder import Decoder

SEED = int(os.environ.get("KVSIM_ULPS", "0"))
"""0 changes nothing."""


def moved(numbers: Tensor, generator: torch.Generator) -> Tensor:
    """Each number, or one of its two neighbours."""
    way = torch.randint(-1, 2, numbers.shape, generator=generator)
    up, down = (
        torch.nextafter(numbers, numbers.new_tensor(end)) for end in (torch.inf, -torch.inf)
    )
    return torch.where(way > 0, up, torch.where(way < 0, down, numbers))


def move_weights(tensors: Iterable[Tensor]) -> None:
    """Change a decoder's weights in place."""
    generator = torch.Generator().manual_seed(SEED)
    for tensor in tensors if SEED else ():
        if tensor.dtype == torch.float32:
            tensor.copy_(moved(tensor, generator))


def move_inputs(monkeypatch: Any) -> None:
    """Change what every forward pass of every run begins with."""
    generator, embed = torch.Generator().manual_seed(SEED), Decoder.embed

    def elsewhere(self: Decoder, tokens: Tensor, positions: Tensor) -> Tensor:
        x = embed(self, tokens, positions)
        return moved(x, generator) if x.dtype == torch.float32 and not x.is_meta else x

    if SEED:
        monkeypatch.setattr(Decoder, "embed", elsewhere)
