"""Copies beside compute, delayed at random, into buffers that are poisoned first: no wrong token.

On a CPU lanes are threads, so a wait that is missing is a race here as it is on a GPU. What compute
does is over when it returns, though: that lanes wait for compute shows only on a GPU.
"""

import random
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.techniques import parse
from kvsim.validate import transfer
from kvsim.validate.counter import NullCounter
from kvsim.validate.kernels.gather import gather
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.parts import host_rows, place, prefetch
from kvsim.validate.run import Generation
from kvsim.validate.techniques import kvpr
from kvsim.validate.transfer import Transfers
from tests.support.decoders import decoder, prompts

STEPS, RUNS, FEW = 1000, 8, 40
LARGE = 255  # what homes hold at first: masked tokens are read with a weight of 0, so no NaN
LENGTHS = (40, 40)


@cache
def tiny() -> Decoder:
    """Three layers: not a multiple of two buffers."""
    whole = decoder("opt")
    d = Deployment(whole.arch.model, load_hardware("a6000"), load_stack("kvsim"))
    return replace(whole, deployment=d)


@cache
def plain(text: str, generate: int) -> Tensor:
    return Generation(tiny(), parse(text), prompts(*LENGTHS), generate).complete()


@dataclass
class Lateness:
    """How late copies are."""

    longest: float = 2e-4  # [s]
    storing: float = 0.0  # of every copy to the host [s]
    copies: int = 0
    clock: random.Random = field(default_factory=random.Random)

    def store(self) -> None:
        """Every copy to the host is late."""
        time.sleep(self.storing)

    def wait(self) -> None:
        """One copy in four is late."""
        self.copies += 1
        if self.clock.random() < 0.25:
            time.sleep(self.longest * self.clock.random())


def poisoned(target: Tensor) -> Tensor:
    return target.fill_(torch.nan if target.is_floating_point() else 255)


@pytest.fixture
def late(monkeypatch: Any) -> Lateness:
    """Work on lanes waits at random, and what it fills holds NaN until then."""
    lateness = Lateness()

    run = transfer._run

    def behind(wait: Any, told: Any, work: Any, after: Any) -> None:
        def waited() -> None:
            wait()
            work()

        run(told, waited, after)

    class Late(Transfers):
        def __init__(self, device: torch.device, counter: NullCounter) -> None:
            super().__init__(device, counter)
            if lateness.storing:
                self.d2h.shutdown()
                self.d2h = transfer._ThreadLane(partial(behind, lateness.store, nullcontext))

        def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return super().host(shape, dtype).fill_(LARGE)

    def copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
        for target, _ in pairs:
            poisoned(target)
        lateness.wait()
        transfer.copy_all(pairs)

    def fetch(k: Tensor, v: Tensor, index: Tensor, *into: Tensor) -> tuple[Tensor, Tensor]:
        for buffer in into:
            poisoned(buffer)
        lateness.wait()
        return gather(k, v, index, into[0], into[1])

    monkeypatch.setattr(transfer, "_run", partial(behind, lateness.wait))
    monkeypatch.setattr(place, "Transfers", Late)
    monkeypatch.setattr(host_rows, "gather", fetch)
    for module in (prefetch, kvpr, host_rows):
        monkeypatch.setattr(module, "copy_all", copy_all)
    return lateness


COMPOSED = [
    "place:host_share=0.5", "0-1: place:host_share=1; 2: full",
    "0: full; 1: place:host_share=0.5; 2-: kcache:n=2000",
    "fastdecode:parts=2", "0: offload; 1-2: place:cpu_share=0.5,parts=2",
    "ngram:gamma=2,acceptance=0.5 + offload:schedule=column,parts=2",
    "offload:host_share=0.5 + kivi:bits=4,group=8,residual=8", "offload + fp8",
    "0: full; 1-2: kcache:n=6 + grouped:bits=4,group=8", "offload + snapkv:budget=16,window=4",
    "place:weights_host=1,host_share=0.5", "shadowkv:budget=16,chunk=4,outliers=1,rank=8",
]  # fmt: skip
"""The first three are compared with full KV, the others with themselves without delays."""
LOSSLESS = ["offload:host_share=0.5", "kvpr:split=9"]
OWN = ["kcache:n=6", "specache:bits=2,group=16,residual=16,k=6", "infinigen:budget=6"]
OTHERS = [
    "offload", "offload:schedule=column,parts=2", "offload:schedule=column,parts=1,bits=4",
    "flexgen:weights_gpu=25,cache_gpu=50,parts=2", "kvpr:split=1000",
    "kvpr:schedule=column,parts=2,split=5", "kvpr:split=9,bits=4",
    "kcache:n=2000", "kcache:n=6,gpu_layers=1",
    "specache:bits=2,group=16,residual=16,k=6,speculative=false",
    "specache:bits=1,group=8,residual=8,k=2000",
]  # fmt: skip


@pytest.mark.parametrize("text", LOSSLESS + OWN)
def test_no_wrong_token_in_a_thousand_steps(text: str, late: Lateness) -> None:
    truth = plain("full" if text in LOSSLESS else text, STEPS // RUNS)
    for seed in range(RUNS):
        late.clock.seed(seed)
        tokens = Generation(tiny(), parse(text), prompts(*LENGTHS), STEPS // RUNS).complete()
        assert torch.equal(tokens, truth)
    assert late.copies > STEPS


@pytest.mark.parametrize("text", OTHERS)
def test_no_wrong_token_with_other_settings(text: str, late: Lateness) -> None:
    lossy = "bits=4" in text or "n=6" in text or "k=6" in text
    truth = plain(text if lossy else "full", FEW)
    late.longest = 2e-3
    assert torch.equal(Generation(tiny(), parse(text), prompts(*LENGTHS), FEW).complete(), truth)


@pytest.mark.parametrize("text", COMPOSED)
def test_no_wrong_token_in_compositions(text: str, late: Lateness) -> None:
    truth = plain("full" if text in COMPOSED[:3] else text, FEW)
    for late.longest in (2e-3, 5e-4):
        run = Generation(tiny(), parse(text), prompts(*LENGTHS), FEW)
        assert torch.equal(run.complete(), truth)
    assert late.copies > FEW


@pytest.mark.parametrize(
    "text", [*LOSSLESS, *OWN, OTHERS[1], OTHERS[5], *COMPOSED[3:8], COMPOSED[-1]]
)
def test_the_prompt_leaves_late(text: str, late: Lateness) -> None:
    """Long after the layers that computed it are through with their buffers."""
    late.storing = 3e-2
    tokens = Generation(tiny(), parse(text), prompts(*LENGTHS), 4).complete()
    assert torch.equal(tokens, plain(text if text in OWN + COMPOSED else "full", FEW)[:, :4])


@pytest.mark.parametrize("text", [*LOSSLESS, *OWN, *COMPOSED[:3], COMPOSED[5]])
def test_without_waiting_tokens_are_wrong(text: str, late: Lateness, monkeypatch: Any) -> None:
    """Or nothing above would show a race; on a busy machine layers are late as well as copies."""
    truth = plain(text if text in OWN + COMPOSED else "full", FEW)
    monkeypatch.setattr(transfer._ThreadMark, "wait", lambda self: None)

    def right(longest: float) -> bool:
        late.longest = longest
        run = Generation(tiny(), parse(text), prompts(*LENGTHS), FEW)
        return torch.equal(run.complete(), truth)

    assert not all(right(longest) for longest in (5e-3, 2e-2, 8e-2))


@pytest.fixture(autouse=True)
def known() -> None:
    """What is expected is found without any delay, before fixtures change anything."""
    for text in ["full", *OWN]:
        plain(text, STEPS // RUNS)
    for text in ["full", *OWN, *OTHERS, *COMPOSED]:
        plain(text, FEW)
