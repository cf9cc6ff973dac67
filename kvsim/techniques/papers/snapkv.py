"""SnapKV: the prompt is cut to the tokens its last queries attend to."""

from dataclasses import replace

import numpy as np

from kvsim.engine import ops
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Number, Op
from kvsim.techniques.axes.base import Launches, LayerPass, Selection
from kvsim.techniques.axes.selection import compact, kept_tokens, observe
from kvsim.techniques.axes.settings import Budget, param


@frozen
class Snapkv(Selection):
    """Prompt compression by an observation window; generated tokens are all kept.

    References
    ----------
    .. [1] Y. Li et al., "SnapKV: LLM knows what you are looking for before generation",
       NeurIPS 2024, section 4.
    """

    name = "snapkv"
    evicts = "after the prompt"
    per_head = True
    launches = Launches(prefill={"observe": 11, "select": 10, "compact": 22}, decode={"attn": 1})

    budget: Number = param(1024, "prompt tokens kept [tokens]", low=1, high=1e7, share=True)
    window: int = param(32, "observing queries [tokens]", low=1, high=1e5)

    candidates = ({"budget": Budget((0.125, 0.25, 0.5), of="prompt")},)

    def for_prompt(self, prompt: Number) -> "Snapkv":
        """A share is no less than the observing window, which always stays."""
        found = super().for_prompt(prompt)
        least = self.window if self.shares else 0
        return replace(found, budget=np.maximum(found.budget, least)) if least else found

    def prompt_budget(self) -> Number:
        """The budget, of PyramidKV's layers their mean."""
        return self.budget

    def count_kept(self, at: LayerPass) -> Number:
        """The kept part of the prompt, and all that is generated."""
        return np.minimum(at.cached, kept_tokens(at, self.budget))

    def count_kept_prompt(self, at: LayerPass) -> Number:
        """The budget at most."""
        return np.minimum(at.p.length, self.budget)

    def limit(self, at: LayerPass) -> Number:
        """Tokens that are kept, all of which a query sees. [tokens]"""
        return kept_tokens(at, self.budget)

    def complete(self, at: LayerPass) -> list[Op]:
        """After the prompt its last queries choose."""
        if not at.p.prefill:
            return []
        chosen = compact(at, self.budget, scored=at.p.prompt)
        return [observe(at, self.window, self.budget), *chosen]

    def shared_buffers(self, at: LayerPass) -> Buffers:
        """One layer's whole cache while the prompt is read."""
        return ops.prompt_kv(at.d, at.p)
