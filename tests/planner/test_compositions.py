"""Compositions of techniques: searched, held to a loss, and not beaten by what is drawn."""

import numpy as np
import pytest

from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.planner.compositions import CompositionSearch
from kvsim.planner.question import Admission, PlanLimits, Question, Workload

GIB = 2.0**30


def ask(loss: float, unknown: bool = False, gpu: str = "rtx4090") -> Question:
    d = Deployment(load_model("llama2-13b"), load_hardware(gpu), load_stack("vllm"))
    limits = PlanLimits(0.9 * d.hardware.gpu_memory, 100 * GIB, loss=loss)
    return Question(d, Workload(3500, 500), "throughput", limits, Admission(unmeasured=unknown))


def search(question: Question, most: int = 300) -> CompositionSearch:
    limits = question.limits.hard()
    return CompositionSearch(question, lambda _: limits, most)


def test_two_terms_together_are_found_where_they_serve_more_than_either() -> None:
    some = search(ask(0.05, unknown=True))
    best = some.solve()[0]
    assert len(best.technique.terms) > 1
    alone = [found for t in some.singles() if (found := some.score(t)) is not None]
    assert best.goal < 1.5 * min(found.goal for found in alone)


@pytest.mark.parametrize("loss", [0.0, 0.02, 0.1])
def test_what_is_found_loses_no_more_than_is_admitted(loss: float) -> None:
    assert all(found.evidence.column <= loss for found in search(ask(loss), 120).solve())


def test_no_composition_that_is_drawn_is_better() -> None:
    some, random = search(ask(0.05, gpu="a6000")), np.random.default_rng(1)
    best, singles = some.solve()[0], some.singles()
    drawn = [t for _ in range(200) if (t := some.draw(random, singles)) is not None]
    goals = [found.goal for t in drawn if (found := some.score(t)) is not None]
    assert goals and min(goals) >= 1.01 * best.goal  # goals are negative rates
