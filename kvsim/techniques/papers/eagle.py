"""EAGLE-3: a one-layer head drafts from the model's low, middle and high hidden states."""

from math import ceil

from kvsim.frozen import frozen
from kvsim.machines.deployment import Deployment
from kvsim.techniques.heads import Head
from kvsim.techniques.settings import param


@frozen
class Eagle(Head):
    """A chain of drafts; trees of drafts are not modelled. Acceptance has to be given.

    References
    ----------
    .. [1] Y. Li et al., "EAGLE-3: scaling up inference acceleration of large language models via
       training-time test", NeurIPS 2025, section 3.1: three hidden states join the embedding.
    """

    name = "eagle"
    fused = 3

    tokens: int = param(32000, "tokens that a draft chooses among", low=1, high=1e6)

    def vocab(self, deployment: Deployment) -> int:
        """A part of the vocabulary."""
        return ceil(min(self.tokens, deployment.model.vocab) / deployment.tp)
