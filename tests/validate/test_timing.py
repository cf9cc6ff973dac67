"""Times of real runs beside predictions: clocks, the comparison, and refusals."""

import json
from collections.abc import Generator
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvsim.engine.timeline import (  # noqa: E402
    steady_seconds,
)
from kvsim.machines.deployment import Deployment  # noqa: E402
from kvsim.machines.profiles import load_hardware, load_stack  # noqa: E402
from kvsim.prediction.memory import decode_point  # noqa: E402
from kvsim.report import validate_times as report  # noqa: E402
from kvsim.techniques import parse  # noqa: E402
from kvsim.techniques.technique import Technique  # noqa: E402
from kvsim.validate.bench import suite  # noqa: E402
from kvsim.validate.counts.check import SLACK  # noqa: E402
from kvsim.validate.counts.expected import (  # noqa: E402
    RandomPrompts,
    copied_bytes,
    peak_bytes,
)
from kvsim.validate.model.architecture import load_architecture  # noqa: E402
from kvsim.validate.model.decoder import Decoder  # noqa: E402
from kvsim.validate.model.weights import random_weights  # noqa: E402
from kvsim.validate.times import clock as clocks  # noqa: E402
from kvsim.validate.times import points, timed  # noqa: E402
from kvsim.validate.times.compared import (  # noqa: E402
    Compared,
    Measured,
    SkippedPoint,
    keep_points,
    summarise,
)
from kvsim.validate.times.points import Grid, compare_times  # noqa: E402
from kvsim.validate.times.timed import (  # noqa: E402
    Counted,
    Live,
    run_counted,
    run_timed,
)
from tests.support.commands import line  # noqa: E402
from tests.support.places import ROOT  # noqa: E402

CPU = torch.device("cpu")
SMALL = Grid((("smollm2-135m", 1),), (1,), (24,), repeats=2, generate=4)


def test_a_timed_run_has_its_rounds_and_its_ops() -> None:
    arch = load_architecture("smollm2-135m").cut(2)
    work = RandomPrompts(2, 20, 5)
    d = Deployment(arch.model, load_hardware("a6000"), load_stack("kvsim"))
    weights = random_weights(arch, CPU, torch.bfloat16)
    decoder = Decoder(arch, weights, work.prompt + work.generate + SLACK, deployment=d)
    run = run_timed(decoder, parse("full"), work, by_op=True)
    assert len(run.rounds) == run.tokens == 4 and run.ttft > 0
    assert run.tpot == pytest.approx(np.mean(run.rounds))
    kinds = [p.kind for p in run.passes]
    assert kinds == ["prefill", *["decode"] * 4]
    assert {"qkv", "attn", "up", "lm_head"} <= run.passes[1].seconds().keys()
    samples = list(suite.of_runs(d, work, suite.Runs([run, run], run)))
    gemm = next(s for s in samples if s.case["op"] == "qkv" and s.case["phase"] == "decode")
    second = [p.ops["qkv"][1]() for p in run.passes[1:]]  # the head leaves cold caches to the first
    assert gemm.seconds == pytest.approx(np.median(second))
    m = arch.model
    assert gemm.op.flops == 2 * 2 * m.hidden * (m.heads * m.head_dim + 2 * m.k_width)


def test_layers_count_as_they_are_where_nothing_interrupts_them() -> None:
    """Layers take 1 s; caches cost 2 s more behind an interruption, in a layer or at the end."""
    computed, layers = [0.0], 6
    impl = SimpleNamespace(model=SimpleNamespace(layers=layers), on_layer_output=lambda *_: None)
    run = SimpleNamespace(impl=impl, forward=lambda *given: 7)
    watch = timed.LayerWatch(cast(Any, run), lambda: computed[0])
    for _ in range(3):
        assert run.forward(None, "decode") == 7
        for layer in range(layers):
            computed[0] += 1.0 if layer != 3 else 3.0
            impl.on_layer_output(layer, None, None)
        watch.end_round()
    assert watch.undisturbed([8.5, 8.5, 10.5]) == pytest.approx([6.5] * 3)


def test_short_ops_go_by_the_wall_and_long_ones_by_the_threads_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clocks, "computing_clock", lambda: lambda: 0.0)
    now = iter([0.0, 0.5, 1.0, 1.25, 2.0, 2.0001])
    monkeypatch.setattr(clocks, "perf_counter", lambda: next(now))
    spans = clocks._HostSpans()
    assert spans("prefill", "a")()() == 0.0  # of a prompt most are long: the thread's clock
    assert spans("decode", "a")()() == 0.5
    assert spans("decode", "a")()() == 0.0  # it was long
    assert spans("decode", "b")()() == 0.25
    assert spans("decode", "b")()() == 0.0
    assert spans("decode", "b")()() == pytest.approx(1e-4)  # it was short: it had been interrupted


def test_points_are_compared_op_by_op_and_end_to_end(tmp_path: Path) -> None:
    hardware, stack = load_hardware("a6000"), load_stack("kvsim")
    asked = [parse("full"), parse("streamingllm:sink=2,recent=10")]
    steps = list(compare_times(SMALL, asked, CPU, torch.bfloat16, hardware, stack))
    found = [step for step in steps if isinstance(step, Compared)]
    assert [c.technique.name for c in found] == ["full", "streamingllm"]
    for c in found:
        assert {m.name for m in c.whole} == {"ttft_s", "tpot_s", "resident_B", "peak_B"} | (
            {"computing_s"} if torch.get_num_threads() == 1 else set()
        )
        assert all(m.predicted > 0 and m.measured > 0 for m in (*c.whole, *c.ops))
        assert any(m.name == "decode qkv_s" for m in c.ops)
    resident = found[0].get("resident_B")
    assert resident and abs(resident.error) < 0.03
    answer = report.times_fields(found, [], summarise(found), "here", ["noisy"])
    assert [r["technique"] for r in answer["rounds"]] == [str(t) for t in asked]
    json.dumps(answer, allow_nan=False)
    report.make_result(answer).write(tmp_path / "F.html")
    assert "predicted against measured" in (tmp_path / "F.html").read_text()


def test_a_validation_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    hardware, stack = load_hardware("a6000"), load_stack("kvsim")
    asked = [parse("full"), parse("streamingllm:sink=2,recent=10")]
    path, about = tmp_path / "F.points.jsonl", {"device": "here"}

    def go_on() -> Generator[Compared | SkippedPoint | str, None, None]:
        kept = keep_points(path, about).resume()
        yield from compare_times(SMALL, asked, CPU, torch.bfloat16, hardware, stack, kept)

    first = go_on()
    before = next(step for step in first if isinstance(step, Compared))
    first.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"model": "torn')  # as a kill leaves it
    steps = list(go_on())
    found = [step for step in steps if isinstance(step, Compared)]
    assert found[0] == before and [c.technique.name for c in found] == ["full", "streamingllm"]
    assert len(steps) > len(found) and path.read_bytes().startswith(whole)
    assert list(go_on()) == found
    path.write_text(path.read_text() + '{"asked": 3}\n')
    assert len(keep_points(path, about).resume().done) == 2 and "asked" not in path.read_text()
    about["device"] = "there"
    assert not keep_points(path, about).resume().done


def test_what_cannot_run_at_a_point_is_left_out_and_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real = run_counted

    def short(decoder: Decoder, t: Technique, work: RandomPrompts) -> Counted:
        if t.name == "kivi":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40 GiB\nmore")
        return real(decoder, t, work)

    monkeypatch.setattr(points, "run_counted", short)
    hardware, stack = load_hardware("a6000"), load_stack("kvsim")
    asked = [parse("magicdec:budget=2"), parse("full"), parse("kivi:group=16,residual=16")]
    steps = list(compare_times(SMALL, asked, CPU, torch.bfloat16, hardware, stack))
    found = [step for step in steps if isinstance(step, Compared)]
    missing = [step for step in steps if isinstance(step, SkippedPoint)]
    assert [c.technique.name for c in found] == ["full"]
    assert [m.technique.name for m in missing] == ["magicdec", "kivi"]
    assert missing[1].reason == "CUDA out of memory. Tried to allocate 40 GiB"
    answer = report.times_fields(found, missing, summarise(found), "here", [])
    report.make_result(answer).show()
    report.make_result(answer).write(tmp_path / "F.html")
    for told in (capsys.readouterr().out, (tmp_path / "F.html").read_text()):
        assert "left out: kivi:" in told and "left out: magicdec:" in told


def test_memory_and_copies_are_those_of_one_run() -> None:
    live = Live()
    with torch.inference_mode(), live:
        kept = torch.zeros(1000)
        more = kept + 1
        view = more.view(10, 100)
        del more
        assert (live.held, live.peak) == (8000, 8000)
        del view
        assert (live.held, live.peak) == (4000, 8000)
        kept.add_(1)
        assert live.held == 4000
    arch = load_architecture("smollm2-1.7b").cut(2)
    work = RandomPrompts(2, 160, 4)
    d = Deployment(arch.model, load_hardware("a6000"), load_stack("kvsim"))
    weights = random_weights(arch, CPU, torch.bfloat16)
    decoder = Decoder(arch, weights, work.prompt + work.generate + SLACK, deployment=d)
    for text in ("full", "offload", "kcache:n=16", "snapkv:budget=64,window=8"):
        t = parse(text)
        counted = run_counted(decoder, t, work)
        assert peak_bytes(d, t, work, False) == pytest.approx(counted.peak, rel=0.03)
        for way, moved in counted.copied.items():
            assert copied_bytes(d, t, work, way) == moved
            assert (moved > 0) == (text.partition(":")[0] in ("offload", "kcache"))


def test_a_round_is_seen_op_by_op_on_both_sides() -> None:
    hardware, stack = load_hardware("a6000"), load_stack("kvsim")
    grid = replace(SMALL, models=(("smollm2-135m", 3),), prompts=(200,), repeats=1)
    asked = [parse("offload"), parse("offload:schedule=column,parts=1")]
    found, column = [
        step
        for step in compare_times(grid, asked, CPU, torch.bfloat16, hardware, stack)
        if isinstance(step, Compared)
    ]
    assert len(column.rounds) == 2
    predicted, measured = found.rounds
    for r in (predicted, measured):
        gpu = [s for s in r.spans if s.stream == "gpu"]
        seen = groupby(s.name for s in gpu if s.name in ("qkv", "attn", "down"))
        assert [name for name, _ in seen] == [*("qkv", "attn", "down") * 3]  # attn in some pieces
        assert all(a.end <= b.begin + 1e-12 for a, b in pairwise(gpu))
        assert {s.stream for s in r.spans} == {"gpu", "h2d", "d2h"}
        assert 0 <= r.overlap <= 1 + 1e-9
    d = Deployment(load_architecture("smollm2-135m").cut(3).model, hardware, stack)
    step = found.technique.cycle(d, decode_point(1, 200, 4, 1.0)).steps[0]
    assert max(s.end for s in predicted.spans) == pytest.approx(
        float(steady_seconds(step, d)), rel=1e-9
    )


def compared(name: str, measured: float, predicted: float, noise: float = 0.01) -> Compared:
    times = tuple(Measured(n, predicted, measured, noise) for n in ("ttft_s", "tpot_s"))
    return Compared("m", 1, 1, 8, parse(name), times, ())


def test_errors_and_orders_are_those_of_the_points() -> None:
    found = [compared("full", 1.0, 1.1), compared("kivi", 2.0, 1.0), compared("h2o", 2.01, 9.0)]
    summary = summarise(found)
    assert summary.points == 6
    assert summary.median == pytest.approx(0.5)  # of 0.1, 0.5 and 3.48, twice each
    assert summary.same_order == pytest.approx(1 / 2)  # kivi and h2o are within the noise
    assert summary.same_winner == 0.0
    unsure = [replace(c, whole=tuple(replace(m, noise=0.9) for m in c.whole)) for c in found]
    assert np.isnan(summarise(unsure).same_order)


def test_no_point_is_one_that_a_stack_is_fitted_to() -> None:
    t = suite
    fitted = {
        "cpu": (t.BATCH, t.PROMPTS, t.SUITE_CPU_MODELS),
        "cuda": (t.GPU_BATCH, t.GPU_PROMPTS, t.SUITE_GPU_MODELS),
    }
    for device, (batch, prompts, models) in fitted.items():
        grid = Grid.for_device(torch.device(device))
        assert batch not in grid.batches
        assert not set(prompts) & set(grid.prompts)
        assert not set(models) & set(grid.models)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--max-error", "0.1"], "was not measured here"),
        (["--report", "nowhere/F.html"], "expected a file in an existing"),
        (["--max-error", "x"], "--max-error"),
    ],
)
def test_bad_input_is_one_line(more: list[str], said: str) -> None:
    assert said in line("validate", *more)


def test_a_profile_of_another_device_is_refused(tmp_path: Path) -> None:
    text = (ROOT / "kvsim/hwprofiles" / "h100.toml").read_text()
    path = tmp_path / "F.toml"
    path.write_text('device = "NVIDIA H100"\ndate = "2026-01-01"\n' + text)
    assert "was measured on NVIDIA H100, this is" in line("validate", "--gpu", str(path))


def test_a_shared_cpu_is_judged_by_the_threads_own_clock() -> None:
    """Other processes took nine tenths of the machine; what the thread computed is as predicted."""
    found = [
        replace(
            c, whole=(*c.whole, Measured("computing_s", 0.11 * m.measured, 0.1 * m.measured, 0))
        )
        for c in (compared("full", 1.0, 0.1), compared("kivi", 2.0, 0.2))
        if (m := c.get("tpot_s"))
    ]
    summary = summarise(found)
    assert (summary.clock, summary.points) == ("thread", 2)
    assert summary.median == pytest.approx(0.1)
    assert summary.wall_median == pytest.approx(0.9)
    assert summary.machine_share == pytest.approx(0.1)
    assert summary.same_order == 1.0
    said = str(report._write_answer(report.times_fields(found, [], summary, "here", [])))
    assert "off by 10 % at the median by the compute thread's own clock" in said
