"""Decoding rounds that are replayed: the tokens of rounds that are issued kernel by kernel."""

import pytest

pytest.importorskip("torch")

from collections import defaultdict
from dataclasses import replace

import numpy as np
import torch

from kvsim.engine.roofline import all_ops, host_seconds
from kvsim.engine.timeline import steady_seconds
from kvsim.machines.deployment import Deployment
from kvsim.prediction.memory import decode_point
from kvsim.techniques import parse
from kvsim.techniques.technique import Technique
from kvsim.validate.counter import OpCounter
from kvsim.validate.counts.expected import RandomPrompts, Replay
from kvsim.validate.model.architecture import load_architecture
from kvsim.validate.parts.composed import default_deployment
from kvsim.validate.registry import IMPLEMENTATIONS, SmallRun, small_settings
from kvsim.validate.run import Generation
from kvsim.validate.times.timed import ReplayedRounds, next_replay, run_timed
from tests.support.decoders import decoder as cpu_decoder
from tests.support.decoders import prompts
from tests.support.graphs import graphs, recording
from tests.support.pretended import decoder, pretended
from tests.support.sampled import few

PROMPTS = [list(range(1, 41)), list(range(60, 100))]
GENERATE = 10  # beyond the block of keys that the eighth round packs
REPLAYED = [
    "full", "fp8", "kivi:group=16,residual=16", "kivi:group=16,residual=32",
    "grouped:bits=4,group=16", "turboquant:bits=4,group=16", "snapkv:budget=20,window=8",
    "expected-attention:budget=20", "keydiff:budget=20", "tova:budget=20",
    "ada-kv:budget=20,window=8", "think:ratio=0.5,window=8", "xattention:block=8,stride=4",
    "quest:budget=16,page=4,dense=1", "streamingllm:sink=4,recent=24",
    "h2o:heavy=10,recent=10", "duoattention:retrieval=0.5,sink=4,recent=16", "kvzip:budget=20",
    "snapkv:budget=20,window=8 + kivi:group=16,residual=16", "cachegen:bits=16",
]  # fmt: skip


INTERPRETED = few(  # kernels in Python take seconds; below every technique's rounds are compared
    REPLAYED,
    ["full", "fp8", "kivi:group=16,residual=16", "snapkv:budget=20,window=8"],
)


@pytest.mark.parametrize("text", INTERPRETED)
def test_replayed_rounds_give_the_same_tokens(text: str) -> None:
    with pretended(), graphs() as captured, torch.inference_mode():
        small = decoder()
        issued = Generation(small, parse(text), PROMPTS, GENERATE)
        issued.start()
        for _ in range(GENERATE - 1):
            issued.decode_in_place()
            issued.decoded_in_place()
        run = Generation(small, parse(text), PROMPTS, GENERATE)
        run.start()
        rounds = ReplayedRounds(run)
        while min(run.done) < GENERATE:
            rounds.ready()
            rounds.round()
        assert rounds.why == ""
        assert torch.equal(run.tokens, issued.tokens)
    branches = 2 if "residual=16" in text else 1
    assert rounds.replayed >= GENERATE - 1 - 2 * branches and 1 <= len(captured) <= branches


@pytest.mark.parametrize("text", REPLAYED)
def test_rounds_in_place_are_as_others(text: str) -> None:
    """On a CPU in fp32: what a pass sees by a mask is what it sees by its length."""
    model, given = cpu_decoder("llama"), prompts(40, 40)
    eager = Generation(model, parse(text), given, GENERATE)
    expected = eager.complete()
    run = Generation(model, parse(text), given, GENERATE)
    run.start()
    with torch.inference_mode():
        for _ in range(GENERATE - 1):
            run.decode_in_place()
            run.decoded_in_place()
    assert torch.equal(run.tokens, expected)
    assert (run.done, run.cached, run.yielded) == (eager.done, eager.cached, eager.yielded)


@pytest.mark.parametrize("text", REPLAYED)
def test_two_rounds_are_the_same_work(text: str) -> None:
    """Nothing in a round follows from a number that the host changes between rounds."""
    said = []
    with pretended(interpreted=False), torch.inference_mode():
        run = Generation(decoder(), parse(text), PROMPTS, GENERATE)
        run.start()
        run.decode_in_place()  # makes what is made once
        run.decoded_in_place()
        for _ in "12":
            branch = run.impl.branch(run.cached)
            with recording() as made:
                run.decode_in_place()
            run.decoded_in_place()
            said.append((branch, made.said()))
    assert len(said[0][1]) > 50
    assert said[0] == said[1]


def test_every_other_technique_says_why_not() -> None:
    plain = {text.partition(":")[0] for text in REPLAYED} | {"pyramidkv"}
    with pretended(interpreted=False):
        small = decoder()
        for name in IMPLEMENTATIONS:
            if name in plain or not (settings := small_settings(name, SmallRun(2, 40, 16, 16))):
                continue
            if name == "draft":
                continue  # its model is another one
            run = Generation(small, parse(f"{name}:{settings[0]}".rstrip(":")), PROMPTS, 3)
            run.impl.shutdown()
            assert run.impl.eager_reason, name


def test_what_cannot_be_captured_goes_on_as_it_was() -> None:
    with pretended(), torch.inference_mode():  # no graphs are there
        small = decoder()
        expected = Generation(small, parse("full"), PROMPTS, 5).complete()
        run = Generation(small, parse("full"), PROMPTS, 5)
        run.start()
        rounds = ReplayedRounds(run)
        while min(run.done) < 5:
            assert not rounds.ready() or not rounds.replayed
            rounds.round()
        assert "could not be captured" in rounds.why
        assert torch.equal(run.tokens, expected)


@pytest.mark.parametrize("text", ["full", "offload"])
def test_timed_runs_say_whether_rounds_were_replayed(text: str) -> None:
    with pretended(), graphs(), torch.inference_mode():
        run = run_timed(decoder(), parse(text), RandomPrompts(2, 24, 7), graphs=True)
    if text == "full":  # the first round is issued, the others are timed
        assert (run.eager, run.tokens, len(run.rounds)) == (None, 5, 5)
    else:
        assert run.eager and "copies" in run.eager
        assert (run.tokens, len(run.rounds)) == (6, 6)


def test_a_replayed_round_is_predicted_as_one_launch() -> None:
    d = default_deployment(load_architecture("smollm2-135m").model)
    time = replace(d.stack.time, launch=1e-4, step=3e-3)
    kernels = {name: replace(kernel, host=1e-4) for name, kernel in d.stack.kernels.items()}
    eager = replace(d, stack=replace(d.stack, time=time, kernels=kernels))
    point = decode_point(1, 1024, 8, 4.0)
    step = parse("full").cycle(eager.replayed, point).steps[0]
    issued = steady_seconds(parse("full").cycle(eager, point).steps[0], eager)
    bare = replace(d, stack=replace(d.stack, time=replace(d.stack.time, launch=0.0, step=0.0)))
    alone = steady_seconds(parse("full").cycle(bare, point).steps[0], bare)
    assert sum(host_seconds(op, eager.replayed) for op, _ in all_ops(step)) == 0
    assert float(steady_seconds(step, eager.replayed)) == pytest.approx(float(alone) + 1e-4)
    assert float(issued) > 10 * float(alone)


@pytest.mark.parametrize("text", REPLAYED)
def test_a_replayed_round_is_predicted_as_what_it_dispatches(text: str) -> None:
    """Attention reads the room that its graph reads; keys are packed in the rounds that do so."""
    technique = parse(text)
    bytes_of: dict[str, list[tuple[float, float]]] = {"attn": [], "quantise": []}
    with pretended(interpreted=False), torch.inference_mode():
        counter = OpCounter()
        small = replace(decoder(), counter=counter)
        run = Generation(small, technique, PROMPTS, GENERATE)
        run.start()
        for _ in range(GENERATE - 1):
            replay = next_replay(run)
            run.decode_in_place()
            run.decoded_in_place()
            stated = stated_bytes(technique, replay, small.deployment)
            for name, found in bytes_of.items():
                counted = counter.passes[-1].ops.get(name)
                found.append((stated[name], counted.bytes["hbm"] if counted else 0))
    (attended, read), (packing, packed) = (np.array(found).T for found in bytes_of.values())
    assert packing == pytest.approx(packed)
    if text.startswith("kivi") and "residual=16" in text:
        assert max(packed) > 10 * min(packed), "a block of keys is packed in one of the rounds"
    if text.startswith(("fp8", "turboquant")):  # rows beyond the end are widened, and not counted
        assert min(attended) == max(attended) > max(read)
    else:  # what is packed as it comes is not written in fp16 first, as is stated
        new = 2 * 2 * 2 * 2 * 64 * 2 if text.startswith("grouped") else 0
        assert attended == pytest.approx(read + new)


def stated_bytes(
    technique: Technique, replay: Replay, deployment: Deployment | None
) -> dict[str, float]:
    """What the ops of a replayed round move on the GPU, by name. [B]"""
    assert deployment
    point = decode_point(len(PROMPTS), len(PROMPTS[0]), GENERATE, float(replay.decoded))
    (step,) = technique.cycle(deployment, point).steps
    found: dict[str, float] = defaultdict(float)
    for op, times in all_ops(step):
        moved = times * float(np.ravel(op.bytes.get("hbm", 0.0))[0])
        found[op.name] += moved * replay.op_shares.get(op.name, 1.0)
    return found
