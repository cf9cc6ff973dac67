"""Placement of layers' caches on the GPU, or of a share of them in host memory."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.axes.base import Placement
from kvsim.techniques.axes.placement import HostPlacement as Settings
from kvsim.techniques.papers.kvpr import Place as SplitPlacement
from kvsim.validate.model.attention import Pass
from kvsim.validate.model.decoder import Answer
from kvsim.validate.model.weights import LayerWeights
from kvsim.validate.parts.host_rows import PromptStages
from kvsim.validate.parts.prefetch import HostRows, PrefetchBuffers, StreamedWeights
from kvsim.validate.parts.selection import LayerContext, LayeredRun
from kvsim.validate.parts.store import CacheRoom, Host, KvStore, Resident, join_resident
from kvsim.validate.parts.tiered import (
    CpuStore,
    MakeStore,
    TieredStore,
)
from kvsim.validate.registry import find_part
from kvsim.validate.transfer import Transfers

SENT_LATE = "the latest tokens are sent when they are packed; the prediction sends every token"
SHARE_TOLERANCE = 1e-6  # of a row
PLACED_OPS = ("load_kv", "store_kv", "quantise", "dequantise", "kv", "kv buffers")
ROUNDED_HEADS = dict.fromkeys(PLACED_OPS, "a share of the cache is rounded to whole KV heads")


class CachePlacement:
    """Placement of the caches of a group of layers; this base class keeps them on the GPU."""

    replays = True  # whether nothing is copied beside compute
    differences: Mapping[str, str] = MappingProxyType({})
    """Ops and buffers that really differ from what is stated, and why."""

    def __init__(self, run: LayeredRun, part: Placement) -> None:
        self.run, self.part = run, part
        self._lanes: Transfers | None = None

    def make_store(self, kind: type[KvStore], where: LayerContext, slots: int) -> KvStore:
        """Create the storage of one layer.

        Parameters
        ----------
        kind
            Class of the storage.
        where
            The layer, and the part of the batch.
        slots
            Tokens per sequence that there has to be room for. [tokens]
        """
        return kind(self.room(where, slots))

    def room(self, where: LayerContext, slots: int) -> CacheRoom:
        """Describe the storage that a layer needs on the GPU."""
        m, at, parts = self.run.model, self.run.decoder, where.parts
        sizes = where.batch, where.heads or m.kv_heads, m.head_dim, at.dtype, at.device
        more = at.turns, self.run.prompt, parts.selection.queries
        common = self.run.shared_objects(where.rows)
        return CacheRoom(parts.storage, slots, self.run.counter, *sizes, *more, common)

    def lanes(self) -> Transfers:
        """Return the streams on which copies between GPU and host run beside compute."""
        if self._lanes is None:
            self._lanes = Transfers(self.run.decoder.device, self.run.counter)
        return self._lanes

    def ready(self) -> None:
        """Allocate shared buffers; called when every layer has its storage."""

    @property
    def prompts_one_by_one(self) -> bool:
        """Whether the prompts of one part of the batch may be read one after another."""
        return True

    @property
    def attends_async(self) -> bool:
        """Whether attention of one part of the batch runs beside the compute of the next."""
        return False

    def answer(self, attend: Callable[[], Tensor]) -> Tensor | Answer:
        """Run attention now, or start it and return a function that waits for it.

        Parameters
        ----------
        attend
            Function that computes attention, (sequences, heads, new, dim).
        """
        return attend()

    def layer_reached(self, where: LayerContext) -> None:
        """Hook at the start of each layer of a decoding pass, even one without attention."""

    def before_attention(self, where: LayerContext, tensor: Tensor, step: Pass) -> None:
        """Bring a layer's cache to the GPU for a pass over part of the batch.

        Parameters
        ----------
        where
            The layer, and the part of the batch.
        tensor
            Normed hidden states that the layer's projections read, (sequences, new, hidden), from
            which keys and values can be computed again.
        step
            The pass, with sequences counted within their part of the batch.
        """

    def after_attention(self, where: LayerContext, step: Pass) -> None:
        """Hook after attention, which copies new tokens of a layer's cache to the host."""

    def round_done(self) -> None:
        """Hook at the end of a round with drafts."""

    def prompt_done(self) -> None:
        """Hook at the end of prefill, after all layers."""

    def weights(self, layer: int) -> LayerWeights | None:
        """Return the weights of a layer that are not always on the GPU.

        Returns
        -------
        LayerWeights or None
            The weights; None if all of them stay on the GPU.
        """
        return None

    def resident(self) -> Resident:
        """Return the tensors that this placement allocates, such as buffers that layers share.

        Returns
        -------
        Resident
            Lists of tensors by memory tier and buffer name; empty in this base class.
        """
        return {}

    def shutdown(self) -> None:
        """End the copy streams, if there are any."""
        if self._lanes is not None:
            self._lanes.shutdown()


class Gpu(CachePlacement):
    """Placement of whole caches on the GPU."""


class Place(CachePlacement):
    """Placement of a share of every layer's cache rows, or of all values, in host memory [1]_ [2]_.

    A row is the cache of one KV head of one sequence. Layers process the parts of the batch one
    after another, while streamed weights arrive in as many pieces.

    References
    ----------
    .. [1] Y. Sheng et al., "FlexGen", ICML 2023, sections 3.2, 4.2 and 4.4,
       https://arxiv.org/abs/2303.06865
    .. [2] J. He and J. Zhai, "FastDecode", section 4, https://arxiv.org/abs/2403.11421
    """

    replays = False

    def __init__(self, run: LayeredRun, part: Placement) -> None:
        super().__init__(run, part)
        assert isinstance(part, Settings)
        self.recomputes = isinstance(part, SplitPlacement) and part.recomputes
        self._refuse_always(part)
        self.place, lanes = part, self.lanes()
        self.rows: dict[tuple[int, int], HostRows] = {}  # by layer and part
        self.buffers: dict[tuple[int, int], PrefetchBuffers] = {}  # those that bring them
        self.own: list[PrefetchBuffers] = []  # those of them that other placements may share
        self.on_cpu: dict[tuple[int, int], CpuStore] = {}  # what the CPU attends to
        self.stages = PromptStages(lanes, run.counter, "store_kv")  # of prompts on their way there
        self.streamed: StreamedWeights | None = None
        self.streams = False  # whether it has made what all layers share
        if share := float(part.weights_host):

            def stream() -> StreamedWeights:
                self.streams = True
                return StreamedWeights(run.decoder, lanes, part.tiles, share)

            self.streamed = run.shared("streamed weights", stream)

    def make_store(self, kind: type[KvStore], where: LayerContext, slots: int) -> KvStore:
        """Create the storage of one layer, with the share of rows in host memory that is set.

        Raises
        ------
        InputError
            If the storage cannot be divided over GPU and host.
        """
        place, room, lanes = self.place, self.room(where, slots), self.lanes()
        rows = room.sequences * room.heads
        away, cpu = self._count_rows("host_share", rows), self._count_rows("cpu_share", rows)
        if place.loads or cpu:
            self._refuse(kind, where)
        if place.loads and not float(place.k_host):
            return kind(replace(room, values=lanes.host))
        if not away and not cpu:
            return super().make_store(kind, where, slots)
        if cpu == rows:
            whole = self.on_cpu[where.visit] = CpuStore(room, lanes, not self.attends_async)
            return whole

        def make(host: Host) -> TieredStore:
            return TieredStore(kind, room, away, cpu, host, lanes)

        split = self._host_rows(where, slots, make) if away else make(lanes.host)
        if split.cpu is not None:
            self.on_cpu[where.visit] = split.cpu
        if split.away is not None and split.away.gpu_tensors():
            self.differences = {**self.differences, "store_kv": SENT_LATE}
        return split

    @property
    def prompts_one_by_one(self) -> bool:
        """Whether the prompts of one part of the batch may be read one after another.

        False with a share of the rows in host memory: there a token of all sequences is contiguous,
        so that chunks of all prompts together are copied at once.
        """
        return not float(self.place.k_host) and not float(self.place.cpu_share)

    def ready(self) -> None:
        """Allocate the GPU buffers that rows from host memory are copied to."""
        for buffers in self.own:
            buffers.ready()

    @property
    def attends_async(self) -> bool:
        """Whether the CPU computes all attention while the GPU works on the next part of the batch.

        False with streamed weights, as those of the layer would be overwritten too early.
        """
        place = self.place
        return place.cpu_share == 1 and place.tiles > 1 and self.streamed is None

    def answer(self, attend: Callable[[], Tensor]) -> Tensor | Answer:
        """Run attention now, or on the CPU while the GPU works on the next part of the batch."""
        if not self.attends_async:
            return attend()
        answer, device = self.lanes().submit(attend), self.run.decoder.device
        return lambda: answer().to(device)

    def layer_reached(self, where: LayerContext) -> None:
        """Start copying a piece of the next layer's weights, if weights are streamed."""
        if self.streamed:
            self.streamed.ahead(where.layer, where.rows.start // where.batch)

    def before_attention(self, where: LayerContext, tensor: Tensor, step: Pass) -> None:
        """Start copying the next layer's rows to the GPU, and wait for this layer's."""
        if step.kind == "prefill" and step.begins_prompt:
            self.layer_reached(where)
        kv = self.on_cpu.get(where.visit)
        if kv and step.kind == "prefill":
            kv.buffers = self.stages.take(lambda: [kv.room.zeros(self.run.prompt) for _ in "kv"])
        if where.visit in self.buffers:
            self.buffers[where.visit].before_attention(where, tensor, step)

    def after_attention(self, where: LayerContext, step: Pass) -> None:
        """Copy the new keys and values of a layer to host memory."""
        kv, prompt = self.on_cpu.get(where.visit), self.run.prompt
        if kv and step.kind == "prefill" and step.length >= prompt:
            pairs = zip(kv.homes, kv.buffers, strict=True)
            tokens = kv.filled or prompt
            self.stages.send([(home[:, :, :tokens], new[:, :, :tokens]) for home, new in pairs])
            kv.buffers = []
        if where.visit in self.buffers:
            self.buffers[where.visit].after_attention(where, step)

    def weights(self, layer: int) -> LayerWeights | None:
        """Return the weights of a layer that were streamed; None if weights stay on the GPU."""
        return self.streamed.layer(layer) if self.streamed else None

    def round_done(self) -> None:
        """Start copying rows for the next round, once it is known which drafts stay."""
        for buffers in self.own:
            buffers.round_done()

    def prompt_done(self) -> None:
        """Wait for the prompts' copies to host memory, where the CPU attends from then on."""
        self.stages.finish()
        if self.on_cpu and self.run.decoder.device.type == "cuda":
            torch.cuda.synchronize(self.run.decoder.device)

    def resident(self) -> Resident:
        """Return the rows in host memory and the shared GPU buffers, by tier and name."""
        own = [rows for some in self.own for rows in some.layers.values()]
        gpu: dict[str, list[Tensor]] = {}
        host: dict[str, list[Tensor]] = {}
        if self.streamed and self.streams:  # all layers share them
            gpu["weight buffers"], host["weights"] = self.streamed.buffers, self.streamed.homes
        if self.buffers or self.on_cpu:
            gpu["kv buffers"] = [t for some in self.own for tables in some.buffers for t in tables]
            host["kv"] = [home for rows in own for home in rows.homes]
            host["kv"] += [home for store in self.on_cpu.values() for home in store.homes]
        if self.on_cpu:
            gpu["kv on the way out"] = [t for pair in self.stages.buffers for t in pair]
        inputs = (rows.resident() for rows in self.rows.values())
        return join_resident({"gpu": gpu, "host": host}, *inputs)

    def _count_rows(self, share: str, rows: int) -> int:
        """Return the number of rows, of a KV head each, that a share of them is."""
        asked = float(getattr(self.place, share)) * rows
        if abs(asked - round(asked)) > SHARE_TOLERANCE:
            if share == "cpu_share":
                raise InputError(
                    f"place: {share} is {asked:g} of {rows} KV heads of sequences; choose a "
                    f"multiple of 1/{rows}"
                )
            self.differences = {**self.differences, **ROUNDED_HEADS}
        return round(asked)

    def _host_rows(self, where: LayerContext, slots: int, make: MakeStore) -> TieredStore:
        """Create the rows of a layer in host memory; equal layers share buffers."""
        kind = find_part(HostRows, self.place, "kvpr") if self.recomputes else HostRows
        rows = self.rows[where.visit] = kind(where, slots, self.lanes(), make)

        def make_buffers() -> PrefetchBuffers:
            self.own.append(PrefetchBuffers(self.run, self.lanes()))
            return self.own[-1]

        key = tuple((home.shape[1:], home.dtype) for home in rows.homes)
        self.buffers[where.visit] = buffers = self.run.shared(("prefetch", key), make_buffers)
        buffers.layers[where.visit] = rows
        return rows.kv

    def _refuse(self, kind: type[KvStore], where: LayerContext) -> None:
        """Refuse selections and storages that cannot have rows in host memory."""
        place, selection, storage = self.place, where.parts.selection, where.parts.storage
        if not float(place.k_host) and not place.cpu_share:
            if float(place.v_host) != 1 or not kind.fetches_values or not selection.chooses:
                raise InputError(
                    "place: values_host has to be 1, with a technique that fetches single values "
                    "from storage by token, such as kcache or shadowkv"
                )
            if storage.read != storage.stored:
                raise InputError("place: values that are fetched one by one are read as stored")
        elif selection.evicts == "always" or selection.chooses:
            raise InputError(
                f"place: {selection.name} evicts or chooses single tokens, which validate cannot "
                f"run with a cache in host memory; keep the cache on the GPU"
            )
        if kind.by_position:
            raise InputError(
                f"place: {storage.name} stores whole tokens, and no real implementation has some "
                f"of their heads on the host"
            )

    def _refuse_always(self, place: Settings) -> None:
        """Refuse shares that no real run supports, and weights of only some layers or passes."""
        run = self.run
        if place.fills_drive:
            raise InputError(
                "place: the real implementation keeps nothing on a disk; set weights_disk, "
                "cache_disk and states_disk to 0"
            )
        if place.states_host:
            raise InputError(
                "place: the real implementation keeps hidden states on the GPU; set states_host=0 "
                "(flexgen:states_gpu=100)"
            )
        if self.recomputes and float(place.host_share) < 1:
            raise InputError(
                "place: the real implementation recomputes keys and values of all heads; set "
                "host_share=1 beside split"
            )
        if place.weights_host and any(
            parts.placement.weights_alone() != place.weights_alone() for parts in run.parts
        ):
            raise InputError(
                "place: the real implementation streams weights of all layers alike; place them so"
            )
        if place.weights_host and getattr(run.technique.drafting, "weight_bits", 16) != 16:
            raise InputError(
                "place: no real implementation drafts with streamed weights that are narrower"
            )
