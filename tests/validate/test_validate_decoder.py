from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques import parse
from kvsim.validate.run import Generation
from tests.support.decoders import CONFIGS, decoder, oracle_logits, prompts
from tests.support.runs import (
    assert_likeliest,
    logits_of,
)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_tokens_are_those_of_transformers(name: str) -> None:
    given = prompts(30, 30, 30)
    run = Generation(decoder(name), parse("full"), given, 64, chunk=24, keep=True)
    tokens = run.complete()
    for i, prompt in enumerate(given):
        expected = oracle_logits(name, prompt, tokens[i].tolist())
        assert_likeliest(logits_of(run, i), tokens[i], expected)


@pytest.mark.parametrize(
    ("count", "chunk", "expected"),
    [(3, 45, [(0, 2, 0, 20), (2, 3, 0, 20)]), (2, 16, [(0, 1, 0, 16), (0, 1, 16, 4)])],
)
def test_prompts_of_a_large_batch_pass_one_after_another(
    count: int, chunk: int, expected: list[tuple[int, int, int, int]]
) -> None:
    seen = []
    run = Generation(decoder("llama"), parse("full"), prompts(*[20] * count), 1, chunk=chunk)
    attend = run.impl.prefill

    def observe(*given: Any) -> Tensor:
        step = given[-1]
        seen.append((step.rows.start, step.rows.stop, step.starts[0], step.new))
        return attend(*given)

    with patch.object(run.impl, "prefill", observe):
        run.complete()
    assert seen[:2] == expected


def test_drawn_tokens_follow_the_softmax() -> None:
    run = Generation(decoder("llama"), parse("full"), prompts(3), 1, temperature=1.5)
    logits = torch.tensor([[0.0, 1.0, 2.0]]).repeat(4000, 1)
    drawn = torch.bincount(run.choose(logits), minlength=3) / 4000
    assert torch.allclose(drawn, torch.softmax(logits[0] / 1.5, -1), atol=0.03)


def test_more_tokens_than_the_decoder_was_made_for_are_refused() -> None:
    with pytest.raises(InputError, match="513 tokens are needed"):
        Generation(decoder("llama"), parse("full"), prompts(500), 13)
