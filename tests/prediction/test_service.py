"""Continuous batching of equal requests, against a simulation of its turns."""

import numpy as np
import pytest

from kvsim.engine.timeline import makespan
from kvsim.graph import Buffers, Point
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.prediction.explain import binding
from kvsim.prediction.generate import Prediction
from kvsim.prediction.memory import served_buffers
from kvsim.prediction.service import Service
from kvsim.techniques import parse
from kvsim.techniques.technique import Technique


def deployment(model: str = "llama3.1-8b", gpu: str = "a6000") -> Deployment:
    return Deployment(load_model(model), load_hardware(gpu), load_stack("fused"))


@pytest.mark.parametrize("technique", ["full", "specache", "offload:host_share=0.5", "fastdecode"])
def test_turns_one_by_one_give_the_same_rates(technique: str) -> None:
    """Played round by round: a sequence ends, the next request's prompt is read at once."""
    t, d, batch, generate = parse(technique), deployment(), 8, 33
    found = Service(t, d, np.array([float(batch)]), 2048, generate)
    group, round_s, read = t.tiles(), float(found.round_s[0]), float(found.prefill_s[0])
    left = [1 + (generate - 1) * i // batch for i in range(batch)]  # spread evenly
    left = [left[i - i % group] for i in range(batch)]
    now, tokens, begun, spans = 0.0, 0, [0.0] * batch, []
    for _ in range(50 * generate):
        now += round_s
        left = [n - 1 for n in left]
        tokens += batch
        for first in range(0, batch, group):
            if left[first] == 0:
                spans += [now - begun[first]] * group
                now += read
                tokens += group
                for i in range(first, first + group):
                    left[i], begun[i] = generate - 1, now
    assert tokens / now == pytest.approx(float(found.output_tok_s[0]), rel=0.02)
    each = np.mean(spans[batch:]) / (generate - 1)
    assert each == pytest.approx(float(found.tpot_s[0]), rel=0.02)


def test_a_single_sequence_is_served_as_a_batch_of_one() -> None:
    args = (parse("full"), deployment(), np.ones(1), 1024, 64)
    alone, served = Prediction(*args), Service(*args)
    assert served.tpot_s == pytest.approx(alone.tpot_s, rel=1e-12)
    assert served.output_tok_s == pytest.approx(alone.output_tok_s, rel=1e-12)
    assert served.ttft_s == pytest.approx(alone.ttft_s + served.round_s, rel=1e-12)


def test_the_first_token_does_not_wait_for_a_whole_batch() -> None:
    batch = np.array([1.0, 64.0])
    served = Service(parse("full"), deployment(), batch, 2048, 128)
    together = Prediction(parse("full"), deployment(), batch, 2048, 128)
    assert served.ttft_s[1] < 0.1 * together.ttft_s[1]
    assert served.tpot_s[1] > together.tpot_s[1]  # others' prompts come between


def test_memory_holds_every_sequence_and_one_prompt() -> None:
    d, t = deployment(), parse("full")
    served = Service(t, d, np.array([4.0, 32.0]), 4096, 256)
    m = d.model
    whole = 2 * m.kv_width * m.layers * (4096 + 256) * np.array([4.0, 32.0])
    assert served.buffers["gpu"]["kv"] == pytest.approx(whole, rel=1e-12)
    most = float(served.max_batch[0])
    around = Service(t, d, np.array([most, most + 1]), 4096, 256)
    assert list(around.fits) == [True, False]


def test_every_buffer_counts_at_its_largest_and_where_it_is_alone() -> None:
    class Held(Technique):
        """Full KV that says what it holds in either phase."""

        def resident(self, deployment: Deployment, point: Point) -> Buffers:
            if point.prefill:
                return {"gpu": {"both": 2.0, "prompt": 0.25}, "host": {"pinned": 0.5}}
            return {"gpu": {"both": 1.0, "decoding": 0.125}}

    found = served_buffers(Held(parse("full").layers), deployment(), 4.0, 100, 10)
    assert found == {
        "gpu": {"both": 2.0, "prompt": 0.25, "decoding": 0.125},
        "host": {"pinned": 0.5},
    }


def test_one_token_answers_have_no_time_per_token() -> None:
    served = Service(parse("full"), deployment(), np.array([4.0]), 512, 1)
    assert np.isnan(served.tpot_s).all() and served.output_tok_s > 0
    assert served.ttft_s == pytest.approx(served.prefill_s)


def test_as_many_requests_end_as_places_turn_over() -> None:
    """Each running sequence holds its place for its own prompt, its rounds and others' prompts."""
    served = Service(parse("full"), deployment(), np.array([4.0, 32.0]), 512, 40)
    turn = served.prefill_s + served.interruptions_s + 39 * served.round_s
    assert served.requests_per_s == pytest.approx(np.array([4.0, 32.0]) / turn, rel=1e-12)


def test_what_binds_a_service_counts_the_prompts_it_reads_meanwhile() -> None:
    """Long prompts for few tokens are arithmetic; few tokens of prompt are the memory's."""
    t, d, batch = parse("full"), deployment(), np.array([16.0])
    assert binding(Service(t, d, batch, 8000, 32)) == "arithmetic"
    assert binding(Service(t, d, batch, 256, 1024)) == "GPU memory bandwidth"
    assert binding(Prediction(t, d, batch, 8000, 32)) == "GPU memory bandwidth"  # of its rounds
    rounds, read = Service(t, d, batch, 8000, 33).passes()
    assert rounds[1] == 32.0 and read[1] == 16.0  # rounds and prompts of one generation


def test_a_generation_is_its_rounds_and_the_prompts_of_all() -> None:
    """Forty tokens are one of the prompt's pass and 39 rounds; each of 32 sequences has one."""
    d = deployment()
    rounds, prompts = Service(parse("full"), d, np.array([32.0]), 512, 40).passes()
    assert (rounds[1], prompts[1]) == (39.0, 32.0)
    one = Prediction(parse("full"), d, np.ones(1), 512, 40)
    assert float(makespan(prompts[0], d)) == pytest.approx(float(one.prefill_s[0]), rel=1e-12)
    (only,) = Service(parse("full"), d, np.array([32.0]), 512, 1).passes()
    assert only[1] == 32.0
