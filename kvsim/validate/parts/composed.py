"""A technique as its parts: in every layer a selection over a storage where a placement puts it."""

from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.graph import Tier
from kvsim.techniques.axes.base import Part, Parts, Placement
from kvsim.techniques.technique import Technique
from kvsim.validate.counter import Kind, size
from kvsim.validate.model.attention import Pass
from kvsim.validate.model.decoder import Answer, Decoder
from kvsim.validate.model.weights import LayerWeights
from kvsim.validate.parts.base import Implementation, Resident, together
from kvsim.validate.parts.cells import KvStore, Made, SharedObjects
from kvsim.validate.parts.drafter import Drafter
from kvsim.validate.parts.fp16 import Fp16
from kvsim.validate.parts.placing import CachePlacement
from kvsim.validate.parts.portions import by_layer, ends, equal_parts, of_part
from kvsim.validate.parts.registry import Piece, find_part
from kvsim.validate.parts.replaying import branch, op_shares, reads_all_slots, why_eager
from kvsim.validate.parts.selecting import LayerCache, LayerContext, refuse_taking_back
from kvsim.validate.parts.speculation import Speculative
from kvsim.validate.session.deployed import deployed

if TYPE_CHECKING:
    from kvsim.validate.run import Generation


class Composed(Speculative):
    """Layers as the technique's parts say, each by the piece of that name in this folder."""

    instead: Mapping[type, type] = MappingProxyType({})
    """Pieces that stand in for others."""

    def __init__(
        self, technique: Technique, decoder: Decoder, lengths: list[int], generate: int
    ) -> None:
        super().__init__(technique, decoder, lengths, generate)
        self.generate = generate
        self.beyond = self.capacity - self.prompt  # tokens after the longest prompt, with drafts
        self.common = SharedObjects()
        self.deployment = decoder.deployment or deployed(self.model)
        if reason := technique.refuses(self.deployment):
            raise InputError(f"{technique}: {reason}")
        self.parts = by_layer(technique, self.model.layers, self.deployment, lengths)
        self.placements = [self._placement(i, parts) for i, parts in enumerate(self.parts)]
        self.layers = [
            self._selecting(LayerContext(self, i, parts, rows=rows))
            for i, parts in enumerate(self.parts)
            for rows in self.tiles(i)
        ]
        self._first = 0  # sequence of the part of the batch that reads its prompt
        self.visits = {layer.context.visit: layer for layer in self.layers}
        self.guess: Tensor | None = None  # of every sequence's next token (batch,)
        refuse_taking_back(self.layers, self.guesses, self.gamma > 0)
        drafting = self.parts[0].drafting
        self.drafter = Drafter(self, drafting)
        if self.gamma:
            self.drafter = find_part(Drafter, drafting)(self, drafting)
            self.drafter.ready()
        for placement in self._placements_once():
            placement.ready()

    @property
    def differences(self) -> dict[str, str]:  # type: ignore[override]
        """Those of every piece."""
        found: dict[str, str] = {**self.drafter.differences} if self.gamma else {}
        for layer in self.layers:
            found |= {**layer.cells.differences, **layer.differences}
        for placement in self._placements_once():
            found |= placement.differences
        return found

    @property
    def op_periods(self) -> dict[str, int]:
        """Those of every layer's storage."""
        return {op: steps for layer in self.layers for op, steps in layer.cells.op_periods.items()}

    # hooks of the decoder

    def tiles(self, layer: int) -> list[slice]:
        """As many as the layer's placement has."""
        return equal_parts(self.batch, self.parts[layer].placement.tiles, self.technique.name)

    def prompt_tiles(self, layer: int, most: int) -> list[slice]:
        """Whole prompts one after another where the layer's placement can do so."""
        parts = self.tiles(layer)
        if not self.placements[layer].prompts_one_by_one:
            return parts
        return [rows for part in parts for rows in self.whole_prompt_tiles(part, most)]

    def prefill(
        self, layer: int, tensor: Tensor, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor:
        """Straight into the cache where its cells are plain and the prompt has room."""
        each = self.batch // len(self.tiles(layer))
        first = self._first = step.rows.start // each * each
        cache, placement, own = *self._visit(layer, first), of_part(step, first)
        placement.before_attention(cache.context, own)
        placement.store_inputs(cache.context, tensor, own)
        if cache.direct:
            out = cache.prefill(queries, keys, values, own)
            self.drafter.observe(cache.context.visit, queries, own)
            if self.gamma and ends(own, self.prompt, each):
                self.drafter.store_prompt(cache.context.visit, *cache.cells.prompt(own.length))
        else:
            out = super().prefill(layer, tensor, queries, keys, values, own)
        placement.after_attention(cache.context, own)
        return out

    def attend_prompt(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor:
        """As the layer's selection does; drafts may have a cache that reads it too."""
        cache = self.visits[layer, self._first]
        out = cache.attend_prompt(queries, keys, values, step)
        self.drafter.observe(cache.context.visit, queries, step)
        return out

    def store_prompt(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """As the layer's selection does, once drafts have what they keep of it."""
        cache = self.visits[layer, self._first]
        self.drafter.store_prompt(cache.context.visit, keys, values)
        cache.store_prompt(keys, values)

    def prompt_done(self) -> None:
        """What only the prompt needed is freed."""
        super().prompt_done()
        for layer in self.layers:
            layer.prompt_done()
        for placement in self._placements_once():
            placement.prompt_done()

    def attend(
        self, layer: int, tensor: Tensor, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor | Answer:
        """As the layer's selection does, once its cache is there."""
        first = step.rows.start
        cache, placement, own = *self._visit(layer, first), of_part(step, first)
        placement.layer_reached(cache.context)
        if step.kind == "draft":
            drafted = self.drafter.attend(cache.context.visit, queries, keys, values, own)
            if drafted is not None:
                return drafted
        elif self.gamma:
            self.drafter.store_verified(cache.context.visit, keys, values, own)

        def attended() -> Tensor:
            placement.before_attention(cache.context, own)
            out = cache.attend(queries, keys, values, own)
            placement.after_attention(cache.context, own)
            return out

        return placement.answer(attended)

    def attends_async(self, layer: int) -> bool:
        """Where the CPU attends for one part while the GPU goes on with another."""
        placement = self.placements[layer]
        return placement.attends_async and layer > 0 and self.placements[layer - 1] is placement

    def on_layer_output(self, layer: int, hidden: Tensor, step: Pass) -> None:
        """Heads draft from hidden states."""
        if self.gamma and step.kind != "draft":
            self.drafter.on_layer_output(layer, hidden, step)

    def after_prompt(self, run: "Generation") -> None:
        """A technique that drafts may read the prompt too; the first token gives a first guess.

        What that pass adds is dropped; the first round computes it again.
        """
        self.drafter.begin(run)
        if self.guesses:
            self.guess = run.choose(run.forward(run.last[:, None], "between")[:, 0])

    def draft(self, run: "Generation", tokens: Tensor, ahead: int) -> Tensor:
        """Tokens that the drafter proposes, or the base class."""
        proposed = self.drafter.propose(run, tokens, ahead)
        return super().draft(run, tokens, ahead) if proposed is None else proposed

    def lookup(self, run: "Generation", count: int) -> list[Tensor] | None:
        """Drafts of no model."""
        return self.drafter.lookup(run, count)

    def decode_round(self, run: "Generation") -> None:
        """Drafts and their verification, or one token, at times beside a guess of the next."""
        if self.gamma:
            super().decode_round(run)
            return
        before = run.cached
        if self.guess is None:
            Implementation.decode_round(self, run)
        else:
            logits = run.forward(torch.stack([run.last, self.guess], 1), "decode")
            chosen = run.choose(logits)
            self.guess = chosen[:, 1]
            run.emit(chosen[:, 0], logits=logits[:, :1])
        self.round_done(before, run.cached)

    def room(self, cached: list[int]) -> int:
        """What every layer's cells take until some tokens have to be settled."""
        takes = (
            layer.cells.room_left(n)
            for layer in self.layers
            for n in layer.stored_tokens(cached[layer.context.rows])
        )
        return min((n for n in takes if n is not None), default=super().room(cached))

    def round_done(self, before: list[int], after: list[int]) -> None:
        """Cells may pack what stays."""
        for layer in self.layers:
            rows = layer.context.rows
            layer.cells.commit(layer.stored_tokens(before[rows]), layer.stored_tokens(after[rows]))
        for placement in self._placements_once() if self.gamma else ():
            placement.round_done()

    def weights(self, layer: int, kind: Kind) -> LayerWeights:
        """Drafts may have narrower ones; placements may stream them."""
        drafted = self.drafter.weights(layer) if kind == "draft" else None
        return drafted or self.placements[layer].weights(layer) or super().weights(layer, kind)

    def resident(self) -> Resident:
        """What layers and placements keep."""
        layers = (layer.resident() for layer in self.layers)
        placings = (placement.resident() for placement in self._placements_once())
        return together(*layers, self.drafter.resident(), *placings)

    def close(self) -> None:
        """End the lanes of every placement."""
        for placement in self._placements_once():
            placement.close()

    def resident_bytes(self) -> dict[Tier, dict[str, int]]:
        """A layer's prompt, and what is on its way to the host."""
        sizes = super().resident_bytes()
        leaving = [t for layer in self.layers for t in layer.in_flight()]
        if leaving and "prompt kv" in sizes["gpu"]:
            sizes["gpu"]["kv on the way out"] = sizes["gpu"].pop("prompt kv") + size(*leaving)
        return sizes

    eager_reason = property(why_eager)
    reads_all_slots = property(reads_all_slots)

    def branch(self, cached: list[int]) -> Hashable:
        """That of every layer."""
        return branch(self, cached)

    def op_shares(self, cached: list[int]) -> Mapping[str, float]:
        """Those of every layer."""
        return op_shares(self, cached)

    # what pieces ask for

    @property
    def guesses(self) -> bool:
        """Whether rounds decode a guess of the next token."""
        return any(layer.guesses for layer in self.layers)

    def cells(self, place: LayerContext, slots: int) -> KvStore:
        """A layer's storage where its placement wants it."""
        stored = place.parts.storage
        widened = stored.read != stored.stored  # packed on the host alone
        kind: type[KvStore] = Fp16 if widened else self._piece(KvStore, stored)  # type: ignore[type-abstract]
        slots -= self.gamma * kind.buffers_drafts
        if type(place.parts.placement) is Placement:  # drafts' caches are on the GPU
            return CachePlacement(self, place.parts.placement).cells(kind, place, slots)
        return self.placements[place.layer].cells(kind, place, slots)

    def shared_objects(self, rows: slice) -> SharedObjects:
        """What the layers of one part of the batch share."""
        return self.shared(("part", rows.start), SharedObjects)

    def shared(self, key: object, make: Callable[[], Made]) -> Made:
        """What layers share: made when first asked for."""
        return self.common.get(key, make)

    def _piece(self, base: type[Piece], part: Part) -> type[Piece]:
        kind = find_part(base, part)
        return self.instead.get(kind, kind)

    def _placement(self, layer: int, parts: Parts) -> CachePlacement:
        kind = find_part(CachePlacement, parts.placement)
        return self.shared(("placement", parts.placement), lambda: kind(self, parts.placement))

    def _selecting(self, where: LayerContext) -> LayerCache:
        return self._piece(LayerCache, where.parts.selection)(where)

    def _visit(self, layer: int, first: int) -> tuple[LayerCache, CachePlacement]:
        return self.visits[layer, first], self.placements[layer]

    def _placements_once(self) -> list[CachePlacement]:
        return list(dict.fromkeys(self.placements))
