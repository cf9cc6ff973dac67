"""Drafts in chains, trees and blocks: what is verified, what a round costs, what is accepted."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest

from kvsim.errors import InputError
from kvsim.graph import Point
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Stack
from kvsim.machines.profiles import load_hardware, load_stack, with_numbers
from kvsim.models.configs import load_model
from kvsim.prediction.breakeven import gains_by_batch
from kvsim.prediction.generate import Prediction
from kvsim.report.predict import draft_gains
from kvsim.techniques import parse
from kvsim.techniques.acceptance import (
    TASKS,
    find_accepted,
    load_summaries,
    position_shares,
    published,
)

POINT = Point(4.0, 1000.0, 1.0, 1000.0, 1200.0)


def place(model: str = "llama3.1-8b", stack: Stack | None = None) -> Deployment:
    return Deployment(load_model(model), load_hardware("h200"), stack or load_stack("sglang"))


@pytest.mark.parametrize(
    ("text", "verified", "passes"),
    [
        ("eagle3:gamma=3,acceptance=0.5", 4, 3),
        ("eagle3:gamma=5,acceptance=0.5,width=3,verify=6", 6, 5),
        ("eagle2:acceptance=0.5", 61, 6),
        ("p-eagle:gamma=7,acceptance=0.5", 8, 1),
        ("dflash:acceptance=0.2", 16, 1),
        ("medusa", 64, 1),
        ("lookahead:acceptance=0.3", 121, 0),
        ("suffix:gamma=8,acceptance=0.3", 9, 0),
        ("draft:model=llama3.2-1b,gamma=2,acceptance=0.5", 3, 2),
    ],
)
def test_a_round_drafts_in_passes_and_verifies_once(text: str, verified: int, passes: int) -> None:
    t, d = parse(text), place()
    cycle = t.cycle(d, POINT)
    assert len(cycle.steps) == passes + 1
    head = next(op for op in cycle.steps[-1].head if op.name == "lm_head")
    assert head.size == 4 * verified
    assert t.pass_width == verified


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("eagle:gamma=5,width=1,verify=9", "6 to 6"),
        ("eagle:gamma=5,width=2,verify=5", "6 to 19"),
        ("eagle:acceptance=0.5/0.8", "never rise"),
        ("eagle:acceptance=poems", "summary"),
    ],
)
def test_what_no_engine_takes_is_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse(text)


def test_an_ideal_round_costs_its_passes_alone() -> None:
    numbers = {"drafts.draft_s": 1e-3, "drafts.round_s": 2e-3, "drafts.tree_s": 4e-3,
               "drafts.sequence_s": 1e-4}  # fmt: skip
    plain, dear = load_stack("fused"), with_numbers(load_stack("fused"), numbers)
    for text, added in (
        ("eagle3:gamma=3,acceptance=0.5", 3e-3 + 2e-3 + 4e-4),
        ("eagle3:gamma=3,acceptance=0.5,width=2,verify=5", 3e-3 + 2e-3 + 4e-3 + 4e-4),
    ):
        fixed = []
        for stack in (plain, dear):
            steps = parse(text).cycle(place(stack=stack), POINT).steps
            fixed.append(sum(float(np.ravel(op.fixed)[0]) for s in steps for op in s.head))
        in_place = 3 * plain.time.step  # a draft pass is no step of the engine's own
        assert fixed[1] - fixed[0] == pytest.approx(added - in_place)


def test_tokens_of_one_sequence_share_experts() -> None:
    apart = load_stack("fused")
    alike = with_numbers(apart, {"drafts.shared_experts": 1.0})
    t = parse("eagle3:gamma=3,acceptance=0.5")

    def bytes_of_experts(stack: Stack, drafts: bool) -> float:
        d = place("qwen3-30b-a3b", stack)
        step = t.cycle(d, POINT).steps[-1] if drafts else t.forward(d, POINT)
        ops = (op for group in step.groups for layer in group.layers for op in layer)
        up = next(op for op in ops if op.name == "experts_up")
        weights = up.bytes["hbm"] - 2 * up.flops / 2 / up.columns / 2048 * (2048 + up.columns)
        return float(np.ravel(weights)[0])

    assert bytes_of_experts(alike, True) == pytest.approx(bytes_of_experts(apart, False), rel=1e-6)
    assert bytes_of_experts(apart, True) > 1.5 * bytes_of_experts(apart, False)


def test_shares_are_products_of_chances() -> None:
    for first, kept in ((0.8, 0.95), (0.56, 1.05), (1.0, 1.2)):
        slow, alive, chance = [], 1.0, first
        for _ in range(8):
            alive *= min(chance, 1.0)
            chance *= kept
            slow.append(alive)
        assert position_shares(first, kept, 8) == pytest.approx(slow, abs=1e-12)


def test_the_library_holds_summaries_that_fall_with_the_position() -> None:
    assert all((s.task in TASKS and s.rows > 1) or "to" in s.drafts for s in load_summaries())
    for method in {s.method for s in load_summaries()}:
        for task in TASKS:
            found = find_accepted(method, 16, task)
            assert found is not None and found.spread > 0
            assert all(
                0 <= b <= a <= 1 for a, b in zip(found.shares, found.shares[1:], strict=False)
            )
    own, others = (
        find_accepted("eagle3", 3, "code", **kw)
        for kw in ({"model": "kimi-k2"}, {"without": "kimi-k2"})
    )
    assert own is not None and others is not None
    assert own.spread < others.spread and "kimi-k2" in own.source
    assert find_accepted("lookahead", 3) is None
    assert published("kimi-k2", "eagle3", 1000.0) is not None


def test_an_assumed_acceptance_is_said_with_its_source() -> None:
    t = parse("eagle3:acceptance=math")
    assert "eagle3, average of" in t.assumes and "math" in t.assumes
    assert t.drafting.spread > 0 == parse("eagle3:acceptance=0.5").drafting.spread
    assert "as lookahead was not measured" in parse("lookahead").assumes
    assert parse("lookahead").drafting.spread > parse("ngram").drafting.spread
    other, measured = parse("draft"), parse("draft:model=vicuna-68m")
    assert other.drafting.spread > 2 * measured.drafting.spread
    assert "vicuna-68m" in other.assumes and other.drafting.accepted == measured.drafting.accepted


def test_engines_that_draft_chains_refuse_trees() -> None:
    for name in ("eagle2", "eagle3:width=4,verify=16"):
        assert "takes chains alone" in parse(name).refuses(place(stack=load_stack("vllm")))
        assert not parse(name).refuses(place())
    assert not parse("eagle2:width=1,verify=auto").refuses(place(stack=load_stack("vllm")))


def test_verifying_many_tokens_turns_from_gain_to_loss() -> None:
    p = Prediction(parse("dflash:acceptance=0.25"), place(), np.array([1.0]), 512, 256, contexts=2)
    found = gains_by_batch(p, parse("full"))
    assert found is not None and found.ratio[0] > 2 and found.crossings
    assert found.ratio[np.isfinite(found.ratio)][-1] < 1


def test_the_acceptance_from_which_drafts_gain_is_told() -> None:
    p = Prediction(parse("dflash:acceptance=0.25"), place(), np.array([1.0]), 512, 256, contexts=2)
    (row,) = draft_gains([p])
    crossed = [b for b, r in row["speedup"].items() if r < 1]
    assert crossed and all(row["least_acceptance"][b] > 0.25 for b in crossed)
    batch = max(row["speedup"], key=int)
    least = row["least_acceptance"][batch]
    even = Prediction(
        parse(f"dflash:acceptance={least:.6f}"), place(), np.array([1.0]), 512, 256, contexts=2
    )
    assert draft_gains([even])[0]["speedup"][batch] == pytest.approx(1, abs=0.06)


def test_shipped_rounds_meet_measured_ones() -> None:
    folder = os.environ.get("KVSIM_SHARED", "")
    if not folder:
        pytest.skip("KVSIM_SHARED names no folder of measured rows")
    from benchmarks import drafts

    with (Path(folder) / "measured" / "drafts.csv").open(newline="") as file:
        rows = [r for r in csv.DictReader(file) if r["source"] == "specbundle" and r["kvsim_model"]]
    cases = drafts._sglang(rows[::7])
    off = [abs(drafts.predict_speedup(c, {}) / c.speedup - 1) for c in cases]
    assert np.median(off) < 0.05 and np.quantile(off, 0.9) < 0.15
