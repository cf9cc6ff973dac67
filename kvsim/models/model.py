"""Shapes of decoder-only language models, from which FLOPs, bytes and cache sizes follow."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from math import ceil

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.models.kinds import Indexer, LayerShape, Recurrence


def mixer_parameters(model: "Model", shape: LayerShape) -> int:
    """Count the weights of a layer's mixer: matrices, biases, inner norms and sinks.

    Parameters
    ----------
    model
        The model.
    shape
        Kind of the layer.

    Returns
    -------
    int
        Parameters of one layer. [numbers]
    """
    matrices = model.mixer_matrices(shape)
    found = sum(inputs * outputs for inputs, outputs in matrices.values())
    if shape.mixer == "recurrent":
        assert model.recurrence is not None
        return found + model.recurrence.small_parameters
    if not shape.attends:
        return found
    return (
        found
        + model.qkv_bias * matrices["qkv"][1]
        + model.out_bias * model.hidden
        + model.qk_norm
        * (1 if shape.mixer == "shared" else 2)
        * model.head_dim  # shared by the heads
        + model.sinks * model.heads
        + model.latent * (model.q_rank + model.kv_rank)  # norms of the compressed vectors
        + (model.indexer.small_parameters if model.indexer else 0)
    )


def mlp_parameters(model: "Model", shape: LayerShape, experts: int) -> int:
    """Count the weights of one layer's MLP.

    The router always counts whole: it scores every expert before it chooses.

    Parameters
    ----------
    model
        The model.
    shape
        Kind of the layer.
    experts
        Routed experts that count.

    Returns
    -------
    int
        Weights; the router counts whole, as it scores every expert. [numbers]
    """
    if not shape.mlp:
        return 0
    width = model.expert_ffn if shape.routed else model.ffn
    matrices = model.mlp_matrices(width)
    weights = sum(inputs * outputs for inputs, outputs in matrices.values())
    bias = sum(outputs for _, outputs in matrices.values())
    if not shape.routed:
        return weights + model.mlp_bias * bias
    router = (model.hidden + model.expert_biases + model.router_bias) * model.experts
    expert = weights + model.expert_biases * bias
    return router + (experts + model.shared_experts) * expert + model.shared_gate * model.hidden


def _layers(model: "Model", experts: int) -> int:
    """All layers with ``experts`` routed experts each, and what stands around them. [numbers]"""
    norm = model.hidden * (2 if model.norm_bias else 1)
    around = (1 + model.embedding_norm) * norm + model.once * model.hidden
    each = model.norms * norm + model.side * model.hidden + model.vectors
    for block, count in model.layout:
        for shape in block:
            own = mixer_parameters(model, shape) + mlp_parameters(model, shape, experts)
            around += count * (own + each)
    return around


__all__ = ["Indexer", "LayerShape", "Model", "Recurrence"]


@frozen
class Model:
    """A decoder-only transformer.

    ``layout`` lists the layers in order as repeated blocks: Gemma-2 is ``(((local, global),
    13),)``, DeepSeek-V3 ``(((dense,), 3), ((routed,), 58))``.

    Attributes
    ----------
    family
        The ``model_type`` of Hugging Face.
    hidden, heads, kv_heads
        Width of the hidden state; numbers of query heads and of key-value heads.
    head_dim
        Width of queries and keys per head; with MLA the sum of ``nope_dim`` and ``rope_dim``.
    ffn
        Inner width of a dense MLP.
    vocab
        Rows of the embedding.
    max_context
        Largest number of positions. [tokens]
    layout
        Blocks of layers, each with its number of repetitions.
    gated
        Whether an MLP has three matrices (SwiGLU, GeGLU) instead of two.
    tied
        Whether the LM head shares the weights of the embedding.
    released
        Weight format of the published checkpoint, as in ``--weights``.
    experts, experts_active, expert_ffn, shared_experts
        Routed experts per layer and per token, their inner width, and the number of shared experts;
        0 for dense models.
    expert_biases
        Whether experts and router have biases.
    q_rank
        Width of compressed queries (MLA); 0 if queries are not compressed.
    kv_rank
        Width of the latent vector that is cached (MLA); 0 without MLA.
    nope_dim, rope_dim, value_dim
        Widths per head without and with rotary encoding, and of values (MLA).
    recurrence
        Shape of the layers that have a recurrent state instead of a cache.
    indexer
        Shape of the indexer that selects tokens to attend to, if there is one.
    gated_attention
        Whether the output of attention is gated.
    side
        Outputs of additional small products in every layer.
    once
        Outputs of additional products per pass, outside the layers.
    tables
        Entries of additional tables, of which each token reads one row per layer.
    qkv_bias, out_bias, mlp_bias, head_bias
        Whether these products have biases.
    norms
        Number of norms per layer.
    norm_bias
        Whether norms have biases (LayerNorm rather than RMSNorm).
    qk_norm, wide_norms
        Whether queries and keys are normalised, per head or over all heads.
    sinks
        Whether each attention head has a learned sink.
    router_bias
        Whether the router has a bias per expert that only affects the selection (DeepSeek-V3).
    shared_gate
        Whether the shared experts have a learned gate (Qwen-MoE).
    embedding_norm
        Whether there is a norm between the embedding and the first layer (BLOOM).
    vectors
        Number of other small parameters per layer.
    repository
        Hugging Face id; empty if unknown.
    notes
        Assumptions made in reading the configuration.
    """

    name: str
    family: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_context: int
    layout: tuple[tuple[tuple[LayerShape, ...], int], ...]
    gated: bool = True
    tied: bool = False
    released: str = "fp16"
    experts: int = 0
    experts_active: int = 0
    expert_ffn: int = 0
    shared_experts: int = 0
    expert_biases: bool = False
    q_rank: int = 0
    kv_rank: int = 0
    nope_dim: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    # layers of other kinds than attention to all cached tokens
    recurrence: Recurrence | None = None
    indexer: Indexer | None = None
    gated_attention: bool = False
    side: int = 0
    once: int = 0
    tables: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    norms: int = 2
    norm_bias: bool = False
    qk_norm: bool = False
    wide_norms: bool = False
    sinks: bool = False
    router_bias: bool = False
    shared_gate: bool = False
    embedding_norm: bool = False
    vectors: int = 0
    learned_positions: int = 0
    repository: str = ""
    notes: tuple[str, ...] = ()

    def checkpoint(self, weights: str) -> str:
        """Return the Hugging Face id of the published checkpoint in a weight format.

        Parameters
        ----------
        weights
            Format, as ``--weights`` names it. Besides their own format, most Qwen3 models are
            published with fp8 weights in scaled blocks, such as
            https://huggingface.co/Qwen/Qwen3-8B-FP8.

        Returns
        -------
        str
            Id of the checkpoint; empty if none is known.
        """
        if weights == self.released:
            return self.repository or self.name
        qwen3 = self.repository.startswith("Qwen/Qwen3") and "Base" not in self.repository
        return f"{self.repository}-FP8" if qwen3 and weights == "fp8-block" else ""

    @property
    def fp8_format(self) -> str:
        """The fp8 weight format to use, as ``--weights`` names it.

        "fp8-block" for mixtures of experts that are published so, else "fp8". Engines convert
        weights to one scale per tensor, and on some cards their kernels for such experts are slower
        than fp16.
        """
        blocks = "fp8-block"
        return blocks if self.experts and self.checkpoint(blocks) else "fp8"

    @cached_property
    def layers(self) -> int:
        """Number of decoder layers."""
        return sum(len(block) * count for block, count in self.layout)

    @cached_property
    def latent(self) -> bool:
        """Whether the cache holds one latent vector per token (MLA)."""
        return self.kv_rank > 0

    @cached_property
    def queries_per_kv(self) -> int:
        """Query heads that share one cached head."""
        return self.heads if self.latent else self.heads // self.kv_heads

    @cached_property
    def cached_heads(self) -> int:
        """Heads cached separately per token."""
        return 1 if self.latent else self.kv_heads

    @cached_property
    def k_width(self) -> int:
        """Numbers cached per token and layer as keys; with MLA the whole latent."""
        return self.kv_rank + self.rope_dim if self.latent else self.kv_heads * self.head_dim

    @cached_property
    def v_width(self) -> int:
        """Numbers cached per token and layer as values; none with MLA, which reuses the latent."""
        return 0 if self.latent else self.kv_heads * self.head_dim

    @cached_property
    def kv_width(self) -> int:
        """Numbers cached per token and layer."""
        return self.k_width + self.v_width

    def attention_matrices(self, shares: bool = False) -> dict[str, tuple[int, int]]:
        """Return the weight matrices of one attention block in the order they are used.

        Parameters
        ----------
        shares
            Whether the layer uses an earlier one's cache, and has no keys and values of its
            own.

        Returns
        -------
        dict[str, tuple[int, int]]
            Inputs and outputs by name of the product.
        """
        if not self.latent:
            width = self.heads * self.head_dim
            asked = width * (2 if self.gated_attention else 1)
            own = 0 if shares else self.kv_width
            return {"qkv": (self.hidden, asked + own), "out": (width, self.hidden)}
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

    def mixer_matrices(self, shape: LayerShape) -> dict[str, tuple[int, int]]:
        """Return the weight matrices of a layer's mixer, in order of use.

        Parameters
        ----------
        shape
            Kind of the layer.

        Returns
        -------
        dict[str, tuple[int, int]]
            Inputs and outputs by name of the product.
        """
        if shape.mixer == "recurrent":
            assert self.recurrence is not None
            return self.recurrence.matrices(self.hidden)
        if not shape.attends:
            return {}
        chooses = self.indexer.matrices(self.hidden, self.q_rank) if self.indexer else {}
        return self.attention_matrices(shape.mixer == "shared") | chooses

    def biased(self, matrix: str) -> bool:
        """Tell whether the product with a weight matrix adds a bias.

        Parameters
        ----------
        matrix
            Name of the op that multiplies with it.
        """
        return {
            "qkv": self.qkv_bias,
            "recompute": self.qkv_bias,  # of keys and values alone
            "out": self.out_bias,
            "up": self.mlp_bias,
            "down": self.mlp_bias,
            "lm_head": self.head_bias,
        }.get(matrix, False)

    def mlp_matrices(self, width: int) -> dict[str, tuple[int, int]]:
        """Return the weight matrices of one MLP or one expert.

        Parameters
        ----------
        width
            Inner width.

        Returns
        -------
        dict[str, tuple[int, int]]
            Inputs and outputs by name of the product.
        """
        return {"up": (self.hidden, (2 if self.gated else 1) * width), "down": (width, self.hidden)}

    def shapes(self) -> Iterator[LayerShape]:
        """Yield the shape of every layer in order."""
        for block, count in self.layout:
            for _ in range(count):
                yield from block

    @cached_property
    def cached_layers(self) -> int:
        """Layers that have a cache of their own."""
        return len(self.caches)

    @cached_property
    def caches(self) -> tuple[int, ...]:
        """Indices of the layers with a cache of their own."""
        return tuple(i for i, shape in enumerate(self.shapes()) if shape.keeps)

    @cached_property
    def owners(self) -> dict[int, int]:
        """For each layer that shares a cache, the index of the layer that owns it."""
        latest: dict[int | None, int] = {}
        found = {}
        for i, shape in enumerate(self.shapes()):
            if shape.keeps:
                latest[shape.window] = i
            elif shape.attends:
                found[i] = latest.get(shape.window, self.caches[-1])
        return found

    @cached_property
    def kv_bytes_per_token(self) -> float:
        """Size of one token's KV cache in 16 bits, all layers together. [B]

        Sliding windows are not taken into account. The 8-bit keys of an indexer are included.
        """
        chosen_by = self.indexer.key_bytes if self.indexer else 0.0
        return self.cached_layers * (2 * self.kv_width + chosen_by)

    @cached_property
    def state_bytes(self) -> float:
        """Size of one sequence's recurrent states in all layers, independent of its length. [B]"""
        if self.recurrence is None:
            return 0.0
        layers = sum(shape.mixer == "recurrent" for shape in self.shapes())
        return layers * self.recurrence.state_bytes

    @cached_property
    def cached_shape(self) -> LayerShape:
        """Shape of the last layer with a cache of its own."""
        return next(s for s in reversed(list(self.shapes())) if s.keeps)

    @cached_property
    def parameters(self) -> int:
        """Weights of the whole model, as a published checkpoint counts them [numbers].

        Embedding, learned positions, every layer with all its experts, final norm and LM head,
        which costs nothing where it is tied. Multi-token-prediction modules are not counted.
        """
        embedding = (self.vocab + self.learned_positions) * self.hidden + self.tables
        head = 0 if self.tied else self.vocab * self.hidden
        return embedding + _layers(self, self.experts) + head + self.head_bias * self.vocab

    @cached_property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied with [numbers].

        Every layer with the chosen experts only, final norm and LM head, tied or not; a lookup
        in the embedding or in the learned positions reads one row and is left out.
        """
        head = self.vocab * self.hidden + self.head_bias * self.vocab
        return _layers(self, self.experts_active) + head

    def shard(self, tp: int) -> "Model":
        """Return the part of the model that one tensor-parallel GPU holds.

        Parameters
        ----------
        tp
            Tensor-parallel GPUs. KV heads are replicated if there are fewer, and so is a latent
            cache.

        Returns
        -------
        Model
            The part of one GPU.

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
            ("heads of states", self.recurrence.heads if self.recurrence else 0),
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
            recurrence=self.recurrence and self.recurrence.shard(tp),
        )
