"""FastDecode: the cache stays in host memory and the CPU attends to it."""

from dataclasses import dataclass
from typing import ClassVar

from kvsim.engine import attention
from kvsim.engine import ops as blocks
from kvsim.graph import Buffers, Channel, Number, Op, Point
from kvsim.machines.deployment import Deployment
from kvsim.models.model import LayerShape
from kvsim.techniques.base import Technique


@dataclass(frozen=True)
class Fastdecode(Technique):
    """CPU attention; two halves of the batch alternate so that GPU and CPU both stay busy.

    References
    ----------
    .. [1] J. He and J. Zhai, "FastDecode", arXiv:2403.11421, section 4.
    """

    name: ClassVar[str] = "fastdecode"
    lossless: ClassVar[bool] = True

    def refuses(self, d: Deployment) -> str:
        """A latent cache would need its up-projection on the CPU."""
        return "no CPU attention for a latent cache (MLA)" if d.shard.latent else ""

    def tiles(self) -> int:
        """The halves of the batch."""
        return 2

    def layer(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> list[Op]:
        """A half's projections, then what comes after the other half's attention."""
        return [
            *blocks.before_attention(d, p),
            *self.attend(d, p, shape, on_gpu),
            *blocks.after_attention(d, p, shape, after=() if p.prefill else ("return_out@-1",)),
        ]

    def attend(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> list[Op]:
        """Queries and new KV to the host, attention there, outputs back."""
        m = d.shard
        new_kv = blocks.kv_bytes(m, p.tokens)
        if p.prefill:
            store = blocks.copy("store_kv", "d2h", new_kv, launches=2, after=("qkv",))
            return [store, *attention.ops(d, p, shape)]
        queries = blocks.HALF * p.tokens * m.heads * m.head_dim
        (on_device,) = attention.ops(d, p, shape)
        read = blocks.kv_bytes(m, p.batch * attention.cached(d, p, shape)) + 2 * queries
        moved: dict[Channel, Number] = {"dram": read}
        return [
            *blocks.runtime(d),
            blocks.copy("send_qkv", "d2h", queries + new_kv, after=("qkv",)),
            Op("attn", "cpu", "cpu", on_device.flops, moved, after=("send_qkv",)),
            blocks.copy("return_out", "h2d", queries, after=("attn",)),
        ]

    def once(self, d: Deployment, p: Point) -> Buffers:
        """In prefill two layers' keys and values, one computed while the other leaves."""
        leaving = 2 * blocks.kv_bytes(d.shard, p.tokens) if p.prefill else 0.0
        return {"gpu": {"kv on the way out": leaving}}

    def cache(self, d: Deployment, p: Point, shape: LayerShape, on_gpu: bool) -> Buffers:
        """Everything on the host."""
        return {"host": {"kv": attention.resident_kv(d, p, shape)}}
