"""What an engine is told of a replica: lengths, memory and degrees."""

import re
from dataclasses import replace

import numpy as np
import pytest

from kvsim.emit.engines import WRITERS, emit
from kvsim.emit.served import serve_costs, serve_prediction
from kvsim.machines.deployment import Deployment
from kvsim.machines.parallel import Parallelism
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.prediction.generate import Prediction
from kvsim.serving.costs import StepCosts
from kvsim.serving.rules import Rules
from kvsim.techniques import parse
from tests.emit.test_emit import served

GIB = 2**30
D = Deployment(load_model("llama3-8b"), load_hardware("h100"), load_stack("vllm"))


@pytest.mark.parametrize(("prompt", "generate"), [(1000, 24), (1, 1), (5000, 3192)])
def test_every_request_fits_the_length_that_is_emitted(prompt: int, generate: int) -> None:
    longest = prompt + generate
    costs = StepCosts(parse("full"), D, Rules(), longest, prompt)
    assert longest <= serve_costs(costs, 0.9).max_model_len <= D.model.max_context
    told = costs.with_rules(Rules(max_model_len=7000))
    assert serve_costs(told, 0.9).max_model_len == 7000
    point = Prediction(parse("full"), D, np.array([3.0]), prompt, generate)
    found = serve_prediction(point, 0.9)
    assert (found.max_model_len, found.cache_tokens, found.max_seqs) == (longest, 3 * longest, 3)


def test_the_cache_is_what_the_share_leaves_beside_weights() -> None:
    point = Prediction(parse("full"), D, np.array([1.0]), 1000, 24)
    found, more = serve_prediction(point, 0.8), serve_prediction(point, 0.9)
    assert 0 < found.weights_bytes < 20 * GIB
    assert more.cache_bytes - found.cache_bytes == pytest.approx(0.1 * found.gpu_bytes)
    assert serve_prediction(point, 0.01).cache_bytes == 0
    exact = served(weights_bytes=8 * GIB, cache_bytes=24 * GIB, gpu_bytes=48 * GIB, utilisation=1.0)
    assert exact.free_share == 1.0  # all that lies beside 24 GiB of others
    assert replace(exact, utilisation=0.9).free_share == 0.83  # 24 of 28.8 GiB, rounded down


def test_heads_are_of_the_published_model_and_experts_are_cut_over_gpus() -> None:
    experts = load_model("qwen3-30b-a3b")
    for model, base in (
        (experts, experts.repository),
        (replace(experts, repository=""), experts.name),
    ):
        d = replace(D, model=model, tp=2)
        found = serve_prediction(Prediction(parse("full"), d, np.array([1.0]), 1000, 24), 0.9)
        assert found.base == base
        assert repr(found.expert_columns) == "384"  # half of 768, as it is printed


@pytest.mark.parametrize("engine", WRITERS)
def test_one_gpu_has_no_options_of_several(engine: str) -> None:
    found = emit(engine, served(spread=Parallelism(1)))
    assert not re.search(r"pipeline|data-par|expert-par|--[pde]p[-_]|dp-att|split-mode", found.line)
    assert not any("copies of attention" in what for what in found.missing)


def test_copies_of_attention_are_written() -> None:
    ranks = emit("trtllm", served(spread=Parallelism(1, dp=4, ep=4)))
    assert not any("each cut over" in what for what in ranks.missing)
    assert "--dp-size 4" in emit("sglang", served(spread=Parallelism(1, dp=4, ep=4))).text
