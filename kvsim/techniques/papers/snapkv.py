"""SnapKV: the prompt is cut to the tokens its last queries attend to."""

from dataclasses import replace

import numpy as np

from kvsim.frozen import frozen
from kvsim.graph import Number, Op
from kvsim.techniques.axes.base import Launches, LayerPass
from kvsim.techniques.axes.selection import PromptCut, observe
from kvsim.techniques.axes.settings import param


@frozen
class Snapkv(PromptCut):
    """Keeps the prompt tokens to which the end of the prompt attends.

    The last ``window`` queries score the prompt; all generated tokens are kept.

    References
    ----------
    .. [1] Y. Li et al., "SnapKV: LLM knows what you are looking for before generation",
       NeurIPS 2024, section 4.
    """

    name = "snapkv"
    launches = Launches(prefill={"observe": 9, "select": 10, "compact": 12}, decode={"attn": 1})

    window: int = param(32, "last queries that score the prompt [tokens]", low=1, high=1e5)

    def for_prompt(self, prompt: Number) -> "Snapkv":
        """Return the selection with its budget in tokens, at least the observing window."""
        found = super().for_prompt(prompt)
        least = self.window if self.shares else 0
        return replace(found, budget=np.maximum(found.budget, least)) if least else found

    def score(self, at: LayerPass) -> list[Op]:
        """Return the op that scores all keys by the observing queries."""
        return [observe(at, self.window, self.budget)]
