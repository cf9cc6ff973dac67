"""ShadowKV: keys of the prompt as a product of low rank, values on the host, chunks by landmarks.

H. Sun et al., "ShadowKV: KV Cache in Shadows for High-Throughput Long-Context LLM Inference", ICML
2025, sections 4.1 and 4.2, algorithms 1 and 2, https://arxiv.org/abs/2410.21465.

- Prompt (algorithm 1): keys before their positions are decomposed, values leave for host memory,
  chunks are summarised by the mean of their keys; chunks that their mean describes worst are
  outliers, which stay on the GPU (``Lowrank.fill``, ``Landmarks._summarise``).
- Decode (algorithm 2): the means rank the chunks; values of the best come from the host while their
  keys are restored from the product; attention is to these, to outliers and to all that was
  generated (``Landmarks.attend``).
"""

from dataclasses import replace

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.axes.base import Storage
from kvsim.techniques.papers.shadowkv import Landmarks as LandmarkSettings
from kvsim.techniques.papers.shadowkv import Lowrank as LowrankSettings
from kvsim.validate.counter import OpRecord
from kvsim.validate.kernels.gather import rows_at
from kvsim.validate.model.attention import Pass, Seen, attend
from kvsim.validate.parts.host_rows import HostValues
from kvsim.validate.parts.reading import in_pages
from kvsim.validate.parts.rows import Fp16, Plain, TokenRows
from kvsim.validate.parts.selection import LayerCache, LayerContext
from kvsim.validate.parts.store import CacheRoom, KvStore, Resident, SlotRange

SMALL_SETTINGS = ("budget={pages},chunk=4,outliers=1,rank=8",)


class Lowrank(KvStore):
    """Storage of keys before rotation as a product of a row per token and a matrix per sequence.

    Keys and values of generated tokens stay in full precision on the GPU (``recent``); all values
    are also stored on the host.

    References
    ----------
    .. [1] G. Golub and C. Van Loan, "Matrix computations", figure 8.6.1: operations of an R-SVD.
    """

    keeps_numbers, fetches_values = False, True

    def __init__(self, room: CacheRoom) -> None:
        super().__init__(room)
        part = room.settings(LowrankSettings)
        if room.values is None:
            raise InputError(
                f"{part.name}: its real implementation has values on the host; run it within "
                f"shadowkv, or add place:values_host=1"
            )
        self.rank = part.rank
        self.v = TokenRows(Plain(), room, room.slots, room.values)

    def make_room(self, prompt: int) -> None:
        """Allocate the factors of the prompt's keys, and storage for the generated tokens.

        Parameters
        ----------
        prompt
            Tokens of each prompt. [tokens]
        """
        room, numbers = self.room, self.room.heads * self.room.dim
        shape = (room.sequences, prompt, self.rank)
        self.left = torch.zeros(shape, dtype=room.dtype, device=room.device)
        self.right = room.zeros(self.rank)
        self.recent = Fp16(replace(room, part=Storage(), slots=self.slots - prompt, values=None))
        self._work = 6 * prompt * numbers**2 + 20 * numbers**3

    def fill(self, keys: Tensor, values: Tensor, plainly: str = "attn") -> None:
        """Decompose the prompt's keys, before rotation, into low-rank factors (SVD).

        Values are copied to the host by ``Landmarks``.
        """
        with self.counter.op("svd") as record:
            slots = torch.arange(keys.shape[2], device=keys.device)
            before = self.room.turned(keys, slots[None], back=True).float()
            rows = before.transpose(1, 2).flatten(2)
            u, sizes, columns = torch.linalg.svd(rows, full_matrices=False)
            held = min(self.rank, sizes.shape[1])
            self.left[..., :held] = u[..., :held] * sizes[:, None, :held]
            by_head = columns[:, :held].unflatten(2, (self.room.heads, self.room.dim))
            self.right[:, :, :held] = by_head.transpose(1, 2)
            record.reads(keys, rows).writes(rows, self.left, self.right)
            record.computes(self.room.sequences * self._work)

    def restored(self, index: Tensor) -> Tensor:
        """Compute keys of the prompt from their factors, and rotate them by their positions.

        Parameters
        ----------
        index
            Tokens of the prompt, (sequences, KV heads, n).

        Returns
        -------
        Tensor
            Keys, (sequences, KV heads, n, dim).
        """
        with self.counter.op("restore_keys") as record:
            rows = rows_at(self.left[:, None].expand(-1, self.room.heads, -1, -1), index)
            keys = (rows @ self.right).flatten(0, 1)[:, None]
            made = self.room.turned(keys, index.flatten(0, 1), back=False).to(rows.dtype)
            record.reads(rows, self.right).writes(made)
        return made.view(*index.shape, self.room.dim)

    def append(self, keys: Tensor, values: Tensor, span: SlotRange) -> None:
        """Store generated tokens uncompressed, in slots that start at 0 after the prompt."""
        self.recent.append(keys, values, span)

    def attend(self, queries: Tensor, span: SlotRange, seen: Seen) -> Tensor:
        """Raise NotImplementedError: the selection chooses chunks and attends to them itself."""
        raise NotImplementedError

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return the factors with the generated tokens' keys, and these tokens' values."""
        recent = {"generated values": self.recent.v.parts}
        return {"kv": [self.left, self.right, *self.recent.k.parts], **recent}


class Landmarks(LayerCache):
    """ShadowKV's layer cache: rebuilds keys of chosen chunks, and fetches their values.

    Keys are rebuilt from low-rank factors and values fetched from the host. Outlier chunks, which
    are poorly described by their mean key, and generated tokens stay on the GPU and are always
    attended to.
    """

    direct = True  # prompts are written to buffers from which values are copied to the host

    def __init__(self, place: LayerContext) -> None:
        super().__init__(place)
        self.refuse_drafts()
        self.refuse_windows()
        settings, kv = self.parts.selection, self.kv
        assert isinstance(settings, LandmarkSettings)
        if settings.hit or settings.local or settings.prefill != "batch":
            raise InputError(
                f"{settings.name}: hit, local and prefill=sequence are only simulated; run it "
                f"without them"
            )
        if not isinstance(kv, Lowrank):
            raise InputError(
                f"{settings.name}: its real implementation chooses chunks of lowrank's keys, with "
                f"values on the host; run shadowkv"
            )
        kv.make_room(self.prompt)
        self.factors, room = kv, kv.room
        self.chunk, self.chunks = settings.chunk, -(-self.prompt // settings.chunk)
        self.outliers = min(settings.outliers, self.chunks)
        within = max(int(settings.budget) // self.chunk, 1)
        self.most = min(within, self.chunks - self.outliers)
        self.means = room.zeros(self.chunks)
        self.staying = [room.zeros(self.outliers * self.chunk) for _ in "kv"]
        shape = (room.sequences, room.heads, self.outliers)
        self.which = torch.zeros(shape, dtype=torch.int32, device=room.device)
        lanes = self.run.transfers(self.layer)
        self.host = self.run.shared(
            "away", lambda: HostValues(lanes, self.counter, "store_kv", "fetch")
        )
        self.host.add(self, kv.v)
        self.reading = self.run.shared("prompt keys", lambda: [room.zeros(self.prompt)])

    def prompt_buffer(self) -> tuple[Tensor, Tensor]:
        """Return the buffer of keys, and that from which values leave for the host."""
        return self.reading[0], self.host.stage(self)[0]

    def store_prompt(self, keys: Tensor, values: Tensor) -> None:
        """Decompose the keys, and start copying the values to the host."""
        self._summarise(keys, values)
        self.factors.fill(keys, values)
        self.host.send_prompt(self)

    def prompt_done(self) -> None:
        """Free the prompt's buffers and allocate one for fetched chunks."""
        if self.host.reading:
            self.reading.clear()
            every = (layer for layer in self.host.layers if isinstance(layer, Landmarks))
            self.host.prompt_sent(max(layer.most * layer.chunk for layer in every))

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Rank the chunks, fetch the best, and attend to them and to all tokens on the GPU."""
        span = SlotRange.after_cached(step, self.prompt)
        self.factors.append(keys, values, span)
        self.host.send_new(self, [values], step)
        index, seen = self._tokens(self._choose(queries))
        fetched = self.host.fetch(self, index, self.chunk)[0]
        restored = self.factors.restored(index)
        generated = seen.new_ones(*seen.shape[:2], span.longest)
        seen = torch.cat([seen, self._tokens(self.which)[1], generated], 2)
        recent = (side.parts[0][:, :, : span.longest] for side in self._recent())
        with self.counter.op("attn") as record:
            sides = zip((restored, fetched), self.staying, recent, strict=True)
            k, v = (torch.cat(parts, 2) for parts in sides)
            out = attend(OpRecord(), queries, k, v, seen[:, :, None])
            record.reads(queries, k, v).writes(out)
        return out

    def buffers(self) -> Resident:
        """Return landmarks, outlier chunks, the values on the host, and shared buffers.

        The first layer alone lists the buffers that layers share, so that they count once.
        """
        own = {"landmarks": [self.means], "outlier chunks": [*self.staying, self.which]}
        held: Resident = {"gpu": own, "host": {"kv": [self.factors.v.record]}}
        if self.host.layers[0] is self:
            shared = "kv on the way out" if self.host.reading else "fetched pages"
            held["gpu"] |= {shared: self.host.buffers, "prompt keys": self.reading}
        return held

    def _recent(self) -> tuple[TokenRows, TokenRows]:
        return self.factors.recent.k, self.factors.recent.v

    def _summarise(self, keys: Tensor, values: Tensor) -> None:
        """Compute the means of the prompt's chunks, and keep the least similar chunks unchanged."""
        with self.counter.op("chunk_means") as record:
            pages = in_pages(keys, self.chunk, torch.nan).float()
            means = pages.nanmean(3)
            alike = torch.cosine_similarity(pages, means[:, :, :, None], dim=-1)
            worst = alike.nan_to_num(torch.inf).amin(-1)
            self.means.copy_(means)
            self.which.copy_(worst.topk(self.outliers, largest=False).indices)
            index, _ = self._tokens(self.which)
            record.reads(keys, keys)  # for the means, and to compare with them
            record.writes(self.means)
            for mine, numbers in zip(self.staying, (keys, values), strict=True):
                mine.copy_(rows_at(numbers, index))
                record.reads(mine).writes(mine)

    def _choose(self, queries: Tensor) -> Tensor:
        """Choose the chunks with the largest score of a group, (batch, KV heads, chunks)."""
        grouped = queries.reshape(self.batch, self.means.shape[1], -1, queries.shape[3])
        with self.counter.op("landmarks") as record:
            scores = grouped @ self.means.mT
            record.reads(queries, self.means, scores).writes(scores)
        with self.counter.op("topk") as record:
            outlying = self.which.long()[:, :, None].expand(-1, -1, scores.shape[2], -1)
            logits = (scores * queries.shape[3] ** -0.5).scatter(3, outlying, -torch.inf)
            best = logits.float().log_softmax(-1).amax(2).to(scores.dtype)
            record.writes(best).reads(best)
            chosen: Tensor = best.topk(self.most, dim=-1).indices
            return chosen

    def _tokens(self, chunks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens of chunks (batch, KV heads, n), and whether they exist.

        In place of others stands the prompt's last: what comes behind may be on its way home.
        """
        index = chunks[..., None] * self.chunk + torch.arange(self.chunk, device=chunks.device)
        index = index.flatten(2).long()
        return index.clamp(max=self.prompt - 1), index < self.prompt
