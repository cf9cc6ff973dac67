"""Rows of caches, and weights, in host memory that are copied to the GPU layer by layer.

Two buffers take turns: while one layer is attended to, the next one arrives in the other.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from kvsim.engine.formats import Format
from kvsim.frozen import frozen
from kvsim.validate.counter import NullCounter, OpRecord
from kvsim.validate.model.attention import Pass
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.model.weights import LayerWeights, Linear
from kvsim.validate.parts.rows import Codec, Plain, codec
from kvsim.validate.parts.selection import LayerContext, LayeredRun
from kvsim.validate.parts.store import Host, Resident
from kvsim.validate.parts.tiered import MakeStore
from kvsim.validate.transfer import Mark, Transfers, copy_all


@frozen
class TokenTables:
    """Layout in host memory of one kind of per-token data, such as keys.

    Packed values share scales in groups along a token's width. A range of tokens is contiguous in
    every table, so that it is moved by a single copy.

    Attributes
    ----------
    stored
        Format in host memory, packed or plain.
    width
        Number of elements per token.
    dtype
        Number format of unpacked values, and of dequantised ones.

    References
    ----------
    .. [1] Y. Sheng et al., "FlexGen", ICML 2023, section 4.4,
       https://arxiv.org/abs/2303.06865.
    """

    stored: Format
    width: int
    dtype: torch.dtype

    @cached_property
    def codec(self) -> Codec:
        """The codec that encodes a token as a row of each table, and decodes it."""
        packs = self.stored.packs
        return codec(self.stored.bits, int(self.stored.group)) if packs else Plain()

    def tables(self, make: Host, tokens: int) -> list[Tensor]:
        """Allocate the tables for some tokens.

        Parameters
        ----------
        make
            Function that allocates a tensor of a shape and number format in host memory.
        tokens
            Number of tokens. [tokens]

        Returns
        -------
        list of Tensor
            One table of values, (tokens, width); or, if packed, tables of codes, scales and zero
            points, (tokens, ...) each.
        """
        return [make((tokens, n), kind) for n, kind in self.codec.widths(self.width, self.dtype)]

    def put(self, record: OpRecord, numbers: Tensor, tables: list[Tensor], part: slice) -> None:
        """Encode a range of tokens and write it to the tables.

        Parameters
        ----------
        record
            Counter of the op; only packing is charged to it, with a read of the values and a write
            of the packed ones.
        numbers
            Values of each token, (tokens, ...), which are flattened to ``width``.
        tables
            Tables from ``tables``, changed in place.
        part
            Rows of the tables that the tokens take.
        """
        flat = numbers.flatten(1)
        made = [rows[0, 0] for rows in self.codec.encode(flat[None, None])]
        if self.stored.packs:
            record.reads(flat).writes(*made)
        for table, new in zip(tables, made, strict=True):
            table[part].copy_(new)

    def read(self, record: OpRecord, tables: list[Tensor], part: slice) -> Tensor:
        """Read a range of tokens, and dequantise them if they are packed.

        Parameters
        ----------
        record
            Counter of the op; only dequantisation is charged to it, with a read of the packed
            values and a write of the others.
        tables
            Tables from ``tables``, or copies of them on the GPU.
        part
            Rows of the tables to read.

        Returns
        -------
        Tensor
            Values, (tokens, width), in ``dtype``; a view of the table if they are not packed.
        """
        found = [table[part] for table in tables]
        if not self.stored.packs:
            return found[0]
        store = self.codec.store([rows[None, None] for rows in found])
        wide = store.numbers()[0, 0].to(self.dtype)
        record.reads(*found).writes(wide)
        return wide


class HostRows:
    """The rows of one layer and one part of the batch that are kept in host memory.

    Parameters
    ----------
    slots
        Tokens per sequence to allocate. [tokens]
    make
        Creates the layer's store, given a function that allocates host memory.
    first
        First token that is stored in host memory; those before it are recomputed in every step.
    """

    recomputes = False

    def __init__(
        self,
        context: LayerContext,
        slots: int,
        lanes: Transfers,
        make: MakeStore,
        first: int = 0,
    ) -> None:
        self.context, self.first = context, first
        self.stored: Mark | None = None  # when homes took their last tokens
        self.packing: TokenTables | None = (
            None  # of keys and of values, where only homes are packed
        )
        storage = context.parts.storage

        def at_home(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return lanes.host((shape[0] - first, *shape[1:]), dtype)

        if storage.read == storage.stored:
            self.kv = make(at_home)
            self.homes = self.kv.homes  # tables (rows, ...) in host memory
            return
        self.kv = make(_shape_alone)
        width = self.kv.homes[0][0].numel()
        self.packing = TokenTables(storage.stored, width, context.run.decoder.dtype)
        self.homes = [t for _ in "kv" for t in self.packing.tables(lanes.host, slots - first)]

    def rows(self, tokens: int) -> list[int]:
        """Return the number of rows of every table that some tokens fill.

        Parameters
        ----------
        tokens
            Tokens of the longest sequence. [tokens]
        """
        return [tokens] * len(self.homes) if self.packing else self.kv.rows_of(tokens)

    def ready(self) -> None:
        """Allocate the buffers that layers share; called when all layers are known."""

    def store_inputs(self, tensor: Tensor, step: Pass, turn: int) -> None:
        """Hook that receives a layer's inputs in prefill; ignored by default.

        Subclasses that recompute keys and values do so from these inputs.

        Parameters
        ----------
        turn
            Index of the shared buffer that the layer uses.
        """

    def recompute(
        self,
        turn: int,
        tokens: int,
        note: NullCounter,
        after: tuple[Mark, ...],
        tables: list[Tensor],
    ) -> tuple[int, list[Mark]]:
        """Queue the recomputation of the first tokens.

        Parameters
        ----------
        turn
            Index of the shared buffer that the layer uses.
        tokens
            Cached tokens of the longest sequence. [tokens]
        note
            Counter of its ops and copies.
        after
            Marks to wait for before it writes.
        tables
            Tables that receive keys and values, (tokens, rows, dim) each.

        Returns
        -------
        Number of tokens that are recomputed and need not be copied, and marks of its end.
        """
        return 0, []

    def resident(self) -> Resident:
        """Return the tensors kept besides rows in host memory and shared buffers."""
        return {}


def _shape_alone(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor without memory; a buffer is bound before it is used."""
    return torch.empty(shape, dtype=dtype, device="meta")


@dataclass
class Arrival:
    """Data on their way to a GPU buffer.

    Attributes
    ----------
    marks
        Marks to wait for before the buffer is read.
    note
        Counter of the copies, which is merged into the pass that uses them.
    part
        Tokens that are copied.
    """

    marks: list[Mark]
    note: NullCounter
    part: slice


class PrefetchBuffers:
    """Two GPU buffers to which the rows in host memory are copied, one layer ahead.

    While one layer attends, the rows of the next one are copied to the other buffer. A buffer is
    reused once attention has read it and its new tokens have been copied to the host.
    """

    def __init__(self, run: LayeredRun, lanes: Transfers) -> None:
        self.run, self.lanes = run, lanes
        self.layers: dict[tuple[int, int], HostRows] = {}  # by layer and part
        self.buffers: list[list[Tensor]] = []  # as homes
        self.wide: list[list[Tensor]] = []  # where attention reads, if elsewhere
        self._turn = 0  # layers so far: even ones use the first buffer
        self._free: list[tuple[Mark, ...]] = [(), ()]
        self._coming: Arrival | None = None

    def ready(self) -> None:
        """Allocate the buffers, in the size of the largest layer."""
        every, device = list(self.layers.values()), self.run.decoder.device
        tables = range(len(every[0].homes))
        most = [max(len(rows.homes[i]) + rows.first for rows in every) for i in tables]

        def zeros(rows: int, like: Tensor) -> Tensor:
            return torch.zeros((rows, *like.shape[1:]), dtype=like.dtype, device=device)

        one = every[0]
        self.buffers = [list(map(zeros, most, one.homes)) for _ in "12"]
        if one.packing:  # one layer is recomputed while another is attended to
            turns = 2 if any(rows.recomputes for rows in every) else 1
            self.wide = [[zeros(most[0], t) for t in one.kv.homes] for _ in range(turns)]
        for rows in every:
            rows.ready()

    def before_attention(self, context: LayerContext, tensor: Tensor, step: Pass) -> None:
        """Start copying the next layer's rows, and wait for this layer's.

        Parameters
        ----------
        tensor
            The layer's inputs, (sequences, new, hidden), from which tokens may be recomputed.
        """
        rows = self.layers[context.visit]
        rows.kv.visit(self._tables(self._turn))
        if step.kind == "prefill":
            if not step.starts[0]:
                for mark in self._free[self._turn % 2]:
                    mark.wait()
            rows.store_inputs(tensor, step, self._turn)
            return
        coming, following = self._coming, self._next_rows(rows)
        if following is not rows and not self._verifies_last(step, following):
            self._request(following, self._turn + 1)
        if coming:
            for mark in coming.marks:
                mark.wait()
            self.run.counter.merge(coming.note)
            self._widen(rows, coming.part)

    def after_attention(self, context: LayerContext, step: Pass) -> None:
        """Copy new rows to host memory, after which the buffer can be reused."""
        rows, prompt = self.layers[context.visit], step.kind == "prefill"
        if prompt:
            if step.length < self.run.prompt:
                return
            rows.kv.begins = 0  # all of it
        self._store(rows)
        self._turn += 1
        following = self._next_rows(rows)
        needs = following is (self._first_rows if prompt else rows)  # what has just been stored
        if needs and not self._verifies_last(step, following):
            self._request(following, self._turn)

    def round_done(self) -> None:
        """Start copying the first layer's rows, once it is known which drafts stay."""
        self._request(self._first_rows, self._turn)

    def _tables(self, turn: int) -> list[Tensor]:
        """Return the tables that attention reads in a turn."""
        return self.wide[turn % len(self.wide)] if self.wide else self.buffers[turn % 2]

    @property
    def _first_rows(self) -> HostRows:
        return next(iter(self.layers.values()))

    def _verifies_last(self, step: Pass, following: HostRows) -> bool:
        """Return whether copies have to wait until it is known which drafts are accepted."""
        return step.kind == "verify" and following is self._first_rows

    def _next_rows(self, rows: HostRows) -> HostRows:
        """Return the next rows; the first ones after the last."""
        every = list(self.layers.values())
        return every[(every.index(rows) + 1) % len(every)]

    def _request(self, rows: HostRows, turn: int) -> None:
        """Queue the copies that fill a turn's buffer with a layer's tokens."""
        note, tokens = self.run.counter.separate(), rows.kv.longest
        assert rows.stored is not None
        after = (*self._free[turn % 2], rows.stored)
        split, marks = rows.recompute(turn, tokens, note, after, self._tables(turn))
        pairs = self._pairs(rows, turn, split, tokens)
        note.copy("load_kv", "h2d", [home for home, _ in pairs])
        brought = [(buffer, home) for home, buffer in pairs]
        marks.append(self.lanes.h2d(lambda: copy_all(brought), *after))
        self._coming = Arrival(marks, note, slice(split, tokens))

    def _store(self, rows: HostRows) -> None:
        """Queue the copies of new tokens from this turn's buffer to host memory."""
        part = slice(rows.kv.begins, rows.kv.longest)
        if rows.packing:
            tables = _halves(self.buffers[self._turn % 2])
            with self.run.counter.op("quantise") as record:
                for some, wide in zip(tables, self._tables(self._turn), strict=True):
                    rows.packing.put(record, wide[part], some, part)
        pairs = self._pairs(rows, self._turn, part.start, part.stop)
        self.run.counter.copy("store_kv", "d2h", [home for home, _ in pairs])
        rows.stored = self.lanes.d2h(lambda: copy_all(pairs), self.lanes.mark())
        self._free[self._turn % 2] = (self.lanes.mark(), rows.stored)

    def _pairs(
        self, rows: HostRows, turn: int, start: int, stop: int
    ) -> list[tuple[Tensor, Tensor]]:
        """Return host tables and buffers of the range of tokens that has changed."""
        first, found = rows.first, []
        tables = zip(rows.homes, self.buffers[turn % 2], strict=True)
        bounds = zip(rows.rows(start), rows.rows(stop), strict=True)
        for (home, buffer), (low, high) in zip(tables, bounds, strict=True):
            begin = max(low, first)
            if begin < high:
                found.append((home[begin - first : high - first], buffer[begin:high]))
        return found

    def _widen(self, rows: HostRows, part: slice) -> None:
        """Dequantise the tokens that a copy has brought to the buffer."""
        if rows.packing and part.start < part.stop:
            tables = _halves(self.buffers[self._turn % 2])
            with self.run.counter.op("dequantise") as record:
                for some, wide in zip(tables, self._tables(self._turn), strict=True):
                    numbers = rows.packing.read(record, some, part)
                    wide[part].copy_(numbers.view(wide[part].shape))


def _halves(tables: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Split tables into those of keys and those of values."""
    half = len(tables) // 2
    return tables[:half], tables[half:]


PROJECTIONS = ("qkv", "out", "up", "down")


@frozen
class Joined(Linear):
    """A matrix whose first outputs are streamed and whose other outputs stay on the GPU.

    Attributes
    ----------
    rest
        Weights that stay, (outputs, inputs).
    """

    rest: Tensor | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        """Hidden states (..., inputs) to (..., outputs)."""
        assert self.rest is not None
        out = torch.cat([F.linear(tensor, part) for part in (self.weight, self.rest)], dim=-1)
        return out if self.bias is None else out + self.bias

    def tensors(self) -> tuple[Tensor, ...]:
        """Return both parts of the matrix, and the bias if there is one."""
        assert self.rest is not None
        return (*super().tensors(), self.rest)


class StreamedWeights:
    """Streams a share of each layer's weight matrices from host memory to the GPU.

    Two buffers on the GPU hold the streamed part of one layer each; all other weights stay there.

    Parameters
    ----------
    pieces
        Number of copies per layer, one during each part of the batch.
    share
        Share of every matrix's outputs that is streamed, from 0 to 1.
    """

    def __init__(
        self, decoder: Decoder, transfers: Transfers, pieces: int, share: float = 1.0
    ) -> None:
        self.decoder, self.transfers, self.pieces, self.share = decoder, transfers, pieces, share
        self.homes = [self._home(layer) for layer in decoder.weights.layers]
        self.buffers = [self.homes[0].to(decoder.device, copy=True) for _ in range(2)]
        self._turn = -1  # layers served so far: even ones lie in the first buffer
        self._free = transfers.mark()  # when the other buffer has been used
        self._coming: list[tuple[Mark, NullCounter]] = []
        for piece in range(pieces):
            self.ahead(-1, piece)

    def layer(self, index: int) -> LayerWeights:
        """Wait for the weights of a layer, and return them; layers must be asked for in order."""
        self._turn += 1
        self._free = self.transfers.mark()
        for mark, note in self._coming:
            mark.wait()
            self.decoder.counter.merge(note)
        self._coming = []
        return self._view(index, self.buffers[self._turn % 2])

    def ahead(self, index: int, piece: int) -> None:
        """Start copying one piece of the next layer's weights.

        Parameters
        ----------
        index
            Index of the layer that computes.
        piece
            Index of the piece.
        """
        home = self.homes[(index + 1) % len(self.homes)]
        start, stop = (home.numel() * i // self.pieces for i in (piece, piece + 1))
        target, source = self.buffers[(self._turn + 1) % 2][start:stop], home[start:stop]
        note = self.decoder.counter.separate()
        note.copy("load_weights", "h2d", [source])

        def work() -> None:
            target.copy_(source, non_blocking=True)

        self._coming.append((self.transfers.h2d(work, self._free), note))

    def _streamed(self, layer: LayerWeights, name: str) -> Tensor:
        weight = _linear(layer, name).weight
        return weight[: round(self.share * len(weight))]

    def _home(self, layer: LayerWeights) -> Tensor:
        matrices = [self._streamed(layer, name) for name in PROJECTIONS]
        numbers = sum(w.numel() for w in matrices)
        home = self.transfers.host((numbers,), matrices[0].dtype)
        start = 0
        for weight in matrices:
            home[start : start + weight.numel()] = weight.flatten()
            start += weight.numel()
        return home

    def _view(self, index: int, buffer: Tensor) -> LayerWeights:
        layer, start = self.decoder.weights.layers[index], 0
        views: dict[str, Linear] = {}
        for name in PROJECTIONS:
            matrix, streamed = _linear(layer, name), self._streamed(layer, name)
            stop = start + streamed.numel()
            views[name] = Linear(buffer[start:stop].view(streamed.shape), matrix.bias)
            if len(rest := matrix.weight[len(streamed) :]):
                views[name] = Joined(views[name].weight, matrix.bias, rest)
            start = stop
        return replace(layer, **views)  # type: ignore[arg-type]


def _linear(layer: LayerWeights, name: str) -> Linear:
    matrix = getattr(layer, name)
    assert isinstance(matrix, Linear)
    return matrix
