"""Weights of a decoder, and how a checkpoint's tensors are checked and joined."""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.models.model import Model
from kvsim.validate.model.architecture import Architecture

Get = Callable[[str, tuple[int, ...]], Tensor]
"""A tensor by its Hugging Face name and the shape it must have."""


class Matrix(Protocol):
    """A weight matrix in any storage format, by which hidden states can be multiplied."""

    def __call__(self, tensor: Tensor) -> Tensor:
        """Hidden states (..., inputs) to (..., outputs)."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor that a product with the matrix reads."""


@frozen
class Linear:
    """A weight matrix in a floating-point format.

    Attributes
    ----------
    weight
        Weights, (outputs, inputs).
    bias
        Bias, (outputs,); None for no bias.
    """

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        """Hidden states (..., inputs) to (..., outputs)."""
        return F.linear(tensor, self.weight, self.bias)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the weight, and the bias if there is one."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def rows(self, start: int, stop: int | None = None) -> "Linear":
        """Select some of the outputs, without a copy.

        Parameters
        ----------
        start, stop
            First output, and the one after the last; None for all that follow.
        """
        part = slice(start, stop)
        return Linear(self.weight[part], None if self.bias is None else self.bias[part])


@frozen
class Norm:
    """RMSNorm, or LayerNorm if it has a bias.

    Attributes
    ----------
    weight
        Weights, (width,).
    """

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, tensor: Tensor) -> Tensor:
        """Normalised over the last axis."""
        if self.bias is None:
            return F.rms_norm(tensor, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(tensor, self.weight.shape, self.weight, self.bias, self.eps)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the weight, and the bias if there is one."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


@frozen
class LayerWeights:
    """The weights of one decoder layer.

    Attributes
    ----------
    attn_norm, mlp_norm
        Norms before attention and before the MLP.
    qkv
        Projections of queries, keys and values, as one matrix.
    out
        Output projection of attention.
    up
        Gate and up projection of the MLP, as one matrix.
    down
        Down projection of the MLP.
    q_norm, k_norm
        Norms of queries and keys; None if there are none.
    """

    attn_norm: Norm
    qkv: Linear
    out: Matrix
    mlp_norm: Norm
    up: Matrix
    down: Matrix
    q_norm: Norm | None = None
    k_norm: Norm | None = None

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor of the layer."""
        for part in (self.attn_norm, self.qkv, self.out, self.mlp_norm, self.up, self.down):
            yield from part.tensors()
        for norm in (self.q_norm, self.k_norm):
            yield from norm.tensors() if norm else ()


@frozen
class Weights:
    """The weights of a whole decoder.

    Attributes
    ----------
    embedding
        Embedding, (vocab, hidden).
    positions
        Learned positions, (positions, hidden); None for rotary positions.
    layers
        Weights of the layers.
    norm
        Norm after the last layer.
    head
        Output head, which may be tied to the embedding.
    """

    embedding: Tensor
    positions: Tensor | None
    layers: tuple[LayerWeights, ...]
    norm: Norm
    head: Linear

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor once; a head that is tied to the embedding is not repeated."""
        yield self.embedding
        if self.positions is not None:
            yield self.positions
        for layer in self.layers:
            yield from layer.tensors()
        yield from self.norm.tensors()
        if self.head.weight is not self.embedding:
            yield from self.head.tensors()


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
LLAMA_NAMES = (
    ("model.", "norm", "input_layernorm", "post_attention_layernorm"),
    ("self_attn.o_proj", ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"),
)
OPT_NAMES = (
    ("model.decoder.", "final_layer_norm", "self_attn_layer_norm", "final_layer_norm"),
    ("self_attn.out_proj", ("fc1",), "fc2"),
)
"""What families call the top of the model and its norms (last, attention, MLP), and the matrices
behind attention (output, up, down)."""


def build(arch: Architecture, get: Get) -> Weights:
    """Assemble the weights of a decoder.

    Parameters
    ----------
    get
        Function that returns a tensor by its Hugging Face name and shape; called once per tensor,
        in the order of use.

    Returns
    -------
    Weights
        All weights; queries, keys and values are one matrix, and so are gate and up.
    """
    m = arch.model
    names = OPT_NAMES if m.family == "opt" else LLAMA_NAMES
    (top, last_norm, attn_norm, mlp_norm), (out, up, down) = names

    def norm(name: str, width: int) -> Norm:
        bias = get(f"{name}.bias", (width,)) if m.norm_bias else None
        return Norm(get(f"{name}.weight", (width,)), bias, arch.eps)

    def linear(prefix: str, parts: Mapping[str, int], inputs: int, biased: bool) -> Linear:
        weights = [get(f"{prefix}{k}.weight", (n, inputs)) for k, n in parts.items()]
        biases = [get(f"{prefix}{k}.bias", (n,)) for k, n in parts.items() if biased]
        return Linear(_joined(weights), _joined(biases) if biased else None)

    def layer(index: int) -> LayerWeights:
        at = f"{top}layers.{index}."
        inner = m.qk_norm
        width = m.heads * m.head_dim
        qkv = dict(zip(QKV, (width, m.k_width, m.v_width), strict=True))
        return LayerWeights(
            norm(at + attn_norm, m.hidden),
            linear(at, qkv, m.hidden, m.qkv_bias),
            linear(at, {out: m.hidden}, width, m.out_bias),
            norm(at + mlp_norm, m.hidden),
            linear(at, dict.fromkeys(up, m.ffn), m.hidden, m.mlp_bias),
            linear(at, {down: m.hidden}, m.ffn, m.mlp_bias),
            norm(f"{at}self_attn.q_norm", m.head_dim) if inner else None,
            norm(f"{at}self_attn.k_norm", m.head_dim) if inner else None,
        )

    embedding = get(f"{top}embed_tokens.weight", (m.vocab, m.hidden))
    learned = (m.learned_positions, m.hidden)
    return Weights(
        embedding,
        get(f"{top}embed_positions.weight", learned) if m.learned_positions else None,
        tuple(layer(i) for i in range(m.layers)),
        norm(top + last_norm, m.hidden),
        Linear(embedding if m.tied else get("lm_head.weight", (m.vocab, m.hidden))),
    )


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def expected_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """List the tensors that a checkpoint of this architecture must hold.

    Parameters
    ----------
    arch
        Sizes of the model, and which matrices and biases its family has.

    Returns
    -------
    dict of str to tuple of int
        Shape of each tensor by its Hugging Face name.
    """
    shapes: dict[str, tuple[int, ...]] = {}

    def note(name: str, shape: tuple[int, ...]) -> Tensor:
        shapes[name] = shape
        return torch.empty(shape, device="meta")

    build(arch, note)
    return shapes


def random_weights(
    arch: Architecture, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> Weights:
    """Draw random weights that preserve the scale of hidden states.

    Parameters
    ----------
    device
        Device of the weights; on ``meta`` nothing is drawn.

    Returns
    -------
    Weights
        Normally distributed matrices and biases; ones and zeros for norms.
    """
    if device.type == "meta":  # a rehearsal: shapes alone
        return build(arch, lambda _, shape: torch.empty(shape, device=device, dtype=dtype))
    generator = torch.Generator(device).manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        if "norm" in name:
            start = 1.0 if name.endswith("weight") else 0.0
            return torch.full(shape, start, device=device, dtype=dtype)
        out = torch.empty(shape, device=device, dtype=dtype)
        spread = shape[-1] ** -0.5 if len(shape) > 1 else 0.02
        return out.normal_(0.0, spread, generator=generator)

    return build(arch, draw)


class TensorSource(Protocol):
    """A checkpoint's tensors under their Hugging Face names.

    Attributes
    ----------
    where
        Path of the checkpoint, also for error messages.
    """

    where: str

    def shapes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Return shape and number format of every tensor by name, without reading any."""

    def read(self, name: str) -> Tensor:
        """Read one tensor in a floating-point format."""


def find_tensors(arch: Architecture, source: TensorSource) -> dict[str, str]:
    """Find the tensors of a model in its checkpoint, without reading any.

    Parameters
    ----------
    source
        Names, shapes and number formats of the tensors in the checkpoint.

    Returns
    -------
    dict of str to str
        Name in the checkpoint by Hugging Face name.

    Raises
    ------
    InputError
        If a tensor is missing, has another shape, or is not a floating-point tensor.
    """
    held, found = source.shapes(), {}
    for name, shape in expected_shapes(arch).items():
        at = name if name in held else name.removeprefix("model.")  # as OPT's own files have it
        if at not in held:
            others = f"it has {len(held)} others"
            raise InputError(
                f"{source.where}: tensor {name!r} is missing ({others}), expected shape "
                f"{_format_names(shape)}; give the whole checkpoint of the model in its config.json"
            )
        got, kind = held[at]
        if got != shape:
            raise InputError(
                f"{source.where}: tensor {at!r} has shape {_format_names(got)}, expected "
                f"{_format_names(shape)}; give the checkpoint that belongs to its config.json"
            )
        if not _floating(kind):
            raise InputError(
                f"{source.where}: tensor {at!r} holds {kind} numbers, expected floating point; "
                f"give an unquantised checkpoint or a GGUF file"
            )
        found[name] = at
    return found


def load_weights(
    arch: Architecture, source: TensorSource, device: torch.device, dtype: torch.dtype
) -> Weights:
    """Load the weights of a checkpoint; names and shapes are checked before any tensor is read.

    Parameters
    ----------
    device
        Device to load to.
    dtype
        Number format that tensors are converted to.

    Raises
    ------
    InputError
        If a tensor is missing or has another shape (``find_tensors``), or holds NaN or infinity.
    """
    found = find_tensors(arch, source)

    def get(name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = source.read(found[name]).to(device, dtype)
        if not bool(torch.isfinite(tensor.sum(dtype=torch.float64))):
            raise InputError(
                f"{source.where}: tensor {name} holds NaN or infinity; fetch the checkpoint again"
            )
        return tensor

    return build(arch, get)


def _format_names(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a single number"


def _floating(kind: str) -> bool:
    """Return whether a safetensors or GGUF format can be read as numbers."""
    return kind in {"F64", "F32", "F16", "BF16"} or kind.startswith(("GGUF ",))


def weight_bytes(arch: Architecture, dtype: torch.dtype) -> int:
    """Compute the memory of a model's weights, counting a tied head once.

    Parameters
    ----------
    dtype
        Number format of all tensors.
    """
    numbers = sum(torch.Size(s).numel() for s in expected_shapes(arch).values())
    return numbers * dtype.itemsize


def cached_bytes(model: Model, tokens: int, dtype: torch.dtype) -> int:
    """Compute the memory of the keys and values of all layers.

    Parameters
    ----------
    tokens
        Tokens of all sequences together. [tokens]
    dtype
        Number format of keys and values.
    """
    return model.layers * model.kv_width * tokens * dtype.itemsize
