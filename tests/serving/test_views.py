"""What Python shares with compiled code is read and written where it lies."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from numba import njit

from kvsim.serving import compiled as compiled  # Numba learns of views with it
from kvsim.serving.views import shared


class Inner(NamedTuple):
    """A tuple in a tuple."""

    cube: Any
    ratio: float


class Outer(NamedTuple):
    """One of everything that a view can be of."""

    inner: Inner
    records: Any
    record: Any
    number: int
    there: bool
    nothing: None = None


@njit(error_model="numpy")
def work(given: Any, numbers: Any) -> Any:
    """Read and write by every way there is."""
    plane = given.inner.cube[1]
    numbers[0] = given.inner.cube[1, 2, 3] + plane[2][3] + given.inner.cube.shape[2]
    numbers[1] = given.inner.ratio * given.number * given.there
    numbers[2] = given.record.size + given.records.size + given.records[1].parts[2]
    given.records[0] = given.records[1]
    given.records[1].parts[0] += 0.5
    given.record.size = 7
    return numbers.size


def test_compiled_code_reads_and_writes_what_python_has() -> None:
    kind = np.dtype([("size", "i4"), ("parts", "f8", (3,)), ("flag", "?")], align=True)
    records = np.zeros(2, kind)
    records["parts"] = [[1, 2, 3], [4, 5, 6]]
    records["flag"] = [False, True]
    cube = np.arange(24.0).reshape(2, 3, 4)
    alone = np.zeros(1, kind)
    given, numbers = Outer(Inner(cube, 0.5), records, alone[0], 6, True), np.zeros(3)
    assert work(shared(given), shared(numbers)) == 3
    assert numbers.tolist() == [23 + 23 + 4, 3.0, 0 + 2 + 6]
    assert records["parts"].tolist() == [[4, 5, 6], [4.5, 5, 6]]
    assert records["flag"].tolist() == [True, True]
    assert alone["size"] == 7


def test_what_does_not_lie_row_behind_row_is_refused() -> None:
    with pytest.raises(AssertionError, match="one behind the other"):
        shared(np.zeros((4, 4))[:, :2])
