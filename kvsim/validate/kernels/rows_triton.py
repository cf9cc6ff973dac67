"""Triton kernels that move rows: gathered from host memory, packed, and chosen by attention."""

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.validate.kernels.language import ceil_div, jit, launch, next_power_of_2, tl
from kvsim.validate.kernels.packing import per_byte
from kvsim.validate.kernels.stores import By, Levels, Store, grouped

GATHERED_ROWS = 16  # rows of one program


@jit
def copy_rows(
    k_home, v_home, index, k_out, v_out,
    kv_heads, sequence_stride, head_stride, token_stride, chosen,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copy a block of one head's rows of keys and values."""
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < chosen)[:, None] & (column < HEAD_DIM)[None, :]
    source = tl.load(index + head * chosen + row, mask=row < chosen, other=0).to(tl.int64)
    base = head // kv_heads * sequence_stride + head % kv_heads * head_stride
    source = base + source[:, None] * token_stride + column[None, :]
    target = (head * chosen + row)[:, None] * HEAD_DIM + column[None, :]
    tl.store(k_out + target, tl.load(k_home + source, mask=inside), mask=inside)
    tl.store(v_out + target, tl.load(v_home + source, mask=inside), mask=inside)


def gather(
    k_home: Tensor, v_home: Tensor, index: Tensor, k_out: Tensor, v_out: Tensor
) -> tuple[Tensor, Tensor]:
    """Gather rows of keys and values from host memory by one kernel; see ``gather.gather``.

    Raises
    ------
    InputError
        If host memory is not pinned, or rows are not contiguous.
    """
    if k_out.is_cuda and not (k_home.is_pinned() and v_home.is_pinned()):
        raise InputError("gather: host keys and values are pageable; allocate them pinned")
    laid_out = k_home.stride() == v_home.stride() and k_home.stride(3) == 1
    if not (laid_out and k_out.is_contiguous() and v_out.is_contiguous()):
        raise InputError("gather: rows of keys and values have gaps; expected contiguous rows")
    batch, heads, _, head_dim = k_home.shape
    chosen = index.shape[2]
    launch(
        copy_rows, (batch * heads, ceil_div(chosen, GATHERED_ROWS)),
        k_home, v_home, index.contiguous(), k_out, v_out, heads, *k_home.stride()[:3], chosen,
        head_dim, next_power_of_2(head_dim), GATHERED_ROWS,
    )  # fmt: skip
    return k_out, v_out


QUANTISED_TOKENS = 32  # rows of one program where each token has its own scales
CHANNELS = 64  # channels of one program where each channel has its own


@jit
def quantise_block(
    numbers, codes, lower, scale, zero, tokens, parts,
    HEAD_DIM: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, BY_TOKEN: tl.constexpr,
    CENTRES: tl.constexpr, HIERARCHICAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write codes, scales and zero points of one group of rows or columns of a block."""
    per_byte: tl.constexpr = 8 // BITS
    top: tl.constexpr = (1 << BITS) - 1
    head = tl.program_id(0).to(tl.int64)
    if BY_TOKEN:
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        column = tl.program_id(2) * GROUP + tl.arange(0, COLUMNS)
        in_row, in_column = row < tokens, tl.arange(0, COLUMNS) < GROUP
    else:
        row = tl.program_id(1) * GROUP + tl.arange(0, ROWS)
        column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        in_row, in_column = tl.arange(0, ROWS) < GROUP, column < HEAD_DIM
    inside = in_row[:, None] & in_column[None, :]
    at = (head * tokens + row)[:, None] * HEAD_DIM + column[None, :]
    x = tl.load(numbers + at, mask=inside, other=0.0).to(tl.float32)
    along: tl.constexpr = 1 if BY_TOKEN else 0
    low = tl.min(tl.where(inside, x, float("inf")), axis=along)
    high = tl.max(tl.where(inside, x, -float("inf")), axis=along)
    if BY_TOKEN:
        table = (head * tokens + row) * parts + tl.program_id(2)
        some = in_row
    else:
        table = (head * parts + tl.program_id(1)) * HEAD_DIM + column
        some = in_column
    low, high = tl.where(some, low, 0.0), tl.where(some, high, 0.0)
    if CENTRES:
        step = (high - low) / (1 << BITS)
        low = low + step / 2
    else:
        step = (high - low) / top
    step, low = step.to(tl.float16), low.to(tl.float16)
    tl.store(scale + table, step, mask=some)
    tl.store(zero + table, low, mask=some)
    step, low = (
        tl.expand_dims(step.to(tl.float32), along),
        tl.expand_dims(low.to(tl.float32), along),
    )
    upper = tl.floor((x - low) / tl.where(step > 0, step, 1.0) + 0.5)
    upper = tl.minimum(tl.maximum(upper, 0.0), top * 1.0)
    # neighbours in a row share a byte, and each writes its bits where the others have none
    byte = tl.reshape(upper.to(tl.int32), (ROWS, COLUMNS // per_byte, per_byte))
    byte = tl.sum(byte << (tl.arange(0, per_byte) * BITS)[None, None, :], axis=2)
    first = tl.program_id(2) * (GROUP if BY_TOKEN else COLUMNS) // per_byte
    place = tl.arange(0, COLUMNS // per_byte)
    limit = GROUP // per_byte if BY_TOKEN else HEAD_DIM // per_byte - first
    at = (head * tokens + row)[:, None] * (HEAD_DIM // per_byte) + (first + place)[None, :]
    tl.store(codes + at, byte.to(tl.uint8), mask=in_row[:, None] & (place < limit)[None, :])
    if HIERARCHICAL:
        missed = (x - (upper * step + low)) / tl.where(step > 0, step / 16, 1.0)
        below = tl.minimum(tl.maximum(tl.floor(missed + 0.5), -8.0), 7.0) + 8.0
        pair = tl.reshape(below.to(tl.int32), (ROWS, COLUMNS // 2, 2))
        pair = tl.sum(pair << (tl.arange(0, 2) * 4)[None, None, :], axis=2)
        first = tl.program_id(2) * (GROUP if BY_TOKEN else COLUMNS) // 2
        place = tl.arange(0, COLUMNS // 2)
        limit = GROUP // 2 if BY_TOKEN else HEAD_DIM // 2 - first
        at = (head * tokens + row)[:, None] * (HEAD_DIM // 2) + (first + place)[None, :]
        tl.store(lower + at, pair.to(tl.uint8), mask=in_row[:, None] & (place < limit)[None, :])


def quantise(
    numbers: Tensor,
    bits: int,
    group: int,
    by: By,
    where: Levels = "ends",
    hierarchical: bool = False,
) -> Store:
    """Quantise by one kernel, with levels at ends or centres; see ``quantise.quantise``."""
    numbers = numbers.contiguous()
    grouped(numbers, group, by)  # refuses groups that do not divide
    batch, heads, tokens, head_dim = numbers.shape
    per_byte(bits, group if by == "token" else head_dim)
    parts = (tokens if by == "channel" else head_dim) // group
    shape = (parts, head_dim) if by == "channel" else (tokens, parts)
    codes = numbers.new_empty((batch, heads, tokens, head_dim * bits // 8), dtype=torch.uint8)
    halves = (batch, heads, tokens, head_dim // 2 if hierarchical else 0)
    lower = numbers.new_empty(halves, dtype=torch.uint8)
    scale = torch.empty(batch, heads, *shape, device=numbers.device, dtype=torch.float16)
    zero = torch.empty_like(scale)
    if by == "token":
        rows, columns = QUANTISED_TOKENS, next_power_of_2(max(group, 8))
        blocks = (ceil_div(tokens, rows), parts)
    else:
        rows, columns = next_power_of_2(group), CHANNELS
        blocks = (parts, ceil_div(head_dim, columns))
    launch(
        quantise_block, (batch * heads, *blocks),
        numbers, codes, lower, scale, zero, tokens, parts,
        head_dim, bits, group, by == "token", where == "centres", hierarchical, rows, columns,
    )  # fmt: skip
    return Store(codes, scale, zero, bits, group, by, lower=lower if hierarchical else None)


SCANNED_TOKENS = 1024  # tokens looked at at once


@jit
def select(
    logits, mean, index, eligible, tokens, wanted, kv_heads,
    PER_KV: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Select the top k tokens of one KV head: those above the k-th largest share, in order.

    The k-th share is found by bisection of bit patterns, which are ordered like the non-negative
    shares.
    """
    group = tl.program_id(0).to(tl.int64)
    barred = tl.load(eligible + tl.program_id(0) // kv_heads)
    k = tl.minimum(wanted, barred)
    head = tl.arange(0, HEADS)
    lane = tl.arange(0, BLOCK)
    real = head < PER_KV
    base = logits + (group * PER_KV + head)[:, None] * tokens
    top = tl.full([HEADS], -1e30, dtype=tl.float32)
    total = tl.zeros([HEADS], dtype=tl.float32)
    for begin in range(0, tokens, BLOCK):
        inside = real[:, None] & (begin + lane < tokens)[None, :]
        x = tl.load(base + (begin + lane)[None, :], mask=inside, other=-float("inf")).to(tl.float32)
        highest = tl.maximum(top, tl.max(x, axis=1))
        fades = tl.exp(top - highest)
        total = total * fades + tl.sum(tl.exp(x - highest[:, None]), axis=1)
        top = highest
    inverse = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0) / PER_KV
    for begin in range(0, tokens, BLOCK):
        inside = real[:, None] & (begin + lane < tokens)[None, :]
        x = tl.load(base + (begin + lane)[None, :], mask=inside, other=-float("inf")).to(tl.float32)
        share = tl.sum(tl.exp(x - top[:, None]) * inverse[:, None], axis=0)
        share = tl.where(begin + lane < barred, share, -1.0)
        tl.store(mean + group * tokens + begin + lane, share, mask=begin + lane < tokens)
    tl.debug_barrier()  # the shares are read again by other threads

    low = group * 0  # at least k shares have this pattern or a larger one
    high = low + 0x3F800001  # fewer than k have this one: just above 1.0
    high += 1 << 16  # sums of shares may round above 1
    while high - low > 1:
        middle = (low + high) // 2
        count = group * 0
        for begin in range(0, tokens, BLOCK):
            at = begin + lane
            share = tl.load(mean + group * tokens + at, mask=at < tokens, other=-1.0)
            count += tl.sum((share.to(tl.int32, bitcast=True) >= middle).to(tl.int32), axis=0)
        if count >= k:
            low = middle
        else:
            high = middle
    above = group * 0
    for begin in range(0, tokens, BLOCK):
        at = begin + lane
        share = tl.load(mean + group * tokens + at, mask=at < tokens, other=-1.0)
        above += tl.sum((share.to(tl.int32, bitcast=True) > low).to(tl.int32), axis=0)
    ties = k - above  # of the shares equal to the k-th, the first ones
    taken = group * 0
    for begin in range(0, tokens, BLOCK):
        at = begin + lane
        share = tl.load(mean + group * tokens + at, mask=at < tokens, other=-1.0)
        pattern = share.to(tl.int32, bitcast=True)
        equal = (pattern == low).to(tl.int32)
        rank = tl.cumsum(equal, axis=0)
        take = ((pattern > low) | ((equal > 0) & (rank <= ties))).to(tl.int32)
        ties -= tl.sum(equal, axis=0)
        place = taken + tl.cumsum(take, axis=0) - 1
        tl.store(index + group * wanted + place, at, mask=take > 0)
        taken += tl.sum(take, axis=0)


def softmax_top_k(logits: Tensor, kv_heads: int, count: int, eligible: Tensor) -> Tensor:
    """Choose tokens by one kernel, (batch, KV heads, count); see ``topk.softmax_top_k``."""
    batch, heads, tokens = logits.shape
    count = min(count, tokens)
    index = torch.full((batch, kv_heads, count), -1, dtype=torch.int32, device=logits.device)
    mean = torch.empty(batch, kv_heads, tokens, dtype=torch.float32, device=logits.device)
    per_kv = heads // kv_heads
    if count:
        launch(
            select, (batch * kv_heads,),
            logits.contiguous(), mean, index, eligible.int(), tokens, count, kv_heads,
            per_kv, next_power_of_2(per_kv), min(SCANNED_TOKENS, next_power_of_2(tokens)),
        )  # fmt: skip
    return index
