"""Traffic that is described, not recorded: lengths, rates, users, and what prompts repeat."""

import numpy as np
import pytest

from kvsim.errors import InputError
from kvsim.inputs import parse_token_lengths
from kvsim.traces.lengths import choose_lengths
from kvsim.traces.requests import Requests
from kvsim.traces.statistics import leading_hits
from kvsim.traces.workload import DrawnTraffic


def drawn(prompt: str = "3k", generate: str = "500", **more: object) -> Requests:
    lengths = choose_lengths(
        parse_token_lengths("--prompt", prompt), parse_token_lengths("--generate", generate)
    )
    return DrawnTraffic(lengths, **{"longest": 131_072, **more}).draw(1)  # type: ignore[arg-type]


def hits(requests: Requests) -> float:
    found = np.minimum(leading_hits(requests) * requests.block_tokens, requests.prompt)
    return float(found.sum() / requests.prompt.sum())


def test_no_request_is_longer_than_the_model_takes() -> None:
    some = drawn("8k", "2k", rate=50, longest=9_000)
    assert (some.prompt + some.generate).max() <= 9_000


@pytest.mark.parametrize("burst", [1.0, 3.0])
def test_arrivals_have_the_rate_and_the_bursts(burst: float) -> None:
    some = drawn(rate=20, burst=burst, hours=2)
    gaps = np.diff(some.arrival)
    assert len(some) / some.duration == pytest.approx(20, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(burst, rel=0.05)


def test_prompts_repeat_what_was_asked() -> None:
    assert hits(drawn(rate=5, hit_rate=0.7)) == pytest.approx(0.7, abs=0.01)
    common = drawn("4k-6k", rate=5, cached=1600)
    assert hits(common) == pytest.approx(1600 / 5000, abs=0.01)


def test_conversations_repeat_themselves_and_keep_the_mean_and_the_rate() -> None:
    some = drawn("4k-6k", "100-300", rate=5, turns=5, think=10.0, hours=1)
    assert some.prompt.mean() == pytest.approx(5000, rel=0.05)
    assert len(some) / some.duration == pytest.approx(5, rel=0.05)
    assert some.parent is not None and hits(some) > 0.5


def test_users_wait_for_their_answers() -> None:
    some = drawn(users=40, think=20.0)
    assert some.parent is not None and some.think is not None
    assert (some.parent < 0).sum() == 40
    assert some.think[some.parent >= 0].mean() == pytest.approx(20, rel=0.1)


def test_answers_longer_than_prompts_leave_no_room_for_turns() -> None:
    with pytest.raises(InputError, match="--turns"):
        drawn("100", "5k", rate=5, turns=5)


def test_the_same_seed_gives_the_same_traffic() -> None:
    first, again = drawn(rate=5, turns=3), drawn(rate=5, turns=3)
    assert (first.arrival == again.arrival).all() and (first.prompt == again.prompt).all()
