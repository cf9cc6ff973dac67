"""Times, token counts and lists as users type them."""

import pytest

from kvsim.cli.arguments import seconds, tokens, words
from kvsim.errors import InputError


@pytest.mark.parametrize(
    ("text", "expected"),
    [("500ms", 0.5), ("2s", 2.0), ("2", 2.0), ("0.05", 0.05), ("1e-6", 1e-6), ("3 min", 180.0),
     (" 250 us ", 2.5e-4), ("none", float("inf")), ("1e3ms", 1.0)],
)  # fmt: skip
def test_times_have_units(text: str, expected: float) -> None:
    assert seconds("--ttft", text, most_bare=60) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("text", ["50", "1.5", "1e3"])
def test_a_bare_number_that_may_be_milliseconds_is_asked_about(text: str) -> None:
    with pytest.raises(InputError, match=f"--tpot: .*write {text}ms or {text}s"):
        seconds("--tpot", text, most_bare=1)


@pytest.mark.parametrize("text", ["", "x", "-1s", "0ms", "1h", "1.2.3s", "nan", "inf", "1e99s"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"--ttft: got .* as 500ms or 2s, or none"):
        seconds("--ttft", text, most_bare=60)


def test_tokens_are_read_as_vllm_reads_them() -> None:
    read = [tokens("--prompt", text) for text in ("4096", "4k", "4K", "1.5k", "1M")]
    assert read == [4096, 4000, 4096, 1500, 1048576]
    with pytest.raises(InputError, match="4k \\(4,000\\) or 4K \\(4,096\\)"):
        tokens("--prompt", "32kb")
    with pytest.raises(InputError, match=r"1\.0001k' is 1000\.1 tokens"):
        tokens("--prompt", "1.0001k")


def test_words() -> None:
    assert words("--only", "full, KVPR,full") == ["full", "kvpr"]
    with pytest.raises(InputError, match="--tp: got '3'; expected one of auto, 1, 2"):
        words("--tp", "1,3", ("auto", "1", "2"))
    with pytest.raises(InputError, match="separated by commas"):
        words("--tp", "1,,2")
