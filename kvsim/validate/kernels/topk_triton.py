"""Softmax, mean over the heads of a KV head, and the largest shares: in one launch, or in chunks.

Where a context is long enough for many programs per head, a program takes a chunk of one KV head's
tokens. The k-th largest share is found digit by digit: the programs count together how many shares
have each ten bits, and all read the counts.
"""

import torch
from torch import Tensor

from kvsim.techniques.steps import RANKED_ALONE
from kvsim.validate.kernels.language import ceil_div, jit, launch, next_power_of_2, tl

SCANNED_TOKENS = 1024  # tokens looked at at once
CHUNKS = (8192, 4096, 2048, 1024)  # tokens of one program
PROGRAMS = 512  # wanted, for every processor of a GPU to have some
DIGITS, BINS = 3, 1024  # of a share's pattern: thirty bits, as shares are at most about 1


@jit
def partial_sums(
    logits, tops, totals, tokens, chunks,
    PER_KV: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Largest logit of every head in a chunk, and the sum of exponentials below it."""
    group = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    lane = tl.arange(0, BLOCK)
    base = logits + (group * PER_KV + head)[:, None] * tokens
    top = tl.full([HEADS], -1e30, dtype=tl.float32)
    total = tl.zeros([HEADS], dtype=tl.float32)
    start = tl.program_id(1) * CHUNK
    for begin in range(start, tl.minimum(start + CHUNK, tokens), BLOCK):
        inside = (head < PER_KV)[:, None] & (begin + lane < tokens)[None, :]
        x = tl.load(base + (begin + lane)[None, :], mask=inside, other=-float("inf")).to(tl.float32)
        highest = tl.maximum(top, tl.max(x, axis=1))
        total = total * tl.exp(top - highest) + tl.sum(tl.exp(x - highest[:, None]), axis=1)
        top = highest
    at = (group * chunks + tl.program_id(1)) * HEADS + head
    tl.store(tops + at, top)
    tl.store(totals + at, total)


@jit
def mean_shares(
    logits, tops, totals, mean, counted, eligible, tokens, chunks, kv_heads,
    PER_KV: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, DIGITS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Mean shares of a chunk, -1 where a token is not eligible; its first digits are counted."""
    group = tl.program_id(0).to(tl.int64)
    barred = tl.load(eligible + tl.program_id(0) // kv_heads)
    head, lane, part = tl.arange(0, HEADS), tl.arange(0, BLOCK), tl.arange(0, PARTS)
    at = (group * chunks + part)[:, None] * HEADS + head[None, :]
    some = (part < chunks)[:, None] & (head < PER_KV)[None, :]
    parts = tl.load(tops + at, mask=some, other=-1e30)
    top = tl.max(parts, axis=0)
    sums = tl.load(totals + at, mask=some, other=0.0)
    total = tl.sum(sums * tl.exp(parts - top[None, :]), axis=0)
    inverse = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0) / PER_KV
    base = logits + (group * PER_KV + head)[:, None] * tokens
    start = tl.program_id(1) * CHUNK
    for begin in range(start, tl.minimum(start + CHUNK, tokens), BLOCK):
        inside = (head < PER_KV)[:, None] & (begin + lane < tokens)[None, :]
        x = tl.load(base + (begin + lane)[None, :], mask=inside, other=-float("inf")).to(tl.float32)
        share = tl.sum(tl.exp(x - top[:, None]) * inverse[:, None], axis=0)
        share = tl.where(begin + lane < barred, share, -1.0)
        tl.store(mean + group * tokens + begin + lane, share, mask=begin + lane < tokens)
        pattern = share.to(tl.int32, bitcast=True)
        add_digits(counted + group * (DIGITS * BINS), pattern >> 20, begin + lane < barred, BINS)


@jit
def next_digit(
    mean, counted, eligible, wanted, tokens, kv_heads,
    DIGIT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, DIGITS: tl.constexpr,
    BINS: tl.constexpr,
):  # fmt: skip
    """Count a digit of the shares whose digits before it are those of the k-th largest."""
    group = tl.program_id(0).to(tl.int64)
    barred = tl.load(eligible + tl.program_id(0) // kv_heads)
    mine = counted + group * (DIGITS * BINS)
    known, _ = largest(mine, tl.minimum(wanted, barred), DIGIT, BINS)
    lane = tl.arange(0, BLOCK)
    start = tl.program_id(1) * CHUNK
    for begin in range(start, tl.minimum(start + CHUNK, tokens), BLOCK):
        at = begin + lane
        share = tl.load(mean + group * tokens + at, mask=at < tokens, other=-1.0)
        pattern = share.to(tl.int32, bitcast=True) >> (20 - 10 * DIGIT)
        alike = (at < barred) & (pattern >> 10 == known)
        add_digits(mine + DIGIT * BINS, pattern & (BINS - 1), alike, BINS)


@jit
def numbers_taken(
    mean, counted, above, equal, eligible, wanted, tokens, chunks, kv_heads,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, DIGITS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Shares of a chunk above the k-th largest, and those equal to it."""
    group = tl.program_id(0).to(tl.int64)
    barred = tl.load(eligible + tl.program_id(0) // kv_heads)
    k = tl.minimum(wanted, barred)
    low, _ = largest(counted + group * (DIGITS * BINS), k, DIGITS, BINS)
    lane = tl.arange(0, BLOCK)
    larger, same = group.to(tl.int32) * 0, group.to(tl.int32) * 0
    start = tl.program_id(1) * CHUNK
    for begin in range(start, tl.minimum(start + CHUNK, tokens), BLOCK):
        at = begin + lane
        share = tl.load(mean + group * tokens + at, mask=at < tokens, other=-1.0)
        pattern = share.to(tl.int32, bitcast=True)
        larger += tl.sum((pattern > low).to(tl.int32), axis=0)
        same += tl.sum((pattern == low).to(tl.int32), axis=0)
    place = group * chunks + tl.program_id(1)
    tl.store(above + place, larger)
    tl.store(equal + place, same)


@jit
def take(
    mean, counted, above, equal, index, eligible, wanted, tokens, chunks, kv_heads,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, DIGITS: tl.constexpr,
    BINS: tl.constexpr,
):  # fmt: skip
    """Write a chunk's chosen tokens behind those of the chunks before it."""
    group = tl.program_id(0).to(tl.int64)
    barred = tl.load(eligible + tl.program_id(0) // kv_heads)
    k = tl.minimum(wanted, barred)
    low, ties = largest(counted + group * (DIGITS * BINS), k, DIGITS, BINS)
    lane, part = tl.arange(0, BLOCK), tl.arange(0, PARTS)
    before = part < tl.program_id(1)
    larger = tl.sum(tl.load(above + group * chunks + part, mask=before, other=0), axis=0)
    same = tl.sum(tl.load(equal + group * chunks + part, mask=before, other=0), axis=0)
    taken = larger + tl.minimum(same, ties)
    ties -= tl.minimum(same, ties)  # of the shares equal to the k-th, the first ones
    start = tl.program_id(1) * CHUNK
    for begin in range(start, tl.minimum(start + CHUNK, tokens), BLOCK):
        at = begin + lane
        share = tl.load(mean + group * tokens + at, mask=at < tokens, other=-1.0)
        pattern = share.to(tl.int32, bitcast=True)
        alike = (pattern == low).to(tl.int32)
        chosen = ((pattern > low) | ((alike > 0) & (tl.cumsum(alike, axis=0) <= ties))).to(tl.int32)
        ties -= tl.minimum(tl.sum(alike, axis=0), ties)
        place = taken + tl.cumsum(chosen, axis=0) - 1
        tl.store(index + group * wanted + place, at, mask=chosen > 0)
        taken += tl.sum(chosen, axis=0)


@jit
def add_digits(counted, digit, mask, BINS: tl.constexpr):
    """Add how often each digit occurs where a mask is true."""
    left_out = tl.sum((mask == 0).to(tl.int32), axis=0)  # they are counted as 0
    found = tl.histogram(tl.where(mask, digit, 0), BINS)
    place = tl.arange(0, BINS)
    found = found - tl.where(place == 0, left_out, 0)
    tl.atomic_add(counted + place, found, mask=found > 0)


@jit
def largest(counted, wanted, DIGITS: tl.constexpr, BINS: tl.constexpr):
    """First digits of the k-th largest, and how many of those that have them are wanted."""
    place = tl.arange(0, BINS)
    known = wanted * 0
    for digit in tl.static_range(DIGITS):
        found = tl.load(counted + digit * BINS + place)
        as_large = tl.sum(found, axis=0) - tl.cumsum(found, axis=0) + found
        here = tl.sum((as_large >= wanted).to(tl.int32), axis=0) - 1
        wanted -= tl.sum(tl.where(place > here, found, 0), axis=0)
        known = known * BINS + here
    return known, wanted


def softmax_top_k_in_chunks(logits: Tensor, kv_heads: int, count: int, eligible: Tensor) -> Tensor:
    """As ``topk.softmax_top_k``; six launches of many programs each."""
    batch, heads, tokens = logits.shape
    groups, per_kv, count = batch * kv_heads, heads // kv_heads, min(count, tokens)
    device, logits, eligible = logits.device, logits.contiguous(), eligible.int()
    index = torch.full((batch, kv_heads, count), -1, dtype=torch.int32, device=device)
    chunk = next((n for n in CHUNKS if groups * ceil_div(tokens, n) >= PROGRAMS), CHUNKS[-1])
    chunks, block, width = (
        ceil_div(tokens, chunk),
        min(SCANNED_TOKENS, chunk),
        next_power_of_2(per_kv),
    )
    parts = next_power_of_2(chunks)
    mean = torch.empty(groups, tokens, dtype=torch.float32, device=device)
    tops = torch.empty(2, groups, chunks, width, dtype=torch.float32, device=device)
    counted = torch.zeros(groups, DIGITS, BINS, dtype=torch.int32, device=device)
    taken = torch.empty(2, groups, chunks, dtype=torch.int32, device=device)
    grid, digits = (groups, chunks), (block, chunk, DIGITS, BINS)
    launch(
        partial_sums, grid, logits, tops[0], tops[1], tokens, chunks, per_kv, width, block, chunk
    )
    launch(
        mean_shares, grid, logits, tops[0], tops[1], mean, counted, eligible, tokens, chunks,
        kv_heads, per_kv, width, parts, *digits,
    )  # fmt: skip
    for digit in range(1, DIGITS):
        launch(next_digit, grid, mean, counted, eligible, count, tokens, kv_heads, digit, *digits)
    places = (mean, counted, taken[0], taken[1])
    launch(numbers_taken, grid, *places, eligible, count, tokens, chunks, kv_heads, *digits)
    launch(take, grid, *places, index, eligible, count, tokens, chunks, kv_heads, parts, *digits)
    return index


@jit
def select(
    logits, mean, index, eligible, tokens, wanted, kv_heads,
    PER_KV: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Top-k of one KV head: the k-th largest share by bisection, then all above it in order.

    Shares are not negative, so their bit patterns are ordered as they are.
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
    """As ``topk.softmax_top_k``; a program per sequence and KV head, or many of them."""
    batch, heads, tokens = logits.shape
    count = min(count, tokens)
    if tokens > RANKED_ALONE and count:
        return softmax_top_k_in_chunks(logits, kv_heads, count, eligible)
    index = torch.full((batch, kv_heads, count), -1, dtype=torch.int32, device=logits.device)
    if not count:
        return index
    mean = torch.empty(batch, kv_heads, tokens, dtype=torch.float32, device=logits.device)
    per_kv = heads // kv_heads
    launch(
        select, (batch * kv_heads,),
        logits.contiguous(), mean, index, eligible.int(), tokens, count, kv_heads,
        per_kv, next_power_of_2(per_kv), min(SCANNED_TOKENS, next_power_of_2(tokens)),
    )  # fmt: skip
    return index
