"""FastDecode: the cache stays in host memory and the CPU attends to it."""

from typing import ClassVar

from kvsim.frozen import frozen
from kvsim.techniques.axes.base import Part, Term
from kvsim.techniques.axes.placement import HostPlacement
from kvsim.techniques.axes.settings import param


@frozen
class Fastdecode(Term):
    """Runs attention on the CPU, alternating with the GPU so that both stay busy.

    The paper divides the batch into two parts. With ``parts=1`` each side idles while the other
    works, but weights are read only once, which is faster for small batches.

    References
    ----------
    .. [1] J. He and J. Zhai, "FastDecode", arXiv:2403.11421, section 4.
    """

    name: ClassVar[str] = "fastdecode"

    parts: int = param(2, "parts of the batch that alternate between GPU and CPU", low=1, high=1024)

    def pieces(self) -> tuple[Part, ...]:
        """Return a placement with the whole cache on the host and attention on the CPU."""
        return (HostPlacement(cpu_share=1, parts=self.parts),)
