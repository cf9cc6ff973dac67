"""A packed cache on the GPU, the best pairs fetched from the host one step ahead."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.papers.specache import Pairs as Settings
from kvsim.validate.kernels.attention import PartialAttention
from kvsim.validate.kernels.gather import gather
from kvsim.validate.kernels.topk import softmax_top_k
from kvsim.validate.model.attention import Pass
from kvsim.validate.parts.base import Resident
from kvsim.validate.parts.cells import SlotRange
from kvsim.validate.parts.late_kivi import LateKivi
from kvsim.validate.parts.packed import Fetched
from kvsim.validate.parts.selecting import LayerCache, LayerContext


class Pairs(LayerCache):
    """Speculative prefetch: each step decodes the output token and a guess of the next.

    The output token attends to the packed cache with the pairs in place that the guess chose a
    step earlier; the guess attends alongside and chooses those of the next step. Only the output
    token's keys and values stay. They are packed after attention, and stored on the host before
    the pairs of the next step are gathered there.

    References
    ----------
    .. [1] S. Jie et al., "SpeCache", ICML 2025, section 3.3, algorithms 1 to 3.
    """

    def __init__(self, place: LayerContext) -> None:
        settings = place.parts.selection
        assert isinstance(settings, Settings)
        super().__init__(place)
        if not isinstance(self.cells, LateKivi):
            raise InputError(
                f"pairs: no real implementation replaces single tokens of "
                f"{self.parts.storage.name}; use specache"
            )
        self.packed = self.cells
        self.guesses = settings.speculative
        run, m = self.run, self.model
        rows = self.slots
        self.chosen = int(min(int(settings.k), rows))
        self.lanes = run.placements[self.layer].lanes()
        # one token of the whole batch is contiguous, so that storing it is one copy
        shape = (rows if self.chosen else 0, self.batch, m.kv_heads, m.head_dim)
        self.homes = [self.lanes.host(shape, self.dtype).permute(1, 2, 0, 3) for _ in "kv"]
        self.fetched = self._room(), self._room()
        none = torch.full((self.batch, m.kv_heads, self.chosen), -1, dtype=torch.int32)
        self.index = none.to(self.device)
        self.stored = self._arrived = self.lanes.mark()  # the last copies there and back
        self._leaving: tuple[Tensor, ...] = ()  # what is on its way to the host
        self._before: list[Pairs] = run.shared("pairs", list)
        self._before.append(self)

    def store_prompt(self, keys: Tensor, values: Tensor) -> None:
        """Pack the prompt and store it on the host while the next layer reads it."""
        super().store_prompt(keys, values)
        if not self.chosen:
            return
        if mine := self._before.index(self):
            self._before[mine - 1].has_left()  # its copy makes room for this one's
        self._store(slice(0, self.prompt), keys, values)

    def prompt_done(self) -> None:
        """The last layer's prompt has to have left."""
        self.has_left()

    def has_left(self) -> None:
        """Wait until what was sent is on the host, and free its source."""
        self.stored.wait()
        self._leaving = ()

    def in_flight(self) -> list[Tensor]:
        """Copies of the prompt that are on their way to the host."""
        return list(self._leaving)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Attend with the fetched pairs in place, choose and prefetch the next, store, pack."""
        span, stays = SlotRange.after_cached(step), step.kind != "between"
        self._arrived.wait()
        self.packed.append(keys, values, span)
        known = Fetched(self.index, *self.fetched) if self.chosen else None
        first = known if self.guesses and stays else None
        part = self.packed.attend_with_pairs(queries, span, first, scored=self.chosen > 0)
        if self.chosen and self.guesses:
            if stays:
                self._append_home(keys, values, step)
            self._choose(part, step, eligible=step.positions[:, -1])
        elif self.chosen:
            self._choose(part, step, eligible=step.positions[:, 0])
            self._arrived.wait()
            known = Fetched(self.index, *self.fetched)
            part = self.packed.attend_with_pairs(
                queries, span, known, scored=False, name="attn_again"
            )
            self._append_home(keys, values, step)
        if stays:
            self.packed.pack(span)
        return part.out.to(queries.dtype)

    def buffers(self) -> Resident:
        """The fetched pairs with their indices; everything on the host."""
        held = {"fetched pairs": [*self.fetched], "indices": [self.index]}
        return {"gpu": held, "host": {"kv": self.homes}}

    def _room(self) -> Tensor:
        """For the fetched keys or values."""
        m = self.model
        shape = (self.batch, m.kv_heads, self.chosen, m.head_dim)
        return torch.zeros(shape, device=self.device, dtype=self.dtype)

    def _choose(self, part: PartialAttention, step: Pass, eligible: Tensor) -> None:
        """Choose the next pairs among the first ``eligible`` (batch,) tokens and fetch them."""
        assert part.scores is not None
        scores, heads = part.scores[..., : step.length], self.model.kv_heads
        with self.counter.op("topk") as record:
            index = softmax_top_k(scores, heads, self.chosen, eligible.int())
            index = torch.nn.functional.pad(index, (0, self.chosen - index.shape[-1]), value=-1)
            record.writes(scores)
            record.reads(scores)
        self.index = index

        def fetch() -> None:
            gather(self.homes[0], self.homes[1], index.clamp(min=0), *self.fetched)

        self._arrived = self.lanes.h2d(fetch, self.lanes.mark(), self.stored)
        many = min(self.chosen, max(step.starts) + step.new - 1)
        moved = [p[:, :, :many] for p in self.fetched]
        self.counter.copy("prefetch", "h2d", moved, rows=2 * self.batch * heads * many)

    def _append_home(self, keys: Tensor, values: Tensor, step: Pass) -> None:
        """Store the output token on the host."""
        keys, values = keys[:, :, :1], values[:, :, :1]
        if step.uniform:
            self._store(slice(step.starts[0], step.starts[0] + 1), keys, values)
            return
        rows = list(enumerate(step.starts))

        def store() -> None:
            for home, new in zip(self.homes, (keys, values), strict=True):
                for i, row in rows:
                    home[i, :, row].copy_(new[i, :, 0], non_blocking=True)

        self._send(store, keys, values)

    def _store(self, rows: slice, keys: Tensor, values: Tensor) -> None:
        """Copy the same rows of every sequence to the host."""
        laid_out = (t.permute(2, 0, 1, 3) for t in (keys, values))
        made = tuple(t.clone(memory_format=torch.contiguous_format) for t in laid_out)

        def store() -> None:
            for home, new in zip(self.homes, made, strict=True):
                home.permute(2, 0, 1, 3)[rows].copy_(new, non_blocking=True)

        self._send(store, *made)

    def _send(self, store: Callable[[], None], *held: Tensor) -> None:
        """Queue a copy to the host; its source is kept until the next one of this layer."""
        self.stored, self._leaving = self.lanes.d2h(store, self.lanes.mark()), held
        self.counter.copy("store_kv", "d2h", held)
