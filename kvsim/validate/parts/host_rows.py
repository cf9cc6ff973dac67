"""Keys and values in host memory: sent beside the compute of later layers, fetched row by row."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvsim.validate.kernels.gather import gather
from kvsim.validate.model.attention import Pass
from kvsim.validate.parts.rows import TokenRows
from kvsim.validate.parts.selection import LayerCache
from kvsim.validate.transfer import Mark, Transfers, copy_all


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


Copies = list[tuple[Tensor, Tensor]]  # to, from


@dataclass
class HostValues:
    """Values of all layers that have them on the host, and the buffers these take turns with.

    Values are records of a token's whole row, (tokens, batch, KV heads, bytes).
    """

    transfers: Transfers
    stored: str  # the op that sends them home
    fetched: str  # the op that brings them back
    layers: list[LayerCache] = field(default_factory=list)
    columns: dict[int, TokenRows] = field(default_factory=dict)  # by layer
    buffers: list[Tensor] = field(default_factory=list)
    sent: dict[int, tuple[Mark, Copies]] = field(default_factory=dict)  # last to each home
    reading: bool = True  # the prompt

    def add(self, layer: LayerCache, column: TokenRows) -> None:
        """One more layer has its values in these records."""
        self.layers.append(layer)
        self.columns[layer.layer] = column

    def stage(self, layer: LayerCache, first: bool) -> list[Tensor]:
        """Room on the GPU for a layer's prompt, by part; the layer two before has left it."""
        column, turn = self.columns[layer.layer], self.layers.index(layer)
        if not self.buffers:
            shape = (layer.prompt, *column.record.shape[1:])
            self.buffers = [column.record.new_zeros(shape, device=layer.device) for _ in "12"]
        if first and turn >= 2:
            self._wait(self.layers[turn - 2])
        return column.split(self.buffers[turn % 2])

    def send_prompt(self, layer: LayerCache) -> None:
        """A layer's whole prompt to its home."""
        source = self.buffers[self.layers.index(layer) % 2]
        self._send(layer, [(self.columns[layer.layer].record[: layer.prompt], source)])

    def prompt_sent(self, rows: int) -> None:
        """Every prompt is at home: room for so many fetched rows of every KV head."""
        self.reading = False
        for layer in self.layers:
            self._wait(layer)
        widest = max((c.record for c in self.columns.values()), key=lambda r: r.shape[-1])
        shape = (2, *widest.shape[1:3], rows, widest.shape[-1] // 2)
        self.buffers = [widest.new_zeros(shape, device=self.layers[0].device)]

    def send_new(self, layer: LayerCache, own: list[Tensor], step: Pass) -> None:
        """One token per sequence to its slot."""
        self._wait(layer)
        column = self.columns[layer.layer]
        new = column.joined(own).permute(2, 0, 1, 3).contiguous()
        if step.uniform:
            start = step.starts[0]
            self._send(layer, [(column.record[start : start + 1], new)])
        else:
            homes = (column.record[start, i] for i, start in enumerate(step.starts))
            self._send(layer, [(home, new[0, i]) for i, home in enumerate(homes)])

    def fetch(self, layer: LayerCache, index: Tensor, run: int = 1) -> list[Tensor]:
        """Rows ``index`` (batch, KV heads, n) by part, (batch, KV heads, n, width).

        Parameters
        ----------
        run : rows that lie side by side in host memory.
        """
        column = self.columns[layer.layer]
        width = column.record.shape[-1]
        every, half = column.record.permute(1, 2, 0, 3), width // 2
        shape = (2, *index.shape, half)
        room = self.buffers[0].view(-1)[: torch.Size(shape).numel()].view(shape)
        if index.numel():
            gather(every[..., :half], every[..., half:], index, room[0], room[1])
        layer.counter.copy(self.fetched, "h2d", [room], rows=index.numel() // run)
        return column.cut(torch.cat((room[0], room[1]), dim=-1))

    def _send(self, layer: LayerCache, copies: Copies) -> None:
        layer.counter.copy(self.stored, "d2h", [source for _, source in copies])

        lane, mark = self.transfers.d2h, self.transfers.mark()
        self.sent[layer.layer] = lane(lambda: copy_all(copies), mark), copies

    def _wait(self, layer: LayerCache) -> None:
        """Until a layer's values are at home; only then may their source be used again."""
        if layer.layer in self.sent:
            self.sent.pop(layer.layer)[0].wait()
