"""Weights in host memory: bytes move tiers, and times are those of the host's memory or link."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvsim
from kvsim.engine.timeline import steady_seconds
from kvsim.machines.deployment import Deployment, HostLayers
from kvsim.machines.profiles import load_hardware, load_stack, with_host, with_numbers
from kvsim.models.configs import load_model
from kvsim.prediction.generate import Prediction
from kvsim.prediction.memory import decode_point
from kvsim.techniques import parse

FULL = parse("full")
HOSTS = Path(kvsim.__file__).parent / "hwprofiles" / "hosts"
DESKTOP = with_host(load_hardware("rtx4090"), "desktop-ddr5")


def placed(
    model: str, stack: str = "llamacpp", way: str = "auto", **host: Iterable[int]
) -> Deployment:
    layers = HostLayers(way=way, **{kind: frozenset(each) for kind, each in host.items()})
    where = load_hardware("rtx4090") if stack == "ideal" else DESKTOP
    weights = "fp16" if stack == "ideal" else "q4_k_m"
    return Deployment(load_model(model), where, load_stack(stack), weights, host=layers)


def predicted(d: Deployment, prompt: int = 512) -> Prediction:
    return Prediction(FULL, d, np.array([1.0]), prompt, 64)


@pytest.mark.parametrize("name", sorted(f.stem for f in HOSTS.glob("*.toml")))
def test_hosts_have_sources_and_sockets_add_up(name: str) -> None:
    found = with_host(load_hardware("rtx4090"), name)
    assert found.host == name and found.links["dram"].bandwidth > 4e10
    assert f"host {name}" in found.sources["dram.bandwidth_Bps"]
    assert (found.sockets == 2) == name.endswith("2s")


@pytest.mark.parametrize(
    ("model", "host"),
    [
        ("qwen3-30b-a3b", {"experts": range(48)}),
        ("qwen3-30b-a3b", {"experts": range(7)}),
        ("deepseek-v2-lite", {"experts": range(27)}),
        ("gpt-oss-20b", {"experts": range(5), "layers": range(2)}),
        ("llama3-8b", {"mlps": range(3, 9)}),
        ("gemma-2-9b", {"layers": range(5)}),
    ],
)
def test_bytes_move_from_the_gpu_to_the_host(model: str, host: dict[str, Any]) -> None:
    here, there = predicted(placed(model)), predicted(placed(model, **host))
    on_gpu = [float(np.sum(p.buffers["gpu"]["weights"])) for p in (here, there)]
    moved = on_gpu[0] - on_gpu[1]
    assert moved > 0
    held = [float(np.sum(p.buffers["host"]["weights of host layers"])) for p in (here, there)]
    assert held[1] - held[0] == pytest.approx(moved)
    assert there.tpot_s[0] > here.tpot_s[0]


def test_experts_take_the_time_of_their_bytes() -> None:
    """An independent sum: active experts over the host's bandwidth, hidden states over the link."""
    d = placed("qwen3-30b-a3b", "ideal", experts=range(48))
    bare = placed("qwen3-30b-a3b", "ideal")
    m, hw = d.model, d.hardware
    active = 48 * m.experts_active * 3 * m.hidden * m.expert_ffn * 2
    traffic = 48 * m.experts_active * (m.hidden + m.expert_ffn * 2 + m.expert_ffn + m.hidden) * 2
    states = 48 * 4 * m.hidden
    links = hw.links
    there = (active + traffic) / links["dram"].bandwidth
    there += states / links["h2d"].bandwidth + states / links["d2h"].bandwidth
    there += 48 * (links["h2d"].latency + links["d2h"].latency)
    there += states / links["hbm"].bandwidth - (active + traffic) / links["hbm"].bandwidth
    more = float(predicted(d).tpot_s[0] - predicted(bare).tpot_s[0])
    assert more == pytest.approx(there, rel=2e-3)


def test_streaming_is_the_link_s_and_wide_passes_do_so() -> None:
    cpu, streamed, auto = (
        predicted(placed("gpt-oss-120b", experts=range(36), way=way))
        for way in ("cpu", "streamed", "auto")
    )
    assert auto.tpot_s[0] == cpu.tpot_s[0] < streamed.tpot_s[0]
    assert auto.ttft_s[0] == streamed.ttft_s[0] < cpu.ttft_s[0]
    short = predicted(placed("gpt-oss-120b", experts=range(36)), prompt=16)
    assert short.ttft_s[0] == pytest.approx(
        predicted(placed("gpt-oss-120b", experts=range(36), way="cpu"), prompt=16).ttft_s[0]
    )


def test_layers_on_the_cpu_wait_for_those_before() -> None:
    """Layers follow one another: times of layers here and there add up."""
    some = [predicted(placed("llama3-8b", layers=range(n))) for n in (0, 8, 16)]
    first, second = (b.tpot_s[0] - a.tpot_s[0] for a, b in pairwise(some))
    assert first == pytest.approx(second, rel=0.05)
    step = FULL.cycle(some[1].deployment, decode_point(1.0, 512.0, 64.0, 0.0)).steps[0]
    assert steady_seconds(step, some[1].deployment) > 8 * 218e6 * 4.5 / 8 / 89.6e9


def test_a_second_socket_counts_as_the_engine_uses_it() -> None:
    one, two = (with_host(load_hardware("rtx4090"), name) for name in ("epyc", "epyc-2s"))
    base = placed("qwen3-30b-a3b", experts=range(48))
    slow, quick = (replace(base, hardware=hardware).bandwidth["dram"] for hardware in (one, two))
    assert quick / slow == pytest.approx(1 + base.stack.offload.second_socket)


@pytest.mark.parametrize("rate", [4e9, 16e9, 1e12])
def test_prompts_copy_mapped_weights_at_the_slower_of_host_and_link(rate: float) -> None:
    d = placed("qwen3-30b-a3b", experts=range(48))
    pinned, mapped = (
        predicted(replace(d, stack=with_numbers(d.stack, {"offload.pageable_Bps": x})), 4096)
        for x in (0.0, rate)
    )
    (size,) = {float(np.sum(p.buffers["host"]["weights of host layers"])) for p in (pinned, mapped)}
    link = d.bandwidth["h2d"] * d.stack.kernel("copy").memory
    passes = -(-4096 // d.stack.time.prompt_pass)
    longer = passes * size * max(0.0, 1 / rate - 1 / link)
    assert mapped.ttft_s - pinned.ttft_s == pytest.approx(longer, rel=0.02, abs=1e-9)
    assert mapped.tpot_s == pinned.tpot_s  # which the CPU computes
