"""Suffix decoding: drafts from suffix trees of earlier text."""

from kvsim.frozen import frozen
from kvsim.techniques.axes.drafting import MOST_DRAFTS, Rounds
from kvsim.techniques.axes.settings import param


@frozen
class Suffix(Rounds):
    """Suffix decoding: drafts long spans from suffix trees of the prompt and earlier answers.

    References
    ----------
    .. [1] G. Oliaro et al., "SuffixDecoding: extreme speculative decoding for emerging AI
       applications", NeurIPS 2025, section 3.
    """

    name = "suffix"
    like = "ngram"

    gamma: int = param(16, "tokens drafted per round, at most", high=MOST_DRAFTS)
