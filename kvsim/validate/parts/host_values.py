"""Values in host memory that are fetched row by row once the query has chosen."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvsim.validate.kernels.gather import gather
from kvsim.validate.model.attention import Pass
from kvsim.validate.parts.rows import TokenRows
from kvsim.validate.parts.selection import LayerCache
from kvsim.validate.transfer import Mark, Transfers, copy_all

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
