"""Rows of keys and values read from the host's pinned memory by the GPU itself."""

from torch import Tensor

from kvsim.errors import InputError
from kvsim.validate.kernels.language import ceil_div, jit, launch, next_power_of_2, tl

GATHERED_ROWS = 16  # rows of one program


@jit
def copy_rows(
    k_home, v_home, index, k_out, v_out,
    kv_heads, sequence_stride, head_stride, token_stride, chosen,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copy a block of one head's rows of keys and values."""
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < chosen)[:, None] & (column < HEAD_DIM)[None, :]
    source = tl.load(index + head * chosen + row, mask=row < chosen, other=0).to(tl.int64)
    base = head // kv_heads * sequence_stride + head % kv_heads * head_stride
    source = base + source[:, None] * token_stride + column[None, :]
    target = (head * chosen + row)[:, None] * HEAD_DIM + column[None, :]
    tl.store(k_out + target, tl.load(k_home + source, mask=inside), mask=inside)
    tl.store(v_out + target, tl.load(v_home + source, mask=inside), mask=inside)


def gather(
    k_home: Tensor, v_home: Tensor, index: Tensor, k_out: Tensor, v_out: Tensor
) -> tuple[Tensor, Tensor]:
    """As ``gather.gather``: one launch that reads host memory row by row.

    Raises
    ------
    InputError
        Where host memory is not pinned, or rows have gaps.
    """
    if k_out.is_cuda and not (k_home.is_pinned() and v_home.is_pinned()):
        raise InputError("gather: host keys and values are pageable; allocate them pinned")
    laid_out = k_home.stride() == v_home.stride() and k_home.stride(3) == 1
    if not (laid_out and k_out.is_contiguous() and v_out.is_contiguous()):
        raise InputError("gather: rows of keys and values have gaps; expected contiguous rows")
    batch, heads, _, head_dim = k_home.shape
    chosen = index.shape[2]
    launch(
        copy_rows, (batch * heads, ceil_div(chosen, GATHERED_ROWS)),
        k_home, v_home, index.contiguous(), k_out, v_out, heads, *k_home.stride()[:3], chosen,
        head_dim, next_power_of_2(head_dim), GATHERED_ROWS,
    )  # fmt: skip
    return k_out, v_out
