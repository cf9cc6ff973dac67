"""What an engine is asked to run, whichever engine it is."""

from dataclasses import replace

from kvsim.frozen import frozen
from kvsim.machines.hardware import GIB
from kvsim.machines.parallel import Parallelism
from kvsim.techniques.base import Technique
from kvsim.techniques.terms import Term

GB = 1e9
ROUNDING = 1e-6  # of a percent: what floating point loses


@frozen
class Served:
    """One replica as an engine should run it.

    Attributes
    ----------
    model
        As the engine finds it: a name at Hugging Face, or a path.
    weights
        Format of the weights, as ``--weights`` takes it.
    released
        Whether the model's published checkpoint has them in that format.
    spread
        How the replica is spread over its GPUs.
    max_model_len
        Longest sequence, prompt and generated tokens. [tokens]
    max_seqs, max_tokens, block_tokens
        Sequences of each rank and tokens of its passes at most; tokens per KV block.
    utilisation
        Share of each GPU's memory that the engine uses.
    weights_bytes, cache_bytes, gpu_bytes
        Of each GPU: weights, KV cache, and all of its memory. [B]
    nodes
        Machines that the replica's GPUs are in.
    share_of_free
        Whether ``utilisation`` is a share of what weights and the largest pass leave.
    prefix_caching
        Whether prompts share blocks.
    host_cache, nvme_cache
        Host memory and NVMe space for evicted blocks, of the whole replica. [B]
    apart
        Engines that only read prompts and engines that only decode; None if each does both.
    role
        Which of the two this engine does, ``prefill`` or ``decode``; empty if both.
    """

    model: str
    technique: Technique
    weights: str
    spread: Parallelism
    max_model_len: int
    max_seqs: int
    max_tokens: int
    block_tokens: int
    utilisation: float
    weights_bytes: float
    cache_bytes: float
    gpu_bytes: float
    prefix_caching: bool = False
    host_cache: float = 0.0
    released: bool = False
    nvme_cache: float = 0.0
    apart: tuple[int, int] | None = None
    role: str = ""
    share_of_free: bool = False
    nodes: int = 1

    @property
    def drafts(self) -> int:
        """Tokens drafted per round; 0 for techniques that draft none."""
        return int(self.technique.drafts)

    @property
    def terms(self) -> dict[str, Term]:
        """What the technique is composed of, by name."""
        return {term.name: term for term in self.technique.terms}

    @property
    def host_gib(self) -> float:
        """Host memory for evicted blocks of one engine, as each copy of attention is. [GiB]"""
        return round(self.host_cache / self.spread.dp / GIB, 2)

    @property
    def host_gb_each(self) -> int:
        """The share of each GPU's process in whole GB, which some engines take."""
        return round(self.host_cache / self.spread.gpus / GB)

    @property
    def host_gib_each(self) -> float:
        """The share of each GPU's process. [GiB]"""
        return round(self.host_cache / self.spread.gpus / GIB, 2)

    @property
    def nvme_gib_each(self) -> float:
        """NVMe space of each GPU's process. [GiB]"""
        return round(self.nvme_cache / self.spread.gpus / GIB, 2)

    @property
    def nvme_gb(self) -> int:
        """NVMe space in whole GB."""
        return round(self.nvme_cache / GB)

    def as_role(self, role: str) -> "Served":
        """One of its engines where prefill and decode are apart; prefixes are kept by prefill."""
        if role == "prefill":
            return replace(self, role=role, apart=None)
        return replace(
            self, role=role, apart=None, prefix_caching=False, host_cache=0.0, nvme_cache=0.0
        )

    @property
    def static_share(self) -> float:
        """Weights and KV cache as a share of each GPU's memory, rounded down."""
        return int(100 * (self.weights_bytes + self.cache_bytes) / self.gpu_bytes + ROUNDING) / 100

    @property
    def free_share(self) -> float:
        """The KV cache as a share of what everything else leaves, rounded down."""
        if self.share_of_free:
            return self.utilisation
        others = self.gpu_bytes * self.utilisation - self.cache_bytes
        return int(100 * self.cache_bytes / max(self.gpu_bytes - others, 1.0) + ROUNDING) / 100
