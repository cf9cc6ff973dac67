"""Several degrees of parallelism asked of `kvsim plan`: what is compared, and what is refused."""

import pytest

from kvsim.api.deployments import build_deployments
from kvsim.errors import InputError
from kvsim.options import Inputs


def asked(**degrees: str) -> list[str]:
    case = {"model": "qwen3-30b-a3b", "gpu": "h100", **degrees}
    return [d.parallelism.words() for d in build_deployments(Inputs("plan", case))]


def test_what_can_be_built_is_compared_few_gpus_first() -> None:
    assert asked(dp="1,2", ep="1,2") == ["", "dp 2", "dp 2, ep 2"]  # one GPU has no two groups
    assert asked(tp="2,1", pp="2") == ["tp 2, pp 2", "pp 2"]  # as typed
    eight = asked(model="mixtral-8x7b", tp="auto")  # experts, which 16 GPUs cannot divide
    assert {"tp 8", "tp 8, ep 8", "tp 16"} <= set(eight) and "tp 16, ep 16" not in eight


@pytest.mark.parametrize(
    ("degrees", "said"),
    [
        ({"ep": "2"}, "--ep: got 2; expected a number that divides the 1 GPUs"),
        ({"ep": "3,5"}, "--ep: got 3"),
        ({"pp": "99"}, "--pp: got 99; expected a whole number from 1 to 64"),
        ({"dp": "two"}, "--dp: got 'two'; expected whole numbers"),
    ],
    ids=str,
)
def test_what_cannot_be_built_is_refused_by_its_option(degrees: dict[str, str], said: str) -> None:
    with pytest.raises(InputError) as error:
        asked(**degrees)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "family"),
    [
        ({}, "vllm"),
        ({"engine": "sglang"}, "sglang"),
        ({"engine": "hf"}, "hf-sdpa"),
        ({"engine": "sglang", "stack": "vllm"}, "vllm"),
        ({"model": "qwen3-30b-a3b", "n_cpu_moe": "all"}, "llamacpp"),
        ({"ubatch_size": "1024"}, "llamacpp"),
    ],
)
def test_the_stack_is_that_of_the_engine_unless_named(
    given: dict[str, object], family: str
) -> None:
    (found,) = build_deployments(Inputs("plan", {"model": "llama3-8b", "gpu": "l40s"} | given))
    assert found.stack.family == family


def test_an_engine_keeps_its_stack_beside_options_of_llama_cpp() -> None:
    case = {"model": "llama3-8b", "gpu": "l40s", "ubatch_size": "1024"}
    (found,) = build_deployments(Inputs("plan", case | {"engine": "ollama"}))
    assert (found.stack.name, found.stack.time.prompt_pass) == ("ollama", 1024)
    with pytest.raises(InputError, match="--ubatch-size: stack vllm does not read prompts in"):
        build_deployments(Inputs("plan", case | {"engine": "vllm"}))
