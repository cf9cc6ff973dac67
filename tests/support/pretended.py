"""A GPU that is pretended: tensors that say they are on CUDA, and hold their numbers on the CPU.

Code for GPUs takes its own paths with it: lanes are streams, marks are events, kernels are Triton's
(interpreted). Numbers are real, so that tokens can be compared. What a GPU would refuse is refused:
operands on two devices. What would make the host wait for the GPU is counted.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode, get_default_nowrap_functions
from torch.utils._pytree import tree_map

from kvsim.validate.counter import Fused, uncounted
from kvsim.validate.kernels import (
    attention_triton,
    language,
    rows_triton,
)
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.model.weights import random_weights
from kvsim.validate.parts.composed import default_deployment
from tests.support.pretended_cuda import GPU, stands_for_cuda
from tests.support.small_llama import small_llama

CPU = torch.device("cpu")
LAUNCHERS = (attention_triton, rows_triton)
ACROSS = (Tensor.copy_, Tensor.to, Tensor.cpu, Tensor.cuda)
"""What takes operands on two devices."""
WAITS = (Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.cpu)
"""What needs numbers of the GPU on the host."""
_tensor: Any = Tensor
SAID: dict[Any, Any] = {
    _tensor.device.__get__: GPU,
    _tensor.is_cuda.__get__: True,
    _tensor.is_cpu.__get__: False,
}
"""What tensors there say of themselves."""


@dataclass
class Seen:
    """What the host did with the pretended GPU."""

    waits: int = 0  # for its numbers


class Pretended(Tensor):
    """A tensor on the pretended GPU."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in SAID:
            return SAID[func]
        return _run(func, args, kwargs)


class _Device(TorchFunctionMode):
    """Makes tensors there that are asked for there; attention is one kernel."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.is_pinned:
            return True
        if func is Tensor.pin_memory:
            return args[0]
        if func is torch.device:
            return func(*args, **kwargs)
        mine = any(isinstance(value, Pretended) for value in _tensors((args, kwargs)))
        if func in WAITS and mine:
            self.seen.waits += 1
        if func in WHOLE and mine:
            return WHOLE[func](*args, **kwargs)
        if mine:
            return func(*args, **kwargs)
        kwargs.pop("pin_memory", None)
        if func is torch.empty:  # what nothing is written to must not be an index out of range
            with uncounted():
                return self.__torch_function__(torch.zeros, types, args, kwargs)
        return _run(func, args, kwargs) if _asked(args, kwargs) else func(*args, **kwargs)


def _asked(args: Any, kwargs: Any) -> torch.device | None:
    """The device that a call names."""
    for value in (*args, kwargs.get("device")):
        if isinstance(value, torch.device) or (
            isinstance(value, str) and value.startswith(("cuda", "cpu"))
        ):
            asked = torch.device(value)
            return None if asked.type == "meta" else asked  # rehearsals hold nothing anywhere
    return None


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run on the CPU, and say of results that they are where a GPU would have them."""
    tensors = list(_tensors((args, kwargs)))
    slices = func is Tensor.__setitem__ and not isinstance(args[1], Tensor)
    if (
        func not in ACROSS
        and not slices
        and any(
            not isinstance(t, Pretended) and Tensor.dim(t) and len(tensors) > 1 for t in tensors
        )
        and any(isinstance(t, Pretended) for t in tensors)
    ):
        raise RuntimeError(f"{func}: operands on cuda:0 and the CPU")
    asked = _asked(args, kwargs)
    there = asked.type == "cuda" if asked else any(isinstance(t, Pretended) for t in tensors)
    if func in (Tensor.copy_, Tensor.__setitem__):
        there = isinstance(args[0], Pretended)
    elif func is Tensor.cpu:
        there = False
    moved = there != any(isinstance(t, Pretended) for t in tensors) and bool(tensors)
    if asked:
        args = tuple(a for a in args if not _names_device(a))
        kwargs = {k: v for k, v in kwargs.items() if k != "device"}
        kwargs |= {} if func is Tensor.to else {"device": CPU}
    kwargs.pop("pin_memory", None)
    with torch._C.DisableTorchFunctionSubclass():
        if func in (Tensor.to, Tensor.cpu) and moved:
            kwargs.pop("non_blocking", None)
            more = args[1:]
            out = args[0].to(*more, **kwargs | {"copy": True}) if more else args[0].clone()
        else:
            out = func(*args, **kwargs)
        if func in get_default_nowrap_functions():
            return out
        kind = Pretended if there else Tensor

        def placed(value: Any) -> Any:
            moved = isinstance(value, Tensor) and type(value) is not kind
            return value.as_subclass(kind) if moved else value

        return placed(out) if isinstance(out, Tensor) else tree_map(placed, out)


def _tensors(given: Any) -> Iterator[Tensor]:
    """Those among arguments, however deep."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, (tuple, list)):
        for value in given:
            yield from _tensors(value)
    elif isinstance(given, dict):
        yield from _tensors(list(given.values()))


def _names_device(value: Any) -> bool:
    return _asked((value,), {}) is not None


def _plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, Pretended) else value


def _attention(
    queries: Tensor, keys: Tensor, values: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """One kernel, as a GPU has one; its products are counted as PyTorch's are."""
    if isinstance(attn_mask, CausalBias):
        attn_mask = attn_mask._materialize(CPU)
    parts = [_plain(t) for t in (queries, keys, values, attn_mask)]
    with torch._C.DisableTorchFunctionSubclass():
        out: Tensor = _attend(*parts, is_causal, enable_gqa).as_subclass(Pretended)
        return out


@torch.library.custom_op("kvsim_pretended::attention", mutates_args=())
def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool, grouped: bool
) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=causal, enable_gqa=grouped
    ).clone()


def _rms_norm(
    tensor: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """One kernel, as a GPU has one."""
    with torch._C.DisableTorchFunctionSubclass():
        normed: Any = _normed
        out: Tensor = normed(_plain(tensor), list(shape), _plain(weight), eps)
        return out.as_subclass(Pretended)


@torch.library.custom_op("kvsim_pretended::rms_norm", mutates_args=())
def _normed(tensor: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
    return torch.nn.functional.rms_norm(tensor, shape, weight, eps)


WHOLE: dict[Any, Any] = {
    torch.nn.functional.scaled_dot_product_attention: _attention,
    torch.nn.functional.rms_norm: _rms_norm,
}
"""What is one kernel on a GPU and many on a CPU."""


@cache
def _products_of_four_bits() -> Any:
    """What CUDA has and a CPU lacks, with the shapes that it has there."""
    made: Any = torch.library.Library
    library = made("aten", "IMPL")

    def convert(pairs: Tensor, tiles: int) -> Tensor:
        outputs, inputs = pairs.shape[0], 2 * pairs.shape[1]
        codes = pairs.contiguous().view(torch.int32)
        return codes.view(outputs // 8, inputs // (16 * tiles), 32, tiles // 2).clone()

    def multiply(numbers: Tensor, codes: Tensor, group: int, scales: Tensor) -> Tensor:
        outputs = codes.shape[0] * 8
        pairs = codes.reshape(outputs, -1).view(torch.uint8)
        steps = torch.stack((pairs >> 4, pairs & 15), dim=-1).flatten(1).float() - 8.0
        scale = scales[..., 0].T.float().repeat_interleave(group, dim=1)
        return (numbers.float() @ (steps * scale).T).to(numbers.dtype)

    library.impl("_convert_weight_to_int4pack", convert, "CPU")
    library.impl("_weight_int4pack_mm", multiply, "CPU")
    return library


@contextmanager
def pretended(interpreted: bool = True) -> Iterator[Seen]:
    """A GPU is there, as far as Python can tell.

    Parameters
    ----------
    interpreted : run Triton's kernels; else they give zeros, which is enough to count them.
    """
    _products_of_four_bits()
    seen, generator = Seen(), torch.Generator

    def run(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        if not interpreted:
            Fused.launched += 1
            return
        given = [_plain(value) for value in arguments]
        with torch._C.DisableTorchFunctionSubclass(), uncounted():
            language.launch(kernel, grid, *given, **options)

    with ExitStack() as stack:
        for name, stands in stands_for_cuda().items():
            stack.enter_context(patch.object(torch.cuda, name, stands))
        for module in LAUNCHERS:
            stack.enter_context(patch.object(module, "launch", run))
        stack.enter_context(patch.object(torch, "Generator", lambda device=None: generator()))
        stack.enter_context(_Device(seen))
        yield seen


def decoder(layers: int = 2, length: int = 256) -> Decoder:
    """Some layers with random weights in fp16, on the GPU; call it where one is pretended."""
    arch = small_llama((4, 2), 64, layers, vocab=256)
    weights = random_weights(arch, GPU, torch.float16)
    return Decoder(arch, weights, length, deployment=default_deployment(arch.model))
