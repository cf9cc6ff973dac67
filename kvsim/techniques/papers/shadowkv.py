"""ShadowKV: low-rank keys on the GPU, values on the host, chunks chosen by landmarks."""

from typing import ClassVar

from kvsim.frozen import frozen
from kvsim.graph import Number
from kvsim.techniques.landmarks import Landmarks
from kvsim.techniques.lowrank import Lowrank
from kvsim.techniques.place import Place
from kvsim.techniques.settings import param
from kvsim.techniques.terms import Part, Term


@frozen
class Shadowkv(Term):
    """The keys of chosen chunks are multiplied out while their values are being fetched.

    References
    ----------
    .. [1] H. Sun et al., "ShadowKV: KV cache in shadows for high-throughput long-context LLM
       inference", ICML 2025, section 4: rank 160, chunks of 8, 48 outlier chunks.
    """

    name: ClassVar[str] = "shadowkv"

    budget: Number = param(1024, "tokens attended to [tokens]", low=1, high=1e7, share=True)
    rank: int = param(160, "rank of the prompt's keys", low=1, high=4096)
    chunk: int = param(8, "tokens of a chunk", low=1, high=1e4)
    outliers: int = param(48, "chunks that always stay on the GPU", high=1e5)

    def says(self) -> tuple[Part, ...]:
        """Its own selection and keys, and values on the host."""
        landmarks = Landmarks(self.budget, self.chunk, self.outliers)
        return landmarks, Lowrank(self.rank), Place(values_host=1)
