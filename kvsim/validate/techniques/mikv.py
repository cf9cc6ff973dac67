"""MiKV: every token is kept, those that matter less at low precision."""

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
        """
        batch, heads, _, dim = queries.shape
        if step.begins_prompt:
            shape = (self.room.sequences, heads, self.slots)
            self.sums = torch.zeros(shape, device=queries.device)
            self._widest = self.room.zeros(1)
        with self.counter.op("balance") as record:
            own = queries.abs().amax(2)
            grouped = own.view(batch, self.room.heads, -1, dim).amax(2, keepdim=True)
            widest = self._widest[step.rows]
            torch.maximum(widest, grouped, out=widest)
            record.reads(queries)
        sums = self.sums[step.rows, :, : step.length]
        room = queries.numel()  # as many scores at once as queries have numbers
        return attend_and_add(self.counter, queries, keys, values, sums, step, room)

    def fill(self, keys: Tensor, values: Tensor, plainly: str = "attn") -> None:
        """Rank the prompt's tokens, and pack them at the two precisions."""
        tokens = keys.shape[2]
        with self.counter.op("balance") as record:
            widest = keys.abs().amax(2, keepdim=True)
            ratio = self._widest.float() / widest.float().clamp(min=1e-6)
            self.balancer = ratio.sqrt().clamp(1e-3, 1e3).to(keys.dtype)
            record.reads(keys)
        with self.counter.op("rank") as record:
            given = by_kv_head(self.sums[:, :, :tokens], self.room.heads)
            record.reads(given)
            order = given.argsort(dim=-1, descending=True, stable=True)
        high = self.high_count(tokens)
        for pool, chosen in ((self.high, order[..., :high]), (self.low, order[..., high:])):
            own = rows_at(keys, chosen), rows_at(values, chosen)
            self._pack(pool, torch.arange(chosen.shape[2], device=keys.device), *own, chosen)

    def append(self, keys: Tensor, values: Tensor, span: SlotRange) -> None:
        """Store a new token at high precision, if any token of its sequence is.

        If the number of high-precision tokens may not grow, the one with the smallest summed
        attention weight is moved to low precision.
        """
        before, now = span.ends[0] - 1, self.high_count(span.ends[0])
        if not now:
            row = torch.tensor([before], device=keys.device)
        elif now > self.high_count(before):
            row = torch.tensor([now - 1], device=keys.device)
        else:
            row = self._push_down(now, before - now)
        token = span.slots.view(-1, 1, 1).expand(-1, self.room.heads, 1)
        self._pack(self.high if now else self.low, row, keys, values, token)

    def attend(self, queries: Tensor, span: SlotRange, seen: Seen) -> Tensor:
        """Attend to both precisions with balanced queries, and update the summed weights."""
        batch, _, new, dim = queries.shape
        with self.counter.op("balance") as record:
            grouped = queries.view(batch, self.room.heads, -1, new, dim)
            asking = (grouped / self.balancer[:, :, None]).view_as(queries)
            record.reads(queries).writes(asking)
        end, high = span.ends[0], self.high_count(span.ends[0])
        parts: list[tuple[Precision, int, PartialAttention]] = []
        with self.counter.op("attn") as record:
            for pool, rows in ((self.high, high), (self.low, end - high)):
                if rows:
                    there = lengths_on(queries.device, [rows] * batch)
                    view = View(there, pool.k.store(), pool.v.store(), there, there, most=rows)
                    parts.append((pool, rows, attend(asking, view, scored=True)))
            out = merge([part for *_, part in parts]).to(queries.dtype)
            if record.counting:
                with uncounted():
                    for pool, rows, _ in parts:
                        ends = (rows,) * batch
                        record.reads(*pool.k.read(ends), *pool.v.read(ends))
                    record.reads(asking).writes(out)
                    count_pairs(record, queries, span, queries.is_cuda)
        self._add(parts, end)
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

    def _pack(
        self, pool: Precision, rows: Tensor, keys: Tensor, values: Tensor, token: Tensor
    ) -> None:
        """Pack keys and values of the tokens (sequences, KV heads, n) in rows of a pool."""
        if not token.shape[2]:
            return
        with self.counter.op("quantise") as record:
            for column, numbers in ((pool.k, keys), (pool.v, values)):
                record.reads(numbers)
                made = column.codec.encode(numbers * self.balancer if column is pool.k else numbers)
                record.writes(*made)
                _write(column.parts, rows, made)
            _write([pool.tokens[..., None]], rows, [token.int()[..., None]])

    def _push_down(self, high: int, low: int) -> Tensor:
        """Move the high-precision token with the least attention to a new row of low precision.

        Returns
        -------
        The row that is free now, (sequences, KV heads, 1).
        """
        with self.counter.op("lowest") as record:
            tokens = self.high.tokens[:, :, :high].long()
            group = self.sums.shape[1] // self.room.heads
            given = self.sums.gather(2, tokens.repeat_interleave(group, 1))
            record.reads(given)
            rows = by_kv_head(given, self.room.heads).argmin(-1, keepdim=True)
        into = torch.tensor([low], device=rows.device)
        with self.counter.op("quantise") as record:
            for source, target in ((self.high.k, self.low.k), (self.high.v, self.low.v)):
                old = [rows_at(part, rows) for part in source.parts]
                made = target.codec.encode(source.widened(old))
                record.reads(*old).writes(*made)
                _write(target.parts, into, made)
            _write([self.low.tokens[..., None]], into, [tokens.gather(2, rows).int()[..., None]])
        return rows

    def _add(self, parts: list[tuple[Precision, int, PartialAttention]], most: int) -> None:
        """Add the attention that tokens receive to their sums."""
        lse = torch.stack([part.lse[..., -1] for *_, part in parts]).logsumexp(0)
        with self.counter.op("scores") as record:
            for pool, rows, part in parts:
                assert part.scores is not None
                weights = (part.scores[..., :rows].float() - lse[..., None]).exp()
                weights = weights.to(self.room.dtype)
                group = self.sums.shape[1] // self.room.heads
                token = pool.tokens[:, :, :rows].long().repeat_interleave(group, 1)
                self.sums.scatter_add_(2, token, weights.float())
                record.reads(weights).writes(weights)
            record.reads(self.sums[:, :, :most]).writes(self.sums[:, :, :most])


def _write(parts: list[Tensor], rows: Tensor, made: list[Tensor]) -> None:
    """Write rows (n,), or (sequences, KV heads, n), part by part."""
    for mine, new in zip(parts, made, strict=True):
        mine.scatter_(2, rows[..., None].expand_as(new), new)
