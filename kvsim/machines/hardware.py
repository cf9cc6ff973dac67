"""Machines and the software on them as plain data; ``kvsim.machines.keys`` has their files' keys.

A profile is one TOML file under ``hwprofiles/``; a software stack one under
``hwprofiles/stacks/``. Keys carry units; every number has a source. ``kvsim.machines.profiles``
reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

GIB = 2.0**30  # [B]

DEFAULT_STACK = "vllm"
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
scores that sparse attention chooses by, ``attention-fp8`` decode attention over an 8-bit cache
without scales, ``latent`` decode attention over cached latents (MLA), ``gemm-*`` products with
weights of that format, ``experts`` the routed experts' products."""


@dataclass(frozen=True, slots=True)
class Link:
    """One thing that bytes move through."""

    bandwidth: float  # rate that large transfers reach [B/s]
    latency: float = 0.0  # time before the first byte arrives, per transfer [s]


@dataclass(frozen=True)
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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True)
class Stack:
    """What the software adds to the hardware. The defaults are those of an ideal one."""

    name: str
    title: str = ""
    basis: str = "datasheet"  # "datasheet", "carried over" or "calibrated"
    error: str = ""  # what is known of the error on rows it did not see
    source: str = ""
    fit: str = ""  # the rows its free numbers were fitted to, and how well they fit
    device: str = ""  # what it was calibrated on, if by microbenchmarks
    version: str = ""  # of the engine
    near: tuple[str, ...] = ()  # cards without rows of their own that it stands for
    cards: Mapping[str, "Stack"] = field(default_factory=dict)  # this engine by GPU profile
    date: str = ""  # when
    free: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # key -> bounds of a fit
    kernels: Mapping[str, Kernel] = field(default_factory=lambda: dict.fromkeys(KERNELS, Kernel()))
    # time
    launch: float = 0.0  # host time to issue one kernel; the GPU waits for it [s]
    gap: float = 0.0  # GPU time between two kernels [s]
    layer: float = 0.0  # fixed time per layer [s]
    packed_layer: float = 0.0  # further time per layer for the unpacked tail of a packed cache [s]
    offloaded_layer: float = 0.0  # further fixed time per layer whose cache is on the host [s]
    step: float = 0.0  # fixed time per forward pass: sampling, bookkeeping, graph launch [s]
    sequence: float = 0.0  # further time per step and sequence: sampling, detokenising [s]
    sync: float = 0.0  # host time for one synchronisation [s]
    id_list: float = 0.0  # host time to list one head's salient tokens, K or V (0: on the GPU) [s]
    qr: float = 0.0  # time per matrix that a loop of library calls orthonormalises (0: batched) [s]
    tile: float = 0.0  # from a tile's synchronisation to the next tile's first copy [s]
    pointwise_launches: float = 5.0  # kernels per layer for norms, positions, residuals, activation
    pointwise_passes: float = 1.0  # times those kernels read and write the hidden states
    # cache
    static_cache: bool = False  # every step attends to and moves the cache's maximum length
    append_passes: float = 0.0  # passes over the cache to append a token (torch.cat: 2)
    repeat_kv: bool = False  # grouped heads are copied out to full width before attention
    unpack_arithmetic: float = 0.0  # vector operations per cached number that a kernel unpacks
    unpack_bytes: float = 0.0  # moved per packed number to unpack it outside the kernel [B]
    plain_passes: float = 0.0  # further passes of one new token over a whole fp16 cache
    merge_token: float = 0.0  # to join split attention's parts, per query and packed token [s]
    repeat_packed: bool = False  # grouped heads are copied out packed, and then read at full width
    packed_passes: float = 1.0  # passes over a packed cache that its attention makes in all
    merge_passes: float = 0.0  # passes to join loaded and recomputed parts of a layer's cache
    score_bytes: float = 0.0  # bytes moved per attention score (0: scores stay on chip) [B]
    flash_prompt: bool = False  # the prompt's scores stay on chip unless a technique needs them
    resident_layers: int = 0  # first layers whose cache stays on the GPU under offloading
    # copies between host and GPU
    overlap: float = 1.0  # share of a copy of the cache that runs beside compute
    store_layer: bool = False  # every step copies a layer's whole cache back to the host
    across_steps: bool = True  # the next step's first copies start before this step ends
    blocking_store: bool = False  # the host waits for copies of new tokens to the host
    tile_sync: bool = False  # the whole device synchronises after every layer and tile
    gather_row: float = 0.0  # extra time per row gathered from host memory [s]
    gather_sync: bool = False  # the host chooses the rows, so the GPU's indices must reach it first
    split_achieved: float = 1.0  # share of KVPR's optimal split that the runtime really uses
    split_prompt: float = 0.0  # share of the prompt that KVPR recomputes instead (0: the optimum)
    index_bytes: float = 4.0  # per stored token index [B]
    one_shot_sum: bool = False  # GPUs read all others' hidden states at once, not in a ring
    # sums in which GPUs read one another's memory, in one shot or two; with a share above 0 the
    # quickest of them and the ring is taken
    direct_share: float = 0.0  # share of the link's rate that they reach (0: the engine has none)
    direct: float = 0.0  # time of a one-shot sum however small [s]
    direct_hop: float = 0.0  # further time per other GPU and shot [s]
    direct_second: float = 0.0  # further time of a two-shot sum [s]
    ring: float = 0.0  # time of a ring however small, besides the link's latency [s]
    ring_hop: float = 0.0  # time per transfer of a ring, instead of the link's latency [s]
    ring_share: float = 1.0  # share of the link's rate that a ring reaches
    # weights
    unpack_ops: float = 0.0  # vector operations per packed weight that its loading does not hide
    widen_bytes: float = 0.0  # moved per packed weight to widen it before its product [B]
    # memory
    context_memory: float = 0.0  # driver, libraries, workspaces [B]
    old_cache: bool = False  # a step's caller keeps the cache that torch.cat replaces
    weight_copies: float = 1.0  # copies of the weights kept
    cache_overhead: float = 1.0  # allocated over used cache
    prefill_chunk: float = 1e18  # tokens whose activations are alive at once in prefill [tokens]
    packed_chunk: float = 0.0  # the same where the cache is packed (0: no difference) [tokens]
    activation_passes: float = 1.0  # hidden-state-sized buffers alive at once, beyond the widest
    prompt_logits: bool = False  # the LM head runs over every prompt token
    logit_bytes: float = 4.0  # per logit kept [B]

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
