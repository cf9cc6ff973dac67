"""Attention over a view in one pass: codes are widened in registers, splits merged at the end.

Flash-decoding: each program takes one KV head of one sequence with all its query heads, and a run
of tokens; a second kernel merges the runs by their log-sum-exp. Runs of rows that are all packed
are widened two codes at a time, by words of 32 bits: one code of a word's lower half and one of
its upper half are one operation, and scales of channels meet the queries instead of the keys.
"""

from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from kvsim.validate.kernels.language import ceil_div, jit, jit_for_any, launch, next_power_of_2, tl
from kvsim.validate.kernels.stores import PartialAttention, Store, View, score_dtype


@jit
def fetched_place(index, places, chosen, room, row, mask):
    """Return each row's position in the list of fetched tokens, from 1; 0 for other rows.

    References
    ----------
    .. [1] P. Briggs, L. Torczon, "An efficient representation for sparse sets", 1993: the table
       needs no zeros, as an entry only counts where the list names the row.
    """
    head = tl.program_id(0).to(tl.int64)
    entry = tl.load(places + head * room + row, mask=mask, other=-1)
    known = mask & (entry >= 0) & (entry < chosen)
    named = tl.load(index + head * chosen + entry, mask=known, other=-1)
    return tl.where(known & (named == row), entry + 1, 0)


@jit
def spread(index, places, chosen, room, LISTED: tl.constexpr):
    """Write the position of each fetched token in the list of fetched tokens to a table by token.

    Parameters
    ----------
    index
        Pointer to the fetched tokens, (sequences * KV heads, chosen).
    places
        Pointer to the table to write, (sequences * KV heads, room), int32. Entries of tokens that
        are not fetched are not written.
    chosen
        Fetched tokens per KV head.
    room
        Tokens per KV head in the table.
    LISTED
        Fetched tokens per program.
    """
    head = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * LISTED + tl.arange(0, LISTED)
    token = tl.load(index + head * chosen + entry, mask=entry < chosen, other=-1)
    tl.store(places + head * room + token, entry, mask=(token >= 0) & (token < room))


@jit
def pairs(part):
    """Reinterpret words (..., n) as pairs of fp16 values (..., n, 2)."""
    lower = part.to(tl.int16).to(tl.float16, bitcast=True)
    upper = (part >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return lower, upper


@jit
def in_place(words, BITS: tl.constexpr):
    """Return the codes in words (rows, n) as fp16 (rows, n, codes / 2, 2), times 2**(place - 24).

    An fp16 number with only mantissa bits set is exactly its bits times 2**-24.
    """
    kept: tl.constexpr = 10 // BITS
    i = tl.arange(0, 16 // BITS)
    mask = (((1 << BITS) - 1) << (i % kept * BITS)) * 0x10001
    lower, upper = pairs(
        (words[:, :, None] >> (i // kept * (kept * BITS))[None, None, :]) & mask[None, None, :]
    )
    return tl.join(lower, upper)


@jit
def scaled(words, scale, zero, BITS: tl.constexpr):
    """Dequantise the codes in words (rows, n), each with its scale, to (rows, n, codes / 2, 2)."""
    at = tl.arange(0, 16 // BITS) * BITS
    up, down = tl.maximum(10 - BITS - at, 0), tl.maximum(at - (10 - BITS), 0)
    mask: tl.constexpr = (((1 << BITS) - 1) << (10 - BITS)) * 0x10001
    # the code is the upper part of the mantissa of a number from 1 to 2
    lower, upper = pairs(
        (((words[:, :, None] << up[None, None, :]) >> down[None, None, :]) & mask) | 0x3C003C00
    )
    step = scale * (1 << BITS)
    base = zero - step
    step, base = step[:, :, None], base[:, :, None]
    return tl.join(lower * step + base, upper * step + base)


@jit
def packed_run(
    query_rows, k_words, k_scale, k_zero, v_words, v_scale, v_zero, scores, scores_row,
    k_groups, start, root,
    K_BITS: tl.constexpr, K_GROUP: tl.constexpr, V_BITS: tl.constexpr, V_GROUP: tl.constexpr,
    PER_KV: tl.constexpr, NEW: tl.constexpr, SCORED: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, TABLES: tl.constexpr,
):  # fmt: skip
    """Return maxima, totals and weighted sums (rows, head dim) of a run of packed tokens.

    Pointers are those of one head; channels are in the order of the words. All queries see the
    whole run.
    """
    held: tl.constexpr = 32 // K_BITS
    kept: tl.constexpr = 10 // K_BITS
    middle: tl.constexpr = (kept - 1) * K_BITS // 2
    query = tl.arange(0, ROWS)
    real = query < PER_KV * NEW
    channel = channels(HEAD_DIM, K_BITS)
    q_at = query[:, None] * HEAD_DIM + channel[None, :]
    queries = tl.load(query_rows + q_at, mask=real[:, None], other=0.0)
    place = tl.arange(0, HEAD_DIM) % held // 2 % kept * K_BITS
    unit = tl.exp2((middle - place).to(tl.float32)).to(tl.float16)
    # what zero points add to the logits of every group of the run
    table = tl.arange(0, TABLES)
    first = start // K_GROUP
    tables = (first + table)[:, None] * HEAD_DIM + channel[None, :]
    zeros = tl.load(k_zero + tables, mask=(first + table < k_groups)[:, None], other=0.0)
    biases = tl.dot(queries, tl.trans(zeros))
    k_word, v_word = tl.arange(0, HEAD_DIM * K_BITS // 32), tl.arange(0, HEAD_DIM * V_BITS // 32)

    top = tl.full([ROWS], -1e30, dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    sums = tl.zeros([ROWS, HEAD_DIM], dtype=tl.float32)
    for begin in range(start, start + SPLIT, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        group = begin // K_GROUP
        step = tl.load(k_scale + group * HEAD_DIM + channel) * unit
        k_codes = tl.load(k_words + row[:, None] * (HEAD_DIM * K_BITS // 32) + k_word[None, :])
        k = tl.reshape(in_place(k_codes, K_BITS), (BLOCK, HEAD_DIM))
        bias = tl.sum(tl.where((table == group - first)[None, :], biases, 0.0), axis=1)
        logits = tl.dot(queries * step[None, :], tl.trans(k)) * (2.0 ** (24 - middle))
        logits = (logits + bias[:, None]) * root
        if SCORED:
            last = (query % NEW == NEW - 1) & real
            scored = scores + (query // NEW)[:, None] * scores_row + row[None, :]
            tl.store(scored, logits, mask=last[:, None])
        highest = tl.maximum(top, tl.max(logits, axis=1))
        weights = tl.exp(logits - highest[:, None])
        fades = tl.exp(top - highest)
        v_codes = tl.load(v_words + row[:, None] * (HEAD_DIM * V_BITS // 32) + v_word[None, :])
        at = row[:, None] * (HEAD_DIM // V_GROUP) + (v_word * (32 // V_BITS) // V_GROUP)[None, :]
        wide = scaled(v_codes, tl.load(v_scale + at), tl.load(v_zero + at), V_BITS)
        v = tl.reshape(wide, (BLOCK, HEAD_DIM))
        total = total * fades + tl.sum(weights, axis=1)
        sums = sums * fades[:, None] + tl.dot(weights.to(tl.float16), v)
        top = highest
    return top, total, sums


@jit
def channels(HEAD_DIM: tl.constexpr, BITS: tl.constexpr):
    """Return the channel of each element of a dequantised row: word by word, alternating halves."""
    held: tl.constexpr = 32 // BITS
    number = tl.arange(0, HEAD_DIM)
    within = number % held
    return number - within + within // 2 + within % 2 * (held // 2)


@jit
def widen(
    codes, lower, scale, zero, factor, table, row, group_row, factor_row, column, mask,
    HEAD_DIM: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, BY_TOKEN: tl.constexpr,
    LOWER: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Dequantise rows of the packed keys or values of one KV head to fp32.

    Parameters
    ----------
    codes
        Pointer to the packed codes, uint8, (rows, HEAD_DIM * BITS / 8).
    lower
        Pointer to 4-bit residual codes, uint8, (rows, HEAD_DIM / 2); read if LOWER.
    scale, zero
        Pointers to scales and zero points, (rows, table) if BY_TOKEN, else (groups, HEAD_DIM).
    factor
        Pointer to further factors per channel, (groups, HEAD_DIM); read if FACTOR.
    table
        Groups of channels per token, if BY_TOKEN.
    row
        Rows to read, (tokens,).
    group_row, factor_row
        Group of each row in ``scale`` and ``zero`` unless BY_TOKEN, and in ``factor``, (tokens,).
    column
        Channels to read, (channels,).
    mask
        Elements to read, (tokens, channels); the others are 0 in the result.
    HEAD_DIM
        Dimension of a head.
    BITS
        Bits per code.
    GROUP
        Elements that share a scale.
    BY_TOKEN
        Whether scales are per token and group of channels, and not per channel and group of tokens.
    LOWER, FACTOR
        Whether there are residual codes, and further factors.

    Returns
    -------
    tensor
        Dequantised elements, (tokens, channels), fp32.
    """
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
    """Load keys or values of a block of tokens as fp32, (tokens, channels).

    Each token comes from one of three buffers: packed rows (``codes`` with their scales), a ring
    buffer of recent unpacked tokens (``tail``), or tokens fetched from the host (``fetched``).

    Parameters
    ----------
    codes, lower, scale, zero, factor
        Pointers to the packed rows, as for ``widen``, of all sequences and KV heads.
    tail, fetched
        Pointers to unpacked recent tokens, (slots, HEAD_DIM) of each KV head, and to fetched
        tokens.
    packed, first
        Pointers to the packed tokens of each sequence, and to those of its first group.
    codes_b, codes_h, ..., fetched_b, fetched_h
        Strides in elements: ``_b`` from a sequence to the next, ``_h`` from a KV head to the next.
    table
        Groups of channels per token, if BY_TOKEN.
    groups, factors
        Rows of ``scale`` and ``zero``, and of ``factor``, of a KV head.
    slots
        Length of the ring buffer. [tokens]
    sequence, head
        Indices of the sequence and the KV head.
    row
        Index of each token in its sequence, (tokens,).
    place
        For a fetched token, its index among the fetched ones plus 1; 0 for all others, (tokens,).
    column
        Channels to load, (channels,).
    mask
        Elements to load, (tokens, channels); the others are 0 in the result.
    HEAD_DIM, BITS
        Dimension of a head, and bits per code; BITS is 0 if nothing is packed.
    GROUP, FACTOR_GROUP
        Elements that share a scale, and tokens that share a factor.
    BY_TOKEN
        Whether scales are per token and group of channels, and not per channel and group of tokens.
    LOWER, FACTOR, FIRST, TAIL, FETCHED
        Whether the pointer of that name is read.

    Returns
    -------
    tensor
        Keys or values, (tokens, channels), fp32.
    """
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


WIDENED_TOKENS = 64  # tokens widened at once, of heads of so many channels
BY_WORDS = 32  # the same where all are packed; keys of more tokens share their scales
SPLITS = (512, 256, 128)  # tokens of one program
TABLES = 16  # groups of keys that a program may meet
WAVES = 4  # programs that every processor of a GPU should have
PROCESSORS = 108  # of a GPU that is not there
FETCHED_TOKENS = 64  # fetched tokens whose places are written at once
REGISTERS = 255  # of a thread: all that there are
QUERIES = 16  # fewest rows of a matrix product on tensor units
PLAIN_BYTES = 2**14  # of keys, and of values, that a program reads at once where none is packed [B]
JOINED = 16  # runs that are merged at once


COUNTS = ("chosen", "room", "scores_row", "kv_heads", "splits")
TABLE_SIZES = tuple(f"{side}_{n}" for side in "kv" for n in ("table", "groups", "factors", "slots"))
"""What differs from one cache to the next, and is no stride that a wide load rests on."""


@jit_for_any(*COUNTS, *TABLE_SIZES)
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
    """Compute attention of one KV head's queries over one run of SPLIT consecutive tokens.

    The first axis of the grid is sequences * KV heads, the second runs of tokens. Every program
    writes the normalised output of its run to ``out`` and the log-sum-exp of its logits to ``lse``,
    by query row; :func:`join` merges the runs. If SCORED, it also writes the logits of the last
    query to ``scores``.
    """
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


@jit_for_any("kv_heads", "splits", "tokens")
def masked_runs(
    query_rows, keys, values, seen, out, lse, kv_heads, splits, tokens, root,
    k_b, k_h, v_b, v_h, seen_b, seen_h, seen_q,
    PER_KV: tl.constexpr, NEW: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Compute masked attention of one KV head's queries over one run of consecutive tokens."""
    sequence = (tl.program_id(0) // kv_heads).to(tl.int64)
    head = tl.program_id(0) % kv_heads
    start = tl.program_id(1) * SPLIT
    query = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    used = query < PER_KV * NEW
    q_at = (tl.program_id(0) * PER_KV * NEW + query)[:, None] * HEAD_DIM + column[None, :]
    q_mask = used[:, None] & (column < HEAD_DIM)[None, :]
    queries = tl.load(query_rows + q_at, mask=q_mask, other=0.0)
    keys += sequence * k_b + head * k_h
    values += sequence * v_b + head * v_h
    seen += sequence * seen_b + head * seen_h
    top = tl.full([ROWS], -1e30, dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    sums = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    for begin in range(start, tl.minimum(start + SPLIT, tokens), BLOCK):
        row = begin + tl.arange(0, BLOCK)
        inside = used[:, None] & (row < tokens)[None, :]
        sees = tl.load(seen + (query % NEW)[:, None] * seen_q + row[None, :], mask=inside, other=0)
        at = row[:, None] * HEAD_DIM + column[None, :]
        mask = (row < tokens)[:, None] & (column < HEAD_DIM)[None, :]
        k = tl.load(keys + at, mask=mask, other=0.0).to(queries.dtype)
        logits = tl.dot(queries, tl.trans(k), input_precision="ieee") * root
        logits = tl.where(sees != 0, logits, -float("inf"))
        highest = tl.maximum(top, tl.max(logits, axis=1))
        weights = tl.exp(logits - highest[:, None])
        fades = tl.exp(top - highest)
        # a row that no query sees may hold anything, and 0 times NaN is not 0
        mask &= (tl.max(sees.to(tl.int32), axis=0) != 0)[:, None]
        v = tl.load(values + at, mask=mask, other=0.0).to(queries.dtype)
        total = total * fades + tl.sum(weights, axis=1)
        sums = sums * fades[:, None] + tl.dot(weights.to(queries.dtype), v, input_precision="ieee")
        top = highest
    result = sums / tl.where(total > 0, total, 1.0)[:, None]
    at = (tl.program_id(0) * splits + tl.program_id(1)) * ROWS + query
    tl.store(out + at[:, None] * WIDTH + column[None, :], result, mask=used[:, None])
    whole = tl.where(total > 0, top + tl.log(tl.where(total > 0, total, 1.0)), -1e30)
    tl.store(lse + at, whole, mask=used)


@jit_for_any("splits")
def join(
    out, lse, whole, whole_lse, splits,
    USED: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    JOINED: tl.constexpr,
):  # fmt: skip
    """Merge the partial attention outputs of all runs of one query row by their log-sum-exp.

    Reads ``out`` and ``lse``, JOINED runs at a time, and writes ``whole`` and ``whole_lse``.
    """
    head = tl.program_id(0)
    query = tl.program_id(1)
    column = tl.arange(0, WIDTH)
    top = -1e30
    total = 0.0
    sums = tl.zeros([WIDTH], dtype=tl.float32)
    for begin in range(0, splits, JOINED):
        split = begin + tl.arange(0, JOINED)
        there = split < splits
        at = (head * splits + split) * ROWS + query
        part = tl.load(lse + at, mask=there, other=-1e30)
        highest = tl.maximum(top, tl.max(part, axis=0))
        share = tl.where(part > -1e29, tl.exp(part - highest), 0.0)
        fades = tl.exp(top - highest)
        numbers = tl.load(
            out + at[:, None] * WIDTH + column[None, :], mask=there[:, None], other=0.0
        )
        sums = sums * fades + tl.sum(share[:, None] * numbers, axis=0)
        total = total * fades + tl.sum(share, axis=0)
        top = highest
    at = head * USED + query
    some = tl.where(total > 0, total, 1.0)
    tl.store(whole + at * HEAD_DIM + column, sums / some, mask=column < HEAD_DIM)
    tl.store(whole_lse + at, tl.where(total > 0, top + tl.log(some), -float("inf")))


def attend_masked(queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> PartialAttention:
    """Compute masked attention of a few queries per sequence over unpacked keys and values.

    Logits are scaled by 1 / sqrt(head dim). Runs two kernels: one computes attention over runs of
    tokens in parallel, the other merges the runs.

    Parameters
    ----------
    queries
        Queries, (sequences, heads, new, head dim).
    keys, values
        Keys and values in the format of the queries or in fp8,
        (sequences, KV heads, tokens, head dim).
    seen
        Mask that is true where a query sees a token, bool,
        (sequences or 1, KV heads or 1, new, tokens).

    Returns
    -------
    PartialAttention
        Output, (sequences, heads, new, head dim), and log-sum-exp of the logits,
        (sequences, heads, new), both in fp32.
    """
    batch, heads, new, head_dim = queries.shape
    kv_heads, tokens = keys.shape[1:3]
    keys, values = (t if t.stride(2) == head_dim else t.contiguous() for t in (keys, values))
    split, out, lse = _runs_room(queries, kv_heads, tokens)
    programs, splits, rows, width = out.shape
    mask = seen.contiguous().view(torch.uint8).expand(batch, kv_heads, new, tokens)
    block = max(PLAIN_BYTES // (width * queries.element_size()), QUERIES)
    launch(
        masked_runs, (programs, splits),
        queries.contiguous(), keys, values, mask, out, lse, kv_heads, splits, tokens,
        head_dim**-0.5, *_strides(keys), *_strides(values), *mask.stride()[:3],
        heads // kv_heads, new, head_dim, width, rows, min(block, split), split, num_stages=2,
    )  # fmt: skip
    return _joined(queries, out, lse)


def _runs_room(queries: Tensor, kv_heads: int, tokens: int) -> tuple[int, Tensor, Tensor]:
    """Return the tokens per run, and buffers for the partial results of runs.

    Returns
    -------
    split, out, lse
        Tokens of a run; outputs, (sequences * KV heads, runs, rows, width); their log-sum-exp.
    """
    batch, heads, new, head_dim = queries.shape
    width = max(next_power_of_2(head_dim), QUERIES)
    rows = max(next_power_of_2(heads // kv_heads * new), QUERIES)
    programs = batch * kv_heads
    split = _split(tokens, programs, queries.device)
    splits = max(ceil_div(tokens, split), 1)
    out = _empty(queries, programs, splits, rows, width)
    return split, out, _empty(queries, programs, splits, rows)


def _joined(queries: Tensor, out: Tensor, lse: Tensor) -> PartialAttention:
    """Merge the partial results of the runs of every query row."""
    programs, splits, rows, width = out.shape
    head_dim = queries.shape[3]
    used = prod(queries.shape[:3]) // programs
    whole, whole_lse = _empty(queries, *queries.shape), _empty(queries, *queries.shape[:3])
    launch(
        join, (programs, used),
        out, lse, whole, whole_lse, splits, used, head_dim, width, rows, JOINED,
    )  # fmt: skip
    return PartialAttention(whole, whole_lse)


def attend(queries: Tensor, view: View, scored: bool = False) -> PartialAttention:
    """Compute attention of a few queries per sequence over a packed cache.

    Runs two kernels: one computes attention over runs of tokens in parallel, the other merges the
    runs. A third prepares a table if some tokens are fetched from the host.

    Parameters
    ----------
    queries
        Queries, (sequences, heads, new, head dim).
    view
        The cache: packed tokens, unpacked recent tokens, and tokens fetched from the host.
    scored
        Whether to return the logits of the last query of each sequence too.

    Returns
    -------
    PartialAttention
        Output, (sequences, heads, new, head dim), and log-sum-exp of the logits,
        (sequences, heads, new), both in fp32; with ``scored`` the logits,
        (sequences, heads, tokens), -inf where the query does not see a token.
    """
    batch, heads, new, head_dim = queries.shape
    some = next(t for t in (view.k_tail, view.k.codes if view.k else None) if t is not None)
    kv_heads = some.shape[1]
    tokens = _room(view)
    split, out, lse = _runs_room(queries, kv_heads, tokens)
    programs, splits, rows, width = out.shape
    scores = _empty(queries, batch, heads, tokens if scored else 0).to(score_dtype(queries))
    scores.fill_(-torch.inf)
    fetched = view.index is not None
    index = view.lengths if view.index is None else view.index.contiguous()
    chosen = 0 if view.index is None else index.shape[2]
    places = index
    if fetched and chosen:
        places = torch.empty(programs, tokens, dtype=torch.int32, device=queries.device)
        blocks = (programs, ceil_div(chosen, FETCHED_TOKENS))
        launch(spread, blocks, index, places, chosen, tokens, FETCHED_TOKENS)
    view = replace(view, lengths=view.lengths.contiguous())
    k, v = _side(view, "k"), _side(view, "v")
    words = by_words(view, head_dim, queries.dtype)
    launch(
        runs, (programs, splits),
        queries.contiguous(), out, lse, scores, view.lengths, index, places, chosen, tokens,
        scores.shape[2], kv_heads, splits, head_dim**-0.5, *(words or (view.lengths,) * 2),
        *k[0], *v[0], *k[1], *v[1],
        fetched and chosen > 0, heads // kv_heads, new, view.causal, scored, head_dim, width, rows,
        _block(width, fetched), split, BY_WORDS if words else 0, TABLES,
        num_stages=1,  # loads ahead of their use would take more shared memory than cards have
        maxnreg=REGISTERS,  # else the compiler may spill some to have more programs at once
    )  # fmt: skip
    return replace(_joined(queries, out, lse), scores=scores if scored else None)


def by_words(view: View, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Return packed keys and values as words, if both have 2 or 4 bits and KIVI's groups.

    Returns
    -------
    tuple of Tensor or None
        Words of keys and of values, (batch, KV heads, rows, words), int32; None for other formats.
    """
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
    """Return the tokens dequantised at once; fewer if registers do not suffice."""
    numbers = WIDENED_TOKENS * WIDENED_TOKENS // (2 if fetched else 1)
    return max(min(numbers // width, WIDENED_TOKENS), QUERIES)


def _split(tokens: int, programs: int, device: torch.device) -> int:
    """Return the tokens per program; more if all processors are busy anyway."""
    wanted = WAVES * _processors(device)
    return next((n for n in SPLITS if programs * ceil_div(tokens, n) >= wanted), SPLITS[-1])


@cache
def _processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    if device.type != "cuda":
        return PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _empty(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _room(view: View) -> int:
    """Return the largest possible length of a sequence, without asking the GPU."""
    return (view.k.rows if view.k else 0) + (0 if view.k_tail is None else view.k_tail.shape[2])


def _side(view: View, which: str) -> tuple[list[Any], list[Any]]:
    """Return pointers, strides and constants of keys or values, in the kernel's order."""
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
