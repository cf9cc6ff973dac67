"""InfLLM: blocks of old tokens in host memory, the most relevant ones fetched for every step."""

from dataclasses import replace

import numpy as np

from kvsim.engine import attention, ops
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Number, Op, Point
from kvsim.machines.deployment import Deployment
from kvsim.models.model import LayerShape
from kvsim.techniques.axes.base import TOKEN_ROUNDING, Family, LayerPass, Parts, Selection
from kvsim.techniques.axes.settings import Budget, is_share, param


@frozen
class Infllm(Selection):
    """Reads the first tokens, a local window and the best-matching blocks.

    Blocks are chosen per sequence by the keys of their representative tokens, which stay on the
    GPU, and copied one by one into a cache of recently used blocks. In prefill each chunk of
    queries chooses blocks. Attention to the local window hides a part of the copies.

    References
    ----------
    .. [1] C. Xiao et al., "InfLLM: training-free long-context extrapolation for LLMs with an
       efficient context memory", NeurIPS 2024, section 3; defaults of the released settings.
    """

    name = "infllm"
    borrows = False
    chooses = True

    k: Number = param(16, "blocks attended to", low=1, high=1e6, share=True)
    block: int = param(128, "tokens per block", low=1, high=1e5)
    local: Number = param(4096, "latest tokens attended to", low=1, high=1e7, share=True)
    initial: int = param(128, "first tokens attended to", high=1e6)
    representatives: int = param(4, "representative tokens per block", low=1, high=1e5)
    cached: Number = param(32, "blocks cached on the GPU, at least k", high=1e6)
    reuse: float = param(
        0, "smallest share of chosen blocks found in that cache", high=1, whole=False
    )
    chunk: int = param(512, "queries that share a choice of blocks in prefill", low=1, high=1e6)

    candidates = (  # as released; an eighth and a quarter of the context, half of it local
        {},
        {"k": Budget((0.0625, 0.125), unit=128), "local": Budget((0.0625, 0.125))},
    )

    def refuses(self, deployment: Deployment, parts: Parts) -> str:
        """Return why blocks cannot be cached, or an empty string: the host keeps them in fp16."""
        place, storage = parts.placement, parts.storage
        if storage.stored.packs:
            return f"infllm copies fp16 blocks between GPU and host, but {storage.name} packs them"
        if np.any(np.asarray(place.v_host) + place.on_cpu > 0):
            return "infllm places its blocks itself: recent ones on the GPU, all on the host"
        return ""

    @property
    def family(self) -> Family:
        """Return the kind of loss: blocks whose representatives score low are not read."""
        return "eviction"

    def for_prompt(self, prompt: Number) -> "Infllm":
        """Resolve ``k`` to a number of blocks, and other shares of the prompt to numbers of tokens.

        Parameters
        ----------
        prompt : length of the prompts. [tokens]

        Returns
        -------
        Infllm
            The selection with ``k`` in blocks, at least one.
        """
        if "k" not in self.shares:
            return super().for_prompt(prompt)
        chosen = np.where(
            is_share(self.k), np.ceil(self.k * prompt / self.block - TOKEN_ROUNDING), self.k
        )
        return replace(self, k=np.maximum(chosen, 1.0)).for_prompt(prompt)

    def prompt_budget(self) -> Number:
        """Return the tokens that a query attends to: first, local and chosen ones. [tokens]"""
        return self.initial + self.local + self.k * self.block

    def _count_far_blocks(self, tokens: Number) -> Number:
        """Count the whole blocks that precede the local window."""
        left: Number = np.maximum(tokens - self.initial - self.local, 0.0) // self.block
        return left

    def _forms(self, point: Point, shape: LayerShape) -> Number:
        """Whether a block leaves the local window before the generation ends."""
        most = (
            point.max_length if shape.window is None else np.minimum(point.max_length, shape.window)
        )
        return (np.asarray(self._count_far_blocks(most)) > 0) * 1.0

    def _missing(self, point: Point, number: Number, held: Number) -> Number:
        """Count the chosen blocks that have to be copied, over all chunks of a prompt.

        A random choice of n blocks finds held / n of them in the cache; the number of blocks grows
        evenly in prefill.
        """
        held = np.maximum(held, self.k)
        if not point.prefill:
            found = np.maximum(self.reuse, held / np.maximum(number, held))
            missing: Number = np.minimum(self.k, number) * (1 - found)
            return missing
        chance = np.clip(number, held, held / self.reuse if self.reuse else np.inf)
        later = chance - held - held * np.log(chance / held)
        later = later + (1 - self.reuse) * np.maximum(number - chance, 0.0)
        first: Number = np.minimum(number, held)
        return first + self.block / self.chunk * self.k * later

    def attend(self, at: LayerPass) -> list[Op]:
        """Return the ops that fetch blocks beside local attention, and attend to them."""
        d, p, shape, m, tokens = at.d, at.p, at.shape, at.d.shard, at.cached
        n = self._count_far_blocks(tokens)
        chosen, among = np.minimum(self.k, n), n * (n > self.k)
        if p.prefill:
            among = self.block / self.chunk * (n**2 - chosen**2) / 2
        seen = tokens - (n - chosen) * self.block  # with the part of a block not full yet
        fetched = p.batch * self._missing(p, n, self.cached)
        size = ops.kv_bytes(m, fetched * self.block)
        left = p.batch * (n * self.block if p.prefill else p.new * (n > 0))
        each = 2 * d.hardware.links["h2d"].latency  # keys and values of every block apart
        fetch = ops.copy("fetch", "h2d", size, launches=2, after=("topk",))
        moved = 2 * ops.kv_bytes(m, p.batch * self._missing(p, n, self.k) * self.block)
        near = attention.ops(d, p, shape, name="local", limit=self.local)
        drafts = at.drafting.extra_bytes(at)
        whole = attention.ops(d, p, shape, limit=seen, extra_bytes=drafts)
        drafted = at.drafting.fill_draft_cache(at) if p.prefill else []
        return [
            *ops.runtime(d, n),
            *self._choose(at, among),
            replace(fetch, fixed=each * np.maximum(fetched - 1, 0.0)),
            ops.copy(
                "store", "d2h", ops.kv_bytes(m, left), after=("qkv",),
                launches=2.0 if p.prefill else 2.0 / self.block,
            ),
            *near,
            self._represent(at),
            Op("gather", kernel="gather", bytes={"hbm": moved}, after=("fetch",)),
            *(_rest(a, b) for a, b in zip(whole, near, strict=True)),
            *drafted,
        ]  # fmt: skip

    def _choose(self, at: LayerPass, among: Number) -> list[Op]:
        """Return the ops that score blocks by their representatives and choose the best."""
        m, p = at.d.shard, at.p
        keys = p.batch * among * self.representatives
        flops = 2.0 * m.heads * m.k_width / m.cached_heads * keys
        read = ops.FP16_BYTES * m.k_width * keys
        return [
            Op("relevance", kernel="attention", flops=flops, bytes={"hbm": read}),
            ops.top_k("topk", p.batch * among, sync=at.d.stack.selection.gather_sync),
        ]

    def _represent(self, at: LayerPass) -> Op:
        """Return the op that sums, in a second pass, the attention that local keys receive."""
        d, p, m = at.d, at.p, at.d.shard
        forms = self._forms(p, at.shape)
        keys = p.batch * np.minimum(p.length, self.local + p.new - 1) * forms
        pairs = p.batch * attention.query_key_pairs(d, p, self.local) * forms
        moved = (ops.FP16_BYTES * m.k_width + ops.SCORE * m.heads) * keys
        flops = 2.0 * m.heads * m.k_width / m.cached_heads * pairs
        return Op("represent", kernel="attention", flops=flops, bytes={"hbm": moved})

    def count_kept(self, at: LayerPass) -> Number:
        """Return the first and latest tokens, which the cache itself keeps. [tokens]

        Blocks are counted by ``resident``.
        """
        return np.minimum(at.cached, self.initial + self.local + self.block)

    def resident(self, at: LayerPass) -> Buffers:
        """Return the memory of representatives and fetched blocks, and of all on the host. [B]"""
        m, p, tokens = at.d.shard, at.p, at.cached
        n = self._count_far_blocks(tokens)
        held = np.minimum(n, np.maximum(self.cached, self.k))
        scored = np.minimum(tokens, self.local + self.block) * self._forms(p, at.shape)
        return {
            "gpu": {
                "representatives": ops.FP16_BYTES * m.k_width * p.batch * self.representatives * n,
                "block cache": ops.kv_bytes(m, p.batch * held * self.block),
                "fetched blocks": ops.kv_bytes(m, p.batch * np.minimum(n, self.k) * self.block),
                "scores": ops.FP16_BYTES * p.batch * m.heads * scored,
            },
            "host": {"kv": ops.kv_bytes(m, p.batch * n * self.block)},
        }

    def shared_buffers(self, at: LayerPass) -> Buffers:
        """Return the memory of one layer's blocks on their way to the host in prefill. [B]"""
        out = at.p.batch * self._count_far_blocks(at.without_window().cached) * self.block
        leaving = ops.kv_bytes(at.d.shard, out) if at.p.prefill else 0.0
        return {"gpu": {"kv on the way out": leaving}}


def _rest(whole: Op, near: Op) -> Op:
    """Return the work of attention to all chosen tokens beyond that to the local window."""
    moved = np.maximum(whole.bytes["hbm"] - near.bytes["hbm"], 0.0)
    flops = np.maximum(whole.flops - near.flops, 0.0)
    return replace(whole, flops=flops, bytes={"hbm": moved}, after=("fetch",))
