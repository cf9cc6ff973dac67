"""InfLLM: blocks of old tokens in host memory, the most relevant ones fetched for every step."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from kvsim.engine import attention
from kvsim.engine import ops as blocks
from kvsim.graph import Buffers, Number, Op, Point
from kvsim.machines.deployment import Deployment
from kvsim.models.model import LayerShape
from kvsim.techniques.base import Technique
from kvsim.techniques.settings import param


@dataclass(frozen=True)
class Infllm(Technique):
    """Attention over initial tokens, the best blocks, and a local window.

    Blocks are chosen per sequence by the keys of their representative tokens, which stay on the
    GPU, and copied one by one into a cache of recently used blocks. In prefill every chunk of
    queries chooses its own. The local window's attention hides a part of the fetch.

    References
    ----------
    .. [1] C. Xiao et al., "InfLLM: training-free long-context extrapolation for LLMs with an
       efficient context memory", NeurIPS 2024, section 3; defaults of the released settings.
    """

    name: ClassVar[str] = "infllm"

    k: Number = param(16, "blocks attended to", low=1, high=1e6)
    block: int = param(128, "tokens of a block", low=1, high=1e5)
    local: Number = param(4096, "latest tokens attended to", low=1, high=1e7)
    initial: int = param(128, "first tokens attended to", high=1e6)
    representatives: int = param(4, "tokens that stand for a block", low=1, high=1e5)
    cached: Number = param(32, "blocks in the GPU's cache, no fewer than k", high=1e6)
    reuse: float = param(0, "least share of chosen blocks in it", high=1, whole=False)
    chunk: int = param(512, "queries that choose together in prefill", low=1, high=1e6)

    def _far(self, tokens: Number) -> Number:
        """Whole blocks that have left the local window."""
        left: Number = np.maximum(tokens - self.initial - self.local, 0.0) // self.block
        return left

    def _forms(self, p: Point, shape: LayerShape) -> Number:
        """Whether a block leaves the local window before the generation ends."""
        most = p.max_length if shape.window is None else np.minimum(p.max_length, shape.window)
        return (np.asarray(self._far(most)) > 0) * 1.0

    def _missing(self, p: Point, n: Number, held: Number) -> Number:
        """Chosen blocks of ``n`` that are not among the ``held`` latest, all chunks together.

        Chance alone finds held / n of them; the number of blocks grows evenly in prefill.
        """
        held = np.maximum(held, self.k)
        if not p.prefill:
            found = np.maximum(self.reuse, held / np.maximum(n, held))
            missing: Number = np.minimum(self.k, n) * (1 - found)
            return missing
        chance = np.clip(n, held, held / self.reuse if self.reuse else np.inf)
        later = chance - held - held * np.log(chance / held)
        later = later + (1 - self.reuse) * np.maximum(n - chance, 0.0)
        first: Number = np.minimum(n, held)
        return first + self.block / self.chunk * self.k * later

    def attend(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> list[Op]:
        """Choose and fetch blocks beside local attention, then attend to them and the first."""
        m, tokens = d.shard, attention.cached(d, p, shape)
        n = self._far(tokens)
        chosen, among = np.minimum(self.k, n), n * (n > self.k)
        if p.prefill:
            among = self.block / self.chunk * (n**2 - chosen**2) / 2
        seen = tokens - (n - chosen) * self.block  # with the part of a block not full yet
        fetched = p.batch * self._missing(p, n, self.cached)
        size = blocks.kv_bytes(m, fetched * self.block)
        left = p.batch * (n * self.block if p.prefill else p.new * (n > 0))
        each = 2 * d.hardware.links["h2d"].latency  # keys and values of every block apart
        fetch = blocks.copy("fetch", "h2d", size, launches=2, after=("topk",))
        moved = 2 * blocks.kv_bytes(m, p.batch * self._missing(p, n, self.k) * self.block)
        near = attention.ops(d, p, shape, name="local", limit=self.local)
        whole = attention.ops(d, p, shape, limit=seen)
        return [
            *blocks.runtime(d, n),
            *self._choose(d, p, among),
            replace(fetch, fixed=each * np.maximum(fetched - 1, 0.0)),
            blocks.copy(
                "store", "d2h", blocks.kv_bytes(m, left), after=("qkv",),
                launches=2.0 if p.prefill else 2.0 / self.block,
            ),
            *near,
            self._represent(d, p, shape),
            Op("gather", kernel="gather", bytes={"hbm": moved}, after=("fetch",)),
            *(_rest(a, b) for a, b in zip(whole, near, strict=True)),
        ]  # fmt: skip

    def _choose(self, d: Deployment, p: Point, among: Number) -> list[Op]:
        """Queries against the representatives of ``among`` blocks, and the best blocks."""
        m = d.shard
        keys = p.batch * among * self.representatives
        flops = 2.0 * m.heads * m.k_width / m.cached_heads * keys
        read = blocks.HALF * m.k_width * keys
        return [
            Op("relevance", kernel="attention", flops=flops, bytes={"hbm": read}),
            blocks.top_k("topk", p.batch * among, sync=d.stack.gather_sync),
        ]

    def _represent(self, d: Deployment, p: Point, shape: LayerShape) -> Op:
        """What local keys are given by local queries: a second pass of scores, summed."""
        m = d.shard
        keys = p.batch * np.minimum(p.length, self.local + p.new - 1) * self._forms(p, shape)
        pairs = p.batch * attention.query_key_pairs(d, p, self.local) * self._forms(p, shape)
        moved = (blocks.HALF * m.k_width + blocks.SCORE * m.heads) * keys
        flops = 2.0 * m.heads * m.k_width / m.cached_heads * pairs
        return Op("represent", kernel="attention", flops=flops, bytes={"hbm": moved})

    def cache(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> Buffers:
        """First and latest tokens, representatives and fetched blocks; all blocks on the host."""
        m, tokens = d.shard, attention.cached(d, p, shape)
        n = self._far(tokens)
        kept = np.minimum(tokens, self.initial + self.local + self.block)
        held = np.minimum(n, np.maximum(self.cached, self.k))
        scored = np.minimum(tokens, self.local + self.block) * self._forms(p, shape)
        return {
            "gpu": {
                "kv": d.stack.cache_overhead * blocks.kv_bytes(m, p.batch * kept),
                "representatives": blocks.HALF * m.k_width * p.batch * self.representatives * n,
                "block cache": blocks.kv_bytes(m, p.batch * held * self.block),
                "fetched blocks": blocks.kv_bytes(m, p.batch * np.minimum(n, self.k) * self.block),
                "scores": blocks.HALF * p.batch * m.heads * scored,
            },
            "host": {"kv": blocks.kv_bytes(m, p.batch * n * self.block)},
        }

    def once(self, d: Deployment, p: Point) -> Buffers:
        """In prefill one layer's blocks on their way out."""
        out = p.batch * self._far(attention.cached(d, p, LayerShape())) * self.block
        return {"gpu": {"kv on the way out": blocks.kv_bytes(d.shard, out) if p.prefill else 0.0}}

    def options(self, d: Deployment, prompt: int, generate: int) -> Iterable[Technique]:
        """The released settings; an eighth and a quarter of the context, half of it local."""
        half = np.ceil(np.array([0.0625, 0.125]) * (prompt + generate))[:, None, None]
        return [Infllm(), Infllm(np.ceil(half / 128), local=half)]


def _rest(whole: Op, near: Op) -> Op:
    """What attention to everything does beyond local attention, after the fetch."""
    moved = np.maximum(whole.bytes["hbm"] - near.bytes["hbm"], 0.0)
    flops = np.maximum(whole.flops - near.flops, 0.0)
    return replace(whole, flops=flops, bytes={"hbm": moved}, after=("fetch",))
