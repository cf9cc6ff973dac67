"""The plain simulator's own pieces by hand: what the compiled one must equal has to be right."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvsim.serving.simulate import simulate
from kvsim.serving.world import limits_of
from kvsim.traces.requests import Requests
from tests.support.plain.memory import PlainRequest, PlainSequence, line, plane
from tests.support.plain.scheduler import PlainReplica, simulate_plainly
from tests.support.served import compare, tables_of

ONE = Requests(np.zeros(1), np.array([64]), np.array([9]), np.array([0, 1]), np.array([0, 2]), 32)


def replica(**rules: Any) -> PlainReplica:
    base = tables_of("full", 8, 128, "chunked")
    costs = base.with_rules(replace(base.rules, blocks=100, prefix_caching=True, **rules))
    return PlainReplica(costs.tables, limits_of(costs, ONE))


def request(prompt: int, generate: int = 9, arrival: float = 0.0) -> PlainRequest:
    return PlainRequest(0, arrival, prompt, generate, 1.0, [])


def test_lines_go_on_beyond_their_last_node() -> None:
    nodes, values = np.array([1.0, 2.0, 4.0]), np.array([10.0, 20.0, 50.0])
    assert [line(nodes, values, at) for at in (1, 1.5, 3, 4, 6)] == [10, 15, 35, 50, 80]
    table = np.array([[0.0, 10.0], [100.0, 130.0]])
    assert plane(np.array([0.0, 1.0]), np.array([0.0, 2.0]), table, 2.0, 4.0) == 160.0 + 140.0


def test_prompts_to_read_count_without_the_blocks_that_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hundred tokens wait; four blocks of 16 tokens of the newcomer's prompt are here."""
    r = replica()
    r.waiting.append(request(100))
    monkeypatch.setattr(r, "found_blocks", lambda newcomer: 4)
    assert r.score(request(80), "least-to-read") == (100 - 64, 1)
    assert r.score(request(80), "prefix-aware") == (-4, 1)
    assert r.score(request(80), "least-loaded") == (0, 1)


def test_a_swapped_sequence_comes_back_with_all_its_tokens_but_the_newest() -> None:
    """47 of the prompt and two generated, the second of which is not cached: three blocks hold it.

    The round after needs the fourth.
    """
    r = replica(preemption="swap", host_cache=1e9)
    back = request(47, 9)
    back.made, back.left, r.host_swapped = 2, 7, 10**9
    before = r.host_swapped
    assert r.swap_in(back)
    (sequence,) = r.batch
    assert (sequence.length, sequence.growth) == (48, 1.0)
    assert sequence.held == r.t.gpu_bytes[4]
    size = int(r.t.gpu_bytes[3])
    assert before - r.host_swapped == size
    assert r.copying == pytest.approx(size / r.t.h2d)


def test_no_pass_begins_at_the_end_of_the_time() -> None:
    r = replica()
    r.receive(request(20, arrival=1.5), 0)
    r.advance(1.5)
    assert (r.passes, r.clock) == (0, 1.5)
    r.advance(np.nextafter(1.5, 2.0))
    assert r.passes == 1 and r.clock > 1.5


def test_what_is_left_of_a_preempted_sequence_is_found_once() -> None:
    """Of 40 tokens two blocks are full; the second has given way."""
    r, back = replica(), request(40)
    sequence = PlainSequence(back, 0, 40, 0, held=3 * r.each, length=40.0)
    r.batch.append(sequence)
    r.drop(sequence)
    assert [block.key for block in r.unused] == [("own", 0, 1), ("own", 0, 0)]
    r.forget(r.unused.pop(0))
    assert len(r.hits(back, 2)) == 1
    r.waiting.append(back)
    r.budget = 128
    assert r.begin()
    assert r.batch[0].done == 16 and not r.unused and not r.hits(back, 2)


def test_a_single_token_that_is_stored_is_loaded() -> None:
    """Prompts of two tokens in blocks of one: the last is always read, the first is loaded."""
    count = 4
    ids = np.array([0, 1, 2, 3, 0, 1, 2, 3])
    requests = Requests(
        np.arange(float(count)) * 10, np.full(count, 2), np.full(count, 2), ids,
        np.arange(count + 1) * 2, 1,
    )  # fmt: skip
    base = tables_of("full", 8, 128, "chunked")
    rules = replace(base.rules, block_tokens=1, blocks=3, prefix_caching=True, host_cache=1e9,
                    prefix_load="load")  # fmt: skip
    costs = replace(base, rules=rules, longest=16, longest_prompt=8).with_density(2)
    rate = np.ones(count)
    limits = limits_of(costs, requests)
    expected, (fleet,) = simulate_plainly(requests, costs, limits, 1, "round-robin", rate)
    assert [r.hits for r in expected] == [0, 0, 1, 1]
    assert fleet.whose["host"] == 2
    compare(simulate(requests, costs, rate=rate).progress, expected, "two tokens")
