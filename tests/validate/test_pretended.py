"""The paths that only a GPU takes, on one that is pretended: units, waits, work as stated."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvsim.prediction.memory import decode_point
from kvsim.techniques import parse
from kvsim.validate import transfer as pinned_memory
from kvsim.validate.counter import OpCounter, Watch, size
from kvsim.validate.counts.compare import compare
from kvsim.validate.counts.expected import RandomPrompts
from kvsim.validate.parts.drafting import int4, int4_matrix
from kvsim.validate.run import Generation
from tests.support.oracles import ORACLES
from tests.support.pretended import decoder, pretended
from tests.support.pretended_cuda import GPU

PROMPTS = [list(range(1, 41))] * 2


@pytest.mark.parametrize("text", ["fp8", "turboquant:bits=4,group=16"])
def test_work_is_as_stated_and_the_host_never_waits(text: str) -> None:
    with pretended() as seen:
        small = decoder()
        Generation(small, parse(text), PROMPTS, 3).complete()
        assert seen.waits == 0
        counting = replace(small, counter=(counter := OpCounter()))
        run = Generation(counting, parse(text), PROMPTS, 3)
        run.complete()
        assert small.deployment
        found = compare(small.deployment, run, counter)
    decoding = [line for line in found.lines if line.phase == "decode"]
    assert decoding and [line for line in decoding if not line.same_flops] == []


@pytest.mark.parametrize("name", ["gather", "topk", "quantise", "factors"])
def test_kernels_are_their_twins(name: str) -> None:
    with pretended(), torch.inference_mode():
        cases = list(ORACLES[name](GPU, True))
    assert cases and all(case["passed"] for case in cases)


@pytest.mark.parametrize("text", ["offload", "kvpr:split=9", "kcache:n=16", "specache:k=16"])
def test_homes_are_one_mapping_as_large_as_stated(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: dict[int, int] = {}

    def register(address: int, size: int, flags: int) -> int:
        pinned[address] = size
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=pinned.pop)
    monkeypatch.setattr(pinned_memory, "_runtime", lambda: runtime)
    with pretended(interpreted=False):
        small = decoder()
        run = Generation(small, parse(text), PROMPTS, 3)
        kept = [t for some in run.impl.resident()["host"].values() for t in some]
        assert list(pinned.values()) == [sum(pinned_memory.lines(size(t)) for t in kept)]
        assert sum(map(size, kept)) <= sum(pinned.values()) < sum(map(size, kept)) + 64 * len(kept)
        assert small.deployment
        work = RandomPrompts(2, len(PROMPTS[0]), 3)
        point = decode_point(work.batch, work.prompt, work.generate, work.generate - 1.0)
        stated = run.impl.technique.resident(small.deployment, point)["host"]
        run.impl.shutdown()
    assert not pinned
    total = sum(float(np.ravel(n)[0]) for n in stated.values())
    assert sum(map(size, kept)) == pytest.approx(total, rel=1e-9)


def test_scales_of_weights_in_four_bits_are_prepared_once() -> None:
    with pretended():
        generator = torch.Generator().manual_seed(3)
        weight = torch.randn(64, 256, generator=generator).half().to(GPU)
        numbers = torch.randn(2, 3, 256, generator=generator).half().to(GPU)
        matrix = int4_matrix(weight, None)
        with Watch() as watch:
            found = matrix(numbers)
        exact = numbers.double() @ int4(weight).numbers().double().T
    assert watch.kernels == 3, "to bf16, the product, and back"
    assert bool((found.double() - exact).abs().max() < 0.02 * exact.abs().max())
