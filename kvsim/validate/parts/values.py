"""Scores over all keys, the values of the best N, which may live in host memory."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvsim.techniques.papers.kcache import TopValues
from kvsim.validate.kernels.gather import rows_at
from kvsim.validate.model.attention import Pass
from kvsim.validate.parts.away import HostValues
from kvsim.validate.parts.base import Resident
from kvsim.validate.parts.bytoken import PACKED_AT_ONCE
from kvsim.validate.parts.cells import SlotRange
from kvsim.validate.parts.portions import begins, ends
from kvsim.validate.parts.selecting import LayerCache, LayerContext


class Values(LayerCache):
    """The N chosen weights are used as they are, without scaling them to a sum of 1.

    Values in host memory are records of a token's whole row, (tokens, batch, KV heads, bytes). The
    newest token's own value is on the GPU anyway and is taken from there: nothing waits for its
    copy to the host. Where N values for every head of a group are no fewer than all, all are
    copied once.

    References
    ----------
    .. [1] Q. He and Z. Wu, "Efficient LLM inference with KCache", 2024, section 3.
    """

    def __init__(self, place: LayerContext) -> None:
        settings = place.parts.selection
        assert isinstance(settings, TopValues)
        super().__init__(place)
        self.refuse_drafts()
        self.n = min(int(settings.n), self.capacity)
        self.away = TopHostValues.of(self) if self.rows.values_on_host else None
        if self.away:  # keys are read by an op of its own
            self.differences = {} if self.rows.plain else {"scores": PACKED_AT_ONCE["attn"]}

    def prefill(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Values of one layer leave while the next one is computed."""
        if self.away is None:
            return super().prefill(queries, keys, values, step)
        first, last = begins(step), ends(step, self.prompt, self.batch)
        held = self.rows.k.parts[0], self.away.stage(self, first)[0]
        out = self.attend_from(held, queries, keys, values, step)
        if last:
            self.away.send_prompt(self)
        return out

    def store_prompt(self, keys: Tensor, values: Tensor) -> None:
        """Packed keys stay, packed values leave."""
        if self.away is None:
            super().store_prompt(keys, values)
            return
        stage = self.away.stage(self, first=True)
        with self.counter.op("quantise") as record:
            self.rows.k.fill(record, keys)
            made = self.rows.v.codec.encode(values)
            record.reads(values)
            record.writes(*made)
            for mine, new in zip(stage, made, strict=True):
                mine.copy_(new)
        self.away.send_prompt(self)

    def prompt_done(self) -> None:
        """From here on, buffers hold fetched values and which they are."""
        if self.away:
            self.away.prompt_done()

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Scores over all keys, then the values of the best N."""
        count, span, rows = min(self.n, step.length), SlotRange.after_cached(step), self.rows
        own = self._append(keys, values, span)
        with self.counter.op("scores" if self.away else "attn") as record:
            seen = span.visible(step, self.shape.window)
            weights = rows.weights(queries, span, seen)
            record.reads(queries, *rows.k.read(span.ends))
            record.visible(1, step.length, seen)
        with self.counter.op("topk") as record:
            best = weights[:, :, 0].topk(count, dim=-1)
            index = self.away.keep(best.indices) if self.away else best.indices
            record.writes(weights)
            record.reads(weights)
        if self.away:
            self.away.send_new(self, own, step)
        with self.counter.op("attn") as record:
            if not self.away and rows.plain:
                record.writes(values)
            chosen = self._chosen(index, own, step)
            out = best.values[:, :, None] @ chosen
            many = min(self.model.queries_per_kv * count, step.length)  # read once per KV head
            record.reads(*(part[:, :, :1].expand(-1, -1, many, -1) for part in own), best.values)
            record.writes(out)
        return out

    def buffers(self) -> Resident:
        """Values at home; fetched ones, once for all layers."""
        if self.away is None:
            return {}
        held: Resident = {"host": {"kv": [self.rows.v.record]}}
        if self.away.layers[0] is self:
            held["gpu"] = {"value buffers": self.away.buffers}
        return held

    def _append(self, keys: Tensor, values: Tensor, span: SlotRange) -> list[Tensor]:
        """Store the new token; its value as parts of a row, which leaves later if it has to."""
        rows = self.rows
        own = rows.v.codec.encode(values)
        if not rows.plain:
            with self.counter.op("quantise") as record:
                rows.k.write(record, keys, span)
                record.reads(values)
                record.writes(*own)
        else:
            with self.counter.op("scores" if self.away else "attn") as record:
                rows.k.write(record, keys, span)
        if self.away is None:
            rows.v.put(own, span)
        return own

    def _chosen(self, index: Tensor, own: list[Tensor], step: Pass) -> Tensor:
        """The values that ``index`` (batch, heads, N) names, (batch, heads, N, dim)."""
        kv_heads, length, column = self.model.kv_heads, step.length, self.rows.v
        by_group = index.view(self.batch, kv_heads, -1)
        if self.away is None:
            parts = [rows_at(part[:, :, :length], by_group) for part in column.parts]
            return column.widened(parts).view(*index.shape, -1)
        chosen = column.widened(self.away.fetch_best(self, by_group, length)).view(*index.shape, -1)
        newest = column.widened(own).repeat_interleave(self.model.queries_per_kv, 1)
        return torch.where((index == step.positions[:, :, None])[..., None], newest, chosen)


@dataclass
class TopHostValues(HostValues):
    """Those of several layers, with the numbers of the chosen tokens."""

    @classmethod
    def of(cls, layer: Values) -> "TopHostValues":
        """The one of this run."""
        run = layer.run
        lanes = run.placements[layer.layer].lanes
        found = run.shared("values on the host", lambda: cls(lanes(), "store_v", "fetch_v"))
        found.add(layer, layer.rows.v)
        return found

    def prompt_done(self) -> None:
        """Room for what is fetched."""
        if not self.reading:
            return
        layers = [layer for layer in self.layers if isinstance(layer, Values)]
        rows = max(layer.model.queries_per_kv * layer.n for layer in layers)
        self.prompt_sent(rows)
        shape = (*layers[0].rows.v.record.shape[1:3], rows)
        self.buffers.append(torch.zeros(shape, dtype=torch.int32, device=layers[0].device))

    def keep(self, index: Tensor) -> Tensor:
        """The chosen tokens in a buffer of their own, as 32-bit numbers."""
        room = self.buffers[1].view(-1)[: index.numel()].view(index.shape)
        return room.copy_(index)

    def fetch_best(self, layer: Values, index: Tensor, length: int) -> list[Tensor]:
        """Rows ``index`` (batch, KV heads, n) by part, (batch, KV heads, n, width)."""
        column, record = layer.rows.v, layer.rows.v.record
        if index.shape[2] < length:
            return self.fetch(layer, index)
        home = record[:length]
        whole = self.buffers[0].view(-1)[: home.numel()].view_as(home)
        whole.copy_(home, non_blocking=True)
        layer.counter.copy("fetch_v", "h2d", [whole], rows=record[0, :, :, 0].numel() * length)
        return [rows_at(part, index) for part in column.split(whole)]
