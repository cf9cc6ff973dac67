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

    It cannot say attention and a state side by side in one layer (Falcon-H1), an attention block
    with shared weights in front of a state (Zamba2), or numbers of KV heads that differ by layer
    (MiMo-V2-Flash: 8 in its windows, 4 elsewhere): such configurations are refused.

    Attributes
    ----------
    window
        Sliding window; None attends to every token. [tokens]
    routed
        Mixture of experts instead of a dense MLP.
    mlp
        False: a layer that mixes tokens alone (Nemotron-H).
    home
        What of it is in host memory.
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
    """A mixer whose state does not grow with the context.

    Each head keeps a matrix of ``key_dim`` by ``head_dim`` numbers, and a short causal convolution
    runs over its inputs before.

    References
    ----------
    .. [1] T. Dao and A. Gu, "Transformers are SSMs", ICML 2024, sections 6 and 7 (Mamba-2).
    .. [2] S. Yang et al., "Gated delta networks", ICLR 2025, section 3.
    .. [3] Kimi Team, "Kimi Linear", 2025, section 3 (KDA).
    .. [4] A. Gu and T. Dao, "Mamba", 2023, section 3: heads of one number each, whose keys, queries
       and steps are made of what the convolution gives.

    Attributes
    ----------
    head_dim
        Numbers of a value.
    key_dim
        Numbers of a key; Mamba-2's state size.
    key_heads
        Heads of keys and queries; Mamba-2's groups.
    taps
        Tokens that the convolution spans; 0: none.
    gates
        Outputs of the input product besides values, keys and queries.
    gate_rank
        Of gates made in two products (KDA), of which there are two.
    step_rank
        Of the steps of a selective state, made in two products.
    vectors
        Small parameters: decays, biases, the norm of the output.
    chunk
        Tokens that prefill computes together. [tokens]
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
        """Size of all heads' values together. [numbers]"""
        return self.heads * self.head_dim

    @property
    def mixed(self) -> int:
        """Channels of the convolution: values, and keys and queries unless derived from them."""
        return self.inner + (0 if self.step_rank else self.addressed)

    @property
    def addressed(self) -> int:
        """Size of all heads' keys and queries together. [numbers]"""
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
        """Convolution and vectors. [numbers]"""
        return self.mixed * (self.taps + self.conv_bias) + self.vectors

    @property
    def matrix_bytes(self) -> float:
        """Heads' matrices of one sequence in one layer. [B]"""
        return STATE_NUMBER * self.inner * self.key_dim

    @property
    def state_bytes(self) -> float:
        """State of one sequence in one layer, with the convolution's latest tokens. [B]"""
        return self.matrix_bytes + CONVOLVED * self.mixed * max(0, self.taps - 1)

    def shard(self, tp: int) -> "Recurrence":
        """Return the part that one of several tensor-parallel GPUs holds.

        Parameters
        ----------
        tp
            Tensor-parallel GPUs; key heads are copied where they are fewer.
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
    """An indexer: a small scorer that selects the cached tokens that attention reads.

    References
    ----------
    .. [1] DeepSeek-AI, "DeepSeek-V3.2", 2025, section 2.1: lightning indexer, in fp8.

    Attributes
    ----------
    tokens
        That a query attends to. [tokens]
    """

    heads: int
    head_dim: int
    tokens: int

    @property
    def key_bytes(self) -> float:
        """A cached token's key: fp8 numbers, an fp32 scale per 128. [B]"""
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
    """Return the layout of the first layers, and that of the others.

    Parameters
    ----------
    layout
        Blocks of shapes and how often each repeats.
    first
        Number of layers before the cut.
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
