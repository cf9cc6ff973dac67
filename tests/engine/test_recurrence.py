"""Work of layers with a state, counted from the recurrences that papers write down."""

import pytest

from kvsim.engine.recurrence import _convolution, _scan, _steps
from kvsim.graph import Point
from kvsim.models.kinds import Recurrence, Rule
from kvsim.prediction.memory import prefill_point

HEADS, VALUES, KEYS, CHUNK = 2, 8, 4, 64


def mixer(rule: Rule, taps: int = 0) -> Recurrence:
    return Recurrence(rule, HEADS, VALUES, KEYS, HEADS, taps, chunk=CHUNK)


@pytest.mark.parametrize(("rule", "each"), [("decay", 1 + 2 + 2), ("delta", 2 + 1 + 2 + 2)])
def test_a_step_updates_and_reads_every_number_of_the_state(rule: Rule, each: int) -> None:
    """S = a S + k v, o = q S: a product to fade, products and sums to add and to read.

    The delta rule first reads what the state recalls of the key: v - k S.
    """
    op = _steps(mixer(rule), Point(3.0, 100.0, 2.0, 100.0, 200.0))
    tokens, state = 3 * 2, HEADS * VALUES * KEYS
    assert op.flops == tokens * state * each
    through = 2 * tokens * (HEADS * VALUES + 2 * HEADS * KEYS + HEADS * VALUES)
    assert op.bytes["hbm"] == mixer(rule).matrix_bytes * (3 + tokens) + through


@pytest.mark.parametrize(("rule", "keys", "values"), [("decay", 1, 1), ("delta", 3, 2)])
def test_a_prompt_is_attention_within_chunks_and_states_between(
    rule: Rule, keys: int, values: int
) -> None:
    """Within: scores and what they weigh, the delta rule's keys and inverse; between: in, out."""
    op = _scan(mixer(rule), prefill_point(3.0, 128.0, 1.0))
    within = HEADS * (2 * CHUNK * KEYS * keys + 2 * CHUNK * VALUES * values)
    between = HEADS * (2 * KEYS * VALUES + 2 * KEYS * VALUES)
    assert op.flops == 3 * 128 * (within + between)
    states = 2 * mixer(rule).matrix_bytes * (3 * 128 / CHUNK + 3)
    through = 2 * 2 * 3 * 128 * (HEADS * VALUES + 2 * HEADS * KEYS + HEADS * VALUES)
    assert op.bytes["hbm"] == states + through


def test_a_convolution_keeps_all_tokens_it_spans_but_the_newest() -> None:
    r = mixer("decay", taps=4)
    op = _convolution(r, Point(3.0, 100.0, 1.0, 100.0, 200.0))
    width = HEADS * VALUES + 2 * HEADS * KEYS
    assert op.flops == 2 * 3 * width * 4
    plain = _convolution(mixer("decay", taps=1), Point(3.0, 100.0, 1.0, 100.0, 200.0))
    each = (op.bytes["hbm"] - plain.bytes["hbm"]) / (3 * width * 3)
    assert plain.bytes["hbm"] == 2 * 2 * 3 * width and each in (4, 8)  # read and written
