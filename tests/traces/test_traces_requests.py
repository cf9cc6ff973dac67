"""The Requests type: what it holds, what it refuses, how it is cut and scaled."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.errors import InputError
from kvsim.traces.requests import Requests
from kvsim.traces.resample import at_rate

BLOCKS = [[0, 1, 2], [0, 1], [], [3]]


def trace(**changed: Any) -> Requests:
    columns: dict[str, Any] = {
        "arrival": np.array([0.0, 0.5, 0.5, 2.0]),
        "prompt": np.array([1030, 700, 10, 512]),
        "generate": np.array([5, 1, 7, 9]),
        "block_ids": np.array([0, 1, 2, 0, 1, 3]),
        "block_start": np.array([0, 3, 5, 5, 6]),
        "block_tokens": 512,
    }
    return Requests(**(columns | changed))


def test_columns_lengths_and_blocks() -> None:
    requests = trace()
    assert len(requests) == 4
    assert requests.duration == 2.0
    assert [list(ids) for ids in requests.blocks()] == BLOCKS
    assert requests.arrival.dtype == np.float64
    assert requests.prompt.dtype == requests.block_ids.dtype == np.int64  # type: ignore[union-attr]


def test_columns_are_read_only_and_the_callers_arrays_are_not_touched() -> None:
    mine = np.array([0.0, 0.5, 0.5, 2.0])
    requests = trace(arrival=mine)
    with pytest.raises(ValueError, match="read-only"):
        requests.arrival[0] = 1.0
    mine[0] = 0.25  # still the caller's to write


def test_no_blocks_and_no_requests() -> None:
    none = trace(block_ids=None, block_start=None, block_tokens=0)
    assert list(none.blocks()) == []
    assert none[1:3].block_ids is None
    empty = none[:0]
    assert len(empty) == 0
    assert empty.duration == 0.0


@given(st.integers(-6, 6), st.integers(-6, 6))
def test_a_slice_is_what_the_lists_would_give(first: int, last: int) -> None:
    part = trace()[first:last]
    assert list(part.prompt) == [1030, 700, 10, 512][first:last]
    assert [list(ids) for ids in part.blocks()] == BLOCKS[first:last]
    assert part.block_tokens == 512


def test_head_and_scaled() -> None:
    requests = trace()
    assert list(requests.head(2).generate) == [5, 1]
    assert len(requests.head(99)) == 4
    assert len(requests.head(-1)) == 0
    faster = requests.scaled(2.0)
    assert list(faster.arrival) == [0.0, 0.25, 0.25, 1.0]
    assert list(faster.prompt) == list(requests.prompt)
    assert [list(ids) for ids in faster.blocks()] == BLOCKS


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"arrival": np.array([0.0, 0.5, 0.4, 2.0])}, "arrival: descends"),
        ({"arrival": np.array([0.0, 0.5, np.nan, 2.0])}, "arrival: not finite"),
        ({"prompt": np.array([1, 0, 1, 1])}, "prompt: below 1"),
        ({"generate": np.array([1, 1, -3, 1])}, "generate: below 1"),
        ({"generate": np.array([1, 1])}, r"generate: shape \(2,\)"),
        ({"block_start": None}, "blocks: expected ids, starts"),
        ({"block_tokens": 0}, "blocks: expected ids, starts"),
        ({"block_tokens": -1}, "block_tokens: below 1"),
        ({"block_start": np.array([0, 3, 2, 5, 6])}, "block_start: expected ascending"),
        ({"block_start": np.array([0, 3, 5, 5, 5])}, "block_start: expected ascending"),
        ({"block_ids": np.array([0, 1, 2, 0, 1, -3])}, "block_ids: below 0"),
    ],
)
def test_what_it_refuses(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        trace(**changed)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_factor_is_a_positive_number(factor: float) -> None:
    with pytest.raises(InputError, match="rate factor"):
        trace().scaled(factor)


def test_a_slice_has_no_step() -> None:
    with pytest.raises(InputError, match="slice step"):
        trace()[::2]


def test_a_short_trace_is_repeated_until_its_load_has_settled() -> None:
    turns = np.array([-1, 0, -1, 2])
    some = Requests(np.array([0.0, 1.0, 2.0, 6.0]), np.full(4, 9), np.full(4, 2), parent=turns)
    again, copies = at_rate(some, 0.1)  # four in 40 s, of the two minutes that it takes
    assert copies == 3
    assert again.arrival[:5] == pytest.approx([0.0, 5.0, 10.0, 30.0, 40.0])
    assert again.parent is not None
    assert again.parent.tolist() == [-1, 0, -1, 2, -1, 4, -1, 6, -1, 8, -1, 10]
    assert at_rate(some, 0.01)[1] == 1
