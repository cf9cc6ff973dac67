"""Comparisons of tensors that NaN never passes."""

import torch
from torch import Tensor

FP16 = 2e-3  # a few roundings of numbers around 1 in fp16


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = FP16) -> None:
    """Equal up to ``tolerance``, absolute below 1 and relative above; infinities must agree."""
    assert actual.shape == expected.shape
    a, e = actual.double(), expected.double()
    assert not a.isnan().any(), "NaN in the result"
    assert not e.isnan().any(), "NaN in what is expected"
    infinite = a.isinf() | e.isinf()
    assert torch.equal(a[infinite], e[infinite]), "infinities differ"
    far = (a - e)[~infinite].abs() - tolerance * e[~infinite].abs().clamp(min=1.0)
    assert not (far > 0).any(), f"off by up to {far.max() + tolerance:.2e}"
