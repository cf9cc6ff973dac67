"""Keys and values in fp8, widened inside the attention kernel."""

from dataclasses import dataclass
from typing import ClassVar

from kvsim.engine import attention
from kvsim.engine import ops as blocks
from kvsim.engine.formats import Format
from kvsim.graph import Buffers, Op, Point
from kvsim.machines.deployment import Deployment
from kvsim.models.model import LayerShape
from kvsim.techniques.base import Technique

FP8 = Format(bits=8)


@dataclass(frozen=True)
class Fp8(Technique):
    """Fp8 KV cache with one scale per tensor, as serving engines offer it.

    References
    ----------
    .. [1] P. Micikevicius et al., "FP8 formats for deep learning", arXiv:2209.05433.
    """

    name: ClassVar[str] = "fp8"

    @property
    def stored(self) -> Format:
        """One byte per number."""
        return FP8

    def refuses(self, d: Deployment) -> str:
        """Engines refuse fp8 caches on GPUs without fp8 conversion."""
        return "" if "fp8" in d.hardware.flops else f"{d.hardware.name} has no fp8 units"

    def attend(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> list[Op]:
        """New numbers are narrowed, cached ones read at half the size."""
        return [
            *blocks.quantise(d, p.tokens, FP8),
            *attention.ops(d, p, shape, stored=FP8),
        ]

    def cache(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> Buffers:
        """One byte per number."""
        return {"gpu": {"kv": attention.resident_kv(d, p, shape, FP8)}}
