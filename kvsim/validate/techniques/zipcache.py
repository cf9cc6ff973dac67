"""ZipCache: salient tokens at higher precision, found by a few probe queries."""

from types import MappingProxyType

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.axes.base import Storage
from kvsim.techniques.papers.zipcache import Zipcache as Settings
from kvsim.validate.counter import NullCounter, OpRecord, uncounted
from kvsim.validate.kernels.attention import PartialAttention, attend, merge
from kvsim.validate.kernels.packing import WIDTHS
from kvsim.validate.model.attention import Pass, Seen
from kvsim.validate.parts.base import SmallRun
from kvsim.validate.parts.cells import CacheRoom, KvStore, SlotRange, count_pairs
from kvsim.validate.parts.mixed import PrecisionRows
from kvsim.validate.parts.probes import Probing

DRAWN = "probing steps are drawn; the prediction takes their mean"


class Zipcache(KvStore):
    """Mixed precision by normalised attention of probes, window by window.

    A token's rows are in the order of their saliency: attention asks for no other. Every KV head
    has salient tokens of its own, and all sequences of the batch share the ranges of channels.

    References
    ----------
    .. [1] Y. He et al., "ZipCache", NeurIPS 2024, equations 6, 8 and 9, algorithms 1 to 3; a
       window is packed by itself, as algorithm 3 has it.
    """

    drops_tokens, keeps_numbers, by_position = False, False, True
    differences = MappingProxyType(
        {
            "quantise": "a window is packed at once; the prediction spreads that evenly",
            "saliency": "a window is ranked at once; the prediction spreads that evenly",
            "probe": DRAWN,
        }
    )

    @classmethod
    def small_settings(cls, run: SmallRun) -> list[str]:
        """Those of the paper."""
        return [""]

    def __init__(self, part: Storage, room: CacheRoom, slots: int, counter: NullCounter) -> None:
        assert isinstance(part, Settings)
        super().__init__(part, room, slots, counter)
        for bits in (part.high, part.low):
            if bits not in WIDTHS:
                raise InputError(
                    f"zipcache: {bits:g} bits are not packed; expected high and low among "
                    f"{', '.join(map(str, WIDTHS))}"
                )
        self.window, salient, lengths = part.window, float(part.salient), room.prompts
        self.salient = [round(salient * n) for n in lengths]  # of every prompt [tokens]
        others = [n - h for n, h in zip(lengths, self.salient, strict=True)]
        more = round(salient * self.window)
        windows = max(0, slots - max(lengths) - 1) // self.window
        self.high = PrecisionRows(room, int(part.high), self.salient, more, windows)
        self.low = PrecisionRows(room, int(part.low), others, self.window - more, windows)
        self.k, self.v = room.zeros(self.window), room.zeros(self.window)
        # attention of this window's probes, added up
        self.saliency = room.zeros(1, self.window, torch.float32)[:, :, 0]
        self.probing = room.common.get(
            ("probing", part), lambda: Probing(part.probe, self.window, lengths, room.device)
        )
        self._ends = torch.tensor(lengths, device=room.device)[:, None]
        self._token = 0  # number of the newest token since the prompt

    def attend_prompt(
        self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass, seen: Seen
    ) -> Tensor:
        """Full attention, while the probes are collected."""
        self.probing.prompt.take(queries, step)
        return super().attend_prompt(queries, keys, values, step, seen)

    def fill(self, keys: Tensor, values: Tensor, counts: list[int], plainly: str = "attn") -> None:
        """Rank a prompt by the attention of the probes (equation 8), and pack it."""
        tokens = keys.shape[2]
        with self.counter.op("probe") as record:
            seen = self.probing.prompt.seen(tokens).sum(1)
            saliency = self.probing.prompt.votes(record, keys) / seen.clamp(min=1)[:, None]
            record.writes(saliency)
        beyond = torch.arange(tokens, device=keys.device) >= self._ends
        self.pack(keys, values, saliency.masked_fill(beyond[:, None], -1.0), 0)

    def append(self, keys: Tensor, values: Tensor, span: SlotRange) -> None:
        """A new token to its place in the window."""
        self._token = span.ends[0] - 1 - self.room.prompts[0]
        with self.counter.op("attn") as record:
            slot = self._slots()[:, self._token % self.window]
            sequences = torch.arange(len(slot), device=slot.device)
            self.k[sequences, :, slot], self.v[sequences, :, slot] = keys[:, :, 0], values[:, :, 0]
            record.writes(keys, values)

    def attend(self, queries: Tensor, span: SlotRange, seen: Seen) -> Tensor:
        """Packed rows and window; at times probe; pack the window when it is full."""
        fresh, probing = self._token % self.window + 1, self.probing.probes(self._token)
        with self.counter.op("attn") as record:
            parts = self._attend_packed(record, queries, span, fresh, probing)
            out = merge(parts).to(queries.dtype)
        if probing:
            self._probe(parts, fresh)
        if fresh == self.window:
            self._compress()
        return out

    def attend_with_scores(
        self, queries: Tensor, span: SlotRange, seen: Seen
    ) -> tuple[Tensor, Tensor]:
        """Selections that ask for scores keep tokens in other slots."""
        raise NotImplementedError

    def tensors(self) -> dict[str, list[Tensor]]:
        """Packed rows, window and the saliency of its tokens."""
        rows = [*self.high.tensors(), *self.low.tensors()]
        return {"kv": rows, "fp16 window": [self.k, self.v], "saliency": [self.saliency]}

    def pack(self, keys: Tensor, values: Tensor, saliency: Tensor, time: int) -> None:
        """Split tokens (batch, KV heads, tokens, head dim) by saliency, pack both parts.

        Parameters
        ----------
        time : 0 for the prompt, then the number of the window.
        """
        with self.counter.op("saliency") as record:
            record.reads(saliency)
            order = saliency.argsort(dim=-1, descending=True, stable=True)
        with self.counter.op("quantise") as record:
            start = torch.zeros(len(keys), dtype=torch.long, device=keys.device)
            for part in (self.high, self.low):
                start = start + part.add(record, keys, values, order, start, time)

    @property
    def packed(self) -> int:
        """Windows that are packed when the newest token comes."""
        return self._token // self.window

    @property
    def _places(self) -> Tensor:
        return torch.arange(self.window, device=self.room.device)

    def _slots(self) -> Tensor:
        """Slot of every token of the window, (batch, window): it continues the low rows."""
        return (self.low.counts(self.packed)[:, None] + self._places) % self.window

    def _attend_packed(
        self, record: OpRecord, queries: Tensor, span: SlotRange, fresh: int, probing: bool
    ) -> list[PartialAttention]:
        """Salient rows; then the others with the window, and its scores where they are needed."""
        parts = []
        if self.high.rows:
            parts.append(attend(queries, self.high.view(self.packed)))
        low = self.low.view(self.packed, fresh, self.k, self.v)
        parts.append(attend(queries, low, scored=probing))
        if record.counting:
            with uncounted():
                record.reads(queries, *self.high.read(self.packed), *self.low.read(self.packed))
                record.reads(self.k[:, :, :fresh], self.v[:, :, :fresh])
                record.writes(parts[-1].out.to(queries.dtype))
                count_pairs(record, queries, span, queries.is_cuda)
        return parts

    def _probe(self, parts: list[PartialAttention], fresh: int) -> None:
        """Add up the attention that the window's tokens get from this step's query."""
        scores = parts[-1].scores
        assert scores is not None
        with self.counter.op("probe") as record:
            first = self.low.counts(self.packed)[:, None] + self._places[:fresh]
            index = first[:, None].expand(-1, scores.shape[1], -1)
            scores = scores.gather(2, index)
            lse = torch.stack([part.lse[:, :, -1] for part in parts]).logsumexp(0)
            shares = (scores.float() - lse[..., None]).exp()
            grouped = shares.view(len(shares), self.room.heads, -1, fresh)
            self.saliency[..., :fresh] += grouped.mean(2)
            record.writes(scores)
            record.reads(scores)

    def _compress(self) -> None:
        """Pack a full window by its saliency, normalised by the probes that saw each token."""
        index = self._slots()[:, None, :, None].expand_as(self.k)
        saliency = self.saliency / self.probing.seen.clamp(min=1)
        k, v = self.k.gather(2, index), self.v.gather(2, index)
        self.pack(k, v, saliency, self.packed + 1)
        self.saliency.zero_()
