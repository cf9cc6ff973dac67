"""Attention over a view in one pass: codes are widened in registers, splits merged at the end.

Flash-decoding: each program takes one KV head of one sequence with all its query heads, and a run
of tokens; a second kernel merges the runs by their log-sum-exp.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvsim.validate.kernels.attention import PartialAttention, View, score_dtype
from kvsim.validate.kernels.language import ceil_div, jit, launch, next_power_of_2, tl
from kvsim.validate.kernels.places_triton import fetched_place, spread
from kvsim.validate.kernels.stores import Store
from kvsim.validate.kernels.widen_triton import side
from kvsim.validate.kernels.words_triton import channels, packed_run

BLOCK = 64  # tokens widened at once, of heads of so many channels
BY_WORDS = 32  # the same where all are packed; keys of more tokens share their scales
SPLITS = (512, 256, 128)  # tokens of one program
TABLES = 16  # groups of keys that a program may meet
WAVES = 4  # programs that every processor of a GPU should have
PROCESSORS = 108  # of a GPU that is not there
LISTED = 64  # fetched tokens whose places are written at once
REGISTERS = 255  # of a thread: all that there are
QUERIES = 16  # fewest rows of a matrix product on tensor units


@jit
def runs(
    query_rows, out, lse, scores, lengths, index, places, chosen, room, scores_row, kv_heads,
    splits, root, k_words, v_words,
    k_codes, k_lower, k_scale, k_zero, k_factor, k_tail, k_fetched, k_packed, k_first,
    k_codes_b, k_codes_h, k_scale_b, k_scale_h, k_factor_b, k_factor_h, k_table, k_groups,
    k_factors, k_slots, k_tail_b, k_tail_h, k_fetched_b, k_fetched_h,
    v_codes, v_lower, v_scale, v_zero, v_factor, v_tail, v_fetched, v_packed, v_first,
    v_codes_b, v_codes_h, v_scale_b, v_scale_h, v_factor_b, v_factor_h, v_table, v_groups,
    v_factors, v_slots, v_tail_b, v_tail_h, v_fetched_b, v_fetched_h,
    K_BITS: tl.constexpr, K_GROUP: tl.constexpr, K_FACTOR_GROUP: tl.constexpr,
    K_BY_TOKEN: tl.constexpr, K_LOWER: tl.constexpr, K_FACTOR: tl.constexpr,
    K_FIRST: tl.constexpr, K_TAIL: tl.constexpr,
    V_BITS: tl.constexpr, V_GROUP: tl.constexpr, V_FACTOR_GROUP: tl.constexpr,
    V_BY_TOKEN: tl.constexpr, V_LOWER: tl.constexpr, V_FACTOR: tl.constexpr,
    V_FIRST: tl.constexpr, V_TAIL: tl.constexpr,
    FETCHED: tl.constexpr, PER_KV: tl.constexpr, NEW: tl.constexpr, CAUSAL: tl.constexpr,
    SCORED: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr, WORDS: tl.constexpr, TABLES: tl.constexpr,
):  # fmt: skip
    """One run of tokens of one KV head: output, and log-sum-exp, per query row."""
    sequence = (tl.program_id(0) // kv_heads).to(tl.int64)
    head = tl.program_id(0) % kv_heads
    start = tl.program_id(1) * SPLIT
    length = tl.load(lengths + sequence)
    query = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    q_at = (tl.program_id(0) * PER_KV * NEW + query)[:, None] * HEAD_DIM + column[None, :]
    q_mask = (query < PER_KV * NEW)[:, None] & (column < HEAD_DIM)[None, :]
    queries = tl.load(query_rows + q_at, mask=q_mask, other=0.0)
    sees = length + query * 0
    if CAUSAL:
        sees = length - (NEW - 1 - query % NEW)

    top = tl.full([ROWS], -1e30, dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    sums = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    if WORDS > 0:
        alone = start + SPLIT <= tl.minimum(
            tl.minimum(tl.load(k_packed + sequence), tl.load(v_packed + sequence)),
            tl.min(sees, axis=0),
        )
        if FETCHED:
            every = start + tl.arange(0, SPLIT)
            held = fetched_place(index, places, chosen, room, every, every < length)
            alone = alone & (tl.max(held, axis=0) == 0)
    else:
        alone: tl.constexpr = False  # type: ignore[no-redef]
    if alone:
        top, total, sums = packed_run(
            query_rows + tl.program_id(0) * PER_KV * NEW * HEAD_DIM,
            k_words + (sequence * k_codes_b + head * k_codes_h) // 4,
            k_scale + sequence * k_scale_b + head * k_scale_h,
            k_zero + sequence * k_scale_b + head * k_scale_h,
            v_words + (sequence * v_codes_b + head * v_codes_h) // 4,
            v_scale + sequence * v_scale_b + head * v_scale_h,
            v_zero + sequence * v_scale_b + head * v_scale_h,
            scores + tl.program_id(0).to(tl.int64) * PER_KV * scores_row, scores_row,
            k_groups, start, root,
            K_BITS, K_GROUP, V_BITS, V_GROUP, PER_KV, NEW, SCORED, HEAD_DIM, ROWS, WORDS, SPLIT,
            TABLES,
        )  # fmt: skip
    else:
        for begin in range(start, tl.minimum(start + SPLIT, length), BLOCK):
            row = begin + tl.arange(0, BLOCK)
            mask = (row < length)[:, None] & (column < HEAD_DIM)[None, :]
            place = row * 0
            if FETCHED:
                place = fetched_place(index, places, chosen, room, row, row < length)
            k = side(
                k_codes, k_lower, k_scale, k_zero, k_factor, k_tail, k_fetched, k_packed, k_first,
                k_codes_b, k_codes_h, k_scale_b, k_scale_h, k_factor_b, k_factor_h, k_table,
                k_groups, k_factors, k_slots, k_tail_b, k_tail_h, k_fetched_b, k_fetched_h,
                sequence, head, row, place, column, mask,
                HEAD_DIM, K_BITS, K_GROUP, K_FACTOR_GROUP, K_BY_TOKEN, K_LOWER, K_FACTOR, K_FIRST,
                K_TAIL, FETCHED,
            )  # fmt: skip
            logits = tl.dot(queries, tl.trans(k.to(queries.dtype)), input_precision="ieee") * root
            seen = row[None, :] < sees[:, None]
            logits = tl.where(seen, logits, -float("inf"))
            if SCORED:
                last = (query % NEW == NEW - 1) & (query < PER_KV * NEW)
                heads = tl.program_id(0) * PER_KV + query // NEW
                at = scores + heads[:, None] * scores_row + row[None, :]
                tl.store(at, logits, mask=last[:, None] & (row < length)[None, :])
            highest = tl.maximum(top, tl.max(logits, axis=1))
            weights = tl.exp(logits - highest[:, None])
            fades = tl.exp(top - highest)
            v = side(
                v_codes, v_lower, v_scale, v_zero, v_factor, v_tail, v_fetched, v_packed, v_first,
                v_codes_b, v_codes_h, v_scale_b, v_scale_h, v_factor_b, v_factor_h, v_table,
                v_groups, v_factors, v_slots, v_tail_b, v_tail_h, v_fetched_b, v_fetched_h,
                sequence, head, row, place, column, mask,
                HEAD_DIM, V_BITS, V_GROUP, V_FACTOR_GROUP, V_BY_TOKEN, V_LOWER, V_FACTOR, V_FIRST,
                V_TAIL, FETCHED,
            )  # fmt: skip
            total = total * fades + tl.sum(weights, axis=1)
            sums = sums * fades[:, None] + tl.dot(
                weights.to(queries.dtype), v.to(queries.dtype), input_precision="ieee"
            )
            top = highest

    if WORDS > 0:
        column = tl.where(alone, channels(HEAD_DIM, V_BITS), column)
    result = sums / tl.where(total > 0, total, 1.0)[:, None]
    at = (tl.program_id(0) * splits + tl.program_id(1)) * ROWS + query
    used = query < PER_KV * NEW  # the others only fill a matrix product up
    tl.store(out + at[:, None] * WIDTH + column[None, :], result, mask=used[:, None])
    whole = tl.where(total > 0, top + tl.log(tl.where(total > 0, total, 1.0)), -1e30)
    tl.store(lse + at, whole, mask=used)


@jit
def join(
    out, lse, whole, whole_lse, splits,
    USED: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge the runs of one query row."""
    head = tl.program_id(0)
    query = tl.program_id(1)
    column = tl.arange(0, WIDTH)
    top = -1e30
    total = 0.0
    sums = tl.zeros([WIDTH], dtype=tl.float32)
    for split in range(splits):
        at = (head * splits + split) * ROWS + query
        part = tl.load(lse + at)
        highest = tl.maximum(top, part)
        share = tl.where(part > -1e29, tl.exp(part - highest), 0.0)
        fades = tl.exp(top - highest)
        sums = sums * fades + share * tl.load(out + at * WIDTH + column)
        total = total * fades + share
        top = highest
    at = head * USED + query
    some = tl.where(total > 0, total, 1.0)
    tl.store(whole + at * HEAD_DIM + column, sums / some, mask=column < HEAD_DIM)
    tl.store(whole_lse + at, tl.where(total > 0, top + tl.log(some), -float("inf")))


def attend(queries: Tensor, view: View, scored: bool = False) -> PartialAttention:
    """As ``attention.attend``, in two launches, and one more where pairs are fetched."""
    batch, heads, new, head_dim = queries.shape
    some = next(t for t in (view.k_tail, view.k.codes if view.k else None) if t is not None)
    kv_heads = some.shape[1]
    per_kv = heads // kv_heads
    tokens = _room(view)
    width = max(next_power_of_2(head_dim), QUERIES)
    used, rows = per_kv * new, max(next_power_of_2(per_kv * new), QUERIES)
    programs = batch * kv_heads
    split = _split(tokens, programs, queries.device)
    splits = max(ceil_div(tokens, split), 1)
    out = _empty(queries, programs, splits, rows, width)
    lse = _empty(queries, programs, splits, rows)
    whole, whole_lse = _empty(queries, *queries.shape), _empty(queries, *queries.shape[:3])
    scores = _empty(queries, batch, heads, tokens if scored else 0).to(score_dtype(queries))
    scores.fill_(-torch.inf)
    fetched = view.index is not None
    index = view.lengths if view.index is None else view.index.contiguous()
    chosen = 0 if view.index is None else index.shape[2]
    places = index
    if fetched and chosen:
        places = torch.empty(programs, tokens, dtype=torch.int32, device=queries.device)
        blocks = (programs, ceil_div(chosen, LISTED))
        launch(spread, blocks, index, places, chosen, tokens, LISTED)
    view = replace(view, lengths=view.lengths.contiguous())
    k, v = _side(view, "k"), _side(view, "v")
    words = by_words(view, head_dim, queries.dtype)
    launch(
        runs, (programs, splits),
        queries.contiguous(), out, lse, scores, view.lengths, index, places, chosen, tokens,
        scores.shape[2], kv_heads, splits, head_dim**-0.5, *(words or (view.lengths,) * 2),
        *k[0], *v[0], *k[1], *v[1],
        fetched and chosen > 0, per_kv, new, view.causal, scored, head_dim, width, rows,
        _block(width, fetched), split, BY_WORDS if words else 0, TABLES,
        num_stages=1,  # loads ahead of their use would take more shared memory than cards have
        maxnreg=REGISTERS,  # else the compiler may spill some to have more programs at once
    )  # fmt: skip
    launch(join, (programs, used), out, lse, whole, whole_lse, splits, used, head_dim, width, rows)
    return PartialAttention(whole, whole_lse, scores if scored else None)


def by_words(view: View, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Codes of keys and of values as words, where both have 2 or 4 bits and groups as KIVI's."""
    k, v = view.k, view.v
    if k is None or v is None or dtype != torch.float16 or head_dim != next_power_of_2(head_dim):
        return None
    fits = k.by == "channel" and k.group % BY_WORDS == 0 and k.group * TABLES >= SPLITS[0]
    fits = fits and v.by == "token" and v.group * v.bits % 32 == 0 and head_dim % v.group == 0
    for store in (k, v):
        plain = store.lower is None and store.factor is None and store.first is None
        whole = all(n % 4 == 0 for n in (*store.codes.stride()[:2], store.codes.storage_offset()))
        fits = fits and plain and whole and store.bits in (2, 4)
        fits = fits and head_dim * store.bits % 32 == 0
    return (k.codes.view(torch.int32), v.codes.view(torch.int32)) if fits else None


def _block(width: int, fetched: bool) -> int:
    """Tokens widened at once: fewer where there are not registers enough for more."""
    numbers = BLOCK * BLOCK // (2 if fetched else 1)
    return max(min(numbers // width, BLOCK), QUERIES)


def _split(tokens: int, programs: int, device: torch.device) -> int:
    """Tokens of one program: many where all processors have work even so."""
    wanted = WAVES * _processors(device)
    return next((n for n in SPLITS if programs * ceil_div(tokens, n) >= wanted), SPLITS[-1])


@cache
def _processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    if device.type != "cuda":
        return PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _empty(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _room(view: View) -> int:
    """Tokens the longest sequence may have, without asking the GPU."""
    return (view.k.rows if view.k else 0) + (0 if view.k_tail is None else view.k_tail.shape[2])


def _side(view: View, which: str) -> tuple[list[Any], list[Any]]:
    """A side's pointers and strides, and its constants, in the kernel's order."""
    store: Store | None = getattr(view, which)
    tail: Tensor | None = getattr(view, f"{which}_tail")
    fetched: Tensor | None = getattr(view, f"{which}_fetched")
    packed: Tensor | None = getattr(view, f"{which}_packed")
    none = view.lengths  # what an unused pointer points to
    tail_strides = [0, 0, 0] if tail is None else [tail.shape[2], *_strides(tail)]
    fetched_strides = [0, 0] if fetched is None else _strides(fetched)
    ring = none if tail is None else tail
    pairs = none if fetched is None else fetched
    if store is None:
        pointers: list[Any] = [none] * 5 + [ring, pairs, none, none]
        unused = [0, 1, 1, False, False, False, False, tail is not None]
        return [*pointers, *[0] * 9, *tail_strides, *fetched_strides], unused
    lower = store.codes if store.lower is None else store.lower
    factor = store.scale if store.factor is None else store.factor
    first = none if store.first is None else store.first
    pointers = [store.codes, lower, store.scale, store.zero, factor, ring, pairs, packed, first]
    strides = [
        *_strides(store.codes), *_strides(store.scale), *_strides(factor),
        store.scale.shape[3], store.scale.shape[2], factor.shape[2],
    ]  # fmt: skip
    constants = [
        store.bits, store.group, store.factor_group or 1, store.by == "token",
        store.lower is not None, store.factor is not None, store.first is not None,
        tail is not None,
    ]  # fmt: skip
    return [*pointers, *strides, *tail_strides, *fetched_strides], constants


def _strides(tensor: Tensor) -> list[int]:
    return [tensor.stride(0), tensor.stride(1)]
