"""What counts as evidence of a technique's loss, and what it admits."""

from dataclasses import replace
from math import isnan

import numpy as np
import pytest

from kvsim.models.configs import load_model
from kvsim.planner.question import Admission
from kvsim.quality.evidence import (
    UPPER,
    Evidence,
    Pooled,
    _bound_kind,
    _pool_others,
    _score,
    attention_kind,
    combine,
    evidence,
    weights_evidence,
)
from kvsim.quality.measured import family, harshness, published, runs_of, shipped
from kvsim.techniques import TECHNIQUES, parse
from kvsim.traces.attention import Retrieval, load, shipped_traces
from tests.support.shipped import SHIPPED

PUBLISHED = ("llama2-7b", "llama2-13b", "mistral-7b-v0.2", "llama3-8b")
CONTEXT = 8192
WELCOME = Admission(unmeasured=True)


def judged(text: str, model: str, length: float = CONTEXT) -> Evidence:
    return evidence(parse(text), load_model(model), length)


def evicting(name: str, share: float) -> str:
    kept = round(share * CONTEXT)
    return {
        "h2o": f"h2o:heavy={kept // 2},recent={kept - kept // 2}",
        "streamingllm": f"streamingllm:sink=4,recent={kept - 4}",
        "infllm": f"infllm:initial=0,local={kept // 2},k={kept // 256},block=128",
        "snapkv": f"snapkv:budget={kept}",
    }[name]


def test_tables_say_what_the_papers_say() -> None:
    rows = published()
    assert {r.source.split(",")[0] for r in rows} == {"KCache", "QuantSpec", "SpeCache", "ZipCache"}
    for r in rows:
        load_model(r.model)
        assert r.measure in ("score", "retrieval", "perplexity")
        assert 0 <= r.score <= 110 and 0 < r.baseline <= 110 and r.error >= 0
        assert r.setting.kind in {*TECHNIQUES, "packed on the host"}
    (row,) = [r for r in rows if r.source == "SpeCache, table 2" and r.score == 38.3]
    assert row.model == "mistral-7b-v0.2" and row.technique == "h2o at 0.25 of the context"
    assert row.loss == pytest.approx(1 - 38.3 / 42.3) and row.baseline == 42.3


@pytest.mark.parametrize("model", PUBLISHED)
@pytest.mark.parametrize("share", [0.125, 0.25])
@pytest.mark.parametrize("name", ["streamingllm", "infllm", "snapkv"])
def test_what_loses_much_or_is_not_measured_is_refused(name: str, share: float, model: str) -> None:
    assert judged(evicting(name, share), model).column > 0.05


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_loss_is_admitted_by_its_upper_end(model: str) -> None:
    found = judged("specache:bits=2,group=64,k=64", model)
    assert found.kind == "published" and found.low < found.loss < found.high
    assert found.bound == found.high and found.unit == "relative score"
    for limit in (0.9 * found.bound, 1.1 * found.bound):
        assert (found.column <= limit) is (limit > found.bound)
    assert "SpeCache" in found.source and "long generation" in found.untried


@pytest.mark.parametrize("model", ["llama3-8b", "mistral-7b-v0.2"])
def test_one_bit_is_not_admitted_on_the_mean_of_one_paper(model: str) -> None:
    found = judged("specache:bits=1,group=64,k=64", model)
    assert found.column > 0.05


def test_weights_are_held_to_the_same_rule() -> None:
    eight = weights_evidence(load_model("qwen3-8b"), "fp8")
    assert eight.column <= 0.02 and eight.kind == "published"
    other = weights_evidence(load_model("llama3-8b"), "fp8")
    assert other.kind == "published elsewhere" and other.bound > eight.bound
    assert weights_evidence(load_model("llama3.1-8b"), "int4").column > 0.02
    assert weights_evidence(load_model("deepseek-v3"), "fp8-block").kind == "lossless"


def test_h2o_at_a_quarter_is_refused_on_mistral() -> None:
    found = judged(evicting("h2o", 0.25), "mistral-7b-v0.2")
    assert found.kind == "published" and found.bound > 0.05
    assert WELCOME.loss(found) > 0.05  # --lossy does not admit what is known to be bad


def test_gentler_settings_inherit_and_harsher_do_not() -> None:
    base = judged("specache:bits=2,group=64,k=64", "llama3-8b")
    gentler = judged("specache:bits=4,group=32,k=256,residual=128", "llama3-8b")
    assert gentler.loss <= base.bound and not gentler.missing
    harsher = judged("specache:bits=2,group=128,k=16", "llama3-8b")
    assert harsher.missing and harsher.column > 0.05


def test_a_gentle_setting_that_fails_speaks_against_harsher_ones() -> None:
    # H2O at 0.25 loses 4 % of LongBench on Llama-3-8B, at 0.4 all of line retrieval
    found = judged(evicting("h2o", 0.25), "llama3-8b")
    assert found.loss == 1.0 and "line retrieval" in found.worst


def test_own_measurements_come_first_and_are_in_their_own_unit() -> None:
    found = judged("kivi:bits=4,group=32", "smollm2-135m", 1024)
    assert found.kind == "measured" and found.unit == "relative perplexity"
    assert found.loss == pytest.approx(12.4948 / 12.4433 - 1, rel=1e-3)
    assert 0 < found.high - found.loss < 0.02 and found.column <= 0.05
    assert judged("kivi:bits=2,group=32", "smollm2-135m", 1024).column > 0.05


def evicted(facts: int, full: float, share: float | None) -> Evidence:
    """H2O at half of the context, by the trace that ships but for what it finds of facts."""
    trace = load(shipped_traces()["smollm2-135m"])
    quality = tuple(replace(q, found=share) for q in trace.quality)
    told = None if share is None else Retrieval(facts, full)
    own = runs_of(replace(trace, quality=quality, retrieval=told))
    technique = parse("h2o:heavy=512,recent=512")
    return evidence(technique, load_model("smollm2-135m"), 1024, own)


def test_eviction_needs_retrieval() -> None:
    found = evicted(40, 0.8, None)
    assert found.loss < 0.05 and "retrieval" in found.missing
    assert found.column > 0.05
    assert WELCOME.loss(found) <= 0.05


def test_an_eviction_loses_what_it_no_longer_finds() -> None:
    found = evicted(40, 0.8, 0.6)
    assert found.unit == "of the planted facts" and found.loss == pytest.approx(0.25)
    spread = 1.96 * ((0.6 * 0.4 + 0.8 * 0.2) / 40) ** 0.5 / 0.8
    assert (found.low, found.high) == pytest.approx((0.25 - spread, 0.25 + spread))
    assert not found.missing and found.column > 0.05
    gentle = evicted(40, 0.8, 0.8)  # then perplexity counts, which grew a little
    assert gentle.unit == "relative perplexity" and gentle.column <= 0.05
    assert "retrieval" in evicted(40, 0.0, 0.0).missing  # the model itself finds none


def pooled(loss: float, error: float) -> Pooled:
    return Pooled("m", "a", "cache", "f", "short answers", loss, error, 9, 1, -1.0, "", "s")


def test_losses_of_other_models_are_a_prior_for_the_own() -> None:
    """Equal errors: the spread between models is their variance less that of a measurement."""
    losses, error = np.array([0.01, 0.03, 0.08, 0.02]), 0.01
    mean, spread = _pool_others([pooled(x, error) for x in losses])
    assert mean == pytest.approx(losses.mean())
    between = losses.var(ddof=1) - error**2
    assert spread == pytest.approx(between + losses.var(ddof=1) / 4, rel=1e-3)
    own = _bound_kind([pooled(0.2, 0.05)], [pooled(x, error) for x in losses])
    sharp = 1 / 0.05**2 + 1 / spread
    assert own is not None and own.loss == pytest.approx((0.2 / 0.05**2 + mean / spread) / sharp)
    assert own.bound == pytest.approx(own.loss + UPPER / sharp**0.5)


def test_losses_of_two_changes_add_up_in_one_unit() -> None:
    one = Evidence("published", 0.02, 0.01, 0.05, "relative score")
    both = combine([one, replace(one, loss=0.01, high=0.05)])
    assert (both.loss, both.low, both.high) == pytest.approx((0.03, -0.02, 0.08))
    assert not both.missing
    assert "different units" in combine([one, replace(one, unit="relative perplexity")]).missing


def test_errors_of_scores_are_those_of_shares() -> None:
    for row in published():
        share, base = row.score, row.baseline
        if row.measure == "perplexity":
            assert row.error == 0.0 and _score(row)[6] == 0.002
        elif row.questions:
            spread = (share * (100 - share) + base * (100 - base)) ** 0.5
            assert row.error == pytest.approx(spread / row.questions**0.5 / base)


def test_other_models_of_a_kind_count_with_the_spread_pool_others_them() -> None:
    found = judged("kivi:bits=2,group=32", "qwen2.5-7b")
    losses = [
        r.loss for r in published() if r.setting.kind == "kivi" and r.setting.numbers["bits"] == 2
        and attention_kind(load_model(r.model)) == "grouped queries"
    ]  # fmt: skip
    assert found.kind == "published elsewhere"
    assert min(losses) < found.loss < found.bound < max(losses)
    assert attention_kind(load_model("deepseek-v2-lite")) == "latent (MLA)"
    assert judged("kivi", "deepseek-v2-lite").kind == "none"


def test_without_evidence_nothing_lossy_is_admitted_and_the_way_to_measure_is_said() -> None:
    found = judged("fp8", "opt-13b")
    assert found.kind == "none" and isnan(found.loss)
    assert found.column > 1.0 and WELCOME.loss(found) <= 0.1
    assert "validate quality --model opt-13b --techniques fp8" in str(found)
    assert judged("full", "opt-13b").column <= 0.0


def test_budgets_speak_for_contexts_near_those_of_the_table() -> None:
    near, far = (judged("kcache:n=128,gpu_layers=1", "llama3-8b", n) for n in (8000, 9000))
    assert near.column <= 0.05 and far.column > 0.05


def test_families_are_said_of_every_technique_that_drops_tokens() -> None:
    dropping = {"h2o", "streamingllm", "snapkv", "infllm", "pyramidkv", "duoattention"}
    dropping |= {"ada-kv", "dms", "expected-attention", "keydiff", "kvzip", "r-kv", "tova"}
    presets = SHIPPED & set(TECHNIQUES)
    assert {name for name in presets if family(parse(name)) == "eviction"} == dropping
    for name in set(TECHNIQUES) - {"draft"}:
        assert harshness(parse(name), CONTEXT).at_least_as_gentle(harshness(parse(name), CONTEXT))
    one, other = (harshness(parse(f"quest:budget={n}"), CONTEXT) for n in (512, 1024))
    assert not one.at_least_as_gentle(other) and not other.at_least_as_gentle(one)  # unknown


def test_a_users_own_trace_replaces_what_ships() -> None:
    trace = load(shipped_traces()["smollm2-135m"])
    own = runs_of(replace(trace, model="opt-13b"))
    assert len(own) == len(shipped("smollm2-135m")) and {r.model for r in own} == {"opt-13b"}
    found = evidence(parse("kivi:bits=4"), load_model("opt-13b"), 1024, own)
    assert found.kind == "measured" and found.column <= 0.05
