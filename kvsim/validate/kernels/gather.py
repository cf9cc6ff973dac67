"""Rows of keys and values gathered from host memory by index.

On a GPU the kernel reads the host's pinned memory itself, so that only the rows cross the link and
no staging copy is made; on the CPU it is an index.
"""

import torch
from torch import Tensor


def gather(
    k_home: Tensor, v_home: Tensor, index: Tensor, k_out: Tensor, v_out: Tensor
) -> tuple[Tensor, Tensor]:
    """Copy the rows given by ``index`` to ``k_out`` and ``v_out``, (batch, KV heads, k, head dim).

    Parameters
    ----------
    k_home, v_home : source tables, (batch, KV heads, tokens, head dim), pinned if ``k_out`` is on a
        GPU; rows are contiguous, in any order.
    index : indices of the rows, (batch, KV heads, k), below ``tokens``; on the device of the
        output.
    """
    if k_out.is_cuda:
        from kvsim.validate.kernels.rows_triton import gather as fused

        return fused(k_home, v_home, index, k_out, v_out)
    return gather_plainly(k_home, v_home, index, k_out, v_out)


def gather_plainly(
    k_home: Tensor, v_home: Tensor, index: Tensor, k_out: Tensor, v_out: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the same as :func:`gather` with PyTorch's own ops, as on a CPU.

    Returns
    -------
    tuple of Tensor
        ``k_out`` and ``v_out``, (batch, KV heads, k, head dim) each.
    """
    k_out.copy_(rows_at(k_home, index))
    v_out.copy_(rows_at(v_home, index))
    return k_out, v_out


def rows_at(home: Tensor, index: Tensor) -> Tensor:
    """Take rows of keys or values by index. (batch, KV heads, k, head dim)

    On a CPU the memory is viewed as one table of rows, so that each row is one copy;
    ``torch.gather`` would look up every element.

    Parameters
    ----------
    home
        Keys or values, (batch, KV heads, tokens, head dim).
    index
        Tokens to take, (batch, KV heads, k).
    """
    batch, heads, tokens, dim = home.shape
    index = index.long()
    steps = home.stride()[:3]
    if home.is_cuda or home.stride(3) != 1 or any(step % dim for step in steps):
        return home.gather(2, index[..., None].expand(-1, -1, -1, dim))
    by_sequence, by_head, by_token = (step // dim for step in steps)
    last = (batch - 1) * by_sequence + (heads - 1) * by_head + (tokens - 1) * by_token
    table = home.as_strided((last + 1, dim), (dim, 1))
    sequences, kv_heads = (torch.arange(n, device=home.device) for n in (batch, heads))
    begins = sequences[:, None] * by_sequence + kv_heads * by_head
    places = index * by_token + begins[..., None]
    return table.index_select(0, places.view(-1)).view(*index.shape, dim)
