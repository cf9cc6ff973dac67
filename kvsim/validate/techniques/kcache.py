"""KCache: keys stay on the GPU, values on the host, of which the N best are fetched in every step.

Q. He and Z. Wu, "Efficient LLM Inference with KCache", 2024, section 3,
https://arxiv.org/abs/2404.18057.

- Prefill (figure 1, equations 1 and 2): a layer's keys are written into its cache; its values are
  written into one of two buffers, from which they leave for host memory while the next layer
  computes (``Values.prefill``, ``send_prompt``).
- Decode (table 1): S = TopN(softmax(q K^T / sqrt(d))) over all keys, on the GPU; the values that
  the indices name are pulled from the host; A = S Part(V) (``Values.attend``).
- Some first layers may keep their values on the GPU (the paper's L; ``gpu_layers``): for them the
  same is done without a fetch.

The N weights are used as they are, without scaling them to a sum of 1. Every query head chooses its
own N.

Where this departs: the newest token's own value is on the GPU anyway and is taken from there, so
that nothing waits for its copy to the host. Where N values for every head of a group are no fewer
than all, all are copied once. Values may be stored packed, which the paper does not do.
"""

import torch
from torch import Tensor

from kvsim.techniques.papers.kcache import TopValues
from kvsim.validate.kernels.gather import rows_at
from kvsim.validate.model.attention import Pass
from kvsim.validate.parts.host_rows import HostValues
from kvsim.validate.parts.rows import PACKED_AT_ONCE
from kvsim.validate.parts.selection import LayerCache, LayerContext
from kvsim.validate.parts.store import Resident, SlotRange

SMALL_SETTINGS = ("n={quarter}",)


class Values(LayerCache):
    """One layer's cache: keys in ``rows.k``, values in ``rows.v``, which may be on the host."""

    def __init__(self, place: LayerContext) -> None:
        settings = place.parts.selection
        assert isinstance(settings, TopValues)
        super().__init__(place)
        self.refuse_drafts()
        self.n = min(int(settings.n), self.capacity)
        self.host = TopHostValues.of_run(self) if self.rows.values_on_host else None
        if self.host:  # keys are read by an op of its own
            self.differences = {} if self.rows.plain else {"scores": PACKED_AT_ONCE["attn"]}

    def prefill(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Values of one layer leave while the next one is computed."""
        if self.host is None:
            return super().prefill(queries, keys, values, step)
        held = self.rows.k.parts[0], self.host.stage(self)[0]
        out = self.attend_from(held, queries, keys, values, step)
        if step.ends_prompt(self.prompt, self.batch):
            self.host.send_prompt(self)
        return out

    def store_prompt(self, keys: Tensor, values: Tensor) -> None:
        """Packed keys stay, packed values leave."""
        if self.host is None:
            super().store_prompt(keys, values)
            return
        stage = self.host.stage(self)
        with self.counter.op("quantise") as record:
            self.rows.k.fill(record, keys)
            made = self.rows.v.codec.encode(values)
            record.reads(values)
            record.writes(*made)
            for mine, new in zip(stage, made, strict=True):
                mine.copy_(new)
        self.host.send_prompt(self)

    def prompt_done(self) -> None:
        """From here on, buffers hold fetched values and which they are."""
        if self.host:
            self.host.prompt_done()

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Score all keys, pull the values of the best N, weigh them."""
        count, span, rows = min(self.n, step.length), SlotRange.after_cached(step), self.rows
        own = self._append(keys, values, span)
        with self.counter.op("scores" if self.host else "attn") as record:
            seen = span.visible(step, self.shape.window)
            weights = rows.weights(queries, span, seen)  # softmax(q K^T / sqrt(d))
            record.reads(queries, *rows.k.read(span.ends))
            record.visible(1, step.length, seen)
        with self.counter.op("topk") as record:
            best = weights[:, :, 0].topk(count, dim=-1)  # S, (batch, heads, N), and which they are
            index = self.host.keep(best.indices) if self.host else best.indices
            record.writes(weights)
            record.reads(weights)
        if self.host:
            self.host.send_new(self, own, step)
        with self.counter.op("attn") as record:
            if not self.host and rows.plain:
                record.writes(values)
            chosen = self._chosen(index, own, step)  # Part(V), (batch, heads, N, dim)
            out = best.values[:, :, None] @ chosen
            many = min(self.model.queries_per_kv * count, step.length)  # read once per KV head
            record.reads(*(part[:, :, :1].expand(-1, -1, many, -1) for part in own), best.values)
            record.writes(out)
        return out

    def buffers(self) -> Resident:
        """Values at home; fetched ones, once for all layers."""
        if self.host is None:
            return {}
        held: Resident = {"host": {"kv": [self.rows.v.record]}}
        if self.host.layers[0] is self:
            held["gpu"] = {"value buffers": self.host.buffers}
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
            with self.counter.op("scores" if self.host else "attn") as record:
                rows.k.write(record, keys, span)
        if self.host is None:
            rows.v.put(own, span)
        return own

    def _chosen(self, index: Tensor, own: list[Tensor], step: Pass) -> Tensor:
        """The values that ``index`` (batch, heads, N) names, (batch, heads, N, dim)."""
        kv_heads, length, column = self.model.kv_heads, step.length, self.rows.v
        by_group = index.view(self.batch, kv_heads, -1)
        if self.host is None:
            parts = [rows_at(part[:, :, :length], by_group) for part in column.parts]
            return column.widened(parts).view(*index.shape, -1)
        chosen = column.widened(self.host.fetch_best(self, by_group, length)).view(*index.shape, -1)
        newest = column.widened(own).repeat_interleave(self.model.queries_per_kv, 1)
        return torch.where((index == step.positions[:, :, None])[..., None], newest, chosen)


class TopHostValues(HostValues):
    """Those of several layers, with the numbers of the chosen tokens."""

    @classmethod
    def of_run(cls, layer: Values) -> "TopHostValues":
        """The one of this run."""
        run = layer.run
        lanes = run.transfers(layer.layer)
        found = run.shared(
            "values on the host", lambda: cls(lanes, layer.counter, "store_v", "fetch_v")
        )
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
        self.room.append(torch.zeros(shape, dtype=torch.int32, device=layers[0].device))

    def keep(self, index: Tensor) -> Tensor:
        """The chosen tokens in a buffer of their own, as 32-bit numbers."""
        room = self.room[1].view(-1)[: index.numel()].view(index.shape)
        return room.copy_(index)

    def fetch_best(self, layer: Values, index: Tensor, length: int) -> list[Tensor]:
        """Rows ``index`` (batch, KV heads, n) by part, (batch, KV heads, n, width)."""
        column, record = layer.rows.v, layer.rows.v.record
        if index.shape[2] < length:
            return self.fetch(layer, index)
        home = record[:length]
        whole = self.room[0].view(-1)[: home.numel()].view_as(home)
        whole.copy_(home, non_blocking=True)
        layer.counter.copy("fetch_v", "h2d", [whole], rows=record[0, :, :, 0].numel() * length)
        return [rows_at(part, index) for part in column.split(whole)]
