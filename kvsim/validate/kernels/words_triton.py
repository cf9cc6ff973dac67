"""Attention over a run of rows that are all packed: codes widened two at a time, by words.

A word of 32 bits holds the codes of neighbouring channels; one of its lower half and one of its
upper half are one operation. Scales of channels meet the queries instead of the keys.
"""

from kvsim.validate.kernels.language import jit, tl


@jit
def pairs(part):
    """Words (..., n) to fp16 (..., n, 2), half by half, with the same bits."""
    lower = part.to(tl.int16).to(tl.float16, bitcast=True)
    upper = (part >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return lower, upper


@jit
def in_place(words, BITS: tl.constexpr):
    """Codes of words (rows, n) as fp16 (rows, n, numbers / 2, 2), times 2**(their place - 24).

    Where nothing but the mantissa is set, a number is its bits times 2**-24, and exact.
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
    """Codes of words (rows, n), each word with its scale, widened to (rows, n, numbers / 2, 2)."""
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
    """Maxima, totals and weighted sums (rows, head dim) of one run; channels as words have them.

    Pointers are those of one head. All queries see all of the run.
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
    """Which channel each number of a widened row is: word by word, halves in turn."""
    held: tl.constexpr = 32 // BITS
    number = tl.arange(0, HEAD_DIM)
    within = number % held
    return number - within + within // 2 + within % 2 * (held // 2)
