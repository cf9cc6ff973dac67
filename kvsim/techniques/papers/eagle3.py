"""EAGLE-3 under the name and with the defaults of serving engines."""

from kvsim.frozen import frozen
from kvsim.techniques.axes.base import Launches
from kvsim.techniques.axes.drafting import MOST_DRAFTS
from kvsim.techniques.axes.settings import param
from kvsim.techniques.papers.eagle import Eagle


@frozen
class Eagle3(Eagle):
    """EAGLE-3 as in SGLang and vLLM: a chain of three drafts by default.

    References
    ----------
    .. [1] Y. Li et al., "EAGLE-3", NeurIPS 2025; drafts of SpecForge (github.com/sgl-project).
    """

    name = "eagle3"
    launches = Launches(prefill={"attn": 3}, decode={"attn": 7})

    gamma: int = param(3, "tokens drafted in a row per round", high=MOST_DRAFTS)
