"""What is said around a prediction: where a technique breaks even, the pool, and what would fit."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.prediction import breakeven
from kvsim.prediction.breakeven import BreakEven, break_even_acceptance, break_evens, linked
from kvsim.prediction.generate import Prediction
from kvsim.prediction.memory import decode_point, tier_bytes
from kvsim.prediction.pool import count_held, longest_prompt, pool, remedies, usual_share
from kvsim.techniques import parse

FULL = parse("full")


def where(gpu: str = "a6000", model: str = "llama3-8b", **more: Any) -> Deployment:
    return Deployment(load_model(model), load_hardware(gpu), load_stack("fused"), **more)


def predicted(text: str, d: Deployment, batch: int, prompt: int, generate: int = 32) -> Prediction:
    return Prediction(parse(text), d, np.array([float(batch)]), prompt, generate)


def test_a_crossing_lies_where_the_logarithms_are_straight() -> None:
    nan = float("nan")
    found = BreakEven("prompt", np.array([1.0, 4, 16, 64, 256]), np.array([0.25, 4, nan, 2, 0.5]))
    assert found.crossings == pytest.approx([2.0, 128.0])
    found = BreakEven("acceptance", np.array([0.0, 0.4, 0.8]), np.array([0.5, 8.0, 9.0]))
    assert found.crossings == pytest.approx([0.1])
    assert BreakEven("batch", np.array([1.0, 2.0]), np.array([1.0, 0.5])).crossings == []
    assert BreakEven("batch", np.array([1.0, 2.0]), np.array([1.0, 2.0])).crossings == []
    along = BreakEven("batch", np.array([1.0, 2, 4, 8]), np.array([1.004, 0.995, 1.003, 0.5]))
    assert along.crossings == []
    through = BreakEven("batch", np.array([1.0, 2, 4, 8]), np.array([0.5, 1.0, 1.005, 2.0]))
    assert through.crossings == pytest.approx([2.0])


def test_every_axis_has_the_ratio_of_two_predictions() -> None:
    d = where(model="llama2-7b")
    asked = predicted("magicdec:acceptance=0.7", d, 4, 2048)
    found = {one.axis: one for one in break_evens(asked, FULL)}
    assert set(found) == {"prompt", "batch", "acceptance"}
    assert found["prompt"].values.tolist() == [256, 512, 1024, 2048]  # 4096 and 32 do not fit
    assert found["batch"].values.tolist() == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert found["acceptance"].values.tolist() == pytest.approx(np.linspace(0, 1, 11).tolist())
    for axis, index, text, batch, prompt in (
        ("prompt", 1, "magicdec:acceptance=0.7", 4, 512),
        ("batch", 3, "magicdec:acceptance=0.7", 8, 2048),
        ("acceptance", 9, "magicdec:acceptance=0.9", 4, 2048),
    ):
        mine = Prediction(parse(text), d, np.array([float(batch)]), prompt, 32, 4)
        base = Prediction(FULL, d, np.array([float(batch)]), prompt, 32, 4)
        expected = mine.decode_tok_s[0] / base.decode_tok_s[0]
        assert found[axis].ratio[index] == pytest.approx(expected, rel=1e-12)
    assert np.isnan(found["batch"].ratio[-1])  # does not fit


def test_an_axis_needs_two_points_that_fit() -> None:
    nan = float("nan")
    (one,) = breakeven._make("batch", [1, 2, 4], [0.5, nan, 2.0])
    assert one.values.tolist() == [1, 2, 4] and one.crossings == []
    (two,) = breakeven._make("prompt", [256, 512], [0.5, 2.0])
    assert two.crossings == pytest.approx([256 * 2**0.5])
    assert not [*breakeven._make("batch", [1, 2, 4], [nan, nan, 2.0])]
    assert not [*breakeven._make("prompt", [256], [2.0])]
    assert not [*breakeven._make("prompt", [], [])]


def test_the_link_is_an_axis_only_where_it_matters_and_scales_both_directions() -> None:
    d = where()
    found = {one.axis: one for one in break_evens(predicted("offload", d, 4, 4096), FULL)}
    assert found["link"].values.tolist() == [0.25, 0.5, 1, 2, 4, 8, 16]
    assert (np.diff(found["link"].ratio) >= 0).all()
    fast = linked(d, 4.0).hardware.links
    for name, link in d.hardware.links.items():
        times = 4.0 if name in ("h2d", "d2h") else 1.0
        assert fast[name].bandwidth == link.bandwidth * times
        assert fast[name].latency == link.latency
    there = Prediction(parse("offload"), linked(d, 4.0), np.array([4.0]), 4096, 32, 4)
    base = Prediction(FULL, linked(d, 4.0), np.array([4.0]), 4096, 32, 4)
    expected = there.decode_tok_s[0] / base.decode_tok_s[0]
    assert found["link"].ratio[4] == pytest.approx(expected, rel=1e-12)
    assert "link" not in {one.axis for one in break_evens(predicted("kivi", d, 4, 4096), FULL)}


def test_batches_are_those_that_divide_into_the_parts_of_the_batch() -> None:
    asked = predicted("offload:schedule=column,parts=8", where(), 8, 1024)
    found = {one.axis: one for one in break_evens(asked, FULL)}
    assert found["batch"].values.tolist() == [8, 16, 32, 64, 128, 256, 512, 1024]


def test_the_acceptance_that_breaks_even(monkeypatch: pytest.MonkeyPatch) -> None:
    d = where(model="llama2-7b")
    assert break_even_acceptance(predicted("kivi", d, 4, 2048), FULL) is None
    cases: tuple[tuple[Any, float], ...] = (
        (lambda a: 0.5 + a, 0.5),
        (lambda a: 2.0 + a, 0.0),
        (lambda a: 0.5 + a / 9, np.inf),
        (lambda a: 1.0 + a, 0.0),
    )
    for ratio, expected in cases:

        def made(self: object, t: Any, *point: object, ratio: Any = ratio) -> float:
            return float(ratio(t.layers[0].terms[0].acceptance))

        monkeypatch.setattr(breakeven._Speeds, "ratio", made)
        found = break_even_acceptance(predicted("magicdec", d, 4, 2048), FULL)
        assert found == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("text", "batch", "model"), [("full", 16, "llama3-8b"), ("offload", 40, "llama2-7b")]
)
def test_the_longest_prompt_fits_and_one_token_more_does_not(
    text: str, batch: int, model: str
) -> None:
    d = where("a6000", model)
    most = longest_prompt(parse(text), d, batch, 32)
    assert most > 1000
    assert predicted(text, d, batch, most).fits.all()
    assert not predicted(text, d, batch, most + 1).fits.any()


def test_memory_that_is_exactly_full_is_enough() -> None:
    d = where()
    whole = float(predicted("full", d, 4, 1000).gpu_bytes[0])
    for memory, expected in ((whole, 1000), (np.nextafter(whole, 0.0), 999)):
        tight = replace(d, hardware=replace(d.hardware, gpu_memory=memory))
        assert longest_prompt(FULL, tight, 4, 32) == expected
        assert predicted("full", tight, 4, 1000).fits[0] == (expected == 1000)


def test_no_prompt_fits_where_weights_do_not_and_a_prompt_of_one_may() -> None:
    assert longest_prompt(FULL, where("t4"), 1, 32) == 0
    d = where("a6000")
    most = int(predicted("full", d, 1, 1).max_batch[0])
    assert longest_prompt(FULL, d, most, 32) >= 1
    assert longest_prompt(FULL, d, most, 32) < 8
    assert longest_prompt(FULL, d, 40 * most, 32) == 0


def test_a_shorter_prompt_is_the_longest_that_an_engine_has_room_for() -> None:
    d = replace(where("rtx3090", "llama3.1-8b"), stack=load_stack("vllm@a40"))
    options = [remedy.option for remedy in remedies(predicted("full", d, 1, 1_000_000))]
    assert usual_share(d) < 1
    assert f"--prompt {longest_prompt(FULL, d, 1, 32, usual_share(d))}" in options


def test_host_memory_counts_for_all_gpus_of_a_replica() -> None:
    d = where("a6000", "llama2-7b", tp=2)
    most = longest_prompt(parse("offload"), d, 64, 32)
    assert predicted("offload", d, 64, most).fits.all()
    assert not predicted("offload", d, 64, most + 1).fits.any()


@pytest.mark.parametrize("text", ["full", "kivi:bits=4", "offload:schedule=column,parts=4"])
def test_a_pool_is_what_sequences_share_beside_all_else(text: str) -> None:
    d, t = where(), parse(text)

    def held(batch: float) -> float:
        point = decode_point(batch, 1000, 24, 23.0)
        return float(tier_bytes(t.resident(d, point), "gpu"))

    parts = t.tiles()
    each = (held(8.0 * parts) - held(4.0 * parts)) / (4 * parts)
    beside = held(4.0 * parts) - 4 * parts * each
    found = pool(t, d, 1000, 24, 0.8)
    assert found.bytes == pytest.approx(0.8 * d.hardware.gpu_memory - beside, rel=1e-9)
    assert found.tokens == pytest.approx(found.bytes / each * 1024, abs=2)
    assert found.blocks == found.tokens // 16
    assert found.concurrency == found.blocks / 64
    short = pool(t, d, 1, 2, 0.8)
    assert short.concurrency == short.blocks  # three tokens take a whole block
    assert found.length == 1024 and found.share == 0.8
    assert pool(t, d, 1000, 24).share == 0.9
    assert pool(FULL, where("t4"), 1000, 24).tokens == 0


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("full", 1024), ("kivi:bits=4", 1024), ("quest", 1024), ("snapkv:budget=200", 224),
        ("snapkv:budget=0.5", 524), ("snapkv:budget=200 + kivi:bits=4", 224),
        ("streamingllm:sink=4,recent=60", 64), ("0-15: full; 16-31: snapkv:budget=200", 624),
    ],
)  # fmt: skip
def test_a_pool_counts_what_sequences_keep(text: str, kept: int) -> None:
    found = pool(parse(text), where(), 1000, 24)
    assert found.kept == kept
    assert found.concurrency == pytest.approx(found.blocks / -(-kept // 16))
    if "kivi" not in text and "quest" not in text:  # what each sequence has besides is small
        assert found.tokens == pytest.approx(pool(FULL, where(), 1000, 24).tokens, rel=0.3)


def test_remedies_are_the_gentlest_changes_that_fit() -> None:
    d = where("rtx4090")
    asked = predicted("full", d, 32, 4096)
    assert not asked.fits[0]
    found = {one.option.split()[0]: one for one in remedies(asked)}
    assert set(found) == {"--batch", "--prompt", "--weights", "--tp"}
    assert all(one.prediction.fits[0] for one in found.values())
    most = int(asked.max_batch[0])
    assert found["--batch"].option == f"--batch {most}"
    assert found["--batch"].prediction.batch[0] == most
    prompt = int(found["--prompt"].option.split()[1])
    assert found["--prompt"].prediction.prompt == prompt == longest_prompt(FULL, d, 32, 32)
    assert not predicted("full", d, 32, prompt + 1).fits[0]
    assert found["--tp"].option == f"--tp {next(n for n in (2, 4, 8) if fits_on(n, asked))}"


def fits_on(gpus: int, asked: Prediction) -> bool:
    d = where("rtx4090", tp=gpus)
    return bool(predicted("full", d, int(asked.batch[0]), asked.prompt).fits[0])


@pytest.mark.parametrize(("longest", "named"), [(0, False), (1, True), (1023, True), (1024, False)])
def test_a_shorter_prompt_is_a_remedy_down_to_one_token(
    longest: int, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsim.prediction.pool.longest_prompt", lambda *of: longest)
    options = [one.option for one in remedies(predicted("full", where("t4"), 8, 1024))]
    assert (f"--prompt {longest}" in options) is named


def test_no_remedy_is_named_that_changes_nothing() -> None:
    d = where("rtx4090", tp=8)
    options = [one.option for one in remedies(predicted("full", d, 4, 1024))]
    assert not [o for o in options if o.startswith(("--batch", "--prompt", "--tp"))]
    small = where("t4", weights="int4")
    options = [one.option for one in remedies(predicted("full", small, 1, 10**6))]
    assert not [o for o in options if o.startswith(("--batch", "--weights"))]
    assert [o for o in options if o.startswith("--prompt")]


def test_a_batch_or_prompt_of_one_is_a_remedy_and_none_at_all_is_not() -> None:
    d = where("t4", weights="int4")
    tight = longest_prompt(FULL, d, 1, 32)
    options = [one.option for one in remedies(predicted("full", d, 2, tight))]
    assert "--batch 1" in options
    assert not [o for o in options if o.startswith("--weights")]
    options = [one.option for one in remedies(predicted("full", where("t4"), 8, 4096))]
    assert not [o for o in options if o.startswith(("--batch", "--prompt"))]


def test_a_smaller_format_on_fewer_gpus_and_layers_on_the_cpu_are_remedies() -> None:
    asked = predicted("full", where("rtx4090", "llama3.3-70b"), 1, 4000)
    options = [one.option for one in remedies(asked)]
    assert options[:2] == ["--tp 8", "--weights int4 --tp 2"]
    assert options[2].startswith("--stack llamacpp --weights q4_k_m --n-gpu-layers ")


def test_the_sequences_held_are_those_of_the_pool_that_engines_use() -> None:
    d = replace(where("a100-80g", "qwen3-14b"), stack=load_stack("vllm@a100-80g"))
    found = predicted("full", d, 1, 8000)
    room = pool(found.technique, found.deployment, 8000, found.generate)
    assert count_held(found) == int(room.concurrency) < int(found.max_batch[0])
