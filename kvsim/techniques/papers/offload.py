"""KV cache in host memory, copied to the GPU layer by layer before its use."""

from typing import ClassVar

from kvsim.frozen import frozen
from kvsim.graph import Number
from kvsim.techniques.axes.base import Part, Term
from kvsim.techniques.axes.placement import ROW_OR_COLUMN, HostPlacement
from kvsim.techniques.axes.settings import combine, make_axis, param
from kvsim.techniques.axes.storage import PACKED_ON_HOST, packed_on_host


@frozen
class Offload(Term):
    """Keeps part of the cache in host memory and prefetches it layer by layer.

    In row order, a batch passes through all layers and weights stay on the GPU. In column order,
    weights are streamed and each layer serves ``parts`` parts of the batch before the next one.

    References
    ----------
    .. [1] Y. Sheng et al., "FlexGen", ICML 2023, section 3.2.
    .. [2] C. Jiang et al., "KVPR", 2025, section 3.1 and figure 3a.
    """

    name: ClassVar[str] = "offload"
    evidence_kind: ClassVar[str] = PACKED_ON_HOST

    host_share: Number = param(1.0, "share of the cache on the host", high=1, whole=False)
    schedule: str = param("row", "order of layers and batch", choices=ROW_OR_COLUMN)
    bits: float = param(16, "bits per number on the host", choices=(4, 8, 16), gentler=1)
    parts: int = param(8, "parts of the batch in column order", low=1, high=1024)

    candidates = (
        {"host_share": make_axis(0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1)},
        {"host_share": 1.0, "bits": 4},
        *combine(host_share=(1.0,), schedule=("column",), bits=(16, 4)),
    )

    def pieces(self) -> tuple[Part, ...]:
        """Return a placement of a share of the cache on the host; by columns also all weights."""
        column = self.schedule == "column"
        place = HostPlacement(
            self.host_share, weights_host=1.0 if column else 0, parts=self.parts if column else 1
        )
        return (place, *packed_on_host(self.bits))
