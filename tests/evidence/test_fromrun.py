"""A stack fitted to a serving run: one that was simulated, and one that was measured."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvsim import techniques
from kvsim.errors import InputError
from kvsim.evidence.leastsquares import Fit
from kvsim.evidence.ledger import evidence_for
from kvsim.evidence.logs import MeasuredRun, read_run
from kvsim.evidence.runfit import errors, fit_run, ratios, simulate_run
from kvsim.evidence.stackfile import fitted_text, measure_errors
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Stack
from kvsim.machines.profiles import load_hardware, load_stack, with_numbers
from kvsim.models.configs import load_model
from kvsim.prediction.generate import Prediction
from kvsim.serving.rules import Rules
from kvsim.traces.requests import Requests
from tests.support.commands import run as kvsim
from tests.support.envelope import answer_in
from tests.support.places import SHARED

MEASURED = SHARED / "measured/RTX4090_Llama-3.1-8B_requests.jsonl"
ROW = {
    "arrival_time": 1.0, "first_token_ts": 2.0, "last_token_ts": 3.0,
    "input_toks": 10, "output_toks": 5,
}  # fmt: skip


FULL = techniques.parse("full")
TRUE = {
    "as shipped": ({}, 1.0),
    "slow memory": ({"kernel.gemm.memory": 0.6}, 1.0),
    "slow products": ({"kernel.gemm.compute": 0.55}, 3.0),
    "host": ({"time.step_s": 4e-3}, 2.0),
    "three at once": (
        {"kernel.gemm.memory": 0.7, "kernel.gemm.compute": 0.55, "time.step_s": 2e-3},
        1.0,
    ),
    "what no term says": ({"kernel.attention.floor_s": 120e-6, "time.layer_s": 30e-6}, 1.0),
}
"""What really is, where ``fused`` on an H100 is what was shipped, and requests per second."""


def deployed(numbers: dict[str, float]) -> Deployment:
    stack = with_numbers(load_stack("fused"), numbers)
    return Deployment(load_model("llama3.1-8b"), load_hardware("h100"), stack)


def play(numbers: dict[str, float], rate: float, seed: int, noise: float) -> MeasuredRun:
    random, count = np.random.default_rng(seed), 240
    requests = Requests(
        np.cumsum(random.exponential(1 / rate, count)),
        random.integers(50, 3000, count),
        random.integers(20, 200, count),
    )
    blank = MeasuredRun(requests, np.zeros(count), np.zeros(count))
    played = simulate_run(blank, FULL, deployed(numbers), Rules()).run.progress
    late, longer = 1 + random.normal(0, noise, (2, count))
    first = requests.arrival + (played.first - requests.arrival) * late
    return MeasuredRun(requests, first, first + (played.last - played.first) * longer)


def off(run: MeasuredRun, stack: Stack) -> float:
    where = replace(deployed({}), stack=stack)
    found = simulate_run(run, FULL, where, Rules())
    return float(np.mean(np.abs(list(errors(run, found, slice(None)).values()))))


@pytest.mark.parametrize("name", TRUE)
def test_calibrating_never_hurts(name: str) -> None:
    numbers, rate = TRUE[name]
    shipped = deployed({}).stack
    fit = fit_run(play(numbers, rate, 3, 0.01), FULL, deployed({}), Rules(), 100)
    assert set(fit.moved) <= set(fit.numbers)
    assert fit.stack == shipped or not fit.refused
    for load in (0.5, 1.5):  # other requests, at other loads
        other = play(numbers, rate * load, 4, 0.0)
        assert off(other, fit.stack) <= off(other, shipped) + 1e-9
    if numbers and name != "what no term says":
        assert off(other, fit.stack) < 0.25 * off(other, shipped)
    if not numbers:
        assert not fit.moved and fit.stack == shipped


def test_a_fitted_file_says_what_its_stack_says(tmp_path: Path) -> None:
    base, out = replace(deployed({}), stack=load_stack("vllm").for_gpu("h100")), tmp_path / "a.toml"
    checked = measure_errors({"ttft": np.linspace(0.9, 1.1, 20)}, ("h100", "llama3.1-8b", "full"))
    fit = Fit({"time.step_s": 1e-3}, {"time.step_s": 1e-4}, np.empty(0), ())
    out.write_text(fitted_text(base.stack, "vllm", fit, "20 requests", "", "2026-11-23", checked))
    read = load_stack(str(out))
    assert read.family == "vllm" and read.checked is not None
    assert read.checked.off["ttft"] == pytest.approx(checked.off["ttft"], rel=1e-5)
    there = replace(base, stack=read)
    work = np.array([1.0, 8.0]), 2000, 20
    changed = with_numbers(base.stack, fit.values)
    assert Prediction(FULL, there, *work).tpot_s == pytest.approx(
        Prediction(FULL, replace(base, stack=changed), *work).tpot_s, rel=1e-4
    )
    own, elsewhere = (evidence_for(d, "full", "prefill") for d in (there, base))
    assert own.exact and own.high / own.low < elsewhere.high / elsewhere.low
    other = replace(there, model=load_model("llama3-70b"))
    assert not evidence_for(other, "full", "prefill").words.startswith("20 rows")


@pytest.mark.skipif(not MEASURED.exists(), reason="the measured vLLM run is not beside the project")
def test_a_measured_vllm_run_is_predicted_from_its_first_hundred_requests(tmp_path: Path) -> None:
    out = tmp_path / "vllm.toml"
    done = kvsim(
        "calibrate", "--from-run", str(MEASURED), "--model", "llama3.1-8b", "--gpu", "rtx4090",
        "--blocks", "2588", "--prefix-caching", "--fit-first", "100", "--out", str(out), "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    unseen = answer_in(done.out)["error_not_seen"]
    assert abs(unseen["ttft_mean"]) <= 0.02
    assert abs(unseen["ttft_p50"]) <= 0.03
    assert abs(unseen["tpot_mean"]) <= 0.02
    assert abs(unseen["latency_p90"]) <= 0.03
    assert load_stack(str(out)).basis == "calibrated"
    before = answer_in(done.out)["error_before"]
    assert sum(map(abs, unseen.values())) <= sum(map(abs, before.values()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_toks": 0}, "line 2, input_toks: got 0"),
        ({"output_toks": 2.5}, "line 2, output_toks: got 2.5"),
        ({"arrival_time": None}, "line 2, arrival_time: got 'None'"),
        ({"first_token_ts": "2"}, "line 2, first_token_ts: got '2'"),
        ({"last_token_ts": float("nan")}, "line 2, last_token_ts: got 'nan'"),
        ({"first_token_ts": 0.5}, "line 2: first_token_ts before arrival"),
        ({"last_token_ts": 1.5}, "line 2: first_token_ts before arrival or after"),
    ],
)
def test_bad_logs_name_line_and_field(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW | change) + "\n")
    with pytest.raises(InputError) as problem:
        read_run(path)
    assert message in str(problem.value)


@pytest.mark.parametrize(("text", "message"), [("", "no requests"), ("[1]", "list"), ("{", "JSON")])
def test_files_that_are_no_logs(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_run(path)
    run = MeasuredRun(
        Requests(np.zeros(6), np.ones(6, int), np.ones(6, int)), np.ones(6), np.ones(6)
    )
    with pytest.raises(InputError, match="--fit-first"):
        fit_run(run, FULL, deployed({}), Rules(), 6)


def test_tokens_faster_than_memory_are_no_run() -> None:
    run = play({}, 1.0, 3, 0.0)
    tenth = replace(run, last=run.first + (run.last - run.first) / 10)
    said = r"half of the requests: 0\.\d+ ms per token, where h100 needs 4\.\d+ ms or more"
    with pytest.raises(InputError, match=said):
        fit_run(tenth, FULL, deployed({}), Rules(), 100)


def test_ratios_of_times_are_1_where_there_is_no_second_token() -> None:
    requests = Requests(np.zeros(3), np.full(3, 9), np.array([1, 2, 5]))
    run = MeasuredRun(requests, np.array([1.0, 1.0, 1.0]), np.array([1.0, 1.5, 3.0]))
    found = SimpleNamespace(
        ttft_s=np.full(3, 2.0), tpot_s=np.array([0.0, 1.0, 1.0]), latency_s=np.array([2, 3, 6.0])
    )
    assert ratios(run, cast(Any, found), slice(None)).tolist() == [[2, 2, 2], [1, 2, 2], [2, 2, 2]]
