"""P-EAGLE: a round's drafts from one pass of a head."""

from kvsim.frozen import frozen
from kvsim.techniques.axes.drafting import MOST_DRAFTS, Acceptance, acceptance_param
from kvsim.techniques.axes.settings import param
from kvsim.techniques.papers.eagle import Head


@frozen
class PEagle(Head):
    """P-EAGLE: an EAGLE-3 head of several layers that drafts a round's tokens in one pass.

    Places of tokens not yet known hold a mask token and one learned hidden state.

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
