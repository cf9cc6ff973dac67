"""What a real run does, op by op: FLOPs by torch's counter, bytes of the tensors it names.

An implementation names its ops as ``kvsim/techniques`` does and says which tensors each of them
reads and writes. ``Silent`` costs one call per op; ``Tally`` counts.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from threading import Lock
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from kvsim.graph import Channel

Kind = Literal["prefill", "between", "decode", "draft", "verify"]
"""What a forward pass is for."""


def size(*tensors: Tensor | None) -> int:
    """Bytes of the tensors' elements. [B]"""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


@dataclass
class Count:
    """What one op did in one forward pass, over all layers."""

    flops: int = 0  # [FLOP]
    bytes: dict[Channel, int] = field(default_factory=dict)  # by channel [B]
    rows: int = 0  # gathered one by one from host memory
    launches: int = 0  # kernels that PyTorch ran, views and allocations left out

    def move(self, channel: Channel, moved: int) -> None:
        """Add bytes to a channel."""
        self.bytes[channel] = self.bytes.get(channel, 0) + moved

    def add(self, other: "Count") -> None:
        """Add another count of the same op."""
        self.flops += other.flops
        self.rows += other.rows
        self.launches += other.launches
        for channel, moved in other.bytes.items():
            self.move(channel, moved)


class Marks:
    """What an op says about itself while it runs; does nothing unless counted."""

    counting = False  # whether it is worth finding out what to say

    def reads(self, *tensors: Tensor | None) -> None:
        """The op reads these from the memory of its device."""

    def writes(self, *tensors: Tensor | None) -> None:
        """The op writes these."""

    def visible(self, queries: int, keys: int, seen: Tensor | str) -> None:
        """Of all pairs of a query and a key, only those count that are seen."""

    def computes(self, flops: int) -> None:
        """FLOPs of a kernel that torch's counter does not see."""


class Silent:
    """The interface of a count that counts nothing."""

    def begin(self, kind: Kind) -> None:
        """A forward pass starts."""

    @contextmanager
    def op(self, name: str) -> Iterator[Marks]:
        """Run one op of a layer under its name in ``kvsim/techniques``."""
        yield Marks()

    def copy(
        self, name: str, stream: Literal["h2d", "d2h"], tensors: Sequence[Tensor], rows: int = 0
    ) -> None:
        """A copy between GPU and host memory, noted where its data are used."""

    def apart(self) -> "Silent":
        """A count of its own for work that a later pass will use; see ``take``."""
        return self

    def take(self, note: "Silent") -> None:
        """What was counted apart belongs to this pass."""


SILENT = Silent()


@dataclass
class Pass:
    """One forward pass and its ops."""

    kind: Kind
    ops: dict[str, Count] = field(default_factory=dict)


class Tally(Silent):
    """Counts every op; safe to call from the threads that stand for streams on a CPU."""

    def __init__(self) -> None:
        self.passes: list[Pass] = []
        self._lock = Lock()

    def begin(self, kind: Kind) -> None:
        """A forward pass starts: what follows belongs to it."""
        self.passes.append(Pass(kind))

    @contextmanager
    def op(self, name: str) -> Iterator[Marks]:
        """Count what runs inside under that name."""
        marks, launches = _Counted(), _Launches()
        with FlopCounterMode(display=False, custom_mapping=FLOPS) as flops, launches:
            yield marks
        with self._lock:
            count = self._count(name)
            count.flops += int((flops.get_total_flops() + marks.unseen) * marks.share)
            count.launches += launches.kernels
            count.move("hbm", marks.moved)

    def copy(
        self, name: str, stream: Literal["h2d", "d2h"], tensors: Sequence[Tensor], rows: int = 0
    ) -> None:
        """Count a copy on the link and in the memories at its ends."""
        moved = size(*tensors)
        with self._lock:
            count = self._count(name)
            for channel in (stream, "hbm", "dram"):
                count.move(channel, moved)
            count.rows += rows
            count.launches += len(tensors)

    def apart(self) -> "Tally":
        """A count of its own."""
        note = Tally()
        note.begin("decode")
        return note

    def take(self, note: Silent) -> None:
        """Add what was counted apart to this pass."""
        assert isinstance(note, Tally)
        for name, more in note.passes[0].ops.items():
            with self._lock:
                self._count(name).add(more)

    def _count(self, name: str) -> Count:
        return self.passes[-1].ops.setdefault(name, Count())


class _Counted(Marks):
    counting = True

    def __init__(self) -> None:
        self.moved, self.unseen, self.share = 0, 0, Fraction(1)

    def computes(self, flops: int) -> None:
        self.unseen += flops

    def reads(self, *tensors: Tensor | None) -> None:
        self.moved += size(*tensors)

    def writes(self, *tensors: Tensor | None) -> None:
        self.moved += size(*tensors)

    def visible(self, queries: int, keys: int, seen: Tensor | str) -> None:
        if isinstance(seen, Tensor):
            self.share = Fraction(int(seen.sum()), seen.numel())
        elif seen == "causal":
            self.share = Fraction(queries + 1, 2 * keys)


class _Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the kernels PyTorch runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = 0

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ) -> Any:
        if not func.is_view and not func.name().startswith("aten::empty"):
            self.kernels += 1
        return func(*args, **(kwargs or {}))


def _attention_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Of fused attention with grouped heads, every pair of a query and a key counted."""
    batch, heads, queries, width = q
    return int(2 * batch * heads * queries * k[2] * (width + v[3]))


FLOPS = {
    getattr(torch.ops.aten, name): _attention_flops
    for name in (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
}
"""Fused attention kernels that torch's counter does not know, or only with equal heads."""
