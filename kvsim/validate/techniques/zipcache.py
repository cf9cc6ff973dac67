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
from types import MappingProxyType

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.papers.zipcache import Zipcache as Settings
from kvsim.validate.counter import OpRecord, uncounted
from kvsim.validate.kernels.attention import attend, merge
from kvsim.validate.kernels.packing import PACKED_BITS, pack
from kvsim.validate.kernels.quantise import encode, levels
from kvsim.validate.kernels.stores import PartialAttention, Store, View
from kvsim.validate.model.attention import Pass, Seen
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
        part, slots = room.settings(Settings), room.slots
        for bits in (part.high, part.low):
            if bits not in PACKED_BITS:
                raise InputError(
                    f"zipcache: {bits:g} bits are not packed; expected high and low among "
                    f"{', '.join(map(str, PACKED_BITS))}"
                )
        self.window, salient, lengths = part.window, float(part.salient), room.prompts
        self.salient = [round(salient * n) for n in lengths]  # of every prompt [tokens]
        others = [n - h for n, h in zip(lengths, self.salient, strict=True)]
        more = round(salient * self.window)  # of every window [tokens]
        windows = max(0, slots - max(lengths) - 1) // self.window
        self.high = PrecisionRows(room, int(part.high), self.salient, more, windows)
        self.low = PrecisionRows(room, int(part.low), others, self.window - more, windows)
        self.k, self.v = room.zeros(self.window), room.zeros(self.window)
        # what each token of the window gets from its probes, summed: (sequences, KV heads, window)
        self.saliency = room.zeros(1, self.window, torch.float32)[:, :, 0]
        self.probing = room.common.get(
            ("probing", part),
            lambda: Probing(part.probe, self.window, windows + 1, lengths, room.device),
        )
        self._ends = torch.tensor(lengths, device=room.device)[:, None]
        self._token = 0  # number of the newest token since the prompt

    def attend_prompt(
        self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass, seen: Seen
    ) -> Tensor:
        """Attend to the prompt, and record the probe queries by which ``fill`` ranks tokens.

        Returns
        -------
        Tensor
            Output of attention, (sequences, heads, chunk, dim).
        """
        self.probing.prompt.observe(queries, step)
        return super().attend_prompt(queries, keys, values, step, seen)

    def fill(self, keys: Tensor, values: Tensor, counts: list[int], plainly: str = "attn") -> None:
        """Rank a prompt by the attention of the probes (equation 8), and pack it."""
        tokens = keys.shape[2]
        with self.counter.op("probe") as record:
            seen = self.probing.prompt.visible(tokens).sum(1)
            saliency = _votes(record, self.probing.prompt, keys) / seen.clamp(min=1)[:, None]
            record.writes(saliency)
        beyond = torch.arange(tokens, device=keys.device) >= self._ends
        self.pack(keys, values, saliency.masked_fill(beyond[:, None], -1.0), 0)

    def append(self, keys: Tensor, values: Tensor, span: SlotRange) -> None:
        """Put a new token's keys and values into the window."""
        self._token = span.ends[0] - 1 - self.room.prompts[0]
        with self.counter.op("attn") as record:
            slot = self._slots()[:, self._token % self.window]
            sequences = torch.arange(len(slot), device=slot.device)
            self.k[sequences, :, slot], self.v[sequences, :, slot] = keys[:, :, 0], values[:, :, 0]
            record.writes(keys, values)

    def attend(self, queries: Tensor, span: SlotRange, seen: Seen) -> Tensor:
        """Attend to packed rows and the window; add up saliency if the token probes.

        A full window is packed afterwards.

        Returns
        -------
        Tensor
            Output of attention, (sequences, heads, new, dim).
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
        share = float(self.window * ((ends[0] - self.room.prompts[0]) % self.window == 0))
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
            start = torch.zeros(len(keys), dtype=torch.long, device=keys.device)
            for part in (self.high, self.low):
                start = start + part.add(record, keys, values, order, start, time)

    @property
    def packed(self) -> int:
        """Number of windows that were packed before the newest token came."""
        return self._token // self.window

    @property
    def _places(self) -> Tensor:
        return torch.arange(self.window, device=self.room.device)

    def _slots(self) -> Tensor:
        """Return the slot of every token of the window, (batch, window).

        The kernel reads the window behind the rows at ``low`` bits as a ring buffer: its first
        token is in the slot of that row, modulo the window.
        """
        return (self.low.counts(self.packed)[:, None] + self._places) % self.window

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
        logits = parts[-1].scores
        assert logits is not None
        with self.counter.op("probe") as record:
            first = self.low.counts(self.packed)[:, None] + self._places[:fresh]
            logits = logits.gather(2, first[:, None].expand(-1, logits.shape[1], -1))
            lse = torch.stack([part.lse[:, :, -1] for part in parts]).logsumexp(0)
            shares = (logits.float() - lse[..., None]).exp()
            grouped = shares.view(len(shares), self.room.heads, -1, fresh)
            self.saliency[..., :fresh] += grouped.mean(2)
            record.writes(logits).reads(logits)

    def _compress(self) -> None:
        """Pack a full window by its saliency over the probes that saw each token (equation 8)."""
        index = self._slots()[:, None, :, None].expand_as(self.k)
        saliency = self.saliency / self.probing.seen(self.packed).clamp(min=1)
        k, v = self.k.gather(2, index), self.v.gather(2, index)
        self.pack(k, v, saliency, self.packed + 1)
        self.saliency.zero_()


def channelwise(numbers: Tensor, bits: int, valid: Tensor) -> Store:
    """Pack keys, with one scale and zero point per channel.

    Parameters
    ----------
    numbers
        Keys, (batch, KV heads, tokens, head dim).
    valid
        Whether a row holds a token, (batch, tokens); the others are packed, but do not affect
        scales.
    """
    low, high = _range(numbers, valid, (0, 2))
    scale, zero = levels(low, high, bits, "grid")
    codes = pack(encode(numbers, scale, zero, bits), bits)
    sequences = len(numbers)
    return Store(
        codes,
        scale.expand(sequences, -1, -1, -1),
        zero.expand(sequences, -1, -1, -1),
        bits,
        max(numbers.shape[2], 1),
        "channel",
    )


def separable(numbers: Tensor, bits: int, valid: Tensor) -> Store:
    """Pack values, channel-separable by token (algorithm 1, CSTQuant).

    Each channel is divided by c = sqrt(max |x|) (equation 6); then every token has one scale and
    zero point over all heads. Kernels that read the values multiply by c again.

    Parameters
    ----------
    numbers
        Values, (batch, KV heads, tokens, head dim).
    valid
        Whether a row holds a token, (batch, tokens); the others are packed, but do not affect
        factors.
    """
    low, high = _range(numbers, valid, (0, 2))
    peak = torch.maximum(low.abs(), high.abs())
    factor = peak.sqrt().half()
    divisor = factor.float()
    even = numbers.float() / torch.where(divisor > 0, divisor, 1.0)
    rows = torch.ones_like(valid)
    scale, zero = levels(*_range(even, rows, (1, 3)), bits, "grid")
    codes = pack(encode(even, scale, zero, bits), bits)
    sequences, heads, tokens, head_dim = numbers.shape
    return Store(
        codes,
        scale.expand(-1, heads, -1, -1),
        zero.expand(-1, heads, -1, -1),
        bits,
        head_dim,
        "token",
        factor=factor.expand(sequences, -1, -1, -1),
        factor_group=max(tokens, 1),
    )


def _range(numbers: Tensor, valid: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Find the smallest and largest number of valid rows along ``dims``, which get length 1.

    Without a valid row both are 0.
    """
    counts = valid[:, None, :, None]
    low = torch.where(counts, numbers.float(), torch.inf).amin(dims, keepdim=True)
    high = torch.where(counts, numbers.float(), -torch.inf).amax(dims, keepdim=True)
    empty = low > high
    return low.masked_fill(empty, 0.0), high.masked_fill(empty, 0.0)


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
        Rows of each sequence's prompt. [tokens]
    more
        Rows of each window. [tokens]
    windows
        Largest number of windows.
    """

    def __init__(
        self, room: CacheRoom, bits: int, first: list[int], more: int, windows: int
    ) -> None:
        self.bits, self.more, self._first = bits, more, first
        self.rows = max(first) + windows * more
        self._firsts = torch.tensor(first, device=room.device, dtype=torch.int32)
        sequences, heads, group = room.sequences, room.heads, max(more, 1)
        codes = [room.zeros(self.rows, room.dim * bits // 8, torch.uint8) for _ in "kv"]
        sets = 1 + windows if self.rows else 0
        # scales and zero points of keys and factors of values, which all sequences share
        shared = torch.zeros(1, heads, sets, room.dim, dtype=torch.float16, device=room.device)
        self._by_set = [shared.clone() for _ in range(3)]
        # scales and zero points of values, which all heads share
        own = torch.zeros(sequences, 1, self.rows, 1, dtype=torch.float16, device=room.device)
        self._by_row = [own, own.clone()]
        scale, zero, factor = (t.expand(sequences, -1, -1, -1) for t in self._by_set)
        v_scale, v_zero = (t.expand(-1, heads, -1, -1) for t in self._by_row)
        self._k = Store(codes[0], scale, zero, bits, group, "channel", first=self._firsts)
        self._v = Store(
            codes[1],
            v_scale,
            v_zero,
            bits,
            room.dim,
            "token",
            factor=factor,
            first=self._firsts,
            factor_group=group,
        )

    def tensors(self) -> list[Tensor]:
        """Return codes, scales, zero points and factors, which stay in memory."""
        return [self._k.codes, self._v.codes, *self._by_set, *self._by_row]

    def counts(self, windows: int) -> Tensor:
        """Return the rows in use of each sequence after a number of windows, (batch,)."""
        return self._firsts + windows * self.more

    def add(
        self,
        record: OpRecord,
        keys: Tensor,
        values: Tensor,
        order: Tensor,
        start: Tensor,
        time: int,
    ) -> Tensor:
        """Pack this precision's part of some tokens.

        Parameters
        ----------
        keys, values
            Keys and values of all tokens, (batch, KV heads, tokens, head dim).
        order
            Indices of the tokens by decreasing saliency, (batch, KV heads, tokens).
        start
            Where this part begins in ``order``, (batch,).
        time
            0 for the prompt; for a window its number, from 1.

        Returns
        -------
        Tensor
            Number of packed tokens of each sequence, (batch,).
        """
        counts = torch.full_like(self._firsts, self.more) if time else self._firsts
        most = self.more if time else max(self._first)
        if not most:
            return counts
        row = torch.arange(most, device=keys.device)
        valid = row < counts[:, None]
        place = (start[:, None] + row).clamp(max=order.shape[2] - 1)
        token = order.gather(2, place[:, None].expand(-1, order.shape[1], -1))
        index = token[..., None].expand(-1, -1, -1, keys.shape[3])
        part_keys, part_values = keys.gather(2, index), values.gather(2, index)
        made_k = channelwise(part_keys, self.bits, valid)
        made_v = separable(part_values, self.bits, valid)
        assert made_v.factor is not None
        by_row = made_v.scale[:, :1], made_v.zero[:, :1]
        by_set = made_k.scale[:1], made_k.zero[:1], made_v.factor[:1]
        begins = self.counts(time - 1) if time else torch.zeros_like(self._firsts)
        rows = begins[:, None] + row
        sequences = torch.arange(len(keys), device=keys.device)[:, None]
        into = self._k.codes, self._v.codes, *self._by_row
        for target, source in zip(into, (made_k.codes, made_v.codes, *by_row), strict=True):
            target[sequences, :, rows] = source.transpose(1, 2)
        for target, source in zip(self._by_set, by_set, strict=True):
            target[:, :, time : time + 1] = source
        record.reads(part_keys, part_values).writes(made_k.codes, made_v.codes, *by_row, *by_set)
        return counts

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
        counts = self.counts(windows)
        if not self.rows:
            return View(counts + fresh, k_tail=keys, v_tail=values)
        return View(counts + fresh, self._k, self._v, counts, counts, keys, values)

    def read(self, windows: int) -> Iterator[Tensor]:
        """Yield the tensors that attention reads; channel parameters are read once per batch."""
        for i, count in enumerate(n + windows * self.more for n in self._first):
            yield from (t[i, :, :count] for t in (self._k.codes, self._v.codes, *self._by_row))
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
    lengths
        Lengths of the prompts. [tokens]
    device
        Where the choice is kept.

    Attributes
    ----------
    prompt
        Collects the queries of prompts that probe.
    chosen
        Whether each new token probes, (windows, window), on the host.
    """

    def __init__(
        self, share: float, window: int, windows: int, lengths: list[int], device: torch.device
    ) -> None:
        random, found = torch.Generator().manual_seed(0), []
        for length in lengths:
            recent = min(max(round(share / 2 * length), share > 0), length)
            drawn = max(round(share * length) - recent, 0)
            others = torch.randperm(length - recent, generator=random)[:drawn]
            found.append(torch.cat([others, torch.arange(length - recent, length)]))
        pad = torch.nn.utils.rnn.pad_sequence
        self.prompt = KeptQueries(pad(found, batch_first=True, padding_value=-1).to(device))
        latest = torch.arange(window) >= window - round(share / 2 * window)
        self.chosen = latest | (torch.rand(windows, window, generator=random) < share / 2)
        self.chosen[:, -1] = ~self.chosen[:, :-1].any(1)
        seen = self.chosen.flip(1).cumsum(1).flip(1)
        self._seen = seen.to(device, torch.float32)

    def seen(self, window: int) -> Tensor:
        """Return how many probes saw each token of a window, (window,)."""
        return self._seen[window]


def _votes(record: OpRecord, probes: KeptQueries, keys: Tensor) -> Tensor:
    """Return the attention that a prompt's tokens get from the probes, (batch, KV heads, tokens).

    It is summed over the probes and averaged over the query heads of a KV head. Scores are written
    to GPU memory before and after the softmax. Sequences with fewer probes than others are filled
    up with some that see nothing.
    """
    batch, kv_heads, tokens, head_dim = keys.shape
    queries, every = probes.take(), probes.visible(tokens)[:, None, None]
    heads = queries.shape[1]
    votes = torch.zeros((batch, kv_heads, tokens), device=keys.device)
    for some in query_ranges(queries.shape[2], batch * heads * tokens, keys.device):
        q = queries[:, :, some].reshape(batch, kv_heads, -1, head_dim)
        logits = (q @ keys.mT / head_dim**0.5).view(batch, kv_heads, heads // kv_heads, -1, tokens)
        seen = every[:, :, :, some]
        shares = logits.float().masked_fill(~seen, -1e30).softmax(-1).to(keys.dtype) * seen
        votes += shares.float().sum(3).mean(2)
        record.reads(logits, shares).writes(logits, shares)
    record.reads(queries, keys)
    return votes
