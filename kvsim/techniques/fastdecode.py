"""FastDecode: the cache stays in host memory and the CPU attends to it."""

from dataclasses import dataclass
from typing import ClassVar

from kvsim.techniques.place import Place
from kvsim.techniques.terms import Part, Term


@dataclass(frozen=True)
class Fastdecode(Term):
    """CPU attention; two halves of the batch alternate so that GPU and CPU both stay busy.

    References
    ----------
    .. [1] J. He and J. Zhai, "FastDecode", arXiv:2403.11421, section 4.
    """

    name: ClassVar[str] = "fastdecode"

    def says(self) -> tuple[Part, ...]:
        """All of the cache with the CPU."""
        return (Place(cpu_share=1, parts=2),)
