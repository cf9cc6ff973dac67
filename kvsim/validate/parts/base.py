"""What an implementation of a technique is: the hooks of the decoder.

One file ``validate/techniques/<name>.py`` per technique, under the name it has in
``kvsim/techniques/papers``; both are set by the same object. For every layer of a pass the decoder
projects queries, keys and values and asks the implementation for attention; everything around it
is the decoder's.

============  ====================================================================================
hook          when, and what it says
============  ====================================================================================
``prefill``   a chunk of the prompt reaches a layer: attention in full precision. The default
              keeps one layer's prompt and calls ``filled`` when it is whole
``filled``    a layer has read the prompt: store its keys and values as the technique does
``between``   the prompt is read, its first token chosen: extra passes, first prefetches
``round``     one decoding round: passes (``run.forward``), choice of tokens, ``run.emit``; the
              default decodes one token
``attend``    new tokens reach a layer in any later pass: append, attend, drop, prefetch; which
              pass it is says ``step.kind`` (decode, draft, verify, between)
``left``      new tokens have passed a layer: their hidden states, for who drafts from them
``weights``   what a layer is multiplied with in a pass: another MLP for drafts, streamed weights
``resident``  every tensor the technique keeps, by tier and buffer name
``slack``     tokens beyond the generated ones that a pass may append
``tiles``     parts of the batch that pass through a layer one after another, and
              ``answers_late`` whether the next one starts before attention has answered
``close``     stop threads
============  ====================================================================================

Slots and positions: token i of a sequence has position i, and prompts start at 0; shorter prompts
are padded behind their end. A pass appends at ``step.starts`` (host) or ``step.positions``
(device). Nothing is rolled back: until ``run.emit`` says which tokens stay, the next pass starts
where this one did and overwrites what it appended.

Counting: work is done inside ``with self.counter.op(name) as record`` under the names that
``kvsim/techniques`` states, and ``record.reads`` and ``record.writes`` take the tensors that the op
reads and writes as the algorithm defines it (``attention.attend`` does so itself). Copies between
tiers are noted by ``self.counter.copy`` in the pass that uses them.
"""

from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kvsim.frozen import frozen
from kvsim.graph import Tier
from kvsim.techniques.technique import Technique
from kvsim.validate.counter import Kind, NullCounter, size
from kvsim.validate.kernels.ranges import NUMBERS, ranges
from kvsim.validate.model.attention import Pass, attend, visible
from kvsim.validate.model.decoder import Answer, Decoder
from kvsim.validate.model.weights import LayerWeights

if TYPE_CHECKING:
    from kvsim.validate.run import Generation

SCORES_ON_GPU = 1 << 24  # numbers
Resident = dict[Tier, dict[str, list[Tensor]]]
"""Tensors by tier and by the buffer name that the technique's ``cache`` or ``once`` uses."""


@frozen
class SmallRun:
    """A run that a check does, and settings that suit its model."""

    batch: int  # [sequences]
    prompt: int  # [tokens]
    group: int  # numbers that share a scale, a divisor of the head dimension
    weight_bits: int  # 4 where the model's widths allow it, otherwise 16
    kv_heads: int = 2  # of the model


class Implementation:
    """One technique on one decoder, for one batch of prompts."""

    differences: ClassVar[dict[str, str]] = {}
    """Ops and buffers that really differ from what the technique states, and why."""

    eager_reason = "what a round does follows from what earlier ones have cached"
    """Why rounds are not replayed as a CUDA graph; empty where they are, see ``branch``."""

    @property
    def op_periods(self) -> dict[str, int]:
        """Ops done whenever a cache has grown by so many tokens; the prediction spreads them."""
        return {}

    @classmethod
    def small_settings(cls, run: SmallRun) -> list[str]:
        """Settings under which the technique acts in a small run, as the notation writes them."""
        return [""]

    def __init__(
        self, technique: Technique, decoder: Decoder, lengths: list[int], generate: int
    ) -> None:
        self.technique = technique
        self.decoder = decoder
        self.model = decoder.arch.model
        self.shapes = decoder.arch.shapes  # of every layer
        self.lengths = lengths  # of the prompts [tokens]
        self.batch = len(lengths)
        self.prompt = max(lengths)  # the longest [tokens]
        self.capacity = self.prompt + generate + self.slack  # positions in use at most [tokens]
        self._scratch: tuple[Tensor, Tensor] | None = None

    @property
    def counter(self) -> NullCounter:
        """Where ops are counted."""
        return self.decoder.counter

    # hooks

    def prefill(
        self, layer: int, tensor: Tensor, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor:
        """Attention of one chunk of the prompt; see ``decoder.Attend`` for the shapes."""
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
        if stop == self.prompt and step.rows.stop == count:
            self.store_prompt(layer, cached_keys, cached_values)
        return out

    def attend_prompt(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor:
        """Attention of a chunk over the prompt so far, (batch, KV heads, tokens, dim)."""
        with self.counter.op("attn") as record:
            seen = visible(step, step.length, self.shapes[layer].window)
            return attend(record, queries, keys, values, seen)

    def store_prompt(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store a layer's prompt (batch, KV heads, longest prompt, dim), to be overwritten after.

        Beyond a sequence's own length it holds numbers that no query may see.
        """
        raise NotImplementedError

    def after_prompt(self, run: "Generation") -> None:
        """What is done once, after the prompt and before the first round."""

    def decode_round(self, run: "Generation") -> None:
        """One decoding round: here one token per sequence."""
        logits = run.forward(run.last[:, None], "decode")
        run.emit(run.choose(logits), logits=logits)

    def branch(self, cached: list[int]) -> Hashable:
        """Rounds with the same are the same work on the GPU; none for one that is not replayed.

        Shapes of a pass that is ``fixed`` then follow from nothing but that: where tokens go and
        what they see is known on the device alone.
        """
        return ()

    @property
    def reads_all_slots(self) -> bool:
        """Whether attention of a replayed round reads the whole room of a cache, under a mask."""
        return True

    def op_shares(self, cached: list[int]) -> Mapping[str, float]:
        """How much of ops the round after so many cached tokens does; a prediction takes 1."""
        return {}

    def attend(
        self, layer: int, tensor: Tensor, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor | Answer:
        """Attention of new tokens; see ``decoder.Attend`` for the shapes."""
        raise NotImplementedError

    def on_layer_output(self, layer: int, hidden: Tensor, step: Pass) -> None:
        """A pass has left a layer with these hidden states (sequences, new, hidden)."""

    def weights(self, layer: int, kind: Kind) -> LayerWeights:
        """The weights of a layer in a pass of that kind."""
        return self.decoder.weights.layers[layer]

    def resident(self) -> Resident:
        """Every tensor kept between layers, besides weights, hidden states and logits."""
        raise NotImplementedError

    @property
    def slack(self) -> int:
        """Tokens that a pass may append beyond those generated, as drafts do. [tokens]"""
        return 0

    def tiles(self, layer: int) -> list[slice]:
        """Sequences of each part of the batch that passes through a layer by itself."""
        return [slice(0, self.batch)]

    def prompt_tiles(self, layer: int, most: int) -> list[slice]:
        """The same for prompts, of which about ``most`` tokens pass through it at once.

        Who keeps sequences apart takes whole prompts one after another: keys and values are then
        read once per prompt, and not once for every few tokens of all of them.
        """
        return self.tiles(layer)

    def whole_prompt_tiles(self, part: slice, most: int) -> list[slice]:
        """As many whole prompts of a part as have so many tokens, or one, which goes in chunks."""
        each = max(1, most // self.prompt)
        return [slice(i, min(i + each, part.stop)) for i in range(part.start, part.stop, each)]

    def attends_async(self, layer: int) -> bool:
        """Whether the part before may still wait for its attention when this layer starts."""
        return False

    def prompt_done(self) -> None:
        """Every layer has read the prompt: free what only that needed."""
        self._scratch = None

    def close(self) -> None:
        """Stop threads, if there are any."""

    # what implementations share

    def resident_bytes(self) -> dict[Tier, dict[str, int]]:
        """Bytes by tier and buffer, one layer's prompt included while it is there. [B]"""
        sizes = {
            tier: {name: size(*tensors) for name, tensors in buffers.items()}
            for tier, buffers in self.resident().items()
        }
        if self._scratch is not None:
            sizes["gpu"]["prompt kv"] = size(*self._scratch)
        return sizes

    def empty(self, slots: int, sequences: int | None = None) -> Tensor:
        """Room for ``slots`` tokens of one layer, (sequences, KV heads, slots, dim)."""
        m, where = self.model, self.decoder
        shape = (self.batch if sequences is None else sequences, m.kv_heads, slots, m.head_dim)
        return torch.zeros(shape, device=where.device, dtype=where.dtype)


def together(*parts: Resident) -> Resident:
    """Everything that several parts keep, by tier and buffer."""
    held: Resident = {"gpu": {}}
    for part in parts:
        for tier, buffers in part.items():
            for name, tensors in buffers.items():
                held.setdefault(tier, {}).setdefault(name, []).extend(tensors)
    return held


def query_ranges(
    queries: int, scores: int, device: torch.device, room: int | None = None
) -> Iterator[slice]:
    """Queries that are worked on together where their scores leave the kernel.

    Parameters
    ----------
    scores : numbers that one query has; a GPU takes more at once.
    room : numbers that a range may have at most.
    """
    most = SCORES_ON_GPU if device.type == "cuda" else NUMBERS
    return ranges(queries, scores, most if room is None else min(most, room))


def put(cache: Tensor, new: Tensor, step: Pass) -> None:
    """Write new keys or values (sequences, KV heads, new, dim) at their positions in a cache."""
    cache = cache[step.rows]
    if step.uniform:
        start = step.starts[0]
        cache[:, :, start : start + step.new] = new
    else:
        sequences = torch.arange(len(step.starts), device=cache.device)[:, None]
        cache[sequences, :, step.positions] = new.transpose(1, 2)
