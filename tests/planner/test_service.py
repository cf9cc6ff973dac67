"""Plans for load: what is tried, what need not be played, what is chosen."""

from dataclasses import replace
from functools import cache
from itertools import islice

import pytest

import kvsim
from kvsim.errors import InfeasibleError, InputError
from kvsim.planner.alternatives import NoPlanError
from kvsim.planner.load import RateSearch
from kvsim.planner.plan import ChosenPlan
from kvsim.planner.remedies import explain_choice
from kvsim.planner.service import ServicePlan, ServiceSearch


@cache
def plan(model: str = "llama3.1-8b", **asked: object) -> ServicePlan:
    found = kvsim.plan(model=model, **asked).found
    assert isinstance(found, ServicePlan)
    return found


def test_drafts_are_planned_where_only_they_are_admitted_though_none_would_be_faster() -> None:
    assert plan(gpu="l40s", only="ngram").choice.candidate.technique.drafts > 0


@pytest.mark.parametrize("target", ["ttft", "tpot"])
def test_what_fails_alone_fails_in_play(target: str) -> None:
    found = plan(gpu="h100", only="full")
    alone = ServiceSearch(found.question).times_alone(found.choice.candidate)[target]
    for factor, may in ((0.999, False), (1.001, True)):
        asked = replace(found.question.asked, **{target: factor * alone})
        search = ServiceSearch(replace(found.question, asked=asked))
        assert search.may_keep(found.choice.candidate) is may
        assert may or search.play(found.choice.candidate) is None


def test_default_targets_out_of_reach_are_raised_and_given_ones_are_not() -> None:
    asked = {"gpu": "rtx3090", "weights": "int4", "prompt": "32k", "lengths": "equal"}
    found = plan(**asked, only="full")
    question = found.question
    assert question.raised == ("ttft",) and question.asked.ttft > 4
    assert question.deployments[0].limits.ttft == question.asked.ttft
    assert found.choice.carried.ttft["p90"] <= question.asked.ttft
    with pytest.raises(NoPlanError, match="above the target of 2 s"):
        plan(**asked, only="full", ttft="2s")


def test_a_loss_must_gain_more_than_a_few_percent() -> None:
    found = plan(gpu="h100", lossy=True)
    carried = {o.option.candidate.technique.exact: o.option.value for o in found.alternatives}
    exact = found.choice.candidate.technique.exact
    assert exact or found.choice.value > 1.03 * carried.get(True, 0.0)


def test_compositions_and_weights_together_lose_no_more_than_is_admitted() -> None:
    found = plan("qwen3-30b-a3b", gpu="h100", weights="auto", max_loss=0.02)
    lost = {
        o.option.candidate.evidence.column
        for o in found.alternatives
        if not o.option.candidate.needs
    }
    assert max({found.choice.candidate.evidence.column, *lost}) <= 0.02
    assert found.choice.candidate.deployment.weights == "fp8-block"  # Qwen's FP8 checkpoint


def test_what_only_one_technique_was_asked_for_and_cannot_run_says_why() -> None:
    with pytest.raises(InfeasibleError, match="mtp cannot run here: "):
        plan(gpu="h100", only="mtp")


def test_times_of_the_choice_are_means_over_draws_at_the_same_rate() -> None:
    found = plan(gpu="l40s", only="full")
    one, search = found.choice.carried, RateSearch(found.question.load, found.question.asked)
    again = search.carried(one.costs, one.each_per_s, one.slower)
    assert again is not None
    typical = search.typical(replace(again, each_per_s=one.each_per_s))
    assert typical.ttft == pytest.approx(one.ttft, rel=0.02) != pytest.approx(again.ttft, rel=1e-6)


def test_total_gpus_reach_the_best_of_all_layouts_by_exhaustion() -> None:
    found = kvsim.plan(model="qwen3-30b-a3b", gpu="rtx4090", total_gpus=4, only="full").found
    assert isinstance(found, ServicePlan)
    search = ServiceSearch(found.question)
    played = [search.play(c) for q in found.question.deployments for c in search.candidates(q)]
    assert found.choice.value >= 0.97 * max(o.value for o in played if o is not None)


def test_a_format_that_does_not_fit_the_total_of_gpus_is_not_said_to_carry_less() -> None:
    asked = {"weights": "fp16,fp8", "lossy": True, "only": "full", "total_gpus": 1}
    found = kvsim.plan("qwen2.5-32b", "l40s", **asked)
    assert "fp16 weights (they do not fit)" in found.answer.left_out


def test_explained_turns_are_what_asking_directly_answers() -> None:
    found = kvsim.plan(model="llama3.1-8b", gpu="l40s", total_gpus=2, only="full").found
    assert isinstance(found, ServicePlan)
    search = ServiceSearch(found.question)
    search.choose()
    for turn in islice(explain_choice(search, lambda changes: None), 1, None, 2):
        name, value = turn.option.removeprefix("--").split()
        times = {name: float(value.rstrip("ms")) / (1e3 if value.endswith("ms") else 1)}
        direct = ServiceSearch(found.question.under(**times)).choose()
        assert turn.choice is not None and direct is not None
        assert turn.choice.value == pytest.approx(direct.value, rel=1e-12)


def test_a_rate_that_further_draws_do_not_keep_is_lowered_and_its_quantiles_fit_the_share() -> None:
    found = plan(gpu="h100", prompt=2000, generate=100)
    search = RateSearch(found.question.load, found.question.asked)
    carried = found.choice.carried
    crowded = replace(carried, each_per_s=1.3 * found.stretch)
    settled = search.typical(crowded)
    assert settled.each_per_s < crowded.each_per_s and settled.share >= found.question.asked.share
    assert settled.ttft["p90"] <= found.question.asked.ttft


def test_no_plan_with_any_weights_names_what_their_loss_needs() -> None:
    with pytest.raises(NoPlanError, match=r"max_loss \S+ admits int4 \(at most ") as none:
        kvsim.plan("qwen3-30b-a3b", "rtx4090", weights=["auto"])
    assert "does not fit" not in none.value.reason


def test_offline_weights_are_held_to_the_loss_that_is_admitted() -> None:
    asked = {"offline": True, "weights": "auto", "only": "full", "max_loss": 0.02}
    found = kvsim.plan(model="qwen3-30b-a3b", gpu="a100-80g", **asked).found
    assert isinstance(found, ChosenPlan)
    assert found.choice.deployment.weights == "fp16"
    assert {q.deployment.weights for q in found.too_lossy} == {"int8", "int4"}


@pytest.mark.parametrize("offline", [True, False])
def test_blocks_of_weights_are_not_cut_by_tensor_parallelism(offline: bool) -> None:
    asked = {"model": "qwen3-235b", "weights": "fp8", "tp": 8, "prompt": "1k", "generate": 64}
    with pytest.raises(InfeasibleError, match="192 columns of each expert"):
        kvsim.plan(gpu="h200", offline=offline, **asked)
    with pytest.raises(InputError, match="192 columns of each expert"):
        kvsim.capacity(gpus="h200", rate=1, **asked)


def test_fewer_sequences_at_once_carry_more_where_prompts_of_others_delay_decoding() -> None:
    asked = {"stack": "sglang", "prompt": 2048, "generate": 64, "tpot": "20ms"}
    found = plan("nemotron-nano-9b-v2", gpu="a100-80g", **asked)
    own = ServiceSearch(found.question).play(found.choice.candidate)
    assert own is not None and found.choice.value > 1.2 * own.value
    assert found.choice.carried.costs.rules.max_seqs < own.carried.costs.rules.max_seqs


def test_another_layout_and_narrower_weights_are_rows_with_their_reasons() -> None:
    told = kvsim.plan(model="llama3.1-8b", gpu="h100", tp=2).fields
    rows = {row["standing"]: row for row in told["alternatives"][:2]}
    assert rows["or"]["reason"].startswith("2 replicas with a GPU each: ")
    assert rows["or"]["replicas"] == 2 and rows["or"]["gpus"] == told["load"]["gpus"]
    narrower = told["narrower_weights"]
    assert rows["needs --weights fp8"]["reason"].startswith("--weights fp8: ")
    assert narrower["weights"] == "fp8"
    assert narrower["requests_per_s"] > told["load"]["requests_per_s"]


def test_a_target_that_a_request_alone_nearly_misses_is_said_to_leave_no_room() -> None:
    usual = plan(gpu="h100", only="full")
    search, choice = ServiceSearch(usual.question), usual.choice.candidate
    alone, idle = search.times_alone(choice)["ttft"], search.idle_times(choice.question)
    assert idle is not None
    target = f"{1020 * idle['ttft']:.4g}ms"
    told = kvsim.plan(model="llama3.1-8b", gpu="h100", only="full", ttft=target)
    barely = told.fields["barely_met"]
    assert barely["target"] == "ttft" and barely["alone"] == pytest.approx(alone, rel=1e-6)
    assert barely["per_s"] > 2 * told.fields["load"]["requests_per_s"]
    assert "leaves almost no room for load" in told.answer.changes[0]


def test_the_first_remedy_makes_fit_what_does_not() -> None:
    with pytest.raises(NoPlanError, match="need 87 GiB") as none:
        kvsim.plan("mixtral-8x7b", "rtx3090", prompt=4000, generate=300)
    first = "--stack llamacpp --weights q4_k_m --n-cpu-moe auto --max-model-len 8192"
    assert none.value.remedies[0].option.startswith(first)
    assert none.value.nearest is not None
