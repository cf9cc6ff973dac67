"""Bytes that kernels are seen to move: the rules one by one, and every technique by them."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from kvsim.machines.deployment import Deployment  # noqa: E402
from kvsim.machines.profiles import load_hardware, load_stack  # noqa: E402
from kvsim.techniques import parse  # noqa: E402
from kvsim.techniques.technique import Technique  # noqa: E402
from kvsim.validate.counter import OpCounter  # noqa: E402
from kvsim.validate.counts.check import SLACK, representative  # noqa: E402
from kvsim.validate.counts.compare import DIFFERENCES, MeasuredBytes, measured_bytes  # noqa: E402
from kvsim.validate.counts.expected import RandomPrompts  # noqa: E402
from kvsim.validate.model.architecture import load_architecture  # noqa: E402
from kvsim.validate.model.decoder import Decoder  # noqa: E402
from kvsim.validate.model.weights import random_weights  # noqa: E402
from kvsim.validate.run import Generation  # noqa: E402

MODEL = load_architecture("smollm2-135m").cut(2)
MODEL = replace(MODEL, model=replace(MODEL.model, vocab=512, ffn=768))  # which techniques leave be
WORK, SHORT = RandomPrompts(2, 64, 12), RandomPrompts(2, 64, 5)
RARE = ("zipcache:window=10", "specache:group=16,residual=16,k=24,speculative=false")
"""Settings under which ops run that a small run does not come to."""


def append(x: Tensor, cache: Tensor, where: Tensor) -> Tensor:
    cache[:, :4] = x[:, :4]
    return cache[:, :8] + 1


RULES: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], int]] = {
    "read and written once": (lambda x, cache, where: x + x * x, 2 * 256),
    "what stays inside is free": (lambda x, cache, where: (x.exp() @ x.mT).sum(), 256 + 4),
    "views are free": (lambda x, cache, where: x.mT[:4].reshape(4, 8) * 2, 128 + 128),
    "in place": (lambda x, cache, where: x.mul_(2), 2 * 256),
    "overlapping reads": (lambda x, cache, where: x[:, :6].sum() + x[:, 2:].sum(), 256 + 4),
    "a broadcast is read once": (lambda x, cache, where: x[:1].expand(8, 8) * 2, 32 + 256),
    "rows of a gather": (lambda x, cache, where: x[where], 64 + 64),
    "a copy writes alone": (lambda x, cache, where: cache[:, :8].copy_(x), 256),
    "rows of a scatter": (lambda x, cache, where: x.index_copy_(0, where, cache[:2, :8]), 64),
    "what was stored is read again": (append, 128 + 256 + 256),
    "widened on the chip": (lambda x, cache, where: x.double().half(), 256 + 128),
}


@pytest.mark.parametrize("rule", RULES)
def test_rules(rule: str) -> None:
    work, expected = RULES[rule]
    counter = OpCounter()
    x, cache, where = torch.ones(8, 8), torch.zeros(8, 16), torch.tensor([1, 5])
    counter.begin("decode")
    with counter.watch():
        with counter.op("some"):
            made = work(x, cache, where)
        if made.untyped_storage()._cdata not in {t.untyped_storage()._cdata for t in (x, cache)}:
            assert counter.passes[0].ops["some"].measured < expected  # it is not needed yet
        made.sum()
    assert counter.passes[0].ops["some"].measured == expected


@cache
def decoder() -> Decoder:
    weights = random_weights(MODEL, torch.device("cpu"), torch.float16)
    d = Deployment(MODEL.model, load_hardware("a6000"), load_stack("kvsim"))
    return Decoder(MODEL, weights, WORK.prompt + WORK.generate + SLACK, deployment=d)


def measure(technique: Technique, work: RandomPrompts) -> list[MeasuredBytes]:
    counting = replace(decoder(), counter=(counter := OpCounter()))
    run = Generation(counting, technique, work.prompts(MODEL.model.vocab), work.generate)
    with counter.watch():
        run.complete()
    return list(measured_bytes(technique.name, counter))


def test_bytes_that_differ_have_a_reason_and_reasons_a_difference() -> None:
    seen = set()
    usual = [(technique, SHORT) for technique in representative(MODEL.model, SHORT)]
    for technique, work in [*usual, *((parse(text), WORK) for text in RARE)]:
        for one in measure(technique, work):
            assert one.equal or one.reason, (str(technique), one)
            seen |= set() if one.equal else {("", one.op), (technique.name, one.op)}
    assert set(DIFFERENCES) <= seen
