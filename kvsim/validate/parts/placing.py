"""Where a layer's cache lives: the base of placements."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch import Tensor

from kvsim.techniques.axes.base import Placement
from kvsim.validate.model.attention import Pass
from kvsim.validate.model.decoder import Answer
from kvsim.validate.model.weights import LayerWeights
from kvsim.validate.parts.base import Resident
from kvsim.validate.parts.cells import CacheRoom, KvStore, on_the_gpu
from kvsim.validate.transfer import Transfers

if TYPE_CHECKING:
    from kvsim.validate.parts.composed import Composed
    from kvsim.validate.parts.selecting import LayerContext


class CachePlacement:
    """All layers that are placed alike; the default keeps them on the GPU."""

    replays = True  # whether nothing is copied beside compute
    differences: Mapping[str, str] = MappingProxyType({})
    """Ops and buffers that really differ from what is stated, and why."""

    def __init__(self, run: "Composed", part: Placement) -> None:
        self.run, self.part = run, part
        self._lanes: Transfers | None = None

    def cells(self, kind: type[KvStore], where: "LayerContext", slots: int) -> KvStore:
        """The storage of one layer."""
        return kind(where.parts.storage, self.room(where), slots, self.run.counter)

    def room(self, where: "LayerContext") -> CacheRoom:
        """Room on the GPU for the KV heads of a layer."""
        m, at = self.run.model, self.run.decoder
        heads = where.heads or m.kv_heads
        room = on_the_gpu(where.batch, heads, m.head_dim, at.dtype, at.device)
        common = self.run.shared_objects(where.rows)
        return replace(
            room,
            turns=at.turns,
            prompts=where.lengths,
            common=common,
            fresh=where.parts.selection.queries,
        )

    def lanes(self) -> Transfers:
        """Copies between GPU and host beside compute."""
        if self._lanes is None:
            self._lanes = Transfers(self.run.decoder.device, self.run.counter)
        return self._lanes

    def ready(self) -> None:
        """Every layer has its cells."""

    @property
    def prompts_one_by_one(self) -> bool:
        """Whether prompts of a part may be read one after another."""
        return True

    @property
    def attends_async(self) -> bool:
        """Whether attention of one part of the batch runs beside the compute of the next."""
        return False

    def answer(self, attend: Callable[[], Tensor]) -> Tensor | Answer:
        """Attention now, or on its way."""
        return attend()

    def layer_reached(self, where: "LayerContext") -> None:
        """Some pass after the prompt reaches a layer, whether or not it reads its cache."""

    def before_attention(self, where: "LayerContext", step: Pass) -> None:
        """A pass reaches a layer for some part of the batch: bring its cache."""

    def store_inputs(self, where: "LayerContext", tensor: Tensor, step: Pass) -> None:
        """A chunk of the prompt has reached a layer as x, (sequences, new, hidden)."""

    def after_attention(self, where: "LayerContext", step: Pass) -> None:
        """It has attended: send home what changed."""

    def round_done(self) -> None:
        """A round with drafts is over."""

    def prompt_done(self) -> None:
        """Every layer has read the prompt."""

    def weights(self, layer: int) -> LayerWeights | None:
        """The weights of a layer, where they do not stay on the GPU."""
        return None

    def resident(self) -> Resident:
        """What layers share because of it."""
        return {}

    def close(self) -> None:
        """End lanes, if there are any."""
        if self._lanes is not None:
            self._lanes.close()
