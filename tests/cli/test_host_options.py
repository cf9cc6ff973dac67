"""Options of weights in host memory: what they answer, and what they refuse."""

import json

import pytest

from tests.support.commands import run

WHERE = ("--gpu", "rtx4090", "--stack", "llamacpp", "--technique", "full")
LARGE = (*WHERE, "--model", "gpt-oss-120b", "--host", "desktop-ddr5")


def decoded(*options: str) -> tuple[float, str]:
    done = run("predict", *options, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)["rows"][0]["decode_tok_s"], done.err


def test_a_large_model_on_a_desktop_runs_at_the_rate_of_its_active_experts() -> None:
    every, _ = decoded(*LARGE, "--n-cpu-moe", "all")
    fewest, said = decoded(*LARGE, "--n-cpu-moe", "auto")
    streamed, _ = decoded(*LARGE, "--n-cpu-moe", "all", "--host-weights", "streamed")
    pattern, _ = decoded(*LARGE, "--override-tensor", "exps=CPU")
    assert 25.6 / 1.25 < every < 25.6 * 1.25  # published for such a host
    assert streamed < every < fewest < 89.6e9 / (36 * 4 * 3 * 2880**2 * 4.25 / 8) * 36 / 20
    assert pattern == pytest.approx(every)
    assert "--n-cpu-moe 2" in said and "smallest number with which the model fits" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--model", "llama3-8b", "--n-cpu-moe", "3"), "has no experts; keep whole layers"),
        (("--model", "gpt-oss-120b", "--n-cpu-moe", "some"), "whole number, or all or auto"),
        (("--model", "gpt-oss-120b", "--n-cpu-moe", "all", "--host-memory", "32"),
         "take 56.7 GiB and it has 32.0; keep fewer"),
        (("--model", "gpt-oss-120b", "--override-tensor", "foo=CPU"), "of any layer of gpt-oss"),
        (("--model", "gpt-oss-120b", "--override-tensor", "exps"), "expected PATTERN=CPU"),
        (("--model", "gpt-oss-120b", "--override-tensor", "ex(=CPU"), "is no pattern"),
        (("--model", "gpt-oss-120b", "--host", "laptop"), "unknown host 'laptop'"),
        (("--model", "gpt-oss-120b", "--host-weights", "cpu"), "has no effect without"),
        (("--model", "llama3-8b", "--weights", "q4_k_x"), "nearest: q4_k"),
        (("--model", "deepseek-v3"), "fp8-block is not a GGUF type"),
        (("--model", "deepseek-v3", "--weights", "q4_k_m", "--n-cpu-moe", "auto",
          "--host-memory", "600"), ""),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(options: tuple[str, ...], said: str) -> None:
    done = run("predict", *WHERE, *options)
    if not said:
        assert done.code == 0, done.err
        return
    assert done.code == 2 and said in done.err
    assert len(done.err.strip().splitlines()) == 1


def test_other_commands_take_them() -> None:
    done = run("simulate", "--trace", "sample:chat", "--model", "qwen3-30b-a3b", *WHERE,
               "--weights", "q4_k_m", "--host", "epyc", "--n-cpu-moe", "24", "--json")  # fmt: skip
    assert done.code == 0, done.err
    planned = run("plan", "--model", "qwen3-30b-a3b", "--gpu", "rtx4090", "--stack", "llamacpp",
                   "--weights", "q4_k_m", "--n-cpu-moe", "24", "--batch", "1", "--ttft", "30s",
                   "--only", "full", "--emit", "llamacpp")  # fmt: skip
    assert "--n-cpu-moe 24" in planned.out, planned.err


def test_a_plan_keeps_experts_in_host_memory_where_the_model_needs_that() -> None:
    where = "plan --model gpt-oss-120b --gpu rtx4090 --stack llamacpp --host desktop-ddr5"
    more = "--prompt 512 --generate 128 --batch 1 --offline --only full --emit llamacpp"
    done = run(*where.split(), *more.split())
    assert done.code == 0, done.err
    assert "smallest number with which the model fits" in done.err
    assert "--n-cpu-moe 2" in done.out


def test_a_host_that_is_only_assumed_has_a_wider_interval() -> None:
    widths = []
    for more in ((), ("--host-bandwidth", "88")):
        done = run("predict", *LARGE, "--n-cpu-moe", "all", "--json", *more)
        found = json.loads(done.out)["rows"][0]["ranges"]["tpot_s"]
        widths.append(found["high"] / found["low"])
    assert widths[0] > 1.2 * widths[1] > 1.2


@pytest.mark.parametrize(
    ("typed", "stack"),
    [("llama.cpp", "llamacpp"), ("TensorRT-LLM", "trtllm@h100"), ("transformers", "hf-sdpa")],
)
def test_engines_may_be_named_as_their_users_write_them(typed: str, stack: str) -> None:
    done = run("plan", "--model", "llama2-7b", "--gpu", "h100", "--offline", "--engine", typed)
    assert done.code == 0, done.err
    assert f"stack {stack}," in done.out


def test_layouts_for_ollama_are_those_of_llamacpp() -> None:
    card, ollama = ("--gpu", "rtx4090", "--total-gpus", "2"), ("--engine", "Ollama", "--json")
    done = run("plan", "--model", "qwen3-30b-a3b", *card, "--ttft", "5s", *ollama)
    assert done.code == 0, done.err
    assert json.loads(done.out)["choice"]["gpus"] == 2
