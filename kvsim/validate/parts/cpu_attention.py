"""A cache in host memory that the CPU attends to; the GPU keeps none of it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvsim.techniques.axes.base import Storage
from kvsim.validate.counter import NullCounter
from kvsim.validate.model.attention import Pass, Seen, attend
from kvsim.validate.parts.cells import CacheRoom, KvStore, SlotRange
from kvsim.validate.parts.selecting import LayerContext
from kvsim.validate.transfer import Mark, Transfers, copy_all


class CpuStore(KvStore):
    """Keys and values in full precision, (sequences, KV heads, slots, dim), at home.

    A prompt is read in a buffer on the GPU, which others use in turn once it has left. In decoding
    queries and new tokens go to the host, and attention's output comes back.
    """

    plain = True

    def __init__(
        self,
        part: Storage,
        room: CacheRoom,
        slots: int,
        counter: NullCounter,
        lanes: Transfers,
        returns: bool = True,
    ) -> None:
        super().__init__(part, room, slots, counter)
        shape = (room.sequences, room.heads, slots, room.dim)
        self.returns = returns  # the answer to the GPU; otherwise who waits for it does that
        self.lanes, self.homes = lanes, [lanes.host(shape, room.dtype) for _ in "kv"]
        self.buffers: list[Tensor] = []  # of the prompt, while it is read
        self.held = 0  # tokens of the longest sequence
        self._new: list[Tensor] = []

    def fill(self, keys: Tensor, values: Tensor, counts: list[int], plainly: str = "attn") -> None:
        """What stays of a prompt, on its way home."""
        self.held = max(counts)
        with self.counter.op(plainly) as record:
            for buffer, kept in zip(self.buffers, (keys, values), strict=True):
                buffer[:, :, : self.held] = kept[:, :, : self.held]
                record.writes(kept[:, :, : self.held])

    def prompt(self, tokens: int) -> tuple[Tensor, Tensor]:
        """The buffers that it is read in."""
        keys, values = (buffer[:, :, :tokens] for buffer in self.buffers)
        return keys, values

    def append(self, keys: Tensor, values: Tensor, span: SlotRange) -> None:
        """Into the buffer; in decoding they are sent with the queries."""
        self.held = span.most
        if not self.buffers:
            self._new = [keys, values]
            return
        assert span.first is not None
        with self.counter.op("attn") as record:
            for buffer, new in zip(self.buffers, (keys, values), strict=True):
                buffer[:, :, span.first : span.first + span.new] = new
            record.writes(keys, values)

    def attend(self, queries: Tensor, span: SlotRange, seen: Seen) -> Tensor:
        """A prompt's on the GPU, a new token's on the CPU."""
        if self.buffers:
            with self.counter.op("attn") as record:
                keys, values = (buffer[:, :, : span.most] for buffer in self.buffers)
                return attend(record, queries, keys, values, seen)
        out = self._on_the_cpu(queries, span, seen, "attn")()
        return out.to(queries.device) if self.returns else out

    def attend_async(self, queries: Tensor, span: SlotRange, seen: Seen) -> Callable[[], Tensor]:
        """Beside what the GPU attends to."""
        if self.buffers:
            return super().attend_async(queries, span, seen)
        answer = self.lanes.submit(self._on_the_cpu(queries, span, seen, "attn_cpu"))
        return lambda: answer().to(queries.device)

    def _on_the_cpu(
        self, queries: Tensor, span: SlotRange, seen: Seen, name: str
    ) -> Callable[[], Tensor]:
        """Queries and new tokens are sent now, the answer is still to be found."""
        self.counter.copy("send_qkv", "d2h", [queries, *self._new])
        asked, *new = (numbers.cpu() for numbers in (queries, *self._new))
        slots = span.slots.cpu()
        sequences = torch.arange(len(span.ends))[:, None]
        for home, numbers in zip(self.homes, new, strict=True):
            home[sequences, :, slots] = numbers.transpose(1, 2)
        own = seen.cpu() if isinstance(seen, Tensor) else seen

        def attended() -> Tensor:
            with self.counter.op(name, "dram") as record:
                keys, values = (home[:, :, : span.most] for home in self.homes)
                out = attend(record, asked, keys, values, own)
            self.counter.copy("return_out", "h2d", [out])
            return out

        return attended

    def attend_with_scores(
        self, queries: Tensor, span: SlotRange, seen: Seen
    ) -> tuple[Tensor, Tensor]:
        """No technique asks for the scores that the CPU keeps."""
        raise NotImplementedError

    def tensors(self) -> dict[str, list[Tensor]]:
        """Nothing that is on the GPU."""
        return {"kv": []}


@dataclass
class LeavingPrompts:
    """Buffers that layers read their prompts in, two in turn, and copies home."""

    lanes: Transfers
    counter: NullCounter
    cells: dict[tuple[int, int], CpuStore] = field(default_factory=dict)  # by layer and part
    buffers: list[list[Tensor]] = field(default_factory=list)
    sent: list[Mark] = field(default_factory=list)  # in the order of layers

    def begin(self, where: LayerContext, step: Pass) -> None:
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

    def end(self, where: LayerContext, step: Pass) -> None:
        """The prompt is whole: it leaves."""
        cells = self.cells[where.visit]
        if step.kind != "prefill" or step.length < where.run.prompt:
            return
        pairs = [
            (home[:, :, : cells.held], buffer[:, :, : cells.held])
            for home, buffer in zip(cells.homes, cells.buffers, strict=True)
        ]
        self.counter.copy("store_kv", "d2h", [buffer for _, buffer in pairs])
        self.sent.append(self.lanes.d2h(lambda: copy_all(pairs), self.lanes.mark()))
        cells.buffers = []

    def over(self) -> None:
        """Every prompt is at home, where the CPU reads it next."""
        for mark in self.sent:
            mark.wait()
        if self.lanes.device.type == "cuda":
            torch.cuda.synchronize(self.lanes.device)
        self.buffers = []
