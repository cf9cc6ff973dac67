"""KVzip: keeps the tokens that the model looks up while it repeats its prompt.

J.-H. Kim et al., "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction", NeurIPS
2025, sections 3.2 and 3.3, https://arxiv.org/abs/2505.23416.

Once all layers have read the prompt, it passes through the model again chunk by chunk, at the
positions behind its end:

1. a chunk attends to the whole prompt and to itself                    (``reconstruct``)
2. a token's score is the greatest weight that any query of the repetition of its own chunk gives
   it, among the keys of both chunks, over the heads that share it      (``chunk_scores``)
3. every KV head keeps the tokens with the highest scores               (``select``, ``compact``)

Where this departs: the sentence that asks for the repetition is left out, as prompts are numbers
here; all heads keep equally many tokens, where the paper ranks those of all heads together.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.graph import Channel
from kvsim.techniques.axes.base import Placement
from kvsim.techniques.papers import kvzip
from kvsim.validate.counter import NullCounter, OpRecord
from kvsim.validate.model.attention import Pass, attend
from kvsim.validate.model.generation import RunningGeneration
from kvsim.validate.parts.eviction import CutCache
from kvsim.validate.parts.scores import query_ranges, scores
from kvsim.validate.parts.selection import LayerContext
from kvsim.validate.parts.store import Resident, SlotRange, join_resident

SMALL_SETTINGS = ("budget={half}",)


class Kvzip(CutCache):
    """Cache of the whole prompt until it has been repeated, then of the kept tokens."""

    direct = True

    def __init__(self, place: LayerContext) -> None:
        self._whole = True
        super().__init__(place)
        if not self.kv.plain or type(self.parts.placement) is not Placement:
            raise InputError(
                "kvzip: its real implementation repeats the prompt over an fp16 cache on the GPU; "
                "run it without another storage or placement"
            )
        if not all(isinstance(parts.selection, kvzip.Kvzip) for parts in self.run.parts):
            raise InputError("kvzip: its real implementation cuts every layer; name no range")
        learned, again = self.model.learned_positions, min(kvzip.CHUNK, self.prompt)
        if learned and self.prompt + again > learned:
            raise InputError(
                f"kvzip: {self.model.name} has {learned:,} positions, and {again:,} of its tokens "
                f"pass again behind all {self.prompt:,}; shorten the prompt"
            )
        self._scores = torch.zeros(0)

    def store_prompt(self, keys: Tensor, values: Tensor) -> None:
        """Keep the whole prompt until ``after_prompt``."""

    @property
    def slots(self) -> int:
        """Slots per sequence: whole prompts before eviction, kept tokens afterwards. [tokens]"""
        return self.capacity if self._whole else super().slots

    def slot_range(self, step: Pass) -> SlotRange:
        """Return the slots of new tokens, which follow the whole prompt until it is cut."""
        return SlotRange.after_cached(step) if self._whole else super().slot_range(step)

    def after_prompt(self, generation: RunningGeneration) -> None:
        """Repeat the prompt to score its tokens, then evict tokens in every layer.

        The first layer's call does so for all; calls of other layers do nothing.
        """
        if self.layer or self.prompt <= self.budget:
            return
        rows = self.context.rows
        alike = (one for one in self.run.layers if one.context.rows == rows)
        caches = [one for one in alike if isinstance(one, Kvzip)]
        chunk = min(kvzip.CHUNK, self.prompt)
        decoder = replace(
            self.run.decoder, counter=_Repeating(self.counter), length=self.prompt + chunk
        )
        tokens = generation.prompt_tokens[rows]
        for first in range(0, self.prompt, chunk):
            part = tokens[:, first : first + chunk]
            new = torch.arange(part.shape[1], device=self.device)
            positions = (self.prompt + new).expand(self.batch, -1)
            step = decoder.step(rows, (self.prompt,) * self.batch, positions, "between")
            x = decoder.embed(part, positions)
            for cache in caches:
                weights = self.run.weights(cache.layer, "prefill")
                with self.counter.op("repeat") as record:
                    record.reads(*(t for t in weights.tensors() if t.dim() > 1))
                decoder.layer(cache.layer, weights, x, step, partial(cache.repeat, first))
        for cache in caches:
            keys, values = cache.kv.prompt(self.prompt)
            cache._whole = False
            cache.kv = cache.make(cache.slots)
            cache.cut(keys, values)

    def repeat(
        self,
        first: int,
        layer: int,
        tensor: Tensor,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        step: Pass,
    ) -> Tensor:
        """Attend with the repetition of a chunk, and score the chunk's tokens by its attention.

        Parameters
        ----------
        first
            Position in the prompt at which the chunk begins. [tokens]

        Returns
        -------
        Tensor
            Output of attention, (sequences, heads, chunk, dim).
        """
        held, new = self.kv.prompt(self.prompt), step.new

        def see(known: int) -> Tensor:
            """All of some tokens of the prompt, and of the repetition those before a query."""
            seen = torch.ones(new, known + new, dtype=torch.bool, device=keys.device)
            return seen.tril(known)[None, None]

        with self.counter.op("reconstruct") as record:
            k, v = (torch.cat(pair, 2) for pair in zip(held, (keys, values), strict=True))
            seen = see(self.prompt)
            out = attend(OpRecord(), queries, k, v, seen)
            record.visible(new, k.shape[2], seen)
            record.reads(queries, *held, keys, values).writes(out)
        some = slice(first, first + new)
        if not first:
            self._scores = keys.new_zeros(*held[0].shape[:3])
        with self.counter.op("chunk_scores") as record:
            seen, both_keys = see(new), torch.cat([held[0][:, :, some], keys], 2)
            found = keys.new_zeros(self.batch, queries.shape[1], new)
            for part in query_ranges(new, 2 * found.numel(), keys.device):
                weights = scores(queries[:, :, part], both_keys, seen[:, :, part]).to(keys.dtype)
                found = torch.maximum(found, weights[..., :new].amax(2))
                record.reads(weights).writes(weights)
            record.visible(new, 2 * new, seen)
            record.reads(queries, both_keys)
            self._scores[:, :, some] = found.view(*keys.shape[:2], -1, new).amax(2)
        return out

    def score(self, keys: Tensor, values: Tensor) -> Tensor:
        """Return the scores that repeating the prompt has found, and release them."""
        found, self._scores = self._scores, torch.zeros(0)
        return found

    def resident(self) -> Resident:
        """Return the layer's tensors; slots to be freed by eviction are listed separately."""
        found = super().resident()
        if self._whole:
            kept, rows = super().slots, found["gpu"].pop("kv")
            parts = {"kv": [t[:, :, :kept] for t in rows]}
            parts["kv before the cut"] = [t[:, :, kept:] for t in rows]
            return join_resident(found, {"gpu": parts})
        return found


class _Repeating(NullCounter):
    """Counts the products of a layer in a repetition as one op, which reads only weights."""

    def __init__(self, counter: NullCounter) -> None:
        self._counter = counter

    @contextmanager
    def op(self, name: str, memory: Channel = "hbm") -> Iterator[OpRecord]:
        """Run one op of a layer."""
        with self._counter.op("repeat", memory):
            yield OpRecord()
