"""A closed loop against what must hold of one, whatever the engine."""

import numpy as np
import pytest

from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.prediction.generate import Prediction
from kvsim.serving.outcome import Clients
from kvsim.techniques import parse

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
