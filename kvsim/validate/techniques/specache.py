"""SpeCache: a low-bit cache on the GPU, and the best pairs prefetched from the host by a guess.

S. Jie et al., "SpeCache: Speculative Key-Value Caching for Efficient Generation of LLMs", ICML
2025, section 3.3 and algorithms 1 to 3, https://arxiv.org/abs/2503.16163.

C is the full cache in host memory, C' its packed copy on the GPU.

- Prefilling (algorithm 1): each layer reads the prompt in full precision, packs it into C' and
  offloads C while the next layer computes (``Pairs.store_prompt``).
- Pre-decoding (algorithm 2): one pass of the first output token T_1 over C' alone gives a guess
  T'_2, and the k cached tokens that T_1 attends to most, K_1, whose pairs are prefetched. What the
  pass appended is dropped (``Specache.after_prompt``).
- Decoding (algorithm 3): a step decodes [T_t, T'_{t+1}] together, over C' with the prefetched
  pairs C_K in place of their packed copies. T_t gives the next output token, T'_{t+1} the next
  guess; the k tokens that T'_{t+1} attends to most are prefetched for the next step, beside the
  compute of the layers that follow. T_t's keys and values are packed into C' and offloaded to C
  (``Specache.decode_round``, ``Pairs.attend``).

Without guesses (section 4.5, ``speculative=false``) the output token chooses, waits for its pairs
and attends once more.

Where this departs from the paper: query heads that share a KV head choose together, by the mean of
their attention; the paper does not say how. A token is not among its own top k.
"""

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.papers.specache import LateKivi as LateKiviSettings
from kvsim.techniques.papers.specache import Pairs as PairSettings
from kvsim.validate.kernels.stores import Levels, PartialAttention
from kvsim.validate.kernels.topk import softmax_top_k
from kvsim.validate.model.attention import Pass, Seen
from kvsim.validate.model.generation import RunningGeneration
from kvsim.validate.parts.drafting import Drafter
from kvsim.validate.parts.host_rows import HostCopies
from kvsim.validate.parts.packed import Fetched, PackedStore
from kvsim.validate.parts.selection import LayerCache, LayerContext
from kvsim.validate.parts.store import CacheRoom, Resident, SlotRange

SMALL_SETTINGS = ("group={group},residual={group},k={quarter}",)


class Specache(Drafter):
    """Decodes rounds with the output token and a guess of the next token."""

    guess: Tensor  # T'_{t+1} of every sequence (batch,)

    def after_prompt(self, generation: RunningGeneration) -> None:
        """Guess the token after the first one, in a pass over the first (algorithm 2).

        The first round computes the first token's keys and values again.
        """
        logits = generation.forward(generation.last[:, None], "between")
        self.guess = generation.choose(logits[:, 0])

    def decode_round(self, generation: RunningGeneration) -> None:
        """Decode the newest token and the guessed one in a single pass (algorithm 3).

        The newest token's successor is emitted. The guess's successor is the next guess.
        """
        logits = generation.forward(torch.stack([generation.last, self.guess], 1), "decode")
        chosen = generation.choose(logits)  # T_{t+1} and T'_{t+2}
        self.guess = chosen[:, 1]
        generation.emit(chosen[:, 0], logits=logits[:, :1])


class LateKivi(PackedStore):
    """Storage in KIVI's layout, whose tokens are packed after attention.

    Keys are packed per channel, values per token; the latest tokens stay in full precision in ring
    buffers, which have additional slots for the new tokens of a step. With one bit, the two
    levels are at a quarter and three quarters of a group's range, not at its ends (equation 3).
    """

    drops_tokens = False

    def __init__(self, room: CacheRoom) -> None:
        part = room.settings(LateKiviSettings)
        bits, ring = int(part.bits), part.residual + room.fresh
        where: Levels = "centres" if bits == 1 else "ends"
        super().__init__(room, part.residual, bits, part.group, ring, where)

    def packed_by(self, span: SlotRange) -> tuple[int, ...]:
        """Return how many tokens of each sequence were cached before the step. [tokens]"""
        return tuple(end - span.new for end in span.ends)

    def append(self, keys: Tensor, values: Tensor, span: SlotRange) -> None:
        """Write the new tokens to the ring buffers in full precision, without packing any token.

        Packing waits for ``pack_leaving``, which runs once the new tokens have attended.
        """
        self.add(keys, values, span)

    def attend(self, queries: Tensor, span: SlotRange, seen: Seen) -> Tensor:
        """Attend to packed rows and ring buffers, then pack the tokens that leave the residual.

        This order is that of KIVI as released; ``Pairs`` calls ``attend_with_pairs`` instead.

        Raises
        ------
        InputError
            If a sequence has several new tokens.
        """
        if span.new > 1:
            raise InputError("late-kivi: packs after one token; run it without drafts")
        out = super().attend(queries, span, seen)
        self.pack_leaving(span)
        return out

    def attend_with_pairs(
        self,
        queries: Tensor,
        span: SlotRange,
        fetched: Fetched | None,
        scored: bool,
        name: str = "attn",
    ) -> PartialAttention:
        """Attend with the fetched pairs in place of their packed copies.

        Parameters
        ----------
        queries
            Queries of the new tokens, (batch, heads, new, dim).
        fetched
            The fetched pairs and their tokens; None to attend only to the packed cache.
        scored
            Whether the last query's scores are returned, too.
        name
            Op under which the work is counted.
        """
        return self._attend_packed(queries, span, scored, fetched=fetched, name=name)

    def pack_leaving(self, span: SlotRange) -> None:
        """Keep the first new token of a step, and pack the tokens that leave the residual.

        That is one value of each sequence, and a block of keys where the token completes it. It is
        called once, after all attention of the step; further new tokens, which were guessed, are
        overwritten by the next step.

        Parameters
        ----------
        span
            Slots of the step's new tokens, (sequences, new), and those in use after it.
        """
        before, position = self.packed_by(span)[0], span.slots[:, 0]
        if before >= self.residual:
            self.pack(self.v, position - self.residual, 1)
        if (before + 1) % self.residual == 0:
            self.pack(self.k, position - self.residual + 1, self.residual)

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return the tensors that stay in memory: packed rows, residual, and new tokens."""
        sides = self.k, self.v
        return {
            "kv": [t for side in sides for t in side.tensors(self.residual)],
            "new tokens": [side.ring[:, :, self.residual :] for side in sides],
        }


class Pairs(LayerCache):
    """Cache of one layer: C' in ``packed``, C in ``homes``, the fetched pairs C_K in ``fetched``.

    The fetched pairs replace their packed copies. Only the output token's keys and values are kept.
    They are packed after attention, and stored on the host before the pairs of the next step are
    gathered there.
    """

    def __init__(self, place: LayerContext) -> None:
        settings = place.settings(PairSettings)
        super().__init__(place)
        if not isinstance(self.kv, LateKivi):
            raise InputError(
                f"pairs: no real implementation replaces single tokens of "
                f"{self.parts.storage.name}; use specache"
            )
        self.packed = self.kv
        self.guesses = "specache" if settings.speculative else ""
        m, rows = self.model, self.slots
        self.chosen = int(min(int(settings.k), rows))
        self.host = HostCopies(self, rows if self.chosen else 0)
        self.fetched = self._room(), self._room()
        none = torch.full((self.batch, m.kv_heads, self.chosen), -1, dtype=torch.int32)
        self.index = none.to(self.device)
        self._arrived = self.host.stored

    def store_prompt(self, keys: Tensor, values: Tensor) -> None:
        """Pack the prompt, and copy it in full precision to the host (algorithm 1).

        The copy runs beside the next layer's compute.
        """
        super().store_prompt(keys, values)
        if self.chosen:
            self.host.store_prompt(keys, values)

    def prompt_done(self) -> None:
        """Wait until the last layer's prompt is on the host."""
        self.host.has_left()

    def in_flight(self) -> list[Tensor]:
        """Return the keys and values of the prompt that are being copied to the host."""
        return list(self.host.leaving)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Attend with the fetched pairs, choose and prefetch the next ones, then store and pack.

        New tokens are [T_t, T'_{t+1}] in a decoding step, T_1 alone in pre-decoding, and only the
        output token if nothing is guessed.
        """
        span, predecoding = SlotRange.after_cached(step), step.kind == "between"
        self._arrived.wait()  # C_K of this step is there
        self.packed.append(keys, values, span)
        has_pairs = self.chosen and self.guesses and not predecoding
        pairs = Fetched(self.index, *self.fetched) if has_pairs else None
        # O = Attn([T_t, T'_{t+1}], C' with C_K in place)                               (equation 1)
        part = self.packed.attend_with_pairs(queries, span, pairs, scored=self.chosen > 0)
        if self.chosen and self.guesses:
            if not predecoding:
                self.host.append(keys, values, step)
            # K_{t+1} = ArgTopK of what the last query, T'_{t+1} or T_1, gives to cached tokens
            self._choose(part, step, eligible=step.positions[:, -1])
        elif self.chosen:  # section 4.5: choose by the output token, fetch, attend once more
            self._choose(part, step, eligible=step.positions[:, 0])
            self._arrived.wait()
            pairs = Fetched(self.index, *self.fetched)
            part = self.packed.attend_with_pairs(
                queries, span, pairs, scored=False, name="attn_again"
            )
            self.host.append(keys, values, step)
        if not predecoding:
            self.packed.pack_leaving(span)  # C' = [C', Quant(C_t)]
        return part.out.to(queries.dtype)

    def buffers(self) -> Resident:
        """Return the fetched pairs with their indices on the GPU, and all pairs on the host."""
        held = {"fetched pairs": [*self.fetched], "indices": [self.index]}
        return {"gpu": held, "host": {"kv": self.host.homes}}

    def _room(self) -> Tensor:
        """Allocate a buffer for the fetched keys or values, (batch, KV heads, k, dim)."""
        m = self.model
        shape = (self.batch, m.kv_heads, self.chosen, m.head_dim)
        return torch.zeros(shape, device=self.device, dtype=self.dtype)

    def _choose(self, part: PartialAttention, step: Pass, eligible: Tensor) -> None:
        """Choose the next pairs among the first ``eligible`` (batch,) tokens, and prefetch them.

        The gather runs on a lane of its own, beside the compute of the layers that follow.
        """
        assert part.scores is not None
        scores, heads = part.scores[..., : step.length], self.model.kv_heads
        with self.counter.op("topk") as record:
            index = softmax_top_k(scores, heads, self.chosen, eligible.int())
            index = torch.nn.functional.pad(index, (0, self.chosen - index.shape[-1]), value=-1)
            record.writes(scores).reads(scores)
        self.index = index
        self._arrived = self.host.fetch(index.clamp(min=0), self.fetched)
        count = min(self.chosen, max(step.starts) + step.new - 1)  # pairs per KV head
        moved = [buffer[:, :, :count] for buffer in self.fetched]
        self.counter.copy("prefetch", "h2d", moved, rows=2 * self.batch * heads * count)
