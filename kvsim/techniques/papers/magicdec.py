"""MagicDec: drafts attend to a small sparse cache, verification to the whole one."""

from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from kvsim.frozen import frozen
from kvsim.graph import Number
from kvsim.machines.deployment import Deployment
from kvsim.techniques.axes.base import Part, Term
from kvsim.techniques.axes.drafting import Acceptance, Selfdraft, acceptance_param
from kvsim.techniques.axes.settings import param


@frozen
class Magicdec(Term):
    """Self-speculation with a StreamingLLM or SnapKV draft cache beside the full one.

    References
    ----------
    .. [1] R. Sadhukhan et al., "MagicDec: breaking the latency-throughput tradeoff for long
       context generation with speculative decoding", ICLR 2025, section 4; acceptance from
       QuantSpec's table 6.
    """

    name: ClassVar[str] = "magicdec"

    draft: str = param("streamingllm", "draft cache", choices=("streamingllm", "snapkv"))
    budget: Number = param(1024, "tokens of the draft cache [tokens]", low=1, high=1e7, share=True)
    gamma: int = param(2, "tokens drafted per round", high=16)
    acceptance: Acceptance = acceptance_param()

    def pieces(self) -> tuple[Part, ...]:
        """Drafts over a cache of their own."""
        return (Selfdraft(self.gamma, self.acceptance, self.draft, self.budget),)

    def options(self, deployment: Deployment, prompt: int, generate: int) -> Iterable[Term]:
        """A quarter of the context, for which the acceptance was published."""
        return self._of_size(float(np.ceil((prompt + generate) / 4)))

    def options_of_shares(
        self, deployment: Deployment, prompt: int, generate: int
    ) -> Iterable[Term]:
        """A quarter of each prompt."""
        return self._of_size(0.25)

    def _of_size(self, budget: float) -> Iterable[Term]:
        return [
            Magicdec(draft, budget, gamma, self.acceptance)
            for draft in ("streamingllm", "snapkv")
            for gamma in (1, 2, 3)
        ]
