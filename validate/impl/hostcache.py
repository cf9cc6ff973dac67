"""What offloading shares: a cache in host memory that visits the GPU layer by layer.

A layer's cache is stored token by token, (tokens, rows, dim), where a row is a KV head of a
sequence, so that a range of tokens is one contiguous copy. Two buffers on the GPU take turns: while
one layer is attended to, the next one arrives in the other. By columns, every layer serves the
parts of the batch one after another, and its weights arrive in as many pieces.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvsim.engine.formats import FP16, Format
from kvsim.errors import InputError
from kvsim.techniques.base import Technique
from kvsim.techniques.place import Place
from kvsim.validate.impl.base import Implementation, Resident
from kvsim.validate.impl.rows import Rows
from kvsim.validate.impl.streaming import StreamedWeights
from kvsim.validate.model.attention import Pass, attend, visible
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.model.weights import LayerWeights
from kvsim.validate.tally import Kind, Silent
from kvsim.validate.transfer import Mark, Transfers


@dataclass(frozen=True)
class Visit:
    """A part of the batch in a layer."""

    layer: int
    tile: int


@dataclass(frozen=True)
class Arrival:
    """What is on its way to a buffer: when it is there, what counts, and which tokens it brings."""

    marks: tuple[Mark, ...]
    note: Silent
    part: slice


Pair = tuple[Tensor, Tensor]  # keys and values (tokens, rows, dim)


class HostCache(Implementation):
    """Base of the offloading techniques; subclasses say more about what is fetched and kept."""

    def __init__(
        self, technique: Technique, decoder: Decoder, lengths: list[int], generate: int
    ) -> None:
        super().__init__(technique, decoder, lengths, generate)
        place, storage = technique.parts[0].placement, technique.parts[0].storage
        assert isinstance(place, Place)
        self.place, self.stored = place, storage.stored
        self.parts = place.tiles
        if self.batch % self.parts:
            raise InputError(
                f"{technique.name}: batch {self.batch} does not divide into {self.parts} parts; "
                f"choose a multiple of {self.parts}, or set {technique.name}:parts"
            )
        if place.states_host:
            raise InputError(
                f"{technique.name}: its real implementation keeps hidden states on the GPU; "
                f"set {technique.name}:states_gpu=100"
            )
        self.transfers = Transfers(decoder.device, decoder.tally)
        self.each = self.batch // self.parts  # sequences of a part
        self.visits = [Visit(i, j) for i in range(self.model.layers) for j in range(self.parts)]
        self.cached = [max(lengths[rows]) for rows in self.tiles]  # tokens of each part [tokens]
        self.rows = self.each * self.model.kv_heads
        self.away = round(float(place.host_share) * self.rows)  # rows in host memory
        self.packed = self.stored.packs
        self.wide = [self._room(self.away) for _ in range(self.wide_buffers)]
        self.here = {v: self._room(self.rows - self.away) for v in self.visits}
        width = self.away * self.model.head_dim
        self.buffers = [self._pair(i, width) for i in range(2)]
        self.homes = {
            v: [self.home(self.first(v.layer), self.capacity, width) for _ in "kv"]
            for v in self.visits
        }
        self.streamed: StreamedWeights | None = None
        if place.weights_host:
            self.streamed = StreamedWeights(decoder, self.transfers, self.parts, place.weights_host)
        self._turn = 0  # visits so far: even ones use the first buffer
        self._free: list[tuple[Mark, ...]] = [(), ()]  # what each buffer's next filler waits for
        self._stored: dict[Visit, Mark] = {}  # when a home took its last tokens
        self._arrival: Arrival | None = None  # for the next visit

    # what a subclass may say

    @property
    def wide_buffers(self) -> int:
        """Layers whose loaded keys and values are in full precision at once."""
        return 1 if self.packed else 2

    def first(self, layer: int) -> int:
        """First token whose keys and values have a home."""
        return 0

    def fetch(self, visit: Visit, turn: int, after: tuple[Mark, ...]) -> Arrival:
        """Queue what brings a visit's cached tokens to the buffer of a turn."""
        part, note = slice(0, self.cached[visit.tile]), self.tally.apart()
        return Arrival((self.load(visit, turn, part, note, after),), note, part)

    def load(
        self, visit: Visit, turn: int, part: slice, note: Silent, after: tuple[Mark, ...]
    ) -> Mark:
        """Queue the copy of some tokens' keys and values to the buffer of a turn."""
        pairs = list(zip(self.buffers[turn % 2], self.homes[visit], strict=True))
        note.copy("load_kv", "h2d", [t for _, home in pairs for t in home[part]])

        def work() -> None:
            for buffer, home in pairs:
                buffer.take(home, part)

        return self.transfers.h2d(work, *after)

    def store(self, visit: Visit, part: slice) -> Mark:
        """Queue the copy home of some tokens in the buffer of this turn."""
        buffers = self.buffers[self._turn % 2]
        if self.packed:
            with self.tally.op("quantise") as marks:
                for buffer, wide in zip(buffers, self._wide(self._turn), strict=True):
                    buffer.pack(wide[part].flatten(1), part)
                    marks.reads(wide[part])
                    marks.writes(*buffer[part])
        pairs = list(zip(self.homes[visit], buffers, strict=True))
        self.tally.copy("store_kv", "d2h", [t for home, _ in pairs for t in home[part]])

        def work() -> None:
            for home, buffer in pairs:
                home.take(buffer, part)

        return self.transfers.d2h(work, self.transfers.mark())

    def keep_inputs(self, visit: Visit, tensor: Tensor, step: Pass) -> None:
        """A chunk of the prompt has reached a layer as x: for those who send it home."""

    # hooks

    @property
    def tiles(self) -> list[slice]:
        """Parts of equal size."""
        each = self.batch // self.parts
        return [slice(i, i + each) for i in range(0, self.batch, each)]

    def weights(self, layer: int, kind: Kind) -> LayerWeights:
        """From the host by columns."""
        return self.streamed.layer(layer) if self.streamed else super().weights(layer, kind)

    def prefill(
        self, layer: int, tensor: Tensor, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor:
        """The prompt fills a buffer, which is sent home when it is whole."""
        visit = Visit(layer, step.rows.start // self.each)
        if step.starts[0] == 0:
            for mark in self._free[self._turn % 2]:
                mark.wait()
            self._send_weights(visit)
        self.keep_inputs(visit, tensor, step)
        out = self._attend(visit, queries, keys, values, step)
        if step.length == self.prompt:
            self._leave(visit, self.store(visit, slice(0, self.prompt)))
            if visit == self.visits[-1]:
                self._request(self.visits[0], self._turn)
        return out

    def attend(
        self, layer: int, tensor: Tensor, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor:
        """Ask for the next visit, wait for this one, attend, and send the new tokens home."""
        visit, arrival = Visit(layer, step.rows.start // self.each), self._arrival
        self._send_weights(visit)
        if layer == self.model.layers - 1:  # this pass's tokens are no longer needed
            self.cached[visit.tile] += step.new
        following = self.visits[(self.visits.index(visit) + 1) % len(self.visits)]
        if following != visit:
            self._request(following, self._turn + 1)
        if arrival:
            for mark in arrival.marks:
                mark.wait()
            self.tally.take(arrival.note)
            self._widen(arrival.part)
        out = self._attend(visit, queries, keys, values, step)
        self._leave(visit, self.store(visit, slice(min(step.starts), step.length)))
        if following == visit:  # one layer: the next step needs what this one stores
            self._request(visit, self._turn)
        return out

    def resident(self) -> Resident:
        """Homes, what stays on the GPU, buffers and streamed weights."""
        homes = [part for pair in self.homes.values() for rows in pair for part in rows.parts]
        buffers = [part for pair in self.buffers for rows in pair for part in rows.parts]
        tensors: Resident = {
            "gpu": {"kv": [t for pair in self.here.values() for t in pair], "kv buffers": buffers},
            "host": {"kv": homes},
        }
        if self.streamed:
            tensors["gpu"]["weight buffers"] = self.streamed.buffers
            tensors["host"]["weights"] = self.streamed.homes
        return tensors

    def close(self) -> None:
        """End the threads that copy, once nothing is on its way."""
        self.transfers.close()

    # how it is done

    def home(self, first: int, last: int, width: int) -> Rows:
        """Room in host memory for a range of tokens."""
        make = self.transfers.host
        return Rows(make, first, last, width, self.stored, self.decoder.dtype)

    def staging(self, last: int, width: int, stored: Format | None = None) -> Rows:
        """Room on the GPU in the format of a home."""
        return Rows(self._zeros, 0, last, width, stored or self.stored, self.decoder.dtype)

    def _pair(self, index: int, width: int) -> list[Rows]:
        if self.packed:
            return [self.staging(self.capacity, width) for _ in "kv"]
        wide = iter(self.wide[index])  # plain numbers arrive where attention reads them

        def make(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return next(wide).view(shape)

        return [Rows(make, 0, self.capacity, width, FP16, self.decoder.dtype) for _ in "kv"]

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.decoder.device)

    def _room(self, rows: int) -> Pair:
        shape = (self.capacity, rows, self.model.head_dim)
        return self._zeros(shape, self.decoder.dtype), self._zeros(shape, self.decoder.dtype)

    def _wide(self, turn: int) -> Pair:
        return self.wide[turn % len(self.wide)]

    def _request(self, visit: Visit, turn: int) -> None:
        """Queue the copies for the next visit, if the generation goes on."""
        self._arrival = None
        if max(self.cached) < self.capacity - 1 or visit.layer or visit.tile:
            after = (*self._free[turn % 2], self._stored[visit])
            self._arrival = self.fetch(visit, turn, after)

    def _leave(self, visit: Visit, stored: Mark) -> None:
        """This visit is over: its buffer is free when attention and the copies home are done."""
        self._stored[visit] = stored  # after all that the visit sent before: lanes are in order
        self._free[self._turn % 2] = (self.transfers.mark(), stored)
        self._turn += 1

    def _send_weights(self, visit: Visit) -> None:
        if self.streamed:
            self.streamed.ahead(visit.layer, visit.tile)

    def _widen(self, part: slice) -> None:
        """Loaded tokens to full precision."""
        if self.packed and part.stop > part.start:
            pairs = zip(self.buffers[self._turn % 2], self._wide(self._turn), strict=True)
            with self.tally.op("dequantise") as marks:
                for rows, wide in pairs:
                    rows.widen(part, wide[part].flatten(1))
                    marks.reads(*rows[part])
                    marks.writes(wide[part])

    def _attend(self, visit: Visit, q: Tensor, k: Tensor, v: Tensor, step: Pass) -> Tensor:
        """Append new tokens and attend, the rows that were away and those that stayed apart."""
        window = self.shapes[visit.layer].window
        queries = q.reshape(self.rows, -1, step.new, q.shape[3])  # (rows, group, new, dim)
        with self.tally.op("attn") as marks:
            marks.writes(k, v)
            seen = visible(step, step.length, window)
            if isinstance(seen, Tensor) and len(seen) > 1:
                seen = seen.repeat_interleave(self.model.kv_heads, 0)
            new_k, new_v = (new.flatten(0, 1).transpose(0, 1) for new in (k, v))
            outs = []
            for caches, rows in (
                (self._wide(self._turn), slice(0, self.away)),
                (self.here[visit], slice(self.away, self.rows)),
            ):
                if rows.start < rows.stop:
                    mask = seen[rows] if isinstance(seen, Tensor) and len(seen) > 1 else seen
                    for cache, new in zip(caches, (new_k[:, rows], new_v[:, rows]), strict=True):
                        self._put(cache, new, step, rows)
                    keys, values = (c[: step.length].transpose(0, 1)[:, None] for c in caches)
                    outs.append(attend(marks, queries[rows], keys, values, mask))
            out = torch.cat(outs) if len(outs) > 1 else outs[0]
        return out.reshape(q.shape)

    def _put(self, cache: Tensor, new: Tensor, step: Pass, rows: slice) -> None:
        """Write new (new, rows, dim) at their positions in a cache (tokens, rows, dim)."""
        if step.uniform:
            cache[step.starts[0] : step.starts[0] + step.new] = new
        else:
            slots = step.positions.repeat_interleave(self.model.kv_heads, 0)[rows].T
            cache[slots, torch.arange(new.shape[1], device=cache.device)] = new
