"""H2O: heavy hitters and recent tokens are kept, the rest evicted."""

import numpy as np

from kvsim.engine import ops
from kvsim.engine.buffers import merge, scale
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Number, Op
from kvsim.techniques.axes.base import Launches, LayerPass
from kvsim.techniques.axes.selection import Bounded, compact, score_matrix, score_upkeep
from kvsim.techniques.axes.settings import Budget, param


@frozen
class H2o(Bounded):
    """Evicts the tokens with the lowest accumulated attention scores.

    The scores of all queries are accumulated in fp32 per head, so the attention kernel has to write
    them; each new token replaces the one with the lowest score. If nothing has to be evicted,
    nothing is computed.

    References
    ----------
    .. [1] Z. Zhang et al., "H2O: heavy-hitter oracle for efficient generative inference of large
       language models", NeurIPS 2023, algorithm 1.
    """

    name = "h2o"
    scored = True  # all scores are added up
    per_head = True
    launches = Launches(
        prefill={"attn": 26, "scores": 9, "select": 6, "compact": 4},
        decode={"attn": 21, "scores": 2, "lowest": 13},
    )

    heavy: Number = param(512, "heavy hitters kept [tokens]", high=1e7, share=True)
    recent: Number = param(512, "recent tokens kept [tokens]", low=1, high=1e7, share=True)

    candidates = (  # a tenth, a fifth and two fifths of the context, half of it heavy
        {"heavy": Budget((0.05, 0.1, 0.2)), "recent": Budget((0.05, 0.1, 0.2))},
    )

    @property
    def budget(self) -> Number:
        """Tokens kept at most."""
        return self.heavy + self.recent

    def complete(self, at: LayerPass) -> list[Op]:
        """Return the ops that add up scores and select tokens.

        After prefill the best tokens are gathered; in decoding the lowest score is found.
        """
        p, tokens = at.p, at.cached
        seen = tokens if p.prefill else np.minimum(tokens, self.budget)
        upkeep = score_upkeep(at, seen * (p.max_length > self.budget))
        if p.prefill:
            return [*upkeep, *compact(at, self.budget, scored=tokens)]
        # the token that leaves the recent ones is compared with the heavy hitters
        compared = (self.heavy + 1) * (p.length > self.budget) * (np.asarray(self.heavy) > 0)
        sums = 4.0 * p.batch * at.d.shard.heads * compared
        return [*upkeep, Op("lowest", kernel="topk", bytes={"hbm": sums})]

    def resident(self, at: LayerPass) -> Buffers:
        """Return the memory of the kept tokens' accumulated scores in fp32. [B]"""
        p = at.p
        sums = 4.0 * p.batch * at.d.shard.heads * np.minimum(self.budget, p.length)
        return {"gpu": {"scores": sums * (p.max_length > self.budget)}}

    def shared_buffers(self, at: LayerPass) -> Buffers:
        """Return the memory of one layer's whole prompt and its scores, while it is read. [B]"""
        ranks = 1.0 * (np.asarray(at.p.max_length) > self.budget)
        scores = scale(score_matrix(at), ranks)
        return merge(ops.prompt_kv(at.d, at.p), scores)
