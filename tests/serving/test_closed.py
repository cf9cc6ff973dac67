"""A closed loop against what must hold of one, whatever the engine."""

from dataclasses import replace

import numpy as np
import pytest

from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack, with_drive, with_numbers
from kvsim.models.configs import load_model
from kvsim.prediction.generate import Prediction
from kvsim.prediction.service import Service
from kvsim.serving.costs import StepCosts
from kvsim.serving.outcome import Clients, Outcome
from kvsim.serving.rules import Rules
from kvsim.serving.simulate import simulate
from kvsim.techniques import parse
from kvsim.traces.requests import Requests

HERE = Deployment(load_model("llama3.1-8b"), load_hardware("h100"), load_stack("fused"))


def _clients(count: int, prompt: int = 1000, generate: int = 100) -> Clients:
    return Clients(parse("full"), HERE, np.array([float(count)]), prompt, generate)


def test_one_client_is_a_single_stream() -> None:
    alone = Prediction(parse("full"), HERE, np.ones(1), 1000, 100)
    assert _clients(1).request_s == pytest.approx(alone.request_s, rel=0.02)


def test_more_clients_get_more_together_and_wait_longer_each() -> None:
    loops = [_clients(n) for n in (1, 4, 16, 64)]
    rates = [float(x.output_tok_s[0]) for x in loops]
    times = [float(x.request_s[0]) for x in loops]
    assert rates == sorted(rates) and times == sorted(times)


def test_latency_is_its_parts_and_what_has_no_room_waits() -> None:
    loop = _clients(32)
    parts = loop.ttft_s + 99 * loop.tpot_s
    assert loop.request_s == pytest.approx(parts, rel=1e-3)
    crowded = _clients(60, 20_000, 100)
    assert crowded.fits[0] and crowded.gpu_bytes[0] <= HERE.hardware.gpu_memory
    assert crowded.ttft_s[0] > 2 * _clients(8, 20_000, 100).ttft_s[0]


@pytest.mark.parametrize(
    ("model", "technique", "batch"),
    [
        ("opt-175b", "flexgen:weights_gpu=0,cache_gpu=0,weights_disk=80,cache_disk=80,parts=8", 64),
        ("opt-30b", "flexgen:weights_gpu=20,cache_gpu=0,parts=4", 32),
        ("opt-30b", "place:weights_host=0.9", 4),
    ],
)
def test_a_batch_whose_weights_are_streamed_is_played_at_its_predicted_rate(
    model: str, technique: str, batch: int
) -> None:
    card = with_drive(load_hardware("t4"), 1.5e12)
    here = Deployment(load_model(model), card, load_stack("flexgen"))
    asked = Prediction(parse(technique), here, np.array([float(batch)]), 512, 32)
    all_at_once = Requests(np.zeros(batch), np.full(batch, 512), np.full(batch, 32))
    rules = Rules(max_seqs=batch, max_tokens=0).scale_to(here)
    run = simulate(all_at_once, StepCosts.for_requests(parse(technique), here, rules, all_at_once))
    seconds = Outcome(run).latency_s.max()
    assert batch * 32 / seconds == pytest.approx(float(asked.output_tok_s[0]), rel=0.05)


def test_a_server_delays_the_first_token_and_no_pass() -> None:
    outside = {"server.first_s": 0.02, "server.tokenise_s": 1e-6}
    where = (HERE, replace(HERE, stack=with_numbers(HERE.stack, outside)))
    for kind, batch in ((Clients, 1.0), (Service, 8.0)):
        bare, served = (kind(parse("full"), d, np.array([batch]), 1000, 100) for d in where)
        assert served.ttft_s - bare.ttft_s == pytest.approx(0.021)
        assert served.request_s - bare.request_s == pytest.approx(0.021)
        assert served.tpot_s == pytest.approx(bare.tpot_s)
    assert where[1].stack.offline == HERE.stack.offline
