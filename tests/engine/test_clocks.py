"""What a timeline remembers of layers that it did not play one by one."""

from dataclasses import replace

import numpy as np
import pytest

from kvsim.engine.timeline import History, State, Timed, join_ops
from kvsim.graph import Number, Op


def test_skipped_layers_end_a_shift_later_per_block() -> None:
    """Two layers per block, 5 s per block: layers 4 to 9 repeat what layers 2 and 3 did."""
    ends = History()
    ends.values = {0: 1.0, 1: 4.0, 2: 7.0, 3: 8.5, 10: 99.0}
    ends.jumps.append((range(4, 10), 2, 5.0))
    found = [ends[i] for i in range(11)]
    assert found == [1.0, 4.0, 7.0, 8.5, 12.0, 13.5, 17.0, 18.5, 22.0, 23.5, 99.0]


def test_a_later_jump_is_counted_from_its_own_block() -> None:
    ends = History()
    ends.values = {0: 2.0, 4: 30.0}
    ends.jumps = [(range(1, 4), 1, 0.5), (range(5, 7), 1, np.array([1.0, 2.0]))]
    assert [ends[i] for i in (1, 3)] == [2.5, 3.5]
    assert ends[5].tolist() == [31.0, 32.0]  # type: ignore[union-attr]
    assert ends[6].tolist() == [32.0, 34.0]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("layers", "most", "expected"),
    [(range(4, 10), 5.0, True), (range(4, 10), 4.9, False), (range(3, 10), 9.0, False)],
)
def test_growth_is_known_where_all_layers_were_skipped_at_once(
    layers: range, most: float, expected: bool
) -> None:
    ends = History()
    ends.jumps.append((range(4, 10), 2, 5.0))
    assert ends.keeps_up(layers, most) is expected


@pytest.mark.parametrize(
    ("first", "start", "end"),
    [
        (4.0, 0.0, 24.0),
        (4.0, 30.0, 38.0),
        (50.0, 0.0, 64.0),
        (np.array([4.0, 50.0]), 0.0, [24, 64]),
    ],
)
def test_ops_in_a_row_end_as_one_by_one(first: Number, start: float, end: Number) -> None:
    """The host issues each in 10 s: the second, of 4 s, starts after 20 s or behind the first."""
    op = Op("first", fixed=1.0)
    one = Timed(op, first, True, (), 10.0, 10.0)
    both = join_ops(one, Timed(replace(op, name="then"), 4.0, True, (), 10.0, 10.0))
    assert both.host == 20.0 and both.op.name == "then"
    assert np.all(np.maximum(start, both.lead) + both.duration == end)


def test_a_load_keeps_the_ends_of_the_latest_two_layers_that_have_it() -> None:
    state = State({"gpu": 0.0})
    for i in range(1, 4):
        state.ends = [*state.ends[1:], {"attn": 10.0 * i, "topk": 1.0 * i}]
        state.loaded(["load"] if i != 2 else ["load", "other"], {"attn"})
    assert state.loads == {"load": [{"attn": 20.0}, {"attn": 30.0}], "other": [{"attn": 20.0}]}
    assert state.recent({"topk"}) == [{"topk": 1.0}, {"topk": 2.0}, {"topk": 3.0}]
    state.shift(5.0, 2.0, {"topk"}, {"gpu"})
    assert state.streams == {"gpu": 5.0} and state.host == 2.0
    assert state.ends == [{"topk": 6.0}, {"topk": 7.0}, {"topk": 8.0}]
    assert state.loads["load"] == [{"attn": 25.0}, {"attn": 35.0}]
