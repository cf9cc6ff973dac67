"""Who proposes tokens: the axis and its default, nothing."""

from typing import ClassVar, Self

from kvsim.frozen import frozen
from kvsim.graph import Buffers, Number, Op, Point, Step
from kvsim.machines.deployment import Deployment
from kvsim.techniques.layers import LayerPass, Parts
from kvsim.techniques.terms import Axis, Part


@frozen
class Drafting(Part):
    """Who proposes tokens that one pass of the model then verifies; by default nothing does."""

    name = "none"
    axis: ClassVar[Axis] = "drafting"

    @property
    def exact(self) -> bool:
        """Verified tokens are the model's own."""
        return True

    @property
    def drafts(self) -> int:
        """Tokens proposed per round."""
        return 0

    @property
    def accepted(self) -> float:
        """Drafts accepted per round, on average."""
        return 0.0

    @property
    def assumes(self) -> str:
        """What its speed rests on that the user has not said, if anything."""
        return ""

    def with_rounds(self, drafts: int | None = None, acceptance: float | None = None) -> Self:
        """The same with other drafts per round, or another acceptance (accepted over drafted)."""
        return self

    def own_pass(self, point: Point, parts: Parts) -> Parts | None:
        """How the model's own layers make a draft at that point; None if others make it."""
        return None

    def steps(self, deployment: Deployment, point: Point) -> tuple[Step, ...]:
        """The draft passes of a round that are not the model's own."""
        return ()

    def prompt_steps(self, deployment: Deployment, point: Point) -> tuple[Step, ...]:
        """What else reads the prompt."""
        return ()

    def after_prompt(self, at: LayerPass) -> list[Op]:
        """What a layer does for the drafts once it has read the prompt."""
        return []

    def extra_bytes(self, at: LayerPass) -> Number:
        """What verification moves for the drafts within the attention kernel. [B]"""
        return 0.0

    @property
    def room(self) -> int:
        """Tokens for which the layers' own caches need more room. [tokens]"""
        return 0

    def resident(self, at: LayerPass) -> Buffers:
        """What a layer keeps for the drafts beside its cache. [B]"""
        return {}

    def beside_weights(self, at: LayerPass) -> Buffers:
        """Weights that a layer has for the drafts beside its own. [B]"""
        return {}

    def beside(self, deployment: Deployment, point: Point) -> Buffers:
        """What is kept for the drafts outside the model's layers: another model. [B]"""
        return {}
