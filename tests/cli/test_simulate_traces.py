"""``kvsim simulate`` on traces of all kinds: read with options, bad, too large, with prefixes."""

from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsim import techniques
from kvsim.errors import InputError
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.serving.costs import StepCosts
from kvsim.serving.outcome import faults
from kvsim.serving.rules import PREFIX_LOADS, Rules
from kvsim.serving.simulate import draw_rates, find_acceptance, simulate, with_acceptance
from kvsim.traces.attention import GAMMAS, Acceptance, AttentionTrace, write
from kvsim.traces.read import load
from tests.support.bad_traces import azure
from tests.support.commands import run
from tests.support.envelope import answer_in, own_fields
from tests.support.places import SHARED

TRACES = SHARED / "traces"
BASE = ("simulate", "--model", "llama3.1-8b", "--gpu", "h100", "--trace")
REACHED = tuple(tuple(0.9 * 0.8**k for k in range(gamma)) for gamma in GAMMAS)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text("when,asked,said\n0,100,10\n5,0,10\n10,200,20\n4,50,5\n20,9,999\n")
    return path


def test_a_trace_of_any_layout_is_read_as_kvsim_traces_reads_it(trace: Path) -> None:
    named = ("--columns", "arrival=when,prompt=asked,generate=said", "--time-unit", "ms")
    done = run(*BASE, str(trace), *named, "--skip-bad", "--sort", "--json")
    assert done.code == 0, done.err
    assert "omitted 1 rows [least]" in done.err
    assert answer_in(done.out)["requests"] == 4
    for options, words in [
        (named, "line 3|asked|[rule: least]"),
        ((*named, "--skip-bad"), "--sort"),
        ((*named, "--hash-block-tokens", "0"), "--hash-block-tokens|from 1 to 1,000,000 [tokens]"),
        (("--format", "azur"), "unknown trace format|azure"),
    ]:
        done = run(*BASE, str(trace), *options)
        assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1), done.err
        assert all(word in done.err for word in words.split("|")), done.err


def test_requests_larger_than_the_cache_are_refused_and_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(azure("2023-11-16 18:15:42.1,5000,6", "2023-11-16 18:15:42.2,9,7000"))
    done = run(*BASE, str(path), "--blocks", "100", "--check")
    assert done.code == 0, done.err
    said = "2 requests refused: larger than the KV cache (numbers 3, 4 in order of arrival)"
    assert said in " ".join(done.out.split())
    answer = answer_in(run(*BASE, str(path), "--blocks", "100", "--json").out)
    assert (answer["finished"], answer["refused"], answer["refused_rows"]) == (4, 2, [3, 4])


@pytest.mark.skipif(not TRACES.is_dir(), reason="the Mooncake trace is not here")
def test_an_infinite_cache_hits_the_prefix_blocks_that_a_plain_count_finds() -> None:
    requests = load(str(TRACES / "mooncake_conversation_trace.jsonl")).requests
    d = Deployment(load_model("llama3.1-8b"), load_hardware("h100"), load_stack("fused"))
    # one at a time: several arrive at the same instant and could not use each other's blocks
    rules = Rules(max_seqs=1, blocks=10**8, block_tokens=512, prefix_caching=True)
    longest = int((requests.prompt + requests.generate).max())
    costs = StepCosts(techniques.parse("full"), d, rules, longest, int(requests.prompt.max()))
    played = simulate(requests, costs)
    hits = int((-(-played.progress.hits // 512)).sum())
    seen: set[int] = set()
    expected = total = 0
    for prompt, ids in zip(requests.prompt.tolist(), requests.blocks(), strict=True):
        blocks = ids.tolist()
        full = blocks[: prompt // 512]  # a block that is partly filled is not shared
        new = next((k for k, block in enumerate(full) if block not in seen), len(full))
        expected, total = expected + new, total + len(blocks)
        seen.update(full)
    assert hits == expected
    assert round(100 * hits / total, 1) == 36.6
    assert faults(played) == []


def measurement(technique: str = "quantspec") -> AttentionTrace:
    acceptance = (Acceptance(technique, 0.0, 1000, REACHED),)
    return AttentionTrace(
        "llama3.1-8b", "w", "t", 100, "fp32", 32, date(2026, 11, 1), 5.0, acceptance=acceptance
    )


def test_auto_keeps_the_best_way_to_load_prefixes() -> None:
    where = ("simulate", "--model", "llama3.1-8b", "--gpu", "l40s", "--trace",
             "sample:conversation", "--prefix-caching", "--host-cache", "150",
             "--json")  # fmt: skip

    def played(way: str) -> Any:
        return own_fields(answer_in(run(*where, *(("--prefix-load", way) if way else ())).out))

    each = {way: played(way)["ttft_s"]["mean"] for way in PREFIX_LOADS}
    best = played("auto")
    assert played("") == best  # unless another way is given
    assert best["ttft_s"]["mean"] == min(each.values()) < max(each.values())
    assert each[best["prefix_load"]] == min(each.values())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("--prefix-load", "auto"), "has no effect without --host-cache"),
        (("--host-cache", "20", "--prefix-load", "best"), "got 'best'; expected split, faster"),
    ],
)
def test_ways_to_load_nothing_are_refused(given: tuple[str, ...], expected: str) -> None:
    found = run(*BASE, "sample:conversation", "--prefix-caching", *given)
    assert found.code == 2 and expected in found.err


def test_accepted_drafts_come_from_a_trace_at_their_mean_or_drawn(tmp_path: Path) -> None:
    path = tmp_path / "attention.json"
    write(path, measurement())
    common = (*BASE, "sample:chat", "--technique", "quantspec:gamma=3", "--json")
    published = answer_in(run(*common).out)
    mean = answer_in(run(*common, "--acceptance", str(path)).out)
    accepted = sum(REACHED[2]) / 3
    assert f"acceptance={accepted:.6g}"[:18] in mean["technique"]
    assert mean["output_tok_s"] != published["output_tok_s"]
    drawn = [
        answer_in(run(*common, "--acceptance", str(path), "--draw-acceptance", seed).out)
        for seed in ("1", "1", "2")
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0]["tpot_s"]["mean"] == pytest.approx(mean["tpot_s"]["mean"], rel=0.1)
    plain = run(*BASE, "sample:chat", "--acceptance", str(path), "--json")
    assert answer_in(plain.out)["technique"] == "full"
    for spec, words in [
        ("quantspec:acceptance=0.5", "omit one"),
        ("quantspec:gamma=9", "gamma 9 was not measured"),
        ("magicdec", "was not measured; the file has"),
    ]:
        done = run(*BASE, "sample:chat", "--technique", spec, "--acceptance", str(path))
        assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1), done.err
        assert words in done.err


def test_drawn_rounds_yield_what_was_measured() -> None:
    kind = techniques.parse("quantspec:gamma=4")
    measured = find_acceptance(kind, measurement())
    assert measured is not None
    d = Deployment(load_model("llama3.2-1b"), load_hardware("rtx4090"), load_stack("fused"))
    costs = StepCosts(with_acceptance(kind, measured), d, Rules(), 2000, 100)
    assert costs.rate == pytest.approx(measured.tokens(4))
    rates = draw_rates(costs, np.full(300, 1001), 5, measured)
    assert rates.mean() == pytest.approx(costs.rate, rel=0.01)
    assert rates.std() > 0
    with pytest.raises(InputError, match="was not measured"):
        find_acceptance(techniques.parse("quantspec:residual=512"), measurement())


def test_sessions_and_clients_that_hang_up(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("t,i,o,s\n0,900,400,1\n0.1,900,40,1\n0.2,900,40,2\n")
    names = "arrival=t,prompt=i,generate=o"
    plain = answer_in(run(*BASE, str(path), "--columns", names, "--json").out)
    turns = (str(path), "--columns", f"{names},session=s")
    after = answer_in(run(*BASE, *turns, "--json", "--check").out)
    assert after["duration_s"] > 1.05 * plain["duration_s"]
    short = run(*BASE, *turns, "--abort-after", "300ms", "--check")
    assert "2 aborted, with the turns that would have followed them." in short.out
    apart = ("--replicas", "2", "--prefill-replicas", "1")
    parted = answer_in(run(*BASE, *turns, *apart, "--json", "--check").out)
    assert parted["duration_s"] > 1.05 * plain["duration_s"]
    short = run(*BASE, *turns, *apart, "--abort-after", "300ms", "--check")
    assert "aborted, with the turns that would have followed them." in short.out
    for options, words in [
        (("--abort-after", "none"), "--abort-after: none has no effect"),
        (("--abort-after", "soon"), "--abort-after: got 'soon'"),
    ]:
        done = run(*BASE, *turns, *options)
        assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1), done.err
        assert words in done.err
