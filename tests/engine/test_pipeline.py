"""Pipeline stages, copies of attention and whole experts: conservation, counts by hand."""

from dataclasses import asdict

import numpy as np
import pytest

from kvsim.engine.buffers import layer_weights
from kvsim.engine.ops import exchange_tokens
from kvsim.engine.timeline import makespan, steady_seconds
from kvsim.errors import InputError
from kvsim.graph import Array, Step
from kvsim.machines.deployment import Deployment
from kvsim.machines.parallel import BUSIEST, NETWORK, Parallelism
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.prediction.generate import Prediction
from kvsim.prediction.memory import decode_point, largest_batch, prefill_point
from kvsim.techniques import parse

FULL, DEEPSEEK = parse("full"), "deepseek-v3"
BATCHES = np.array([1.0, 2.0, 7.0, 64.0, 300.0])


def deployed(model: str = DEEPSEEK, stack: str = "vllm", /, **degrees: int) -> Deployment:
    return Deployment(
        load_model(model),
        load_hardware("h200"),
        load_stack(stack),
        "released",
        **degrees,  # type: ignore[arg-type]
    )


def predicted(d: Deployment, batches: Array = BATCHES) -> Prediction:
    return Prediction(FULL, d, batches, 2048, 128, contexts=4)


SPREADS: tuple[dict[str, int], ...] = (
    {"tp": 8, "ep": 8}, {"tp": 8, "ep": 2}, {"dp": 8, "ep": 8}, {"tp": 8, "pp": 2},
    {"tp": 2, "dp": 4, "ep": 4}, {"dp": 16, "ep": 16}, {"tp": 4, "dp": 2, "pp": 3},
)  # fmt: skip


@pytest.mark.parametrize("degrees", SPREADS, ids=str)
def test_every_batch_is_as_it_is_alone(degrees: dict[str, int]) -> None:
    d = deployed(DEEPSEEK, **degrees)
    together = predicted(d)
    for i, batch in enumerate(BATCHES):
        alone = predicted(d, np.array([batch]))
        for name in ("prefill_s", "decode_s", "gpu_bytes"):
            found = getattr(together, name)[i]
            assert found == pytest.approx(getattr(alone, name)[0], rel=1e-12), name


@pytest.mark.parametrize("degrees", SPREADS, ids=str)
def test_weights_of_all_gpus_are_the_model_s(degrees: dict[str, int]) -> None:
    """Attention, dense MLPs, routers and shared experts once per copy, routed experts once."""
    d, whole = deployed(DEEPSEEK, **degrees), deployed()
    expert = sum(
        whole.weight_format.bytes(*x) for x in d.model.mlp_matrices(d.model.expert_ffn).values()
    )
    routers = 2.0 * d.model.hidden * d.model.experts
    latents = _copied(whole)
    for shape in set(d.model.shapes()):
        routed = d.model.experts * expert if shape.routed else 0.0
        once = routers if shape.routed else 0.0
        common = layer_weights(whole, shape) - routed - once - latents
        spread = d.parallelism.stage * layer_weights(d, shape)
        counted = routed + d.dp * common + d.parallelism.stage * (once + latents)
        assert spread == pytest.approx(counted, rel=2e-4)  # scales of cut matrices round up


def _copied(d: Deployment) -> float:
    """Down projections of MLA, which every tensor-parallel GPU has whole. [B]"""
    m = d.model
    return d.mixer_stored("qkv").bytes(m.hidden, m.q_rank + m.kv_rank + m.rope_dim)


def test_stages_have_their_layers_and_one_table() -> None:
    one, two = (deployed("llama3.1-405b", tp=8, pp=n) for n in (1, 2))
    a, b = (FULL.resident(d, decode_point(16.0, 2048.0, 128.0, 127.0))["gpu"] for d in (one, two))
    for name in ("weights", "kv"):
        assert 2 * b[name] == pytest.approx(a[name], rel=1e-12)
    assert np.ravel(b["embedding"])[0] < 0.51 * np.ravel(a["embedding"])[0]
    uneven = deployed(tp=8, pp=2)  # 61 layers: 31 on the larger stage
    assert uneven.stage_share == 31 / 61


def test_caches_are_divided_over_ranks_and_stages() -> None:
    base = float(predicted(deployed(tp=8)).max_batch[-1])
    ranks = largest_batch(FULL, deployed(dp=8, ep=8), 2048, 128, 141e9, 2e12)
    assert float(np.ravel(ranks)[0]) > 4 * base  # a latent cache is copied to all tp GPUs
    stages = float(predicted(deployed(tp=8, pp=2)).max_batch[-1])
    assert stages > 2 * base


def test_a_pipeline_of_equal_stages_follows_by_hand() -> None:
    """Two micro-batches wait for the last stage, which has the head; one sequence goes through."""
    model, nodes = "llama3.1-405b", NETWORK
    d, flat = deployed(model, "ideal", tp=8, pp=2), deployed(model, "ideal", tp=8)
    for batch in (1.0, 16.0):
        micro = max(batch / 2, 1.0)
        (pass_of_one,) = FULL.cycle(flat, decode_point(micro, 2048.0, 128.0, 0.0)).steps
        (step,) = FULL.cycle(d, decode_point(batch, 2048.0, 128.0, 0.0)).steps
        alone = makespan(pass_of_one, flat)
        head = makespan(Step((), pass_of_one.head), flat)
        send = nodes.latency + 2 * micro * d.model.hidden / 8 / nodes.bandwidth
        expected = alone + send if batch == 1 else alone + head + 2 * send
        assert np.ravel(steady_seconds(step, d))[0] == pytest.approx(expected, rel=1e-6)


def test_tokens_travel_to_experts_by_hand() -> None:
    d = deployed(DEEPSEEK, "ideal", dp=8, ep=8)
    (op,) = exchange_tokens(d, "experts_to", 16.0)
    hidden, copies = d.model.hidden, min(1.0, 8 * BUSIEST / 8)
    assert op.bytes["link"] == pytest.approx(16 * 8 * hidden * 2 * copies * 7 / 8)
    far = deployed(DEEPSEEK, "ideal", dp=16, ep=16)
    (op,) = exchange_tokens(far, "experts_to", 16.0)
    entering = 16 * 16 * hidden * 2 / 2 / 8
    assert op.fixed - 5e-6 - entering / 50e9 == pytest.approx(far.hardware.links["link"].latency)
    (lone,) = exchange_tokens(
        far, "experts_to", 16.0, 1.0
    )  # one rank of 16: its node sends for it alone
    assert op.fixed - lone.fixed == pytest.approx(7 / 8 * entering / 50e9)
    assert lone.bytes == op.bytes
    assert exchange_tokens(deployed(tp=8, ep=8), "experts_to", 16.0) == []


def test_ranks_without_a_prompt_bring_experts_nothing() -> None:
    """Prompts are counted as they come, decoding is padded; by hand."""
    d = deployed("qwen3-30b-a3b", "ideal", dp=4)

    def routed(step: Step) -> float:
        (layer,) = step.groups[0].layers
        return float(sum(np.ravel(op.flops)[0] for op in layer if op.name.startswith("experts_")))

    m = d.model
    of_token = 6.0 * m.hidden * m.expert_ffn / 4 * m.experts_active
    for batch in (1.0, 3.0, 4.0, 6.0):
        reading = FULL.prefill(d, prefill_point(batch, 512.0, 8.0))
        assert routed(reading) == pytest.approx(batch * 512 * of_token)
        (decoding,) = FULL.cycle(d, decode_point(batch, 512.0, 8.0, 0.0)).steps
        assert routed(decoding) == pytest.approx(4 * np.ceil(batch / 4) * of_token)


@pytest.mark.parametrize("degrees", SPREADS, ids=str)
def test_more_sequences_take_no_less_time_and_memory(degrees: dict[str, int]) -> None:
    found = predicted(deployed(DEEPSEEK, **degrees), np.array([1.0, 8, 9, 32, 128, 512]))
    for values in (found.prefill_s, found.decode_s, found.gpu_bytes):
        assert (np.diff(values) >= -1e-12 * values[1:]).all()


@pytest.mark.parametrize(
    ("model", "degrees", "said"),
    [
        ("llama3.1-8b", {"dp": 2}, "--dp: llama3.1-8b has no experts"),
        ("llama3.1-8b", {"ep": 2}, "--ep: llama3.1-8b has no experts"),
        ("deepseek-v3", {"ep": 8}, "divides the 1 GPUs of a stage"),
        ("deepseek-v3", {"tp": 8, "ep": 3}, "divides the 8 GPUs of a stage"),
        ("deepseek-v3", {"pp": 62}, "--pp: got 62 stages for the 61 layers"),
        ("deepseek-v3", {"pp": 0}, "--pp: got 0"),
        ("deepseek-v3", {"dp": 65}, "--dp: got 65"),
        ("gpt-oss-20b", {"tp": 8, "dp": 32}, "choose a larger --ep"),
    ],
)
def test_degrees_that_make_no_sense(model: str, degrees: dict[str, int], said: str) -> None:
    with pytest.raises(InputError) as error:
        deployed(model, **degrees)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("technique", ["offload", "magicdec", "kcache", "infllm"])
def test_what_moves_or_drafts_is_refused_on_several_ranks_or_stages(technique: str) -> None:
    for spread in (Parallelism(4, 2), Parallelism(4, 1, 2, 8)):
        d = deployed("qwen3-30b-a3b", **asdict(spread))
        assert "(--dp) and stages (--pp)" in parse(technique).refuses(d)
    assert not parse("fp8").refuses(deployed("qwen3-30b-a3b", tp=4, pp=2))
