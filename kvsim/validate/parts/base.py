"""The protocol between the decoder and a technique that runs on it.

The decoder computes embedding, norms, projections, MLP and head. For every layer of a forward pass
it asks ``composed.Composed`` for attention, which puts the technique's pieces together: a selection
(``selection.LayerCache``) over a storage (``store.KvStore``) where a placement
(``place.CachePlacement``) puts it, and a ``drafting.Drafter``. What is stored, read, moved or
dropped is theirs. One file ``validate/techniques/<name>.py`` has the pieces of a technique, under
the name that it has in ``kvsim/techniques/papers``.

Order of calls in a generation:

1. ``weights`` and ``prefill`` for every layer and chunk of the prompt, ``store_prompt`` when a
   layer has read it all, ``on_layer_output`` behind each layer; then ``prompt_done``
2. ``after_prompt`` once, when the first token has been chosen
3. ``decode_round`` until every sequence is complete. It runs passes (``generation.forward``), each
   of which calls ``weights``, ``attend`` and ``on_layer_output`` layer by layer, and hands over the
   tokens that it has decided on (``generation.emit``)
4. ``close``

Slots and positions: token i of a sequence has position i, and prompts start at 0; shorter prompts
are padded behind their end. A pass appends at ``step.starts`` (known to the host) or
``step.positions`` (on the device). Nothing is rolled back: until ``generation.emit`` says which
tokens stay, the next pass starts where this one did and overwrites what it appended.

Counting: work is done inside ``with self.counter.op(name) as record`` under the names that
``kvsim/techniques`` states, and ``record.reads`` and ``record.writes`` take the tensors that the op
reads and writes as the algorithm defines it (``attention.attend`` does so itself). Copies between
tiers are noted by ``self.counter.copy`` in the pass that uses them.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvsim.graph import Tier
from kvsim.validate.counter import Kind, OpRecord
from kvsim.validate.model.attention import Pass

Resident = dict[Tier, dict[str, list[Tensor]]]
"""Tensors by tier and by the buffer name that the technique states."""


class RunningGeneration(Protocol):
    """What a technique may ask of the generation that it runs in (``run.Generation``)."""

    batch: int  # [sequences]
    generate: int  # tokens to generate per sequence
    prompts: Sequence[Sequence[int]]  # tokens of every prompt
    temperature: float  # 0 for the likeliest token
    generator: torch.Generator
    cached: list[int]  # tokens in the cache of each sequence
    done: list[int]  # generated tokens of each sequence
    yielded: list[list[int]]  # tokens each round gave, sequence by sequence
    last: Tensor  # (batch,) newest tokens, which no cache holds yet
    tokens: Tensor  # (batch, generate)

    def forward(self, tokens: Tensor, kind: Kind, ahead: int = 0) -> Tensor:
        """Run a pass of new tokens (batch, new) to logits (batch, new, vocab)."""

    def choose(self, logits: Tensor) -> Tensor:
        """Choose a token by each row of logits (..., vocab)."""

    def shares(self, logits: Tensor) -> Tensor:
        """Turn logits into the probability of every token, in fp32."""

    def emit(
        self, tokens: Tensor, counts: Sequence[int] | None = None, logits: Tensor | None = None
    ) -> None:
        """Hand over tokens (batch, most), of which ``counts`` are valid."""

    def padded(self) -> Tensor:
        """All prompts (batch, longest), zeros behind shorter ones."""


def join_resident(*parts: Resident) -> Resident:
    """Join what several parts keep in memory.

    Parameters
    ----------
    *parts
        Tensors of each part, by tier and buffer.

    Returns
    -------
    Resident
        Tensors of all parts, by tier and buffer.
    """
    held: Resident = {"gpu": {}}
    for part in parts:
        for tier, buffers in part.items():
            for name, tensors in buffers.items():
                held.setdefault(tier, {}).setdefault(name, []).extend(tensors)
    return held


def hold_chunk(
    record: OpRecord, held: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, step: Pass
) -> tuple[Tensor, Tensor]:
    """Write a chunk of a prompt where it is held, and return the prompt as far as it is read.

    Parameters
    ----------
    record
        The op that writes.
    held
        Keys and values of the whole batch, (batch, KV heads, slots, dim), changed in place.
    keys, values
        Those of the chunk, (sequences, KV heads, new, dim).

    Returns
    -------
    tuple
        Views of the sequences' keys and values, (sequences, KV heads, tokens, dim).
    """
    for cache, new in zip(held, (keys, values), strict=True):
        put(cache, new, step)
    record.writes(keys, values)
    k, v = (cache[step.rows, :, : step.length] for cache in held)
    return k, v


def put(cache: Tensor, new: Tensor, step: Pass) -> None:
    """Write new keys or values into a cache at their positions.

    Parameters
    ----------
    cache
        Keys or values of the whole batch, (batch, KV heads, slots, dim), changed in place.
    new
        Those of the pass, (sequences, KV heads, new, dim).
    """
    cache = cache[step.rows]
    if step.uniform:
        start = step.starts[0]
        cache[:, :, start : start + step.new] = new
    else:
        sequences = torch.arange(len(step.starts), device=cache.device)[:, None]
        cache[sequences, :, step.positions] = new.transpose(1, 2)
