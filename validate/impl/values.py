"""Scores over all keys, the values of the best N, which may live in host memory."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvsim.techniques.values import TopValues
from kvsim.validate.impl.base import Resident, put
from kvsim.validate.impl.bytoken import PACKED_AT_ONCE
from kvsim.validate.impl.cells import Spot
from kvsim.validate.impl.selecting import Selecting, Where
from kvsim.validate.kernels.gather import gather, rows_at
from kvsim.validate.model.attention import Pass, attend
from kvsim.validate.transfer import Mark, Transfers, copy_all

Copies = list[tuple[Tensor, Tensor]]  # to, from


class Values(Selecting):
    """The N chosen weights are used as they are, without scaling them to a sum of 1.

    Values in host memory are records of a token's whole row, (tokens, batch, KV heads, bytes). The
    newest token's own value is on the GPU anyway and is taken from there: nothing waits for its
    copy to the host. Where N values for every head of a group are no fewer than all, all are
    copied once.

    References
    ----------
    .. [1] Q. He and Z. Wu, "Efficient LLM inference with KCache", 2024, section 3.
    """

    def __init__(self, place: Where) -> None:
        settings = place.parts.selection
        assert isinstance(settings, TopValues)
        super().__init__(place)
        self.refuse_drafts()
        self.n = min(int(settings.n), self.capacity)
        self.away = _Away.of(self) if self.rows.values_away else None
        if self.away:  # keys are read by an op of its own
            self.differences = {} if self.rows.plain else {"scores": PACKED_AT_ONCE["attn"]}

    def prefill(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Values of one layer leave while the next one is computed."""
        if self.away is None:
            return super().prefill(queries, keys, values, step)
        held = self.rows.k.parts[0], self.away.stage(self, first=not step.starts[0])[0]
        with self.tally.op("attn") as marks:
            for cache, new in zip(held, (keys, values), strict=True):
                put(cache, new, step)
            marks.writes(keys, values)
            keys, values = (cache[:, :, : step.length] for cache in held)
            out = attend(marks, queries, keys, values, self._seen(step))
        if step.length == self.prompt:
            self.away.send_prompt(self)
        return out

    def filled(self, keys: Tensor, values: Tensor) -> None:
        """Packed keys stay, packed values leave."""
        if self.away is None:
            super().filled(keys, values)
            return
        stage = self.away.stage(self, first=True)
        with self.tally.op("quantise") as marks:
            self.rows.k.fill(marks, keys)
            made = self.rows.v.codec.encode(values)
            marks.reads(values)
            marks.writes(*made)
            for mine, new in zip(stage, made, strict=True):
                mine.copy_(new)
        self.away.send_prompt(self)

    def prompt_read(self) -> None:
        """From here on, buffers hold fetched values and which they are."""
        if self.away:
            self.away.prompt_read()

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Scores over all keys, then the values of the best N."""
        count, spot, rows = min(self.n, step.length), Spot.behind(step), self.rows
        own = self._append(keys, values, spot)
        with self.tally.op("scores" if self.away else "attn") as marks:
            seen = spot.visible(step, self.shape.window)
            weights = rows.weights(queries, spot, seen)
            marks.reads(queries, *rows.k.read(spot.ends))
            marks.visible(1, step.length, seen)
        with self.tally.op("topk") as marks:
            best = weights[:, :, 0].topk(count, dim=-1)
            index = self.away.keep(best.indices) if self.away else best.indices
            marks.writes(weights)
            marks.reads(weights)
        if self.away:
            self.away.send_new(self, own, step)
        with self.tally.op("attn") as marks:
            if not self.away and rows.plain:
                marks.writes(values)
            chosen = self._chosen(index, own, step)
            out = best.values[:, :, None] @ chosen
            many = min(self.model.queries_per_kv * count, step.length)  # read once per KV head
            marks.reads(*(part[:, :, :1].expand(-1, -1, many, -1) for part in own), best.values)
            marks.writes(out)
        return out

    def buffers(self) -> Resident:
        """Values at home; fetched ones, once for all layers."""
        if self.away is None:
            return {}
        held: Resident = {"host": {"kv": [self.rows.v.record]}}
        if self.away.layers[0] is self:
            held["gpu"] = {"value buffers": self.away.buffers}
        return held

    def _append(self, keys: Tensor, values: Tensor, spot: Spot) -> list[Tensor]:
        """Store the new token; its value as parts of a row, which leaves later if it has to."""
        rows = self.rows
        own = rows.v.codec.encode(values)
        if not rows.plain:
            with self.tally.op("quantise") as marks:
                rows.k.write(marks, keys, spot)
                marks.reads(values)
                marks.writes(*own)
        else:
            with self.tally.op("scores" if self.away else "attn") as marks:
                rows.k.write(marks, keys, spot)
        if self.away is None:
            rows.v.put(own, spot)
        return own

    def _chosen(self, index: Tensor, own: list[Tensor], step: Pass) -> Tensor:
        """The values that ``index`` (batch, heads, N) names, (batch, heads, N, dim)."""
        kv_heads, length, column = self.model.kv_heads, step.length, self.rows.v
        by_group = index.view(self.batch, kv_heads, -1)
        if self.away is None:
            parts = [rows_at(part[:, :, :length], by_group) for part in column.parts]
            return column.widened(parts).view(*index.shape, -1)
        chosen = column.widened(self.away.fetch(self, by_group, length)).view(*index.shape, -1)
        newest = column.widened(own).repeat_interleave(self.model.queries_per_kv, 1)
        return torch.where((index == step.positions[:, :, None])[..., None], newest, chosen)


@dataclass
class _Away:
    """Values of all layers that have them on the host, and the buffers these take turns with."""

    transfers: Transfers
    layers: list[Values] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    sent: dict[int, tuple[Mark, Copies]] = field(default_factory=dict)  # last to each home
    reading: bool = True  # the prompt

    @classmethod
    def of(cls, layer: Values) -> "_Away":
        """The one of this run."""
        run = layer.run
        found = run.shared("values on the host", lambda: cls(run.placements[layer.layer].lanes()))
        found.layers.append(layer)
        return found

    def stage(self, layer: Values, first: bool) -> list[Tensor]:
        """Room on the GPU for a layer's prompt, by part; the layer two before has left it."""
        record, turn = layer.rows.v.record, self.layers.index(layer)
        if not self.buffers:
            shape = (layer.prompt, *record.shape[1:])
            self.buffers = [record.new_zeros(shape, device=layer.device) for _ in "12"]
        if first and turn >= 2:
            self._wait(self.layers[turn - 2])
        return layer.rows.v.split(self.buffers[turn % 2])

    def send_prompt(self, layer: Values) -> None:
        """A layer's whole prompt to its home."""
        source = self.buffers[self.layers.index(layer) % 2]
        self._send(layer, [(layer.rows.v.record[: layer.prompt], source)])

    def prompt_read(self) -> None:
        """Room for what is fetched."""
        if not self.reading:
            return
        self.reading = False
        for layer in self.layers:
            self._wait(layer)
        rows = max(layer.model.queries_per_kv * layer.n for layer in self.layers)
        widest = max((layer.rows.v.record for layer in self.layers), key=lambda r: r.shape[-1])
        shape = (*widest.shape[1:3], rows)
        index = torch.zeros(shape, dtype=torch.int32, device=self.layers[0].device)
        halves = (2, *shape, widest.shape[-1] // 2)
        self.buffers = [widest.new_zeros(halves, device=index.device), index]

    def keep(self, index: Tensor) -> Tensor:
        """The chosen tokens in a buffer of their own, as 32-bit numbers."""
        room = self.buffers[1].view(-1)[: index.numel()].view(index.shape)
        return room.copy_(index)

    def send_new(self, layer: Values, own: list[Tensor], step: Pass) -> None:
        """One token per sequence to its slot."""
        self._wait(layer)
        record = layer.rows.v.record
        new = layer.rows.v.joined(own).permute(2, 0, 1, 3).contiguous()
        if step.uniform:
            start = step.starts[0]
            self._send(layer, [(record[start : start + 1], new)])
        else:
            self._send(layer, [(record[s, i], new[0, i]) for i, s in enumerate(step.starts)])

    def fetch(self, layer: Values, index: Tensor, length: int) -> list[Tensor]:
        """Rows ``index`` (batch, KV heads, n) by part, (batch, KV heads, n, width)."""
        column, record = layer.rows.v, layer.rows.v.record
        width = record.shape[-1]
        if index.shape[2] >= length:
            home = record[:length]
            whole = self.buffers[0].view(-1)[: home.numel()].view_as(home)
            whole.copy_(home, non_blocking=True)
            layer.tally.copy("fetch_v", "h2d", [whole], rows=record[0, :, :, 0].numel() * length)
            return [rows_at(part, index) for part in column.split(whole)]
        every, half = record.permute(1, 2, 0, 3), width // 2
        shape = (2, *index.shape, half)
        room = self.buffers[0].view(-1)[: torch.Size(shape).numel()].view(shape)
        gather(every[..., :half], every[..., half:], index, room[0], room[1])
        layer.tally.copy("fetch_v", "h2d", [room], rows=index.numel())
        fetched = torch.cat((room[0], room[1]), dim=-1)
        return column.cut(fetched)

    def _send(self, layer: Values, copies: Copies) -> None:
        layer.tally.copy("store_v", "d2h", [source for _, source in copies])

        lane, mark = self.transfers.d2h, self.transfers.mark()
        self.sent[layer.layer] = lane(lambda: copy_all(copies), mark), copies

    def _wait(self, layer: Values) -> None:
        """Until a layer's values are at home; only then may their source be used again."""
        if layer.layer in self.sent:
            self.sent.pop(layer.layer)[0].wait()
