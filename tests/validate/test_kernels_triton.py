"""Triton kernels, interpreted, against their PyTorch twins; and compiled for GPUs."""

import subprocess
import sys
from dataclasses import replace
from itertools import product
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvsim.errors import InputError
from kvsim.validate.kernels import (
    attention,
    attention_triton,
    blockwise,
    rows_triton,
    topk,
)
from kvsim.validate.kernels.gather import gather_plainly
from kvsim.validate.kernels.quantise import quantise, quantise_plainly
from kvsim.validate.kernels.rows_triton import gather
from kvsim.validate.kernels.stores import PartialAttention, View
from tests.support.comparing import assert_close
from tests.support.oracles import kivi_view, with_pairs, zipcache_view
from tests.support.places import ROOT

SHARED = [1, 3, 4, 8]  # query heads per KV head
SIDES: tuple[Literal["k"], Literal["v"]] = ("k", "v")
GENERATOR = torch.Generator()


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR).half()


def attend_at_once(q: Tensor, view: View, scored: bool = False) -> PartialAttention:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "BLOCK_NUMBERS", 1 << 30)
        return attention.attend_plainly(q, view, scored)


KERNELS = [attention_triton.attend, attend_at_once]


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    GENERATOR.manual_seed(7)
    monkeypatch.setattr(blockwise, "BLOCK_NUMBERS", 1 << 12)  # a few rows: several blocks


def as_plainly(q: Tensor, view: View, scored: bool = False) -> PartialAttention:
    """The plain result in blocks, which the kernel and a single block must have."""
    twin = attention.attend_plainly(q, view, scored)
    for attend in KERNELS:
        same(attend(q, view, scored), twin)
    return twin


def same(ours: PartialAttention, twin: PartialAttention) -> None:
    assert_close(ours.out, twin.out)
    assert_close(ours.lse, twin.lse)
    if twin.scores is not None and ours.scores is not None:
        assert_close(ours.scores[..., : twin.scores.shape[-1]], twin.scores)


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_attention_over_packed_rows_and_a_tail(bits: int, shared: int) -> None:
    length = 301 if bits == 2 else 133  # more than one run of rows, and less
    view = kivi_view(noise, 2, 1, 64, length, bits)
    q = noise(2, shared, 1, 64)
    as_plainly(q, view, scored=True)


@given(
    shared=st.sampled_from(SHARED),
    bits=st.sampled_from([1, 2, 4, 8]),
    head_dim=st.sampled_from([16, 48, 80, 128]),
    length=st.integers(1, 290),
    new=st.integers(1, 5),
)
@settings(max_examples=10, deadline=None)
def test_attention_over_any_shape(
    shared: int, bits: int, head_dim: int, length: int, new: int
) -> None:
    view = kivi_view(noise, 1, 2, head_dim, length, bits)
    q = noise(1, 2 * shared, min(new, length), head_dim)
    as_plainly(q, view, scored=True)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "new", "tokens", "dim", "stored"),
    [
        (8, 2, 1, 300, 64, torch.float16),
        (6, 6, 3, 130, 80, torch.float16),
        (9, 3, 5, 700, 64, torch.float32),
        (8, 2, 2, 600, 128, torch.float8_e4m3fn),
    ],
)
def test_attention_under_a_mask(
    heads: int, kv_heads: int, new: int, tokens: int, dim: int, stored: torch.dtype
) -> None:
    wide = torch.float32 if stored == torch.float32 else torch.float16
    q = noise(2, heads, new, dim).to(wide)
    k, v = (noise(2, kv_heads, tokens + 7, dim).to(stored)[:, :, :tokens] for _ in "kv")
    ends, own = torch.tensor([new, tokens]), torch.arange(new)
    seen = torch.arange(tokens) <= (ends[:, None] - new + own)[:, None, :, None]
    v[0, :, new:] = torch.nan  # what no query sees may hold anything
    found = attention_triton.attend_masked(q, k, v, seen)
    keys, values = (t.float().nan_to_num().repeat_interleave(heads // kv_heads, 1) for t in (k, v))
    exact = scaled_dot_product_attention(q.float(), keys, values, attn_mask=seen)
    assert_close(found.out, exact, 1e-6 if wide == torch.float32 else 2e-3)


@pytest.mark.parametrize("shared", SHARED)
def test_the_hierarchical_pair(shared: int) -> None:
    k, v = noise(1, 1, 256, 64), noise(1, 1, 256, 64)
    stores = (
        quantise(k, 4, 64, "channel", hierarchical=True),
        quantise(v, 4, 64, "token", hierarchical=True),
    )
    count, lengths = torch.tensor([192]).int(), torch.tensor([231]).int()
    gpu_tensors = k[:, :, 128:256], v[:, :, 128:256]  # 128 slots: token n in slot n % 128
    verify = View(lengths, *stores, count, count, *gpu_tensors)
    draft = replace(verify, k=stores[0].upper_only(), v=stores[1].upper_only())
    q = noise(1, shared, 3, 64)
    for view, bits in ((verify, 8), (draft, 4)):
        ours = as_plainly(q, view)
        exact = attention.attend_plainly(q, View(lengths, k_tail=k, v_tail=v))
        assert (ours.out - exact.out).abs().max() < (0.02 if bits == 8 else 0.3)
    for attend in KERNELS:
        assert not torch.equal(attend(q, verify).out, attend(q, draft).out)


@pytest.mark.parametrize("shared", SHARED)
def test_fetched_pairs_replace_packed_ones(shared: int) -> None:
    view = with_pairs(noise, kivi_view(noise, 1, 2, 32, 200, 2), 40, 30)
    q = noise(1, 2 * shared, 2, 32)
    ours = as_plainly(q, view, scored=True)
    # by hand: the same rows, written over the widened ones
    assert view.index is not None and view.k_fetched is not None and view.v_fetched is not None
    k, v = (attention.rows(replace(view, index=None), slice(0, 200), x) for x in SIDES)
    chosen = view.index[:, :, :40, None].expand(-1, -1, -1, 32).long()
    for rows, pairs in ((k, view.k_fetched), (v, view.v_fetched)):
        rows.scatter_(2, chosen, pairs[:, :, :40].float())
    plain = View(view.lengths, k_tail=k, v_tail=v)
    same(ours, attention.attend_plainly(q, plain, True))


@pytest.mark.parametrize(("bits", "head_dim", "new"), [(2, 64, 1), (4, 32, 3)])
def test_rows_are_read_as_words_where_all_are_packed(
    bits: int, head_dim: int, new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of packed rows alone take a loop of their own; fetched pairs in a run rule it out."""
    monkeypatch.setattr(attention_triton, "SPLITS", (64,))
    view = kivi_view(noise, 1, 2, head_dim, 170, bits, slots=32)
    assert attention_triton.by_words(view, head_dim, torch.float16)
    assert not attention_triton.by_words(view, head_dim, torch.float32), "tokens are compared in it"
    q = noise(1, 4, new, head_dim)
    for chosen in ((), (3, 70, 9, -1)):
        index = torch.tensor(chosen, dtype=torch.int32).expand(1, 2, -1)
        k, v = (noise(1, 2, len(chosen), head_dim) for _ in "kv")
        held = replace(view, index=index, k_fetched=k, v_fetched=v) if chosen else view
        same(attention_triton.attend(q, held, True), attention.attend_plainly(q, held, True))


@pytest.mark.parametrize("shared", SHARED)
def test_mixed_precisions_with_shared_scales(shared: int) -> None:
    view = zipcache_view(noise, 32, 50, 4)
    q = noise(2, 2 * shared, 1, 32)
    for part in (view, replace(view, causal=False)):
        as_plainly(q, part)


@pytest.mark.parametrize("attend", [attention.attend_plainly, *KERNELS])
def test_parts_merge_to_the_whole(attend: object) -> None:
    assert callable(attend)
    k, v, q = noise(2, 2, 90, 32), noise(2, 2, 90, 32), noise(2, 6, 1, 32)
    whole = View(torch.tensor([90, 90]), k_tail=k, v_tail=v)
    cuts = [(0, 31), (31, 31), (31, 90)]  # one part is empty
    parts = [
        attend(q, View(torch.tensor([e - s] * 2), k_tail=k[:, :, s:e], v_tail=v[:, :, s:e]))
        for s, e in cuts
        if e > s
    ]
    parts.append(attend(q, View(torch.tensor([0, 0]), k_tail=k, v_tail=v)))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), enable_gqa=True
    )
    assert_close(attend(q, whole).out, expected)
    assert_close(attention.merge(parts), expected)


def test_what_lies_beyond_the_end_never_counts() -> None:
    view = kivi_view(noise, 1, 1, 32, 70, 4)  # tails are NaN wherever no token is
    k, v, lengths = noise(2, 1, 70, 32), noise(2, 1, 70, 32), torch.tensor([70, 41])
    v[1, :, 41:] = torch.nan
    for attend in (attention.attend_plainly, *KERNELS):
        assert attend(noise(1, 2, 1, 32), view).out.isfinite().all()
        assert attend(noise(2, 2, 1, 32), View(lengths, k_tail=k, v_tail=v)).out.isfinite().all()


@given(
    bits=st.sampled_from([1, 2, 4, 8]),
    by=st.sampled_from(["channel", "token"]),
    where=st.sampled_from(["ends", "centres"]),
    group=st.sampled_from([8, 24, 32]),
    groups=st.integers(1, 3),
    odd=st.integers(1, 35),
)
@settings(max_examples=16, deadline=None)
def test_quantise_and_pack(
    bits: int, by: str, where: str, group: int, groups: int, odd: int
) -> None:
    tokens, head_dim = (group * groups, 8 * odd) if by == "channel" else (odd, group * groups)
    x = noise(1, 2, tokens, head_dim)
    for hierarchical in (False, True):
        twin = quantise_plainly(x, bits, group, by, where, hierarchical)  # type: ignore[arg-type]
        ours = rows_triton.quantise(x, bits, group, by, where, hierarchical)  # type: ignore[arg-type]
        for name in ("codes", "scale", "zero", "lower"):
            a, b = getattr(ours, name), getattr(twin, name)
            assert (a is None and b is None) or torch.equal(a, b), name


@given(
    shared=st.sampled_from(SHARED),
    tokens=st.integers(1, 1100),
    k=st.integers(0, 80),
    seen=st.floats(0, 1),
)
@settings(max_examples=10, deadline=None)
def test_softmax_top_k(shared: int, tokens: int, k: int, seen: float) -> None:
    logits = torch.randn(2, 2 * shared, tokens, generator=GENERATOR)
    logits[1, :, int(seen * tokens) :] = -torch.inf  # ties at 0, and at times nothing is seen
    logits[0, :, ::3] = 0.5  # ties above 0 where heads agree
    eligible = torch.tensor([tokens, max(tokens - 3, 0)]).int()
    twin, *others = (
        choose(logits, 2, k, eligible)
        for choose in (topk.softmax_top_k_plainly, rows_triton.softmax_top_k, topk.ranked_top_k)
    )
    shares = topk.mean_attention(logits, 2)
    for ours in others:
        assert ours.shape == twin.shape == (2, 2, min(k, tokens))
        for (b, limit), head in product(enumerate(eligible.tolist()), range(2)):
            a, e = ours[b, head].long(), twin[b, head].long()
            many = min(k, limit)
            for found in (a, e):
                assert (found[:many].sort().values.diff() > 0).all(), "an index twice"
                assert (found[:many] < limit).all()
                assert (found[many:] == -1).all()
            # sums in another order may swap equal shares: what is taken weighs the same
            row = shares[b, head]
            assert_close(row[a[:many]].sum(), row[e[:many]].sum(), 1e-6)


def test_mean_attention_is_zero_where_nothing_is_seen_and_nan_of_nan() -> None:
    logits = torch.zeros(3, 2, 4)
    logits[1], logits[2, 0, 3] = -torch.inf, torch.nan
    shares = topk.mean_attention(logits, 1)
    assert (shares[0] == 0.25).all() and (shares[1] == 0).all() and shares[2].isnan().all()


def test_top_k_by_hand() -> None:
    logits = torch.log(torch.tensor([[[0.1, 0.4, 0.2, 0.3], [0.7, 0.1, 0.1, 0.1]]]))
    for choose in (topk.softmax_top_k_plainly, rows_triton.softmax_top_k):
        all_four = torch.tensor([4]).int()
        assert choose(logits, 1, 2, all_four).tolist() == [[[0, 1]]]  # means 0.4, 0.25, 0.15, 0.2
        assert choose(logits, 2, 1, all_four).tolist() == [[[1], [0]]]
        assert choose(logits, 1, 3, all_four - 2).tolist() == [[[0, 1, -1]]]


@pytest.mark.parametrize("head_dim", [32, 80, 128])
@pytest.mark.parametrize("chosen", [0, 1, 37])
def test_gather_from_host_memory(head_dim: int, chosen: int) -> None:
    k, v = noise(2, 3, 50, head_dim), noise(2, 3, 50, head_dim)
    index = torch.randint(0, 50, (2, 3, chosen), generator=GENERATOR).int()
    ours = [torch.full((2, 3, chosen, head_dim), torch.nan).half() for _ in range(2)]
    twin = [torch.full((2, 3, chosen, head_dim), torch.nan).half() for _ in range(2)]
    homes = [t.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for t in (k, v)]
    gather(homes[0], homes[1], index, ours[0], ours[1])
    for a, b in ((k, v), homes):
        gather_plainly(a, b, index, twin[0], twin[1])
        for source, found, other in zip((k, v), ours, twin, strict=True):
            assert_close(found, other, 0.0)
            for i in range(2):
                for head in range(3):
                    assert_close(other[i, head], source[i, head][index[i, head].long()], 0.0)
    with pytest.raises(InputError, match="contiguous"):
        gather(k.mT, v.mT, index, ours[0], ours[1])


def test_kernels_compile_as_launched_for_the_smallest_gpus() -> None:
    """To machine code, without a GPU; its own process, not interpreted.

    ``benchmarks/kernels.py`` does it for all shapes, formats and cards.
    """
    script = [sys.executable, "-I", str(ROOT / "tests" / "support" / "compile_kernels.py")]
    done = subprocess.run([*script, "86", "--few"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for kernel in ("runs of kivi", "join of kivi", "quantise_block of kivi"):
        assert f"sm_86 {kernel}" in done.stdout
