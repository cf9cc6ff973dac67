"""ShadowKV's storage: the prompt's keys as a product of low rank, values on the host."""

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.axes.base import Storage
from kvsim.techniques.papers.shadowkv import Lowrank as Settings
from kvsim.validate.counter import NullCounter
from kvsim.validate.kernels.gather import rows_at
from kvsim.validate.model.attention import Seen
from kvsim.validate.parts.bytoken import Host, Plain, TokenRows
from kvsim.validate.parts.cells import CacheRoom, KvStore, SlotRange
from kvsim.validate.parts.fp16 import Fp16
from kvsim.validate.parts.wholetoken import turned


class Lowrank(KvStore):
    """A row per token and a matrix per sequence, whose product is the keys before positions.

    Keys and values of generated tokens stay in full precision on the GPU (``recent``); every value
    has a home on the host too.

    References
    ----------
    .. [1] H. Sun et al., "ShadowKV", ICML 2025, section 4.1.
    .. [2] G. Golub and C. Van Loan, "Matrix computations", figure 8.6.1: operations of an R-SVD.
    """

    keeps_numbers, fetches_values = False, True

    def __init__(
        self,
        part: Storage,
        room: CacheRoom,
        slots: int,
        counter: NullCounter,
        values: Host | None = None,
    ) -> None:
        super().__init__(part, room, slots, counter)
        assert isinstance(part, Settings)
        if values is None:
            raise InputError(
                f"{part.name}: its real implementation has values on the host; run it within "
                f"shadowkv, or add place:values_host=1"
            )
        self.rank = part.rank
        self.v = TokenRows(Plain(), room, slots, values)

    def make_room(self, prompt: int) -> None:
        """For factors of so many tokens' keys, and for the tokens behind them."""
        room, numbers = self.room, self.room.heads * self.room.dim
        shape = (room.sequences, prompt, self.rank)
        self.left = torch.zeros(shape, dtype=room.dtype, device=room.device)
        self.right = room.zeros(self.rank)
        self.recent = Fp16(Storage(), room, self.slots - prompt, self.counter)
        self._work = 6 * prompt * numbers**2 + 20 * numbers**3

    def fill(self, keys: Tensor, values: Tensor, counts: list[int], plainly: str = "attn") -> None:
        """The prompt's keys to their factors; values go home by themselves."""
        with self.counter.op("svd") as record:
            slots = torch.arange(keys.shape[2], device=keys.device)
            there = slots < torch.tensor(counts, device=keys.device)[:, None]
            before = turned(self.room, keys, slots[None], back=True).float()
            rows = before.transpose(1, 2).flatten(2).masked_fill(~there[..., None], 0.0)
            u, sizes, columns = torch.linalg.svd(rows, full_matrices=False)
            held = min(self.rank, sizes.shape[1])
            self.left[..., :held] = u[..., :held] * sizes[:, None, :held]
            by_head = columns[:, :held].unflatten(2, (self.room.heads, self.room.dim))
            self.right[:, :, :held] = by_head.transpose(1, 2)
            record.reads(keys, rows)
            record.writes(rows, self.left, self.right)
            record.computes(self.room.sequences * self._work)

    def restored(self, index: Tensor) -> Tensor:
        """Keys of the prompt's tokens ``index`` (sequences, KV heads, n), (..., n, dim)."""
        with self.counter.op("restore_keys") as record:
            rows = rows_at(self.left[:, None].expand(-1, self.room.heads, -1, -1), index)
            keys = (rows @ self.right).flatten(0, 1)[:, None]
            made = turned(self.room, keys, index.flatten(0, 1), back=False).to(rows.dtype)
            record.reads(rows, self.right)
            record.writes(made)
        return made.view(*index.shape, self.room.dim)

    def append(self, keys: Tensor, values: Tensor, span: SlotRange) -> None:
        """New tokens behind the other generated ones, whose first slot is 0."""
        self.recent.append(keys, values, span)

    def attend(self, queries: Tensor, span: SlotRange, seen: Seen) -> Tensor:
        """Whoever chooses chunks attends by itself."""
        raise NotImplementedError

    def attend_with_scores(
        self, queries: Tensor, span: SlotRange, seen: Seen
    ) -> tuple[Tensor, Tensor]:
        """Whoever chooses chunks attends by itself."""
        raise NotImplementedError

    def tensors(self) -> dict[str, list[Tensor]]:
        """Factors, and the keys of generated tokens; the values of these by themselves."""
        recent = {"generated values": self.recent.v.parts}
        return {"kv": [self.left, self.right, *self.recent.k.parts], **recent}
