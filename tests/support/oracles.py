"""Kernels against their plain twins on a device; where there is no GPU they are interpreted."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from kvsim.validate.kernels import attention_triton, rows_triton
from kvsim.validate.kernels.attention import attend_plainly
from kvsim.validate.kernels.gather import gather_plainly
from kvsim.validate.kernels.packing import unpack
from kvsim.validate.kernels.quantise import quantise_plainly
from kvsim.validate.kernels.stores import View
from kvsim.validate.kernels.topk import mean_attention, softmax_top_k
from kvsim.validate.techniques.zipcache import channelwise, separable

FP16_TOLERANCE = 4e-3  # of numbers around 1 in fp16, some roundings
CODE_TIES = 1e-3  # share of codes that may be the neighbouring one
GROUP = 32  # numbers that share a scale

Noise = Callable[..., Tensor]
"""Normal numbers of a shape, on a device."""
Case = dict[str, Any]
"""What was compared, how far it is off, and whether that is within what it may be."""


def drawn(device: torch.device, dtype: torch.dtype, seed: int) -> Noise:
    """Draw the same normal numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator).to(device, dtype)


def kivi_view(
    noise: Noise, batch: int, kv_heads: int, dim: int, length: int, bits: int, slots: int = 64
) -> View:
    """Keys packed in blocks of 32, values up to the last ``slots`` tokens; ragged lengths.

    Slots of the rings without a token hold NaN, which nothing may read.
    """
    k, v = (noise(batch, kv_heads, length, dim) for _ in "kv")
    lengths = torch.tensor([max(length - 13 * i, 1) for i in range(batch)], dtype=torch.int32)
    rings = []
    for numbers in (k, v):
        ring = numbers.new_full((batch, kv_heads, slots, dim), torch.nan)
        for i, end in enumerate(lengths.tolist()):
            tokens = torch.arange(max(end - slots, 0), end)
            ring[i, :, tokens % slots] = numbers[i, :, tokens]
        rings.append(ring)
    padded = torch.nn.functional.pad(k, (0, 0, 0, -length % 32))
    keys = quantise_plainly(padded, bits, 32, "channel", "centres" if bits == 1 else "ends")
    values = quantise_plainly(v, bits, 16, "token")
    lengths = lengths.to(k.device)
    packed = (lengths // 32 * 32).int(), (lengths - slots).clamp(min=0).int()
    return View(lengths, keys, values, *packed, rings[0], rings[1])


def zipcache_view(noise: Noise, dim: int, length: int, bits: int) -> View:
    """ZipCache's rows: ragged first groups, factors per channel, tables shared by sequences."""
    numbers = [noise(2, 2, length, dim) for _ in "kv"]
    k, v = channelwise(numbers[0], bits), separable(numbers[1], bits)
    assert v.factor is not None
    tables = [torch.cat([t, t * 1.5, t * 0.5], 2) for t in (k.scale, k.zero, v.factor)]
    first, rows = (
        torch.tensor(ends, dtype=torch.int32, device=k.codes.device)
        for ends in ((length // 2, length // 3), (length, length - 4))
    )
    group = length - length // 2 - 8  # the last tokens are of a third group
    k = replace(k, scale=tables[0], zero=tables[1], group=group, first=first)
    v = replace(v, factor=tables[2], factor_group=group, first=first)
    return View(rows, k, v, rows, rows)


def with_pairs(noise: Noise, view: View, many: int, empty: int) -> View:
    """Let fetched pairs replace some packed ones; places at the end of the list are empty."""
    assert view.k is not None
    batch, kv_heads, rows = view.k.codes.shape[:3]
    rng = torch.Generator().manual_seed(5)
    chosen = torch.stack(
        [torch.randperm(min(rows, 199), generator=rng)[:many] for _ in range(kv_heads)]
    )
    index = torch.nn.functional.pad(chosen, (0, empty), value=-1).int().expand(batch, -1, -1)
    dim = view.k.codes.shape[3] * 8 // view.k.bits
    k, v = (noise(batch, kv_heads, many + empty, dim) for _ in "kv")
    index = index.contiguous().to(k.device)
    return replace(view, index=index, k_fetched=k, v_fetched=v)


def attention(device: torch.device, small: bool) -> Iterator[Case]:
    """Packed attention over head sizes, formats, lengths and queries."""
    lengths = (70, 130) if small else (70, 1100, 5000)
    shapes = product((64, 128), (1, 2, 4, 8), lengths, (1, 5), (torch.float16, torch.float32))
    for dim, bits, length, new, dtype in shapes:
        if small and (bits in (1, 8) or new == 5) and dim == 128:
            continue
        noise = drawn(device, dtype, bits * length)
        view, queries = kivi_view(noise, 2, 2, dim, length, bits), noise(2, 4, new, dim)
        kinds = {"packed": view}
        if not small or (bits == 4 and new == 1 and dim == 64):
            kinds["with fetched pairs"] = with_pairs(noise, view, 39, 1)
            if bits == 4:
                k, v = (
                    quantise_plainly(s.numbers(), 4, s.group, s.by, hierarchical=True)
                    for s in (view.k, view.v)
                    if s
                )
                kinds["in two halves"] = replace(view, k=k, v=v)
        for kind, one in kinds.items():
            case = {"head_dim": dim, "bits": bits, "tokens": length, "new": new}
            yield case | {"rows": kind, "dtype": str(dtype)[6:]} | _compared(queries, one)


def factors(device: torch.device, small: bool) -> Iterator[Case]:
    """Packed attention over rows with factors."""
    length = 130 if small else 5000
    for dim, bits, dtype in product((64, 128), (2, 4), (torch.float16, torch.float32)):
        if not (small and dim == 128):
            noise = drawn(device, dtype, bits + dim)
            case: Case = {"head_dim": dim, "bits": bits, "tokens": length, "new": 1}
            view = zipcache_view(noise, dim, length, bits)
            case |= {"rows": "with factors", "dtype": str(dtype)[6:]}
            yield case | _compared(noise(2, 4, 1, dim), view)


def _compared(queries: Tensor, view: View) -> Case:
    """How far the kernel is from its twin over one view."""
    ours = attention_triton.attend(queries, view, True)
    plain = attend_plainly(queries, view, True)
    off = max(_largest_difference(ours.out, plain.out), _largest_difference(ours.lse, plain.lse))
    return {"off": off, "passed": off <= FP16_TOLERANCE}


def quantise(device: torch.device, small: bool) -> Iterator[Case]:
    """Packing: equal codes but for ties."""
    for dim, bits, by in product((64, 128), (1, 2, 4, 8), ("channel", "token")):
        numbers = torch.randn(2, 2, 64 if small else 2048, dim).half().to(device)
        settings: Any = bits, GROUP, by, "centres" if bits == 1 else "ends"
        ours = rows_triton.quantise(numbers, *settings)
        plain = quantise_plainly(numbers, *settings)
        codes = [unpack(store.codes, bits).int() for store in (ours, plain)]
        differ = (codes[0] - codes[1]).abs()
        share = float((differ > 0).float().mean())
        passed = share <= CODE_TIES and int(differ.max()) <= 1
        yield {"head_dim": dim, "bits": bits, "by": by, "off": share, "passed": passed}


def topk(device: torch.device, small: bool) -> Iterator[Case]:
    """Selection: what is chosen has no smaller share than what is not."""
    for tokens, k in ((300, 16), (4200, 64)) if small else ((300, 16), (8192, 64), (65536, 1024)):
        logits = torch.randn(2, 4, tokens).to(device)
        eligible = torch.tensor([tokens, tokens // 2], dtype=torch.int32, device=device)
        index = softmax_top_k(logits, 2, k, eligible).long()
        shares = mean_attention(logits, 2)
        barred = torch.arange(tokens, device=device) >= eligible[:, None, None]
        chosen = shares.gather(2, index.clamp(min=0)).amin(-1)
        rest = shares.masked_fill(barred, 0.0).scatter(2, index.clamp(min=0), 0.0).amax(-1)
        off = float((rest / chosen - 1).clamp(min=0).max())
        whole = bool((index >= 0).all()) and bool((index.sort(-1).values.diff() > 0).all())
        yield {"tokens": tokens, "k": k, "off": off, "passed": whole and off <= 1e-5}


def gather(device: torch.device, small: bool) -> Iterator[Case]:
    """Rows read from the host's memory: the same bits."""
    for dim, tokens in ((64, 500), (128, 4096)):
        homes = [torch.randn(2, 2, tokens, dim).half() for _ in "kv"]
        k, v = (home.pin_memory() if device.type == "cuda" else home for home in homes)
        index = torch.randint(tokens, (2, 2, 100), dtype=torch.int32).to(device)
        ours, plain = (
            [torch.zeros(2, 2, 100, dim, device=where).half() for _ in "kv"]
            for where in (device, torch.device("cpu"))
        )
        rows_triton.gather(k, v, index, *ours)
        gather_plainly(k, v, index.cpu(), *plain)
        same = all(torch.equal(a.cpu(), b) for a, b in zip(ours, plain, strict=True))
        yield {"head_dim": dim, "tokens": tokens, "off": 0.0 if same else 1.0, "passed": same}


def lanes(device: torch.device, small: bool) -> Iterator[Case]:
    """Copies that are late change no token: techniques on lanes with and without a delay."""
    from unittest.mock import patch

    from kvsim.techniques import parse
    from kvsim.validate import transfer
    from kvsim.validate.counts.expected import RandomPrompts
    from kvsim.validate.model.architecture import load_architecture
    from kvsim.validate.model.decoder import Decoder
    from kvsim.validate.model.weights import random_weights
    from kvsim.validate.parts.composed import default_deployment
    from kvsim.validate.run import Generation

    arch = load_architecture("smollm2-135m").cut(3)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    decoder = Decoder(
        arch, random_weights(arch, device, dtype), 256, deployment=default_deployment(arch.model)
    )
    prompts = RandomPrompts(2, 48, 8).prompts(arch.model.vocab)
    before = transfer.Transfers.__init__

    def init_late(self: Any, device: torch.device, *more: Any, **named: Any) -> None:
        before(self, device, *more, **(named | {"before": _delay(device)}))

    for text in ("offload", "kvpr:split=9", "kcache:n=6", "specache:k=16"):
        plain = Generation(decoder, parse(text), prompts, 12).complete()
        with patch.object(transfer.Transfers, "__init__", init_late):
            delayed = Generation(decoder, parse(text), prompts, 12).complete()
        same = torch.equal(plain, delayed)
        yield {"technique": text, "off": 0.0 if same else 1.0, "passed": same}


def _delay(device: torch.device) -> Callable[[], None]:
    """What keeps a lane waiting: its stream on a GPU, its thread on a CPU."""
    if device.type == "cuda":
        return lambda: torch.cuda._sleep(3_000_000)  # type: ignore[no-untyped-call]
    from time import sleep

    return lambda: sleep(1e-3)


def _largest_difference(ours: Tensor, plain: Tensor) -> float:
    """Largest difference, relative above 1; infinite where something is no number."""
    scale = plain.abs().clamp(min=1.0)
    return float(((ours - plain).abs() / scale).nan_to_num(torch.inf).max())


ORACLES = {
    "attention": attention,
    "factors": factors,
    "quantise": quantise,
    "topk": topk,
    "gather": gather,
    "lanes": lanes,
}
