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


@jit
def side(
    codes, lower, scale, zero, factor, tail, fetched, packed, first,
    codes_b, codes_h, scale_b, scale_h, factor_b, factor_h, table, groups, factors,
    slots, tail_b, tail_h, fetched_b, fetched_h,
    sequence, head, row, place, column, mask,
    HEAD_DIM: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, FACTOR_GROUP: tl.constexpr,
    BY_TOKEN: tl.constexpr, LOWER: tl.constexpr, FACTOR: tl.constexpr, FIRST: tl.constexpr,
    TAIL: tl.constexpr, FETCHED: tl.constexpr,
):  # fmt: skip
    """Keys or values of a block of tokens, each from where it is, as fp32 (tokens, head dim)."""
    wide = tl.zeros([row.shape[0], column.shape[0]], dtype=tl.float32)
    instead = place > 0
    if BITS > 0:
        count = tl.load(packed + sequence)
        here = mask & (row < count)[:, None] & (instead == 0)[:, None]
        group_row = row // GROUP
        factor_row = row
        if FACTOR:
            factor_row = row // FACTOR_GROUP
        if FIRST:
            beyond = row - tl.load(first + sequence)
            group_row = tl.where(beyond < 0, 0, beyond // GROUP + 1)
            if FACTOR:
                factor_row = tl.where(beyond < 0, 0, beyond // FACTOR_GROUP + 1)
        wide += widen(
            codes + sequence * codes_b + head * codes_h,
            lower + sequence * codes_b + head * codes_h,
            scale + sequence * scale_b + head * scale_h,
            zero + sequence * scale_b + head * scale_h,
            factor + sequence * factor_b + head * factor_h,
            table, row, tl.minimum(group_row, groups - 1), tl.minimum(factor_row, factors - 1),
            column, here, HEAD_DIM, BITS, GROUP, BY_TOKEN, LOWER, FACTOR,
        )  # fmt: skip
    if TAIL:
        here = mask & (instead == 0)[:, None]
        unpacked = True
        if BITS > 0:
            here &= (row >= tl.load(packed + sequence))[:, None]
            unpacked = tl.max(row, axis=0) >= tl.load(packed + sequence)
        if unpacked:
            at = tail + sequence * tail_b + head * tail_h
            at = at + (row % slots)[:, None] * HEAD_DIM + column[None, :]
            wide += tl.load(at, mask=here, other=0.0).to(tl.float32)
    if FETCHED:  # noqa: SIM102 - one is known when it is compiled
        if tl.max(place, axis=0) > 0:  # few blocks have any
            at = fetched + sequence * fetched_b + head * fetched_h
            at = at + (place - 1)[:, None] * HEAD_DIM + column[None, :]
            wide += tl.load(at, mask=mask & instead[:, None], other=0.0).to(tl.float32)
    return wide
