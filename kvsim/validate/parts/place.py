"""Shares of caches and weights in host memory: copied, recomputed, or attended to by the CPU."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.axes.base import Placement
from kvsim.techniques.axes.placement import HostPlacement as Settings
from kvsim.techniques.papers.kvpr import Place as Kvpr
from kvsim.validate.model.attention import Pass
from kvsim.validate.model.decoder import Answer
from kvsim.validate.model.weights import LayerWeights
from kvsim.validate.parts.base import Resident
from kvsim.validate.parts.cells import KvStore
from kvsim.validate.parts.cpu_attention import CpuStore, LeavingPrompts
from kvsim.validate.parts.placing import CachePlacement
from kvsim.validate.parts.portions import begins
from kvsim.validate.parts.recomputing import Recomputing
from kvsim.validate.parts.selecting import LayerContext
from kvsim.validate.parts.split import CpuRows, Made, TieredStore
from kvsim.validate.parts.streaming import StreamedWeights
from kvsim.validate.parts.visiting import PrefetchBuffers, host_rows

if TYPE_CHECKING:
    from kvsim.validate.parts.composed import Composed

SENT_LATE = "the latest tokens are sent when they are packed; the prediction sends every token"

WHOLE = 1e-6  # of a row, to which shares are exact
MOVED = ("load_kv", "store_kv", "quantise", "dequantise", "kv", "kv buffers")
ROUNDED = dict.fromkeys(MOVED, "a share of the cache is rounded to whole KV heads")


class Place(CachePlacement):
    """A share of the rows of every layer, or all values, in host memory.

    A row is a KV head of a sequence. By columns, layers serve the parts of the batch one after
    another, and their streamed weights arrive in as many pieces.

    References
    ----------
    .. [1] Y. Sheng et al., "FlexGen", ICML 2023, sections 3.2, 4.2 and 4.4.
    .. [2] J. He and J. Zhai, "FastDecode", arXiv:2403.11421, section 4.
    """

    replays = False

    def __init__(self, run: "Composed", part: Placement) -> None:
        super().__init__(run, part)
        assert isinstance(part, Settings)
        self._refuse_always(part)
        self.place, lanes = part, self.lanes()
        self.inputs: Recomputing | None = None
        if isinstance(part, Kvpr) and part.recomputes:
            self.inputs = Recomputing(run, lanes, part)
        self.visits: dict[tuple[int, int], PrefetchBuffers] = {}  # by layer and part
        self.own: list[PrefetchBuffers] = []  # those that other placements may share
        self.leaving = LeavingPrompts(lanes, run.counter)
        self.streamed: StreamedWeights | None = None
        if share := float(part.weights_host):
            self.streamed = run.shared(
                "streamed weights",
                lambda: StreamedWeights(run.decoder, lanes, part.tiles, share),
            )

    def cells(self, kind: type[KvStore], where: LayerContext, slots: int) -> KvStore:
        """Rows or values at home, where the shares say so."""
        place, room, lanes = self.place, self.room(where), self.lanes()
        rows = room.sequences * room.heads
        away, cpu = self._whole("host_share", rows), self._whole("cpu_share", rows)
        stored, counter = where.parts.storage, self.run.counter
        if place.loads or cpu:
            self._refuse(kind, where)
        if place.loads and not float(place.k_host):
            return kind(stored, room, slots, counter, lanes.host)  # type: ignore[call-arg]
        if not away and not cpu:
            return super().cells(kind, where, slots)
        if cpu == rows:
            whole = CpuStore(stored, room, slots, counter, lanes, returns=not self.attends_async)
            self.leaving.cells[where.visit] = whole
            return whole
        attended = CpuRows(cpu, partial(CpuStore, lanes=lanes)) if cpu else None

        def make(host: Made) -> TieredStore:
            return TieredStore(kind, stored, room, slots, counter, away, host, attended)

        split = self._visitor(where, slots, make) if away else make(lanes.host)
        if isinstance(split.cpu, CpuStore):
            self.leaving.cells[where.visit] = split.cpu
        if split.away is not None and split.away.gpu_tensors():
            self.differences = {**self.differences, "store_kv": SENT_LATE}
        return split

    @property
    def prompts_one_by_one(self) -> bool:
        """Not where rows are on the host: those of all sequences lie side by side, token by token.

        So a chunk of all prompts leaves as one copy, and one of a single prompt cannot.
        """
        return not float(self.place.k_host) and not float(self.place.cpu_share)

    def ready(self) -> None:
        """Buffers for everything that visits."""
        for visits in self.own:
            visits.ready()
        if self.inputs:
            self.inputs.ready()

    @property
    def attends_async(self) -> bool:
        """Whether the CPU has all of attention, and another part of the batch follows.

        Streamed weights of the layer before would be gone by the time that it answers.
        """
        place = self.place
        return place.cpu_share == 1 and place.tiles > 1 and self.streamed is None

    def answer(self, attend: Callable[[], Tensor]) -> Tensor | Answer:
        """The GPU goes on with another part while the CPU attends for this one."""
        if not self.attends_async:
            return attend()
        answer, device = self.lanes().submit(attend), self.run.decoder.device
        return lambda: answer().to(device)

    def layer_reached(self, where: LayerContext) -> None:
        """A part of the next layer's weights comes beside every part of the batch."""
        if self.streamed:
            self.streamed.ahead(where.layer, where.rows.start // where.batch)

    def before_attention(self, where: LayerContext, step: Pass) -> None:
        """Ask for the next layer, wait for this one."""
        if step.kind == "prefill" and begins(step):
            self.layer_reached(where)
        if where.visit in self.leaving.cells:
            self.leaving.begin(where, step)
        if where.visit in self.visits:
            self.visits[where.visit].begin(where, step)

    def store_inputs(self, where: LayerContext, tensor: Tensor, step: Pass) -> None:
        """Inputs go home where tokens are recomputed from them."""
        if where.visit in self.visits:
            self.visits[where.visit].read(where, tensor, step)

    def after_attention(self, where: LayerContext, step: Pass) -> None:
        """Send home what is new."""
        if where.visit in self.leaving.cells:
            self.leaving.end(where, step)
        if where.visit in self.visits:
            self.visits[where.visit].end(where, step)

    def weights(self, layer: int) -> LayerWeights | None:
        """Those that have arrived, where they are streamed."""
        return self.streamed.layer(layer) if self.streamed else None

    def round_done(self) -> None:
        """The drafts that stay are known."""
        for visits in self.own:
            visits.round_done()

    def prompt_done(self) -> None:
        """The CPU attends from here on."""
        if self.leaving.cells:
            self.leaving.over()

    def resident(self) -> Resident:
        """Homes, and the buffers that layers take turns with."""
        leaving, inputs = self.leaving, self.inputs
        gpu: dict[str, list[Tensor]] = {}
        host: dict[str, list[Tensor]] = {}
        if self.streamed and self.run.placements[0] is self:  # all layers share them
            gpu["weight buffers"], host["weights"] = self.streamed.buffers, self.streamed.homes
        buffers = [tables for visits in self.own for tables in visits.buffers]
        buffers += inputs.buffers if inputs else []
        homes = [home for visits in self.own for home in visits.homes()]
        homes += [home for cells in leaving.cells.values() for home in cells.homes]
        if self.visits or leaving.cells:
            gpu["kv buffers"] = [t for tables in buffers for t in tables]
            host["kv"] = homes
        if leaving.cells:
            gpu["kv on the way out"] = [t for pair in leaving.buffers for t in pair]
        if inputs:
            host["layer inputs"] = inputs.tensors()
        return {"gpu": gpu, "host": host}

    def _whole(self, share: str, rows: int) -> int:
        """So many rows, of a KV head each, are a share of them."""
        asked = float(getattr(self.place, share)) * rows
        if abs(asked - round(asked)) > WHOLE:
            if share == "cpu_share":
                raise InputError(
                    f"place: {share} of {rows} KV heads of sequences is {asked:g} of them; choose "
                    f"a multiple of 1/{rows}"
                )
            self.differences = {**self.differences, **ROUNDED}
        return round(asked)

    def _visitor(
        self, where: LayerContext, slots: int, make: Callable[[Made], TieredStore]
    ) -> TieredStore:
        """One more that visits, with those that are stored as it is."""
        lanes, own = self.lanes(), self.own
        visitor = host_rows(where, slots, lanes, self.inputs, make)

        def first() -> PrefetchBuffers:
            own.append(PrefetchBuffers(self.run, lanes))
            return own[-1]

        key = tuple((home.shape[1:], home.dtype) for home in visitor.homes)
        self.visits[where.visit] = visits = self.run.shared(("visits", key), first)
        visits.visitors[where.visit] = visitor
        return visitor.cells

    def _refuse(self, kind: type[KvStore], where: LayerContext) -> None:
        """Selections that change rows that are away, and storages whose heads cannot part."""
        place, selection, storage = self.place, where.parts.selection, where.parts.storage
        if not float(place.k_host) and not place.cpu_share:
            if float(place.v_host) != 1 or not kind.fetches_values or not selection.chooses:
                raise InputError(
                    "place: values on the host are fetched one by one: all of them, by kcache or "
                    "shadowkv, stored token by token"
                )
            if storage.read != storage.stored:
                raise InputError("place: values that are fetched one by one are read as stored")
        elif selection.evicts == "always" or selection.chooses:
            raise InputError(
                f"place: {selection.name} works on single rows, and no real implementation does "
                f"that to rows on the host"
            )
        if kind.by_position:
            raise InputError(
                f"place: {storage.name} stores whole tokens, and no real implementation has some "
                f"of their heads on the host"
            )

    def _refuse_always(self, place: Settings) -> None:
        """Shares that no run here has, and weights of some layers or passes alone."""
        run = self.run
        if place.states_host:
            raise InputError(
                "place: the real implementation keeps hidden states on the GPU; set states_host=0 "
                "(flexgen:states_gpu=100)"
            )
        if place.recomputes and float(place.host_share) < 1:
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
