"""What an engine is told of a replica: lengths, memory and degrees."""

from dataclasses import replace

import numpy as np
import pytest

from kvsim.emit.engines import emit
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


def test_one_gpu_has_no_options_of_several() -> None:
    alone = {engine: emit(engine, served(spread=Parallelism(1))) for engine in ("sglang", "trtllm")}
    assert "--dp-size" not in alone["sglang"].text
    assert "--enable-dp-attention" not in alone["sglang"].text
    for found in alone.values():
        assert not any("copies of attention" in what for what in found.missing)
    ranks = emit("trtllm", served(spread=Parallelism(1, dp=4, ep=4)))
    assert not any("each cut over" in what for what in ranks.missing)
    assert "--dp-size 4" in emit("sglang", served(spread=Parallelism(1, dp=4, ep=4))).text
