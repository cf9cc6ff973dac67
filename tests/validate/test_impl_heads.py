"""Draft heads: nothing is lost, and what a head has read is what it would read from scratch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kvsim.techniques import parse
from kvsim.validate.model.attention import Pass
from kvsim.validate.model.generation import RunningGeneration
from kvsim.validate.parts.composed import Composed
from kvsim.validate.run import Generation
from kvsim.validate.techniques.mtp import Mtp
from tests.support.decoders import decoder, prompts
from tests.support.runs import assert_same

LENGTHS, GENERATE = (40, 40, 40), 21


@pytest.mark.parametrize("lengths", [LENGTHS, (5, 5), (1,)])
@pytest.mark.parametrize(
    "text", ["eagle:gamma=3,acceptance=0.5,tokens=100", "mtp:gamma=2,acceptance=0.5"]
)
def test_heads_lose_nothing(text: str, lengths: tuple[int, ...]) -> None:
    assert_same(text, "full", prompts(*lengths), 16)


class States(Composed):
    """Full KV that keeps the last layer's hidden states of every token."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.states: list[list[Tensor]] = [[] for _ in range(self.batch)]

    def on_layer_output(self, layer: int, hidden: Tensor, step: Pass) -> None:
        if layer == self.model.layers - 1:
            for i in range(self.batch):
                self.states[i] += list(hidden[i].clone())


def test_a_head_has_read_what_was_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are made right, two of three, so that sequences accept different numbers of them."""
    own, given = decoder("llama"), prompts(*LENGTHS)
    full = Generation(own, parse("full"), given, GENERATE, kind=States)
    full.complete()
    seen: list[tuple[list[int], Tensor]] = []

    class Prompted(Mtp):
        def propose(self, generation: RunningGeneration, tokens: Tensor, ahead: int) -> Tensor:
            logits = super().propose(generation, tokens, ahead)
            if not ahead:
                seen.append((list(generation.cached), self.hidden[:, 0].clone()))
            for i, done in enumerate(generation.done):
                place = min(done + ahead, GENERATE - 1)
                right = int(full.tokens[i, place]) + ((place + i) % 3 == 0)
                logits[i] = torch.nn.functional.one_hot(torch.tensor(right % 199), 199)
            return logits

    monkeypatch.setattr("kvsim.validate.techniques.mtp.Mtp", Prompted)
    run = Generation(own, parse("mtp:gamma=3,acceptance=0.5"), given, GENERATE)
    run.complete()
    assert torch.equal(run.tokens, full.tokens)
    assert len({n for counts in run.yielded for n in counts}) > 2
    impl: Any = run.impl
    states: Any = full.impl
    for cached, hidden in seen:
        for i, (count, prompt) in enumerate(zip(cached, given, strict=True)):
            if count < len(prompt) + GENERATE - 1:
                scratch = from_scratch(impl.drafter, given[i], run.tokens[i], states.states[i])
                assert torch.allclose(hidden[i], scratch[count - 1], atol=1e-4), (i, count)


def from_scratch(head: Mtp, prompt: list[int], tokens: Tensor, states: list[Tensor]) -> Tensor:
    """The head's hidden states of one sequence, read at once."""
    text = torch.cat([torch.tensor(prompt), tokens])[1 : len(states) + 1]
    head.layers.cache = Composed(parse("full"), head.layers.decoder, (1, len(text)), 1)
    with torch.inference_mode():
        return head._pass(text[None], torch.stack(states)[None, : len(text)], [0])[0]
