"""InfiniGen: while a layer runs, the next one's tokens are guessed and fetched from the host.

W. Lee, J. Lee, J. Seo, J. Sim, "InfiniGen: efficient generative inference of large language models
with dynamic KV cache management", OSDI 2024, https://arxiv.org/abs/2406.19707

1. The prompt is attended to in full. Of every layer's keys the channels that weigh most stay on the
   GPU, with the same channels of the query weights (section 4.2); the whole cache goes to the host.
2. While layer i - 1 decodes, its input times the partial query weights of layer i, and that times
   layer i's partial keys, guess what layer i will attend to: inputs of neighbouring layers are
   alike (section 4.3). The best tokens are fetched beside the rest of layer i - 1.
3. Layer i attends to them and to the newest token. The first layer has no input to guess from and
   fetches its whole cache.
"""

from bisect import bisect_left
from dataclasses import replace
from typing import ClassVar

import numpy as np

from kvsim.engine import ops
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Number, Op
from kvsim.machines.deployment import Deployment
from kvsim.techniques.axes.base import Launches, LayerPass, Part, Selection, Term
from kvsim.techniques.axes.placement import HostPlacement
from kvsim.techniques.axes.selection import Chosen
from kvsim.techniques.axes.settings import Budget, param


def guessing_channels(part: float, head_dim: int) -> int:
    """Return the number of channels per head that the guess uses, in pairs as RoPE rotates them.

    Parameters
    ----------
    part : share of the channels.
    head_dim : channels of a head.
    """
    return min(head_dim, 2 * max(1, int(part * head_dim / 2 + 1e-9)))


@frozen
class Guessed(Chosen):
    """Selects single tokens one layer ahead, by key channels that stay on the GPU."""

    name = "guessed"
    preset = False
    launches = Launches(
        prefill={"partial_keys": 19, "store_kv": 2},
        decode={"attn": 4, "partial_keys": 4, "guess_query": 3, "guess": 1, "topk": 1, "fetch": 2},
    )

    budget: Number = param(400, "tokens fetched per head [tokens]", low=1, high=1e7, share=True)
    part: float = param(
        0.3, "share of the channels used for the guess", low=0.01, high=1, whole=False
    )
    whole: int = param(1, "first layers that read everything", low=1, high=1000)

    def boundaries(self, deployment: Deployment) -> tuple[int, ...]:
        """Return the first layer whose tokens are guessed."""
        return deployment.model.caches[self.whole : self.whole + 1]

    def for_layer(self, index: int, deployment: Deployment) -> Selection:  # type: ignore[override]
        """Return the selection of one layer; the first layers read all tokens."""
        guessed = bisect_left(deployment.model.caches, index) >= self.whole
        return self if guessed else Selection()

    def tokens(self, at: LayerPass) -> Number:
        """Return the tokens read per KV head: the fetched and the new ones. [tokens]"""
        return self.host_tokens(at) + at.p.new

    def host_tokens(self, at: LayerPass) -> Number:
        """Return the tokens fetched per KV head, of those cached before the pass. [tokens]"""
        return np.minimum(self.budget, self._cached_before(at))

    def _cached_before(self, at: LayerPass) -> Number:
        return np.maximum(at.kept_tokens - at.p.new, 0.0)

    def page_tokens(self) -> int:
        """Return 1, as tokens are chosen one by one. [tokens]"""
        return 1

    def pages(self, at: LayerPass) -> Number:
        """Return the number of tokens that are ranked: those cached before the pass."""
        return self._cached_before(at)

    def _width(self, at: LayerPass, heads: int) -> float:
        """Return the number of channels of some heads that are used for guessing scores."""
        m = at.d.shard
        return float(heads * guessing_channels(self.part, m.k_width // m.cached_heads))

    def _partial_weights(self, at: LayerPass) -> float:
        m = at.d.shard
        rows = self._width(at, m.heads)
        return ops.FP16_BYTES * rows * (m.hidden + m.qkv_bias)

    def estimate(self, at: LayerPass) -> list[Op]:
        """Return the ops that guess the next layer's queries and scores from this one's input."""
        m, p = at.d.shard, at.p
        asked = p.tokens * self._width(at, m.heads)
        scores = ops.SCORE * p.tokens * m.heads * self._cached_before(at)
        keys = p.batch * self._width(at, m.cached_heads) * self._cached_before(at)
        query = self._partial_weights(at) + ops.FP16_BYTES * (p.tokens * m.hidden + asked)
        return [
            Op(
                "guess_query",
                kernel="gemm",
                flops=2.0 * m.hidden * asked,
                size=p.tokens,
                bytes={"hbm": query},
            ),
            Op(
                "guess",
                kernel="attention",
                flops=2.0 * asked * self._cached_before(at),
                size=p.new,
                bytes={"hbm": ops.FP16_BYTES * (asked + keys) + scores},
            ),
        ]

    def summarise(self, at: LayerPass) -> list[Op]:
        """Return the op that stores partial keys of new tokens.

        In prefill it also chooses their channels and gathers those of the query weights.
        """
        m, p = at.d.shard, at.p
        moved = ops.FP16_BYTES * p.tokens * (m.k_width + self._width(at, m.cached_heads))
        if p.prefill:
            moved = moved + ops.FP16_BYTES * p.tokens * m.heads * m.head_dim
            moved = moved + 2 * self._partial_weights(at)
        return [Op("partial_keys", bytes={"hbm": moved})]

    def attend(self, at: LayerPass) -> list[Op]:
        """Return the ops of attention; a layer's fetch waits for the choice in the layer before."""
        found = super().attend(at)
        if at.p.prefill:
            return found
        waits = {"fetch": ("topk@-1",)}
        return [replace(op, after=waits.get(op.name, op.after)) for op in found]

    def resident(self, at: LayerPass) -> Buffers:
        """Return the memory of the partial keys and the partial query weights. [B]"""
        m, weights = at.d.shard, self._partial_weights(at)
        keys = ops.FP16_BYTES * self._width(at, m.cached_heads) * at.p.batch * at.cached
        return {"gpu": {"partial keys": keys, "partial weights": weights + 0.0 * np.asarray(keys)}}

    def shared_buffers(self, at: LayerPass) -> Buffers:
        """Return the memory of the fetched tokens of two layers. [B]

        One layer's tokens are read while the next layer's are copied.
        """
        if at.p.prefill or not np.any(np.asarray(at.placement.v_host) > 0):
            return super().shared_buffers(at)
        most = np.minimum(self.budget, at.p.max_length - 1.0)
        return {"gpu": {"fetched pages": 2 * sum(at.storage.transfer_bytes(at, most), 0.0)}}


@frozen
class Infinigen(Term):
    """Keeps the cache on the host and selects a layer's tokens while the previous layer runs.

    References
    ----------
    .. [1] W. Lee et al., "InfiniGen: efficient generative inference of large language models with
       dynamic KV cache management", OSDI 2024, sections 4.1 to 4.3: three tenths of the channels;
       at most 400 tokens as released; https://arxiv.org/abs/2406.19707.
    """

    name: ClassVar[str] = "infinigen"

    budget: Number = param(400, "tokens fetched per head [tokens]", low=1, high=1e7, share=True)
    part: float = param(
        0.3, "share of the channels used for the guess", low=0.01, high=1, whole=False
    )
    whole: int = param(1, "first layers that read everything", low=1, high=1000)

    candidates = ({"budget": Budget((0.0625, 0.125, 0.2))},)

    def pieces(self) -> tuple[Part, ...]:
        """Return the guessed selection, and the cache on the host."""
        return Guessed(self.budget, self.part, self.whole), HostPlacement(host_share=1)
