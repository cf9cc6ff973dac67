"""CUDA graphs on a GPU that is pretended: what is issued is recorded, undone, and done again.

A real graph keeps kernels with the addresses, shapes and numbers that they were issued with. So
does this one: every call that PyTorch's dispatcher sees and every launch of Triton is kept with its
tensors, and replaying does them again in the same memory. Work that needed the host in between, or
numbers that the host made up for one round, would give other tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from kvsim.validate import transfer
from kvsim.validate.counter import is_composite, uncounted
from kvsim.validate.kernels import attention_triton, rows_triton
from kvsim.validate.kernels.attention import attend_plainly
from kvsim.validate.kernels.quantise import quantise_plainly
from kvsim.validate.kernels.stores import PartialAttention, View
from kvsim.validate.parts import packed, store
from kvsim.validate.techniques import quantspec
from tests.support.pretended import LAUNCHERS

WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal")
"""What a stream that is captured refuses: the host would wait for numbers of the GPU."""


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls in their order, each with what it was given and what it gave."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # memory, as it was
        self._made: list[Tensor] = []  # keeps what is made inside, so that addresses stay its own
        self._own: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.name() in WAITS:
            raise RuntimeError(f"{func.name()}: operation not permitted when stream is capturing")
        if is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        for given, stated in zip(args, func._schema.arguments, strict=False):
            if stated.alias_info is not None and stated.alias_info.is_write:
                self.keep(given)
        out = func(*args, **kwargs)
        for tensor in tensors(out):
            if func.is_view or any(tensor is one for one in tensors((args, kwargs))):
                continue
            self._own.add(tensor.untyped_storage()._cdata)
            self._made.append(tensor)
        self.calls.append((func, args, kwargs, out))
        return out

    def keep(self, *given: Any) -> None:
        """Remember memory from before, which is about to be written."""
        for tensor in tensors(given):
            key = tensor.untyped_storage()._cdata
            if key not in self._own and key not in self.before:
                with torch._C.DisableTorchFunction():
                    many = tensor.untyped_storage().nbytes() // tensor.itemsize
                    whole = tensor.as_strided((many,), (1,), 0)
                    self.before[key] = whole, whole.clone()

    def launched(self, run: Callable[..., Any], *given: Any, **options: Any) -> None:
        """A kernel past PyTorch."""
        self.keep(*given)
        run(*given, **options)
        self.calls.append((run, given, options, None))

    def undo(self) -> None:
        """Memory as it was: what is captured is not done."""
        with torch._C.DisableTorchFunction():
            for memory, was in self.before.values():
                memory.copy_(was)

    def replay(self) -> None:
        """All of it again, where it was."""
        for func, args, kwargs, out in self.calls:
            if isinstance(func, _Twin):
                func.again(args, kwargs, out)
            elif not isinstance(func, torch._ops.OpOverload):
                func(*args, **kwargs)
            elif not func.is_view:
                with torch._C.DisableTorchFunction():
                    again = func(*args, **kwargs)
                    for mine, new in zip(tensors(out), tensors(again), strict=True):
                        if mine is not new:
                            mine.copy_(new)

    def said(self) -> list[str]:
        """What was issued, with shapes, places in memory and numbers."""

        def place(value: Any) -> Any:
            if isinstance(value, Tensor):
                return tuple(value.shape), value.stride(), value.storage_offset(), value.dtype
            return value

        return [
            f"{getattr(func, '__name__', func)}: {tree_map(place, (args, kwargs))}"
            for func, args, kwargs, _ in self.calls
        ]


def tensors(given: Any) -> Iterator[Tensor]:
    """Those among arguments, however deep."""
    return (value for value in tree_iter(given) if isinstance(value, Tensor))


@contextmanager
def recording(twins: bool = False) -> Iterator[Recording]:
    """Everything inside is recorded; numbers may not come from the host's memory.

    Parameters
    ----------
    twins : plain twins of Triton's kernels run, which are quicker than an interpreter, each as one.
    """
    made = Recording()

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a number of the host's, which a later round would read again")

    def one(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            with uncounted():
                out = run(*given, **options)
            made.calls.append((_Twin(run), given, options, out))
            return out

        return call

    with ExitStack() as stack:
        for module in LAUNCHERS:
            noted = partial(made.launched, module.launch)
            stack.enter_context(patch.object(module, "launch", noted))
        for module, name, twin in TWINS if twins else ():
            stack.enter_context(patch.object(module, name, one(twin)))
        for module in (transfer, store, packed, quantspec):
            stack.enter_context(patch.object(module, "to_device", refuse))
        stack.enter_context(made)
        yield made


@contextmanager
def graphs() -> Iterator[list[Recording]]:
    """CUDA graphs are there, with plain twins of kernels; gives what has been captured."""
    found: list[Recording] = []

    class Graph:
        made: Recording

        def replay(self) -> None:
            self.made.replay()

    @contextmanager
    def capture(graph: Graph) -> Iterator[None]:
        try:
            with recording(twins=True) as graph.made:
                yield
        finally:
            graph.made.undo()
        found.append(graph.made)

    with ExitStack() as stack:
        for module, name, twin in TWINS:
            stack.enter_context(patch.object(module, name, twin))
        stack.enter_context(patch.object(torch.cuda, "CUDAGraph", Graph))
        stack.enter_context(patch.object(torch.cuda, "graph", capture))
        yield found


def _attend(queries: Tensor, view: View, scored: bool = False) -> PartialAttention:
    return attend_plainly(queries, replace(view, most=attention_triton._room(view)), scored)


TWINS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (attention_triton, "attend", _attend),
    (rows_triton, "quantise", quantise_plainly),
)


@dataclass(frozen=True)
class _Twin:
    """A kernel's twin that gives a dataclass of tensors."""

    run: Callable[..., Any]

    def again(self, given: Any, options: Any, out: Any) -> None:
        with uncounted():
            new = self.run(*given, **options)
            for mine, other in zip(vars(out).values(), vars(new).values(), strict=True):
                if isinstance(mine, Tensor):
                    mine.copy_(other)
