"""Kernels against their plain twins on a device; where there is no GPU they are interpreted."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from kvsim.validate.kernels import attention_triton, gather_triton, quantise_triton, topk_triton
from kvsim.validate.kernels.attention import attend_plainly
from kvsim.validate.kernels.gather import gather_plainly
from kvsim.validate.kernels.packing import unpack
from kvsim.validate.kernels.quantise import quantise_plainly
from kvsim.validate.kernels.stores import Levels, View
from kvsim.validate.kernels.topk import mean_attention
from kvsim.validate.techniques.zipcache import channelwise, separable

FP16_TOLERANCE = 4e-3  # of numbers around 1 in fp16, some roundings
CODE_TIES = 1e-3  # share of codes that may be the neighbouring one
GROUP, SLOTS = 32, 64
FETCHED_PAIRS = 40  # fetched ones

Case = dict[str, Any]
"""What was compared, how far it is off, and whether that is within what it may be."""


def attention(device: torch.device, small: bool) -> Iterator[Case]:
    """Packed attention over head sizes, formats, lengths and queries."""
    lengths = (70, 130) if small else (70, 1100, 5000)
    shapes = product((64, 128), (1, 2, 4, 8), lengths, (1, 5), (torch.float16, torch.float32))
    for dim, bits, length, new, dtype in shapes:
        if small and (bits in (1, 8) or new == 5) and dim == 128:
            continue
        view, q = _view(device, dim, bits, length, new, dtype)
        for kind, one in _kinds(view, q, small):
            case = {"head_dim": dim, "bits": bits, "tokens": length, "new": new}
            yield case | {"rows": kind, "dtype": str(dtype)[6:]} | _compared(q, one)


def _compared(queries: Tensor, view: View) -> Case:
    """How far the kernel is from its twin over one view."""
    ours = attention_triton.attend(queries, view, True)
    plain = attend_plainly(queries, view, True)
    off = max(_largest_difference(ours.out, plain.out), _largest_difference(ours.lse, plain.lse))
    return {"off": off, "passed": off <= FP16_TOLERANCE}


def factors(device: torch.device, small: bool) -> Iterator[Case]:
    """ZipCache's rows: groups of which the first is ragged, and a factor per channel of values."""
    most = 130 if small else 5000
    for dim, bits, dtype in product((64, 128), (2, 4), (torch.float16, torch.float32)):
        if small and dim == 128:
            continue
        generator = torch.Generator().manual_seed(bits + dim)
        numbers = [torch.randn(2, 2, most, dim, generator=generator) for _ in "kv"]
        valid = torch.ones(2, most, dtype=torch.bool)
        k, v = channelwise(numbers[0], bits, valid), separable(numbers[1], bits, valid)
        assert v.factor is not None
        tables = (torch.cat([t, t * 1.5, t * 0.5], 2) for t in (k.scale, k.zero, v.factor))
        scale, zero, factor = (t.contiguous().to(device) for t in tables)
        first = torch.tensor([most // 2, most // 3], dtype=torch.int32, device=device)
        group = most - most // 2 - 8  # the last tokens are of a third group
        k = replace(k, codes=k.codes.to(device), scale=scale, zero=zero, group=group, first=first)
        v = replace(
            v,
            codes=v.codes.to(device),
            scale=v.scale.to(device),
            zero=v.zero.to(device),
            factor=factor,
            factor_group=group,
            first=first,
        )
        rows = torch.tensor([most, most - 4], dtype=torch.int32, device=device)
        queries = torch.randn(2, 4, 1, dim, generator=generator).to(device, dtype)
        case = {"head_dim": dim, "bits": bits, "tokens": most, "new": 1, "rows": "with factors"}
        yield case | {"dtype": str(dtype)[6:]} | _compared(queries, View(rows, k, v, rows, rows))


def _kinds(view: View, queries: Tensor, small: bool) -> Iterator[tuple[str, View]]:
    """A view as it is, with fetched pairs, and with a residual beside the codes."""
    yield "packed", view
    store, ring = view.k, view.k_tail
    assert store is not None and view.v is not None and ring is not None
    if small and (store.bits != 4 or queries.shape[2] > 1 or queries.shape[3] > 64):
        return
    batch, kv_heads, _, dim = ring.shape
    generator = torch.Generator().manual_seed(5)
    chosen = torch.randperm(store.rows + 1, generator=generator)[: FETCHED_PAIRS - 1]
    index = torch.cat([chosen, torch.tensor([-1])]).int()  # one place is empty
    index = index.expand(batch, kv_heads, -1).contiguous().to(ring.device)
    pairs = [
        torch.randn(batch, kv_heads, index.shape[2], dim, generator=generator).to(ring)
        for _ in "kv"
    ]
    yield "with fetched pairs", replace(view, index=index, k_fetched=pairs[0], v_fetched=pairs[1])
    if store.bits == 4:
        both = [
            quantise_plainly(s.numbers(), 4, GROUP, s.by, hierarchical=True)
            for s in (store, view.v)
        ]
        yield "in two halves", replace(view, k=both[0], v=both[1])


def _view(
    device: torch.device, dim: int, bits: int, length: int, new: int, dtype: torch.dtype
) -> tuple[View, Tensor]:
    """Packed rows behind a ring of the latest ones, two sequences of two KV heads."""
    batch, kv_heads = 2, 2
    generator = torch.Generator().manual_seed(bits * length)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    packed = max(length - SLOTS + GROUP - 1, 0) // GROUP * GROUP
    where: Levels = "centres" if bits == 1 else "ends"
    stores, rings = [], []
    for by in ("channel", "token"):
        rows = noise(batch, kv_heads, length, dim)
        stores.append(quantise_plainly(rows[:, :, :packed], bits, GROUP, by, where))
        ring = torch.zeros(batch, kv_heads, SLOTS, dim, device=device, dtype=dtype)
        slots = torch.arange(packed, length, device=device) % SLOTS
        ring[:, :, slots] = rows[:, :, packed:]
        rings.append(ring)
    counts = torch.full((batch,), packed, dtype=torch.int32, device=device)
    lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
    view = View(lengths, stores[0], stores[1], counts, counts, rings[0], rings[1])
    return view, noise(batch, 2 * kv_heads, new, dim)


def quantise(device: torch.device, small: bool) -> Iterator[Case]:
    """Packing: equal codes but for ties."""
    for dim, bits, by in product((64, 128), (1, 2, 4, 8), ("channel", "token")):
        numbers = torch.randn(2, 2, 64 if small else 2048, dim).half().to(device)
        settings: Any = bits, GROUP, by, "centres" if bits == 1 else "ends"
        ours = quantise_triton.quantise(numbers, *settings)
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
        index = topk_triton.softmax_top_k(logits, 2, k, eligible).long()
        shares = mean_attention(logits, 2)
        barred = torch.arange(tokens, device=device) >= eligible[:, None, None]
        chosen = shares.gather(2, index.clamp(min=0)).amin(-1)
        rest = shares.masked_fill(barred, 0.0).scatter(2, index.clamp(min=0), 0.0).amax(-1)
        off = float((rest / chosen - 1).clamp(min=0).max())
        whole = bool((index >= 0).all()) and bool((index[:, :, 1:] > index[:, :, :-1]).all())
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
        gather_triton.gather(k, v, index, *ours)
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
