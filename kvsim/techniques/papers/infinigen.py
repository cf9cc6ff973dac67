"""InfiniGen: from a cache on the host a layer's tokens are guessed ahead, and fetched."""

from typing import ClassVar

import numpy as np

from kvsim.engine import ops
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Number, Op
from kvsim.techniques.axes.base import LayerPass, Part, Term
from kvsim.techniques.axes.placement import HostPlacement
from kvsim.techniques.axes.selection import Chosen
from kvsim.techniques.axes.settings import Budget, param


@frozen
class Guessed(Chosen):
    """Selects single tokens from a subset of key channels that stays on the GPU."""

    name = "guessed"
    preset = False

    budget: Number = param(400, "tokens fetched per head [tokens]", low=1, high=1e7, share=True)
    part: float = param(0.3, "of the channels that guess", low=0.01, high=1, whole=False)

    def tokens(self, at: LayerPass) -> Number:
        """As many single tokens as the budget says. [tokens]"""
        return self.budget

    def page_tokens(self) -> int:
        """Tokens are chosen one by one. [tokens]"""
        return 1

    def estimate(self, at: LayerPass) -> list[Op]:
        """Queries guessed from the layer before, against the partial keys."""
        m, p = at.d.shard, at.p
        keys = ops.FP16_BYTES * self.part * m.k_width * p.batch * at.kept_tokens
        scores = 2 * ops.SCORE * p.tokens * m.heads * at.kept_tokens
        width = self.part * m.k_width / m.cached_heads
        guess = 2.0 * p.tokens * m.hidden * self.part * m.heads * m.head_dim
        flops = 2.0 * p.tokens * m.heads * width * at.kept_tokens
        return [
            Op("guess_query", kernel="gemm", flops=guess, size=p.tokens,
               bytes={"hbm": ops.FP16_BYTES * m.hidden * self.part * m.heads * m.head_dim}),
            Op("guess", kernel="attention", flops=flops, bytes={"hbm": keys + scores}, size=p.new),
        ]  # fmt: skip

    def summarise(self, at: LayerPass) -> list[Op]:
        """The new tokens' partial keys."""
        moved = (1 + self.part) * ops.FP16_BYTES * at.d.shard.k_width * at.p.tokens
        return [Op("partial_keys", bytes={"hbm": moved})]

    def resident(self, at: LayerPass) -> Buffers:
        """The partial keys, and the part of the query weights that guesses."""
        m = at.d.shard
        keys = ops.FP16_BYTES * self.part * m.k_width * at.p.batch * at.cached
        weights = ops.FP16_BYTES * m.hidden * self.part * m.heads * m.head_dim
        return {"gpu": {"partial keys": keys, "partial weights": weights + 0.0 * np.asarray(keys)}}


@frozen
class Infinigen(Term):
    """Keeps the cache on the host and selects a layer's tokens while the previous layer runs.

    The fetch is stated behind the choice: what of it the layer before hides is not taken off.

    References
    ----------
    .. [1] W. Lee et al., "InfiniGen: efficient generative inference of large language models with
       dynamic KV cache management", OSDI 2024, sections 4.1 to 4.3: three tenths of the channels;
       at most 400 tokens as released; https://arxiv.org/abs/2406.19707.
    """

    name: ClassVar[str] = "infinigen"

    budget: Number = param(400, "tokens fetched per head [tokens]", low=1, high=1e7, share=True)
    part: float = param(0.3, "of the channels that guess", low=0.01, high=1, whole=False)

    candidates = ({"budget": Budget((0.0625, 0.125, 0.2))},)

    def pieces(self) -> tuple[Part, ...]:
        """Guesses over a cache on the host."""
        return Guessed(self.budget, self.part), HostPlacement(host_share=1)
