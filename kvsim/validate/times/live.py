"""The most memory that tensors hold at once, where no allocator of the device counts it."""

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of all tensors that PyTorch has made inside and that are still in use.

    What kernels allocate for themselves is not seen; what was there before does not count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held, self.peak = 0, 0  # [B]
        self._known: dict[int, weakref.ref[UntypedStorage]] = {}

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(out):
            if storage._cdata not in given:
                self._add(storage)
        return out

    def _add(self, storage: UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def freed(_: object) -> None:
            del self._known[key]
            self.held -= size

        self._known[key] = weakref.ref(storage, freed)
        self.held += size
        self.peak = max(self.peak, self.held)


def _storages(values: object) -> Iterator[UntypedStorage]:
    for value in tree_iter(values):
        if isinstance(value, Tensor):
            yield value.untyped_storage()
