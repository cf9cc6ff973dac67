"""EAGLE-2: a tree of drafts that grows where the draft is confident."""

from kvsim.frozen import frozen
from kvsim.techniques.axes.base import Launches
from kvsim.techniques.axes.drafting import MOST_DRAFTS, Acceptance, acceptance_param
from kvsim.techniques.axes.settings import param
from kvsim.techniques.papers.eagle import MOST_VERIFIED, Tree


@frozen
class Eagle2(Tree):
    """EAGLE-2: drafts a tree by the draft's own confidence, over the whole vocabulary.

    References
    ----------
    .. [1] Y. Li et al., "EAGLE-2: faster inference of language models with dynamic draft trees",
       EMNLP 2024, section 4: 60 tokens besides the model's own, six deep, ten wide.
    """

    name = "eagle2"
    like = "eagle3"
    launches = Launches(prefill={"attn": 3}, decode={"attn": 7})

    gamma: int = param(6, "tokens drafted in a row per round", high=MOST_DRAFTS)
    acceptance: Acceptance = acceptance_param()
    width: int = param(10, "branches per draft pass", low=1, high=32)
    verify: int | str = param(
        61, "tokens verified per round, including the model's own",
        low=2, high=MOST_VERIFIED, choices=("auto",),
    )  # fmt: skip
