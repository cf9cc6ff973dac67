"""Caches as their papers describe them, slowly: everything in full precision, faked per step."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvsim.techniques import parse
from kvsim.techniques.base import Technique
from kvsim.validate.impl.base import Implementation, Resident
from kvsim.validate.model.attention import Step
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.run import Run


def minmax(x: Tensor, steps: int, centred: bool = False) -> Tensor:
    """Groups along the last axis to the nearest of their levels, with fp16 scales."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = (high - low) / steps if not centred else (high - low) / (steps + 1)
    zero = low if not centred else low + scale / 2
    scale, zero = scale.half().float(), zero.half().float()
    safe = torch.where(scale > 0, scale, 1.0)
    return ((x - zero) / safe + 0.5).floor().clamp(0, steps) * scale + zero


def int8_pair(x: Tensor) -> Tensor:
    """QuantSpec's eight bits: four, and four of the error."""
    upper = minmax(x, 15)
    scale = ((x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)) / 15).half().float()
    step = torch.where(scale > 0, scale / 16, 1.0)
    lower = ((x - upper) / step + 0.5).floor().clamp(-8, 7)
    return upper + lower * scale / 16


def by_channel(x: Tensor, count: int, group: int, fake: Callable[[Tensor], Tensor]) -> Tensor:
    """The first ``count`` keys in groups of tokens, the others as they are."""
    head, dim = x[:count], x.shape[1]
    packed = fake(head.T.reshape(dim, -1, group)).reshape(dim, -1).T if count else head
    return torch.cat([packed, x[count:]])


def by_token(x: Tensor, count: int, group: int, fake: Callable[[Tensor], Tensor]) -> Tensor:
    """The first ``count`` values in groups of channels."""
    groups = x[:count].reshape(count, x.shape[1] // group, group)
    packed = fake(groups).reshape(count, x.shape[1])
    return torch.cat([packed, x[count:]])


class Naive(Implementation):
    """Attention over a faked copy of a full cache, head by head and query by query."""

    late = False  # whether a token attends before it counts as cached

    def __init__(
        self, technique: Technique, decoder: Decoder, lengths: list[int], generate: int
    ) -> None:
        super().__init__(technique, decoder, lengths, generate)
        self.k = [[k.new_zeros(0) for _ in lengths] for k in [torch.zeros(1)] * len(self.shapes)]
        self.v = [list(row) for row in self.k]

    def keys(self, x: Tensor, cached: int) -> Tensor:
        """Keys (tokens, channels) of one head as attention reads them with so many cached."""
        raise NotImplementedError

    def values(self, x: Tensor, cached: int) -> Tensor:
        """As ``keys``."""
        raise NotImplementedError

    def filled(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.k[layer] = [k[i, :, :n].clone() for i, n in enumerate(self.lengths)]
        self.v[layer] = [v[i, :, :n].clone() for i, n in enumerate(self.lengths)]

    def resident(self) -> Resident:
        return {"gpu": {}}

    def attend(self, layer: int, x: Tensor, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        out = torch.empty_like(q)
        shared = q.shape[1] // k.shape[1]
        for i, start in enumerate(step.starts):
            keys = torch.cat([self.k[layer][i][:, :start], k[i]], 1)
            values = torch.cat([self.v[layer][i][:, :start], v[i]], 1)
            self.k[layer][i], self.v[layer][i] = keys, values
            for new in range(step.new):
                end = start + new + 1
                cached = start if self.late else end
                for h in range(q.shape[1]):
                    kh = self.keys(keys[h // shared, :end], cached)
                    vh = self.values(values[h // shared, :end], cached)
                    shares = (kh @ q[i, h, new] / q.shape[-1] ** 0.5).softmax(0)
                    out[i, h, new] = shares @ vh
        return out


def naive_run(kind: type[Naive], decoder: Decoder, prompts: list[list[int]], generate: int) -> Run:
    """A complete run under a naive cache."""
    run = Run(decoder, parse("full"), prompts, generate, keep=True, kinds={"full": kind})
    run.complete()
    return run
