"""Rows of keys and values gathered from host memory by index.

On a GPU the kernel reads the host's pinned memory itself, so that only the rows cross the link and
no staging copy is made; on the CPU it is an index.
"""

from torch import Tensor


def gather(
    k_home: Tensor, v_home: Tensor, index: Tensor, k_out: Tensor, v_out: Tensor
) -> tuple[Tensor, Tensor]:
    """Fill ``k_out`` and ``v_out`` (batch, KV heads, k, head dim) with the rows ``index`` names.

    Parameters
    ----------
    k_home, v_home : (batch, KV heads, tokens, head dim), pinned where ``k_out`` is on a GPU;
        rows are contiguous, in whatever order.
    index : (batch, KV heads, k), below ``tokens``, where the rows go.
    """
    if k_out.is_cuda:
        from kvsim.validate.kernels.gather_triton import gather as fused

        return fused(k_home, v_home, index, k_out, v_out)
    return gather_plainly(k_home, v_home, index, k_out, v_out)


def gather_plainly(
    k_home: Tensor, v_home: Tensor, index: Tensor, k_out: Tensor, v_out: Tensor
) -> tuple[Tensor, Tensor]:
    """The kernel's oracle."""
    rows = index.long()[..., None].expand(-1, -1, -1, k_home.shape[-1])
    k_out.copy_(k_home.gather(2, rows))
    v_out.copy_(v_home.gather(2, rows))
    return k_out, v_out
