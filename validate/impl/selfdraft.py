"""Drafts by the model's own layers, over a small cache of their own or with narrower weights."""

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.axes import Drafting, Placement, Storage
from kvsim.techniques.layers import Parts
from kvsim.techniques.selfdraft import WINDOW
from kvsim.techniques.selfdraft import Selfdraft as Settings
from kvsim.techniques.snapkv import Snapkv as Observing
from kvsim.validate.impl.base import Resident
from kvsim.validate.impl.drafter import Drafter
from kvsim.validate.impl.quantspec import narrow
from kvsim.validate.impl.selecting import Where
from kvsim.validate.impl.snapkv import Snapkv
from kvsim.validate.model.attention import Pass
from kvsim.validate.model.weights import LayerWeights

if TYPE_CHECKING:
    from kvsim.validate.impl.composed import Composed


class Selfdraft(Drafter):
    """A draft cache is what SnapKV keeps of the prompt, and all since, in full precision.

    Verification writes its keys and values into both caches, so that a draft never attends to
    what an earlier draft made of accepted tokens. Where drafts read the layers' own caches, their
    tokens are overwritten by verification.

    References
    ----------
    .. [1] R. Sadhukhan et al., "MagicDec", ICLR 2025, section 4.
    """

    def __init__(self, run: "Composed", part: Drafting) -> None:
        super().__init__(run, part)
        assert isinstance(part, Settings)
        if part.reads not in ("snapkv", "all"):
            raise InputError(
                f"selfdraft: drafts that read {part.reads!r} run within magicdec and quantspec, by "
                f"themselves; composed ones read 'snapkv' or 'all'"
            )
        layers = run.decoder.weights.layers if part.weight_bits == 4 else ()
        self.narrow = [replace(w, up=narrow(w.up), down=narrow(w.down)) for w in layers]
        own = Parts(Observing(part.budget, WINDOW), Storage(), Placement(), Drafting())
        self.parts = own if part.reads == "snapkv" else None
        self.caches: list[Snapkv] = []

    def ready(self) -> None:
        """Make the draft caches, once layers can be made."""
        if self.parts is not None:
            layers = range(self.run.model.layers)
            self.caches = [Snapkv(Where(self.run, layer, self.parts)) for layer in layers]

    def read(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, step: Pass, whole: bool
    ) -> None:
        """Observe the prompt's last queries; cut the prompt when it is whole."""
        if not self.caches:
            return
        cache = self.caches[layer]
        cache.observe(queries, step)
        if whole:
            cache.cut(keys, values)

    def verified(self, layer: int, keys: Tensor, values: Tensor, step: Pass) -> None:
        """Into the draft cache too."""
        if self.caches:
            cache = self.caches[layer]
            cache.cells.append(keys, values, cache.spot(step))

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor | None:
        """Over the draft cache."""
        return self.caches[layer].attend(queries, keys, values, step) if self.caches else None

    def weights(self, layer: int) -> LayerWeights | None:
        """MLPs in four bits."""
        return self.narrow[layer] if self.narrow else None

    def resident(self) -> Resident:
        """Draft caches and draft MLPs."""
        held: Resident = {"gpu": {}}
        if self.caches:
            kept = [cache.cells.tensors()["kv"] for cache in self.caches]
            held["gpu"]["draft kv"] = [t for tensors in kept for t in tensors]
        matrices = [m for w in self.narrow for m in (w.up, w.down)]
        if matrices:  # biases are the model's own
            held["gpu"]["draft weights"] = [t for m in matrices for t in m.tensors()[:2]]
        return held
