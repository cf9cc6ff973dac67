"""ZipCache: salient tokens at more bits, found by the attention of a few probe queries.

Y. He et al., "ZipCache: Accurate and Efficient KV Cache Quantization with Salient Token
Identification", NeurIPS 2024, https://arxiv.org/abs/2405.14256.

- Probes (section 4.3, equation 9): A_probe = softmax(Q_probe K^T / sqrt(d)) of a share of the
  queries, half of them the latest, half drawn (``Probing``); all other attention stays in fused
  kernels.
- Saliency (equation 8): what a token is given, over the number of probes that see it
  (``Zipcache.fill``, ``_compress``).
- Packing (section 4.1): salient tokens at ``high`` bits, the others at ``low``; keys by channel
  (``channelwise``), values channel-separable by token, X_i / c_i with c_i = sqrt(max |X_i|)
  (equation 6, algorithm 1: ``separable``).
- Prompt (algorithm 2): attend, rank, split by saliency, pack (``Zipcache.fill``, ``pack``).
- Decoding (algorithm 3): new tokens stay in full precision in a window of 100; every 100 tokens the
  window is packed by the saliency that its own probes found (``append``, ``attend``, ``_probe``,
  ``_compress``).

As in algorithm 3, a window is packed by itself, with ranges of its own; as table 1 counts them, all
sequences of a batch share the ranges of channels. Where this departs from the paper: every KV head
has salient tokens of its own. A window without a probe would have no ranking, so then its last
token probes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.papers.zipcache import Zipcache as Settings
from kvsim.validate.counter import OpRecord, uncounted
from kvsim.validate.kernels.attention import attend, merge
from kvsim.validate.kernels.gather import rows_at
from kvsim.validate.kernels.packing import PACKED_BITS, pack
from kvsim.validate.kernels.quantise import encode, levels
from kvsim.validate.kernels.stores import PartialAttention, Store, View
from kvsim.validate.model.attention import Seen
from kvsim.validate.parts.scores import KeptQueries, query_ranges
from kvsim.validate.parts.store import CacheRoom, KvStore, SlotRange, count_pairs

SMALL_SETTINGS = ("",)
DRAWN_PROBES = "probing steps are drawn; the prediction takes their mean"


class Zipcache(KvStore):
    """Storage of packed rows at two precisions, and of a window of tokens in full precision.

    The rows of a head are ordered by saliency, which does not affect the result of attention.
    """

    drops_tokens, keeps_numbers, by_position = False, False, True
    differences = MappingProxyType({"probe": DRAWN_PROBES})

    def __init__(self, room: CacheRoom) -> None:
        super().__init__(room)
        part, prompt = room.settings(Settings), room.prompt
        for bits in (part.high, part.low):
            if bits not in PACKED_BITS:
                raise InputError(
                    f"zipcache: {bits:g} bits are not packed; expected high and low among "
                    f"{', '.join(map(str, PACKED_BITS))}"
                )
        self.window, salient = part.window, float(part.salient)
        self.salient = round(salient * prompt)  # of every prompt [tokens]
        more = round(salient * self.window)  # of every window [tokens]
        windows = max(0, room.slots - prompt - 1) // self.window
        self.high = PrecisionRows(room, int(part.high), self.salient, more, windows)
        others = prompt - self.salient, self.window - more
        self.low = PrecisionRows(room, int(part.low), *others, windows)
        self.k, self.v = room.zeros(self.window), room.zeros(self.window)
        # what each token of the window gets from its probes, summed: (sequences, KV heads, window)
        self.saliency = room.zeros(1, self.window, torch.float32)[:, :, 0]
        self.probing = room.common.get(
            ("probing", part), lambda: Probing(part.probe, self.window, windows + 1, room)
        )
        self.last = self.probing.prompt
        self._token = 0  # number of the newest token since the prompt

    def fill(self, keys: Tensor, values: Tensor, plainly: str = "attn") -> None:
        """Rank a prompt by the attention of the probes (equation 8), and pack it."""
        probes = self.probing.prompt
        with self.counter.op("probe") as record:
            seen = probes.visible(keys.shape[2]).sum(0)
            saliency = _votes(record, probes, keys) / seen.clamp(min=1)
            record.writes(saliency)
        self.pack(keys, values, saliency, 0)

    def append(self, keys: Tensor, values: Tensor, span: SlotRange) -> None:
        """Put a new token's keys and values into the window."""
        self._token = span.ends[0] - 1 - self.room.prompt
        with self.counter.op("attn") as record:
            slot = (self._first + self._token) % self.window
            self.k[:, :, slot], self.v[:, :, slot] = keys[:, :, 0], values[:, :, 0]
            record.writes(keys, values)

    def attend(self, queries: Tensor, span: SlotRange, seen: Seen) -> Tensor:
        """Attend to packed rows and the window; add up saliency if the token probes.

        A full window is packed afterwards.
        """
        fresh = self._token % self.window + 1
        probing = bool(self.probing.chosen[self.packed, fresh - 1])
        with self.counter.op("attn") as record:
            parts = self._attend_packed(record, queries, span, fresh, probing)
            out = merge(parts).to(queries.dtype)
        if probing:
            self._probe(parts, fresh)
        if fresh == self.window:
            self._compress()
        return out

    def op_shares(self, ends: list[int]) -> Mapping[str, float]:
        """Return the share of ranking and packing: a whole window's once it is full."""
        share = float(self.window * ((ends[0] - self.room.prompt) % self.window == 0))
        return {"saliency": share, "quantise": share}

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return the tensors that stay in memory: packed rows, window, and its saliency."""
        rows = [*self.high.tensors(), *self.low.tensors()]
        return {"kv": rows, "fp16 window": [self.k, self.v], "saliency": [self.saliency]}

    def pack(self, keys: Tensor, values: Tensor, saliency: Tensor, time: int) -> None:
        """Split tokens by saliency and pack both parts.

        Parameters
        ----------
        keys, values
            (batch, KV heads, tokens, head dim).
        saliency
            (batch, KV heads, tokens).
        time
            0 for the prompt; for a window its number, from 1.
        """
        with self.counter.op("saliency") as record:
            record.reads(saliency)
            order = saliency.argsort(dim=-1, descending=True, stable=True)
        with self.counter.op("quantise") as record:
            salient = self.high.more if time else self.salient
            self.high.add(record, keys, values, order[..., :salient], time)
            self.low.add(record, keys, values, order[..., salient:], time)

    @property
    def packed(self) -> int:
        """Number of windows that were packed before the newest token came."""
        return self._token // self.window

    @property
    def _first(self) -> int:
        """Rows at ``low`` bits, behind which the kernel reads the window as a ring buffer.

        The window's first token is in the slot of that row, modulo the window.
        """
        return self.low.count(self.packed)

    def _attend_packed(
        self, record: OpRecord, queries: Tensor, span: SlotRange, fresh: int, probing: bool
    ) -> list[PartialAttention]:
        """Attend to salient rows, and then to the others with the window.

        Scores of the second part are kept if the token probes.
        """
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
        """Add the attention that the window's tokens get from this step's query to saliency."""
        assert parts[-1].scores is not None
        with self.counter.op("probe") as record:
            logits = parts[-1].scores[..., self._first : self._first + fresh]
            lse = torch.stack([part.lse[:, :, -1] for part in parts]).logsumexp(0)
            shares = (logits.float() - lse[..., None]).exp()
            grouped = shares.view(len(shares), self.room.heads, -1, fresh)
            self.saliency[..., :fresh] += grouped.mean(2)
            record.writes(logits).reads(logits)

    def _compress(self) -> None:
        """Pack a full window by its saliency over the probes that saw each token (equation 8)."""
        k, v = (side.roll(-self._first, 2) for side in (self.k, self.v))
        saliency = self.saliency / self.probing.seen[self.packed].clamp(min=1)
        self.pack(k, v, saliency, self.packed + 1)
        self.saliency.zero_()


def channelwise(numbers: Tensor, bits: int) -> Store:
    """Pack keys, with one scale and zero point per channel.

    Parameters
    ----------
    numbers
        Keys, (batch, KV heads, tokens, head dim).
    """
    scale, zero = levels(*_range(numbers, (0, 2)), bits, "grid")
    codes = pack(encode(numbers, scale, zero, bits), bits)
    scale, zero = (table.expand(len(numbers), -1, -1, -1) for table in (scale, zero))
    return Store(codes, scale, zero, bits, max(numbers.shape[2], 1), "channel")


def separable(numbers: Tensor, bits: int) -> Store:
    """Pack values, channel-separable by token (algorithm 1, CSTQuant).

    Each channel is divided by c = sqrt(max |x|) (equation 6); then every token has one scale and
    zero point over all heads. Kernels that read the values multiply by c again.

    Parameters
    ----------
    numbers
        Values, (batch, KV heads, tokens, head dim).
    """
    factor = numbers.float().abs().amax((0, 2), keepdim=True).sqrt().half()
    divisor = factor.float()
    even = numbers.float() / torch.where(divisor > 0, divisor, 1.0)
    scale, zero = levels(*_range(even, (1, 3)), bits, "grid")
    codes = pack(encode(even, scale, zero, bits), bits)
    sequences, heads, tokens, head_dim = numbers.shape
    scale, zero = (table.expand(-1, heads, -1, -1) for table in (scale, zero))
    factor = factor.expand(sequences, -1, -1, -1)
    group = max(tokens, 1)
    return Store(codes, scale, zero, bits, head_dim, "token", factor=factor, factor_group=group)


def _range(numbers: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Find the smallest and largest number along ``dims``, which get length 1."""
    return numbers.amin(dims, keepdim=True), numbers.amax(dims, keepdim=True)


class PrecisionRows:
    """The packed tokens of one layer at one precision.

    Rows come in sets that were packed together: one of the prompt, then one of each window. Every
    set has its own scales, zero points and channel factors.

    Parameters
    ----------
    room
        Sizes and device from which tensors are allocated.
    bits
        Bits per element.
    first
        Rows of the prompt of each sequence. [tokens]
    more
        Rows of each window. [tokens]
    windows
        Largest number of windows.
    """

    def __init__(self, room: CacheRoom, bits: int, first: int, more: int, windows: int) -> None:
        self.bits, self.first, self.more = bits, first, more
        self.rows = first + windows * more
        sequences, heads, group = room.sequences, room.heads, max(more, 1)
        self._ones = torch.ones(sequences, dtype=torch.int32, device=room.device)
        codes = [room.zeros(self.rows, room.dim * bits // 8, torch.uint8) for _ in "kv"]
        sets = 1 + windows if self.rows else 0
        # scales and zero points of keys and factors of values, which all sequences share
        shared = torch.zeros(1, heads, sets, room.dim, dtype=torch.float16, device=room.device)
        self._by_set = [shared.clone() for _ in range(3)]
        # scales and zero points of values, which all heads share
        own = torch.zeros(sequences, 1, self.rows, 1, dtype=torch.float16, device=room.device)
        self._by_row = [own, own.clone()]
        scale, zero, factor = (t.expand(sequences, -1, -1, -1) for t in self._by_set)
        begin = first * self._ones
        self._k = Store(codes[0], scale, zero, bits, group, "channel", first=begin)
        scale, zero = (t.expand(-1, heads, -1, -1) for t in self._by_row)
        by_token = Store(codes[1], scale, zero, bits, room.dim, "token", first=begin)
        self._v = replace(by_token, factor=factor, factor_group=group)

    def tensors(self) -> list[Tensor]:
        """Return codes, scales, zero points and factors, which stay in memory."""
        return [self._k.codes, self._v.codes, *self._by_set, *self._by_row]

    def count(self, windows: int) -> int:
        """Return the rows in use of each sequence after a number of windows."""
        return self.first + windows * self.more

    def add(self, record: OpRecord, keys: Tensor, values: Tensor, token: Tensor, time: int) -> None:
        """Pack some tokens.

        Parameters
        ----------
        keys, values
            Keys and values of all tokens, (batch, KV heads, tokens, head dim).
        token
            Indices of the tokens to pack, (batch, KV heads, n).
        time
            0 for the prompt; for a window its number, from 1.
        """
        if not token.shape[2]:
            return
        part_keys, part_values = rows_at(keys, token), rows_at(values, token)
        k, v = channelwise(part_keys, self.bits), separable(part_values, self.bits)
        assert v.factor is not None
        by_row = k.codes, v.codes, v.scale[:, :1], v.zero[:, :1]
        by_set = k.scale[:1], k.zero[:1], v.factor[:1]
        begin = self.count(time - 1) if time else 0
        into = self._k.codes, self._v.codes, *self._by_row
        for target, source in zip(into, by_row, strict=True):
            target[:, :, begin : begin + token.shape[2]] = source
        for target, source in zip(self._by_set, by_set, strict=True):
            target[:, :, time : time + 1] = source
        record.reads(part_keys, part_values).writes(*by_row, *by_set)

    def view(
        self, windows: int, fresh: int = 0, keys: Tensor | None = None, values: Tensor | None = None
    ) -> View:
        """Return these rows for attention, followed by ``fresh`` tokens of the fp16 window.

        Parameters
        ----------
        windows
            Number of packed windows.
        fresh
            Tokens of the window. [tokens]
        keys, values
            Keys and values of the window, (batch, KV heads, window, head dim); None if it is not
            read.
        """
        count = self.count(windows)
        packed, lengths = count * self._ones, (count + fresh) * self._ones
        if not self.rows:
            return View(lengths, k_tail=keys, v_tail=values)
        return View(lengths, self._k, self._v, packed, packed, keys, values)

    def read(self, windows: int) -> Iterator[Tensor]:
        """Yield the tensors that attention reads; channel parameters are read once per batch."""
        for table in (self._k.codes, self._v.codes, *self._by_row):
            yield table[:, :, : self.count(windows)]
        for table in self._by_set:
            yield table[:, :, : windows + 1]


class Probing:
    """Choice of the probe queries of prompts and of new tokens, which is the same in all layers.

    Half of the probes are the latest queries of a prompt or window, the others are drawn. The last
    token of a window probes if no other has, as nothing would rank the window otherwise.

    Parameters
    ----------
    share
        Share of the queries that probe, 0 to 1.
    window
        New tokens that are packed together. [tokens]
    windows
        How many windows there may be.
    room
        Sequences, their prompts, and where the choice is kept.

    Attributes
    ----------
    prompt
        Collects the queries of prompts that probe.
    chosen
        Whether each new token probes, (windows, window), on the host.
    seen
        How many probes saw each token of a window, (windows, window).
    """

    def __init__(self, share: float, window: int, windows: int, room: CacheRoom) -> None:
        random, length = torch.Generator().manual_seed(0), room.prompt
        recent = min(max(round(share / 2 * length), share > 0), length)
        drawn = max(round(share * length) - recent, 0)
        others = torch.randperm(length - recent, generator=random)[:drawn]
        chosen = torch.cat([others, torch.arange(length - recent, length)])
        self.prompt = KeptQueries(chosen.to(room.device), room.sequences)
        latest = torch.arange(window) >= window - round(share / 2 * window)
        self.chosen = latest | (torch.rand(windows, window, generator=random) < share / 2)
        self.chosen[:, -1] = ~self.chosen[:, :-1].any(1)
        seen = self.chosen.flip(1).cumsum(1).flip(1)
        self.seen = seen.to(room.device, torch.float32)


def _votes(record: OpRecord, probes: KeptQueries, keys: Tensor) -> Tensor:
    """Return the attention that a prompt's tokens get from the probes, (batch, KV heads, tokens).

    It is summed over the probes and averaged over the query heads of a KV head. Scores are written
    to GPU memory before and after the softmax.
    """
    batch, kv_heads, tokens, head_dim = keys.shape
    queries, every = probes.take(), probes.visible(tokens)
    heads = queries.shape[1]
    votes = torch.zeros((batch, kv_heads, tokens), device=keys.device)
    for some in query_ranges(queries.shape[2], batch * heads * tokens, keys.device):
        q = queries[:, :, some].reshape(batch, kv_heads, -1, head_dim)
        logits = (q @ keys.mT / head_dim**0.5).view(batch, kv_heads, heads // kv_heads, -1, tokens)
        shares = logits.float().masked_fill(~every[some], -torch.inf).softmax(-1).to(keys.dtype)
        votes += shares.float().sum(3).mean(2)
        record.reads(logits, shares).writes(logits, shares)
    record.reads(queries, keys)
    return votes
