"""``kvsim simulate`` through the command line."""

import pytest

from kvsim.api.simulations import Sought
from tests.support.commands import run

BASE = ("simulate", "--model", "llama3.1-8b", "--gpu", "h100")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trace", "sample:chat", "--route", "random"), "--route"),
        (("--trace", "sample:chat", "--out", "x.csv"), "--out"),
        (("--trace", "sample:chat", "--gpu-memory", "10"), "leave no KV cache"),
        (("--trace", "sample:chat", "--technique", "quantspec", "--max-tokens", "2"), "--max-tok"),
        (
            ("--trace", "sample:conversation", "--technique", "streamingllm", "--prefix-caching"),
            "--prefix-caching",
        ),
        (("--trace", "sample:chat", "--find", "rate"), "--find: no target"),
        (("--trace", "sample:chat", "--find", "x", "--ttft", "2s"), "--find: got"),
        (("--trace", "sample:chat", "--find", "hit-rate", "--ttft", "2s"), "hit-rate: needs"),
        (
            ("--trace", "sample:chat", "--find", "host-cache", "--ttft", "2s"),
            "use a trace that has hash blocks",
        ),
        (
            ("--trace", "sample:chat", "--find", "prefill-replicas", "--ttft", "2s"),
            "got --replicas 1; expected 2 to 17",
        ),
        (
            ("--trace", "sample:chat", "--find", "rate", "--ttft", "2s", "--max-seqs", "8,16"),
            "--find: several runs",
        ),
    ],
)
def test_bad_input_gets_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = run(*BASE, *arguments)
    assert done.code == 2
    assert len(done.err.strip().splitlines()) == 1
    assert message in done.err
    assert not done.out


@pytest.mark.parametrize(
    ("sought", "limit", "found"),
    [
        (Sought("rate", 1.0, 1 / 1024, 1024.0, False), 3.3, 3.3),
        (Sought("rate", 1.0, 1 / 1024, 1024.0, False), 0.02, 0.02),
        (Sought("rate", 1.0, 1 / 1024, 1024.0, False), 1e-9, None),
        (Sought("replicas", 1, 1, 10_000, True, 1), 37, 37),
        (Sought("replicas", 5, 1, 10_000, True, 1), 1, 1),
        (Sought("hit_rate", 0.5, 0.0, 0.99, True, 0.01), 0.37, 0.37),
        (Sought("hit_rate", 0.5, 0.0, 0.99, True, 0.01), 0.0, 0.0),
        (Sought("hit_rate", 0.5, 0.0, 0.99, True, 0.01), 2.0, None),
    ],
)
def test_what_just_keeps_the_targets_is_found(
    sought: Sought, limit: float, found: float | None
) -> None:
    """Whole numbers exactly, others to 2 %, in a few plays."""
    tried = list[float]()

    def keeps(value: float) -> bool:
        tried.append(value)
        return value >= limit - 1e-9 if sought.easier else value <= limit

    value = sought.search(keeps).found
    assert value == (None if found is None else pytest.approx(found, rel=0.02))
    assert len(set(tried)) == len(tried) <= 20
    if value is not None:
        assert value in sought.search(keeps).choose(sorted(set(tried)))
