"""ShadowKV's selection: chunks of the prompt chosen by the mean of their keys."""

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.papers.shadowkv import Landmarks as Settings
from kvsim.validate.counter import OpRecord
from kvsim.validate.kernels.gather import rows_at
from kvsim.validate.model.attention import Pass, attend
from kvsim.validate.parts.away import HostValues
from kvsim.validate.parts.base import Resident
from kvsim.validate.parts.bytoken import TokenRows
from kvsim.validate.parts.cells import SlotRange
from kvsim.validate.parts.lowrank import Lowrank
from kvsim.validate.parts.paged import in_pages
from kvsim.validate.parts.portions import begins, ends
from kvsim.validate.parts.selecting import LayerCache, LayerContext


class Landmarks(LayerCache):
    """Chosen chunks come from the product of keys and from the host, all other tokens are here.

    Chunks that their mean describes worst, and what is generated, are attended to always.

    References
    ----------
    .. [1] H. Sun et al., "ShadowKV", ICML 2025, section 4.2, algorithms 1 and 2.
    """

    def __init__(self, place: LayerContext) -> None:
        super().__init__(place)
        self.refuse_drafts()
        self.refuse_windows()
        settings, cells = self.parts.selection, self.cells
        assert isinstance(settings, Settings)
        if not isinstance(cells, Lowrank):
            raise InputError(
                f"{settings.name}: its real implementation chooses chunks of lowrank's keys, with "
                f"values on the host; run shadowkv"
            )
        cells.make_room(self.prompt)
        self.factors, room = cells, cells.room
        self.chunk, self.chunks = settings.chunk, -(-self.prompt // settings.chunk)
        self.outliers = min(settings.outliers, self.chunks)
        within = max(int(settings.budget) // self.chunk, 1)
        self.most = min(within, self.chunks - self.outliers)
        self.means = room.zeros(self.chunks)
        self.staying = [room.zeros(self.outliers * self.chunk) for _ in "kv"]
        shape = (room.sequences, room.heads, self.outliers)
        self.which = torch.zeros(shape, dtype=torch.int32, device=room.device)
        lanes = self.run.placements[self.layer].lanes
        self.away = self.run.shared("away", lambda: HostValues(lanes(), "store_kv", "fetch"))
        self.away.add(self, cells.v)
        self.reading = self.run.shared("prompt keys", lambda: [room.zeros(self.prompt)])

    @property
    def direct(self) -> bool:
        """Chunks of the prompt go where their values leave from."""
        return True

    def prefill(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Values of one layer leave, and its keys are decomposed, before the next is computed."""
        held = self.reading[0], self.away.stage(self, begins(step))[0]
        out = self.attend_from(held, queries, keys, values, step)
        if ends(step, self.prompt, self.batch):
            self._summarise(*held)
            self.factors.fill(*held, self.lengths)
            self.away.send_prompt(self)
        return out

    def prompt_done(self) -> None:
        """From here on there is room for fetched chunks."""
        if self.away.reading:
            self.reading.clear()
            every = (layer for layer in self.away.layers if isinstance(layer, Landmarks))
            self.away.prompt_sent(max(layer.most * layer.chunk for layer in every))

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Rank the chunks, bring the best, attend to them and to all that stays."""
        span = SlotRange.after_cached(step, self.lengths, self._on_device[:, None])
        self.factors.append(keys, values, span)
        self.away.send_new(self, [values], step)
        chosen, known = self._choose(queries)
        index, seen = self._tokens(chosen, known)
        fetched = self.away.fetch(self, index, self.chunk)[0]
        restored = self.factors.restored(index)
        stays = self._tokens(self.which, torch.ones_like(self.which, dtype=torch.bool))[1]
        generated = torch.arange(span.most, device=index.device) <= span.slots[:, :, None]
        seen = torch.cat([seen, stays, generated.expand(-1, seen.shape[1], -1)], 2)
        recent = (side.parts[0][:, :, : span.most] for side in self._recent())
        with self.counter.op("attn") as record:
            sides = zip((restored, fetched), self.staying, recent, strict=True)
            k, v = (torch.cat(parts, 2) for parts in sides)
            out = attend(OpRecord(), queries, k, v, seen[:, :, None])
            record.reads(queries, k, v)
            record.writes(out)
        return out

    def buffers(self) -> Resident:
        """Landmarks, outliers, the host's values; what layers share, once."""
        own = {"landmarks": [self.means], "outlier chunks": [*self.staying, self.which]}
        held: Resident = {"gpu": own, "host": {"kv": [self.factors.v.record]}}
        if self.away.layers[0] is self:
            shared = "kv on the way out" if self.away.reading else "fetched pages"
            held["gpu"] |= {shared: self.away.buffers, "prompt keys": self.reading}
        return held

    def _recent(self) -> tuple[TokenRows, TokenRows]:
        return self.factors.recent.k, self.factors.recent.v

    def _summarise(self, keys: Tensor, values: Tensor) -> None:
        """Means of the prompt's chunks; those that are least like theirs are kept as they are."""
        with self.counter.op("chunk_means") as record:
            pages = in_pages(keys, self._on_device, self.chunk, 0.0).float()
            there = self._there(torch.arange(self.chunks, device=keys.device))[:, None]
            means = pages.sum(3) / there.sum(-1, keepdim=True).clamp(min=1)
            alike = torch.cosine_similarity(pages, means[:, :, :, None], dim=-1)
            worst = alike.masked_fill(~there, torch.inf).amin(-1)
            self.means.copy_(means)
            self.which.copy_(worst.topk(self.outliers, largest=False).indices)
            index, _ = self._tokens(self.which, torch.ones_like(self.which, dtype=torch.bool))
            record.reads(keys, keys)  # for the means, and to compare with them
            record.writes(self.means)
            for mine, numbers in zip(self.staying, (keys, values), strict=True):
                mine.copy_(rows_at(numbers, index))
                record.reads(mine)
                record.writes(mine)

    def _choose(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Chunks that a head of the group gives most, and whether there was such a chunk."""
        grouped = queries.reshape(self.batch, self.means.shape[1], -1, queries.shape[3])
        with self.counter.op("landmarks") as record:
            scores = grouped @ self.means.mT
            record.reads(queries, self.means, scores)
            record.writes(scores)
        with self.counter.op("topk") as record:
            there = self._there(torch.arange(self.chunks, device=scores.device)).any(-1)
            others = there[:, None].expand(-1, self.means.shape[1], -1)
            others = others.scatter(2, self.which.long(), value=False)
            logits = (scores * queries.shape[3] ** -0.5).masked_fill(
                ~others[:, :, None], -torch.inf
            )
            best = logits.float().log_softmax(-1).amax(2).nan_to_num(-torch.inf).to(scores.dtype)
            record.writes(best)
            record.reads(best)
            chosen = best.topk(self.most, dim=-1).indices
            return chosen, others.gather(2, chosen)

    def _tokens(self, chunks: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens of chunks (batch, KV heads, n), and whether they are there and to be seen.

        In place of others stands the prompt's last: what comes behind may be on its way home.
        """
        ends = self._on_device[:, None, None, None]
        index = chunks[..., None] * self.chunk + torch.arange(self.chunk, device=chunks.device)
        there = (index < ends) & known[..., None]
        return torch.minimum(index, ends - 1).flatten(2).long(), there.flatten(2)

    def _there(self, chunks: Tensor) -> Tensor:
        """Tokens of chunks (n,) that sequences have, (batch, n, chunk)."""
        slots = chunks[:, None] * self.chunk + torch.arange(self.chunk, device=chunks.device)
        return slots < self._on_device[:, None, None]
