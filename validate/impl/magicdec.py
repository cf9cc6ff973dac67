"""MagicDec: drafts attend to a small sparse cache, verification to the whole one."""

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from kvsim.errors import InputError
from kvsim.techniques.base import Technique
from kvsim.techniques.magicdec import Magicdec as Settings
from kvsim.techniques.selfdraft import SINK, WINDOW
from kvsim.validate.impl.base import Resident, SmallRun
from kvsim.validate.impl.full import Full
from kvsim.validate.impl.probes import Probes
from kvsim.validate.impl.speculation import Speculative
from kvsim.validate.model.attention import Pass, attend
from kvsim.validate.model.decoder import Decoder

POOL = 5  # neighbouring tokens whose scores SnapKV averages


class Magicdec(Speculative, Full):
    """Self-speculation with a draft cache of its own beside the full one.

    Verification writes its keys and values into both caches, so that a draft never attends to
    what an earlier draft made of accepted tokens. Keys keep their positions.

    References
    ----------
    .. [1] R. Sadhukhan et al., "MagicDec", ICLR 2025, section 4.
    .. [2] Y. Li et al., "SnapKV", NeurIPS 2024, section 4: the selection of draft ``snapkv``.
    """

    @classmethod
    def small_settings(cls, run: SmallRun) -> list[str]:
        """Two drafts over half of the prompt."""
        return [f"budget={2 * max(1, run.prompt // 4)},gamma=2"]

    def __init__(
        self, technique: Technique, decoder: Decoder, lengths: list[int], generate: int
    ) -> None:
        settings = technique.term(Settings)
        super().__init__(technique, decoder, lengths, generate)
        self.budget = int(settings.budget)
        self.sparse = settings.draft
        if self.gamma and self.budget <= max(SINK, WINDOW * (self.sparse == "snapkv")):
            least = WINDOW if self.sparse == "snapkv" else SINK
            raise InputError(
                f"magicdec: budget={self.budget} leaves nothing beside the {least} tokens that "
                f"draft={self.sparse} always keeps; choose more"
            )
        device = decoder.device
        self._lengths = torch.tensor(lengths, device=device)
        self._kept = self._lengths.clamp(max=self.budget)  # of each prompt, by draft snapkv
        most = min(self.prompt, self.budget) + generate if self.sparse == "snapkv" else self.budget
        slots = min(most + self.gamma, self.capacity) if self.gamma else 0
        self._ring = max(slots - SINK, 1)
        self.draft_k = [self.empty(slots) for _ in self.shapes]
        self.draft_v = [self.empty(slots) for _ in self.shapes]
        last = self._lengths[:, None] - 1 - torch.arange(min(WINDOW, self.prompt), device=device)
        self._probes = Probes(self, last.clamp(min=-1))

    def prefill(
        self, layer: int, tensor: Tensor, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor:
        """The whole cache takes the prompt, the draft's what it keeps of it."""
        out = super().prefill(layer, tensor, queries, keys, values, step)
        if self.gamma:
            if self._observes:
                self._probes.take(queries, step)
            if step.length == self.prompt:
                self._fill(layer)
        return out

    def attend(
        self, layer: int, tensor: Tensor, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor:
        """A draft sees its own cache; verification fills both and sees everything."""
        if step.kind == "prefill" or not self.gamma:
            return super().attend(layer, tensor, queries, keys, values, step)
        sequences = torch.arange(self.batch, device=queries.device)[:, None]
        slots = self._slots(step.positions)
        with self.tally.op("attn") as marks:
            for cache, new in ((self.draft_k[layer], keys), (self.draft_v[layer], values)):
                cache[sequences, :, slots] = new.transpose(1, 2)
            marks.writes(keys, values)
            if step.kind == "draft":
                used = min(self._used(step), self.draft_k[layer].shape[2])
                cached_keys, cached_values = (
                    c[layer][:, :, :used] for c in (self.draft_k, self.draft_v)
                )
                return attend(marks, queries, cached_keys, cached_values, self._seen(step, used))
        return super().attend(layer, tensor, queries, keys, values, step)

    def resident(self) -> Resident:
        """The whole cache, and the one that drafts see."""
        held = super().resident()
        if self.gamma:
            held["gpu"]["draft kv"] = [*self.draft_k, *self.draft_v]
        return held

    @property
    def _observes(self) -> bool:
        return self.sparse == "snapkv" and self.prompt > self.budget

    def _used(self, step: Pass) -> int:
        """Slots of the draft cache that hold a token of some sequence."""
        if self.sparse == "streamingllm":
            return step.length
        kept = (min(n, self.budget) for n in self.lengths)
        ends = (n + step.new for n in step.starts)
        return max(k + e - n for k, e, n in zip(kept, ends, self.lengths, strict=True))

    def _slots(self, positions: Tensor) -> Tensor:
        """Where the draft cache has generated tokens at positions (batch, new)."""
        if self.sparse == "snapkv":
            return positions - (self._lengths - self._kept)[:, None]
        return torch.where(positions < SINK, positions, SINK + (positions - SINK) % self._ring)

    def _held(self, latest: Tensor, slots: int) -> Tensor:
        """Position of the token in each slot of a streaming draft, (batch, slots).

        A slot that a rejected draft has overwritten would be older than the window.
        """
        slot = torch.arange(slots, device=latest.device)
        rolled = latest[:, None] - (latest[:, None] - slot) % self._ring
        return torch.where(slot < SINK, slot, rolled)

    def _seen(self, step: Pass, slots: int) -> Tensor:
        """What the draft's one query sees, (batch, 1, 1, slots)."""
        now = step.positions[:, -1]
        slot = torch.arange(slots, device=now.device)
        if self.sparse == "snapkv":
            seen = slot <= self._slots(step.positions)
        else:
            held = self._held(now, slots)
            recent = held > now[:, None] - (self.budget - SINK)
            seen = (held <= now[:, None]) & (held >= 0) & ((slot < SINK) | recent)
        return seen[:, None, None]

    def _fill(self, layer: int) -> None:
        """Copy what a draft keeps of a layer's prompt."""
        keys, values = (c[layer][:, :, : self.prompt] for c in (self.k, self.v))
        slots = min(self.draft_k[layer].shape[2], self.prompt)
        if self.sparse == "snapkv":
            slots = min(self.budget, self.prompt)
            index = self._select(keys, slots)
        else:
            index = self._held(self._lengths - 1, slots).clamp(min=0)[:, None]
        with self.tally.op("compact") as marks:
            rows = index[..., None].expand(-1, keys.shape[1], -1, keys.shape[3])
            for whole, draft in ((keys, self.draft_k[layer]), (values, self.draft_v[layer])):
                kept = whole.gather(2, rows)
                draft[:, :, :slots] = kept
                marks.reads(kept)
                marks.writes(kept)

    def _select(self, keys: Tensor, slots: int) -> Tensor:
        """SnapKV's tokens of every KV head in order, (batch, KV heads, slots).

        The prompt's last queries vote for tokens with their neighbours; they are kept themselves.
        """
        position = torch.arange(self.prompt, device=keys.device)
        if not self._observes:
            return position[None, None, :slots].expand(len(keys), keys.shape[1], -1)
        with self.tally.op("observe") as marks:
            votes = self._probes.votes(marks, keys)
            votes = avg_pool1d(votes, POOL, stride=1, padding=POOL // 2)
        with self.tally.op("select") as marks:
            marks.reads(votes)
            ends = self._lengths[:, None, None]
            votes = votes.masked_fill(position >= ends - WINDOW, torch.inf)
            votes = votes.masked_fill(position >= ends, -torch.inf)
            return votes.topk(slots, dim=-1).indices.sort(-1).values
