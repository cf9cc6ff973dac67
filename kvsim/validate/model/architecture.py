"""What running a decoder needs beyond a model's shape: positions, norms and activation."""

from collections.abc import Mapping
from dataclasses import replace
from math import log, pi
from typing import Any

import torch
from torch import Tensor

from kvsim.errors import InputError, unknown
from kvsim.frozen import frozen
from kvsim.models.configs import compress, from_config, read_config
from kvsim.models.fields import value_text
from kvsim.models.model import LayerShape, Model

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@frozen
class Rope:
    """Rotary position embedding [1]_, with its stretching to longer contexts [2]_.

    Attributes
    ----------
    dim
        Dimension of a head, all of which is rotated.
    theta
        Base of the frequencies.
    kind
        Kind of stretching: "default" (none), "linear", "llama3" or "yarn".
    factor
        Ratio of the stretched to the trained length.
    low, high
        ``low_freq_factor`` and ``high_freq_factor`` of llama3; ``beta_slow`` and ``beta_fast`` of
        yarn.
    trained
        Positions before stretching. [tokens]
    scale
        Factor on cosine and sine (yarn).

    References
    ----------
    .. [1] J. Su et al., "RoFormer", 2021, section 3.2, https://arxiv.org/abs/2104.09864
    .. [2] B. Peng et al., "YaRN", ICLR 2024, section 3, https://arxiv.org/abs/2309.00071
    """

    dim: int
    theta: float
    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    trained: int = 0
    scale: float = 1.0

    def frequencies(self) -> Tensor:
        """Compute the angle per position of every pair of channels.

        Returns
        -------
        Tensor
            Angles, (dim / 2,). [rad/token]
        """
        plain = self.theta ** -(torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)
        if self.kind == "default":
            return plain
        if self.kind == "linear":
            return plain / self.factor
        if self.kind == "llama3":
            turns = self.trained * plain / (2 * pi)
            keep = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        else:
            first, last = (self._pair(turns) for turns in (self.high, self.low))
            first, last = max(int(first), 0), min(int(-(-last // 1)), self.dim - 1)
            pairs = torch.arange(self.dim // 2, dtype=torch.float32)
            keep = 1 - ((pairs - first) / max(last - first, 1e-3)).clamp(0, 1)
        return keep * plain + (1 - keep) * plain / self.factor

    def _pair(self, turns: float) -> float:
        """Return the pair of channels that rotates a given number of times in training."""
        return self.dim * log(self.trained / (turns * 2 * pi)) / (2 * log(self.theta))

    def table(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Tabulate the rotations of the first positions.

        Parameters
        ----------
        length
            Positions of the table. [tokens]
        device
            Device of the table.
        dtype
            Number format of the table; angles are computed in fp32.

        Returns
        -------
        cos, sin : Tensor
            Cosine and sine, each (length, dim).
        """
        positions = torch.arange(length, dtype=torch.float32)
        angles = torch.outer(positions, self.frequencies()).repeat(1, 2)
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        return cos.to(device, dtype), sin.to(device, dtype)


def rotate(tensor: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads by their positions, with the halves of a head as pairs.

    Parameters
    ----------
    tensor
        Queries or keys, (batch, heads, tokens, dim).
    cos, sin
        Tables of their positions, (batch or 1, 1, tokens, dim).

    References
    ----------
    .. [1] J. Su et al., "RoFormer", https://arxiv.org/abs/2104.09864, section 3.2.
    """
    half = tensor.shape[-1] // 2
    return tensor * cos + torch.cat((-tensor[..., half:], tensor[..., :half]), dim=-1) * sin


def read_rope(config: Mapping[str, Any], dim: int, max_context: int, where: str) -> Rope:
    """Read the rotary positions of a ``config.json``, in its old form or that of transformers 5.

    Parameters
    ----------
    dim
        Dimension of a head.
    max_context
        Positions that the model supports, the default number of trained positions. [tokens]
    where
        Name of the configuration in error messages.

    Raises
    ------
    InputError
        For unknown kinds of stretching, and for invalid numbers.
    """
    given: dict[str, Any] = {}
    for field in ("rope_scaling", "rope_parameters"):
        said = config.get(field) or {}
        if not isinstance(said, Mapping):
            problem = f"is {value_text(said)}, expected an object"
            raise InputError(f"{where}: field {field!r} {problem}; correct it")
        given |= said
    theta = _number(given, "rope_theta", config.get("rope_theta", 10000.0), where)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise unknown(f"rope_type in {where}", str(kind), ROPE_KINDS, "choose another model")
    if kind == "default":
        return Rope(dim, theta)
    factor = _number(given, "factor", None, where)
    trained = int(_number(given, "original_max_position_embeddings", max_context, where))
    if kind == "linear":
        return Rope(dim, theta, kind, factor)
    if kind == "llama3":
        low, high = (_number(given, f"{end}_freq_factor", None, where) for end in ("low", "high"))
        return Rope(dim, theta, kind, factor, low, high, trained)
    for key in ("mscale", "mscale_all_dim", "truncate"):
        if given.get(key) not in (None, True):
            raise InputError(
                f"{where}: field 'rope_scaling.{key}' is not known; choose another model"
            )
    scale = _number(given, "attention_factor", 0.1 * log(factor) + 1, where)
    slow = _number(given, "beta_slow", 1, where)
    fast = _number(given, "beta_fast", 32, where)
    return Rope(dim, theta, kind, factor, slow, fast, trained, scale)


def _number(given: Mapping[str, object], key: str, default: float | None, where: str) -> float:
    value = given.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        problem = (
            f"is {'missing' if value is None else value_text(value)}, expected a number above 0"
        )
        raise InputError(f"{where}: field 'rope_scaling.{key}' {problem}; correct it")
    return float(value)


RUNNABLE_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "opt")
ACTIVATIONS = ("silu", "relu", "gelu")
POSITION_OFFSET = 2  # OPT leaves the first rows of its table of positions unused


@frozen
class Architecture:
    """A model with the constants that its computation needs.

    Attributes
    ----------
    model
        Sizes of the model.
    eps
        Number added to a variance before its square root, in norms.
    activation
        Name of the MLP's activation function.
    rope
        Rotary positions; None if positions are learned.
    """

    model: Model
    eps: float
    activation: str
    rope: Rope | None

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        """Every layer in order."""
        return tuple(s for block, n in self.model.layout for _ in range(n) for s in block)

    def cut(self, layers: int) -> "Architecture":
        """Cut the model to its first layers.

        Parameters
        ----------
        layers
            Number of layers that stay.

        Raises
        ------
        InputError
            If the model has fewer layers.
        """
        if not 1 <= layers <= self.model.layers:
            expected = f"expected 1 to {self.model.layers}, the layers of {self.model.name}"
            raise InputError(f"--layers: got {layers}; {expected}")
        return replace(self, model=replace(self.model, layout=compress(self.shapes[:layers])))


def load_architecture(name_or_path: str) -> Architecture:
    """Load the architecture of a model.

    Parameters
    ----------
    name_or_path
        Catalogue name, Hugging Face id, or path of a configuration.

    Raises
    ------
    InputError
        If there is no such model, or it is none that ``validate`` can run.
    """
    return read_architecture(*read_config(name_or_path))


def read_architecture(config: Mapping[str, object], name: str, where: str) -> Architecture:
    """Read the architecture that a parsed ``config.json`` describes.

    Parameters
    ----------
    name
        Name to give the model.
    where
        Name of the configuration in error messages.

    Raises
    ------
    InputError
        If ``validate`` cannot run models of that family, or a field is invalid.
    """
    family = config.get("model_type")
    if family not in RUNNABLE_FAMILIES:
        raise unknown(
            f"architecture in {where}", str(family), RUNNABLE_FAMILIES, "these can be run"
        )
    model = from_config(config, name)
    field = "hidden_act" if family != "opt" else "activation_function"
    activation = config.get(field)
    activation = activation or ("relu" if family == "opt" else "silu")
    if activation not in ACTIVATIONS:
        problem = f"is {value_text(activation)}, expected one of {', '.join(ACTIVATIONS)}"
        raise InputError(f"{where}: field {field!r} {problem}; choose another model")
    if family == "opt":
        return Architecture(model, 1e-5, activation, None)
    eps = config.get("rms_norm_eps", 1e-6)
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 < eps < 1:
        problem = f"is {value_text(eps)}, expected a number above 0 and below 1"
        raise InputError(f"{where}: field 'rms_norm_eps' {problem}; correct it")
    rope = read_rope(config, model.head_dim, model.max_context, where)
    return Architecture(model, float(eps), activation, rope)
