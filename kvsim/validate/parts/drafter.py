"""Who proposes tokens in a composition: the base, which proposes none."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch import Tensor

from kvsim.techniques.axes.base import Drafting
from kvsim.validate.model.attention import Pass
from kvsim.validate.model.weights import LayerWeights
from kvsim.validate.parts.base import Resident

if TYPE_CHECKING:
    from kvsim.validate.parts.composed import Composed
    from kvsim.validate.run import Generation

PACKED_EARLY = "drafts are packed before it is known which stay; the prediction packs those that do"

Visit = tuple[int, int]
"""A layer, and the first sequence of a part of the batch."""


class Drafter:
    """What drafts of the whole model need beside the layers' own caches."""

    differences: Mapping[str, str] = MappingProxyType({"quantise": PACKED_EARLY})
    """Ops and buffers that really differ from what is stated, and why."""

    def __init__(self, run: "Composed", part: Drafting) -> None:
        self.run, self.part = run, part

    def ready(self) -> None:
        """Every layer of the model has its cache."""

    def observe(self, visit: Visit, queries: Tensor, step: Pass) -> None:
        """A chunk of some prompts has been attended to by queries (sequences, heads, new, dim)."""

    def store_prompt(self, visit: Visit, keys: Tensor, values: Tensor) -> None:
        """A layer has read its prompts, (batch, KV heads, longest prompt, dim)."""

    def store_verified(self, visit: Visit, keys: Tensor, values: Tensor, step: Pass) -> None:
        """New tokens of a pass that verifies."""

    def attend(
        self, visit: Visit, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor | None:
        """Attention of a draft; none where it reads the layer's own cache."""
        return None

    def on_layer_output(self, layer: int, hidden: Tensor, step: Pass) -> None:
        """A pass has left a layer of the model with these hidden states."""

    def begin(self, generation: "Generation") -> None:
        """The prompt is read by the model."""

    def propose(self, generation: "Generation", tokens: Tensor, ahead: int) -> Tensor | None:
        """Logits of a draft (batch, 1, vocab); none where the model's own layers make it.

        Parameters
        ----------
        ahead : drafts of this round so far. [tokens]
        """
        return None

    def lookup(self, generation: "Generation", count: int) -> list[Tensor] | None:
        """Drafts (batch,) that are no model's; none where one makes them."""
        return None

    def weights(self, layer: int) -> LayerWeights | None:
        """What a layer is multiplied with in a draft, if that differs."""
        return None

    def resident(self) -> Resident:
        """What is kept for drafts."""
        return {}
