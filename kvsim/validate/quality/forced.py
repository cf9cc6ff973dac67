"""A run along a given text: what it would have chosen is scored, the text's tokens are taken."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvsim.techniques.technique import Technique
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.parts.base import Implementation
from kvsim.validate.run import Generation
from kvsim.validate.techniques import IMPLEMENTATIONS


class Forced(Generation):
    """One token per round, the text's.

    The first token behind the prompt is not scored: it comes from the prompt, which every
    technique reads in full precision.

    Parameters
    ----------
    texts : tokens of every sequence, all of one length; the first ``prompt`` are read at once.
    truth : the log-probabilities that a run with full-precision KV kept; this one's are kept if
        there are none.
    """

    def __init__(
        self,
        decoder: Decoder,
        technique: Technique,
        texts: Sequence[Sequence[int]],
        prompt: int,
        truth: list[Tensor] | None = None,
        kinds: Mapping[str, type[Implementation]] = IMPLEMENTATIONS,
    ) -> None:
        prompts = [text[:prompt] for text in texts]
        super().__init__(decoder, technique, prompts, len(texts[0]) - prompt, kinds=kinds)
        self.text = torch.tensor([text[prompt:] for text in texts], device=decoder.device)
        self.truth = truth
        self.kept: list[Tensor] = []  # (batch, vocab) per token
        self._losses: list[Tensor] = []
        self._divergences: list[Tensor] = []

    def emit(
        self, tokens: Tensor, counts: Sequence[int] | None = None, logits: Tensor | None = None
    ) -> None:
        """Score the text's next token, and take it."""
        place = self.done[0]
        if place:
            assert logits is not None
            self._score(logits.view(self.batch, -1), place)
        super().emit(self.text[:, place])

    @property
    def perplexity(self) -> float:
        """Of the scored tokens."""
        return float(torch.stack(self._losses).double().mean().exp())

    @property
    def divergence(self) -> float:
        """Mean KL divergence of this run's next token from the truth's. [nat]"""
        return max(0.0, float(torch.stack(self._divergences).double().mean()))

    def _score(self, logits: Tensor, place: int) -> None:
        shares = logits.float().log_softmax(-1)
        self._losses.append(-shares.gather(1, self.text[:, place, None])[:, 0])
        if self.truth is None:
            self.kept.append(shares)
            return
        meant = self.truth[place - 1]
        self._divergences.append((meant.exp() * (meant - shares)).sum(-1))
