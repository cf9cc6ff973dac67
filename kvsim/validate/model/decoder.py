"""A small, fast decoder for the Llama and OPT families, with hooks for a technique.

The decoder knows embedding, norms, projections, MLP and head. Where keys and values are stored
and how they are attended to is a technique's business: ``kvsim.validate.techniques``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from kvsim.machines.deployment import Deployment
from kvsim.validate.counter import NULL_COUNTER, Kind, NullCounter
from kvsim.validate.model.architecture import POSITION_OFFSET, Architecture, rotate
from kvsim.validate.model.attention import Pass
from kvsim.validate.model.weights import LayerWeights, Matrix, Norm, Weights, build

Answer = Callable[[], Tensor]
"""Waits for attention that another processor is at."""

Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor, Pass], Tensor | Answer]
"""Attention of a layer: (layer, x, q, k, v, step) to (sequences, heads, new, dim), or its answer.

x is the input of the projections, (sequences, new, hidden); q is (sequences, heads, new, dim); k
and v are (sequences, KV heads, new, dim), with positions turned in already.
"""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
}


@dataclass
class Decoder:
    """A model on a device: its weights, and the computation around attention.

    Attributes
    ----------
    arch
        Sizes of the model.
    weights
        Weights of the model.
    length
        Number of positions that it supports. [tokens]
    counter
        Counter of FLOPs and bytes; counts nothing by default.
    deployment
        Predicted deployment, for techniques that choose between copying and computing.
    """

    arch: Architecture
    weights: Weights
    length: int
    counter: NullCounter = NULL_COUNTER
    deployment: Deployment | None = None
    _turns: tuple[Tensor, Tensor] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.arch.rope:
            self._turns = self.arch.rope.table(self.length, self.device, self.dtype)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Number format of hidden states."""
        return self.weights.embedding.dtype

    def step(self, rows: slice, starts: tuple[int, ...], positions: Tensor, kind: Kind) -> Pass:
        """Create the description of a pass, with the rotations of its positions.

        Parameters
        ----------
        rows
            Which sequences of the batch.
        starts
            Cached tokens of each of these sequences. [tokens]
        positions
            Positions of the new tokens, (sequences, new).
        """
        turns = self.turns(positions)
        return Pass(rows, starts, positions.shape[1], positions, turns, kind)

    def turns(self, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """Look up the rotations of positions.

        Parameters
        ----------
        positions
            (sequences, tokens).

        Returns
        -------
        tuple of Tensor or None
            Cosine and sine, (sequences, 1, tokens, dim) each; None where positions are learned.
        """
        if self._turns is None:
            return None
        cos, sin = (table[positions].unsqueeze(1) for table in self._turns)
        return cos, sin

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Embed tokens, with learned positions if the model has them. (sequences, new, hidden)

        Parameters
        ----------
        tokens
            Indices in the vocabulary, (sequences, new).
        positions
            Positions of the tokens, (sequences, new).
        """
        with self.counter.op("sample") as record:
            x = F.embedding(tokens, self.weights.embedding)
            record.reads(x)
            if self.weights.positions is not None:
                x += F.embedding(positions + POSITION_OFFSET, self.weights.positions)
                record.reads(x)  # a row of positions per token
            record.writes(x)
        return x

    def layer(
        self, index: int, weights: LayerWeights, tensor: Tensor, step: Pass, attend: Attend
    ) -> Callable[[], None] | None:
        """Run one layer, which changes the hidden states in place.

        Parameters
        ----------
        weights
            Weights of the layer.
        tensor
            Hidden states, (sequences, new, hidden), changed in place.
        attend
            Called with the layer, the normed states, queries, keys, values and the pass.

        Returns
        -------
        Callable or None
            If attention runs asynchronously, a function that runs the rest of the layer; else None.
        """
        attended = self._attention(index, weights, tensor, step, attend)
        if not isinstance(attended, Tensor):
            return partial(self._answered, weights, tensor, attended)
        self._add(tensor, self._project_output(weights, attended))
        del attended  # before the MLP's tensors are made
        self._add(tensor, self._mlp(weights, tensor))
        return None

    def _attention(
        self, index: int, weights: LayerWeights, tensor: Tensor, step: Pass, attend: Attend
    ) -> Tensor | Answer:
        """Run the layer up to and including attention."""
        normed = self._norm(weights.attn_norm, tensor)
        return attend(index, normed, *self._project(weights, normed, step), step)

    def _answered(self, weights: LayerWeights, tensor: Tensor, answer: Answer) -> None:
        """Run the rest of the layer after asynchronous attention."""
        self._add(tensor, self._project_output(weights, answer()))
        self._add(tensor, self._mlp(weights, tensor))

    def _project_output(self, weights: LayerWeights, attended: Tensor) -> Tensor:
        return self._multiply("out", weights.out, attended.transpose(1, 2).flatten(2))

    def _mlp(self, weights: LayerWeights, tensor: Tensor) -> Tensor:
        normed = self._norm(weights.mlp_norm, tensor)
        wide = self._activate(self._multiply("up", weights.up, normed))
        return self._multiply("down", weights.down, wide)

    def head(self, tensor: Tensor) -> Tensor:
        """Compute the logits of the next token.

        Parameters
        ----------
        tensor
            Hidden states of the last layer, (..., hidden).

        Returns
        -------
        Tensor
            Logits, (..., vocab).
        """
        with self.counter.op("sample") as record:
            normed = self.weights.norm(tensor)
            record.reads(tensor).writes(normed)
        return self._multiply("lm_head", self.weights.head, normed)

    def keys_values(
        self, index: int, tensor: Tensor, turns: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Compute keys and values again from the stored inputs of a layer.

        Parameters
        ----------
        tensor
            Normed hidden states that its projections read, (sequences, tokens, hidden).
        turns
            Cosine and sine of the tokens' positions; None if positions are learned.

        Returns
        -------
        keys, values : Tensor
            (sequences, KV heads, tokens, dim) each.
        """
        m, weights = self.arch.model, self.weights.layers[index]
        rows = weights.qkv.rows(m.heads * m.head_dim)
        both = rows(
            tensor.reshape(-1, m.hidden)
        )  # flat: some kernels are slow where batches interleave
        k, v = self._split(both.view(*tensor.shape[:2], -1), m.k_width, m.v_width)
        k = _normed(weights.k_norm, k)
        return rotate(k, *turns) if turns else k, v

    def _project(
        self, weights: LayerWeights, normed: Tensor, step: Pass
    ) -> tuple[Tensor, Tensor, Tensor]:
        m = self.arch.model
        qkv = self._multiply("qkv", weights.qkv, normed)
        q, k, v = self._split(qkv, m.heads * m.head_dim, m.k_width, m.v_width)
        if not (weights.q_norm or step.turns):
            return q, k, v
        with self.counter.op("pointwise") as record:
            record.reads(q, k)
            q, k = _normed(weights.q_norm, q), _normed(weights.k_norm, k)
            if step.turns:
                q, k = rotate(q, *step.turns), rotate(k, *step.turns)
            record.writes(q, k)
        return q, k, v

    def _split(self, tensor: Tensor, *widths: int) -> tuple[Tensor, ...]:
        """(sequences, new, widths) to (sequences, heads, new, dim) for each width; no copies."""
        parts = torch.split(tensor, list(widths), dim=-1)
        dim = self.arch.model.head_dim
        return tuple(p.view(*p.shape[:2], -1, dim).transpose(1, 2) for p in parts)

    def _norm(self, norm: Norm, tensor: Tensor) -> Tensor:
        with self.counter.op("pointwise") as record:
            out = norm(tensor)
            record.reads(tensor).writes(out)
        return out

    def _add(self, tensor: Tensor, change: Tensor) -> None:
        with self.counter.op("pointwise") as record:
            record.reads(tensor, change).writes(tensor)
            tensor += change

    def _activate(self, wide: Tensor) -> Tensor:
        activation = ACTIVATIONS[self.arch.activation]
        with self.counter.op("pointwise") as record:
            if self.arch.model.gated:
                gate, up = wide.chunk(2, dim=-1)
                out = activation(gate).mul_(up)
            else:
                out = activation(wide)
            record.reads(wide).writes(out)
        return out

    def _multiply(self, name: str, matrix: Matrix, tensor: Tensor) -> Tensor:
        with self.counter.op(name) as record:
            out = matrix(tensor)
            record.reads(tensor, *matrix.tensors()).writes(out)
        return out


def rehearsal(decoder: Decoder) -> Decoder:
    """Copy a decoder without allocating memory, to find what a technique needs.

    Parameters
    ----------
    decoder
        The decoder with its weights.

    Returns
    -------
    Decoder
        The decoder on PyTorch's ``meta`` device.
    """

    def empty(name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=decoder.dtype, device="meta")

    return Decoder(
        decoder.arch, build(decoder.arch, empty), decoder.length, deployment=decoder.deployment
    )


def _normed(norm: Norm | None, tensor: Tensor) -> Tensor:
    return norm(tensor) if norm else tensor
