"""The tokens that the query heads of a KV head attend to most: softmax, mean and top-k."""

import torch
from torch import Tensor

from kvsim.techniques.steps import RANKED_ALONE


def softmax_top_k(logits: Tensor, kv_heads: int, count: int, eligible: Tensor) -> Tensor:
    """Choose, per KV head, the tokens with the largest attention averaged over its query heads.

    Parameters
    ----------
    logits : logits of one query per head, (batch, heads, tokens); -inf if a token is not seen.
    kv_heads : number of KV heads.
    count : number of tokens to choose, k.
    eligible : number of first tokens of each sequence to choose from, (batch,), int32.

    Returns
    -------
    Tensor
        Token indices, (batch, KV heads, min(k, tokens)), int32, padded with -1. They are in
        ascending order, except on a GPU for contexts above ``RANKED_ALONE``, where they are ordered
        by attention.
    """
    if not logits.is_cuda:
        return softmax_top_k_plainly(logits, kv_heads, count, eligible)
    if logits.shape[-1] <= RANKED_ALONE:
        from kvsim.validate.kernels.rows_triton import softmax_top_k as fused

        return fused(logits, kv_heads, count, eligible)
    return ranked_top_k(logits, kv_heads, count, eligible)


def ranked_top_k(logits: Tensor, kv_heads: int, count: int, eligible: Tensor) -> Tensor:
    """Choose tokens with PyTorch's own kernels, the largest share first. (batch, KV heads, k)"""
    best = _ranked(logits, kv_heads, eligible).topk(min(count, logits.shape[-1]), dim=-1)
    return best.indices.masked_fill_(best.values < 0, -1).int()


def mean_attention(logits: Tensor, kv_heads: int) -> Tensor:
    """Average attention over the query heads of each KV head.

    Parameters
    ----------
    logits
        Logits of one query per head, (batch, heads, tokens); -inf where a token is not seen.

    Returns
    -------
    Tensor
        Mean softmax, (batch, KV heads, tokens), in fp32; 0 where nothing is seen, NaN where a logit
        is NaN.
    """
    unseen = logits.amax(-1, keepdim=True) == -torch.inf
    shares = logits.softmax(-1, dtype=torch.float32).masked_fill_(unseen, 0.0)
    return shares.view(len(logits), kv_heads, -1, logits.shape[-1]).mean(2)


def softmax_top_k_plainly(logits: Tensor, kv_heads: int, count: int, eligible: Tensor) -> Tensor:
    """Compute the same as the kernel with PyTorch's own ops. (batch, KV heads, k)

    Of equal shares the earlier token is chosen, and indices are ascending.
    """
    tokens = logits.shape[-1]
    shares = _ranked(logits, kv_heads, eligible)
    order = shares.argsort(dim=-1, descending=True, stable=True)[..., : min(count, tokens)]
    order = torch.where(order < eligible[:, None, None], order, tokens).sort(-1).values
    return torch.where(order < tokens, order, -1).int()


def _ranked(logits: Tensor, kv_heads: int, eligible: Tensor) -> Tensor:
    """Return mean attention, with negative values for tokens that may not be chosen."""
    barred = torch.arange(logits.shape[-1], device=logits.device) >= eligible[:, None, None]
    return mean_attention(logits, kv_heads).masked_fill_(barred, -1.0)
