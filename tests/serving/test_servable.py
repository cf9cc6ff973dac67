"""Whether a request can be served is the same answer, for the same reason, in every command."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsim.errors import InfeasibleError
from kvsim.machines.profiles import load_hardware
from kvsim.models.configs import load_model
from kvsim.serving.costs import StepCosts
from kvsim.serving.rules import Rules
from kvsim.serving.servable import find_refusals, longest_request, why_refused, within_context
from kvsim.traces.requests import Requests
from tests.support.commands import run
from tests.support.served import tables_of

DRAWN = int(os.environ.get("KVSIM_SERVABLE", "3"))
NEARLY_FULL = 113  # takes 99.3 % of the KV cache
PLACES = (
    ("llama3-8b", "h100"), ("llama3.1-8b", "a10"), ("llama3.1-8b", "l4"), ("llama2-7b", "a10"),
    ("mistral-7b-v0.2", "rtx5000"), ("qwen2.5-7b", "l4"),
)  # fmt: skip
GENEROUS = ("--ttft", "1000000s", "--tpot", "1000000s")
HEADER = "arrival_s,prompt_tokens,generate_tokens\n"


def draw(number: int) -> tuple[str, str, int, int]:
    random = np.random.default_rng([39, number])
    model, gpu = PLACES[number % len(PLACES)]
    most = load_model(model).max_context
    prompt = int(np.exp(random.uniform(np.log(64), np.log(2 * most))))
    if number % 3 == 0:  # at the limit itself
        return model, gpu, most - 9 + number % 2, 9
    return model, gpu, prompt, int(random.integers(1, 300))


def reason_in(row: dict[str, Any]) -> str | None:
    return next((why for why, count in row["refused_by"].items() if count), None)


def reason_of_message(message: str) -> str | None:
    if "longer than the" in message or "tokens, more than the" in message:
        return "context"
    words = ("KV cache", "room for a cache", "does not fit in", "does not fit next to")
    return "cache" if any(word in message for word in words) else f"other: {message}"


def found_in(*command: str) -> str | None:
    result = run(*command, "--json")
    if result.code:
        return reason_of_message(result.err)
    found = json.loads(result.out)
    if "refused" in found.get("rows", [{}])[0]:
        return found["rows"][0]["refused"]  # type: ignore[no-any-return]
    places = [found, found.get("load", {}), *found.get("rows", [])]
    return reason_in(next(place for place in places if "refused_by" in place))


@pytest.mark.parametrize("number", sorted({*range(DRAWN), NEARLY_FULL}))
def test_every_command_says_the_same(tmp_path: Path, number: int) -> None:
    model, gpu, prompt, generate = draw(number)
    trace = tmp_path / "one.csv"
    trace.write_text(f"{HEADER}0,{prompt},{generate}\n")
    where = ("--model", model, "--gpu", gpu)
    predicted = found_in(
        "predict", *where, "--technique", "full", "--prompt", str(prompt),
        "--generate", str(generate),
    )  # fmt: skip
    simulated = found_in("simulate", *where, "--technique", "full", "--trace", str(trace))
    planned = found_in("plan", *where, "--trace", str(trace), "--only", "full", *GENEROUS)
    rented = found_in(
        "capacity", "--model", model, "--gpus", gpu, "--price", f"{gpu}=1", "--tp", "1",
        "--trace", str(trace), "--only", "full", "--pools", "no", *GENEROUS,
    )  # fmt: skip
    said = {predicted, simulated, planned, rented}
    assert len(said) == 1, (model, gpu, prompt, generate, predicted, simulated, planned, rented)
    emitted = run(
        "plan", *where, "--trace", str(trace), "--only", "full", *GENEROUS, "--emit", "vllm"
    )
    lengths = re.findall(r"--max-model-len (\d+)", emitted.out)
    assert bool(lengths) == (predicted is None)
    assert all(int(n) >= prompt + generate for n in lengths)


def test_the_context_and_the_cache_are_met_to_the_token() -> None:
    costs = tables_of("full", 8, 128, "chunked")
    most = longest_request(costs)
    assert most.context == costs.deployment.model.max_context
    lengths = np.array([most.context, most.context + 1, min(most) + 1])
    found = find_refusals(most, Requests(np.zeros(3), lengths - 1, np.ones(3, int)))
    assert found.tolist()[:2] == [2 * (most.context - 1 > most.cached), 1]


@pytest.mark.parametrize(
    ("gpu", "generate", "reason"),
    [
        ("h100", 192, None),
        ("h100", 193, "context"),
        ("rtx5000", 192, "cache"),
        ("rtx5000", 193, "context"),
    ],
)  # the weights of 8 billion parameters leave no cache on 16 GB
def test_a_prompt_and_its_answer_share_the_context(
    gpu: str, generate: int, reason: str | None
) -> None:
    base = tables_of("full", 8, 128, "chunked")
    deployment = replace(
        base.deployment, model=load_model("llama3-8b"), hardware=load_hardware(gpu)
    )
    assert why_refused(base.technique, deployment, 8000, generate) == reason


def test_an_engine_may_be_started_for_other_lengths() -> None:
    some = Requests(
        np.zeros(3), np.array([100, 9000, 70]), np.array([5, 5, 5]), parent=np.array([-1, -1, 1])
    )
    model = load_model("llama3-8b")
    kept, left_out = within_context(some, model)
    assert (kept.prompt.tolist(), left_out) == ([100], 2)  # a turn never comes without the first
    assert within_context(some, model, 9005)[1] == 0
    with pytest.raises(
        InfeasibleError, match=r"the shortest of 3 has \d+ tokens, more than the 64"
    ):
        within_context(some, model, 64)
    base = tables_of("full", 8, 128, "chunked")
    costs = StepCosts.for_requests(base.technique, base.deployment, Rules(max_model_len=50), some)
    assert (costs.context, costs.longest, costs.longest_prompt) == (50, 50, 50)


def test_refused_requests_are_counted_by_reason(tmp_path: Path) -> None:
    trace = tmp_path / "long.csv"
    trace.write_text(f"{HEADER}0,9000,5\n1,100,5\n2,100000000,5\n")
    result = run("simulate", "--model", "llama3-8b", "--gpu", "h100", "--technique", "full",
                 "--trace", str(trace), "--json")  # fmt: skip
    row = json.loads(result.out)
    assert (row["finished"], row["refused_rows"]) == (1, [1, 3])
    assert row["refused_by"] == {"context": 2, "cache": 0}
