"""SpeCache: a packed cache on the GPU, the best tokens in fp16 fetched one step ahead."""

from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from kvsim.frozen import frozen
from kvsim.graph import Number
from kvsim.machines.deployment import Deployment
from kvsim.techniques.late_kivi import LateKivi
from kvsim.techniques.pairs import Pairs
from kvsim.techniques.settings import param
from kvsim.techniques.terms import Part, Term


@frozen
class Specache(Term):
    """Speculative prefetch of the key-value pairs that the next token will attend to.

    Every step decodes the output token and a speculative next token; the latter's scores choose
    what is prefetched for the next step. A step's own tokens are attended to in fp16 and packed
    afterwards.

    Without speculation the output token's own scores choose, and attention is recalculated when
    the pairs have arrived. A fused kernel has kept no scores and attends to everything again;
    where scores leave the chip, those of the pairs are corrected, as the step times of table 4
    show: a second pass over the cache would take half as long again as was measured.

    References
    ----------
    .. [1] S. Jie et al., "SpeCache: speculative key-value caching for efficient generation of
       LLMs", ICML 2025, section 3.3, algorithms 1 to 3, table 4.
    """

    name: ClassVar[str] = "specache"

    bits: float = param(2, "bits per cached number", choices=(1, 2, 4, 8))
    group: int = param(64, "numbers that share a scale", low=8, high=1024)
    k: Number = param(64, "pairs prefetched per KV head", high=1e7)
    residual: int = param(64, "latest tokens kept in fp16", high=1e6)
    speculative: bool = param(True, "prefetch one step ahead", choices=(True, False))

    def says(self) -> tuple[Part, ...]:
        """A packed cache, and exact pairs beside it."""
        return Pairs(self.k, self.speculative), LateKivi(self.bits, self.group, self.residual)

    def options(self, deployment: Deployment, prompt: int, generate: int) -> Iterable[Term]:
        """The paper's widths and groups over k."""
        k = np.array([16.0, 64.0, 256.0])[:, None, None]
        return [Specache(bits, group, k) for bits in (1, 2) for group in (32, 64)]
