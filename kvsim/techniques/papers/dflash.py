"""DFlash: a block of drafts from one pass of layers that diffuse."""

from kvsim.frozen import frozen
from kvsim.techniques.axes.drafting import MOST_DRAFTS
from kvsim.techniques.axes.settings import param
from kvsim.techniques.papers.eagle import Head


@frozen
class Dflash(Head):
    """DFlash: drafts a block of tokens in one pass of a five-layer diffusion model.

    The layers attend to projected hidden states from five of the model's layers instead of
    keys and values computed by the draft; embedding and output head are the model's.

    References
    ----------
    .. [1] J. Chen et al., "DFlash: block diffusion for flash speculative decoding", 2026: five
       layers, blocks of 16, of which the first token is known.
    """

    name = "dflash"
    fused = 5
    depth = 5
    parallel = True
    shape = "block"

    gamma: int = param(15, "tokens drafted per round, one less than the block", high=MOST_DRAFTS)
