"""Shares of caches and weights in host memory, which visit the GPU layer by layer.

Two buffers take turns: while one layer is attended to, the next one arrives in the other.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.axes import Placement
from kvsim.techniques.place import Place as Settings
from kvsim.validate.impl.base import Resident, together
from kvsim.validate.impl.cells import Cells
from kvsim.validate.impl.cpu_attention import CpuCells, LeavingPrompts
from kvsim.validate.impl.placing import Placing
from kvsim.validate.impl.selecting import Where
from kvsim.validate.impl.split import SplitCells
from kvsim.validate.impl.streaming import StreamedWeights
from kvsim.validate.model.attention import Pass
from kvsim.validate.model.weights import LayerWeights
from kvsim.validate.tally import Silent
from kvsim.validate.transfer import Mark, copy_all

if TYPE_CHECKING:
    from kvsim.validate.impl.composed import Composed

SENT_LATE = "the latest tokens are sent when they are packed; the prediction sends every token"


@dataclass
class Coming:
    """A layer's rows on their way to a buffer."""

    mark: Mark
    note: Silent


class Place(Placing):
    """A share of the rows of every layer, or all values, in host memory.

    References
    ----------
    .. [1] Y. Sheng et al., "FlexGen", ICML 2023, section 3.2.
    """

    def __init__(self, run: "Composed", part: Placement) -> None:
        super().__init__(run, part)
        assert isinstance(part, Settings)
        self.place = part
        self.visitors: dict[int, SplitCells] = {}  # by layer
        self.buffers: list[list[Tensor]] = []
        self._turn = 0  # visits so far: even ones use the first buffer
        self._free: list[tuple[Mark, ...]] = [(), ()]  # what each buffer's next filler waits for
        self._stored: dict[int, Mark] = {}  # when a layer's home took its last tokens
        self._coming: Coming | None = None
        self.leaving = LeavingPrompts(self.lanes(), run.tally) if part.cpu_share else None
        self.streamed: StreamedWeights | None = None
        if part.weights_host:
            self._refuse_columns()
            self.streamed = StreamedWeights(run.decoder, self.lanes(), 1, part.weights_host)

    def cells(self, kind: type[Cells], where: Where, slots: int) -> Cells:
        """Rows or values at home, where the share says so."""
        place, room = self.place, self.room(where)
        if not place.loads and self.leaving is None:
            return super().cells(kind, where, slots)
        stored, tally, host = where.parts.storage, self.run.tally, self.lanes().host
        self._refuse(kind, where)
        if self.leaving is not None:
            cells = CpuCells(stored, room, slots, tally, host)
            self.leaving.layers[where.layer] = cells
            return cells
        if not float(place.k_host):
            return kind(stored, room, slots, tally, host)  # type: ignore[call-arg]
        away = round(float(place.host_share) * room.sequences * room.heads)
        if not away:
            return super().cells(kind, where, slots)
        split = SplitCells(kind, stored, room, slots, tally, away, host)
        self.visitors[where.layer] = split
        if split.away.tails():
            self.differences = {"store_kv": SENT_LATE}
        return split

    def ready(self) -> None:
        """Buffers that have room for the largest layer."""
        if not self.visitors:
            return
        homes = [split.homes for split in self.visitors.values()]
        if any([h.shape[1:] for h in one] != [h.shape[1:] for h in homes[0]] for one in homes):
            raise InputError("place: layers that are stored differently cannot share buffers")
        largest = [max(parts, key=len) for parts in zip(*homes, strict=True)]
        device = self.run.decoder.device
        self.buffers = [[torch.zeros_like(h, device=device) for h in largest] for _ in "12"]

    def begin(self, layer: int, step: Pass) -> None:
        """Ask for the next layer, wait for this one."""
        if self.streamed and (step.kind != "prefill" or not step.starts[0]):
            self.streamed.ahead(layer, 0)
        if self.leaving is not None:
            self.leaving.begin(layer, step, self.run.prompt)
        if layer not in self.visitors:
            return
        cells, turn = self.visitors[layer], self._turn % 2
        cells.visit([b[: len(h)] for b, h in zip(self.buffers[turn], cells.homes, strict=True)])
        if step.kind == "prefill":
            if not step.starts[0]:
                for mark in self._free[turn]:
                    mark.wait()
            return
        coming, following = self._coming, self._after(layer)
        if following != layer:
            self._request(following, self._turn + 1)
        if coming:
            coming.mark.wait()
            self.run.tally.take(coming.note)

    def end(self, layer: int, step: Pass) -> None:
        """Send home what is new; the buffer is free when attention and copies are done."""
        if self.leaving is not None:
            self.leaving.end(layer, step, self.run.prompt)
        if layer not in self.visitors:
            return
        cells = self.visitors[layer]
        if step.kind == "prefill":
            if step.length < self.run.prompt:
                return
            cells.begins = 0  # all of it
        self._store(layer)
        self._turn += 1
        following = self._after(layer)
        if step.kind == "prefill":
            if following <= layer:
                self._request(following, self._turn)
        elif following == layer:  # one layer: the next step needs what this one stores
            self._request(layer, self._turn)

    def weights(self, layer: int) -> LayerWeights | None:
        """Those that have arrived, where they are streamed."""
        return self.streamed.layer(layer) if self.streamed else None

    def prompt_read(self) -> None:
        """The CPU attends from here on."""
        if self.leaving is not None:
            self.leaving.over()

    def resident(self) -> Resident:
        """Homes, and the buffers that layers take turns with."""
        if self.streamed is None:
            return self._caches()
        weights: Resident = {
            "gpu": {"weight buffers": self.streamed.buffers},
            "host": {"weights": self.streamed.homes},
        }
        return together(weights, self._caches())

    def _caches(self) -> Resident:
        if self.leaving is not None:
            homes = [home for cells in self.leaving.layers.values() for home in cells.homes]
            out = [t for pair in self.leaving.buffers for t in pair]
            return {"gpu": {"kv on the way out": out}, "host": {"kv": homes}}
        if not self.visitors:
            return {}
        homes = [home for split in self.visitors.values() for home in split.homes]
        return {"gpu": {"kv buffers": [t for b in self.buffers for t in b]}, "host": {"kv": homes}}

    def _refuse(self, kind: type[Cells], where: Where) -> None:
        """What only whole techniques do, and selections that change rows that are away."""
        place, selection = self.place, where.parts.selection
        self._refuse_columns()
        if place.cpu_share:
            if place.cpu_share < 1 or selection.chooses or selection.evicts != "never":
                raise InputError(
                    "place: in the real implementation the CPU attends to the whole cache; set "
                    "cpu_share=1, with no selection"
                )
            if where.parts.drafting.drafts:
                raise InputError("place: no real implementation takes drafts back from the host")
            return
        if not float(place.k_host):
            if float(place.v_host) != 1 or not kind.values_alone or not selection.chooses:
                raise InputError(
                    "place: values on the host are fetched one by one: all of them, by kcache or "
                    "shadowkv, stored token by token"
                )
        elif selection.evicts == "always" or selection.chooses:
            raise InputError(
                f"place: {selection.name} works on single rows, and no real implementation does "
                f"that to rows on the host"
            )
        if kind.by_position:
            raise InputError(
                f"place: {where.parts.storage.name} stores whole tokens, and no real "
                f"implementation has some of their heads on the host"
            )
        if getattr(where.parts.storage, "host", False):
            raise InputError("grouped: host=true runs within offload and kvpr, by themselves")
        if where.parts.drafting.drafts:
            raise InputError("place: no real implementation takes drafts back from the host")

    def _refuse_columns(self) -> None:
        """What whole techniques do by themselves, and weights of some layers or passes alone."""
        place, run = self.place, self.run
        if place.recomputes or place.states_host or place.parts > 1:
            raise InputError(
                "place: the real implementation has one part of the batch here; set parts=1. "
                "Recomputation and columns run as kvpr, offload and flexgen, by themselves"
            )
        if place.weights_host and any(parts.placement != place for parts in run.parts):
            raise InputError(
                "place: the real implementation streams weights of all layers alike; place them so"
            )
        if place.weights_host and run.gamma:
            raise InputError("place: no real implementation drafts with streamed weights")

    def _after(self, layer: int) -> int:
        """The next layer that visits, from the last one the first."""
        layers = list(self.visitors)
        return layers[(layers.index(layer) + 1) % len(layers)]

    def _request(self, layer: int, turn: int) -> None:
        """Queue the copy of a layer's rows to the buffer of a turn."""
        cells, note = self.visitors[layer], self.run.tally.apart()
        used = cells.in_use()
        pairs = [
            (buffer[:rows], home[:rows])
            for buffer, home, rows in zip(self.buffers[turn % 2], cells.homes, used, strict=True)
            if rows
        ]
        note.copy("load_kv", "h2d", [home for _, home in pairs])

        after = (*self._free[turn % 2], self._stored[layer])
        self._coming = Coming(self.lanes().h2d(lambda: copy_all(pairs), *after), note)

    def _store(self, layer: int) -> None:
        """Queue the copy home of what this visit has added."""
        cells, buffers = self.visitors[layer], self.buffers[self._turn % 2]
        new = zip(cells.homes, buffers, cells.untouched(), cells.in_use(), strict=True)
        pairs = [
            (home[first:last], buffer[first:last])
            for home, buffer, first, last in new
            if first < last
        ]
        self.run.tally.copy("store_kv", "d2h", [home for home, _ in pairs])

        stored = self.lanes().d2h(lambda: copy_all(pairs), self.lanes().mark())
        self._stored[layer] = stored
        self._free[self._turn % 2] = (self.lanes().mark(), stored)
