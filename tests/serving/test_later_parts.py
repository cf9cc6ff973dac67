"""Few new tokens over a long cache: one token more than the budget, drafts, decodes beside."""

from dataclasses import replace

import numpy as np
import pytest

from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.serving.costs import StepCosts, pass_seconds
from kvsim.serving.passes import Passes
from kvsim.serving.rules import Rules
from kvsim.serving.tables import Tables
from kvsim.techniques import parse

LENGTHS = (512, 1024, 1536, 2048, 4096, 6144, 8192, 12_288, 16_384, 32_768)


def deployment(stack: str, gpu: str) -> Deployment:
    return Deployment(load_model("llama3-8b"), load_hardware(gpu), load_stack(stack))


def tables(d: Deployment, longest: int) -> Tables:
    costs = StepCosts(parse("full"), d, Rules(max_seqs=8), longest + 8, longest)
    return costs.with_density(8, work=False).tables


@pytest.mark.parametrize("gpu", ["a100-80g", "h100"])
@pytest.mark.parametrize("stack", ["fused", "vllm", "sglang", "trtllm"])
def test_one_token_more_than_the_budget_is_one_decoding_pass(stack: str, gpu: str) -> None:
    d = deployment(stack, gpu)
    made = tables(d, 32_768)
    for length in LENGTHS:
        whole = pass_seconds(made, chunks=[[length, 0]], finished=[True])
        first = pass_seconds(made, chunks=[[length, 0]])
        last = pass_seconds(made, chunks=[[1, length]], finished=[True])
        one = pass_seconds(made, cached=[length])
        assert first + last - whole == pytest.approx(one, rel=0.2), length


@pytest.mark.parametrize("stack", ["sglang", "trtllm", "vllm"])
def test_split_kernels_take_longer_for_more_tokens_without_a_jump(stack: str) -> None:
    new = np.arange(1.0, 513.0)
    took = Passes(parse("full"), deployment(stack, "h100")).prompt(new, np.full(512, 16_384.0))
    assert (np.diff(took) >= -1e-9).all()
    assert (took[1:] / took[:-1]).max() < 1.6  # products have tiles


def test_a_kernel_that_splits_no_cache_walks_it() -> None:
    """FlashAttention 2: one block per head, as long for two new tokens as for sixty."""
    d = deployment("vllm", "a100-80g")
    assert d.stack.kernel("prompt").walk > 0
    passes = Passes(parse("full"), d)
    one, two, sixty = passes.prompt(np.array([1.0, 2.0, 60.0]), np.full(3, 30_000.0))
    walk = d.model.layers * d.stack.kernel("prompt").walk * 30_000
    assert two - one == pytest.approx(walk, rel=0.2)
    assert sixty == pytest.approx(two, rel=0.1)


def test_decodes_beside_a_prompt_lose_their_split_where_they_have_one() -> None:
    chunk = [[256, 0]]
    for gpu, more in (("a100-80g", True), ("h100", False)):
        made = tables(deployment("vllm", gpu), 16_384)
        both = pass_seconds(made, [16_000] * 4, chunk)
        apart = pass_seconds(made, [16_000] * 4) + pass_seconds(made, chunks=chunk)
        assert (both > apart) == more, gpu
        beside = made.costs.beside
        assert bool(beside.any()) == more
        bare = made._replace(costs=made.costs._replace(beside=np.zeros_like(beside)))
        assert (both > pass_seconds(bare, [16_000] * 4, chunk)) == more


def test_drafts_are_verified_by_the_same_kernel() -> None:
    d = deployment("vllm", "a100-80g")
    kernels = dict(d.stack.kernels)
    kernels["prompt"] = replace(kernels["prompt"], walk=0.0)
    splits = replace(d, stack=replace(d.stack, kernels=kernels))
    batch, context = np.array([[1.0]]), np.array([[30_000.0]])
    walked, split = (
        Passes(parse("ngram:gamma=3"), each).round(batch, context).item() for each in (d, splits)
    )
    assert walked > 1.5 * split


def test_the_host_issues_a_pass_over_short_prompts_once() -> None:
    """A pass that no graph replays takes as long as issuing its kernels, whatever is in it."""
    d = replace(deployment("vllm", "b200"), model=load_model("llama3.2-1b"))
    made, time = tables(d, 8192), d.stack.time
    issued = made.issued
    assert issued == pytest.approx(time.issue * 16 * 9)  # kernels of a layer
    short, two = [[600, 0]], [[600, 0], [600, 0]]
    for cached, chunks in (([], short), ([], two), ([1000] * 4, short)):
        assert pass_seconds(made, cached, chunks) == pytest.approx(issued)
    assert Passes(parse("full"), d).prompt(np.array(600.0), np.array(0.0)) == pytest.approx(issued)
    assert pass_seconds(made, [1000] * 4) < issued
    assert pass_seconds(made, chunks=[[int(time.graph), 0]]) < issued
    assert pass_seconds(made, chunks=[[8192, 0]]) > issued
