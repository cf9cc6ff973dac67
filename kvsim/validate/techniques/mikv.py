"""MiKV: every token is kept, those that matter less at low precision."""

from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.papers.mikv import Mikv as Settings
from kvsim.validate.counter import uncounted
from kvsim.validate.kernels.attention import attend, merge
from kvsim.validate.kernels.gather import rows_at
from kvsim.validate.kernels.stores import PartialAttention, View
from kvsim.validate.model.attention import Pass, Seen
from kvsim.validate.parts.rows import TokenRows, codec
from kvsim.validate.parts.scores import attend_and_add, by_kv_head
from kvsim.validate.parts.store import CacheRoom, KvStore, SlotRange, count_pairs, lengths_on
from kvsim.validate.transfer import to_device

SMALL_SETTINGS = ("salient=0.5,group={group}",)
WHOLE_TOKENS = (
    "a whole number of tokens is at high precision, and new ones are packed as they come; the "
    "prediction takes the exact share, and writes new ones in fp16 too"
)
PUSHED = (
    "a token is packed again when it is pushed down; the prediction packs each once, on average"
)
COMPARED_TOKENS = (
    "tokens at high precision are compared, where one is pushed down; the prediction has all"
)

ORDERED = "rows are in the order of their weight even where all tokens have one precision"


class Precision:
    """Rows of the tokens of one layer that are stored at one precision."""

    def __init__(self, bits: float, group: int, room: CacheRoom, rows: int) -> None:
        made = codec(bits, group)
        self.k, self.v = TokenRows(made, room, rows), TokenRows(made, room, rows)
        # which token is in each row
        self.tokens = torch.zeros(
            room.sequences, room.heads, rows, dtype=torch.int32, device=room.device
        )


class Mikv(KvStore):
    """Storage at two precisions, chosen per head by the attention that tokens have received.

    A new token is stored at high precision. If the share of such tokens would grow too large, the
    one with the least attention is moved to low precision.

    References
    ----------
    .. [1] J. Y. Yang et al., "No token left behind", 2024, section 3: balanced channels in 3.2.
    """

    drops_tokens, keeps_numbers, by_position = False, False, True
    differences = MappingProxyType(
        {
            "attn": WHOLE_TOKENS,
            "kv": WHOLE_TOKENS,
            "quantise": PUSHED,
            "lowest": COMPARED_TOKENS,
            "indices": ORDERED,
        }
    )

    def __init__(self, room: CacheRoom) -> None:
        super().__init__(room)
        part, slots = room.settings(Settings), room.slots
        if part.exact:
            raise InputError("mikv: high=16 and low=16 pack nothing; choose fewer bits, or full")
        room.check_group(part.group)
        self.share = float(part.salient)
        high = self.high_count(slots)
        self.high = Precision(part.high, part.group, room, high)
        self.low = Precision(part.low, part.group, room, slots - high)
        self.balancer = room.zeros(1)
        self.sums = room.zeros(0)[..., 0]  # attention that tokens were given, (sequences, heads, n)
        self._widest = room.zeros(0)  # largest numbers of the queries' channels

    def high_count(self, tokens: int) -> int:
        """Return the number of tokens that are stored at high precision. [tokens]

        Parameters
        ----------
        tokens
            Cached tokens of a sequence. [tokens]
        """
        return round(self.share * tokens)

    def attend_prompt(
        self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass, seen: Seen
    ) -> Tensor:
        """Attend in full, sum each token's attention weights, and note the largest queries.

        The largest magnitude of the queries in each channel sets the channel's balancer.

        Returns
        -------
        Tensor
            Output of attention, (sequences, heads, chunk, dim).
        """
        batch, heads, _, dim = queries.shape
        if step.begins_prompt:
            shape = (self.room.sequences, heads, self.slots)
            self.sums = torch.zeros(shape, device=queries.device)
            self._widest = self.room.zeros(1)
        lengths = lengths_on(queries.device, self.room.prompts)[step.rows]
        counts = step.positions < lengths[:, None]
        with self.counter.op("balance") as record:
            own = (queries.abs() * counts[:, None, :, None]).amax(2)
            grouped = own.view(batch, self.room.heads, -1, dim).amax(2, keepdim=True)
            widest = self._widest[step.rows]
            torch.maximum(widest, grouped, out=widest)
            record.reads(queries)
        sums = self.sums[step.rows, :, : step.length]
        room = queries.numel()  # as many scores at once as queries have numbers
        return attend_and_add(self.counter, queries, keys, values, sums, step, counts, room)

    def fill(self, keys: Tensor, values: Tensor, counts: list[int], plainly: str = "attn") -> None:
        """Rank the prompt's tokens, and pack them at the two precisions."""
        most, device = max(counts), keys.device
        keys, values = keys[:, :, :most], values[:, :, :most]
        there = torch.arange(most, device=device) < lengths_on(device, counts)[:, None]
        with self.counter.op("balance") as record:
            widest = (keys.abs() * there[:, None, :, None]).amax(2, keepdim=True)
            ratio = self._widest.float() / widest.float().clamp(min=1e-6)
            self.balancer = ratio.sqrt().clamp(1e-3, 1e3).to(keys.dtype)
            record.reads(keys)
        with self.counter.op("rank") as record:
            given = by_kv_head(self.sums[:, :, :most], self.room.heads)
            record.reads(given)
            given = given.masked_fill(~there[:, None], -torch.inf)
            order = given.argsort(dim=-1, descending=True, stable=True)
        high = [self.high_count(n) for n in counts]
        low = [n - m for n, m in zip(counts, high, strict=True)]
        starts = lengths_on(device, high)
        for pool, rows, first in ((self.high, max(high), starts * 0), (self.low, max(low), starts)):
            place = first[:, None] + torch.arange(rows, device=device)
            place = place.clamp(max=most - 1)[:, None].expand(-1, self.room.heads, -1)
            self._put(pool, slice(0, rows), keys, values, order.gather(2, place.long()))

    def append(self, keys: Tensor, values: Tensor, span: SlotRange) -> None:
        """Store a new token at high precision, if any token of its sequence is.

        If the number of high-precision tokens may not grow, the one with the smallest summed
        attention weight is moved to low precision.
        """
        before = [end - 1 for end in span.ends]
        now = [self.high_count(end) for end in span.ends]
        grows = [i for i, n in enumerate(before) if now[i] > self.high_count(n)]
        pushes = [i for i, n in enumerate(before) if 0 < now[i] == self.high_count(n)]
        straight = [i for i in range(len(before)) if not now[i]]
        for some, pool in ((grows, self.high), (pushes, self.high), (straight, self.low)):
            if not some:
                continue
            chosen = to_device(some, keys.device)
            if pool is self.low:
                rows = self._rows([before[i] for i in some])
            elif some is grows:
                rows = self._rows([now[i] - 1 for i in some])
            else:
                low = [before[i] - now[i] for i in some]
                rows = self._push_down(chosen, [now[i] for i in some], low)
            token = span.slots[chosen].view(-1, 1, 1).expand_as(rows)
            with self.counter.op("quantise") as record:
                numbers = keys[chosen] * self.balancer[chosen], values[chosen]
                record.reads(keys[chosen], values[chosen])
                for column, new in zip((pool.k, pool.v), numbers, strict=True):
                    made = column.codec.encode(new)
                    record.writes(*made)
                    _write(column.parts, chosen, rows, made)
                _write([pool.tokens[..., None]], chosen, rows, [token.int()[..., None]])

    def attend(self, queries: Tensor, span: SlotRange, seen: Seen) -> Tensor:
        """Attend to both precisions with balanced queries, and update the summed weights.

        Returns
        -------
        Tensor
            Output of attention, (sequences, heads, new, dim).
        """
        batch, _, new, dim = queries.shape
        with self.counter.op("balance") as record:
            grouped = queries.view(batch, self.room.heads, -1, new, dim)
            asking = (grouped / self.balancer[:, :, None]).view_as(queries)
            record.reads(queries).writes(asking)
        high = [self.high_count(end) for end in span.ends]
        low = [end - n for end, n in zip(span.ends, high, strict=True)]
        parts: list[tuple[Precision, list[int], PartialAttention]] = []
        with self.counter.op("attn") as record:
            for pool, ends in ((self.high, high), (self.low, low)):
                if max(ends):
                    there = lengths_on(queries.device, ends)
                    view = View(there, pool.k.store(), pool.v.store(), there, there, most=max(ends))
                    parts.append((pool, ends, attend(asking, view, scored=True)))
            out = merge([part for *_, part in parts]).to(queries.dtype)
            if record.counting:
                with uncounted():
                    for pool, ends, _ in parts:
                        record.reads(*pool.k.read(tuple(ends)), *pool.v.read(tuple(ends)))
                    record.reads(asking).writes(out)
                    count_pairs(record, queries, span, queries.is_cuda)
        self._add(parts, span.longest)
        return out

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return the rows of both precisions, their tokens, the summed weights and the balancer."""
        pools = self.high, self.low
        return {
            "kv": [t for pool in pools for t in (*pool.k.parts, *pool.v.parts)],
            "indices": [pool.tokens for pool in pools],
            "scores": [self.sums],
            "balancer": [self.balancer],
        }

    def _put(
        self, pool: Precision, rows: slice, keys: Tensor, values: Tensor, token: Tensor
    ) -> None:
        """Pack the tokens (sequences, KV heads, rows) of a prompt."""
        if not token.shape[2]:
            return
        with self.counter.op("quantise") as record:
            for column, numbers in ((pool.k, keys), (pool.v, values)):
                own = rows_at(numbers, token)
                record.reads(own)
                made = column.codec.encode(own * self.balancer if column is pool.k else own)
                record.writes(*made)
                for mine, new in zip(column.parts, made, strict=True):
                    mine[:, :, rows] = new
            pool.tokens[:, :, rows] = token

    def _push_down(self, chosen: Tensor, high: Sequence[int], low: Sequence[int]) -> Tensor:
        """Move the high-precision token with the least attention to a new row of low precision.

        Returns
        -------
        The row that is free now, (sequences, KV heads, 1).
        """
        most = max(high)
        with self.counter.op("lowest") as record:
            tokens = self.high.tokens[chosen][:, :, :most].long()
            group = self.sums.shape[1] // self.room.heads
            given = self.sums[chosen].gather(2, tokens.repeat_interleave(group, 1))
            record.reads(given)
            there = (
                torch.arange(most, device=tokens.device) < to_device(high, tokens.device)[:, None]
            )
            ranked = by_kv_head(given, self.room.heads).masked_fill(~there[:, None], torch.inf)
            rows = ranked.argmin(-1, keepdim=True)
        into = self._rows(low)
        with self.counter.op("quantise") as record:
            for source, target in ((self.high.k, self.low.k), (self.high.v, self.low.v)):
                old = [rows_at(part[chosen], rows) for part in source.parts]
                made = target.codec.encode(source.widened(old))
                record.reads(*old).writes(*made)
                _write(target.parts, chosen, into, made)
            moved = tokens.gather(2, rows).int()
            _write([self.low.tokens[..., None]], chosen, into, [moved[..., None]])
        return rows

    def _add(self, parts: list[tuple[Precision, list[int], PartialAttention]], most: int) -> None:
        """Add the attention that tokens receive to their sums."""
        lse = torch.stack([part.lse[..., -1] for *_, part in parts]).logsumexp(0)
        with self.counter.op("scores") as record:
            for pool, ends, part in parts:
                assert part.scores is not None
                rows = max(ends)
                weights = (part.scores[..., :rows].float() - lse[..., None]).exp()
                there = (
                    torch.arange(rows, device=lse.device) < lengths_on(lse.device, ends)[:, None]
                )
                weights = (weights * there[:, None]).to(self.room.dtype)
                group = self.sums.shape[1] // self.room.heads
                token = pool.tokens[:, :, :rows].long().repeat_interleave(group, 1)
                self.sums.scatter_add_(2, token, weights.float())
                record.reads(weights).writes(weights)
            record.reads(self.sums[:, :, :most]).writes(self.sums[:, :, :most])

    def _rows(self, rows: Sequence[int]) -> Tensor:
        """The same row of every KV head, (sequences, KV heads, 1)."""
        made = to_device(rows, self.room.device)
        return made.view(-1, 1, 1).expand(-1, self.room.heads, 1)


def _write(parts: list[Tensor], chosen: Tensor, rows: Tensor, made: list[Tensor]) -> None:
    """Write one row (sequences, KV heads, 1) of some sequences, part by part."""
    heads = torch.arange(rows.shape[1], device=rows.device)
    for mine, new in zip(parts, made, strict=True):
        mine[chosen[:, None], heads, rows[..., 0]] = new[:, :, 0]
