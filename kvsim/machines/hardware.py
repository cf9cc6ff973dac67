"""Machines and the software on them as plain data; ``kvsim.machines.keys`` has their files' keys.

A profile is one TOML file under ``hwprofiles/``; a software stack one under
``hwprofiles/stacks/``. Keys carry units; every number has a source. ``kvsim.machines.profiles``
reads them.
"""

from collections.abc import Mapping
from dataclasses import field

from kvsim.frozen import frozen
from kvsim.machines.mechanisms import (
    AttentionPath,
    CacheGrowth,
    ChosenTokens,
    FixedTimes,
    GpuSums,
    OffloadRuntime,
    PackedCache,
    WeightLoading,
    WorkingMemory,
)

GIB = 2.0**30  # [B]

DEFAULT_STACK = "vllm"
NODE = 8  # GPUs that an NVSwitch joins, if a profile does not say
RELEASED = "released"  # --weights in the format of the model's published checkpoint
"""The stack of an answer that names none: vLLM as measured on the card, on a card near it, or with
typical numbers. On cards left out of its fits it is half as far off as ``fused``."""

DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8", "int4", "fp4")
"""Number formats that a profile may state a rate for."""

KERNELS = (
    "gemm",
    "attention",
    "lowbit",
    "pointwise",
    "quantise",
    "topk",
    "gather",
    "copy",
    "relay",
    "cpu",
    "allreduce",
)
"""Kernel classes: ``lowbit`` is attention over a packed cache, ``gather`` moves rows inside GPU
memory, ``copy`` uses the host link with pinned memory, ``relay`` with the memory that the cache
lives in, which may be pageable; ``cpu`` is attention on the host."""

STANDS_FOR = {
    "prompt": "attention",
    "recurrence": "attention",
    "scan": "prompt",
    "index": "attention-fp8",
    "attention-fp8": "attention",
    "latent": "attention",
    "latent-fp8": "latent",
    "gemm-fp8": "gemm",
    "quantise-input": "pointwise",
    "gemm-fp8-block": "gemm-fp8",
    "gemm-int8": "gemm",
    "gemm-int4": "gemm",
    "experts": "gemm",
    "experts-fp8": "gemm-fp8",
    "experts-fp8-block": "experts-fp8",
    "experts-int8": "gemm-int8",
    "experts-int4": "gemm-int4",
}
"""Classes that a stack need not tell apart, and what stands for them: ``prompt`` is attention of a
prompt's queries, ``recurrence`` a state's step and ``scan`` its way over a prompt, ``index`` the
scores that sparse attention chooses by, ``quantise-input`` the input of fp8 products without
static scales, ``attention-fp8`` decode attention over an 8-bit cache
without scales, ``latent`` decode attention over cached latents (MLA), ``gemm-*`` products with
weights of that format, ``experts`` the routed experts' products."""


@frozen
class Link:
    """One thing that bytes move through."""

    bandwidth: float  # rate that large transfers reach [B/s]
    latency: float = 0.0  # time before the first byte arrives, per transfer [s]


@frozen
class Hardware:
    """One GPU, its host and the links between them."""

    name: str
    title: str
    flops: Mapping[str, float]  # dense rate by number format, fp32 accumulation [FLOP/s]
    cpu_flops: float  # host rate in fp32 [FLOP/s]
    links: Mapping[str, Link]  # hbm, dram, h2d, d2h, link (GPU to GPU, one direction)
    gpu_memory: float  # what the driver reports [B]
    host_memory: float  # [B]
    price: float | None  # [USD per GPU hour]
    basis: str  # "datasheet" or "measured"
    sources: Mapping[str, str]  # where each number comes from, by its key in the file
    notes: tuple[str, ...] = ()
    device: str = ""  # what it was measured on, if it was, as the driver names it
    date: str = ""  # when
    power: float | None = None  # rated, of one GPU [W]
    linked: int = NODE  # GPUs that `link` joins; beyond them data crosses the network


@frozen
class Kernel:
    """How far one class of kernels gets towards the roofline."""

    memory: float = 1.0  # share of a channel's bandwidth it reaches
    compute: float = 1.0  # share of the arithmetic peak it reaches
    floor: float = 0.0  # time it takes however small the work [s]
    half_size: float = 0.0  # rows of a product (attention: new tokens) that reach half of the peak
    tile: float = 0.0  # rows that a product computes together: others are rounded up (0: none)
    half_columns: float = 0.0  # columns of a product (prompts: queries in all heads) that reach
    # half of every rate
    added: float = 0.0  # share of the faster resources' time that adds to the slowest one's
    input_passes: float = 1.0  # times a product reads its input
    traffic: float = 0.0  # passes over the routed hidden states to gather and add them up
    narrow: float = 1.0  # times longer per byte and FLOP at a head dimension of 64 than at 128
    wide: float = 1.0  # the same at a head dimension of 256
    ungrouped: float = 1.0  # times longer with one query head per KV head
    padding: float = 0.0  # tokens per sequence that decode attention takes besides the cached ones
    unpacking: float = 0.0  # vector operations per cached number that is widened (0: the stack's)
    split: float = 0.0  # further floor of decode attention that splits long contexts [s]
    host: float = 0.0  # time of the host to issue an op of it, besides its launches [s]


@frozen
class Stack:
    """What the software adds to the hardware: rates of its kernels, and the mechanisms it has.

    The defaults are those of an ideal engine, so a stack states only what it has.
    """

    name: str
    title: str = ""
    basis: str = "datasheet"  # "datasheet", "carried over" or "calibrated"
    error: str = ""  # measured error on rows it did not see
    source: str = ""
    fit: str = ""  # the rows its free numbers were fitted to, and how well they fit
    device: str = ""  # what it was calibrated on, if by microbenchmarks
    version: str = ""  # of the engine
    extends: str = ""  # the stack whose numbers it has where it states none
    near: tuple[str, ...] = ()  # cards without rows of their own that it stands for
    cards: Mapping[str, "Stack"] = field(default_factory=dict)  # this engine by GPU profile
    date: str = ""  # when
    free: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # key -> bounds of a fit
    kernels: Mapping[str, Kernel] = field(default_factory=lambda: dict.fromkeys(KERNELS, Kernel()))
    time: FixedTimes = FixedTimes()
    cache: CacheGrowth = CacheGrowth()
    attention: AttentionPath = AttentionPath()
    packed_cache: PackedCache = PackedCache()
    selection: ChosenTokens = ChosenTokens()
    offload: OffloadRuntime = OffloadRuntime()
    sums: GpuSums = GpuSums()
    weights: WeightLoading = WeightLoading()
    memory: WorkingMemory = WorkingMemory()

    def on(self, gpu: str) -> "Stack":
        """The numbers that this engine has on a GPU: measured, of a card near it, or typical."""
        return self.cards.get(gpu, self)

    @property
    def eager(self) -> bool:
        """Whether the host issues op by op, and waits for a pass's tokens before the next one."""
        return any(kernel.host > 0 for kernel in self.kernels.values())

    def kernel(self, name: str) -> Kernel:
        """A kernel class, or the one that stands for it where this stack has none of its own."""
        while name not in self.kernels:
            name = STANDS_FOR[name]
        return self.kernels[name]
