"""ZipCache: salient tokens at higher precision, found by a few probe queries."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.base import Technique
from kvsim.techniques.zipcache import Zipcache as Settings
from kvsim.validate.impl.base import Implementation, Resident
from kvsim.validate.impl.mixed import PrecisionRows
from kvsim.validate.impl.packed_layers import count_pairs
from kvsim.validate.impl.probes import Probes
from kvsim.validate.kernels.attention import PartialAttention, attend, merge
from kvsim.validate.kernels.packing import WIDTHS
from kvsim.validate.model.attention import Pass
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.tally import Marks, uncounted


@dataclass
class Layer:
    """One layer: salient and other rows, the window of new tokens, and how salient those are."""

    high: PrecisionRows
    low: PrecisionRows
    k: Tensor  # (batch, KV heads, window, head dim)
    v: Tensor
    saliency: Tensor  # (batch, KV heads, window): attention of this window's probes, added up


class Zipcache(Implementation):
    """Mixed precision by normalised attention of probes, window by window.

    A token's rows are in the order of their saliency: attention asks for no other. Every KV head
    has salient tokens of its own, and all sequences of the batch share the ranges of channels.

    References
    ----------
    .. [1] Y. He et al., "ZipCache", NeurIPS 2024, equations 6, 8 and 9, algorithms 1 to 3; a
       window is packed by itself, as algorithm 3 has it.
    """

    differences: ClassVar[dict[str, str]] = {
        "quantise": "a window is packed at once; the prediction spreads that evenly",
        "saliency": "a window is ranked at once; the prediction spreads that evenly",
        "probe": "probing steps are drawn; the prediction takes their mean",
    }

    def __init__(
        self, technique: Technique, decoder: Decoder, lengths: list[int], generate: int
    ) -> None:
        settings = technique.term(Settings)
        super().__init__(technique, decoder, lengths, generate)
        self.t = settings
        for bits in (settings.high, settings.low):
            if bits not in WIDTHS:
                raise InputError(
                    f"zipcache: {bits:g} bits are not packed; expected high and low among "
                    f"{', '.join(map(str, WIDTHS))}"
                )
        if any(shape.window for shape in self.shapes):
            raise InputError(
                f"zipcache: {self.model.name} has sliding windows, which its packed cache does "
                f"not roll over; choose a model that attends to every token"
            )
        self.window, salient = settings.window, float(settings.salient)
        self._high = [round(salient * n) for n in lengths]
        self._low = [n - h for n, h in zip(lengths, self._high, strict=True)]
        more, windows = round(salient * self.window), (generate - 1) // self.window
        self.layers = [
            Layer(
                PrecisionRows(self, int(settings.high), self._high, more, windows),
                PrecisionRows(self, int(settings.low), self._low, self.window - more, windows),
                self.empty(self.window),
                self.empty(self.window),
                self.empty(1, self.window, torch.float32)[:, :, 0],
            )
            for _ in self.shapes
        ]
        self._random = torch.Generator().manual_seed(0)
        self._probes = Probes(self, self._probe_positions())
        self._lengths = torch.tensor(lengths, device=decoder.device)
        self._packed = 0  # windows
        self._probing, self._probed = False, 0  # this step; steps of this window
        self._seen = torch.zeros(self.window, device=decoder.device)  # probes that saw each token

    def prefill(
        self, layer: int, tensor: Tensor, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor:
        """Full attention, while the probes are collected."""
        self._probes.take(queries, step)
        return super().prefill(layer, tensor, queries, keys, values, step)

    def filled(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Rank a layer's prompt by the attention of the probes (equation 8), and pack it."""
        with self.tally.op("probe") as marks:
            seen = self._probes.seen(self.prompt).sum(1)
            saliency = self._probes.votes(marks, keys) / seen.clamp(min=1)[:, None]
            marks.writes(saliency)
        beyond = torch.arange(self.prompt, device=keys.device) >= self._lengths[:, None]
        self._pack(layer, keys, values, saliency.masked_fill(beyond[:, None], -1.0), 0)

    def attend(
        self, layer: int, tensor: Tensor, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor:
        """Attend to packed rows and window; at times probe; pack the window when it is full."""
        mine = self.layers[layer]
        at = (step.starts[0] - self.lengths[0]) % self.window  # the new token's place
        if layer == 0:
            self._packed = (step.starts[0] - self.lengths[0]) // self.window
            self._probing = self._probes_at(at)
        with self.tally.op("attn") as marks:
            slot = self._slots(layer)[:, at]
            sequences = torch.arange(self.batch, device=queries.device)
            mine.k[sequences, :, slot], mine.v[sequences, :, slot] = keys[:, :, 0], values[:, :, 0]
            marks.writes(keys, values)
            parts = self._look(marks, layer, queries, step, at + 1)
            out = merge(parts).to(queries.dtype)
        if self._probing:
            self._probe(layer, parts, at + 1)
        if at + 1 == self.window:
            self._compress(layer)
        return out

    def resident(self) -> Resident:
        """Packed rows, window and the saliency of its tokens."""
        rows = [t for m in self.layers for part in (m.high, m.low) for t in part.tensors()]
        return {
            "gpu": {
                "kv": rows,
                "fp16 window": [t for m in self.layers for t in (m.k, m.v)],
                "saliency": [m.saliency for m in self.layers],
            }
        }

    def _probe_positions(self) -> Tensor:
        """Half of the probes are each prompt's last tokens, half are drawn from the others."""
        chosen = []
        for length in self.lengths:
            recent = min(max(round(self.t.probe / 2 * length), self.t.probe > 0), length)
            drawn = max(round(self.t.probe * length) - recent, 0)
            others = torch.randperm(length - recent, generator=self._random)[:drawn]
            chosen.append(torch.cat([others, torch.arange(length - recent, length)]))
        return torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True, padding_value=-1)

    def _probes_at(self, at: int) -> bool:
        """Whether a window's token ``at`` probes: its last ones but the very last, and some."""
        recent = round(self.t.probe / 2 * self.window)
        lucky = float(torch.rand(1, generator=self._random)) < self.t.probe / 2
        last = at + 1 == self.window
        probing = not last and (at >= self.window - recent or lucky)
        probing |= last and not self._probed  # or nothing would rank the window
        self._probed = 0 if last else self._probed + probing
        if probing:
            self._seen[: at + 1] += 1
        return probing

    def _slots(self, layer: int) -> Tensor:
        """Slot of every token of the window, (batch, window): it continues the low rows."""
        return (self.layers[layer].low.counts(self._packed)[:, None] + self._places) % self.window

    @property
    def _places(self) -> Tensor:
        return torch.arange(self.window, device=self.decoder.device)

    def _look(
        self, marks: Marks, layer: int, queries: Tensor, step: Pass, fresh: int
    ) -> list[PartialAttention]:
        """Salient rows; then the others with the window, and its scores where they are needed."""
        mine, parts = self.layers[layer], []
        if mine.high.rows:
            parts.append(attend(queries, mine.high.view(self._packed)))
        low = mine.low.view(self._packed, fresh, mine.k, mine.v)
        parts.append(attend(queries, low, scored=self._probing))
        if marks.counting:
            with uncounted():
                marks.reads(queries, *mine.high.read(self._packed), *mine.low.read(self._packed))
                marks.reads(mine.k[:, :, :fresh], mine.v[:, :, :fresh])
                marks.writes(parts[-1].out.to(queries.dtype))
                count_pairs(marks, queries, step)
        return parts

    def _probe(self, layer: int, parts: list[PartialAttention], fresh: int) -> None:
        """Add up the attention that the window's tokens get from this step's query."""
        mine, scores = self.layers[layer], parts[-1].scores
        assert scores is not None
        with self.tally.op("probe") as marks:
            first = mine.low.counts(self._packed)[:, None] + self._places[:fresh]
            index = first[:, None].expand(-1, scores.shape[1], -1)
            scores = scores.gather(2, index)
            lse = torch.stack([part.lse[:, :, -1] for part in parts]).logsumexp(0)
            shares = (scores.float() - lse[..., None]).exp()
            heads = (self.batch, self.model.kv_heads, -1, fresh)
            mine.saliency[..., :fresh] += shares.view(heads).mean(2)
            marks.writes(scores)
            marks.reads(scores)

    def _compress(self, layer: int) -> None:
        """Pack a full window by its saliency, normalised by the probes that saw each token."""
        mine = self.layers[layer]
        index = self._slots(layer)[:, None, :, None].expand_as(mine.k)
        saliency = mine.saliency / self._seen.clamp(min=1)
        k, v = mine.k.gather(2, index), mine.v.gather(2, index)
        self._pack(layer, k, v, saliency, self._packed + 1)
        mine.saliency.zero_()
        if layer == self.model.layers - 1:
            self._seen.zero_()

    def _pack(self, layer: int, keys: Tensor, values: Tensor, saliency: Tensor, time: int) -> None:
        """Split tokens (batch, KV heads, tokens, head dim) by saliency, pack both parts."""
        mine = self.layers[layer]
        with self.tally.op("saliency") as marks:
            marks.reads(saliency)
            order = saliency.argsort(dim=-1, descending=True, stable=True)
        with self.tally.op("quantise") as marks:
            start = torch.zeros_like(self._lengths)
            for part in (mine.high, mine.low):
                start = start + part.add(marks, keys, values, order, start, time)
