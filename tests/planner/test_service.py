"""Plans for load: what is tried, what need not be played, what is chosen."""

from dataclasses import replace

import pytest

import kvsim
from kvsim.planner.service import ServicePlan, ServiceSearch


def plan(**asked: object) -> ServicePlan:
    found = kvsim.plan(model="llama3.1-8b", **asked).found
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


def test_a_loss_must_gain_more_than_a_few_percent() -> None:
    found = plan(gpu="h100", lossy=True)
    carried = {o.option.candidate.technique.exact: o.option.value for o in found.alternatives}
    exact = found.choice.candidate.technique.exact
    assert exact or found.choice.value > 1.03 * carried.get(True, 0.0)
