"""Drafts by the model's own layers, over a small cache of their own or with narrower weights."""

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from kvsim.errors import InputError
from kvsim.models.model import LayerShape
from kvsim.techniques.axes.base import Drafting, Parts, Placement, Selection, Storage
from kvsim.techniques.axes.drafting import SINK, WINDOW, DraftCache
from kvsim.techniques.axes.drafting import Selfdraft as Settings
from kvsim.techniques.papers.snapkv import Snapkv as Observing
from kvsim.validate.kernels.weights import int4_matrix
from kvsim.validate.model.attention import Pass
from kvsim.validate.model.weights import LayerWeights, Linear, Matrix
from kvsim.validate.parts.base import Resident
from kvsim.validate.parts.draft_ring import DraftRing
from kvsim.validate.parts.drafter import Drafter, Visit
from kvsim.validate.parts.hierarchical import Hierarchical
from kvsim.validate.techniques.snapkv import Snapkv

if TYPE_CHECKING:
    from kvsim.validate.parts.composed import Composed


class Selfdraft(Drafter):
    """Drafts read the layers' own caches, upper halves of them, or small caches of their own.

    These are in full precision: attention sinks and a window, or what SnapKV keeps of the prompt
    and all since.

    Verification writes its keys and values into both caches, so that a draft never attends to
    what an earlier draft made of accepted tokens. Where drafts read the layers' own caches, their
    tokens are overwritten by verification.

    References
    ----------
    .. [1] R. Sadhukhan et al., "MagicDec", ICLR 2025, section 4.
    .. [2] R. Tiwari et al., "QuantSpec", ICML 2025, algorithm 1. Weights are rounded to
       nearest; the authors' came from a calibrated quantiser.
    """

    def __init__(self, run: "Composed", part: Drafting) -> None:
        super().__init__(run, part)
        assert isinstance(part, Settings)
        self.reads = part.reads
        layers = run.decoder.weights.layers if part.weight_bits == 4 else ()
        self.narrow = [replace(w, up=narrow(w.up), down=narrow(w.down)) for w in layers]
        self.seen: Selection | None = None  # of caches that are the drafts' own
        always = {"streamingllm": SINK, "snapkv": WINDOW}.get(part.reads, 0)
        if always and part.budget <= always:
            raise InputError(
                f"selfdraft: budget={part.budget:g} leaves nothing beside the {always} tokens that "
                f"drafts over {part.reads} always keep; choose more"
            )
        if part.reads == "streamingllm":
            self.seen = DraftCache(part.budget, part.gamma)
        elif part.reads == "snapkv":
            self.seen = Observing(part.budget, WINDOW)
        self.caches: dict[tuple[int, int], DraftRing | Observed] = {}  # by layer and part

    def ready(self) -> None:
        """Make the draft caches, once layers can be made."""
        if self.seen is not None:
            ring = self.reads == "streamingllm"
            kind: type[DraftRing | Observed] = DraftRing if ring else Observed
            own = Parts(self.seen, Storage(), Placement(), Drafting())
            places = [replace(layer.context, parts=own) for layer in self.run.layers]
            self.caches = {place.visit: kind(place) for place in places}
        for layer in self.run.layers:
            if self.reads == "upper" and isinstance(layer.cells, Hierarchical):
                layer.cells.drafts_read_upper = True

    def observe(self, visit: Visit, queries: Tensor, step: Pass) -> None:
        """The prompts' last queries choose what a small cache keeps."""
        if self.caches:
            self.caches[visit].observe(queries, step)

    def store_prompt(self, visit: Visit, keys: Tensor, values: Tensor) -> None:
        """Small caches keep some of the prompts."""
        if self.caches:
            self.caches[visit].cut(keys, values)

    def store_verified(self, visit: Visit, keys: Tensor, values: Tensor, step: Pass) -> None:
        """Into the draft cache too."""
        if self.caches:
            cache = self.caches[visit]
            cache.cells.append(keys, values, cache.slot_range(step))

    def attend(
        self, visit: Visit, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor | None:
        """Over the draft cache."""
        return self.caches[visit].attend(queries, keys, values, step) if self.caches else None

    def weights(self, layer: int) -> LayerWeights | None:
        """MLPs in four bits."""
        return self.narrow[layer] if self.narrow else None

    def resident(self) -> Resident:
        """Draft caches and draft MLPs."""
        held: Resident = {"gpu": {}}
        if self.caches:
            kept = [cache.cells.tensors()["kv"] for cache in self.caches.values()]
            held["gpu"]["draft kv"] = [t for tensors in kept for t in tensors]
        matrices = [m for w in self.narrow for m in (w.up, w.down)]
        if matrices:  # biases are the model's own
            held["gpu"]["draft weights"] = [t for m in matrices for t in m.tensors()[:2]]
        return held


class Observed(Snapkv):
    """SnapKV's choice for drafts: they need not be right, so that windows do not matter to them."""

    def refuse_windows(self) -> None:
        """All that is kept is seen."""
        self.shape = LayerShape()


def narrow(matrix: Matrix) -> Matrix:
    """A matrix rounded to four bits."""
    assert isinstance(matrix, Linear)
    return int4_matrix(matrix.weight, matrix.bias)
