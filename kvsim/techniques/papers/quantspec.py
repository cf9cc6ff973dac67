"""QuantSpec: drafts read the upper four bits of the cache, verification all eight."""

from collections.abc import Iterable
from typing import ClassVar

from kvsim.frozen import frozen
from kvsim.machines.deployment import Deployment
from kvsim.techniques.acceptance import Acceptance, acceptance_param
from kvsim.techniques.hierarchical import Hierarchical
from kvsim.techniques.selfdraft import Selfdraft
from kvsim.techniques.settings import param
from kvsim.techniques.terms import Part, Term


@frozen
class Quantspec(Term):
    """Self-speculation with a hierarchical 4+4-bit cache and 4-bit MLP weights.

    The output is that of the model with an 8-bit cache. Rounds that the full-precision buffer
    cuts short, about one per half, are not modelled.

    References
    ----------
    .. [1] R. Tiwari et al., "QuantSpec: self-speculative decoding with hierarchical quantized KV
       cache", ICML 2025, sections 4.2 and 4.3, algorithm 1; acceptance from table 6.
    """

    name: ClassVar[str] = "quantspec"

    gamma: int = param(4, "tokens drafted per round", high=16)
    acceptance: Acceptance = acceptance_param()
    group: int = param(128, "numbers that share a scale", low=8, high=1024)
    residual: int = param(256, "full-precision buffer [tokens]", low=2, high=1e5)
    weight_bits: float = param(4, "bits of the draft's MLP weights", choices=(4, 16))

    def says(self) -> tuple[Part, ...]:
        """The cache, and drafts over its upper half."""
        drafts = Selfdraft(self.gamma, self.acceptance, "upper", weight_bits=self.weight_bits)
        return Hierarchical(self.group, self.residual), drafts

    def options(self, deployment: Deployment, prompt: int, generate: int) -> Iterable[Term]:
        """The paper's gammas, with the acceptance set or its published mean."""
        return [Quantspec(gamma, self.acceptance) for gamma in (1, 2, 4, 6)]
