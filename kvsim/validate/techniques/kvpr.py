"""KVPR: part of an offloaded cache is recomputed while the rest of it is copied.

C. Jiang et al., "KVPR: Efficient LLM Inference with I/O-Aware KV Cache Partial Recomputation", ACL
Findings 2025, https://arxiv.org/abs/2411.17089.

The cache lives in host memory, and beside it the inputs X of every layer for the prompt's first
tokens. A step that finds s' tokens in the cache does, for every layer (section 3.2, figure 3b):

1. load_inputs   X[0:l] to the GPU, b l h numbers                               (equation 6)
2. recompute     K[0:l] = X[0:l] W_K, V[0:l] = X[0:l] W_V on the GPU             (equation 7),
   at the same time
   load_kv       K[l:s'], V[l:s'] to the GPU, 2 b (s' - l) h numbers            (equation 6)
3. attention      reads both parts from one buffer, like any cache
4. store_kv      the new token's keys and values to the host

The split l is the one that makes the layer's time shortest (equations 9 to 11); it is found for
every s' before anything runs, by the function that the prediction uses
(``choose_split`` in ``kvsim.techniques.papers.kvpr``).

Double buffering and prefetching (section 3.3): steps 1 and 2 of a layer are queued when the layer
before it begins to attend, into the one of two buffers that is free
(``parts.prefetch.PrefetchBuffers``, which also does ``load_kv`` and ``store_kv``). Copies each way
and the recomputation have streams of their own; homes are pinned. By columns, every layer serves
the parts of the batch one after another, and streamed weights stay for all of them
(``parts.prefetch.StreamedWeights``).

Where this departs from the paper: only the inputs of prompt tokens are stored, so l is at most the
prompt. Tokens that every step recomputes have no keys and values in host memory.
Recomputed keys are rotated to their positions (the paper's OPT has none to rotate). W_K and W_V are
not loaded before W_Q and W_O (figure 5): streamed weights come as one piece per layer.
"""

import numpy as np
import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.graph import Array, Point
from kvsim.models.model import LayerShape
from kvsim.techniques.axes.base import LayerPass
from kvsim.techniques.papers.kvpr import GATHERED, PLACED, TURNED, choose_split
from kvsim.techniques.papers.kvpr import Place as Settings
from kvsim.validate.counter import NullCounter, OpRecord
from kvsim.validate.model.architecture import rotate
from kvsim.validate.model.attention import Pass
from kvsim.validate.parts.prefetch import HostRows, TokenTables
from kvsim.validate.parts.selection import LayerContext, LayeredRun
from kvsim.validate.parts.store import Resident
from kvsim.validate.parts.tiered import MakeStore
from kvsim.validate.transfer import Mark, Transfers, copy_all

SMALL_SETTINGS = ("split={split}",)


class Kvpr(HostRows):
    """The KV cache of one layer in host memory, whose first tokens are recomputed in every pass.

    The layer's inputs for these tokens are kept in host memory too. Their keys and values are
    recomputed on the GPU while the keys and values of the other tokens are copied [1]_.

    References
    ----------
    .. [1] C. Jiang et al., "KVPR: Efficient LLM Inference with I/O-Aware KV Cache Partial
       Recomputation", ACL Findings 2025, https://arxiv.org/abs/2411.17089
    """

    recomputes = True

    def __init__(
        self, context: LayerContext, slots: int, lanes: Transfers, make: MakeStore
    ) -> None:
        run, place = context.run, context.parts.placement
        assert isinstance(place, Settings)
        self.run, self.lanes = run, lanes
        self.shared = run.shared(("layer inputs", place), lambda: _Shared(run, place))
        self.splits = self.shared.splits(context.layer)
        fewest, most = int(self.splits.min()), int(self.splits.max())
        super().__init__(context, slots, lanes, make, fewest)
        width = context.batch * run.model.hidden
        self.tables = TokenTables(context.parts.storage.stored, width, run.decoder.dtype)
        self.inputs = self.tables.tables(lanes.host, most)  # X[0:most], in host memory
        self.shared.layers.append(self)

    def split(self, cached: int) -> int:
        """Return the split l of a step with ``cached`` tokens in the cache. [tokens]"""
        return int(self.splits[min(cached - self.run.prompt, len(self.splits) - 1)])

    def ready(self) -> None:
        """Allocate the two GPU buffers for layer inputs, which all layers share."""
        self.shared.allocate()

    def store_inputs(self, tensor: Tensor, step: Pass, turn: int) -> None:
        """Store the layer inputs of a chunk of the prompt on the host, if any step needs them."""
        part = slice(step.starts[0], min(step.length, len(self.inputs[0])))
        if part.start >= part.stop:
            return
        buffer = self.shared.buffers[turn % 2]
        numbers = tensor[:, : part.stop - part.start].transpose(0, 1)  # token by token
        if self.tables.stored.packs:
            with self.run.counter.op("quantise_inputs") as record:
                self.tables.put(record, numbers, buffer, part)
        else:
            self.tables.put(OpRecord(), numbers, buffer, part)
        pairs = [(home[part], new[part]) for home, new in zip(self.inputs, buffer, strict=True)]
        self.run.counter.copy("store_inputs", "d2h", [home for home, _ in pairs])
        self.lanes.d2h(lambda: copy_all(pairs), self.lanes.mark())

    def recompute(
        self,
        turn: int,
        tokens: int,
        note: NullCounter,
        after: tuple[Mark, ...],
        tables: list[Tensor],
    ) -> tuple[int, list[Mark]]:
        """Start recomputing the keys and values of the first cached tokens of this layer.

        Queues the copy of the layer's inputs to the GPU and, on a second compute stream, the
        projection of these inputs to keys and values. Returns without waiting for either. The
        caller copies the keys and values of the remaining tokens at the same time.
        """
        split = self.split(tokens)
        if not split:
            return 0, []
        buffer = self.shared.buffers[turn % 2]
        pairs = [(new[:split], home[:split]) for home, new in zip(self.inputs, buffer, strict=True)]
        note.copy("load_inputs", "h2d", [home for _, home in pairs])
        arrived = self.lanes.h2d(lambda: copy_all(pairs), *after)

        def work() -> None:
            self._keys_values(buffer, split, tables, note)

        return split, [self.lanes.side(work, arrived, *after)]

    def _keys_values(
        self, buffer: list[Tensor], split: int, tables: list[Tensor], note: NullCounter
    ) -> None:
        """Compute K[0:l] = X[0:l] W_K and V[0:l] = X[0:l] W_V into attention's buffer."""
        decoder, layer, part = self.run.decoder, self.context.layer, slice(0, split)
        if self.tables.stored.packs:
            with note.op("dequantise_inputs") as record:
                numbers = self.tables.read(record, buffer, part)
        else:
            numbers = buffer[0][part]
        x = numbers.view(split, self.context.batch, self.run.model.hidden).transpose(0, 1)
        rotary = self.shared.turns  # cosine and sine of positions 0, 1, ...
        if rotary:
            rotary = (rotary[0][:, :, :split], rotary[1][:, :, :split])
        with note.op("recompute") as record:
            both = decoder.keys_values(layer, x, None)
            matrix = decoder.weights.layers[layer].qkv.rows(-self.run.model.kv_width)
            record.reads(x, *matrix.tensors()).writes(*both)
        with note.op("place_recomputed") as record:
            for tensors, accesses in (((x,), GATHERED), (both[:1], TURNED * bool(rotary)),
                                      (both, PLACED)):  # fmt: skip
                for _ in range(accesses // 2):
                    record.reads(*tensors).writes(*tensors)
            keys = rotate(both[0], *rotary) if rotary else both[0]
            for table, new in zip(tables, (keys, both[1]), strict=True):
                table[part] = new.flatten(0, 1).transpose(0, 1)

    def resident(self) -> Resident:
        """Return the layer's inputs on the host, and on the first layer the shared buffers."""
        held: Resident = {"gpu": {}, "host": {"layer inputs": self.inputs}}
        if self.shared.layers[0] is self:
            held["gpu"]["kv buffers"] = [t for some in self.shared.buffers for t in some]
        return held


class _Shared:
    """Objects shared by all layers of a placement: input buffers, and each step's split."""

    def __init__(self, run: LayeredRun, place: Settings) -> None:
        if place.split == "auto" and run.decoder.deployment is None:
            raise InputError("kvpr: the split rests on a machine; give one with --gpu")
        self.run, self.place = run, place
        self.layers: list[Kvpr] = []
        self.buffers: list[list[Tensor]] = []
        self.turns: tuple[Tensor, Tensor] | None = None  # rotary cosine and sine of positions
        self._splits: dict[LayerShape, Array] = {}

    def allocate(self) -> None:
        """Allocate two buffers for inputs, used alternately, and the rotary cosine and sine."""
        if self.buffers:
            return
        device = self.run.decoder.device
        largest = max((layer.inputs for layer in self.layers), key=lambda tables: len(tables[0]))
        self.buffers = [[torch.zeros_like(t, device=device) for t in largest] for _ in "12"]
        self.turns = self.run.decoder.turns(torch.arange(len(largest[0]), device=device)[None])

    def splits(self, layer: int) -> Array:
        """Return the split l of every step of a layer, from the prompt's end on. [tokens]

        It minimises max(t_recompute(l), t_load(s' - l)), with the time of X[0:l] before both where
        nothing else hides it (equations 10 and 11).
        """
        run, shape = self.run, self.run.shapes[layer]
        if shape not in self._splits:
            cached = np.arange(run.prompt, run.capacity, dtype=float)
            each = float(run.batch // self.place.tiles)
            p = Point(each, cached, 1.0, float(run.prompt), float(run.capacity))
            at = LayerPass(run.deployment, p, shape, run.parts[layer])
            found = np.broadcast_to(np.asarray(choose_split(self.place, at)), cached.shape)
            self._splits[shape] = np.minimum(found, run.prompt)  # of which inputs are stored
        return self._splits[shape]
