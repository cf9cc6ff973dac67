"""The tokens that the query heads of a KV head attend to most: softmax, mean and top-k."""

import torch
from torch import Tensor


def softmax_top_k(logits: Tensor, kv_heads: int, count: int, eligible: Tensor) -> Tensor:
    """The k tokens with the largest mean attention of each KV head's queries, in order.

    Parameters
    ----------
    logits : (batch, heads, tokens); -inf where a token is not seen.
    eligible : (batch,), int32: the first tokens, of which the k are chosen.

    Returns
    -------
    Indices (batch, KV heads, min(k, tokens)), int32, ascending, followed by -1 where fewer are
    eligible. Of equal shares the earlier token is taken.
    """
    if logits.is_cuda:
        from kvsim.validate.kernels.topk_triton import softmax_top_k as fused

        return fused(logits, kv_heads, count, eligible)
    return softmax_top_k_plainly(logits, kv_heads, count, eligible)


def mean_attention(logits: Tensor, kv_heads: int) -> Tensor:
    """Average attention over the query heads of each KV head.

    Parameters
    ----------
    logits
        Logits of one query per head, (batch, heads, tokens); -inf where a token is not seen.

    Returns
    -------
    Tensor
        Mean softmax, (batch, KV heads, tokens), in fp32; 0 where nothing is seen.
    """
    blind = torch.isneginf(logits).all(-1, keepdim=True)
    shares = logits.float().masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    return shares.view(len(logits), kv_heads, -1, logits.shape[-1]).mean(2)


def softmax_top_k_plainly(logits: Tensor, kv_heads: int, count: int, eligible: Tensor) -> Tensor:
    """Compute what the kernel computes, written down plainly: its oracle.

    Parameters
    ----------
    eligible
        First tokens of each sequence that may be chosen, (batch,).

    Returns
    -------
    Tensor
        Chosen tokens, ascending, (batch, KV heads, count), int32; -1 behind the last.
    """
    tokens = logits.shape[-1]
    barred = torch.arange(tokens, device=logits.device) >= eligible[:, None, None]
    shares = mean_attention(logits, kv_heads).masked_fill(barred, -1.0)
    order = shares.argsort(dim=-1, descending=True, stable=True)[..., : min(count, tokens)]
    order = torch.where(order < eligible[:, None, None], order, tokens).sort(-1).values
    return torch.where(order < tokens, order, -1).int()
