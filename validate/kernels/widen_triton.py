"""Stored codes widened in registers, as attention reads them."""

from kvsim.validate.kernels.language import jit, tl


@jit
def widen(
    codes, lower, scale, zero, factor, table, row, group_row, factor_row, column, mask,
    HEAD_DIM: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, BY_TOKEN: tl.constexpr,
    LOWER: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Rows of one head's store as fp32 numbers (tokens, head dim)."""
    per_byte: tl.constexpr = 8 // BITS
    at = row[:, None] * (HEAD_DIM // per_byte) + column[None, :] // per_byte
    byte = tl.load(codes + at, mask=mask, other=0).to(tl.int32)
    steps = ((byte >> (column[None, :] % per_byte * BITS)) & ((1 << BITS) - 1)).to(tl.float32)
    if LOWER:
        at = row[:, None] * (HEAD_DIM // 2) + column[None, :] // 2
        byte = tl.load(lower + at, mask=mask, other=0).to(tl.int32)
        steps += (((byte >> (column[None, :] % 2 * 4)) & 15).to(tl.float32) - 8.0) / 16.0
    width: tl.constexpr = column.shape[0]
    if BY_TOKEN and width % GROUP == 0 and BITS <= 2:
        # one scale and zero point per group of channels, loaded once and not once per number;
        # with more bits it would take more registers than there are
        parts: tl.constexpr = width // GROUP
        part = tl.arange(0, parts)
        rows = tl.max(mask.to(tl.int32), axis=1) > 0
        inside = rows[:, None] & (part * GROUP < HEAD_DIM)[None, :]
        at = row[:, None] * table + part[None, :]
        step = tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)
        base = tl.load(zero + at, mask=inside, other=0.0).to(tl.float32)
        grouped = tl.reshape(steps, (row.shape[0], parts, GROUP))
        wide = tl.reshape(grouped * step[:, :, None] + base[:, :, None], (row.shape[0], width))
    else:
        if BY_TOKEN:
            at = row[:, None] * table + column[None, :] // GROUP
        else:
            at = group_row[:, None] * HEAD_DIM + column[None, :]
        step = tl.load(scale + at, mask=mask, other=0.0).to(tl.float32)
        base = tl.load(zero + at, mask=mask, other=0.0).to(tl.float32)
        wide = steps * step + base
    if FACTOR:
        at = factor_row[:, None] * HEAD_DIM + column[None, :]
        wide *= tl.load(factor + at, mask=mask, other=0.0).to(tl.float32)
    return wide
