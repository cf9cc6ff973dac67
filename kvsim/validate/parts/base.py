"""The protocol between the decoder and a technique that runs on it.

The decoder computes embedding, norms, projections, MLP and head. For every layer of a forward pass
it asks the technique's ``Implementation`` for attention; what is stored, read, moved or dropped is
the implementation's. One file ``validate/techniques/<name>.py`` runs a technique, under the name
that it has in ``kvsim/techniques/papers``; most are pieces that ``composed.Composed`` puts
together: a selection (``selection.LayerCache``) over a storage (``store.KvStore``) where a
placement (``place.CachePlacement``) puts it, and a ``drafting.Drafter``.

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

from collections.abc import Hashable, Mapping, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from kvsim.frozen import frozen
from kvsim.graph import Tier
from kvsim.techniques.technique import Technique
from kvsim.validate.counter import Kind, NullCounter, OpRecord, size
from kvsim.validate.model.attention import Pass, attend, visible
from kvsim.validate.model.decoder import Answer, Decoder
from kvsim.validate.model.weights import LayerWeights

Resident = dict[Tier, dict[str, list[Tensor]]]
"""Tensors by tier and by the buffer name that the technique states."""


@frozen
class SmallRun:
    """A run that a check does; techniques choose settings that act in it."""

    batch: int  # [sequences]
    prompt: int  # [tokens]
    group: int  # numbers that share a scale, a divisor of the head dimension
    weight_bits: int  # 4 where the model's widths allow it, otherwise 16
    kv_heads: int = 2  # of the model


class RunningGeneration(Protocol):
    """What an implementation may ask of the generation that it runs in (``run.Generation``)."""

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


class Implementation:
    """One technique on one decoder, for one batch of prompts.

    Parameters
    ----------
    technique
        What is run, with its settings.
    """

    differences: ClassVar[dict[str, str]] = {}
    """Ops and buffers that really differ from what the technique states, and why."""

    eager_reason = "what a round does follows from what earlier ones have cached"
    """Why rounds are not replayed as a CUDA graph; empty where they are, see ``branch``."""

    @classmethod
    def small_settings(cls, run: SmallRun) -> list[str]:
        """List settings under which the technique acts in a small run.

        Returns
        -------
        list of str
            Settings as the notation writes them, without the technique's name.
        """
        return [""]

    def __init__(
        self, technique: Technique, decoder: Decoder, lengths: list[int], generate: int
    ) -> None:
        self.technique = technique
        self.decoder = decoder
        self.model = decoder.arch.model
        self.shapes = decoder.arch.shapes  # of every layer
        self.lengths = lengths
        self.batch = len(lengths)
        self.prompt = max(lengths)  # the longest [tokens]
        self.capacity = self.prompt + generate + self.slack  # positions in use at most [tokens]
        self._scratch: tuple[Tensor, Tensor] | None = None  # keys and values of one layer's prompt

    @property
    def counter(self) -> NullCounter:
        """Where ops are counted."""
        return self.decoder.counter

    # the prompt

    def prefill(
        self, layer: int, tensor: Tensor, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor:
        """Attend with one chunk of the prompt, in full precision.

        The default keeps one layer's prompt and calls ``store_prompt`` when it is whole.
        """
        count = self.batch // len(self.tiles(layer))
        if self._scratch is None or len(self._scratch[0]) < count:
            self._scratch = self.empty(self.prompt, count), self.empty(self.prompt, count)
        cached_keys, cached_values = (room[:count] for room in self._scratch)
        with self.counter.op("attn") as record:
            put(cached_keys, keys, step)
            put(cached_values, values, step)
            record.writes(keys, values)
        stop = step.length
        keys, values = (room[step.rows, :, :stop] for room in (cached_keys, cached_values))
        out = self.attend_prompt(layer, queries, keys, values, step)
        if step.ends_prompt(self.prompt, count):
            self.store_prompt(layer, cached_keys, cached_values)
        return out

    def attend_prompt(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor:
        """Attend with a chunk to its prompt so far."""
        with self.counter.op("attn") as record:
            seen = visible(step, step.length, self.shapes[layer].window)
            return attend(record, queries, keys, values, seen)

    def store_prompt(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store what stays of a layer's prompt.

        Parameters
        ----------
        keys, values
            (batch, KV heads, longest prompt, dim), overwritten afterwards. Beyond a sequence's own
            length they hold numbers that no query may see.
        """
        raise NotImplementedError

    def prompt_done(self) -> None:
        """Free what only the prompt needed: every layer has read it."""
        self._scratch = None

    def after_prompt(self, run: RunningGeneration) -> None:
        """Do what comes once, between the first token and the first round: passes, prefetches."""

    # rounds

    def decode_round(self, run: RunningGeneration) -> None:
        """Run one decoding round; the default decodes one token per sequence.

        Parameters
        ----------
        run
            The generation, which runs passes and takes the tokens that the round decides on.
        """
        logits = run.forward(run.last[:, None], "decode")
        run.emit(run.choose(logits), logits=logits)

    def attend(
        self, layer: int, tensor: Tensor, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor | Answer:
        """Store new tokens and attend with them, in any pass after the prompt.

        Parameters
        ----------
        tensor, queries, keys, values
            As in ``prefill``.
        step
            ``step.kind`` says which pass it is: decode, draft, verify or between.

        Returns
        -------
        The output, shaped as the queries, or a function that waits for it.
        """
        raise NotImplementedError

    def on_layer_output(self, layer: int, hidden: Tensor, step: Pass) -> None:
        """Look at the hidden states with which a pass leaves a layer."""

    def weights(self, layer: int, kind: Kind) -> LayerWeights:
        """Return the weights of a layer; those of drafts and streamed ones may differ."""
        return self.decoder.weights.layers[layer]

    @property
    def slack(self) -> int:
        """Tokens that a pass may append beyond those generated, as drafts do [tokens]."""
        return 0

    # the batch

    def tiles(self, layer: int) -> list[slice]:
        """Split the batch into parts that pass through a layer one after another."""
        return [slice(0, self.batch)]

    def prompt_tiles(self, layer: int, most: int) -> list[slice]:
        """Split the prompts into parts that pass through a layer one after another.

        Implementations that keep sequences apart take whole prompts: keys and values are then read
        once per prompt, and not once for every few tokens of all of them.

        Parameters
        ----------
        most
            Prompt tokens that pass through a layer at once, roughly. [tokens]
        """
        return self.tiles(layer)

    def whole_prompt_tiles(self, part: slice, most: int) -> list[slice]:
        """Split a part of the batch into groups of whole prompts.

        Parameters
        ----------
        most
            Tokens of a group at most; a longer prompt makes a group by itself. [tokens]
        """
        each = max(1, most // self.prompt)
        return [slice(i, min(i + each, part.stop)) for i in range(part.start, part.stop, each)]

    def attends_async(self, layer: int) -> bool:
        """Whether the part before may still wait for its attention when this layer starts."""
        return False

    # replay as CUDA graphs, and counts

    def branch(self, cached: list[int]) -> Hashable:
        """Key of the work that the next round does on the GPU; none for a round never replayed.

        Rounds with the same key are the same work. Shapes of a pass that is ``fixed`` then follow
        from nothing else: where tokens go and what they see is known on the device alone.
        """
        return ()

    @property
    def reads_all_slots(self) -> bool:
        """Whether attention of a replayed round reads the whole room of a cache, under a mask."""
        return True

    def op_shares(self, cached: list[int]) -> Mapping[str, float]:
        """State how much of each op the next round does, where predictions count the whole op.

        Returns
        -------
        Mapping of str to float
            Share of the op by its name; ops that are not listed are done as predicted.
        """
        return {}

    @property
    def op_periods(self) -> dict[str, int]:
        """Ops done whenever a cache has grown by so many tokens; the prediction spreads them."""
        return {}

    # memory

    def resident(self) -> Resident:
        """Every tensor kept between layers, besides weights, hidden states and logits."""
        raise NotImplementedError

    def resident_bytes(self) -> dict[Tier, dict[str, int]]:
        """Bytes by tier and buffer, one layer's prompt included while it is there [B]."""
        sizes = {
            tier: {name: size(*tensors) for name, tensors in buffers.items()}
            for tier, buffers in self.resident().items()
        }
        if self._scratch is not None:
            sizes["gpu"]["prompt kv"] = size(*self._scratch)
        return sizes

    def empty(self, slots: int, sequences: int | None = None) -> Tensor:
        """Allocate zeros for keys or values of one layer. (sequences, KV heads, slots, dim)

        Parameters
        ----------
        sequences
            Sequences to make room for; the whole batch if not given.
        """
        m, where = self.model, self.decoder
        shape = (self.batch if sequences is None else sequences, m.kv_heads, slots, m.head_dim)
        return torch.zeros(shape, device=where.device, dtype=where.dtype)

    def close(self) -> None:
        """Stop threads, if there are any."""


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
