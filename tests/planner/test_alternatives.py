"""Reasons, engines and advice: what a plan is compared with, and what else would do."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kvsim
from kvsim.errors import InputError
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.planner import alternatives, question, sensitivity
from kvsim.planner.alternatives import NoPlanError, PlanRemedy, describe_cost
from kvsim.planner.plan import ChosenPlan, _apart, answer
from kvsim.planner.question import (
    DEFAULT_TPOT,
    DEFAULT_TTFT,
    GIB,
    Admission,
    PlanLimits,
    Question,
    Workload,
)
from kvsim.prediction.explain import binding
from kvsim.prediction.generate import Prediction
from kvsim.quality.evidence import KNOWN_BAD, evidence
from kvsim.report.plan import thin_out
from kvsim.techniques import parse
from kvsim.techniques.released import engine_refusal, engines_running
from tests.support.commands import run
from tests.support.envelope import answer_in

D = Deployment(load_model("llama3-8b"), load_hardware("a6000"), load_stack("fused"))
ASKED = Question(D, Workload(1000, 100), "throughput", PlanLimits(0.9 * 48 * GIB, 100 * GIB))


def predicted(batch: int = 4, text: str = "full", d: Deployment = D) -> Prediction:
    return Prediction(parse(text), d, np.array([float(batch)]), 1000, 100)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.00123, "1.23 ms"), (0.9994, "999 ms"), (1.0, "1 s"), (119.6, "120 s"), (120.0, "2 min"),
        (600.0, "10 min"), (0.0, "0 ms"),
    ],
)  # fmt: skip
def test_times_are_said_in_the_unit_of_their_size(seconds: float, said: str) -> None:
    assert question.format_seconds(seconds) == said


@pytest.mark.parametrize(
    ("seconds", "option"),
    [
        (0.001, "1ms"), (0.0101, "11ms"), (0.1, "100ms"), (0.1001, "110ms"), (0.999, "1s"),
        (1.0, "1s"), (1.2, "1.2s"), (1.21, "1.3s"), (2.51, "2.6s"), (99.5, "100s"),
        (101.0, "110s"), (1234.0, "1300s"),
    ],
)  # fmt: skip
def test_a_time_that_is_enough_is_rounded_up_to_two_digits(seconds: float, option: str) -> None:
    value = question.round_up(seconds)
    assert question.show_time(value) == option and seconds * (1 - 1e-9) <= value <= 1.1 * seconds


@pytest.mark.parametrize("longest", [0, 1, 64, 65, 250, 251, 400, 800, 990, 999])
def test_a_shorter_prompt_is_found_to_a_twentieth(
    longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def quick(question: Question, *some: object) -> Prediction | None:
        tried.append(question.workload.prompt)
        return predicted() if question.workload.prompt <= longest else None

    monkeypatch.setattr(sensitivity, "quick_plan", quick)
    found = sensitivity.longest_prompt(ASKED)
    assert tried[0] == 250 and len(tried) == len(set(tried)) <= 9
    if longest < 62:
        assert found is None and min(tried) == 62 and len(tried) == 2
        return
    assert found is not None and found.what == "a shorter prompt"
    prompt = int(found.option.removeprefix("--prompt "))
    above = min([t for t in tried if t > longest], default=1000)
    assert prompt <= longest < above and above - prompt <= max(1, prompt // 10)


def test_targets_are_loosened_one_at_a_time_where_one_is_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = ASKED.with_limits(ttft=0.1, tpot=0.01)
    monkeypatch.setattr(sensitivity, "_best_placement", lambda q: None)
    for free, option in (
        ({"ttft"}, "--ttft "),
        ({"tpot"}, "--tpot "),
        ({"ttft", "tpot"}, "--ttft "),
    ):
        questions: list[Question] = []

        def quick(q: Question, free: Any = free, seen: Any = questions) -> Prediction | None:
            seen.append(q)
            lifted = {name for name in ("ttft", "tpot") if np.isinf(getattr(q.limits, name))}
            return predicted() if free <= lifted else None

        monkeypatch.setattr(sensitivity, "quick_plan", quick)
        found = sensitivity.longer_times(asked)
        assert found is not None and found.remedy.option.startswith(option)
        assert found.remedy.option.count("--") == len(free) == len(found.least)
        *sought, asked_then = questions
        assert all(q.objective == "latency" for q in sought)
        assert asked_then.objective == ASKED.objective  # what one gets who loosens them so
    assert sensitivity.longer_times(ASKED) is None  # no target to loosen


def test_weights_or_gpus_with_a_longer_ttft_where_neither_does_alone() -> None:
    d = Deployment(load_model("gemma-3-27b"), load_hardware("l40s"), D.stack)
    limits = PlanLimits(
        0.9 * d.hardware.gpu_memory, d.hardware.host_memory, DEFAULT_TTFT, DEFAULT_TPOT
    )
    asked = Question(d, Workload(100_000, 100, service=True), "throughput", limits)
    with pytest.raises(alternatives.NoPlanError) as caught:
        answer(asked)
    narrow, more, offloaded = caught.value.remedies
    assert narrow.option.startswith("--weights fp8 --ttft ")
    assert narrow.caution.startswith("score at most ")
    assert more.option.startswith("--tp 2 --ttft ") and not more.caution
    assert offloaded.option.startswith("--ttft ") and " --tpot " in offloaded.option
    for each in (narrow, more):  # what is said may be asked for
        weights, gpus = ("fp8", 1) if each is narrow else ("fp16", 2)
        ttft = float(each.option.rpartition(" ")[2].removesuffix("s"))
        other = alternatives.ask_on(asked, replace(d, weights=weights, tp=gpus)).with_limits(
            ttft=ttft
        )
        assert float(answer(other).choice.ttft_s[0]) <= ttft


def changed(monkeypatch: pytest.MonkeyPatch, d: Deployment, fits: Any) -> list[PlanRemedy]:
    def tried(q: Question, deployment: Deployment) -> Prediction | None:
        return predicted(d=deployment) if fits(deployment) else None

    monkeypatch.setattr(alternatives, "_try_deployment", tried)
    return list(alternatives.deployment_changes(replace(ASKED, deployment=d)))


def test_changes_are_weights_that_the_gpu_has_and_the_fewest_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def said(d: Deployment, fits: Any = lambda d: True) -> list[str]:
        return [a.option for a in changed(monkeypatch, d, fits)]

    h100 = replace(D, hardware=load_hardware("h100"))
    assert said(D) == ["--weights int8", "--weights int4", "--tp 2"]
    assert said(h100) == ["--weights fp8", "--weights int8", "--weights int4", "--tp 2"]
    assert said(replace(D, weights="int8")) == ["--tp 2"]
    assert said(replace(D, tp=2)) == ["--weights int8", "--weights int4", "--tp 4"]
    assert said(D, lambda d: d.tp == 8) == ["--tp 8"]
    assert said(replace(D, tp=8)) == ["--weights int8", "--weights int4"]
    oss = replace(h100, model=load_model("gpt-oss-20b"))
    assert said(oss)[:2] == ["--weights mxfp4", "--weights fp8"]
    first, second, *_ = changed(monkeypatch, oss, lambda d: True)
    assert first.caution == "the weights as they were published"
    assert second.caution.startswith("score at most ")


def test_weights_and_gpus_change_together_where_neither_does_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    h100 = replace(D, hardware=load_hardware("h100"))

    def said(fits: Any) -> list[str]:
        return [a.option for a in changed(monkeypatch, h100, fits)]

    assert said(lambda d: d.tp == 8 or (d.tp, d.weights) == (4, "int4")) == [
        "--weights int4 --tp 4",
        "--tp 8",
    ]
    # the gentlest weights, and the fewest GPUs
    some = {(8, "fp8"), (8, "int8"), (4, "int4")}
    assert said(lambda d: (d.tp, d.weights) in some) == [
        "--weights fp8 --tp 8",
        "--weights int4 --tp 4",
    ]
    assert said(lambda d: (d.tp, d.weights) == (1, "int4")) == ["--weights int4"]


def test_narrower_weights_that_bring_no_more_are_not_advised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worth = {"fp8": 3.0, "int8": 2.0, "int4": 3.5}
    every = [
        PlanRemedy({"weights": w}, "", predicted(batch=i + 1), caution=alternatives.NARROW)
        for i, w in enumerate(worth)
    ]
    values = list(worth.values())
    monkeypatch.setattr(alternatives, "score", lambda q, p: values[int(p.batch[0]) - 1])
    more = PlanRemedy({"tp": "2"}, "2 GPUs", predicted())
    kept = [a.option for a in alternatives.drop_dominated(ASKED, [*every, more])]
    assert kept == ["--weights fp8", "--weights int4", "--tp 2"]


def test_targets_missed_by_little_are_loosened_first_and_defaults_are_called_so() -> None:
    d = replace(D, hardware=load_hardware("h100"))
    asked = Question(d, Workload(32_000, 64, service=True), "throughput",
                     PlanLimits(70 * GIB, 100 * GIB, 0.8, 0.1))  # fmt: skip
    with pytest.raises(alternatives.NoPlanError) as caught:
        answer(asked)
    first = caught.value.remedies[0]
    assert first.option.startswith("--ttft ")
    assert 0.8 < float(first.prediction.ttft_s[0]) <= 1.6
    assert "instead of the default" not in str(caught.value)
    with pytest.raises(alternatives.NoPlanError, match=r"TTFT would have to be .* the default 2 s"):
        answer(replace(asked, workload=Workload(100_000, 64, service=True)).with_limits(ttft=2.0))


def test_advice_brings_a_fifth_more_or_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def better(share: float) -> list[PlanRemedy]:
        monkeypatch.setattr(
            alternatives, "score", lambda q, p: 10.0 if p.technique.name == "full" else 10.0 * share
        )
        some = PlanRemedy({"tp": "2"}, "2 GPUs", predicted(text="kivi"))
        monkeypatch.setattr(alternatives, "deployment_changes", lambda question: iter([some]))
        return alternatives.find_advice(ASKED, predicted())

    assert better(1.19) == [] and better(1.2) == []
    (found,) = better(1.25)
    assert found.gain == pytest.approx(0.25)


def test_scores_are_rates_per_gpu_and_inverse_times_and_prices() -> None:
    d = replace(D, hardware=load_hardware("h100"), tp=2)
    p = predicted(d=d)
    tokens = float(p.output_tok_s[0])
    assert alternatives.score(ASKED, p) == pytest.approx(tokens / 2)
    latency = replace(ASKED, objective="latency")
    assert alternatives.score(latency, p) == pytest.approx(1 / float(p.request_s[0]))
    cost = replace(ASKED, deployment=d, objective="cost")
    assert d.hardware.price is not None
    assert alternatives.score(cost, p) == pytest.approx(
        1 / (d.hardware.price * 2 / 3600 / tokens * 1e6)
    )


def test_other_gpus_have_more_memory_and_come_cheapest_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("t4", "l40s", "h100", "a6000", "h200", "a100-80g")
    monkeypatch.setattr(sensitivity, "hardware_names", lambda: names)
    monkeypatch.setattr(sensitivity, "quick_plan", lambda q, some: predicted(d=q.deployment))
    found = [a.option for a in sensitivity._other_gpus(ASKED)]
    assert found == ["--gpu a100-80g", "--gpu h100", "--gpu h200"]  # USD 1.29, 2.29, 3.39 per hour
    large = replace(ASKED, workload=replace(ASKED.workload, prompt=100_000, batch=6))
    assert [a.option for a in sensitivity._other_gpus(large)] == ["--gpu h200"]


H100 = Deployment(load_model("llama3-8b"), load_hardware("h100"), load_stack("vllm"))


def predicted_on_h100(text: str = "full", batch: int = 4, d: Deployment = H100) -> Prediction:
    return Prediction(parse(text), d, np.array([float(batch)]), 1000, 100)


def deployed_on(gpu: str, model: str = "llama3-8b") -> Deployment:
    return Deployment(load_model(model), load_hardware(gpu), load_stack("vllm"))


@pytest.mark.parametrize(("gpu", "model", "engines"), [
    ("h100", "llama3-8b", ["vllm", "sglang", "trtllm", "hf", "llamacpp"]),
    ("h100", "opt-13b", ["vllm", "sglang", "trtllm", "hf", "llamacpp", "flexgen"]),
    ("mi300x", "llama3-8b", ["vllm", "sglang", "hf", "llamacpp"]),
    ("t4", "llama3-8b", ["vllm", "sglang", "hf", "llamacpp"]),
    ("m2-ultra", "opt-13b", ["hf", "llamacpp"]),
])  # fmt: skip
def test_engines_are_named_only_where_they_run(gpu: str, model: str, engines: list[str]) -> None:
    assert engines_running("full", deployed_on(gpu, model)) == engines


def test_an_engine_that_does_not_run_there_is_refused_with_the_reason() -> None:
    limits = PlanLimits(70 * GIB, 100 * GIB)
    with pytest.raises(InputError, match="--engine flexgen: FlexGen runs OPT models only"):
        Question(H100, Workload(100, 10), "throughput", limits, Admission(engine="flexgen"))
    assert "NVIDIA" in engine_refusal("trtllm", deployed_on("mi300x")) and not engine_refusal(
        "vllm", deployed_on("mi300x")
    )


@pytest.mark.parametrize(("other", "chosen", "why"), [
    ("kivi", "full", "loses quality"), ("offload", "full", "moves parts of the cache"),
    ("magicdec:gamma=2,acceptance=0.9", "full", "drafts tokens"),
    ("0-9: offload; 10-31: full", "place:cpu_share=0.5", "has layers that differ"),
    ("offload:host_share=1", "offload:host_share=0.1", "takes longer per request"),
])  # fmt: skip
def test_what_is_as_good_is_said_to_cost_what_it_does(other: str, chosen: str, why: str) -> None:
    assert describe_cost(predicted_on_h100(other), predicted_on_h100(chosen)) == why


def test_a_service_that_waits_for_copies_is_not_said_to_wait_for_arithmetic() -> None:
    """Its prompts keep the GPU busy, but its rounds, which take longest, wait for the link."""
    service = Workload(8000, 500, service=True)
    d = Deployment(load_model("gpt-oss-20b"), load_hardware("rtx4090"), load_stack("vllm"))
    d = replace(d, weights="mxfp4")
    copied = service.predict(parse("offload:host_share=0.5"), d, np.array([38.0]))
    assert binding(copied) == "host-to-GPU link"


def test_narrower_weights_must_bring_more_than_the_known_error() -> None:
    limits = PlanLimits(70 * GIB, 100 * GIB)
    for stack, error in (("trtllm", 0.05), ("vllm", 0.0)):  # much and little is known
        d = replace(H100, stack=load_stack(stack))
        q = Question(d, Workload(1000, 100, service=True), "throughput", limits)
        wide, narrow = predicted_on_h100(d=d), predicted_on_h100(d=replace(d, weights="int4"))
        assert q.between(parse("full"), parse("full")) > error
        assert _apart(q, wide, narrow) == max(q.between(parse("full"), parse("full")), 0.05)
        wider = predicted_on_h100(d=replace(d, tp=2))
        assert _apart(q, narrow, wide) == _apart(q, wide, wider) == 0.05


def test_what_ruins_every_model_that_was_tried_is_not_advised_for_another_kind() -> None:
    """StreamingLLM's tables are of grouped queries; Llama 2 and DeepSeek keep other caches."""
    technique, welcome = parse("streamingllm:sink=4,recent=1000"), Admission(unmeasured=True)
    for name in ("llama2-7b", "deepseek-v3"):
        found = evidence(technique, load_model(name), 8000)
        assert found.kind == "none" and found.loss > KNOWN_BAD and "other models lose" in str(found)
        assert KNOWN_BAD < welcome.loss(found) <= 1
    mild = evidence(parse("snapkv:budget=1000"), load_model("llama2-7b"), 8000)
    assert welcome.loss(mild) <= KNOWN_BAD and "other models" not in str(mild)


def test_a_plan_for_cost_says_what_it_costs() -> None:
    asked = "plan --model llama3-8b --gpu l4,l40s --objective cost --only full,offload"
    told = run(*asked.split()).out
    text = " ".join(told.split())
    assert "per million output tokens" in text.partition("What to change")[0]
    assert "--gpu l4" in text and "on l40s with" in text


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
    assert "stack sglang" in told and "predicts SGLang's" not in told
    apart = " ".join(run(*point, "--stack", "vllm").out.split())
    assert "`--stack sglang` predicts SGLang's" in apart
    pasted = " ".join(run(*point, "--emit", "sglang").out.split())
    assert pasted.count("--max-running-requests") == 1


def test_a_front_shows_no_plan_that_hardly_differs_from_the_one_before() -> None:
    def shown(*rates: float) -> list[float]:
        return [row["output_tok_s"] for row in thin_out([{"output_tok_s": r} for r in rates])]

    assert shown(100, 101, 103, 104, 120, 121) == [100, 103, 121]
    assert shown(100, 101) == [100, 101] and shown(100) == [100] and shown() == []


def test_kcaches_first_layers_and_specaches_pairs_are_found_from_their_tables() -> None:
    """KCache keeps its first layer's values on the GPU unless much may be lost; k is 64, not 16."""
    point = ("plan", "--model", "llama2-7b", "--gpu", "a6000", "--prompt", "1536", "--json",
             "--generate", "64", "--without", "full")  # fmt: skip
    mild = answer_in(run(*point, "--offline", "--only", "kcache", "--max-loss", "0.3").out)
    assert mild["choice"]["params"]["gpu_layers"] == 1
    pairs = answer_in(run(*point, "--offline", "--only", "specache", "--max-loss", "0.1").out)
    assert pairs["choice"]["params"]["k"] == 64


def test_what_loses_too_much_is_told_with_the_loss_that_would_admit_it() -> None:
    refused = run("plan", "--model", "llama2-7b", "--gpu", "a6000", "--prompt", "1536", "--only",
                  "kcache", "--max-loss", "0.01")  # fmt: skip
    assert refused.code == 1 and "is known to lose at most 1 %" in refused.err
    assert "admits kcache:n=32,gpu_layers=1 (scores lower by" in refused.err
    nothing = run("plan", "--model", "opt-13b", "--gpu", "h100", "--only", "fp8")
    assert "no lossless technique can run here; --lossy admits" in nothing.err


@pytest.mark.parametrize(
    "asked",
    [
        {"model": "opt-30b", "gpu": "t4", "stack": "flexgen"},
        {"model": "opt-6.7b", "gpu": "a10", "engine": "hf"},
    ],
)
def test_a_named_engine_is_given_what_it_runs(asked: dict[str, str]) -> None:
    lengths = {"prompt": 512, "generate": 32}
    found = kvsim.plan(offline=True, host_memory=208, **lengths, **asked).found
    assert isinstance(found, ChosenPlan)
    engine = found.question.admission.engine
    rows = [found.choice, *(a.prediction for a in found.alternatives)]
    assert all(engine in engines_running(p.technique.name, p.deployment) for p in rows)


def test_a_drive_is_a_remedy_where_weights_exceed_gpu_and_host_and_then_plans() -> None:
    asked: dict[str, Any] = {
        "model": "opt-175b", "weights": "fp16", "gpu": "t4", "stack": "flexgen",
        "prompt": 512, "generate": 32, "host_memory": 200, "offline": True,
    }  # fmt: skip
    with pytest.raises(NoPlanError, match="disk 350") as none:
        kvsim.plan(**asked)
    (drive,) = (a for a in none.value.remedies if "disk" in a.option)
    found = kvsim.plan(disk=350, **asked)
    assert drive.prediction is not None and isinstance(found.found, ChosenPlan)
    assert found.found.choice.output_tok_s[0] >= drive.prediction.output_tok_s[0]
    assert any("closed batches" in said for said in found.answer.settings)


def test_narrower_weights_of_which_a_part_stays_on_the_host_are_a_remedy() -> None:
    with pytest.raises(NoPlanError) as none:
        kvsim.plan(model="bloom-176b", gpu="rtx3090", prompt=512, generate=64, offline=True)
    (placed,) = (r for r in none.value.remedies if set(r.changes) == {"weights"})
    assert placed.option == "--weights int4" and placed.prediction.host_bytes[0] > 0


def test_another_deployment_has_the_same_share_of_its_memory() -> None:
    other = alternatives.ask_on(ASKED, replace(D, hardware=load_hardware("h100")))
    gpus, before = load_hardware("h100"), D.hardware
    assert other.limits.gpu_memory == pytest.approx(
        0.9 * 48 * GIB / before.gpu_memory * gpus.gpu_memory
    )
    assert other.limits.host_memory == gpus.host_memory
    assert alternatives.ask_on(ASKED, replace(D, tp=2)).limits == ASKED.limits


def test_a_change_that_cannot_run_is_no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(q: Question, some: object = ()) -> None:
        raise InputError("no")

    monkeypatch.setattr(alternatives, "quick_plan", refuse)
    assert alternatives._try_deployment(ASKED, replace(D, tp=2)) is None


def test_no_prompt_below_65_tokens_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    monkeypatch.setattr(sensitivity, "quick_plan", lambda q: tried.append(q.workload.prompt))
    assert sensitivity.longest_prompt(replace(ASKED, workload=Workload(256, 100))) is None
    assert sensitivity.longest_prompt(replace(ASKED, workload=Workload(260, 100))) is None
    assert tried == [64, 65, 16]
