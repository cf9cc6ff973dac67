"""Softmax, mean over the heads of a KV head, and the largest shares: in one launch."""

import torch
from torch import Tensor

from kvsim.validate.kernels.language import jit, launch, next_power_of_2, tl

SCANNED_TOKENS = 1024  # tokens looked at at once


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
    """As ``topk.softmax_top_k``; a program per sequence and KV head."""
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
