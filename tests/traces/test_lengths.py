"""Lengths without a trace: what an option says, and what is drawn from it."""

import numpy as np
import pytest

from kvsim.errors import InputError
from kvsim.inputs import Range, parse_token_lengths
from kvsim.traces.lengths import choose_lengths, draw_lengths

TOKENS = Range(1, 10**7, "tokens")
SAID = {
    "2048": ("mean", 2048, 0),
    "4k": ("mean", 4000, 0),
    "512-4096": ("range", 512, 4096),
    "700/4k": ("percentiles", 700, 4000),
    "sample:chat": ("sample", 0, 0),
}


@pytest.mark.parametrize("text", SAID)
def test_an_option_says_lengths(text: str) -> None:
    found = parse_token_lengths("--prompt", text, TOKENS)
    assert (found.kind, found.first, found.second) == SAID[text]
    assert parse_token_lengths("--prompt", str(found), TOKENS) == found


@pytest.mark.parametrize(
    "text", ["", "0", "4k-", "-5", "9-3", "a,b", "1/2/3", "0-5", "1e99", "5 6", "chat", "nan"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--prompt"):
        parse_token_lengths("--prompt", text, TOKENS)


@pytest.mark.parametrize(
    ("prompt", "mean", "p95"),
    [
        ("2048", 2048, None),
        ("512-4096", 2304, 3917),
        ("700/4k", None, 4000),
        ("sample:chat", None, None),
    ],
)
def test_draws_have_the_mean_and_the_tail(
    prompt: str, mean: float | None, p95: float | None
) -> None:
    one, other = (parse_token_lengths("--prompt", text, TOKENS) for text in (prompt, "128"))
    found, answers = draw_lengths(choose_lengths(one, other), 2000)
    assert answers.mean() == pytest.approx(128, rel=0.02)
    assert mean is None or found.mean() == pytest.approx(mean, rel=0.02)
    assert p95 is None or np.quantile(found, 0.95) == pytest.approx(p95, rel=0.02)


def test_no_sequence_exceeds_the_context_and_the_mean_stays() -> None:
    one, other = (parse_token_lengths("--prompt", text, TOKENS) for text in ("2048", "128"))
    prompt, generate = draw_lengths(choose_lengths(one, other), 2000, 4096)
    assert (prompt + generate).max() <= 4096
    assert prompt.mean() == pytest.approx(2048, rel=0.02)
    prompt, generate = draw_lengths(choose_lengths(other, one), 2000, 2200)
    assert (generate.max(), (prompt + generate).max()) == (2199, 2200)  # a prompt has a token


def test_equal_lengths() -> None:
    one, other = (parse_token_lengths("--prompt", text, TOKENS) for text in ("2048", "1"))
    prompt, generate = draw_lengths(choose_lengths(one, other, equal=True), 50)
    assert set(prompt) == {2048}
    assert set(generate) == {1}
    ranged = parse_token_lengths("--prompt", "5-9", TOKENS)
    with pytest.raises(InputError, match="--lengths equal"):
        choose_lengths(ranged, ranged, equal=True)


def test_an_unknown_sample_names_those_there_are() -> None:
    asked = parse_token_lengths("--prompt", "sample:nosuch", TOKENS)
    with pytest.raises(InputError, match="chat"):
        choose_lengths(asked, asked)
