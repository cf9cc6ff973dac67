"""P-EAGLE: a round's drafts from one pass of a head."""

from kvsim.frozen import frozen
from kvsim.techniques.axes.drafting import MOST_DRAFTS, Acceptance, acceptance_param
from kvsim.techniques.axes.settings import param
from kvsim.techniques.papers.eagle import Head


@frozen
class PEagle(Head):
    """P-EAGLE: drafts all tokens of a round in one pass of a multi-layer EAGLE-3 head.

    Positions of tokens not yet known hold a mask token and a learned hidden state.

    References
    ----------
    .. [1] "P-EAGLE: faster LLM inference with parallel speculative decoding in vLLM", vLLM blog,
       2026: heads of four layers, seven drafts.
    """

    name = "p-eagle"
    fused = 3
    depth = 4
    parallel = True
    shape = "parallel"

    gamma: int = param(7, "tokens drafted per round, in one pass", high=MOST_DRAFTS)
    acceptance: Acceptance = acceptance_param()
