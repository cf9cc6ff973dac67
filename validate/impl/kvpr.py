"""Offloading with partial recomputation: inputs of a layer arrive first, the rest meanwhile."""

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.graph import Array, Point
from kvsim.models.model import LayerShape
from kvsim.techniques.base import Technique
from kvsim.techniques.layers import LayerPass
from kvsim.techniques.recompute import recomputed
from kvsim.validate.impl.base import Resident, SmallRun
from kvsim.validate.impl.hostcache import Arrival, HostCache, Visit
from kvsim.validate.impl.rows import Rows
from kvsim.validate.model.attention import Pass
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.tally import Silent
from kvsim.validate.transfer import Mark


class Kvpr(HostCache):
    """The split of every step is the one that the technique states for its context.

    Keys and values of the first tokens are recomputed from the layer's stored inputs on a stream
    of their own, while those of the others are still being copied.
    """

    @classmethod
    def small_settings(cls, run: SmallRun) -> list[str]:
        """Half of the prompt is recomputed."""
        return [f"split={run.prompt // 2}"]

    def __init__(
        self, technique: Technique, decoder: Decoder, lengths: list[int], generate: int
    ) -> None:
        super().__init__(technique, decoder, lengths, generate)
        width = self.each * self.model.hidden
        self.inputs = {v: self.home(0, self._span(v.layer)[1], width) for v in self.visits}
        most = max(self._span(layer)[1] for layer in range(self.model.layers))
        self.input_buffers = [self.staging(most, width) for _ in range(2)]
        positions = torch.arange(most, device=decoder.device)[None]
        self._turns = decoder.turns(positions)

    def split(self, layer: int, cached: int) -> int:
        """Tokens recomputed in a step that finds so many in the cache. [tokens]"""
        return int(self._splits[self.shapes[layer]][cached - self._shortest])

    def first(self, layer: int) -> int:
        """Tokens that every step recomputes have no keys and values at home."""
        return self._span(layer)[0]

    def keep_inputs(self, visit: Visit, tensor: Tensor, step: Pass) -> None:
        """Send home the inputs that some step will recompute from."""
        last = self._span(visit.layer)[1]
        part = slice(step.starts[0], min(step.length, last))
        if part.start >= part.stop:
            return
        home, buffer = self.inputs[visit], self.input_buffers[self._turn % 2]
        numbers = tensor[:, : part.stop - part.start].transpose(0, 1).flatten(1)
        if self.packed:
            with self.tally.op("quantise_inputs") as marks:
                buffer.pack(numbers, part)
                marks.reads(numbers)
                marks.writes(*buffer[part])
        else:
            buffer[part][0].copy_(numbers)
        self.tally.copy("store_inputs", "d2h", home[part])

        def work() -> None:
            home.take(buffer, part)

        self.transfers.d2h(work, self.transfers.mark())

    def fetch(self, visit: Visit, turn: int, after: tuple[Mark, ...]) -> Arrival:
        """Inputs first, then the other tokens' keys and values beside the recomputation."""
        cached, note = self.cached[visit.tile], self.tally.apart()
        split = self.split(visit.layer, cached)
        rest = slice(split, cached)
        marks: list[Mark] = []
        if split:
            home, buffer = self.inputs[visit], self.input_buffers[turn % 2]
            part = slice(0, split)
            note.copy("load_inputs", "h2d", home[part])

            def bring() -> None:
                buffer.take(home, part)

            def recompute() -> None:
                self._recompute(visit.layer, buffer, split, turn, note)

            arrived = self.transfers.h2d(bring, *after)
            marks.append(self.transfers.side(recompute, arrived, *after))
        marks.append(self.load(visit, turn, rest, note, after))
        return Arrival(tuple(marks), note, rest)

    def resident(self) -> Resident:
        """Layer inputs besides what offloading keeps."""
        tensors = super().resident()
        tensors["host"]["layer inputs"] = [t for rows in self.inputs.values() for t in rows.parts]
        tensors["gpu"]["kv buffers"] += [t for rows in self.input_buffers for t in rows.parts]
        return tensors

    @property
    def wide_buffers(self) -> int:
        """Two: one layer is recomputed while another is attended to."""
        return 2

    def _recompute(self, layer: int, inputs: Rows, split: int, turn: int, note: Silent) -> None:
        """Keys and values of the first tokens of every sequence, into the buffer of a turn."""
        part, shape = slice(0, split), (split, self.each, self.model.hidden)
        if self.packed:
            numbers = torch.empty(shape, dtype=self.decoder.dtype, device=self.decoder.device)
            with note.op("dequantise_inputs") as marks:
                inputs.widen(part, numbers.flatten(1))
                marks.reads(*inputs[part])
                marks.writes(numbers)
        else:
            numbers = inputs[part][0].view(shape)
        turns = None
        if self._turns:
            turns = (self._turns[0][:, :, :split], self._turns[1][:, :, :split])
        with note.op("recompute") as marks:
            x = numbers.transpose(0, 1)
            both = self.decoder.keys_values(layer, x, turns)
            kv_rows = self.decoder.weights.layers[layer].qkv.rows(-self.model.kv_width)
            marks.reads(x, *kv_rows.tensors())
            marks.writes(*both)
            if turns:
                marks.reads(both[0])
                marks.writes(both[0])
            for cache, new in zip(self._wide(turn), both, strict=True):
                cache[part] = new.flatten(0, 1).transpose(0, 1)

    def _span(self, layer: int) -> tuple[int, int]:
        """Fewest and most tokens that some step recomputes. [tokens]"""
        splits = self._splits[self.shapes[layer]]
        return int(splits.min()), int(splits.max())

    @cached_property
    def _splits(self) -> dict[LayerShape, Array]:
        """The split of every step, by the tokens it finds beyond the shortest part's prompt."""
        d, parts = self.decoder.deployment, self.technique.parts[0]
        if d is None:
            raise InputError("kvpr: the split rests on a machine; give one with --gpu")
        cached = np.arange(self._shortest, self.capacity, dtype=float)
        p = Point(float(self.each), cached, 1.0, float(self.prompt), float(self.capacity))
        stated = {
            shape: recomputed(self.place, LayerPass(d, p, shape, parts))
            for shape in set(self.shapes)
        }
        known = min(self.lengths)  # beyond, a shorter prompt has no inputs
        return {
            shape: np.minimum(np.broadcast_to(np.asarray(splits), cached.shape), known)
            for shape, splits in stated.items()
        }

    @property
    def _shortest(self) -> int:
        """Longest prompt of the part whose longest is shortest. [tokens]"""
        return min(max(self.lengths[rows]) for rows in self.tiles)
