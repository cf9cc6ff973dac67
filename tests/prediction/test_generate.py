"""From steps to TTFT, TPOT, throughput, memory and the largest batch."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from kvsim.engine.timeline import makespan, steady_seconds
from kvsim.errors import InputError
from kvsim.graph import Point
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.options import OPTION_RANGES
from kvsim.prediction import generate
from kvsim.prediction.explain import LIMITS, bound_by, breakdown
from kvsim.prediction.generate import Prediction, check_workload, round_seconds
from kvsim.prediction.memory import MOST_SEQUENCES, decode_point, largest_batch, prefill_point
from kvsim.techniques import TECHNIQUES, parse
from tests.support import scalar
from tests.support.sampled import some

EXACT = 1e-12  # relative
STATIC = "hf-offload-static"
RATES = {"draft": "draft:model=llama2-7b,acceptance=0.6", "eagle": "eagle:acceptance=0.7",
         "ngram": "ngram:acceptance=0.4", "eagle2": "eagle2:acceptance=0.6",
         "lookahead": "lookahead:acceptance=0.3", "suffix": "suffix:acceptance=0.2",
         "cascade": "cascade:shared=64"}  # fmt: skip
SETTINGS = [
    *(RATES.get(name, name) for name in TECHNIQUES),
    "specache:speculative=false",
    "offload:schedule=column,parts=4",
]


@cache
def deployment(
    model: str = "llama2-7b", gpu: str = "h100", stack: str = "fused", tp: int = 1
) -> Deployment:
    return Deployment(load_model(model), load_hardware(gpu), load_stack(stack), tp=tp)


def predict(text: str, batch: Any = (8, 64), prompt: int = 500, out: int = 20, **on: Any) -> Any:
    """Typed loosely: its results are arrays of one value per batch."""
    sizes = np.atleast_1d(np.array(batch, dtype=float))
    return Prediction(parse(text), deployment(**on), sizes, prompt, out)


def close(expected: Any) -> Any:
    return pytest.approx(expected, rel=EXACT, abs=0)


@pytest.mark.parametrize(
    ("text", "stack"),
    [(text, stack) for text in SETTINGS for stack in some(["fused", STATIC], text, 2)],
)
def test_times_are_sums_over_scalar_points(text: str, stack: str) -> None:
    """One round per token at its own context, plus what happens once after the prompt.

    The last rounds are beyond a multiple of 32 tokens, where blocks and groups end.
    """
    t, d = parse(text), deployment(stack=stack)
    got = predict(text, prompt=506, out=9, stack=stack)
    for i, batch in enumerate((8.0, 64.0)):
        first = decode_point(batch, 506, 9, 0.0)
        total = 0.0
        for step in t.predecoding(d, first):
            total += scalar.makespan(step, d)
        for decoded in range(8):
            p = decode_point(batch, 506, 9, float(decoded))
            assert (p.context, p.length, p.new) == (506 + decoded, 507 + decoded, 1)
            cycle = t.cycle(d, p)
            one_round = sum(scalar.steady(step, d) for step in cycle.steps) / float(cycle.tokens)
            assert float(round_seconds(t, d, p)) == close(one_round)
            total += one_round
        assert got.decode_s[i] == close(total)
        prompt = prefill_point(batch, 506, 9)
        assert (prompt.context, prompt.new, prompt.length) == (0, 506, 506)
        assert got.prefill_s[i] == close(scalar.makespan(t.prefill(d, prompt), d))


@pytest.mark.parametrize("text", SETTINGS)
def test_throughput_identities(text: str) -> None:
    got, batch = predict(text), np.array([8.0, 64.0])
    assert got.ttft_s == close(got.prefill_s)
    assert got.tpot_s * 19 == close(got.decode_s)
    assert got.decode_tok_s == close(batch * 19 / got.decode_s)
    assert got.request_s == close(got.prefill_s + got.decode_s)
    assert got.output_tok_s == close(batch * 20 / (got.prefill_s + got.decode_s))
    paid = deployment().hardware.price
    assert paid is not None
    assert got.usd_per_million() == close(paid / 3600 / got.output_tok_s * 1e6)
    for name in ("prefill_s", "decode_s", "gpu_bytes", "host_bytes", "fits"):
        assert getattr(got, name).shape == (2,), name


def test_price_counts_every_gpu_and_may_be_unknown() -> None:
    four = predict("full", tp=4)
    price = four.deployment.hardware.price
    assert four.usd_per_million() == close(4 * price / 3600 / four.output_tok_s * 1e6)
    free = replace(four.deployment, hardware=replace(four.deployment.hardware, price=None))
    assert np.isnan(replace(four, deployment=free).usd_per_million()).all()


@pytest.mark.parametrize("text", ["full", "specache", "quantspec", "offload"])
def test_one_generated_token_needs_no_decoding(text: str) -> None:
    got = predict(text, out=1)
    assert (got.decode_s == 0).all()
    assert np.isnan(got.tpot_s).all()
    assert np.isnan(got.decode_tok_s).all()
    assert got.request_s == close(got.prefill_s)
    assert got.output_tok_s == close(np.array([8.0, 64.0]) / got.prefill_s)
    assert (got.max_batch > 0).all()


def test_a_second_token_waits_for_what_comes_between() -> None:
    """SpeCache fills its cache once behind the prompt; the one round after it waits for that."""
    got = predict("specache", out=2)
    assert (got.between_s > 0).all()
    point = decode_point(np.array([[8.0], [64.0]]), 500, 2, 0.0)
    one = np.ravel(round_seconds(got.technique, deployment(), point))
    assert got.decode_s == close(got.between_s + one)
    assert (predict("specache", out=1).decode_s == 0).all()


def test_the_largest_batch_is_one_number() -> None:
    d = deployment()
    for served in (False, True):
        most = largest_batch(parse("full"), d, 500, 20, 40e9, 1e12, served=served)
        assert most.shape == (1, 1) and most > 0


def test_a_batch_spends_its_time_on_the_round_in_the_middle() -> None:
    """The third of four rounds, at a whole number of tokens; the prompts where there is none."""
    d, t = deployment(), parse("full")
    ((step, often),) = predict("full", batch=8, out=5).passes()
    middle = float(round_seconds(t, d, decode_point(8.0, 500, 5, 2.0)))
    assert often == 1.0 and float(steady_seconds(step, d)) == close(middle)
    ((step, often),) = predict("full", batch=8, out=1).passes()
    assert often == 1.0 and float(makespan(step, d)) == close(
        float(predict("full", 8).prefill_s[0])
    )


def test_long_generations_are_summed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces change nothing; a few contexts instead of all of them next to nothing."""
    whole = predict("full", out=1000).decode_s
    monkeypatch.setattr(generate, "POINTS_AT_ONCE", 77)
    assert predict("full", out=1000).decode_s == close(whole)
    sampled = replace(predict("full", out=1000), contexts=16)
    assert sampled.decode_s == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize("stack", ["fused", STATIC])
@pytest.mark.parametrize("gpu", ["a6000", "h100"])
@pytest.mark.parametrize("text", SETTINGS)
def test_largest_batch_fits_and_one_more_part_does_not(text: str, gpu: str, stack: str) -> None:
    if text == "fp8" and gpu == "a6000":
        gpu = "l40s"
    for prompt, out in ((2000, 200), (20, 8000)):
        got = predict(text, 64, prompt, out, gpu=gpu, stack=stack)
        (most,) = got.max_batch.tolist()
        parts = parse(text).tiles()
        assert most > 0
        assert most % parts == 0
        around = np.array([most, most + parts])
        assert replace(got, batch=around).fits.tolist() == [True, False]


def test_largest_batch_is_zero_where_nothing_fits() -> None:
    assert predict("full", 1, gpu="t4", model="llama2-70b").max_batch.tolist() == [0]
    tight = deployment(gpu="a6000")
    tight = replace(tight, hardware=replace(tight.hardware, host_memory=1e6))
    assert replace(predict("offload", gpu="a6000"), deployment=tight).max_batch.tolist() == [0, 0]
    assert not replace(predict("offload"), deployment=tight).fits.any()


def test_a_replica_shares_host_memory() -> None:
    one, four = predict("offload"), predict("offload", tp=4)
    assert four.host_bytes == close(one.host_bytes)
    assert (four.gpu_bytes < one.gpu_bytes).all()


def test_static_cache_costs_its_full_length_from_the_start() -> None:
    """A growing cache gets slower token by token, a static one is as slow at once."""
    t = parse("full")
    grown, static = deployment(), deployment()
    whole = replace(static.stack.cache, static=True)
    static = replace(static, stack=replace(static.stack, cache=whole))

    def at(d: Deployment, decoded: float) -> float:
        return float(round_seconds(t, d, decode_point(32.0, 1000, 500, decoded)))

    assert at(grown, 0.0) < at(grown, 250.0) < at(grown, 499.0)
    assert at(static, 0.0) == at(static, 250.0) == at(static, 499.0) == close(at(grown, 499.0))
    sizes = [
        float(np.asarray(t.resident(d, decode_point(32.0, 1000, 500, 0.0))["gpu"]["kv"]))
        for d in (grown, static)
    ]
    assert sizes[1] / sizes[0] == close(1500 / 1001)
    both = [replace(predict("full", 32, 1000, 500), deployment=d) for d in (grown, static)]
    assert both[0].decode_s < both[1].decode_s
    assert both[0].gpu_bytes < both[1].gpu_bytes  # that is whole while the prompt is read


def test_windowed_layers_stop_growing() -> None:
    """Gemma 2: every second layer sees 4096 tokens; Mistral v0.1: every layer does."""
    mistral, gemma = deployment("mistral-7b-v0.1"), deployment("gemma-2-2b")
    t = parse("full")

    def attention(d: Deployment, context: float) -> float:
        steps = t.cycle(d, Point(8.0, context, 1.0, context, context + 1.0)).steps
        return float(breakdown(steps, d)["attn"])

    def cache(d: Deployment, context: float) -> float:
        kv = t.resident(d, Point(8.0, context, 1.0, context, context + 1.0))["gpu"]["kv"]
        return float(np.asarray(kv))

    for measure in (attention, cache):
        assert measure(mistral, 2000.0) < measure(mistral, 4000.0) < measure(mistral, 4095.0)
        assert measure(mistral, 4095.0) == measure(mistral, 4096.0) == measure(mistral, 1e6)
        early = measure(gemma, 3000.0) - measure(gemma, 2000.0)
        late = measure(gemma, 9000.0) - measure(gemma, 8000.0)
        assert late == pytest.approx(early / 2, rel=1e-9)
    flat = predict("full", 8, 5000, 300, model="mistral-7b-v0.1")
    assert flat.tpot_s == close(float(round_seconds(t, mistral, decode_point(8.0, 5000, 300, 0))))


@pytest.mark.parametrize("text", SETTINGS)
def test_breakdown_holds_every_op(text: str) -> None:
    """On the GPU's own stream nothing is hidden: ops without copies add up to the round."""
    t, d = parse(text), deployment()
    p = decode_point(16.0, 4000, 100, 50.0)
    parts = breakdown(t.cycle(d, p).steps, d)
    work = sum(sum(scalar.busy(step, d).values()) for step in t.cycle(d, p).steps)
    assert float(sum(parts.values())) == close(work)
    assert bound_by([(step, 1.0) for step in t.cycle(d, p).steps], d) in {
        *LIMITS.values(),
        "launch time",
        "kernel launches",
    }
    if t.name in ("full", "kivi", "zipcache", "h2o", "snapkv", "streamingllm", "fp8"):
        assert float(sum(parts.values())) == close(float(round_seconds(t, d, p)))


def test_what_binds() -> None:
    def bound(name: str, d: Deployment, batch: float = 8.0) -> str:
        p = decode_point(batch, 4000, 100, 0.0)
        return bound_by([(step, 1.0) for step in parse(name).cycle(d, p).steps], d)

    d, eager = deployment(), deployment(stack="hf-eager")
    assert bound("full", d) == "GPU memory bandwidth"
    assert bound("offload", d) == "host-to-GPU link"
    assert bound("fastdecode", d) == "host memory bandwidth"
    assert bound("full", eager, 1.0) in ("kernel launches", "GPU memory bandwidth")
    assert (
        bound_by([(parse("full").prefill(d, prefill_point(8.0, 4000, 100)), 1.0)], d)
        == "arithmetic"
    )


@pytest.mark.parametrize(
    ("option", "arguments"),
    [
        ("--prompt", ([1.0], 0, 1)),
        ("--prompt", ([1.0], int(OPTION_RANGES["--prompt"].most) + 1, 1)),
        ("--prompt", ([1.0], 10**12, 1)),
        ("--prompt", ([1.0], float("nan"), 1)),
        ("--generate", ([1.0], 1, 0)),
        ("--generate", ([1.0], 1, -3)),
        ("--generate", ([1.0], 1, 1.5)),
        ("--generate", ([1.0], 1, float("inf"))),
        ("--batch", ([0.0], 1, 1)),
        ("--batch", ([4.0, -1.0], 1, 1)),
        ("--batch", ([2.5], 1, 1)),
        ("--batch", ([float("nan")], 1, 1)),
        ("--batch", ([MOST_SEQUENCES + 1.0], 1, 1)),
        ("--batch", ([], 1, 1)),
    ],
)
def test_impossible_workloads_are_refused(option: str, arguments: Any) -> None:
    batch, prompt, out = arguments
    with pytest.raises(InputError, match=rf"^{option}: got .+; expected whole numbers from 1 to "):
        check_workload(np.array(batch), prompt, out)
    check_workload(np.array([1.0, MOST_SEQUENCES]), 1, int(OPTION_RANGES["--prompt"].most))
    if len(batch) and out == out != float("inf"):
        with pytest.raises(InputError, match=f"^{option}: got"):
            Prediction(parse("full"), deployment(), np.array(batch), prompt, out)


def test_batches_divide_into_parts() -> None:
    with pytest.raises(InputError, match=r"fastdecode: batch 3 does not divide into 2 parts; "):
        predict("fastdecode", (2, 3))
    assert predict("offload:schedule=column,parts=4", 6).decode_s > 0  # in as many as divide it
