"""Rounds of self-speculative decoding: draft, verify in one pass, keep what agrees."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from kvsim.techniques.technique import Technique
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.parts.base import Implementation

if TYPE_CHECKING:
    from kvsim.validate.run import Generation


class Speculative(Implementation):
    """Drafts and verification of a technique with a setting ``gamma``.

    Rejected tokens need no rollback: the next pass starts behind the last one that stays and
    overwrites them.
    """

    def __init__(
        self, technique: Technique, decoder: Decoder, lengths: list[int], generate: int
    ) -> None:
        self.gamma = technique.drafts
        self.drafted: list[int] = []  # tokens drafted in each round
        super().__init__(technique, decoder, lengths, generate)

    @property
    def slack(self) -> int:
        """Drafts of the last round."""
        return self.gamma

    def room(self, cached: list[int]) -> int:
        """Tokens that a round may append at most. [tokens]"""
        return self.gamma + 1

    def round_done(self, before: list[int], after: list[int]) -> None:
        """A round is over; ``before`` and ``after`` are the cached tokens of every sequence."""

    def draft(self, run: "Generation", tokens: Tensor, ahead: int) -> Tensor:
        """Logits of a draft (batch, 1, vocab) after tokens (batch, 1): by the model itself.

        Others may choose among the first tokens of the vocabulary alone.
        """
        return run.forward(tokens, "draft", ahead=ahead)

    def lookup(self, run: "Generation", count: int) -> list[Tensor] | None:
        """Drafts (batch,) that come from no pass of a model, if they do not."""
        return None

    def decode_round(self, run: "Generation") -> None:
        """Draft as many tokens as there is room for, verify them together."""
        gamma = min(self.gamma, self.room(run.cached) - 1)
        self.drafted.append(gamma)
        tokens, shares = [run.last], []
        found = self.lookup(run, gamma)
        if found is not None:
            tokens += found
            shares = [one_hot(token, self.model.vocab).float() for token in found]
        for i in range(gamma if found is None else 0):
            logits = self.draft(run, tokens[-1][:, None], i)[:, 0]
            tokens.append(run.choose(logits))
            if run.temperature:
                shares.append(run.shares(logits))
        logits = run.forward(torch.stack(tokens, 1), "verify")
        drafts = torch.stack(tokens[1:], 1) if gamma else run.last.new_empty(self.batch, 0)
        if run.temperature:
            q = torch.stack(shares, 1) if gamma else logits.new_empty(self.batch, 0, 0)
            q = torch.nn.functional.pad(q, (0, logits.shape[2] - q.shape[2]))
            kept, extra = verify_drawn(drafts, q, run.shares(logits), run.generator)
        else:
            kept, extra = verify_likeliest(drafts, run.choose(logits))
        given = torch.cat([drafts, extra[:, None]], 1)
        given.scatter_(1, kept[:, None], extra[:, None])
        before = run.cached
        run.emit(given, (kept + 1).tolist(), logits)
        self.round_done(before, run.cached)


def verify_likeliest(drafts: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Keep drafts while they are what the target would have chosen.

    Parameters
    ----------
    drafts : (batch, gamma) tokens.
    target : (batch, gamma + 1) tokens: what the target chooses at each place, and after the last.

    Returns
    -------
    How many drafts are kept (batch,), and the target's token after them (batch,).
    """
    same = (drafts == target[:, :-1]).long()
    kept = same.cumprod(1).sum(1)
    return kept, target.gather(1, kept[:, None])[:, 0]


def verify_drawn(
    drafts: Tensor, queries: Tensor, probabilities: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Keep each draft with probability p / q; the result is distributed as p.

    Parameters
    ----------
    drafts : (batch, gamma) tokens, drawn from ``q``.
    q : (batch, gamma, vocab) the draft's probabilities.
    p : (batch, gamma + 1, vocab) the target's.

    Returns
    -------
    As ``verify_likeliest``; the token after the kept ones is drawn from what the target has more
    of than the draft where one was rejected, from the target's own otherwise.

    References
    ----------
    .. [1] Y. Leviathan et al., "Fast inference from transformers via speculative decoding",
       ICML 2023, section 2.3.
    """
    batch, gamma = drafts.shape
    if gamma:
        at = drafts[..., None]
        odds = probabilities[:, :-1].gather(2, at)[..., 0] / queries.gather(2, at)[..., 0]
        luck = torch.rand(batch, gamma, generator=generator, device=probabilities.device)
        kept = (luck < odds).long().cumprod(1).sum(1)
        drawn = torch.cat([queries, torch.zeros_like(probabilities[:, :1])], 1)
    else:
        kept, drawn = drafts.new_zeros(batch), torch.zeros_like(probabilities)
    place = kept[:, None, None].expand(-1, 1, probabilities.shape[2])
    wanted, had = probabilities.gather(1, place)[:, 0], drawn.gather(1, place)[:, 0]
    left = (wanted - had).clamp(min=0.0)
    # without any left (equal up to rounding, so hardly ever rejected) the target's own
    left = torch.where(left.sum(1, keepdim=True) > 0, left, wanted)
    return kept, torch.multinomial(left, 1, generator=generator)[:, 0]
