"""When the ops of a layer run: a copy beside kernels, and what began in the step before."""

import numpy as np
import pytest

from kvsim.engine.timeline import (
    OpSpan,
    copy_overlap,
    minimum_layer_seconds,
    op_spans,
    steady_seconds,
)
from kvsim.graph import Group, Op, Step
from tests.engine.test_timeline import toy


def layer(copied: float) -> tuple[Op, ...]:
    """A kernel of 4 us, a copy that waits for it, and a kernel of 2 us that waits for the copy."""
    return (
        Op("first", bytes={"hbm": 4000.0}),
        Op("load", "h2d", "copy", bytes={"h2d": copied}, after=("first",)),
        Op("then", bytes={"hbm": 2000.0}, after=("load",)),
    )


def times(found: list[OpSpan], name: str) -> list[tuple[float, float]]:
    return [(round(1e9 * s.begin), round(1e9 * s.end)) for s in found if s.name == name]


def test_every_layer_is_seen_in_order() -> None:
    step = Step((Group((layer(1000.0),), 2),), (Op("head", bytes={"hbm": 500.0}),))
    found = op_spans(step, toy())
    assert times(found, "first") == [(0, 4000), (7000, 11000)]
    assert times(found, "load") == [(4000, 5000), (11000, 12000)]
    assert times(found, "then") == [(5000, 7000), (12000, 14000)]
    assert times(found, "head") == [(14000, 14500)]
    assert steady_seconds(step, toy()) == pytest.approx(14.5e-6)
    assert all(s.stream == ("h2d" if s.name == "load" else "gpu") for s in found)


def test_the_share_of_copies_beside_work() -> None:
    copies = [OpSpan("h2d", "load", 1.0, 4.0), OpSpan("d2h", "store", 8.0, 9.0)]
    busy = [
        OpSpan("gpu", "a", 0.0, 2.0),
        OpSpan("gpu", "b", 3.5, 8.5),
        OpSpan("cpu", "c", 2.0, 3.0),
    ]
    assert copy_overlap([*copies, *busy]) == (1.0 + 0.5 + 0.5) / 4.0
    assert copy_overlap([*copies, *busy], "cpu") == 1.0 / 4.0
    assert np.isnan(copy_overlap(busy))


def test_the_least_of_a_layer_leaves_out_what_may_run_before_it() -> None:
    early = (
        Op("load", "h2d", "copy", bytes={"h2d": 3000.0}),
        Op("use", bytes={"hbm": 4000.0}, after=("load",)),
    )
    assert minimum_layer_seconds(early, toy()) == pytest.approx(4e-6)
    assert minimum_layer_seconds(layer(3000.0), toy()) == pytest.approx(9e-6)
