"""Rotary positions, with the ways of stretching them that Llama-family checkpoints use."""

from collections.abc import Mapping
from math import log, pi
from typing import Any

import torch
from torch import Tensor

from kvsim.errors import InputError, unknown
from kvsim.frozen import frozen
from kvsim.models.fields import shown

KINDS = ("default", "linear", "llama3", "yarn")


@frozen
class Rope:
    """Rotation of queries and keys by their positions.

    References
    ----------
    .. [1] J. Su et al., "RoFormer", 2021, section 3.2.
    .. [2] B. Peng et al., "YaRN", ICLR 2024, section 3.
    """

    dim: int  # numbers of a head, all of which turn
    theta: float
    kind: str = "default"
    factor: float = 1.0  # how much longer than trained
    low: float = 1.0  # llama3: low_freq_factor; yarn: beta_slow
    high: float = 4.0  # llama3: high_freq_factor; yarn: beta_fast
    trained: int = 0  # positions before stretching [tokens]
    scale: float = 1.0  # of cosine and sine (yarn)

    def frequencies(self) -> Tensor:
        """Angle per position of every pair of numbers, shape (dim / 2,). [rad/token]"""
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
        """The pair of numbers that turns so often over the trained positions."""
        return self.dim * log(self.trained / (turns * 2 * pi)) / (2 * log(self.theta))

    def table(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the first positions, each of shape (length, dim)."""
        positions = torch.arange(length, dtype=torch.float32)
        angles = torch.outer(positions, self.frequencies()).repeat(1, 2)
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        return cos.to(device, dtype), sin.to(device, dtype)


def rotate(tensor: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn heads x, shape (batch, heads, tokens, dim), by (batch or 1, 1, tokens, dim) tables."""
    half = tensor.shape[-1] // 2
    return tensor * cos + torch.cat((-tensor[..., half:], tensor[..., :half]), dim=-1) * sin


def read_rope(config: Mapping[str, Any], dim: int, max_context: int, where: str) -> Rope:
    """The positions a ``config.json`` describes, in the old form or in that of transformers 5.

    Raises
    ------
    InputError
        For kinds of stretching that are not known, and for numbers that cannot be right.
    """
    given: dict[str, Any] = {}
    for field in ("rope_scaling", "rope_parameters"):
        said = config.get(field) or {}
        if not isinstance(said, Mapping):
            problem = f"is {shown(said)}, expected an object of fields"
            raise InputError(f"{where}: field {field!r} {problem}; correct it")
        given |= said
    theta = _number(given, "rope_theta", config.get("rope_theta", 10000.0), where)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in KINDS:
        raise unknown(f"rope_type in {where}", str(kind), KINDS, "choose another model")
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


def _number(given: Mapping[str, Any], key: str, default: float | None, where: str) -> float:
    value = given.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        problem = f"is {'missing' if value is None else shown(value)}, expected a number above 0"
        raise InputError(f"{where}: field 'rope_scaling.{key}' {problem}; correct it")
    return float(value)
