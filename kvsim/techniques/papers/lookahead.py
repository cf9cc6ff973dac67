"""Lookahead decoding: n-grams guessed in parallel, then verified."""

from kvsim.frozen import frozen
from kvsim.techniques.axes.drafting import MOST_DRAFTS, Rounds
from kvsim.techniques.axes.settings import param


@frozen
class Lookahead(Rounds):
    """Lookahead decoding: guesses n-grams in parallel and verifies earlier guesses.

    Each pass advances a window of ``window`` positions and ``ngram`` - 1 levels, and verifies
    ``guesses`` n-grams from the pool.

    References
    ----------
    .. [1] Y. Fu et al., "Break the sequential dependency of LLM inference using lookahead
       decoding", ICML 2024, section 3; 15, 5 and 15 as released for 7B models.
    """

    name = "lookahead"
    like = "ngram"

    gamma: int = param(4, "tokens of an n-gram after its first: ngram - 1", high=MOST_DRAFTS)
    window: int = param(15, "positions guessed in parallel", low=1, high=64)
    guesses: int = param(15, "maximum number of n-grams verified", low=1, high=64)

    @property
    def verified(self) -> int:
        """Tokens per sequence in a pass: window and guesses at every level, and one more."""
        return 1 + (self.window + self.guesses) * self.gamma if self.gamma else 1
