"""One layer's keys and values in host memory, sent there beside the compute of later layers."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvsim.validate.model.attention import Pass
from kvsim.validate.parts.selection import LayerCache


class HostCopies:
    """Keys and values of every token in ``homes``, (sequences, KV heads, tokens, dim) each.

    A token of the whole batch is contiguous, so that storing it is one copy.

    Parameters
    ----------
    layer : whose tokens they are.
    slots : tokens per sequence that there is room for.
    """

    def __init__(self, layer: LayerCache, slots: int) -> None:
        self.layer, self.lanes = layer, layer.run.transfers(layer.layer)
        shape = (slots, layer.batch, layer.model.kv_heads, layer.model.head_dim)
        self.homes = [self.lanes.host(shape, layer.dtype).permute(1, 2, 0, 3) for _ in "kv"]
        self.stored = self.lanes.mark()  # the last copy to the homes
        self.leaving: tuple[Tensor, ...] = ()  # what is on its way there
        self._all: list[HostCopies] = layer.run.shared("host copies", list)
        self._all.append(self)

    def store_prompt(self, keys: Tensor, values: Tensor, tokens: int) -> None:
        """Send the prompt home; the layer before has left by then, and makes room."""
        if mine := self._all.index(self):
            self._all[mine - 1].has_left()
        self._store(slice(0, tokens), keys, values)

    def append(self, keys: Tensor, values: Tensor, step: Pass) -> None:
        """Send the pass's first new token of every sequence home."""
        keys, values = keys[:, :, :1], values[:, :, :1]
        if step.uniform:
            self._store(slice(step.starts[0], step.starts[0] + 1), keys, values)
            return
        rows = list(enumerate(step.starts))

        def store() -> None:
            for home, new in zip(self.homes, (keys, values), strict=True):
                for i, row in rows:
                    home[i, :, row].copy_(new[i, :, 0], non_blocking=True)

        self._send(store, keys, values)

    def has_left(self) -> None:
        """Wait until what was sent is on the host, and free its source."""
        self.stored.wait()
        self.leaving = ()

    def _store(self, rows: slice, keys: Tensor, values: Tensor) -> None:
        """Copy the same rows of every sequence to the host."""
        laid_out = (t.permute(2, 0, 1, 3) for t in (keys, values))
        made = tuple(t.clone(memory_format=torch.contiguous_format) for t in laid_out)

        def store() -> None:
            for home, new in zip(self.homes, made, strict=True):
                home.permute(2, 0, 1, 3)[rows].copy_(new, non_blocking=True)

        self._send(store, *made)

    def _send(self, store: Callable[[], None], *held: Tensor) -> None:
        """Queue a copy to the host; its source is kept until the next one of this layer."""
        self.stored, self.leaving = self.lanes.d2h(store, self.lanes.mark()), held
        self.layer.counter.copy("store_kv", "d2h", held)
