"""N-gram drafts: the tokens that followed an earlier occurrence of the last tokens."""

from kvsim.frozen import frozen
from kvsim.techniques.axes.base import Launches
from kvsim.techniques.axes.drafting import Rounds


@frozen
class Ngram(Rounds):
    """Copies drafts from earlier text (prompt lookup).

    Drafts are the tokens that followed the last few tokens earlier in the text. They need no
    forward pass and no GPU memory; the search on the host is not modelled. Acceptance depends on
    how much of the answer repeats the prompt.

    References
    ----------
    .. [1] N. Yang et al., "Inference with reference: lossless acceleration of large language
       models", arXiv:2304.04487, 2023, section 3: spans copied from a reference are verified in one
       pass.
    """

    name = "ngram"
    launches = Launches(decode={"attn": 6})
