"""A stack fitted to a serving run: one that was simulated, and one that was measured."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvsim import techniques
from kvsim.errors import InputError
from kvsim.evidence.logs import MeasuredRun, errors, fit_run, read_run, simulate_run
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack, with_numbers
from kvsim.models.configs import load_model
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


def deployed(numbers: dict[str, float]) -> Deployment:
    stack = with_numbers(load_stack("fused"), numbers)
    return Deployment(load_model("llama3.1-8b"), load_hardware("rtx4090"), stack)


def test_a_run_of_a_known_stack_gives_back_what_it_tells() -> None:
    true = {"kernel.gemm.memory": 0.7, "kernel.gemm.compute": 0.55, "time.step_s": 4e-3}
    random = np.random.default_rng(3)
    requests = Requests(
        np.cumsum(random.exponential(0.3, 80)),
        random.integers(50, 2000, 80),
        random.integers(20, 200, 80),
    )
    rules = Rules(max_seqs=32, blocks=4000)
    blank = MeasuredRun(requests, np.zeros(80), np.zeros(80))
    played = simulate_run(blank, techniques.parse("full"), deployed(true), rules).run.progress
    noise = 1 + random.normal(0, 0.01, 80)
    first = requests.arrival + (played.first - requests.arrival) * noise
    run = MeasuredRun(requests, first, played.last + first - played.first)
    fit = fit_run(run, techniques.parse("full"), deployed({}), rules, 40)
    assert fit.values["kernel.gemm.compute"] == pytest.approx(0.55, rel=0.05)
    fitted = simulate_run(run, techniques.parse("full"), deployed(fit.values), rules)
    assert max(map(abs, errors(run, fitted, slice(40, None)).values())) < 0.02


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
        fit_run(run, techniques.parse("full"), deployed({}), replace(Rules()), 6)
