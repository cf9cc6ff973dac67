"""Cascade attention: a prefix that sequences share is stored and read once for all of them."""

import numpy as np

from kvsim.engine import ops
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Number, Op
from kvsim.techniques.axes.base import Launches, LayerPass, Selection
from kvsim.techniques.axes.settings import param


@frozen
class Cascade(Selection):
    """Reads a shared prefix once for the whole batch, and the rest per sequence.

    Both parts are merged by their softmax sums, so that the generated tokens do not change. Prefill
    is not affected; use ``--cached-prefix`` for a prefix that is already cached.

    References
    ----------
    .. [1] Z. Ye et al., "Cascade inference: memory bandwidth efficient shared prefix batch
       decoding", FlashInfer, 2024, flashinfer.ai/2024/02/02/cascade-inference.html;
       J. Juravsky et al., "Hydragen", ICML 2024, section 3.
    """

    name = "cascade"
    planned = False  # what requests share is theirs, not the planner's choice
    launches = Launches(prefill={"compact": 20}, decode={"attn": 28, "join": 6})

    shared: Number = param(0, "length of the shared prefix", high=1e7, share=True)

    @property
    def exact(self) -> bool:
        """Always true: attention is split into two parts and merged."""
        return True

    def notes(self, at: LayerPass) -> tuple[str, ...]:
        """Return that the length of the shared prefix is an assumption."""
        if np.any(np.asarray(self.shared) > 0):
            return ()
        return ("no shared prefix is given; give its length, such as cascade:shared=1024",)

    def _prefix(self, at: LayerPass) -> Number:
        return np.minimum(np.minimum(self.shared, at.p.prompt), at.cached)

    def count_kept(self, at: LayerPass) -> Number:
        """Return the tokens kept per sequence, with its share of the common prefix. [tokens]"""
        return at.cached - self._prefix(at) * (1 - 1 / np.maximum(at.p.batch, 1.0))

    def extra_bytes(self, at: LayerPass) -> Number:
        """Return the change in bytes read, plus partial outputs in fp32. [B]

        As the prefix is read once for the whole batch, this is usually negative.
        """
        if at.p.prefill:
            return 0.0
        m, (k, v) = at.d.shard, at.storage.number_bytes(at)
        once = (np.maximum(at.p.batch, 1.0) - 1) * self._prefix(at)
        return self._parts(at) - once * (m.k_width * k + m.v_width * v)

    def complete(self, at: LayerPass) -> list[Op]:
        """Return the op that copies the prompt to two caches; in decoding, the one that merges
        outputs.
        """
        m, p = at.d.shard, at.p
        if p.prefill:
            return [Op("compact", kernel="gather", bytes={"hbm": 2 * self._stays(at)})]
        joined = self._parts(at) + ops.FP16_BYTES * p.tokens * m.heads * m.head_dim
        return [Op("join", kernel="pointwise", bytes={"hbm": joined + 0.0 * p.context})]

    def shared_buffers(self, at: LayerPass) -> Buffers:
        """Return the memory of one layer's whole prompt in fp16, while it is read. [B]"""
        return ops.prompt_kv(at.d, at.p)

    def _stays(self, at: LayerPass) -> Number:
        """Return the size of the prompt's part of the cache. [B]"""
        return ops.kv_bytes(at.d.shard, at.p.batch * self.count_kept(at))

    def _parts(self, at: LayerPass) -> Number:
        """Return the size of both partial outputs with their softmax sums. [B]"""
        m = at.d.shard
        return 2 * 4.0 * at.p.tokens * m.heads * (m.head_dim + 1)
