"""Full-precision keys and values on the GPU: the baseline of all comparisons."""

from typing import ClassVar

from kvsim.frozen import frozen
from kvsim.techniques.axes.base import Part, Term


@frozen
class Full(Term):
    """Full FP16 KV cache on the GPU; attention reads all of it.

    References
    ----------
    .. [1] R. Pope et al., "Efficiently scaling transformer inference", MLSys 2023.
    """

    name: ClassVar[str] = "full"

    def pieces(self) -> tuple[Part, ...]:
        """Return no parts, as the defaults of all axes apply."""
        return ()
