"""Attention sinks and a window of recent tokens, with positions counted within the cache."""

from dataclasses import replace

import torch
from torch import Tensor

from kvsim.techniques.papers.streamingllm import Streamingllm as Settings
from kvsim.validate.counter import OpRecord
from kvsim.validate.model.architecture import rotate
from kvsim.validate.model.attention import Pass, visible
from kvsim.validate.parts.eviction import RingCache
from kvsim.validate.parts.selection import LayerContext
from kvsim.validate.parts.store import Resident, SlotRange

SMALL_SETTINGS = ("sink=4,recent={half}",)


class Streamingllm(RingCache):
    """Cache of sinks and recent tokens, whose sinks move along with the query.

    A key at position i that is rotated by j further positions is the key at position i + j, so only
    the sinks are rotated again, from their original keys. Learned positions (OPT) are added to the
    hidden states and cannot be changed.

    References
    ----------
    .. [1] G. Xiao et al., "Efficient streaming language models with attention sinks", ICLR 2024,
       section 3.2.
    """

    def __init__(self, place: LayerContext) -> None:
        settings = place.settings(Settings)
        self.sink, self.recent = int(settings.sink), int(settings.recent)
        super().__init__(place)
        self._turning: Turning | None = None
        if self.run.decoder.arch.rope and self.sink and self.capacity > self.budget:
            key = ("sinks", self.sink, self.recent)
            self._turning = self.kv.room.common.get(key, lambda: Turning(self))
            self._turning.layers.append(self)
            self.sinks = torch.zeros_like(self.keys_of_sinks())

    def store_prompt(self, keys: Tensor, values: Tensor) -> None:
        """Store the first tokens (sinks) and the latest of every sequence, or all that fit."""
        if self.prompt <= self.budget:
            super().store_prompt(keys, values)
        else:
            self.keep(keys, values, self.prompt_ring().expand(*keys.shape[:2], -1))
        if self._turning is not None:
            self.sinks[:, :, : self.prompt] = keys[:, :, : self.sink]

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Replace the oldest recent token, rotate the sinks' keys, and attend to all slots."""
        if self._turning is not None and step.length > self.budget:
            self._turning.turn(self, step)
        span = self.slot_range(step)
        self.kv.append(keys, values, span)
        if self._turning is not None and not self.kv.plain and step.starts[0] < self.sink:
            self.sinks[:, :, step.starts[0]] = keys[:, :, 0]  # in full precision
        held: int | Tensor = span.longest
        if self.shape.window:
            held = self.ring(step.positions[:, 0] + 1)[:, : span.longest]
        return self.kv.attend(queries, span, visible(step, held, self.shape.window))

    def buffers(self) -> Resident:
        """Return the sinks' original keys, from which rotated keys are computed.

        There are none for models without rotary positions.
        """
        return {} if self._turning is None else {"gpu": {"sink keys": [self.sinks]}}

    def keys_of_sinks(self) -> Tensor:
        """Return the sinks' keys, or zeros if they are packed. (sequences, KV heads, sinks, dim)"""
        if self.kv.plain:
            return self.rows.k.parts[0][:, :, : self.sink]
        return self.kv.room.zeros(self.sink)

    def turn(self, record: OpRecord, cos: Tensor, sin: Tensor) -> None:
        """Rotate the sinks' original keys and write them to their slots.

        Parameters
        ----------
        record
            Counter of the op.
        cos, sin
            Cosine and sine of the rotation of each sequence.
        """
        slots = torch.arange(self.sink, device=self.device).expand(self.batch, -1)
        span = SlotRange(slots, (self.sink,) * self.batch, self.sink, 0)
        self.rows.k.write(OpRecord(), rotate(self.sinks, cos, sin), span)
        record.reads(self.sinks).writes(*(part[:, :, : self.sink] for part in self.rows.k.parts))


class Turning:
    """The sinks of all layers, which are rotated together once per step."""

    def __init__(self, one: Streamingllm) -> None:
        rope = one.run.decoder.arch.rope
        assert rope is not None
        self.layers: list[Streamingllm] = []
        self.table = replace(rope, scale=1.0).table(one.capacity, one.device, one.dtype)

    def turn(self, asking: Streamingllm, step: Pass) -> None:
        """Rotate the sinks' keys of all layers by the tokens that their sequences have evicted.

        The first layer's call does so for all; calls of other layers do nothing.

        Parameters
        ----------
        asking
            Cache of the layer that calls.
        step
            The pass, whose new token may evict another.
        """
        if asking is not self.layers[0]:
            return
        with asking.counter.op("turn") as record:
            if step.starts[0] <= asking.budget and asking.kv.plain:  # the first eviction
                for layer in self.layers:
                    layer.sinks.copy_(layer.keys_of_sinks())
            away = (step.positions + 1 - asking.budget).clamp_min(0)
            cos, sin = (table[away].unsqueeze(1) for table in self.table)
            for layer in self.layers:
                layer.turn(record, cos, sin)
