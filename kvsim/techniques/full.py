"""Full-precision keys and values, all on the GPU: what every other technique is compared with."""

from dataclasses import dataclass
from typing import ClassVar

from kvsim.engine import attention
from kvsim.graph import Buffers, Op, Point
from kvsim.machines.deployment import Deployment
from kvsim.models.model import LayerShape
from kvsim.techniques.base import Technique


@dataclass(frozen=True)
class Full(Technique):
    """Fp16 KV cache on the GPU.

    References
    ----------
    .. [1] R. Pope et al., "Efficiently scaling transformer inference", MLSys 2023.
    """

    name: ClassVar[str] = "full"
    lossless: ClassVar[bool] = True

    def attend(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> list[Op]:
        """One fused attention."""
        return attention.ops(d, p, shape)

    def cache(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> Buffers:
        """Keys and values of every token the layer can see."""
        return {"gpu": {"kv": attention.resident_kv(d, p, shape)}}
