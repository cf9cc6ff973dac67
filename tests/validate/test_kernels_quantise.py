"""Quantisers against optimum-quanto, a scalar twin, error bounds and the sizes formats state."""

from dataclasses import replace
from importlib import import_module
from math import ceil, floor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvsim.errors import InputError
from kvsim.machines.deployment import WEIGHT_FORMATS
from kvsim.validate.kernels.packing import PACKED_BITS, pack, unpack
from kvsim.validate.kernels.quantise import quantise
from kvsim.validate.kernels.stores import By, Levels, Store
from kvsim.validate.parts.drafting import int4, int4_matrix
from kvsim.validate.techniques.zipcache import channelwise, separable

quanto: Any = import_module("optimum.quanto")  # untyped
BYS: tuple[By, By] = ("channel", "token")


def numbers(seed: int, *shape: int, spread: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    offset = torch.randn(shape[-1], generator=generator)  # channels with outliers, as keys have
    return ((torch.randn(shape, generator=generator) + 3 * offset) * spread).half()


def half(value: float) -> float:
    return float(np.float16(value))


def scalar_twin(values: list[float], bits: int, where: Levels) -> tuple[list[int], list[float]]:
    """One group in plain Python floats, rounded to fp16 only where scales are stored."""
    low, high = min(values), max(values)
    if where == "centres":
        scale, zero = half((high - low) / 2**bits), half(low + (high - low) / 2**bits / 2)
    else:
        scale, zero = half((high - low) / (2**bits - 1)), half(low)
        if where == "grid" and scale:
            zero = half(floor(low / scale + 0.5) * scale)
    codes = [min(max(floor((x - zero) / (scale or 1.0) + 0.5), 0), 2**bits - 1) for x in values]
    return codes, [code * scale + zero for code in codes]


def groups_of(x: Tensor, group: int, by: By) -> Tensor:
    """Groups as rows of a matrix."""
    rows = x.transpose(-1, -2) if by == "channel" else x
    return rows.reshape(-1, group)


@pytest.mark.parametrize("bits", PACKED_BITS)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_packing_keeps_every_code(bits: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 9)) * (8 if bits == 3 else 8 // bits)
    codes = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=count, max_size=count))
    packed = pack(torch.tensor([codes], dtype=torch.uint8), bits)
    assert packed.nbytes * 8 == count * bits
    assert unpack(packed, bits).tolist() == [codes]


def test_neighbours_share_a_byte_lowest_bits_first() -> None:
    assert pack(torch.tensor([1, 2, 3, 0]), 2).tolist() == [0b00111001]
    assert pack(torch.tensor([0xA, 0x3]), 4).tolist() == [0x3A]


@pytest.mark.parametrize("by", BYS)
@pytest.mark.parametrize("bits", PACKED_BITS)
@pytest.mark.parametrize("where", ["ends", "centres", "grid"])
def test_codes_are_the_scalar_twins(bits: int, by: By, where: Levels) -> None:
    x = numbers(bits, 1, 2, 48, 32)
    store = quantise(x, bits, 16, by, where)
    codes = groups_of(unpack(store.codes, bits), 16, by)
    wide = groups_of(store.numbers(), 16, by)
    for row, found, widened in zip(groups_of(x, 16, by), codes, wide, strict=True):
        expected, values = scalar_twin(row.tolist(), bits, where)
        ties = sum(a != b for a, b in zip(found.tolist(), expected, strict=True))
        assert ties == 0
        assert widened.tolist() == pytest.approx(values, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("by", BYS)
@pytest.mark.parametrize(("bits", "kind"), [(2, "qint2"), (4, "qint4")])
def test_groups_are_those_of_quanto(bits: int, kind: str, by: By) -> None:
    x = numbers(3, 1, 1, 64, 64)
    mine, base = quantise(x, bits, 32, by), x[0, 0].float()
    # axis 0 groups neighbours in a token, axis -1 neighbouring tokens of a channel
    axis = -1 if by == "channel" else 0
    scale, shift = quanto.MaxOptimizer()(base, getattr(quanto, kind), axis, 32)
    for theirs, table in ((scale, mine.scale), (-shift, mine.zero)):
        own = table[0, 0].T if by == "channel" else table[0, 0]
        assert torch.equal(theirs.half().flatten(), own.flatten())
    scale, shift = scale.half().float(), shift.half().float()
    codes = torch.ops.quanto.quantize_affine(base, bits, axis, 32, scale, shift)
    theirs = quanto.tensor.ungroup(codes * scale - shift, axis, base.shape)
    wide = groups_of(theirs, 32, by)
    along = 2 if by == "channel" else 3
    spread = (t.float().repeat_interleave(32, along)[0, 0] for t in (mine.scale, mine.zero))
    step, zero = (groups_of(t, 32, by) for t in spread)
    off = (groups_of(mine.numbers()[0, 0], 32, by) - wide).abs()
    tie = ((groups_of(base, 32, by) - zero) / step % 1 - 0.5).abs() < 1e-5
    assert (off <= 1e-5 + tie * step * 1.001).all()
    assert tie.float().mean() < 0.02


@given(seed=st.integers(0, 1000), spread=st.sampled_from([1e-3, 1.0, 100.0]))
@settings(max_examples=30, deadline=None)
def test_both_halves_make_eight_bits(seed: int, spread: float) -> None:
    x = numbers(seed, 1, 2, 32, 32, spread=spread)
    for by in BYS:
        whole = quantise(x, 4, 32, by, hierarchical=True)
        draft = whole.upper_only()
        assert torch.equal(draft.codes, quantise(x, 4, 32, by).codes)
        rows = groups_of(x.float(), 32, by)
        width = rows.amax(1) - rows.amin(1)
        stored = 2**-10 * (rows.abs().amax(1) + width) + 2**-20
        for store, steps in ((draft, 15), (whole, 15 * 16)):
            error = (groups_of(store.numbers(), 32, by) - rows).abs().amax(1)
            # the residual's largest code is 7 of 8 sixteenths: half a step more at one end
            allowed = width / steps * (0.5 if steps == 15 else 1.0)
            assert (error <= allowed + stored).all()


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_channelwise_is_the_scalar_twin_over_the_batch(bits: int) -> None:
    x = numbers(7, 2, 2, 9, 16)
    wide = channelwise(x, bits).numbers()
    for h in range(2):
        for c in range(16):
            _, expected = scalar_twin(x[:, h, :, c].flatten().tolist(), bits, "grid")
            found = wide[:, h, :, c].flatten().tolist()
            assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)


def naive_separable(x: Tensor, bits: int) -> Tensor:
    """Algorithm 1 of the ZipCache paper, loop by loop."""
    batch, heads, tokens, head_dim = x.shape
    result = torch.empty(x.shape)
    factor = torch.empty(heads, head_dim)
    for h in range(heads):
        for c in range(head_dim):
            factor[h, c] = half(float(x[:, h, :, c].abs().max()) ** 0.5)
    for b in range(batch):
        for t in range(tokens):
            row = x[b, :, t].float() / factor.where(factor > 0, torch.tensor(1.0))
            _, wide = scalar_twin(row.flatten().tolist(), bits, "grid")
            result[b, :, t] = torch.tensor(wide).view(heads, head_dim) * factor
    return result


@pytest.mark.parametrize("bits", [2, 4])
def test_separable_is_algorithm_1(bits: int) -> None:
    x = numbers(5, 2, 2, 9, 16)
    x[:, 0, :, 3] = 0.0  # a dead channel
    store = separable(x, bits)
    expected = naive_separable(x, bits)
    off = (store.numbers() - expected).abs()
    steps = store.scale.float()[:, :, :, 0, None] * store.factor.float()  # type: ignore[union-attr]
    assert int((off > 1e-4).sum()) <= 1  # a rounding tie
    assert (off <= steps * 1.01 + 1e-4).all()


@pytest.mark.parametrize("shape", [(24, 256), (10, 576), (7, 64)])
def test_int4_weights(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.1
    packed = int4(weight)
    outputs, inputs = shape
    assert sum(t.nbytes for t in packed.tensors()) == WEIGHT_FORMATS["int4"].bytes(inputs, outputs)
    wide = packed.numbers()
    for output in range(outputs):
        for group in range(ceil(inputs / 128)):
            part = weight[output, group * 128 : (group + 1) * 128]
            scale = half(float(part.abs().max()) / 7.5)
            expected = [min(max(floor(x / scale + 0.5), -8), 7) * scale for x in part.tolist()]
            found = wide[output, group * 128 : (group + 1) * 128].tolist()
            assert found == pytest.approx(expected, abs=1e-6)
            assert np.abs(np.array(found) - part.numpy()).max() <= scale / 2 * 1.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("shape", "tiled"), [((32, 256), True), ((24, 256), False)])
def test_products_with_int4_weights(
    shape: tuple[int, int], tiled: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(shape, generator=generator)
    x = torch.randn((2, 3, shape[1]), generator=generator).to(dtype)
    bias = torch.randn(shape[0], generator=generator).to(dtype)
    matrix = int4_matrix(weight, bias)
    assert matrix.tiled == tiled
    assert sum(t.nbytes for t in matrix.tensors()[:2]) == WEIGHT_FORMATS["int4"].bytes(*shape[::-1])
    expected = x.double() @ int4(weight).numbers().double().T + bias.double()
    rounding = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    found = matrix(x)
    assert (found.dtype, found.shape) == (dtype, (2, 3, shape[0]))
    assert (found.double() - expected).abs().max() <= rounding * expected.abs().max()


def test_what_cannot_be_packed_is_refused() -> None:
    x = numbers(1, 1, 1, 30, 24)
    for attempt in (
        lambda: quantise(x, 2, 32, "channel"),
        lambda: quantise(x, 2, 32, "token"),
        lambda: quantise(x, 5, 8, "token"),
        lambda: quantise(x, 2, 0, "token"),
        lambda: pack(torch.zeros(3), 4),
    ):
        with pytest.raises(InputError, match=r"expected|choose"):
            attempt()


def test_no_tokens_make_an_empty_store() -> None:
    x = numbers(1, 2, 2, 0, 32)
    for by in BYS:
        store = quantise(x, 2, 32, by)
        assert (store.rows, store.nbytes, store.numbers().numel()) == (0, 0, 0)


def test_rows_find_their_groups() -> None:
    first = torch.tensor([5, 2])
    codes = torch.zeros(2, 1, 11, 4, dtype=torch.uint8)
    table = torch.arange(4).view(1, 1, 4, 1).expand(2, 1, 4, 16).half()  # a group's number
    store = Store(codes, table, table, 2, 3, "channel", first=first)
    groups = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]])
    for start, stop in ((0, 11), (3, 7), (6, 6)):
        found = store.numbers(start, stop)[:, 0, :, 0]
        assert torch.equal(found, groups[:, start:stop].float())
    alike = replace(store, first=first[:1].expand(2))
    assert torch.equal(alike.numbers()[:, 0, :, 0], groups[:1].expand(2, -1).float())
    plain = replace(store, first=None)  # the last group takes what is left
    expected = [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3]
    assert plain.numbers()[0, 0, :, 0].tolist() == expected
    assert plain.numbers(3, 9)[0, 0, :, 0].tolist() == expected[3:9]
