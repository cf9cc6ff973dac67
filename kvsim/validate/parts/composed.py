"""Techniques composed of parts: in each layer a selection, a storage and a placement."""

from collections.abc import Hashable, Mapping
from dataclasses import replace
from statistics import fmean
from types import MappingProxyType

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.graph import Tier
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.model import Model
from kvsim.techniques.axes.base import Part, Parts, Placement
from kvsim.techniques.technique import Technique
from kvsim.validate.counter import Kind, size
from kvsim.validate.model.attention import Pass
from kvsim.validate.model.decoder import Answer, Decoder
from kvsim.validate.model.generation import RunningGeneration
from kvsim.validate.model.weights import LayerWeights
from kvsim.validate.parts.drafting import Drafter, SpeculativeDrafter
from kvsim.validate.parts.place import CachePlacement
from kvsim.validate.parts.rows import Fp16
from kvsim.validate.parts.selection import LayerCache, LayerContext, LayeredRun
from kvsim.validate.parts.store import (
    KvStore,
    Resident,
    SharedObjects,
    hold_chunk,
    join_resident,
)
from kvsim.validate.registry import Piece, find_part
from kvsim.validate.transfer import Transfers


class Composed(LayeredRun):
    """Run a technique in PyTorch, with one model and one batch of prompts.

    Each layer has a cache that implements the selection, storage and placement of the technique for
    that layer; speculative decoding has a drafter. Implementations are looked up in
    ``kvsim.validate.registry``.

    Parameters
    ----------
    technique
        The technique.
    decoder
        The model that runs.
    prompts
        Number of prompts, and tokens of each.
    generate
        Tokens to generate per sequence. [tokens]

    Attributes
    ----------
    instead
        Replacements for classes of the registry, by original class; set by subclasses.

    Raises
    ------
    InputError
        If the technique, or a combination of its parts, cannot run with this model.
    """

    instead: Mapping[type, type] = MappingProxyType({})
    """Classes that stand in for others."""

    def __init__(
        self, technique: Technique, decoder: Decoder, prompts: tuple[int, int], generate: int
    ) -> None:
        self.technique, self.decoder, (self.batch, self.prompt) = technique, decoder, prompts
        self.generate, self.gamma, self.drafted = generate, technique.drafts, []
        self.beyond = generate + self.gamma  # drafts of the last round are appended too
        self.capacity = self.prompt + self.beyond
        self._scratch: tuple[Tensor, Tensor] | None = None  # keys and values of one layer's prompt
        self.common = SharedObjects()
        self.deployment = decoder.deployment or default_deployment(self.model)
        if reason := technique.refuses(self.deployment):
            raise InputError(f"{technique}: {reason}")
        self.parts = _parts_by_layer(technique, self.model.layers, self.deployment, self.prompt)
        self.placements = [self._placement(parts) for parts in self.parts]
        self.layers = [
            self._find(LayerCache, parts.selection)(LayerContext(self, i, parts, rows=rows))
            for i, parts in enumerate(self.parts)
            for rows in self.tiles(i)
        ]
        self._first = 0  # sequence of the part of the batch that reads its prompt
        self.visits = {layer.context.visit: layer for layer in self.layers}
        _check_drops_tokens(self.layers, self.gamma > 0)
        drafting, guesses = self.parts[0].drafting, self.guesses
        self.drafter = Drafter(self, drafting)
        if self.gamma:
            self.drafter = find_part(SpeculativeDrafter, drafting)(self, drafting)
        elif guesses:
            self.drafter = find_part(Drafter, drafting, guesses)(self, drafting)
        self.drafter.ready()
        for placement in self._placements_once():
            placement.ready()

    @property
    def differences(self) -> dict[str, str]:
        """Ops and buffers that really differ from what the technique states, and why."""
        found = dict(self.drafter.differences)
        for layer in self.layers:
            found |= {**layer.kv.differences, **layer.differences}
        for placement in self._placements_once():
            found |= placement.differences
        return found

    # the batch

    def tiles(self, layer: int) -> list[slice]:
        """Split the batch into the parts that pass through a layer one after another.

        Returns
        -------
        list of slice
            Sequences of each part.

        Raises
        ------
        InputError
            If the batch is not a multiple of the number of parts.
        """
        parts, name = self.parts[layer].placement.tiles, self.technique.name
        if self.batch % parts:
            raise InputError(
                f"{name}: batch {self.batch} does not divide into {parts} parts; choose a multiple "
                f"of {parts}, or set {name}:parts"
            )
        each = self.batch // parts
        return [slice(i, i + each) for i in range(0, self.batch, each)]

    def prompt_tiles(self, layer: int, most: int) -> list[slice]:
        """Split the prompts into parts that pass through a layer one after another.

        If the placement allows it, parts consist of whole prompts, so that keys and values are read
        once per prompt rather than once for every few tokens of all prompts.

        Parameters
        ----------
        most
            Most prompt tokens that pass through a layer at once; a longer prompt forms its own
            part. [tokens]

        Returns
        -------
        list of slice
            Sequences of each part.
        """
        parts, each = self.tiles(layer), max(1, most // self.prompt)
        if not self.placements[layer].prompts_one_by_one:
            return parts
        return [
            slice(i, min(i + each, part.stop))
            for part in parts
            for i in range(part.start, part.stop, each)
        ]

    # the prompt

    def prefill(
        self, layer: int, tensor: Tensor, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor:
        """Attend with one chunk of the prompts, in full precision, and store the chunk.

        The chunk is written to the cache directly if that is not packed and has space for the
        prompts. Otherwise the prompts of one layer are kept in a buffer until they are complete, of
        which the cache then stores what it keeps.

        Parameters
        ----------
        layer
            Index of the layer.
        tensor
            Normed hidden states that the layer's projections read, (sequences, chunk, hidden).
        queries
            Queries of the chunk, (sequences, heads, chunk, dim).
        keys, values
            Keys and values of the chunk, (sequences, KV heads, chunk, dim).
        step
            The pass: sequences, positions and cached tokens.

        Returns
        -------
        Tensor
            Output of attention, (sequences, heads, chunk, dim).
        """
        each = self.batch // len(self.tiles(layer))
        first = self._first = step.rows.start // each * each
        cache, placement, own = *self._visit(layer, first), _within_part(step, first)
        placement.before_attention(cache.context, tensor, own)
        if cache.direct:
            out = cache.prefill(queries, keys, values, own)
        else:
            k, v = self.hold_chunk(layer, keys, values, own)
            out = cache.attend_prompt(queries, k, v, own)
        self.drafter.observe(cache.context.visit, queries, own)
        if own.ends_prompt(self.prompt, each):
            if not cache.direct:
                self.store_prompt(layer, *self._prompt_buffer(layer))
            elif not cache.divided:
                self.store_prompt(layer, *cache.prompt_buffer())
            elif self.gamma:
                self.drafter.store_prompt(cache.context.visit, *cache.kv.prompt(self.prompt))
        placement.after_attention(cache.context, own)
        return out

    def hold_chunk(
        self, layer: int, keys: Tensor, values: Tensor, step: Pass
    ) -> tuple[Tensor, Tensor]:
        """Write a chunk of the prompts to the buffer of one layer's prompts.

        Returns
        -------
        tuple of Tensor
            Keys and values of the prompts so far, (sequences, KV heads, tokens, dim) each.
        """
        buffer = self._prompt_buffer(layer)
        with self.counter.op("attn") as record:
            return hold_chunk(record, buffer, keys, values, step)

    def store_prompt(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store what the technique keeps of a layer's prompts, after drafts have taken their part.

        Parameters
        ----------
        layer
            Index of the layer.
        keys, values
            (batch, KV heads, prompt, dim), overwritten afterwards.
        """
        cache = self.visits[layer, self._first]
        self.drafter.store_prompt(cache.context.visit, keys, values)
        cache.store_prompt(keys, values)

    def prompt_done(self) -> None:
        """Free the buffers that only prefill needs, after the last layer's prefill."""
        self._scratch = None
        for layer in self.layers:
            layer.prompt_done()
        for placement in self._placements_once():
            placement.prompt_done()

    def after_prompt(self, run: RunningGeneration) -> None:
        """Run the work of layers and drafter between prefill and the first round."""
        for layer in self.layers:
            layer.after_prompt(run)
        self.drafter.after_prompt(run)

    # rounds

    def decode_round(self, run: RunningGeneration) -> None:
        """Run one decoding round; afterwards caches may pack the new tokens."""
        before = run.cached
        self.drafter.decode_round(run)
        for layer in self.layers:
            rows = layer.context.rows
            layer.kv.commit(
                layer.stored_tokens(before[rows]), layer.stored_tokens(run.cached[rows])
            )
        for placement in self._placements_once() if self.gamma else ():
            placement.round_done()

    def attend(
        self, layer: int, tensor: Tensor, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor | Answer:
        """Store new tokens and compute their attention, in any pass after prefill.

        Parameters
        ----------
        layer
            Index of the layer.
        tensor
            Normed hidden states that the layer's projections read, (sequences, new, hidden).
        queries
            Queries of the new tokens, (sequences, heads, new, dim).
        keys, values
            Keys and values of the new tokens, (sequences, KV heads, new, dim).
        step
            The pass: sequences, positions, cached tokens and kind.

        Returns
        -------
        Tensor or Answer
            The output, shaped as the queries, or a function that waits for it and returns it.
        """
        first = step.rows.start
        cache, placement, own = *self._visit(layer, first), _within_part(step, first)
        if following := self.visits.get((layer + 1, first)):
            following.before_input(tensor, own)
        placement.layer_reached(cache.context)
        if step.kind == "draft":
            drafted = self.drafter.attend(cache.context.visit, queries, keys, values, own)
            if drafted is not None:
                return drafted
        elif self.gamma:
            self.drafter.store_verified(cache.context.visit, keys, values, own)

        def attended() -> Tensor:
            placement.before_attention(cache.context, tensor, own)
            out = cache.attend(queries, keys, values, own)
            placement.after_attention(cache.context, own)
            return out

        return placement.answer(attended)

    def attends_async(self, layer: int) -> bool:
        """Whether attention of the batch's previous part may still run when a layer starts."""
        placement = self.placements[layer]
        return placement.attends_async and layer > 0 and self.placements[layer - 1] is placement

    def on_layer_output(self, layer: int, hidden: Tensor, step: Pass) -> None:
        """Pass a layer's output on to the drafter, as draft heads start from hidden states.

        Parameters
        ----------
        step
            The pass; those of drafts are not passed on.
        """
        if step.kind != "draft":
            self.drafter.on_layer_output(layer, hidden, step)

    def weights(self, layer: int, kind: Kind) -> LayerWeights:
        """Return the weights of a layer, which may be quantised for drafts, or streamed."""
        drafted = self.drafter.weights(layer) if kind == "draft" else None
        return drafted or self.placements[layer].weights(layer) or super().weights(layer, kind)

    def round_room(self, cached: list[int]) -> int:
        """Return the number of tokens that all layers can append before any has to pack."""
        takes = (
            layer.kv.room_left(n)
            for layer in self.layers
            for n in layer.stored_tokens(cached[layer.context.rows])
        )
        return min((n for n in takes if n is not None), default=self.gamma + 1)

    # memory

    def resident(self) -> Resident:
        """Return every tensor that is kept between layers, by memory tier and buffer.

        Weights, hidden states and logits are not included.
        """
        layers = (layer.resident() for layer in self.layers)
        placements = (placement.resident() for placement in self._placements_once())
        return join_resident(*layers, self.drafter.resident(), *placements)

    def resident_bytes(self) -> dict[Tier, dict[str, int]]:
        """Return the resident bytes by memory tier and buffer. [B]

        During prefill, the buffer of one layer's prompts is included.
        """
        sizes = {
            tier: {name: size(*tensors) for name, tensors in buffers.items()}
            for tier, buffers in self.resident().items()
        }
        if self._scratch is not None:
            leaving = [t for layer in self.layers for t in layer.in_flight()]
            name = "kv on the way out" if leaving else "prompt kv"
            sizes["gpu"][name] = size(*self._scratch, *leaving)
        return sizes

    def shutdown(self) -> None:
        """End the copy threads or streams of every placement."""
        for placement in self._placements_once():
            placement.shutdown()

    # replay as CUDA graphs

    @property
    def eager_reason(self) -> str:
        """Why rounds are not replayed as CUDA graphs; empty if they are. See ``branch``."""
        if self.gamma:
            return "the number of accepted drafts is read from the GPU in every round"
        if self.guesses:
            return "every token comes with a guess, whose pairs are fetched during computation"
        if any(not placement.replays for placement in self.placements):
            return "copies during a round wait for earlier rounds"
        for layer in self.layers:
            chosen, stored = layer.parts.selection.name, layer.parts.storage.name
            if not layer.replays:
                return f"where {chosen} puts a token follows from the host's count"
            if not layer.kv.replays:
                return f"what {stored} packs follows from the host's count"
        return ""

    def branch(self, cached: list[int]) -> Hashable:
        """Return a key for the GPU work of the next round; rounds with equal keys do the same work.

        In a replayed pass (``fixed``), shapes depend on nothing else: the slots of new tokens and
        the visibility of tokens are computed on the device.

        Parameters
        ----------
        cached
            Cached tokens of each sequence. [tokens]

        Returns
        -------
        Hashable
            The key; None for a round that must not be replayed as a CUDA graph.
        """
        found = {layer.kv.branch(slots) for layer, slots in self._slots_after(cached)}
        return None if None in found else frozenset(found)

    @property
    def reads_all_slots(self) -> bool:
        """Whether attention of a replayed round reads all slots of a cache, under a mask."""
        return any(layer.kv.reads_all_slots for layer in self.layers)

    def op_shares(self, cached: list[int]) -> Mapping[str, float]:
        """State how much of each op the next round does, over what predictions count per round.

        Returns
        -------
        Mapping of str to float
            Share of the op by its name, the mean over the layers that list it; ops that are not
            listed are done as predicted.
        """
        found = [layer.op_shares(cached[layer.context.rows]) for layer in self.layers]
        ops = {op for some in found for op in some}
        return {op: fmean(some[op] for some in found if op in some) for op in ops}

    # what pieces ask for

    @property
    def guesses(self) -> str:
        """Name of the technique that guesses a token ahead in every round; empty if none does."""
        return next((layer.guesses for layer in self.layers if layer.guesses), "")

    def make_store(self, context: LayerContext, slots: int) -> KvStore:
        """Create the storage of a layer in the memory that its placement chooses."""
        stored = context.parts.storage
        widened = stored.read != stored.stored  # packed on the host alone
        kind: type[KvStore] = Fp16 if widened else self._find(KvStore, stored)  # type: ignore[type-abstract]
        slots -= self.gamma * kind.buffers_drafts
        if type(context.parts.placement) is Placement:  # drafts' caches are on the GPU
            on_gpu = CachePlacement(self, context.parts.placement)
            return on_gpu.make_store(kind, context, slots)
        return self.placements[context.layer].make_store(kind, context, slots)

    def transfers(self, layer: int) -> Transfers:
        """Return the copy streams that a layer's placement uses."""
        return self.placements[layer].lanes()

    def _find(self, base: type[Piece], part: Part) -> type[Piece]:
        kind = find_part(base, part)
        return self.instead.get(kind, kind)

    def _placement(self, parts: Parts) -> CachePlacement:
        kind = find_part(CachePlacement, parts.placement)
        return self.shared(("placement", parts.placement), lambda: kind(self, parts.placement))

    def _prompt_buffer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer's prompts, which the next layer overwrites."""
        count = self.batch // len(self.tiles(layer))
        if self._scratch is None or len(self._scratch[0]) < count:
            m, where = self.model, self.decoder
            shape = (count, m.kv_heads, self.prompt, m.head_dim)
            made = (torch.zeros(shape, device=where.device, dtype=where.dtype) for _ in "kv")
            self._scratch = next(made), next(made)
        keys, values = (room[:count] for room in self._scratch)
        return keys, values

    def _visit(self, layer: int, first: int) -> tuple[LayerCache, CachePlacement]:
        return self.visits[layer, first], self.placements[layer]

    def _placements_once(self) -> list[CachePlacement]:
        return list(dict.fromkeys(self.placements))

    def _slots_after(self, cached: list[int]) -> list[tuple[LayerCache, list[int]]]:
        """Return the slots in use in every layer after the next token."""
        return [
            (layer, [n + 1 for n in layer.stored_tokens(cached[layer.context.rows])])
            for layer in self.layers
        ]


def default_deployment(model: Model) -> Deployment:
    """Return a deployment on a common card, for techniques that need one if nothing is predicted.

    Parameters
    ----------
    model
        The model.
    """
    return Deployment(model, load_hardware("a6000"), load_stack("kvsim"))


def _parts_by_layer(
    technique: Technique, layers: int, deployment: Deployment, prompt: int
) -> list[Parts]:
    """Return the parts of each layer for prompts of a length; equal layers share one object."""
    found: list[Parts] = []
    for some, parts in zip(technique.layers, technique.parts, strict=True):
        last = layers - 1 if some.last is None else min(some.last, layers - 1)
        found += [parts.for_layer(i, deployment) for i in range(some.first, last + 1)]
    return [parts.for_prompt(float(prompt)) for parts in found]


def _within_part(step: Pass, first: int) -> Pass:
    """Return a pass with sequences counted from the first one of a part of the batch."""
    rows = step.rows
    return replace(step, rows=slice(rows.start - first, rows.stop - first)) if first else step


def _check_drops_tokens(layers: list[LayerCache], drafts: bool) -> None:
    """Refuse layers that cannot drop guessed or drafted tokens.

    Raises
    ------
    InputError
        Naming the first of them.
    """
    guesses = any(layer.guesses for layer in layers)
    for layer in layers:
        chosen, stored = layer.parts.selection.name, layer.parts.storage.name
        drops_tokens = layer.kv.drops_tokens
        if guesses and not layer.guesses and not (chosen == "all" and drops_tokens):
            raise InputError(
                f"{chosen} over {stored}: its real implementation cannot drop a guessed token; "
                f"use specache:speculative=false beside it"
            )
        if drafts and not drops_tokens:
            raise InputError(
                f"{stored}: kvsim's implementation cannot remove rejected drafts from the cache"
            )
