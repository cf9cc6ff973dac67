"""TurboQuant: vectors rotated at random, then quantised element by element to normal levels.

A. Zandieh et al., "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate",
algorithm 1, https://arxiv.org/abs/2504.19874.

Queries are rotated alike, and outputs are turned back.
"""

from functools import cache
from types import MappingProxyType

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.papers.turboquant import Turboquant as Settings
from kvsim.validate.kernels.stores import Store
from kvsim.validate.model.attention import Seen
from kvsim.validate.parts.normal import from_levels, to_levels
from kvsim.validate.parts.rows import PACKED_AT_ONCE, Codec, EncodedRows, PerTokenCache, Plain
from kvsim.validate.parts.store import CacheRoom, SlotRange, Widths

SMALL_SETTINGS = ("bits=4,group={group}",)
READ_TWICE = "rows that are kept in two places are rotated apart: the rotation is read twice"
ROTATION_SEED = 2504  # of the rotation, which all layers share


class Turboquant(PerTokenCache):
    """A KV cache that applies a random rotation to keys and values and quantises the result [1]_.

    The elements of a randomly rotated vector are close to normally distributed, with a standard
    deviation of its norm divided by the square root of its dimension. One table of quantisation
    levels therefore serves all vectors.

    References
    ----------
    .. [1] A. Zandieh et al., "TurboQuant: Online Vector Quantization with Near-optimal Distortion
       Rate", algorithm 1, https://arxiv.org/abs/2504.19874
    """

    keeps_numbers = False
    differences = PACKED_AT_ONCE
    split_differences = MappingProxyType(dict.fromkeys(("rotate", "rotate_back"), READ_TWICE))

    def __init__(self, room: CacheRoom) -> None:
        super().__init__(room)
        self.turn = rotation(room.dim).to(room.device, room.dtype)

    def codecs(self) -> tuple[Codec, Codec]:
        """Return the codecs of keys and of values, which may have different numbers of bits.

        Raises
        ------
        InputError
            If neither keys nor values are quantised (``bits=16``).
        """
        part = self.room.settings(Settings)
        if part.exact:
            raise InputError("turboquant: bits=16 packs nothing; choose fewer, or technique full")
        self.room.check_group(part.group)
        keys, values = (
            Plain() if bits == 16 else Levels(int(bits), part.group)
            for bits in (part.stored.bits, part.stored.v_bits)
        )
        return keys, values

    def fill(self, keys: Tensor, values: Tensor, plainly: str = "attn") -> None:
        """Rotate, quantise and store the tokens of the prompts."""
        turned = self._rotate("rotate", True, keys, values)
        super().fill(turned[0], turned[1], plainly)

    def append(self, keys: Tensor, values: Tensor, span: SlotRange) -> None:
        """Rotate, quantise and store the new tokens of a pass."""
        turned = self._rotate("rotate", True, keys, values)
        super().append(turned[0], turned[1], span)

    def attend(self, queries: Tensor, span: SlotRange, seen: Seen) -> Tensor:
        """Rotate the queries, attend to the rotated cache, and rotate the output back."""
        out = super().attend(self._rotate("rotate", False, queries)[0], span, seen)
        return self._rotate("rotate_back", True, out)[0]

    def attend_with_scores(
        self, queries: Tensor, span: SlotRange, seen: Seen
    ) -> tuple[Tensor, Tensor]:
        """Attend as :meth:`attend`, and return the attention weights too."""
        turned = self._rotate("rotate", False, queries)[0]
        out, weights = super().attend_with_scores(turned, span, seen)
        return self._rotate("rotate_back", True, out)[0], weights

    def _rotate(self, name: str, reads: bool, *vectors: Tensor) -> list[Tensor]:
        """Rotate vectors (..., dim) forth or back; the matrix is read once per step."""
        matrix = self.turn.T if name == "rotate" else self.turn
        with self.counter.op(name) as record:
            turned = [some @ matrix for some in vectors]
            record.reads(*vectors, self.turn if reads else None).writes(*turned)
        return turned


@cache
def rotation(dim: int) -> Tensor:
    """Return a random orthogonal matrix, (dim, dim), in fp64; it is the same in every call.

    Parameters
    ----------
    dim
        Dimension of a head.
    """
    generator = torch.Generator().manual_seed(ROTATION_SEED)
    made, upper = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))
    signs: Tensor = upper.diagonal().sign()
    return torch.mul(made, signs)


class Levels(Codec):
    """Codec that stores a norm per group of elements, and a quantisation level per element.

    Parameters
    ----------
    bits
        Bits per element.
    group
        Elements that share a norm.
    """

    def __init__(self, bits: int, group: int) -> None:
        self.bits, self.group = bits, group

    def widths(self, dim: int, dtype: torch.dtype) -> Widths:
        """Return size and number format of a row's codes, and of its norms, one per group."""
        return [(dim * self.bits // 8, torch.uint8), (dim // self.group, torch.float16)]

    def encode(self, numbers: Tensor) -> list[Tensor]:
        """Quantise every element to the nearest level, after division by its group's RMS value."""
        parts = self._grouped(numbers.float())
        norms = parts.norm(dim=-1).half()
        scale = norms.float()[..., None] / self.group**0.5
        even = parts / torch.where(scale > 0, scale, 1.0)
        return [to_levels(even.flatten(-2), self.bits), norms]

    def store(self, parts: list[Tensor]) -> Store:
        """Arrange the parts as rows that ``widen`` dequantises by a table of levels."""
        return EncodedRows.from_parts(parts, self.bits, self.widen)

    def widen(self, parts: list[Tensor]) -> Tensor:
        """Dequantise rows to fp32.

        Parameters
        ----------
        parts
            Packed codes and norms, as :meth:`encode` returns them.

        Returns
        -------
        Tensor
            Rotated keys or values, (sequences, KV heads, tokens, head dim).
        """
        numbers = self._grouped(from_levels(parts[0], self.bits))
        numbers *= (parts[1].float() / self.group**0.5)[..., None]
        return numbers.flatten(-2)

    def _grouped(self, numbers: Tensor) -> Tensor:
        return numbers.view(*numbers.shape[:-1], -1, self.group)
