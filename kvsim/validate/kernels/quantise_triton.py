"""Quantise-and-pack in one pass: a program takes one group of tokens, or a block of rows."""

import torch
from torch import Tensor

from kvsim.validate.kernels.language import ceil_div, jit, launch, next_power_of_2, tl
from kvsim.validate.kernels.packing import per_byte
from kvsim.validate.kernels.stores import By, Levels, Store, grouped

QUANTISED_TOKENS = 32  # rows of one program where each token has its own scales
CHANNELS = 64  # channels of one program where each channel has its own


@jit
def quantise_block(
    numbers, codes, lower, scale, zero, tokens, parts,
    HEAD_DIM: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, BY_TOKEN: tl.constexpr,
    CENTRES: tl.constexpr, HIERARCHICAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Codes, scales and zero points of one group of every row, or of every column, of a block."""
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
    """As ``quantise.quantise``, in one launch; levels at ends or centres."""
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
