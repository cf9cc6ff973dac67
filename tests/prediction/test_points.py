"""At which points a prediction looks: the middle of a generation, the phase that holds most."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvsim.engine.roofline import all_ops
from kvsim.graph import Buffers, Group, Op, Point, Step
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.prediction.explain import bound_by
from kvsim.prediction.generate import Prediction, at_batch
from kvsim.prediction.pool import pool
from kvsim.prediction.service import Service
from kvsim.techniques import parse
from kvsim.techniques.technique import Technique

WHERE = Deployment(load_model("llama3.1-8b"), load_hardware("a6000"), load_stack("fused"))
FULL = parse("full")


class Held(Technique):
    """Full KV that needs most of the GPU for its prompt and most of the host for the last token."""

    def resident(self, deployment: Deployment, point: Point) -> Buffers:
        if point.prefill:
            return {"gpu": {"prompt": 3.0 + 0 * point.batch}, "host": {"prompt": 1.0}}
        return {"gpu": {"last": 2.0 + 0 * point.batch}, "host": {"last": 5.0 + 0 * point.batch}}


def read(step: Step) -> float:
    """Bytes of the attention of one step. [B]"""
    return sum(count * float(np.ravel(op.bytes["hbm"])[0]) for op, count in all_ops(step)
               if op.name == "attn")  # fmt: skip


@pytest.mark.parametrize("kind", [Prediction, Service])
@pytest.mark.parametrize("generate", [9, 8])
def test_a_round_is_that_after_half_of_the_tokens_rounded_down(kind: Any, generate: int) -> None:
    found = kind(FULL, WHERE, np.array([3.0]), 100, generate)
    (step, _), *_ = found.passes()
    m = WHERE.model
    cached = 3 * (100 + 4 + 1) * 2 * 2 * m.kv_heads * m.head_dim  # with the new token
    written, states = 3 * 2 * 2 * m.kv_heads * m.head_dim, 2 * 2 * 3 * m.heads * m.head_dim
    assert read(step) == m.layers * (cached + written + states)


def test_a_service_reads_a_prompt_per_sequence_and_plays_the_other_tokens() -> None:
    found = Service(FULL, WHERE, np.array([3.0]), 100, 9).passes()
    assert [times for _, times in found] == [8.0, 3.0]
    assert [times for _, times in Service(FULL, WHERE, np.array([3.0]), 100, 1).passes()] == [3.0]


def test_a_service_reads_as_many_prompts_at_once_as_its_batch_has_parts() -> None:
    found = Service(parse("offload:schedule=column,parts=4"), WHERE, np.array([12.0]), 100, 9)
    assert [times for _, times in found.passes()] == [8.0, 3.0]


def test_what_the_host_issues_counts_the_launches_of_kernels_alone() -> None:
    """Ten copies in one op take 10 us on their link; each launch takes the host 3 us."""
    d = replace(WHERE, stack=replace(WHERE.stack, time=replace(WHERE.stack.time, launch=3e-6)))
    link = d.bandwidth["h2d"]
    copies = Op("load", "h2d", "copy", bytes={"h2d": 1e-4 * link}, launches=10.0)
    kernels = Op("add", bytes={"hbm": 1e3}, launches=100.0)
    for ops, said in (((copies,), "host-to-GPU link"), ((copies, kernels), "kernel launches")):
        step = Step((Group((ops,), 1),), ())
        assert bound_by([(step, 1.0)], d) == said
        assert bound_by([(step, 0.0), (step, 2.0)], d) == said


def test_each_memory_shows_the_phase_that_needs_most_of_it() -> None:
    found = Prediction(Held(FULL.layers), WHERE, np.array([1.0, 4.0]), 100, 10).buffers
    assert np.ravel(found["gpu"]["prompt"]).tolist() == [3.0, 3.0]
    assert np.ravel(found["gpu"]["last"]).tolist() == [0.0, 0.0]
    assert np.ravel(found["host"]["last"]).tolist() == [5.0, 5.0]
    assert np.ravel(found["host"]["prompt"]).tolist() == [0.0, 0.0]


def test_one_of_several_batches_is_that_one_alone() -> None:
    found = Prediction(FULL, WHERE, np.array([1.0, 4.0, 9.0]), 100, 10)
    for i in range(3):
        alone = at_batch(found, i)
        assert alone.batch.tolist() == [found.batch[i]]
        assert alone.decode_s[0] == pytest.approx(found.decode_s[i], rel=1e-12)


def test_a_technique_whose_memory_does_not_grow_has_no_pool() -> None:
    assert pool(Held(FULL.layers), WHERE, 100, 10).tokens == 0


def test_dollars_are_those_of_all_gpus_for_the_time_of_a_million_tokens() -> None:
    d = Deployment(load_model("llama3.1-8b"), load_hardware("h100"), load_stack("fused"), tp=2)
    found = Prediction(FULL, d, np.array([5.0]), 300, 40)
    assert d.hardware.price is not None
    hours = 1e6 / (5 * 40 / float(found.request_s[0])) / 3600
    assert found.usd_per_million()[0] == pytest.approx(2 * d.hardware.price * hours, rel=1e-12)
