"""Weights that live in host memory and visit the GPU layer by layer, piece by piece."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from kvsim.frozen import frozen
from kvsim.validate.counter import NullCounter
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.model.weights import LayerWeights, Linear
from kvsim.validate.transfer import Mark, Transfers

NAMES = ("qkv", "out", "up", "down")


@frozen
class Joined(Linear):
    """A matrix whose first outputs come from what was streamed, the others from what stays."""

    rest: Tensor | None = None  # (outputs, inputs)

    def __call__(self, tensor: Tensor) -> Tensor:
        """Hidden states (..., inputs) to (..., outputs)."""
        assert self.rest is not None
        out = torch.cat([F.linear(tensor, part) for part in (self.weight, self.rest)], dim=-1)
        return out if self.bias is None else out + self.bias

    def tensors(self) -> tuple[Tensor, ...]:
        """Both parts, and the bias where there is one."""
        assert self.rest is not None
        return (*super().tensors(), self.rest)


class StreamedWeights:
    """A share of all layers' matrices on the host, that of two on the GPU; all else stays there.

    Parameters
    ----------
    pieces : copies that bring a layer, one beside each part of the batch.
    share : of every matrix's outputs.
    """

    def __init__(
        self, decoder: Decoder, transfers: Transfers, pieces: int, share: float = 1.0
    ) -> None:
        self.decoder, self.transfers, self.pieces, self.share = decoder, transfers, pieces, share
        self.homes = [self._home(layer) for layer in decoder.weights.layers]
        self.buffers = [self.homes[0].to(decoder.device, copy=True) for _ in range(2)]
        self._turn = -1  # layers served so far: even ones lie in the first buffer
        self._free = transfers.mark()  # when the other buffer has been used
        self._coming: list[tuple[Mark, NullCounter]] = []
        for piece in range(pieces):
            self.ahead(-1, piece)

    def layer(self, index: int) -> LayerWeights:
        """The weights of a layer once they have arrived; layers come in turn."""
        self._turn += 1
        self._free = self.transfers.mark()
        for mark, note in self._coming:
            mark.wait()
            self.decoder.counter.merge(note)
        self._coming = []
        return self._view(index, self.buffers[self._turn % 2])

    def ahead(self, index: int, piece: int) -> None:
        """Queue one piece of the layer after ``index``."""
        home = self.homes[(index + 1) % len(self.homes)]
        start, stop = (home.numel() * i // self.pieces for i in (piece, piece + 1))
        target, source = self.buffers[(self._turn + 1) % 2][start:stop], home[start:stop]
        note = self.decoder.counter.separate()
        note.copy("load_weights", "h2d", [source])

        def work() -> None:
            target.copy_(source, non_blocking=True)

        self._coming.append((self.transfers.h2d(work, self._free), note))

    def _streamed(self, layer: LayerWeights, name: str) -> Tensor:
        weight = _plain(layer, name).weight
        return weight[: round(self.share * len(weight))]

    def _home(self, layer: LayerWeights) -> Tensor:
        matrices = [self._streamed(layer, name) for name in NAMES]
        numbers = sum(w.numel() for w in matrices)
        home = self.transfers.host((numbers,), matrices[0].dtype)
        start = 0
        for weight in matrices:
            home[start : start + weight.numel()] = weight.flatten()
            start += weight.numel()
        return home

    def _view(self, index: int, buffer: Tensor) -> LayerWeights:
        layer, start = self.decoder.weights.layers[index], 0
        views: dict[str, Any] = {}
        for name in NAMES:
            matrix, streamed = _plain(layer, name), self._streamed(layer, name)
            stop = start + streamed.numel()
            views[name] = Linear(buffer[start:stop].view(streamed.shape), matrix.bias)
            if len(rest := matrix.weight[len(streamed) :]):
                views[name] = Joined(views[name].weight, matrix.bias, rest)
            start = stop
        return replace(layer, **views)


def _plain(layer: LayerWeights, name: str) -> Linear:
    matrix = getattr(layer, name)
    assert isinstance(matrix, Linear)
    return matrix
