"""Weights that live in host memory and visit the GPU layer by layer, piece by piece."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from kvsim.validate.model.decoder import Decoder
from kvsim.validate.model.weights import LayerWeights, Linear
from kvsim.validate.tally import Silent
from kvsim.validate.transfer import Mark, Transfers

NAMES = ("qkv", "out", "up", "down")


class StreamedWeights:
    """Matrices of all layers on the host, those of two on the GPU; norms and biases stay there.

    Parameters
    ----------
    pieces : copies that bring a layer, one beside each part of the batch.
    """

    def __init__(self, decoder: Decoder, transfers: Transfers, pieces: int) -> None:
        self.decoder, self.transfers, self.pieces = decoder, transfers, pieces
        self.homes = [self._home(layer) for layer in decoder.weights.layers]
        self.buffers = [self.homes[0].to(decoder.device, copy=True) for _ in range(2)]
        self._turn = -1  # layers served so far: even ones lie in the first buffer
        self._free = transfers.mark()  # when the other buffer has been used
        self._coming: list[tuple[Mark, Silent]] = []
        for piece in range(pieces):
            self.ahead(-1, piece)

    def layer(self, index: int) -> LayerWeights:
        """The weights of a layer once they have arrived; layers come in turn."""
        self._turn += 1
        self._free = self.transfers.mark()
        for mark, note in self._coming:
            mark.wait()
            self.decoder.tally.take(note)
        self._coming = []
        return self._view(index, self.buffers[self._turn % 2])

    def ahead(self, index: int, piece: int) -> None:
        """Queue one piece of the layer after ``index``."""
        home = self.homes[(index + 1) % len(self.homes)]
        start, stop = (home.numel() * i // self.pieces for i in (piece, piece + 1))
        target, source = self.buffers[(self._turn + 1) % 2][start:stop], home[start:stop]
        note = self.decoder.tally.apart()
        note.copy("load_weights", "h2d", [source])

        def work() -> None:
            target.copy_(source, non_blocking=True)

        self._coming.append((self.transfers.h2d(work, self._free), note))

    def _home(self, layer: LayerWeights) -> Tensor:
        matrices = [_plain(layer, name).weight for name in NAMES]
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
            matrix = _plain(layer, name)
            stop = start + matrix.weight.numel()
            views[name] = Linear(buffer[start:stop].view(matrix.weight.shape), matrix.bias)
            start = stop
        return replace(layer, **views)


def _plain(layer: LayerWeights, name: str) -> Linear:
    matrix = getattr(layer, name)
    assert isinstance(matrix, Linear)
    return matrix
