"""The paths that only a GPU takes, on one that is pretended: units, waits, work as stated."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvsim.techniques import parse
from kvsim.validate.counts.compare import compare
from kvsim.validate.run import Generation
from kvsim.validate.session.oracles import ORACLES
from kvsim.validate.session.state import SessionState
from kvsim.validate.session.work import facts
from kvsim.validate.tally import Tally
from tests.support.pretended import decoder, pretended
from tests.support.pretended_cuda import GPU

PROMPTS = [list(range(1, 41))] * 2


@pytest.mark.parametrize("text", ["fp8", "turboquant:bits=4,group=16"])
def test_work_is_as_stated_and_the_host_never_waits(text: str) -> None:
    with pretended() as seen:
        small = decoder()
        Generation(small, parse(text), PROMPTS, 3).complete()
        assert seen.waits == 0
        counting = replace(small, tally=(tally := Tally()))
        run = Generation(counting, parse(text), PROMPTS, 3)
        run.complete()
        assert small.deployment
        found = compare(small.deployment, run, tally)
    decoding = [line for line in found.lines if line.phase == "decode"]
    assert decoding and [line for line in decoding if not line.same_flops] == []


def test_facts_are_told(tmp_path: Path) -> None:
    with pretended():
        assert facts("cuda:0", SessionState.of(tmp_path, "pretended"))["device"] == "Pretended GPU"


@pytest.mark.parametrize("name", ["gather", "topk", "quantise"])
def test_kernels_are_their_twins(name: str) -> None:
    with pretended(), torch.inference_mode():
        cases = list(ORACLES[name](GPU, True))
    assert cases and all(case["passed"] for case in cases)
