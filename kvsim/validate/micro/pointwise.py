"""What a layer does besides products and attention: norms, residual sums, positions, activation."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from kvsim.frozen import frozen
from kvsim.graph import Op
from kvsim.validate.micro.place import Bench, Call, Work
from kvsim.validate.model.rope import rotate
from kvsim.validate.model.weights import Norm

KERNELS = 16.0  # of a Llama layer: 2 norms, 2 sums, 10 for positions, 2 for the activation
LAYERS = ((576, 9, 3, 64, 1536), (4096, 32, 8, 128, 14336))
"""Hidden, heads, KV heads, head dim and FFN width of SmolLM2-135M and Llama-3-8B."""


@frozen
class _Inputs:
    x: Tensor
    q: Tensor
    k: Tensor
    wide: Tensor
    turns: tuple[Tensor, Tensor]
    norm: Norm


def works(place: Bench) -> Iterator[Work]:
    """One layer's, over tokens."""
    for layer in LAYERS:
        hidden, heads, kv_heads, dim, ffn = layer
        for tokens in place.either((1, 16, 256, 2048), (1, 4, 16, 64, 256, 1024, 4096)):
            rotated = 2 * (heads + kv_heads) * dim
            moved = 2.0 * tokens * (4 * hidden + 6 * hidden + rotated + 3 * ffn)
            case = {"hidden": hidden, "ffn": ffn, "tokens": tokens}
            op = Op("pointwise", bytes={"hbm": moved}, launches=KERNELS)
            if place.fits(2 * moved):
                yield Work(case, op, partial(_calls, place, tokens, *layer))


@contextmanager
def _calls(
    place: Bench, tokens: int, hidden: int, heads: int, kv_heads: int, dim: int, ffn: int
) -> Iterator[Sequence[Call]]:
    def inputs() -> _Inputs:
        angles = place.random(1, 1, tokens, dim)
        return _Inputs(
            place.random(1, tokens, hidden),
            place.random(1, heads, tokens, dim),
            place.random(1, kv_heads, tokens, dim),
            place.random(1, tokens, 2 * ffn),
            (angles.cos(), angles.sin()),
            Norm(torch.ones(hidden, device=place.device, dtype=place.half), None, 1e-5),
        )

    first = inputs()
    sets = place.turns(first, [first.x, first.q, first.k, first.wide], inputs)
    yield [partial(_layer, one) for one in sets]


def _layer(i: _Inputs) -> None:
    """As ``kvsim.validate.model.decoder`` does it."""
    normed = i.norm(i.x)
    rotate(i.q, *i.turns)
    rotate(i.k, *i.turns)
    i.x.add_(normed)
    i.x.sub_(i.norm(i.x))
    gate, up = i.wide.chunk(2, dim=-1)
    F.silu(gate).mul_(up)
