"""Which cached tokens stay, and which of them a query reads: the axis and its default."""

from typing import ClassVar, Literal

from kvsim.frozen import frozen
from kvsim.graph import Buffers, Number, Op
from kvsim.machines.deployment import Deployment
from kvsim.techniques.layers import LayerPass, Parts, attend
from kvsim.techniques.terms import Axis, Part

Evicts = Literal["never", "after the prompt", "always"]


@frozen
class Selection(Part):
    """Which cached tokens stay, and which of them a query reads."""

    name = "all"
    axis: ClassVar[Axis] = "selection"
    evicts: ClassVar[Evicts] = "never"
    per_head: ClassVar[bool] = False  # heads keep different tokens
    chooses: ClassVar[bool] = False  # what is read is known only when the query is
    borrows: ClassVar[bool] = True  # whether layers may attend to an earlier one's cache

    @property
    def queries(self) -> int:
        """Query tokens of a decoding pass that yields one token."""
        return 1

    @property
    def exact(self) -> bool:
        """Whether a query reads every token."""
        return type(self) is Selection

    def refuses(self, deployment: Deployment, beside: Parts) -> str:
        """Tokens that leave one by one have to be stored one by one."""
        if self.evicts == "always" and not beside.storage.by_token:
            return f"{self.name} drops single tokens, and {beside.storage.name} packs them together"
        return ""

    def kept(self, at: LayerPass) -> Number:
        """Cached tokens per sequence that stay after the pass. [tokens]"""
        return at.cached

    def prompt_kept(self, at: LayerPass) -> Number:
        """Tokens of the prompt that stay once it is read. [tokens]"""
        return at.p.length

    def limit(self, at: LayerPass) -> Number | None:
        """Tokens that a query of a decoding pass sees at most; None for all. [tokens]"""
        return None

    @property
    def scored(self) -> bool:
        """Whether the prompt's attention scores are needed, and so leave the chip."""
        return False

    def extra_bytes(self, at: LayerPass) -> Number:
        """What attention reads beyond the tokens that a query sees. [B]"""
        return 0.0

    def before(self, at: LayerPass) -> list[Op]:
        """Ops before attention in decoding."""
        return []

    def after(self, at: LayerPass) -> list[Op]:
        """Ops after attention: upkeep in decoding, the choice of what stays in prefill."""
        return []

    def attend(self, at: LayerPass) -> list[Op]:
        """Ops between the projections of one layer."""
        storage, place, drafting = at.storage, at.placement, at.drafting
        if not at.p.prefill:
            return [
                *place.runtime(at), *place.fetch(at), *storage.arrive(at), *place.store(at),
                *self.before(at), *place.attend(at), *storage.after(at), *self.after(at),
            ]  # fmt: skip
        if self.evicts == "never":
            return [
                *place.runtime(at), *storage.arrive(at), *place.store(at),
                *attend(at, place.waits(at)), *place.finish(at),
                *storage.after(at), *self.after(at), *drafting.after_prompt(at),
            ]  # fmt: skip
        return [  # only what stays is packed and sent away
            *place.runtime(at), *attend(at), *self.after(at),
            *storage.arrive(at), *place.store(at), *place.finish(at),
            *storage.after(at), *drafting.after_prompt(at),
        ]  # fmt: skip

    def borrow(self, at: LayerPass) -> list[Op]:
        """Ops of a layer that attends to the cache of an earlier one, as that keeps it.

        Nothing is packed, dropped or sent home; what lives on the host is fetched once more.
        """
        place = at.placement
        if at.p.prefill:
            return attend(at)
        return [*place.runtime(at), *place.fetch(at), *self.before(at), *place.attend(at)]

    def resident(self, at: LayerPass) -> Buffers:
        """What one layer keeps besides the cache: scores, bounds of pages, copies. [B]"""
        return {}

    def between(self, parts: Parts) -> Parts | None:
        """An extra pass between the prompt and the first decoding round, if there is one."""
        return None
