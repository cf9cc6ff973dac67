"""MagicDec: drafts attend to a small sparse cache, verification to the whole one."""

from typing import ClassVar

from kvsim.frozen import frozen
from kvsim.graph import Number
from kvsim.techniques.axes.base import Part, Term
from kvsim.techniques.axes.drafting import Acceptance, Selfdraft, acceptance_param
from kvsim.techniques.axes.settings import Budget, combine, param


@frozen
class Magicdec(Term):
    """Drafts with a StreamingLLM or SnapKV cache in addition to the full one.

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

    candidates = combine(  # a quarter of the context, for which the acceptance was published
        draft=("streamingllm", "snapkv"), gamma=(1, 2, 3), budget=(Budget((0.25,)),)
    )

    def pieces(self) -> tuple[Part, ...]:
        """Return self-drafting with a separate draft cache."""
        return (Selfdraft(self.gamma, self.acceptance, self.draft, self.budget),)
