"""KIVI: keys packed per channel, values per token, the latest tokens in fp16."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from kvsim.engine import attention
from kvsim.engine import ops as blocks
from kvsim.engine.formats import Format, kivi
from kvsim.graph import Buffers, Op, Point
from kvsim.machines.deployment import Deployment
from kvsim.models.model import LayerShape
from kvsim.techniques.base import Technique
from kvsim.techniques.settings import param


@dataclass(frozen=True)
class Kivi(Technique):
    """Asymmetric group quantisation of the cache with a full-precision residual.

    References
    ----------
    .. [1] Z. Liu et al., "KIVI: a tuning-free asymmetric 2bit quantization for KV cache",
       ICML 2024, section 3 and appendix A.
    """

    name: ClassVar[str] = "kivi"

    bits: float = param(2, "bits per cached number", choices=(1, 2, 4, 8, 16))
    group: int = param(32, "numbers that share a scale", low=8, high=1024)
    residual: int = param(128, "latest tokens kept in fp16", high=1e6)

    @property
    def stored(self) -> Format:
        """Packed groups and an fp16 residual."""
        return kivi(self.bits, self.group, self.residual)

    def attend(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> list[Op]:
        """Attention over packed and fresh tokens; keys are packed in blocks, values singly."""
        return [
            *blocks.pack(d, p, self.stored),
            *attention.ops(d, p, shape, stored=self.stored),
        ]

    def cache(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> Buffers:
        """Packed numbers, their scales, and the fp16 residual."""
        return {"gpu": {"kv": attention.resident_kv(d, p, shape, self.stored)}}

    def once(self, d: Deployment, p: Point) -> Buffers:
        """One layer's whole prompt until it is packed."""
        return blocks.prompt_kv(d, p)

    def options(self, d: Deployment, prompt: int, generate: int) -> Iterable[Technique]:
        """The paper's widths and groups."""
        return [Kivi(bits, group) for bits in (2, 4) for group in (32, 64)]
