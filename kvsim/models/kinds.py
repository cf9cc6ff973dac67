"""Kinds of layers: attention with or without a cache of its own, and recurrent mixers."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import ceil
from typing import Literal

from kvsim.frozen import frozen

STATE_NUMBER = 4.0  # bytes of a state's number: reference kernels keep states in fp32 [B]
CONVOLVED = 2.0  # bytes of a token's number that a convolution still needs [B]

Mixer = Literal["attention", "shared", "recurrent", "none"]
"""``attention`` keeps a cache of its own, ``shared`` attends to the cache of an earlier layer,
``recurrent`` has a state of constant size, and ``none`` is a layer of an MLP alone."""

Rule = Literal["decay", "selective", "delta", "convolution"]
"""``decay`` adds to a fading state (Mamba-2, lightning attention), ``selective`` does so with a
fading of its own for every number (Mamba), ``delta`` corrects what a fading state recalls (gated
DeltaNet, Kimi Delta Attention), ``convolution`` has no further state."""


Home = Literal["", "experts", "mlp", "layer"]
"""Which of a layer's weights are in host memory: none, its routed experts, its MLP, or all."""


@frozen
class LayerShape:
    """Properties that may differ between the layers of a model.

    Configurations are refused if they have attention and a state side by side in one layer
    (Falcon-H1), an attention block with shared weights before a state (Zamba2), or numbers of KV
    heads that differ by layer (MiMo-V2-Flash).

    Attributes
    ----------
    window
        Sliding window; None if queries attend to every token. [tokens]
    routed
        Whether the MLP is a mixture of experts.
    mixer
        "attention", "shared" (attention to another layer's cache), "recurrent" or "none".
    mlp
        Whether the layer has an MLP; Nemotron-H has layers without.
    home
        Which part of its weights is in host memory; empty for none.
    """

    window: int | None = None
    routed: bool = False
    mixer: Mixer = "attention"
    mlp: bool = True
    home: Home = ""

    @property
    def attends(self) -> bool:
        """Whether queries read cached keys and values."""
        return self.mixer in ("attention", "shared")

    @property
    def keeps(self) -> bool:
        """Whether the layer has a cache of its own, on which techniques act."""
        return self.mixer == "attention"

    @cached_property
    def window_free(self) -> "LayerShape":
        """The same shape without its sliding window."""
        return replace(self, window=None)


Shapes = tuple[LayerShape, ...]


@frozen
class Recurrence:
    """A mixer with a recurrent state of constant size instead of a KV cache.

    Each head keeps a matrix of ``key_dim`` by ``head_dim`` numbers. A short causal convolution runs
    over the inputs first. Covers Mamba-2 [1]_, gated delta networks [2]_, KDA [3]_ and Mamba [4]_.

    Attributes
    ----------
    rule
        Update rule of the state.
    heads, head_dim
        Number of value heads, and dimension of a value.
    key_heads, key_dim
        Number of key and query heads (groups of Mamba-2), and dimension of a key (state size).
    taps
        Tokens that the convolution spans; 0 for no convolution. [tokens]
    conv_bias
        Whether the convolution has a bias.
    gates
        Outputs of the input projection besides values, keys and queries.
    gate_rank
        Inner width of two gates that are low-rank products (KDA); 0 for none.
    step_rank
        Inner width of the low-rank product of the step sizes (Mamba); 0 for none.
    vectors
        Number of small parameters: decays, biases, the norm of the output.
    chunk
        Tokens that prefill computes together. [tokens]

    References
    ----------
    .. [1] T. Dao and A. Gu, "Transformers are SSMs", ICML 2024, sections 6 and 7 (Mamba-2),
       https://arxiv.org/abs/2405.21060
    .. [2] S. Yang et al., "Gated delta networks", ICLR 2025, section 3,
       https://arxiv.org/abs/2412.06464
    .. [3] Kimi Team, "Kimi Linear", 2025, section 3 (KDA), https://arxiv.org/abs/2510.26692
    .. [4] A. Gu and T. Dao, "Mamba", 2023, section 3: heads of one number each, whose keys,
       queries and steps are computed from the convolution's output,
       https://arxiv.org/abs/2312.00752
    """

    rule: Rule
    heads: int
    head_dim: int
    key_dim: int
    key_heads: int
    taps: int
    conv_bias: bool = False
    gates: int = 0
    gate_rank: int = 0
    step_rank: int = 0
    vectors: int = 0
    chunk: int = 64

    @property
    def inner(self) -> int:
        """Numbers in the values of all heads together."""
        return self.heads * self.head_dim

    @property
    def mixed(self) -> int:
        """Channels of the convolution: values, and keys and queries unless derived from them."""
        return self.inner + (0 if self.step_rank else self.addressed)

    @property
    def addressed(self) -> int:
        """Numbers in the keys and queries of all heads together."""
        return 2 * self.key_heads * self.key_dim

    def matrices(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Return the mixer's weight matrices in the order they are used.

        Parameters
        ----------
        hidden
            Width of the hidden state.

        Returns
        -------
        dict[str, tuple[int, int]]
            Inputs and outputs by name of the product.
        """
        found = {"in": (hidden, self.mixed + self.gates)}
        if self.gate_rank:
            found["gates"] = (self.gate_rank, 2 * self.inner)
        if self.step_rank:
            found["select"] = (self.inner, self.step_rank + self.addressed)
            found["steps"] = (self.step_rank, self.inner)
        return found | {"out": (self.inner, hidden)}

    @property
    def small_parameters(self) -> int:
        """Number of parameters of the convolution and of ``vectors``."""
        return self.mixed * (self.taps + self.conv_bias) + self.vectors

    @property
    def matrix_bytes(self) -> float:
        """Size of all heads' state matrices, per sequence and layer. [B]"""
        return STATE_NUMBER * self.inner * self.key_dim

    @property
    def state_bytes(self) -> float:
        """Size of the state per sequence and layer, with the convolution's latest tokens. [B]"""
        return self.matrix_bytes + CONVOLVED * self.mixed * max(0, self.taps - 1)

    def shard(self, tp: int) -> "Recurrence":
        """Return the part that one of several tensor-parallel GPUs holds.

        Parameters
        ----------
        tp
            Tensor-parallel GPUs; key heads are replicated if there are fewer.

        Returns
        -------
        Recurrence
            The part of one GPU.
        """
        return replace(
            self,
            heads=self.heads // tp,
            key_heads=max(1, ceil(self.key_heads / tp)),
            gates=ceil((self.gates - 2 * self.gate_rank) / tp) + 2 * self.gate_rank,
            vectors=ceil(self.vectors / tp),
        )


@frozen
class Indexer:
    """A small scorer that selects which cached tokens attention reads (DeepSeek's indexer [1]_).

    Attributes
    ----------
    heads, head_dim
        Number of query heads of the indexer, and their dimension; all share one key per token.
    tokens
        Cached tokens that a query attends to. [tokens]

    References
    ----------
    .. [1] DeepSeek-AI, "DeepSeek-V3.2", 2025, section 2.1: lightning indexer, in fp8,
       https://arxiv.org/abs/2512.02556
    """

    heads: int
    head_dim: int
    tokens: int

    @property
    def key_bytes(self) -> float:
        """Size of a cached token's indexer key: fp8 numbers, and an fp32 scale per 128. [B]"""
        return self.head_dim + 4.0 * ceil(self.head_dim / 128)

    def matrices(self, hidden: int, q_rank: int) -> dict[str, tuple[int, int]]:
        """Return the indexer's weight matrices.

        Parameters
        ----------
        hidden
            Width of the hidden state.
        q_rank
            Width of the compressed query, from which queries are made; 0 if there is none.

        Returns
        -------
        dict[str, tuple[int, int]]
            Inputs and outputs by name of the product.
        """
        return {
            "index_q": (q_rank or hidden, self.heads * self.head_dim),
            "index_k": (hidden, self.head_dim + self.heads),  # keys, and a weight per head
        }

    @property
    def small_parameters(self) -> int:
        """The layer norm of its keys. [numbers]"""
        return 2 * self.head_dim


def split_layout(
    layout: Sequence[tuple[Shapes, int]], first: int
) -> tuple[list[tuple[Shapes, int]], list[tuple[Shapes, int]]]:
    """Split a layout after some layers.

    Parameters
    ----------
    layout
        Blocks of layer shapes, each with its number of repetitions, as ``Model.layout``.
    first
        Number of layers before the split.

    Returns
    -------
    before, after : list of tuple
        Layouts of the first layers, and of the others.
    """
    before: list[tuple[Shapes, int]] = []
    after: list[tuple[Shapes, int]] = []
    for shapes, count in layout:
        whole, part = divmod(min(first, count * len(shapes)), len(shapes))
        first -= whole * len(shapes) + part
        before += [(shapes, whole)] if whole else []
        before += [(shapes[:part], 1)] if part else []
        after += [(shapes[part:], 1)] if part else []
        left = count - whole - (1 if part else 0)
        after += [(shapes, left)] if left else []
    return before, after
