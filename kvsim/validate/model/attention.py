"""Attention of new tokens over cached ones: visibility, and the fused kernel."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes

from kvsim.frozen import frozen
from kvsim.models.model import Model
from kvsim.validate.counter import Kind, OpRecord
from kvsim.validate.kernels.blockwise import products, ranges, weighted


@frozen
class Pass:
    """One forward pass over some sequences, or over a chunk of their prompts.

    A sequence's cached tokens are in slots 0, 1, ... and its new tokens follow. Prompts shorter
    than the longest one are padded with tokens that no query sees later.

    Attributes
    ----------
    rows
        Range of sequences of the batch.
    starts
        Cached tokens of each of these sequences before the pass. [tokens]
    new
        New tokens per sequence. [tokens]
    positions
        Positions of the new tokens, (sequences, new), on the device.
    turns
        Cosine and sine of these positions, (sequences, 1, new, dim); None without rotary positions.
    kind
        "prefill", "decode", "draft" or "verify".
    fixed
        Whether shapes must not depend on ``starts``, because the pass is replayed as a CUDA graph.
    """

    rows: slice
    starts: tuple[int, ...]
    new: int
    positions: Tensor
    turns: tuple[Tensor, Tensor] | None = None
    kind: Kind = "decode"
    fixed: bool = False

    @property
    def uniform(self) -> bool:
        """Whether the new tokens of all sequences have the same slot, known to the host."""
        return not self.fixed and min(self.starts) == max(self.starts)

    @property
    def length(self) -> int:
        """Tokens of the longest sequence after this pass. [tokens]"""
        return max(self.starts) + self.new

    @property
    def begins_prompt(self) -> bool:
        """Whether this is the first chunk of the prompts of the batch's first sequences."""
        return not self.starts[0] and not self.rows.start

    def ends_prompt(self, prompt: int, sequences: int) -> bool:
        """Tell whether this is the last chunk of a prompt.

        Parameters
        ----------
        prompt
            Length of each prompt. [tokens]
        sequences
            Sequences of the part of the batch that passes together.

        Returns
        -------
        bool
            Whether the pass ends the prompt of the last of these sequences.
        """
        return self.length == prompt and self.rows.stop == sequences


LOWEST_WITH_AMX = "AVX512"  # kernels that can pack what AMX multiplies
FEW_QUERIES = 16  # per head, up to which heads of a group are queries of one: keys are read once

Seen = Tensor | Literal["all", "causal", "later"]
"""What queries see: everything, all up to themselves where they are the only tokens, or where they
are the latest, or where a mask is true."""


def visible(step: Pass, held: Tensor | int, window: int | None = None) -> Seen:
    """Describe which cached tokens each query of a pass sees.

    Parameters
    ----------
    held
        Position of the token in every slot, (slots,), (sequences, slots) or (sequences, KV heads,
        slots), below 0 for an empty slot; or the number of slots, if slot n holds token n.
    window
        Most tokens that a query sees, itself included; None for all. [tokens]

    Returns
    -------
    Seen
        "all", "causal" or "later" where a kernel needs no mask, otherwise a mask that is True where
        a query sees a slot, (sequences, 1 or KV heads, new, slots).
    """
    if isinstance(held, int):
        if window is None or held <= window:
            if step.new == 1 and step.uniform:
                return "all"
            if step.new == held:
                return "causal"
            if step.uniform and step.length == held:
                return "later"
        held = torch.arange(held, device=step.positions.device)
    while held.dim() < 3:
        held = held.unsqueeze(0) if held.dim() == 1 else held.unsqueeze(1)
    keys, queries = held[:, :, None], step.positions[:, None, :, None]
    seen = (keys <= queries) & (keys >= 0)
    return seen if window is None else seen & (keys > queries - window)


def attend(record: OpRecord, queries: Tensor, keys: Tensor, values: Tensor, seen: Seen) -> Tensor:
    """Compute softmax attention of queries over keys and values.

    Parameters
    ----------
    record
        Counter of the op, which is charged one read of queries, keys and values and one write of
        the output: attention scores stay on the chip.
    keys, values
        (sequences, KV heads, slots, dim).
    seen
        Which slots each query sees, as :func:`visible` describes it.
    """
    given, causal = seen, isinstance(seen, str) and seen == "causal"
    few = queries.shape[2] <= FEW_QUERIES and not causal
    if few and isinstance(seen, str) and seen == "later":
        seen = _lower_right(queries, keys)
    if few and queries.device.type == "cpu":
        out = _in_blocks(queries, keys, values, seen)
    elif few and queries.is_cuda and isinstance(seen, Tensor):
        out = _in_splits(record, queries, keys, values, seen)
    elif few and queries.shape[1] != keys.shape[1]:
        out = _by_group(queries, keys, values)
    else:
        out = _by_head(queries, keys, values, seen)
    record.reads(queries, keys, values).writes(out)
    record.visible(queries.shape[2], keys.shape[2], given)
    return out


def _by_head(queries: Tensor, keys: Tensor, values: Tensor, seen: Seen) -> Tensor:
    """Attend with every query head separately."""
    mask = seen if isinstance(seen, Tensor) else None
    if isinstance(seen, str) and seen == "later":  # no mask where a fused kernel knows it
        mask = _bias(queries, keys) if queries.is_cuda else _lower_right(queries, keys)
    elif mask is not None and mask.shape[1] > 1:  # KV heads that keep different tokens
        mask = mask.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    causal = isinstance(seen, str) and seen == "causal"
    plainly = queries.device.type == "cpu" and queries.element_size() == 2 and not _packs_for_amx()
    with sdpa_kernel(SDPBackend.MATH) if plainly else nullcontext():
        return F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=causal,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )


def _lower_right(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the mask under which queries are the latest tokens, (1, 1, queries, keys)."""
    new, held = queries.shape[2], keys.shape[2]
    everything = torch.ones(new, held, dtype=torch.bool, device=queries.device)
    return everything.tril(held - new)[None, None]


def _bias(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the same mask in the form that fused kernels recognise, uncounted."""
    with _disable_current_modes():
        return causal_lower_right(queries.shape[2], keys.shape[2])


def backend(queries: Tensor, keys: Tensor, causal: bool) -> str:
    """Name the PyTorch attention kernel that takes these tensors.

    Parameters
    ----------
    causal
        Whether each query sees the tokens up to itself alone.

    Returns
    -------
    str
        Name of the backend in lower case, as in ``torch.nn.attention.SDPBackend``.
    """
    grouped = queries.shape[1] != keys.shape[1]
    chosen = torch._fused_sdp_choice(queries, keys, keys, is_causal=causal, enable_gqa=grouped)
    return SDPBackend(chosen).name.lower()


def kernels(model: Model, device: torch.device) -> dict[str, str]:
    """Name the kernels that compute a model's attention in fp16.

    Parameters
    ----------
    device
        Device that computes.

    Returns
    -------
    dict of str to str
        Kernel of prompts (``prompt``) and of single tokens (``decode``).
    """
    shape = (1, model.heads, 2 * FEW_QUERIES, model.head_dim)
    queries = torch.zeros(shape, dtype=torch.float16, device=device)
    keys = queries[:, : model.kv_heads]
    decoding = "blocks on the CPU"
    if device.type == "cuda":  # heads of a group are queries of one
        decoding = backend(queries[:, : model.kv_heads, :1], keys, causal=False)
    return {"prompt": backend(queries, keys, causal=True), "decode": decoding}


@cache
def _packs_for_amx() -> bool:
    """Return whether PyTorch's fused attention accepts 16-bit numbers on this CPU.

    Where the CPU has AMX, but ``ATEN_CPU_CAPABILITY`` asks for older kernels, it packs for AMX and
    then says that it can pack with AVX-512 alone.
    """
    has_amx: Callable[[], bool] = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return torch.backends.cpu.get_cpu_capability() == LOWEST_WITH_AMX or not has_amx()


def _in_blocks(q: Tensor, keys: Tensor, values: Tensor, seen: Seen) -> Tensor:
    """Attend on a CPU block by block, with each block converted to fp32 in its cache."""
    batch, _, new, dim = q.shape
    kv_heads, tokens = keys.shape[1:3]
    parts = list(ranges(tokens, batch * kv_heads * dim))
    wide = torch.promote_types(q.dtype, torch.float32)
    queries = q.reshape(batch, kv_heads, -1, dim).to(wide) * dim**-0.5
    logits = products(queries, ((part, keys[:, :, part].to(wide)) for part in parts), tokens)
    if isinstance(seen, Tensor):
        by_query = logits.view(batch, kv_heads, -1, new, tokens)
        by_query.masked_fill_(~seen[:, :, None], -torch.inf)
    out = weighted(logits.softmax(-1), ((part, values[:, :, part].to(wide)) for part in parts))
    return out.view(q.shape).to(q.dtype)


def _by_group(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend with the query heads of a KV head as further queries of it, without a mask."""
    queries = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[3])
    out = F.scaled_dot_product_attention(queries, keys, values)
    return out.reshape(q.shape)  # a fused kernel may lay out tokens before heads


def _in_splits(record: OpRecord, q: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """Attend on a GPU under a mask in splits, as PyTorch's masked kernels leave it mostly idle."""
    from kvsim.validate.kernels.attention_triton import attend_masked

    if record.counting:  # PyTorch does not see what Triton's kernels compute
        record.computes(4 * q.numel() * keys.shape[2])
    return attend_masked(q, keys, values, seen).out.to(q.dtype)
