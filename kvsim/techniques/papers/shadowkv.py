"""ShadowKV: low-rank keys on the GPU, values on the host, chunks chosen by landmarks."""

from typing import ClassVar

import numpy as np

from kvsim.engine import ops
from kvsim.engine.buffers import scale
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Number, Op
from kvsim.machines.deployment import Deployment
from kvsim.techniques.axes.base import Launches, LayerPass, Part, Parts, Storage, Term
from kvsim.techniques.axes.placement import HostPlacement
from kvsim.techniques.axes.selection import Chosen
from kvsim.techniques.axes.settings import param

PREFILLS = ("batch", "sequence")
SINGLE = 4.0  # bytes of an fp32 number [B]


@frozen
class Landmarks(Chosen):
    """Selects chunks by their mean key; keeps chunks that their mean represents poorly.

    References
    ----------
    .. [1] H. Sun et al., "ShadowKV", ICML 2025, section 4.2, algorithms 1 and 2.
    """

    name = "landmarks"
    preset = False
    launches = Launches(prefill={"attn": -2, "chunk_means": 28}, decode={"attn": 8, "topk": 20})

    budget: Number = param(1024, "tokens attended to [tokens]", low=1, high=1e7, share=True)
    chunk: int = param(8, "tokens per chunk", low=1, high=1e4)
    outliers: int = param(48, "chunks that always stay on the GPU", high=1e5)
    hit: float = param(
        0, "share of chosen chunks already fetched by the previous step", high=1, whole=False
    )
    local: int = param(0, "the prompt's last chunks, always attended to", high=1e5)
    prefill: str = param("batch", "prompts processed at a time", choices=PREFILLS)

    def tokens(self, at: LayerPass) -> Number:
        """Return the tokens per KV head that a query attends to. [tokens]

        These are the chosen chunks, the outliers, the prompt's last chunks, and all generated
        tokens.
        """
        last = self.chunk * np.minimum(self.local, self.pages(at))
        return self.host_tokens(at) + self._stay(_prompt(at)) + last + _generated(at)

    def fetched_tokens(self, at: LayerPass) -> Number:
        """Return the chosen tokens per KV head that the last step has not fetched yet. [tokens]"""
        return (1 - self.hit) * self.host_tokens(at)

    def shared_buffers(self, at: LayerPass) -> Buffers:
        """Return the memory of buffers that all layers share. [B]

        In decoding these hold fetched values, unless each layer keeps its own to reuse them
        (``hit``). In prefill they are for one prompt or the whole batch (``prefill``).
        """
        if self.hit and not at.p.prefill:
            return {}
        found = super().shared_buffers(at)
        return (
            scale(found, 1 / np.maximum(at.p.batch, 1.0))
            if at.p.prefill and self._by_sequence
            else found
        )

    @property
    def _by_sequence(self) -> bool:
        return self.prefill == "sequence"

    def host_tokens(self, at: LayerPass) -> Number:
        """Return the chosen tokens per KV head whose values are on the host. [tokens]

        They are whole chunks within the budget; outliers and generated tokens stay on the GPU.
        """
        most = np.maximum(np.floor(self.budget / self.chunk), 1.0)
        outliers = np.minimum(self.outliers, self.pages(at))
        return self.chunk * np.minimum(most, self.pages(at) - outliers)

    def page_tokens(self) -> int:
        """Return the tokens of a chunk, which are stored and fetched together. [tokens]"""
        return self.chunk

    def pages(self, at: LayerPass) -> Number:
        """Return the number of the prompt's chunks."""
        return np.ceil(_prompt(at) / self.chunk)

    def _stay(self, tokens: Number) -> Number:
        """Return the number of prompt tokens in outlier chunks. [tokens]"""
        return self.chunk * np.minimum(self.outliers, np.ceil(tokens / self.chunk))

    def _means(self, at: LayerPass, tokens: Number) -> Number:
        return ops.FP16_BYTES * at.d.shard.k_width * at.p.batch * np.ceil(tokens / self.chunk)

    def estimate(self, at: LayerPass) -> list[Op]:
        """Return the op that scores every landmark by the queries, and writes the scores."""
        m, p = at.d.shard, at.p
        flops = 2.0 * p.tokens * m.heads * m.head_dim * self.pages(at)
        asked = ops.FP16_BYTES * p.tokens * m.heads * m.head_dim
        moved = self._means(at, _prompt(at)) + asked + 4.0 * p.tokens * m.heads * self.pages(at)
        return [Op("landmarks", kernel="attention", flops=flops, bytes={"hbm": moved}, size=p.new)]

    def summarise(self, at: LayerPass) -> list[Op]:
        """Return the op that makes landmarks of a prompt; nothing in decoding.

        It averages the keys of every chunk, compares each key with its chunk's mean, and copies the
        chunks that their mean represents worst, the outliers.
        """
        m, p = at.d.shard, at.p
        if not p.prefill:
            return []
        moved = 2 * ops.FP16_BYTES * m.k_width * p.tokens + self._means(at, p.new)
        copied = 2 * ops.kv_bytes(m, p.batch * self._stay(p.new))
        return [Op("chunk_means", bytes={"hbm": moved + copied})]

    def restore_chosen(self, at: LayerPass) -> list[Op]:
        """Return the ops that multiply out the low-rank keys of the chosen tokens."""
        return at.storage.restore(at, self.host_tokens(at))

    def resident(self, at: LayerPass) -> Buffers:
        """Return the GPU memory of landmarks, outlier chunks and values that stay there. [B]

        The last are those of generated tokens, of the prompt's last chunks, and of the chunks
        fetched last where a step reuses them.
        """
        m, p, prompt = at.d.shard, at.p, _prompt(at)
        recent = at.placement.v_host * ops.FP16_BYTES * m.v_width * p.batch * _generated(at)
        which = at.d.stack.selection.index_bytes * p.batch * m.cached_heads
        recent = recent + at.placement.v_host * ops.FP16_BYTES * m.v_width * p.batch * (
            np.minimum(self.chunk * self.local, prompt) + self.host_tokens(at) * (self.hit > 0)
        )
        stay = self._stay(prompt)
        outliers = ops.kv_bytes(m, p.batch * stay) + which * stay / self.chunk
        means = self._means(at, prompt)
        return {"gpu": {"landmarks": means, "outlier chunks": outliers, "generated values": recent}}


def _prompt(at: LayerPass) -> Number:
    """Return the number of cached prompt tokens. [tokens]"""
    return np.minimum(at.kept_tokens, at.p.prompt)


def _generated(at: LayerPass) -> Number:
    """Return the number of tokens after the prompt, including those of this pass. [tokens]"""
    return np.maximum(at.p.length - at.p.prompt, 0.0)


@frozen
class Lowrank(Storage):
    """Stores keys before rotary embedding as a low-rank product, and values in FP16.

    Decomposing the keys of s prompt tokens of width w takes 6 s w^2 + 20 w^3 operations.

    References
    ----------
    .. [1] H. Sun et al., "ShadowKV", ICML 2025, section 3.1.
    .. [2] G. Golub and C. Van Loan, "Matrix computations", figure 8.6.1: R-SVD.
    """

    name = "lowrank"
    exact = False  # the product approximates the keys
    preset = False
    launches = Launches(prefill={"svd": 27}, decode={"restore_keys": 13})

    rank: int = param(
        160, "rank of the low-rank approximation of the prompt's keys", low=1, high=4096
    )
    prefill: str = param("batch", "prompts processed at a time", choices=PREFILLS)

    def refuses(self, deployment: Deployment, parts: Parts) -> str:
        """Return why low-rank keys cannot be used, or an empty string."""
        m = deployment.shard
        if self.rank >= m.k_width:
            return f"rank {self.rank} is not below {m.k_width}, the width of a token's keys"
        if not parts.selection.chooses:
            return (
                f"{self.name} rebuilds keys only for the tokens that are read; combine it with a "
                "technique that chooses tokens, such as landmarks"
            )
        return ""

    def _get_row_bytes(self, at: LayerPass, tokens: Number) -> Number:
        """Return the size of the factor with a row per token of the prompt. [B]"""
        return ops.FP16_BYTES * self.rank * at.p.batch * np.minimum(tokens, at.p.prompt)

    def _get_column_bytes(self, at: LayerPass) -> Number:
        """Return the size of the factor with a column per channel, one of each sequence. [B]"""
        return ops.FP16_BYTES * self.rank * at.d.shard.k_width * at.p.batch

    def complete(self, at: LayerPass) -> list[Op]:
        """Return the op that decomposes the prompt's keys; nothing in decoding."""
        if not at.p.prefill:
            return []
        m, p = at.d.shard, at.p
        flops = p.batch * (6.0 * p.new * m.k_width**2 + 20.0 * m.k_width**3)
        made = self._get_row_bytes(at, p.new) + self._get_column_bytes(at)
        moved = (ops.FP16_BYTES + 2 * SINGLE) * m.k_width * p.tokens + made
        return [Op("svd", kernel="gemm", flops=flops, bytes={"hbm": moved}, dtype="fp32")]

    def restore(self, at: LayerPass, tokens: Number) -> list[Op]:
        """Return the op that rebuilds the keys of some tokens per KV head, and rotates them."""
        m, p = at.d.shard, at.p
        keys = p.batch * m.cached_heads * tokens
        moved = ops.FP16_BYTES * keys * (self.rank + m.head_dim) + self._get_column_bytes(at)
        flops = 2.0 * keys * self.rank * m.head_dim
        return [Op("restore_keys", kernel="gemm", flops=flops, bytes={"hbm": moved}, size=tokens)]

    def side_bytes(self, at: LayerPass) -> tuple[Number, Number]:
        """Return the size of keys (the prompt's as low-rank factors) and of fp16 values. [B]"""
        m, p = at.d.shard, at.p
        generated = np.maximum(at.kept_tokens - p.prompt, 0.0)
        keys = (
            self._get_row_bytes(at, at.kept_tokens)
            + self._get_column_bytes(at)
            + ops.FP16_BYTES * m.k_width * p.batch * generated
        )
        return keys, ops.FP16_BYTES * m.v_width * p.batch * at.kept_tokens

    def shared_buffers(self, at: LayerPass) -> Buffers:
        """Return the memory of one layer's keys in fp16, while the prompt is read. [B]"""
        tokens = at.p.new if self.prefill == "sequence" else at.p.tokens
        read = ops.FP16_BYTES * at.d.shard.k_width * tokens if at.p.prefill else 0.0
        return {"gpu": {"prompt keys": read}}


@frozen
class Shadowkv(Term):
    """Keeps low-rank keys on the GPU and fetches the values of selected chunks from the host.

    The keys of chosen chunks are multiplied out while their values are being fetched. The released
    code reuses values fetched by the previous step (``hit``, about 0.6 according to the paper),
    always attends to the last chunks (``local=4``) and reads one prompt at a time
    (``prefill=sequence``); the defaults follow the paper's algorithms.

    References
    ----------
    .. [1] H. Sun et al., "ShadowKV: KV cache in shadows for high-throughput long-context LLM
       inference", ICML 2025, section 4: rank 160, chunks of 8, 48 outlier chunks.
    """

    name: ClassVar[str] = "shadowkv"

    budget: Number = param(1024, "tokens attended to [tokens]", low=1, high=1e7, share=True)
    rank: int = param(
        160, "rank of the low-rank approximation of the prompt's keys", low=1, high=4096
    )
    chunk: int = param(8, "tokens per chunk", low=1, high=1e4)
    outliers: int = param(48, "chunks that always stay on the GPU", high=1e5)
    hit: float = param(
        0, "share of chosen chunks already fetched by the previous step", high=1, whole=False
    )
    local: int = param(0, "the prompt's last chunks, always attended to", high=1e5)
    prefill: str = param("batch", "prompts processed at a time", choices=PREFILLS)

    def pieces(self) -> tuple[Part, ...]:
        """Return the selection by landmarks, low-rank keys, and values on the host."""
        landmarks = Landmarks(
            self.budget, self.chunk, self.outliers, self.hit, self.local, self.prefill
        )
        return landmarks, Lowrank(self.rank, self.prefill), HostPlacement(values_host=1)
