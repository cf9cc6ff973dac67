"""Decoder-only language models as shapes: what sets their FLOPs, bytes and cache size."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from kvsim.errors import InputError


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What may differ between the layers of one model."""

    window: int | None = None  # sliding window; None attends to every token [tokens]
    routed: bool = False  # mixture of experts instead of a dense MLP


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer.

    ``layout`` lists the layers in order as repeated blocks: Gemma-2 is
    ``(((local, global), 13),)``, DeepSeek-V3 ``(((dense,), 3), ((routed,), 58))``.
    """

    name: str
    family: str  # Hugging Face model_type
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int  # of queries and keys; with MLA the sum of nope_dim and rope_dim
    ffn: int  # width of a dense MLP
    vocab: int  # rows of the embedding
    max_context: int  # positions the model was trained or extended for [tokens]
    layout: tuple[tuple[tuple[LayerShape, ...], int], ...]
    gated: bool = True  # three MLP matrices (SwiGLU, GeGLU) instead of two
    tied: bool = False  # the LM head shares the embedding
    # mixture of experts
    experts: int = 0
    experts_active: int = 0
    expert_ffn: int = 0
    shared_experts: int = 0
    expert_biases: bool = False  # biases in experts and router
    # multi-head latent attention; kv_rank 0 means it is not used
    q_rank: int = 0  # 0: queries are not compressed
    kv_rank: int = 0
    nope_dim: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    # small parameters: they matter for exact counts only
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    norms: int = 2  # per layer
    norm_bias: bool = False  # LayerNorm rather than RMSNorm
    qk_norm: bool = False
    sinks: bool = False  # one learned attention sink per head
    router_bias: bool = False  # one correction per expert, for the choice only (DeepSeek-V3)
    shared_gate: bool = False  # a learned gate on the shared experts (Qwen-MoE)
    embedding_norm: bool = False  # a norm between embedding and first layer (BLOOM)
    learned_positions: int = 0
    notes: tuple[str, ...] = ()  # assumptions made while reading the configuration

    @cached_property
    def layers(self) -> int:
        """Number of decoder layers."""
        return sum(len(block) * count for block, count in self.layout)

    @property
    def latent(self) -> bool:
        """Whether the cache holds one latent vector per token (MLA)."""
        return self.kv_rank > 0

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one cached head."""
        return self.heads if self.latent else self.heads // self.kv_heads

    @property
    def cached_heads(self) -> int:
        """Heads cached separately per token."""
        return 1 if self.latent else self.kv_heads

    @property
    def k_width(self) -> int:
        """Numbers cached per token and layer as keys; with MLA the whole latent."""
        return self.kv_rank + self.rope_dim if self.latent else self.kv_heads * self.head_dim

    @property
    def v_width(self) -> int:
        """Numbers cached per token and layer as values; none with MLA, which reuses the latent."""
        return 0 if self.latent else self.kv_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Numbers cached per token and layer."""
        return self.k_width + self.v_width

    def attention_matrices(self) -> dict[str, tuple[int, int]]:
        """Weight matrices of one attention block, (inputs, outputs), in the order they are used."""
        if not self.latent:
            width = self.heads * self.head_dim
            return {"qkv": (self.hidden, width + self.kv_width), "out": (width, self.hidden)}
        queries = self.heads * self.head_dim
        down = self.kv_rank + self.rope_dim
        query = (
            {"qkv": (self.hidden, self.q_rank + down), "q_up": (self.q_rank, queries)}
            if self.q_rank
            else {"qkv": (self.hidden, queries + down)}
        )
        return query | {
            "kv_up": (self.kv_rank, self.heads * (self.nope_dim + self.value_dim)),
            "out": (self.heads * self.value_dim, self.hidden),
        }

    def biased(self, matrix: str) -> bool:
        """Whether the product with a weight matrix, by its op's name, adds a bias."""
        return {
            "qkv": self.qkv_bias,
            "recompute": self.qkv_bias,  # of keys and values alone
            "out": self.out_bias,
            "up": self.mlp_bias,
            "down": self.mlp_bias,
            "lm_head": self.head_bias,
        }.get(matrix, False)

    def mlp_matrices(self, width: int) -> dict[str, tuple[int, int]]:
        """Weight matrices of one MLP (or one expert) of that width, (inputs, outputs)."""
        return {
            "up": (self.hidden, (2 if self.gated else 1) * width),
            "down": (width, self.hidden),
        }

    @cached_property
    def parameters(self) -> int:
        """Weights of the whole model, as a published checkpoint counts them [numbers].

        Embedding, learned positions, every layer with all its experts, final norm and LM head,
        which costs nothing where it is tied. Multi-token-prediction modules are not counted.
        """
        embedding = (self.vocab + self.learned_positions) * self.hidden
        head = 0 if self.tied else self.vocab * self.hidden
        return embedding + self._layer_parameters(self.experts) + head + self.head_bias * self.vocab

    @cached_property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied with [numbers].

        Every layer with the chosen experts only, final norm and LM head, tied or not; a lookup
        in the embedding or in the learned positions reads one row and is left out.
        """
        head = self.vocab * self.hidden + self.head_bias * self.vocab
        return self._layer_parameters(self.experts_active) + head

    def attention_parameters(self) -> int:
        """Weights of one attention block: matrices, biases, inner norms and sinks [numbers]."""
        matrices = self.attention_matrices()
        return (
            _weights(matrices)
            + self.qkv_bias * matrices["qkv"][1]
            + self.out_bias * self.hidden
            + self.qk_norm * 2 * self.head_dim  # shared by the heads
            + self.sinks * self.heads
            + self.latent * (self.q_rank + self.kv_rank)  # norms of the compressed vectors
        )

    def mlp_parameters(self, routed: bool, experts: int) -> int:
        """Weights of one layer's MLP, of which ``experts`` routed experts count [numbers].

        The router always counts whole: it scores every expert before it chooses.
        """
        width = self.expert_ffn if routed else self.ffn
        matrices = self.mlp_matrices(width)
        bias = sum(outputs for _, outputs in matrices.values())
        if not routed:
            return _weights(matrices) + self.mlp_bias * bias
        router = (self.hidden + self.expert_biases + self.router_bias) * self.experts
        expert = _weights(matrices) + self.expert_biases * bias
        return router + (experts + self.shared_experts) * expert + self.shared_gate * self.hidden

    def _layer_parameters(self, experts: int) -> int:
        """All layers with ``experts`` routed experts each, and the norms around them [numbers]."""
        norm = self.hidden * (2 if self.norm_bias else 1)
        every_layer = self.layers * (self.attention_parameters() + self.norms * norm)
        mlps = sum(
            count * sum(self.mlp_parameters(layer.routed, experts) for layer in block)
            for block, count in self.layout
        )
        return every_layer + mlps + (1 + self.embedding_norm) * norm

    def shard(self, tp: int) -> "Model":
        """The part of the model that one of ``tp`` tensor-parallel GPUs holds.

        KV heads are copied when there are fewer of them than GPUs, and so is a latent cache.

        Raises
        ------
        InputError
            If heads or MLP widths do not divide by ``tp``.
        """
        if tp == 1:
            return self
        for what, size in (
            ("heads", self.heads),
            ("ffn", self.ffn),
            ("experts' ffn", self.expert_ffn),
        ):
            if size % tp:
                raise InputError(
                    f"{self.name}: {size} {what} do not divide over --tp {tp}; "
                    f"choose a tensor-parallel degree that divides them"
                )
        if not self.latent and self.kv_heads % tp and tp % self.kv_heads:
            raise InputError(
                f"{self.name}: {self.kv_heads} KV heads neither divide over --tp {tp} nor can be "
                f"copied evenly to as many GPUs; choose another tensor-parallel degree"
            )
        return replace(
            self,
            heads=self.heads // tp,
            kv_heads=max(1, ceil(self.kv_heads / tp)),
            ffn=self.ffn // tp,
            expert_ffn=self.expert_ffn // tp,
            vocab=ceil(self.vocab / tp),
        )


def _weights(matrices: dict[str, tuple[int, int]]) -> int:
    return sum(inputs * outputs for inputs, outputs in matrices.values())
