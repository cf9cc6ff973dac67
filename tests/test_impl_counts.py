"""What packed and speculative caches really move and keep, against what they state."""

from dataclasses import replace

import pytest
import torch

from kvsim.deployment import Deployment
from kvsim.profiles import load_hardware, load_stack
from kvsim.techniques import parse
from kvsim.validate.compare import Comparison, compare
from kvsim.validate.run import Run
from kvsim.validate.tally import Tally
from tests.decoders import decoder, prompts

MODELS = ("llama", "llama-mha", "opt")
STACK_WIDE = {"pointwise"}  # one number of passes for all models


def counted(text: str, model: str, batch: int, prompt: int, generate: int) -> Comparison:
    counting = replace(decoder(model, torch.float16), tally=(tally := Tally()))
    run = Run(counting, parse(text), prompts(prompt) * batch, generate)
    run.complete()
    d = Deployment(counting.arch.model, load_hardware("a6000"), load_stack("kvsim"))
    return compare(d, run, tally)


# Shapes at which nothing is rounded: whole groups, blocks, windows and shares; decoding goes once
# or more round each residual, so that what is spread evenly adds up.
EXACT = [
    ("kivi:bits=1,group=16,residual=16", 63, 17),
    ("kivi:bits=2,group=8,residual=16", 79, 33),
    ("kivi:bits=4,group=16,residual=32", 47, 33),
    ("specache:bits=1,group=16,residual=16,k=8", 63, 17),
    ("specache:bits=2,group=8,residual=16,k=20", 79, 33),
    ("specache:bits=2,group=16,residual=16,k=8,speculative=false", 63, 17),
    ("specache:bits=4,group=16,residual=16,k=0", 63, 17),
    ("zipcache:window=20", 60, 41),
    ("zipcache:window=10,salient=0.5,probe=0.2,high=8,low=1", 80, 21),
    ("zipcache:window=10,salient=1,high=4,low=4", 80, 21),
    ("quantspec:group=16,residual=32,gamma=0", 47, 33),
    ("quantspec:group=16,residual=64,gamma=3", 70, 10),
    ("quantspec:group=16,residual=32,gamma=4,weight_bits=16", 47, 33),
    ("magicdec:draft=streamingllm,budget=20,gamma=3", 64, 17),
    ("magicdec:draft=streamingllm,budget=100,gamma=2", 64, 17),
    ("magicdec:draft=snapkv,budget=40,gamma=3", 64, 17),
    ("magicdec:draft=snapkv,budget=100,gamma=1", 64, 17),
    ("magicdec:gamma=0", 64, 5),
]
DRAWN = {"probe"}  # ops of ZipCache that are drawn in decoding
SPREAD = {"quantise"}  # QuantSpec's flushes do not fill a whole number of rounds


def drafts(text: str) -> bool:
    return "gamma" in text and "gamma=0" not in text


def assert_resident(text: str, result: Comparison) -> None:
    kept = [b for b in result.buffers if b.phase == "decode"]
    assert {b.tier for b in kept} == ({"gpu", "host"} if "specache" in text else {"gpu"})
    for b in kept:
        if b.name == "indices":  # 32 bits each, where the stack counts torch.topk's 64
            assert b.counted * 2 == b.predicted
        else:
            assert b.equal, (b.tier, b.name, b.predicted, b.counted)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("text", "prompt", "generate"), EXACT)
def test_ops_and_memory_are_as_stated(text: str, prompt: int, generate: int, model: str) -> None:
    batch = 1 if drafts(text) else 2  # sequences that accept alike
    result = counted(text, model, batch, prompt, generate)
    assert result.holds
    assert_resident(text, result)
    for line in result.lines:
        assert line.same_flops, (line.phase, line.op, line.predicted.flops, line.counted.flops)
        free = line.op in STACK_WIDE
        free |= line.phase == "decode" and "zipcache" in text and line.op in DRAWN
        free |= drafts(text) and line.op in SPREAD
        assert line.equal or free, (line.phase, line.op, line.predicted, line.counted)


@pytest.mark.parametrize(("text", "prompt", "generate"), [e for e in EXACT if drafts(e[0])])
def test_two_sequences_that_draft_keep_what_is_stated(
    text: str, prompt: int, generate: int
) -> None:
    assert_resident(text, counted(text, "llama", 2, prompt, generate))


@pytest.mark.parametrize(
    "text", ["kivi:bits=2,group=16,residual=16", "zipcache", "quantspec:group=16,residual=64"]
)
def test_lengths_that_fit_nothing_differ_for_named_reasons(text: str) -> None:
    result = counted(text, "llama", 1, 61, 22)
    for line in result.lines:
        assert line.holds, (line.phase, line.op, line.predicted, line.counted)
