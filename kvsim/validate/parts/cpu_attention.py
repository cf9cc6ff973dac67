"""A cache in host memory that the CPU attends to; the GPU keeps none of it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvsim.techniques.axes import Storage
from kvsim.validate.model.attention import Pass, Seen, attend
from kvsim.validate.parts.cells import CacheRoom, Cells, Spot
from kvsim.validate.parts.selecting import Where
from kvsim.validate.tally import Silent
from kvsim.validate.transfer import Mark, Transfers, copy_all


class CpuCells(Cells):
    """Keys and values in full precision, (sequences, KV heads, slots, dim), at home.

    A prompt is read in a buffer on the GPU, which others use in turn once it has left. In decoding
    queries and new tokens go to the host, and attention's output comes back.
    """

    plain = True

    def __init__(
        self, part: Storage, room: CacheRoom, slots: int, tally: Silent, lanes: Transfers,
        returns: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(part, room, slots, tally)
        shape = (room.sequences, room.heads, slots, room.dim)
        self.returns = returns  # the answer to the GPU; otherwise who waits for it does that
        self.lanes, self.homes = lanes, [lanes.host(shape, room.dtype) for _ in "kv"]
        self.buffers: list[Tensor] = []  # of the prompt, while it is read
        self.held = 0  # tokens of the longest sequence
        self._new: list[Tensor] = []

    def fill(self, keys: Tensor, values: Tensor, counts: list[int], plainly: str = "attn") -> None:
        """What stays of a prompt, on its way home."""
        self.held = max(counts)
        with self.tally.op(plainly) as marks:
            for buffer, kept in zip(self.buffers, (keys, values), strict=True):
                buffer[:, :, : self.held] = kept[:, :, : self.held]
                marks.writes(kept[:, :, : self.held])

    def prompt(self, tokens: int) -> tuple[Tensor, Tensor]:
        """The buffers that it is read in."""
        keys, values = (buffer[:, :, :tokens] for buffer in self.buffers)
        return keys, values

    def append(self, keys: Tensor, values: Tensor, spot: Spot) -> None:
        """Into the buffer; in decoding they are sent with the queries."""
        self.held = spot.most
        if not self.buffers:
            self._new = [keys, values]
            return
        assert spot.first is not None
        with self.tally.op("attn") as marks:
            for buffer, new in zip(self.buffers, (keys, values), strict=True):
                buffer[:, :, spot.first : spot.first + spot.new] = new
            marks.writes(keys, values)

    def look(self, queries: Tensor, spot: Spot, seen: Seen) -> Tensor:
        """A prompt's on the GPU, a new token's on the CPU."""
        if self.buffers:
            with self.tally.op("attn") as marks:
                keys, values = (buffer[:, :, : spot.most] for buffer in self.buffers)
                return attend(marks, queries, keys, values, seen)
        out = self._on_the_cpu(queries, spot, seen, "attn")()
        return out.to(queries.device) if self.returns else out

    def ask(self, queries: Tensor, spot: Spot, seen: Seen) -> Callable[[], Tensor]:
        """Beside what the GPU attends to."""
        if self.buffers:
            return super().ask(queries, spot, seen)
        answer = self.lanes.ask(self._on_the_cpu(queries, spot, seen, "attn_cpu"))
        return lambda: answer().to(queries.device)

    def _on_the_cpu(
        self, queries: Tensor, spot: Spot, seen: Seen, name: str
    ) -> Callable[[], Tensor]:
        """Queries and new tokens are sent now, the answer is still to be found."""
        self.tally.copy("send_qkv", "d2h", [queries, *self._new])
        asked, *new = (numbers.cpu() for numbers in (queries, *self._new))
        slots = spot.slots.cpu()
        sequences = torch.arange(len(spot.ends))[:, None]
        for home, numbers in zip(self.homes, new, strict=True):
            home[sequences, :, slots] = numbers.transpose(1, 2)
        own = seen.cpu() if isinstance(seen, Tensor) else seen

        def attended() -> Tensor:
            with self.tally.op(name, "dram") as marks:
                keys, values = (home[:, :, : spot.most] for home in self.homes)
                out = attend(marks, asked, keys, values, own)
            self.tally.copy("return_out", "h2d", [out])
            return out

        return attended

    def look_scored(self, queries: Tensor, spot: Spot, seen: Seen) -> tuple[Tensor, Tensor]:
        """No technique asks for the scores that the CPU keeps."""
        raise NotImplementedError

    def tensors(self) -> dict[str, list[Tensor]]:
        """Nothing that is on the GPU."""
        return {"kv": []}


@dataclass
class LeavingPrompts:
    """Buffers that layers read their prompts in, two in turn, and copies home."""

    lanes: Transfers
    tally: Silent
    cells: dict[tuple[int, int], CpuCells] = field(default_factory=dict)  # by layer and part
    buffers: list[list[Tensor]] = field(default_factory=list)
    sent: list[Mark] = field(default_factory=list)  # in the order of layers

    def begin(self, where: Where, step: Pass) -> None:
        """A chunk of the prompt reaches a layer: its buffer, once the layer two before has left."""
        cells = self.cells[where.visit]
        if step.kind != "prefill" or cells.buffers:
            return
        if not self.buffers:
            self.buffers = [[cells.room.zeros(where.run.prompt) for _ in "kv"] for _ in "12"]
        turn = len(self.sent)
        if turn >= 2:
            self.sent[turn - 2].wait()
        cells.buffers = self.buffers[turn % 2]

    def end(self, where: Where, step: Pass) -> None:
        """The prompt is whole: it leaves."""
        cells = self.cells[where.visit]
        if step.kind != "prefill" or step.length < where.run.prompt:
            return
        pairs = [
            (home[:, :, : cells.held], buffer[:, :, : cells.held])
            for home, buffer in zip(cells.homes, cells.buffers, strict=True)
        ]
        self.tally.copy("store_kv", "d2h", [buffer for _, buffer in pairs])
        self.sent.append(self.lanes.d2h(lambda: copy_all(pairs), self.lanes.mark()))
        cells.buffers = []

    def over(self) -> None:
        """Every prompt is at home, where the CPU reads it next."""
        for mark in self.sent:
            mark.wait()
        if self.lanes.device.type == "cuda":
            torch.cuda.synchronize(self.lanes.device)
        self.buffers = []
