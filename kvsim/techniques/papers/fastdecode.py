"""FastDecode: the cache stays in host memory and the CPU attends to it."""

from typing import ClassVar

from kvsim.frozen import frozen
from kvsim.techniques.axes.base import Part, Term
from kvsim.techniques.axes.placement import HostPlacement
from kvsim.techniques.axes.settings import param


@frozen
class Fastdecode(Term):
    """Runs attention on the CPU, alternating with the GPU so that both stay busy.

    The paper has two parts. One leaves each side idle while the other works, but reads the weights
    once, which is quicker where few sequences are decoded.

    References
    ----------
    .. [1] J. He and J. Zhai, "FastDecode", arXiv:2403.11421, section 4.
    """

    name: ClassVar[str] = "fastdecode"

    parts: int = param(2, "parts of the batch that alternate between GPU and CPU", low=1, high=1024)

    def pieces(self) -> tuple[Part, ...]:
        """Return a placement of the whole cache on the host, where the CPU attends."""
        return (HostPlacement(cpu_share=1, parts=self.parts),)
