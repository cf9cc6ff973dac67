"""Keys and values in host memory: asynchronous copies of prompts, and fetches row by row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvsim.validate.counter import NullCounter
from kvsim.validate.kernels.gather import gather
from kvsim.validate.model.attention import Pass
from kvsim.validate.parts.rows import TokenRows
from kvsim.validate.parts.selection import LayerCache
from kvsim.validate.transfer import Mark, Transfers, copy_all

Copies = list[tuple[Tensor, Tensor]]  # to, from


class HostCopies:
    """Keys and values of every token of a layer in host memory.

    ``homes`` are two tensors of shape (sequences, KV heads, tokens, dim). One token of the whole
    batch is contiguous, so that it is stored by one copy.

    Parameters
    ----------
    layer
        The layer's cache.
    slots
        Tokens per sequence to allocate. [tokens]
    """

    def __init__(self, layer: LayerCache, slots: int) -> None:
        self.layer, self.lanes = layer, layer.run.transfers(layer.layer)
        shape = (slots, layer.batch, layer.model.kv_heads, layer.model.head_dim)
        self.homes = [self.lanes.host(shape, layer.dtype).permute(1, 2, 0, 3) for _ in "kv"]
        self.stored = self.lanes.mark()  # the last copy to the homes
        self.leaving: tuple[Tensor, ...] = ()  # what is on its way there
        self._asked: Tensor | None = None  # which rows were fetched last
        self._all: list[HostCopies] = layer.run.shared("host copies", list)
        self._all.append(self)

    def store_prompt(self, keys: Tensor, values: Tensor) -> None:
        """Copy the prompt to host memory, after the copies of the previous layer have ended."""
        if mine := self._all.index(self):
            self._all[mine - 1].has_left()
        self._send(keys, values, 0)

    def append(self, keys: Tensor, values: Tensor, step: Pass) -> None:
        """Copy the first new token of every sequence in a pass to host memory."""
        self._send(keys[:, :, :1], values[:, :, :1], step.starts[0])

    def fetch(self, index: Tensor, into: Sequence[Tensor]) -> Mark:
        """Copy chosen tokens to the GPU asynchronously, after all pending copies to the host.

        Parameters
        ----------
        index
            Positions of the tokens, (sequences, KV heads, n).
        into
            GPU buffers for their keys and values, (sequences, KV heads, n, dim) each.

        Returns
        -------
        Mark
            Event to wait for before the buffers are read.
        """

        self._asked = index  # kept until the next one: a lane reads it, whose end compute awaits

        def bring() -> None:
            gather(self.homes[0], self.homes[1], index, into[0], into[1])

        return self.lanes.h2d(bring, self.lanes.mark(), self.stored)

    def has_left(self) -> None:
        """Wait for pending copies to the host, and free their sources."""
        self.stored.wait()
        self.leaving = ()

    def _send(self, keys: Tensor, values: Tensor, start: int) -> None:
        """Queue copies to the host, where tokens lie from ``start`` on.

        Their sources are kept until this layer's next copies.
        """
        laid_out = (t.permute(2, 0, 1, 3) for t in (keys, values))
        made = tuple(t.clone(memory_format=torch.contiguous_format) for t in laid_out)
        part = slice(start, start + keys.shape[2])
        homes = (home.permute(2, 0, 1, 3)[part] for home in self.homes)
        copies = list(zip(homes, made, strict=True))
        self.stored = self.lanes.d2h(lambda: copy_all(copies), self.lanes.mark())
        self.leaving = made
        self.layer.counter.copy("store_kv", "d2h", made)


@dataclass
class PromptStages:
    """Two sets of GPU buffers that layers use alternately in prefill, and their copies to the host.

    Attributes
    ----------
    stored
        Name of the op that copies them to the host.
    sent
        Copies so far, in the order of layers.
    """

    lanes: Transfers
    counter: NullCounter
    stored: str
    buffers: list[list[Tensor]] = field(default_factory=list)
    sent: list[Mark] = field(default_factory=list)

    def take(self, make: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Return the GPU buffers for the next layer's prompt, once they are free.

        Parameters
        ----------
        make
            Function that allocates one set of buffers.
        """
        if not self.buffers:
            self.buffers = [make() for _ in "12"]
        turn = len(self.sent)
        if turn >= 2:
            self.sent[turn - 2].wait()
        return self.buffers[turn % 2]

    def send(self, copies: Copies) -> None:
        """Copy a layer's whole prompt to host memory; the next layer uses the other buffers.

        Parameters
        ----------
        copies
            Pairs of a target in host memory and a source on the GPU.
        """
        self.counter.copy(self.stored, "d2h", [source for _, source in copies])
        self.sent.append(self.lanes.d2h(lambda: copy_all(copies), self.lanes.mark()))

    def finish(self) -> None:
        """Wait until every prompt is in host memory, and free the buffers."""
        for mark in self.sent:
            mark.wait()
        self.buffers = []


class HostValues:
    """Values of several layers in host memory, and the GPU buffers that these layers share.

    A token's values are one record per sequence and head, (tokens, batch, KV heads, bytes).

    Parameters
    ----------
    stored, fetched
        Names of the ops that copy values to the host, and back to the GPU.
    """

    def __init__(self, lanes: Transfers, counter: NullCounter, stored: str, fetched: str) -> None:
        self.transfers, self.stored, self.fetched = lanes, stored, fetched
        self.layers: list[LayerCache] = []
        self.columns: dict[int, TokenRows] = {}  # by layer
        self.stages = PromptStages(lanes, counter, stored)
        self.room: list[Tensor] = []  # for what is fetched, once every prompt is at home
        self.sent: dict[int, tuple[Mark, Copies]] = {}  # last new token to each home

    @property
    def reading(self) -> bool:
        """Whether prefill is incomplete, so that there is no buffer of fetched rows yet."""
        return not self.room

    @property
    def buffers(self) -> list[Tensor]:
        """GPU buffers that the layers share, for prompts on their way out and for fetched rows."""
        return [*(t for some in self.stages.buffers for t in some), *self.room]

    def add(self, layer: LayerCache, column: TokenRows) -> None:
        """Add a layer whose values are in host memory.

        Parameters
        ----------
        column
            The layer's values, as rows in host memory.
        """
        self.layers.append(layer)
        self.columns[layer.layer] = column

    def stage(self, layer: LayerCache) -> list[Tensor]:
        """Return GPU buffers for the values of a layer's prompt.

        Returns
        -------
        list of Tensor
            One buffer per part of a row.
        """
        column = self.columns[layer.layer]
        shape = (layer.prompt, *column.record.shape[1:])
        (room,) = self.stages.take(lambda: [column.record.new_zeros(shape, device=layer.device)])
        return column.split(room)

    def send_prompt(self, layer: LayerCache) -> None:
        """Copy a layer's whole prompt to host memory."""
        home = self.columns[layer.layer].record[: layer.prompt]
        self.stages.send([(home, self.stages.buffers[len(self.stages.sent) % 2][0])])

    def prompt_sent(self, rows: int) -> None:
        """Wait until all prompts are in host memory, then allocate the buffer of fetched rows.

        Parameters
        ----------
        rows
            Rows per KV head that are fetched at a time.
        """
        self.stages.finish()
        widest = max((c.record for c in self.columns.values()), key=lambda r: r.shape[-1])
        shape = (2, *widest.shape[1:3], rows, widest.shape[-1] // 2)
        self.room = [widest.new_zeros(shape, device=self.layers[0].device)]

    def send_new(self, layer: LayerCache, own: list[Tensor], step: Pass) -> None:
        """Copy the values of one new token per sequence to host memory.

        Parameters
        ----------
        own
            Parts of the new rows, (sequences, KV heads, 1, width) each.
        """
        if layer.layer in self.sent:  # whose source is used again
            self.sent.pop(layer.layer)[0].wait()
        column, start = self.columns[layer.layer], step.starts[0]
        new = column.joined(own).permute(2, 0, 1, 3).contiguous()
        copies = [(column.record[start : start + 1], new)]
        layer.counter.copy(self.stored, "d2h", [new])
        lane, mark = self.transfers.d2h, self.transfers.mark()
        self.sent[layer.layer] = lane(lambda: copy_all(copies), mark), copies

    def fetch(self, layer: LayerCache, index: Tensor, run: int = 1) -> list[Tensor]:
        """Copy the values of chosen tokens to the GPU.

        Parameters
        ----------
        index
            Positions of the tokens, (batch, KV heads, n).
        run
            Number of rows that are contiguous in host memory.

        Returns
        -------
        list of Tensor
            Parts of the rows, (batch, KV heads, n, width) each.
        """
        column = self.columns[layer.layer]
        width = column.record.shape[-1]
        every, half = column.record.permute(1, 2, 0, 3), width // 2
        shape = (2, *index.shape, half)
        room = self.room[0].view(-1)[: torch.Size(shape).numel()].view(shape)
        if index.numel():
            gather(every[..., :half], every[..., half:], index, room[0], room[1])
        layer.counter.copy(self.fetched, "h2d", [room], rows=index.numel() // run)
        return column.cut(torch.cat((room[0], room[1]), dim=-1))
