"""Why something lost, who runs the choice, and which deployment wins: short and true."""

from dataclasses import replace

import numpy as np
import pytest

from kvsim.errors import InputError
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.planner.alternatives import describe_cost, describe_gap
from kvsim.planner.plan import _apart
from kvsim.planner.question import (
    GIB,
    Admission,
    PlanLimits,
    Question,
    Workload,
    engine_refusal,
    engines_running,
)
from kvsim.prediction.explain import binding
from kvsim.prediction.generate import Prediction
from kvsim.quality.evidence import KNOWN_BAD, evidence
from kvsim.report.names import settings
from kvsim.report.plan_more import apart
from kvsim.techniques import parse
from tests.support.commands import run
from tests.support.envelope import answer_in

D = Deployment(load_model("llama3-8b"), load_hardware("h100"), load_stack("vllm"))


def predicted(text: str = "full", batch: int = 4, d: Deployment = D) -> Prediction:
    return Prediction(parse(text), d, np.array([float(batch)]), 1000, 100)


def on(gpu: str, model: str = "llama3-8b") -> Deployment:
    return Deployment(load_model(model), load_hardware(gpu), load_stack("vllm"))


@pytest.mark.parametrize(("gpu", "model", "engines"), [
    ("h100", "llama3-8b", ["vllm", "sglang", "trtllm", "hf"]),
    ("h100", "opt-13b", ["vllm", "sglang", "trtllm", "hf", "flexgen"]),
    ("mi300x", "llama3-8b", ["vllm", "sglang", "hf"]),
    ("t4", "llama3-8b", ["vllm", "sglang", "hf"]),
    ("m2-ultra", "opt-13b", ["hf"]),
])  # fmt: skip
def test_engines_are_named_only_where_they_run(gpu: str, model: str, engines: list[str]) -> None:
    assert engines_running("full", on(gpu, model)) == engines


def test_an_engine_that_does_not_run_there_is_refused_with_the_reason() -> None:
    limits = PlanLimits(70 * GIB, 100 * GIB)
    with pytest.raises(InputError, match="--engine flexgen: FlexGen runs OPT models only"):
        Question(D, Workload(100, 10), "throughput", limits, Admission(engine="flexgen"))
    assert "NVIDIA" in engine_refusal("trtllm", on("mi300x")) and not engine_refusal(
        "vllm", on("mi300x")
    )


def test_how_far_something_is_behind_is_said_of_what_the_objective_measures() -> None:
    assert describe_gap("throughput", 1.0) == "is 50 % slower"
    assert describe_gap("latency", 0.25) == "takes 25 % longer"
    assert describe_gap("cost", 0.25) == "costs 25 % more"


@pytest.mark.parametrize(("other", "chosen", "why"), [
    ("kivi", "full", "loses quality"), ("offload", "full", "moves parts of the cache"),
    ("magicdec:gamma=2,acceptance=0.9", "full", "drafts tokens"),
    ("0-9: offload; 10-31: full", "place:cpu_share=0.5", "has layers that differ"),
    ("offload:host_share=1", "offload:host_share=0.1", "takes longer per request"),
])  # fmt: skip
def test_what_is_as_good_is_said_to_cost_what_it_does(other: str, chosen: str, why: str) -> None:
    assert describe_cost(predicted(other), predicted(chosen)) == why


def test_a_service_that_waits_for_copies_is_not_said_to_wait_for_arithmetic() -> None:
    """Its prompts keep the GPU busy, but its rounds, which take longest, wait for the link."""
    service = Workload(8000, 500, service=True)
    d = Deployment(load_model("gpt-oss-20b"), load_hardware("rtx4090"), load_stack("vllm"))
    d = replace(d, weights="mxfp4")
    copied = service.predict(parse("offload:host_share=0.125"), d, np.array([38.0]))
    assert binding(copied) == "host-to-GPU link"


def test_narrower_weights_must_bring_more_than_the_known_error() -> None:
    limits = PlanLimits(70 * GIB, 100 * GIB)
    q = Question(D, Workload(1000, 100, service=True), "throughput", limits)
    wide, narrow = predicted(), predicted(d=replace(D, weights="int4"))
    assert _apart(q, wide, narrow) == q.between(parse("full"), parse("full")) > 0.05
    assert _apart(q, narrow, wide) == _apart(q, wide, predicted(d=replace(D, tp=2))) == 0.05


def test_what_ruins_every_model_that_was_tried_is_not_advised_for_another_kind() -> None:
    """StreamingLLM's tables are of grouped queries; Llama 2 and DeepSeek keep other caches."""
    technique = parse("streamingllm:sink=4,recent=1000")
    for name in ("llama2-7b", "deepseek-v3"):
        found = evidence(technique, load_model(name), 8000)
        assert found.kind == "none" and found.loss > KNOWN_BAD and "other models lose" in str(found)
        assert not found.admitted(KNOWN_BAD, unknown=True) and found.admitted(1.0, unknown=True)
    mild = evidence(parse("snapkv:budget=1000"), load_model("llama2-7b"), 8000)
    assert mild.admitted(KNOWN_BAD, unknown=True) and "other models" not in str(mild)


def test_a_plan_for_cost_says_what_it_costs() -> None:
    told = run(
        "plan",
        "--model",
        "llama3-8b",
        "--gpu",
        "l4,l40s",
        "--objective",
        "cost",
        "--only",
        "full,offload",
    ).out
    text = " ".join(told.split())
    assert "per million output tokens" in text.partition("What to change")[0]
    assert "--gpu l4 (" in text and "more cost." in text and "that." not in text
    assert "USD/Mtok" in text and "Nothing lossless is cheaper" in text


def test_a_batch_that_is_better_run_in_waves_is_told_so_first() -> None:
    told = run("plan", "--model", "llama2-7b", "--gpu", "a6000", "--batch", "40", "--prompt",
               "3500", "--generate", "64", "--offline", "--only", "full,offload").out  # fmt: skip
    text = " ".join(told.partition("\n")[2].split())
    assert "Run 3 waves of 14 with full KV:" in text and "At once, the best is" in text
    assert text.index("Run 3 waves") < text.index("At once")


def test_an_engine_that_is_asked_for_is_the_one_whose_command_is_given_once() -> None:
    point = ("plan", "--model", "llama3-8b", "--gpu", "l40s", "--engine", "sglang")
    told = " ".join(run(*point).out.split())
    assert "SGLang: python -m sglang" in told and "vllm serve" not in told
    assert "`--stack sglang` predicts SGLang's" in told
    pasted = " ".join(run(*point, "--emit", "sglang").out.split())
    assert pasted.count("--max-running-requests") == 2  # in the verdict, and to paste


def test_a_front_shows_no_plan_that_hardly_differs_from_the_one_before() -> None:
    def shown(*rates: float) -> list[float]:
        return [row["output_tok_s"] for row in apart([{"output_tok_s": r} for r in rates])]

    assert shown(100, 101, 103, 104, 120, 121) == [100, 103, 121]
    assert shown(100, 101) == [100, 101] and shown(100) == [100] and shown() == []


def test_an_acceptance_that_is_taken_from_a_paper_is_shown_as_a_number() -> None:
    row = {"technique": "quantspec", "params": {"gamma": 4, "acceptance": "auto"}}
    assert settings(row) == "gamma=4, acceptance=auto (0.90)"
    assert settings(row | {"params": {"gamma": 0, "acceptance": "auto"}}).endswith("=auto")


def test_kcaches_first_layers_and_specaches_pairs_are_found_from_their_tables() -> None:
    """KCache keeps its first layer's values on the GPU unless much may be lost; k is 64, not 16."""
    point = ("plan", "--model", "llama2-7b", "--gpu", "a6000", "--prompt", "1536", "--json",
             "--generate", "64", "--without", "full")  # fmt: skip
    mild = answer_in(run(*point, "--only", "kcache", "--max-loss", "0.2").out)
    assert mild["choice"]["params"] == {"n": 32, "gpu_layers": 1}
    pairs = answer_in(run(*point, "--only", "specache", "--max-loss", "0.05").out)
    assert pairs["choice"]["params"]["k"] == 64


def test_what_loses_too_much_is_told_with_the_loss_that_would_admit_it() -> None:
    refused = run("plan", "--model", "llama2-7b", "--gpu", "a6000", "--prompt", "1536", "--only",
                  "kcache", "--max-loss", "0.01")  # fmt: skip
    assert refused.code == 1 and "is known to lose at most 1 %" in refused.err
    assert "--max-loss 0.06 admits kcache:n=128,gpu_layers=1, which loses 5.6 %" in refused.err
    nothing = run("plan", "--model", "opt-13b", "--gpu", "h100", "--only", "fp8")
    assert "no lossless technique can run here; --lossy admits" in nothing.err
