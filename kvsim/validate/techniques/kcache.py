"""KCache: keys stay on the GPU, values on the host, of which the N best are fetched in every step.

Q. He and Z. Wu, "Efficient LLM Inference with KCache", 2024, section 3,
https://arxiv.org/abs/2404.18057.

- Prefill (figure 1, equations 1 and 2): a layer's keys are written into its cache; its values are
  written into one of two buffers, from which they leave for host memory while the next layer
  computes (``Values.prompt_buffer``, ``send_prompt``).
- Decode (table 1): S~ = TopN(softmax(q K^T / sqrt(d))) over all keys, on the GPU; the values of
  those N tokens are copied from the host; A~ = S~ Part(V) (``Values.attend``).
- Some first layers may keep their values on the GPU (the paper's L; ``gpu_layers``): for them the
  same is done without a fetch.

The N weights are used as they are, without scaling them to a sum of 1, as in the paper. Every query
head chooses its own N.

Where this departs from the paper: the newest token's own value is still on the GPU and is taken
from there, so that nothing waits for its copy to the host. Where the query heads of a KV head
together fetch as many values as there are, all values are copied once. Values may be packed.
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
    """Cache of one layer: keys in ``rows.k``, values in ``rows.v``, which may be on the host."""

    def __init__(self, place: LayerContext) -> None:
        settings = place.settings(TopValues)
        super().__init__(place)
        self.refuse_drafts()
        self.n = min(int(settings.n), self.capacity)
        self.host = TopHostValues.of_run(self) if self.rows.values_on_host else None
        if self.host:  # keys are read by an op of its own
            self.differences = {} if self.rows.plain else {"scores": PACKED_AT_ONCE["attn"]}

    def prompt_buffer(self) -> tuple[Tensor, Tensor]:
        """Return the slots of keys, and the buffer from which values leave for the host."""
        if self.host is None:
            return super().prompt_buffer()
        return self.rows.k.parts[0][:, :, : self.prompt], self.host.stage(self)[0]

    def store_prompt(self, keys: Tensor, values: Tensor) -> None:
        """Pack a prompt if it is to be packed, and start copying its values to the host."""
        if self.host is None:
            super().store_prompt(keys, values)
            return
        if not self.direct:
            with self.counter.op("quantise") as record:
                self.rows.k.fill(record, keys)
                encoded = self.rows.v.codec.encode(values)
                record.reads(values).writes(*encoded)
                for buffer, part in zip(self.host.stage(self), encoded, strict=True):
                    buffer.copy_(part)
        self.host.send_prompt(self)

    def prompt_done(self) -> None:
        """Reuse the prompt's buffers for fetched values and their indices."""
        if self.host:
            self.host.prompt_done()

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Score all keys, fetch the values of the top N tokens, and sum them by weight."""
        count, span, rows = min(self.n, step.length), SlotRange.after_cached(step), self.rows
        own = self._append(keys, values, span)
        with self.counter.op("scores" if self.host else "attn") as record:
            seen = span.visible(step, self.shape.window)
            weights = rows.weights(queries, span, seen)  # softmax(q K^T / sqrt(d))
            record.reads(queries, *rows.k.read(span.ends))
            record.visible(1, step.length, seen)
        with self.counter.op("topk") as record:
            best = weights[:, :, 0].topk(count, dim=-1)  # S~ and its tokens, (batch, heads, N)
            index = self.host.keep(best.indices) if self.host else best.indices
            record.writes(weights).reads(weights)
        if self.host:
            self.host.send_new(self, own, step)
        with self.counter.op("attn") as record:
            if not self.host and rows.plain:
                record.writes(values)
            chosen = self._chosen(index, own, step)  # Part(V), (batch, heads, N, dim)
            out = best.values[:, :, None] @ chosen
            read = min(self.model.queries_per_kv * count, step.length)  # rows per KV head
            record.reads(*(part[:, :, :1].expand(-1, -1, read, -1) for part in own), best.values)
            record.writes(out)
        return out

    def buffers(self) -> Resident:
        """Return the values on the host, and on the first layer the buffers that all share."""
        if self.host is None:
            return {}
        held: Resident = {"host": {"kv": [self.rows.v.record]}}
        if self.host.layers[0] is self:
            held["gpu"] = {"value buffers": self.host.buffers}
        return held

    def _append(self, keys: Tensor, values: Tensor, span: SlotRange) -> list[Tensor]:
        """Store the new token's key, and return its value as it is stored, part by part.

        A value that stays on the GPU is stored here; ``send_new`` copies others to the host.
        """
        rows = self.rows
        own = rows.v.codec.encode(values)
        if not rows.plain:
            with self.counter.op("quantise") as record:
                rows.k.write(record, keys, span)
                record.reads(values).writes(*own)
        else:
            with self.counter.op("scores" if self.host else "attn") as record:
                rows.k.write(record, keys, span)
        if self.host is None:
            rows.v.put(own, span)
        return own

    def _chosen(self, index: Tensor, own: list[Tensor], step: Pass) -> Tensor:
        """Return the values of the tokens ``index`` (batch, heads, N), (batch, heads, N, dim).

        That of the newest token is taken from ``own``, its parts (batch, KV heads, 1, width).
        """
        kv_heads, length, column = self.model.kv_heads, step.length, self.rows.v
        by_group = index.view(self.batch, kv_heads, -1)
        if self.host is None:
            parts = [rows_at(part[:, :, :length], by_group) for part in column.parts]
            return column.widened(parts).view(*index.shape, -1)
        chosen = column.widened(self.host.fetch_best(self, by_group, length)).view(*index.shape, -1)
        newest = column.widened(own).repeat_interleave(self.model.queries_per_kv, 1)
        return torch.where((index == step.positions[:, :, None])[..., None], newest, chosen)


class TopHostValues(HostValues):
    """Values of several layers on the host, with GPU buffers for fetched ones and their indices."""

    @classmethod
    def of_run(cls, layer: Values) -> "TopHostValues":
        """Add a layer to the object that all layers of the run share, and return that object.

        Parameters
        ----------
        layer
            The layer's cache, whose values are in host memory.
        """
        run = layer.run
        lanes = run.transfers(layer.layer)
        found = run.shared(
            "values on the host", lambda: cls(lanes, layer.counter, "store_v", "fetch_v")
        )
        found.add(layer, layer.rows.v)
        return found

    def prompt_done(self) -> None:
        """Allocate buffers for the fetched values and their indices."""
        if not self.reading:
            return
        layers = [layer for layer in self.layers if isinstance(layer, Values)]
        rows = max(layer.model.queries_per_kv * layer.n for layer in layers)
        self.prompt_sent(rows)
        shape = (*layers[0].rows.v.record.shape[1:3], rows)
        self.room.append(torch.zeros(shape, dtype=torch.int32, device=layers[0].device))

    def keep(self, index: Tensor) -> Tensor:
        """Copy the indices of the chosen tokens to a GPU buffer. (batch, KV heads, n), int32"""
        room = self.room[1].view(-1)[: index.numel()].view(index.shape)
        return room.copy_(index)

    def fetch_best(self, layer: Values, index: Tensor, length: int) -> list[Tensor]:
        """Fetch the values of chosen tokens, or of all tokens if all are chosen.

        Parameters
        ----------
        index
            The tokens, (batch, KV heads, n).
        length
            Cached tokens. [tokens]

        Returns
        -------
        list of Tensor
            The parts in which a value is stored, (batch, KV heads, n, width) each.
        """
        column, record = layer.rows.v, layer.rows.v.record
        if index.shape[2] < length:
            return self.fetch(layer, index)
        home = record[:length]
        whole = self.room[0].view(-1)[: home.numel()].view_as(home)
        whole.copy_(home, non_blocking=True)
        layer.counter.copy("fetch_v", "h2d", [whole], rows=record[0, :, :, 0].numel() * length)
        return [rows_at(part, index) for part in column.split(whole)]
