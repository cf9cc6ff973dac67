"""EAGLE-3: drafts from the model's low, middle and high hidden states."""

from kvsim.techniques.papers.eagle import Eagle as Settings
from kvsim.validate.parts.heads import DraftHeads

SMALL_SETTINGS = ("gamma=2,acceptance=0.5,tokens=100",)  # acceptance is counted


class Eagle(DraftHeads):
    """Drafter with an EAGLE-3 head, which drafts chains from a part of the vocabulary.

    References
    ----------
    .. [1] Y. Li et al., "EAGLE-3", NeurIPS 2025, section 3.1.
    """

    own_head = True

    def vocabulary(self, vocab: int) -> int:
        """Return how many tokens drafts choose among: the first ones, assumed most frequent."""
        assert isinstance(self.part, Settings)
        return min(self.part.tokens, vocab)

    def sources(self, layers: int) -> list[int]:
        """Return three layers, low, middle and high, whose hidden states the head reads."""
        return [min(2, layers - 1), layers // 2, max(layers - 3, 0)]
