"""Stacks from measured operators and load tests: numbers recovered, bad rows named, the ledger."""

import csv
import os
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from kvsim.engine.ops import gemm
from kvsim.engine.roofline import seconds
from kvsim.engine.timeline import makespan, steady_seconds
from kvsim.errors import InputError
from kvsim.evidence import ledger, loadtests
from kvsim.evidence.ops import fit, rows
from kvsim.graph import Point
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack, with_numbers
from kvsim.models.configs import load_model
from kvsim.prediction.memory import prefill_point
from kvsim.techniques import parse
from tests.support.commands import run

TRUTH = {
    "gemm": {"memory": 0.83, "compute": 0.71, "floor_s": 4e-6, "half_size": 60.0, "added": 0.2,
             "half_columns": 400.0, "input_passes": 4.0},
    "attention": {"memory": 0.78, "floor_s": 9e-6, "padding": 80.0, "split_s": 7e-6, "wide": 1.4,
                  "narrow": 1.2, "ungrouped": 1.3},
}  # fmt: skip
HEADER = ["device", "engine", "version", "op", "dtype", "ms", "m", "n", "k", "quantise_ms"]


def numbers(name: str) -> dict[str, float]:
    return {f"kernel.{name}.{key}": value for key, value in TRUTH[name].items()}


def synthetic(name: str, noise: float = 0.02, seed: int = 0) -> rows.OpRows:
    """Rows that a known stack predicts, with some noise."""
    rng = np.random.default_rng(seed)
    if name == "gemm":
        grid = np.array(np.meshgrid([1, 16, 64, 256, 1024, 4096], [1024, 4096, 16384],
                                    [2048, 4096, 8192])).reshape(3, -1).astype(float)  # fmt: skip
        shape, kind = dict(zip(("m", "n", "k"), grid, strict=True)), "gemm"
    else:
        grid = np.array(np.meshgrid([1, 8, 64], [15, 255, 2047, 16383], [8, 32], [64, 128, 256]))
        batch, context, heads, head_dim = grid.reshape(4, -1).astype(float)
        shape = {"batch": batch, "context": context, "heads": heads,
                 "kv_heads": np.full(batch.size, 8.0), "head_dim": head_dim}  # fmt: skip
        kind = "decode_attention"
    count = len(next(iter(shape.values())))
    bare = rows.OpRows(kind, "fp16", shape, np.ones(count), ("line",) * count)
    stack = with_numbers(load_stack("fused"), numbers(name))
    took = fit.predict_rows(bare, load_hardware("h100"), stack)
    return rows.OpRows(kind, "fp16", shape, took * rng.normal(1, noise, count), bare.lines)


@pytest.mark.parametrize("name", ["gemm", "attention"])
def test_known_numbers_are_recovered_within_their_uncertainty(name: str) -> None:
    away = []
    for seed in range(8):
        found = fit.fit_class(
            synthetic(name, seed=seed), load_hardware("h100"), load_stack("fused"), 0
        )
        away += [
            abs(found.fit.values[key] - value) / found.fit.errors[key]
            for key, value in numbers(name).items()
        ]
    assert np.mean(np.array(away) <= 1) >= 0.6  # as of a normal distribution: 0.68
    assert np.mean(np.array(away) <= 2) >= 0.9  # 0.95
    found = fit.fit_class(synthetic(name), load_hardware("h100"), load_stack("fused"))
    held_out = np.abs(found.held_out / found.rows.took - 1)
    assert np.median(held_out) < 0.03
    assert not set(found.fit.values) & set(found.fit.unknown)


def test_a_cards_own_numbers_do_not_stand_in_for_what_is_fitted() -> None:
    """``vllm`` has numbers of its own for an H100, and those of an A40 start from it."""
    many = rows.OpTable("h100", "mine", "1", (synthetic("gemm"),), {}, ())
    (found,) = fit.fit_table(many, load_hardware("h100"), load_stack("vllm"), 0)
    assert found.fit.values["kernel.gemm.compute"] == pytest.approx(0.71, rel=0.05)


def table(path: Path, lines: list[dict[str, object]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, HEADER)
        writer.writeheader()
        writer.writerows(lines)
    return path


def gemm_lines(count: int = 54) -> list[dict[str, object]]:
    s = synthetic("gemm")
    return [
        {"device": "h100", "engine": "mine", "version": "1.2", "op": "gemm", "dtype": "bfloat16",
         "ms": 1e3 * s.took[i], **{k: int(v[i]) for k, v in s.shape.items()}}
        for i in range(count)
    ]  # fmt: skip


def test_rows_that_are_no_evidence_are_counted_by_reason(tmp_path: Path) -> None:
    good = gemm_lines()
    bad = [
        good[0],
        good[1] | {"ms": 1e-6},
        good[2] | {"ms": -1},
        good[3] | {"ms": "soon"},
        good[4] | {"dtype": "fp3"},
        good[5] | {"op": "conv"},
        good[6] | {"m": 0},
        good[7] | {"n": 1.5},
        good[8] | {"engine": "other"},
        good[9] | {"version": "1.1"},
        good[10] | {"m": "1e15"},
    ]
    found = rows.read_ops([table(tmp_path / "a.csv", good + bad)], "mine", load_hardware("h100"))
    assert [len(r) for r in found.rows] == [len(good)] and found.version == "1.2"
    assert dict(found.rejected) == {
        "a duplicate": 1, "faster than memory allows": 1,
        "whose time is not a positive number": 2, "of an unknown number format 'fp3'": 1,
        "of an unknown op 'conv'": 1, "whose m is no whole number": 1,
        "whose n is no whole number": 1, "of another engine or device": 1,
        "of another version": 1, "whose m is absurdly large": 1,
    }  # fmt: skip


def test_a_share_of_quantising_is_a_row_of_its_own(tmp_path: Path) -> None:
    """4 us and 24 bits of each input number at half of an H100's rate, once per input."""
    lines = []
    for m, k in product((1, 16, 256, 1024, 4096, 8192, 16384), (2048, 4096, 8192, 16384)):
        took = 4e-3 + 1e3 * 3 * m * k / (0.5 * 3.35e12)
        shape = {"m": m, "n": 4096, "k": k, "dtype": "fp8", "op": "gemm"}
        for n, share in ((4096, took), (8192, took), (512, 0.0)):
            lines.append(
                {"device": "h100", "engine": "mine", "version": "1", "ms": 1 + took + 2e-7 * m * k}
                | shape
                | {"n": n, "quantise_ms": share}
            )
    lines.append(lines[-3] | {"n": 1024, "k": 3000, "quantise_ms": 1e-5})  # 5 TB/s and more
    machine = load_hardware("h100")
    found = rows.read_ops([table(tmp_path / "a.csv", lines)], "mine", machine)
    assert found.rejected == {"whose quantising is faster than memory allows": 1}
    own = next(r for r in found.rows if r.kind == "quantise_input")
    assert len(own) == 28
    numbers = fit.fit_class(own, machine, load_stack("fused"), 0).fit.values
    assert numbers["kernel.quantise-input.floor_s"] == pytest.approx(4e-6, rel=0.01)
    assert numbers["kernel.quantise-input.memory"] == pytest.approx(0.5, rel=0.01)
    stack = with_numbers(load_stack("fused"), numbers)
    static, dynamic = (
        Deployment(load_model("llama3.1-8b"), machine, stack, weights)
        for weights in ("fp8", "fp8-dynamic")
    )
    one, other = (
        float(np.ravel(seconds(gemm(d, "out", 1.0, (4096, 4096)), d))[0]) for d in (static, dynamic)
    )
    assert other - one == pytest.approx(4e-6 + 3 * 4096 / (0.5 * 3.35e12), rel=0.02)


def test_rows_warm_in_l2_are_left_out(tmp_path: Path) -> None:
    shape = {"batch": 8, "context": 511, "heads": 32, "kv_heads": 8, "head_dim": 128}
    line = {"device": "h100", "engine": "mine", "version": "1", "op": "decode_attention",
            "kv_dtype": "bfloat16", "ms": 1.0} | shape  # fmt: skip
    for name, extra, l2 in (("told", {"l2": "warm"}, 0.0), ("derived", {}, 50e6)):
        path = tmp_path / f"{name}.csv"
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(line | extra))
            writer.writeheader()
            writer.writerow(line | extra)
        with pytest.raises(InputError, match="1 warm in the L2 cache"):
            rows.read_ops([path], "mine", load_hardware("h100"), l2=l2)


def test_from_ops_writes_a_stack_that_predicts(tmp_path: Path) -> None:
    source, out = table(tmp_path / "ops.csv", gemm_lines()), tmp_path / "mine.toml"
    done = run("calibrate", "--from-ops", str(source), "--engine", "mine", "--out", str(out))
    assert done.code == 0, done.err
    assert "gemm: 54 rows" in done.out
    stack = load_stack(out)
    assert stack.kernel("gemm").memory == pytest.approx(0.83, abs=0.03)
    assert stack.kernel("prompt") == load_stack("vllm@h100").kernel("prompt")  # no rows: as it was
    assert "54 rows of mine 1.2 on h100 (ops.csv)" in stack.source


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--engine", "none"], "no rows for 'none'"),
        ([], "--engine is missing"),
        (["--engine", "mine", "--hold-out", "0.9"], "--hold-out: got '0.9'"),
        (["--engine", "mine", "--version", "9"], "no usable row for mine on h100"),
        (["--engine", "mine", "--gpu", "a100-80g"], "no usable row for mine on a100-80g"),
    ],
)
def test_bad_requests_write_nothing(tmp_path: Path, options: list[str], said: str) -> None:
    source, out = table(tmp_path / "ops.csv", gemm_lines()), tmp_path / "mine.toml"
    done = run("calibrate", "--from-ops", str(source), "--out", str(out), *options)
    assert done.code == 2 and said in done.err and not out.exists()


def test_load_tests_give_back_host_times(tmp_path: Path) -> None:
    stack = with_numbers(
        load_stack("vllm").for_gpu("h100"), {"time.step_s": 2e-3, "time.sequence_s": 4e-5}
    )
    names = ("device", "engine", "model", "precision", "tp", "isl", "osl", "concurrency")
    lines = []
    for prompt in (128, 1024):
        for sequences in (1, 8, 64, 256):
            one = loadtests.LoadTest(
                "", "h100", "llama3.1-8b", "bf16", 1, prompt, 512, sequences, 1.0, 1.0
            )
            took = float(loadtests.predict_latencies([one], stack)[0])
            row = ("h100", "mine", "llama3.1-8b", "bf16", 1, prompt, 512, sequences)
            tpot = 1e3 * took / 512
            lines.append(dict(zip(names, row, strict=True)) | {"ttft_ms": tpot, "tpot_ms": tpot})
    path = tmp_path / "serving.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    out = tmp_path / "host.toml"
    done = run("calibrate", "--from-serving", str(path), "--engine", "mine", "--stack", "vllm",
               "--out", str(out))  # fmt: skip
    assert done.code == 0, done.err
    assert load_stack(out).time.step == pytest.approx(2e-3, rel=0.02)
    assert load_stack(out).time.sequence == pytest.approx(4e-5, rel=0.02)


HOST = {
    "time.step_s": 2e-4,
    "time.sequence_s": 3e-6,
    "server.token_s": 2e-4,
    "server.prompt_s": 15e-3,
}


def load_tests(tps: tuple[int, ...]) -> list[loadtests.LoadTest]:
    return [
        loadtests.LoadTest(
            "", "h100", "llama3.1-8b", "bf16", tp, prompt, generate, sequences, 1.0, 1.0
        )
        for tp in tps
        for prompt, generate in ((128, 64), (1024, 128), (1024, 512), (4096, 128))
        for sequences in (8, 32, 128)
    ]


def test_work_beside_the_gpu_is_told_where_it_is_the_longer() -> None:
    stack = with_numbers(load_stack("trtllm").for_gpu("h100"), HOST)
    rows = load_tests((1, 8))
    gpu = loadtests.predict_kernels(rows, stack)
    told = [
        replace(r, latency=float(took), per_token=float(each))
        for r, took, each in zip(rows, gpu.latencies(HOST), gpu.per_token(HOST), strict=True)
    ]
    found = loadtests.fit_host(told, stack).values
    assert found == pytest.approx(HOST, rel=0.05)


def test_what_load_tests_do_not_tell_stays_as_it_is() -> None:
    """Work beside the GPU that is hidden everywhere keeps the stack's own number."""
    hidden = {"server.token_s": 2e-9, "server.prompt_s": 3e-9}
    stack = with_numbers(load_stack("trtllm").for_gpu("h100"), HOST | hidden)
    rows = load_tests((1,))
    gpu = loadtests.predict_kernels(rows, stack)
    told = [
        replace(r, latency=float(took), per_token=float(each))
        for r, took, each in zip(
            rows, gpu.latencies(HOST | hidden), gpu.per_token(HOST | hidden), strict=True
        )
    ]
    found = loadtests.fit_host(told, stack)
    assert {name: found.values[name] for name in hidden} == hidden
    assert set(hidden) <= set(found.unknown)
    assert found.values["time.step_s"] == pytest.approx(HOST["time.step_s"], rel=0.02)


def test_load_tests_are_composed_as_the_engine_plays_passes() -> None:
    """A step and a prompt with all host times on the timeline, and as the fit composes them.

    The process that sends text works on while prompts are read, which passes one by one do not
    show: it is compared alone below.
    """
    rows, host = load_tests((8,)), HOST | {"server.token_s": 0.0}
    stack = with_numbers(load_stack("trtllm").for_gpu("h100"), host)
    d = Deployment(load_model("llama3.1-8b"), load_hardware("h100"), stack, "fp16", 8)
    t, took = parse("full"), []
    for r in rows:
        p = Point(r.sequences, r.prompt + r.generate / 2, 1.0, r.prompt, r.prompt + r.generate)
        step = sum(steady_seconds(s, d) for s in t.cycle(d, p).steps)
        prompt = makespan(t.prefill(d, prefill_point(1.0, r.prompt, r.generate)), d)
        took.append(float(np.ravel(r.generate * step + r.sequences * prompt)[0]))
    gpu, around = loadtests.predict_kernels(rows, stack), [12e-3 + 3e-6 * r.prompt for r in rows]
    assert gpu.latencies(host) - around == pytest.approx(took, rel=1e-9)
    sending = [r.sequences * r.generate * HOST["server.token_s"] for r in rows]
    assert gpu.latencies(HOST) - around == pytest.approx(np.maximum(took, sending), rel=1e-9)
    assert 0 < np.sum(np.array(sending) > took) < len(rows)


def test_drawn_lengths_are_taken_at_their_mean(tmp_path: Path) -> None:
    """``--random-range-ratio 0.5``: three quarters of isl and osl, and as much latency."""
    row = "h100,mine,llama3.1-8b,bf16,1,1000,400,8,100,10"
    head = "device,engine,model,precision,tp,isl,osl,concurrency,ttft_ms,tpot_ms"
    (tmp_path / "plain.csv").write_text(f"{head}\n{row}\n")
    (tmp_path / "drawn.csv").write_text(f"{head},random_range_ratio\n{row},0.5\n")
    plain, drawn = (
        loadtests.read_load_tests(tmp_path / name, "mine")[0] for name in ("plain.csv", "drawn.csv")
    )
    assert (drawn.prompt, drawn.generate) == (750, 300)
    assert plain.latency == pytest.approx(0.1 + 399 * 0.01)
    assert drawn.latency == pytest.approx(0.1 + 299 * 0.01)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize(("model", "precision"), [("llama3.1-8b", "bf16"), ("llama3.1-70b", "fp8")])
def test_more_gpus_take_less_time_and_more_gpu_time(
    engine: str, model: str, precision: str
) -> None:
    counts = (1, 2, 4, 8) if precision == "bf16" else (2, 4, 8)
    tests = [
        loadtests.LoadTest("", "h100", model, precision, tp, 1024, 512, 16, 1.0, 1.0)
        for tp in counts
    ]
    took = loadtests.predict_latencies(tests, load_stack(engine))
    assert (np.diff(took) < 0).all()
    assert (np.diff(took * counts) > 0).all()  # no more than n times as fast on n GPUs


def test_the_nearest_entry_says_how_far_it_is() -> None:
    entries = [
        ledger.LedgerEntry(
            "vllm", "1", "decode", "h100", "full", 40, 0.04, 0.1, 0.9, 1.1, "shape", ""
        )
    ]
    stack, model = load_stack("vllm"), load_model("llama3-8b")
    here = Deployment(model, load_hardware("h100"), stack)
    exact = ledger.evidence_for(here, "full", entries=entries)
    assert exact.exact and "40 held-out" in exact.words
    assert 0.85 < exact.low < 0.9 and 1.1 < exact.high < 1.15  # tails of 7 %, not of 10
    other = ledger.evidence_for(here, "kivi:bits=2", entries=entries)
    assert not other.exact and "None was measured with kivi" in other.words
    assert other.low < exact.low and other.high > exact.high
    far = Deployment(model, load_hardware("a6000"), load_stack("ideal"))
    assert ledger.evidence_for(far, "kivi", entries=entries).high > other.high
    none = ledger.evidence_for(here, "full", entries=[])
    assert none.entry is None and "guess" in none.words


def test_intervals_are_wide_for_weights_that_were_never_measured() -> None:
    def spread(weights: str, gpu: str = "h100", stack: str = "vllm") -> tuple[float, str]:
        d = Deployment(load_model("llama3-8b"), load_hardware(gpu), load_stack(stack), weights)
        known = ledger.evidence_for(d, "full")
        return known.high / known.low, known.words

    plain, told = spread("fp16")
    assert spread("fp8")[0] < 1.2 * plain and "weights" not in told
    for weights in ("int8", "int4-g32"):  # no product of such weights was measured on that card
        found, told = spread(weights)
        assert found > plain and f"with {weights} weights" in told
    assert "weights" not in spread("int8", "a100-80g", "trtllm")[1]
    assert "with fp8 weights" in spread("fp8", "a100-80g")[1]  # that card has no rows of fp8
    assert "weights" not in spread("fp8", "l4")[1]  # a card without any rows: typical numbers
    assert "weights" not in spread("int4", "a100-80g", "gpt-fast")[1]
    experts = Deployment(
        load_model("deepseek-v3"), load_hardware("h200"), load_stack("vllm"), "fp8-block", 8
    )
    assert "weights" not in ledger.evidence_for(experts, "full").words  # its experts have rows


def test_the_shipped_ledger_and_stacks_belong_together() -> None:
    engines = {e.engine for e in ledger.shipped()}
    assert {"vllm", "sglang", "trtllm", "vllm-2024"} <= engines
    for e in ledger.shipped():
        assert 0 < e.low <= e.high and 0 <= e.median <= e.p90 and e.rows >= 3


@pytest.mark.skipif("KVSIM_SHARED" not in os.environ, reason="needs KVSIM_SHARED, measured rows")
def test_shipped_numbers_are_those_of_the_rows() -> None:
    folder = Path(os.environ["KVSIM_SHARED"]) / "ops"
    hardware = load_hardware("h100")
    found = rows.read_ops([folder / "decode_attention.csv"], "vllm", hardware)
    stack = load_stack("vllm@h100")
    for one in found.rows:
        off = np.abs(fit.predict_rows(one, hardware, stack) / one.took - 1)
        assert np.median(off) < 0.04


def test_rows_of_experts_are_priced_together_as_one_by_one() -> None:
    shape = {
        "tokens": (1.0, 64.0, 8192.0), "hidden": (2880.0, 4096.0, 4096.0), "ep": (1.0, 4.0, 8.0),
        "expert_ffn": (2880.0, 1536.0, 1536.0), "active": (4.0, 8.0, 8.0),
        "experts": (128.0, 128.0, 128.0), "tp": (1.0, 1.0, 1.0),
    }  # fmt: skip
    table = {key: np.array(values) for key, values in shape.items()}
    some = rows.OpRows("moe", "fp16", table, np.ones(3), ("line",) * 3)
    stack, card = load_stack("vllm"), load_hardware("h100")  # with a skew of the experts' load
    found = fit.predict_rows(some, card, stack)
    alone = [fit.predict_rows(some.select(np.array([i])), card, stack)[0] for i in range(3)]
    assert found == pytest.approx(alone, rel=1e-12)
