"""Caches that keep some tokens, against what they keep put down in plain words."""

import pytest
import torch
from torch import Tensor

from kvsim.techniques import parse
from kvsim.validate.run import Run
from tests.decoders import decoder, prompts
from tests.naive_caches import Naive, naive_run

SINK, RECENT = 4, 20
BASE = 1e4  # of the toy model's rotations


def turned(keys: Tensor, by: int) -> Tensor:
    """Keys (tokens, channels) as if they stood ``by`` positions later."""
    half = keys.shape[1] // 2
    angle = by * BASE ** -(torch.arange(half) / half)
    return torch.view_as_real(
        torch.complex(keys[:, :half], keys[:, half:]) * torch.polar(torch.ones(half), angle)
    ).permute(0, 2, 1).reshape(keys.shape)  # fmt: skip


class NaiveStreaming(Naive):
    """The first tokens moved next to the latest."""

    def keys(self, x: Tensor, cached: int) -> Tensor:
        away = max(len(x) - SINK - RECENT, 0)
        return torch.cat([turned(x[:SINK], away), x[SINK + away :]])

    def values(self, x: Tensor, cached: int) -> Tensor:
        return torch.cat([x[:SINK], x[SINK + max(len(x) - SINK - RECENT, 0) :]])


@pytest.mark.parametrize("lengths", [(90, 61), (10, 24, 90), (5, 3), (25,), (24,), (23,)])
def test_sinks_and_window_are_attended_to_side_by_side(lengths: tuple[int, ...]) -> None:
    """Prompts beyond the budget, at it, within it, and all in one batch."""
    given = prompts(*lengths)
    text = f"streamingllm:sink={SINK},recent={RECENT}"
    run = Run(decoder("llama"), parse(text), given, 40, keep=True)
    oracle = naive_run(NaiveStreaming, decoder("llama"), given, 40)
    assert torch.equal(run.complete(), oracle.tokens)
    for ours, theirs in zip(run.logits, oracle.logits, strict=True):
        assert (torch.stack(ours) - torch.stack(theirs)).abs().max() < 1e-4
