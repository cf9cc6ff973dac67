"""Machines and the software on them as plain data, and what their files may say.

A profile is one TOML file under ``hwprofiles/``; a software stack one under
``hwprofiles/stacks/``. Keys carry units; every number has a source. ``kvsim.machines.profiles``
reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvsim.machines.schema import (
    AT_LEAST_ONE,
    EFFICIENCY,
    NON_NEGATIVE,
    POSITIVE,
    RATE,
    SHARE,
    SIZE,
    WHOLE,
    Number,
    Schema,
)

GIB = 2.0**30  # [B]

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
    "attention-fp8": "attention",
    "latent": "attention",
    "gemm-fp8": "gemm",
    "gemm-int8": "gemm",
    "gemm-int4": "gemm",
    "experts": "gemm",
    "experts-fp8": "gemm-fp8",
    "experts-int8": "gemm-int8",
    "experts-int4": "gemm-int4",
}
"""Classes that a stack need not tell apart, and what stands for them: ``prompt`` is attention of a
prompt's queries, ``attention-fp8`` decode attention over an 8-bit cache without scales, ``latent``
decode attention over cached latents (MLA), ``gemm-*`` products with weights of that format,
``experts`` the routed experts' products."""


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
    half_columns: float = 0.0  # columns of a product (prompts: queries in all heads) that do so
    added: float = 0.0  # share of the faster resources' time that adds to the slowest one's
    input_passes: float = 1.0  # times a product reads its input
    traffic: float = 0.0  # passes over the routed hidden states to gather and add them up
    narrow: float = 1.0  # times longer per byte and FLOP at a head dimension of 64 than at 128
    wide: float = 1.0  # the same at a head dimension of 256
    ungrouped: float = 1.0  # times longer with one query head per KV head
    padding: float = 0.0  # tokens per sequence that decode attention takes besides the cached ones
    split: float = 0.0  # further floor of decode attention that splits long contexts [s]


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

    def kernel(self, name: str) -> Kernel:
        """A kernel class, or the one that stands for it where this stack does not tell it apart."""
        while name not in self.kernels:
            name = STANDS_FOR[name]
        return self.kernels[name]


LINKS = ("hbm", "dram", "h2d", "d2h", "link")
"""What bytes move through: GPU and host memory, the host link's two directions, GPU to GPU."""

TENSOR_PEAK = ("compute.sm", "compute.clock_Hz", "compute.tensor_FLOP_per_clock_sm")
"""What the fp16 rate is checked against."""

HARDWARE_FILE = Schema(
    numbers={f"compute.{dtype}_FLOPps": RATE for dtype in DTYPES}
    | {"compute.cpu_fp32_FLOPps": RATE}
    | dict.fromkeys(TENSOR_PEAK, POSITIVE)
    | {"memory.gpu_capacity_B": SIZE, "memory.host_capacity_B": SIZE, "memory.l2_B": POSITIVE}
    | {f"{link}.bandwidth_Bps": RATE for link in LINKS}
    | {f"{link}.latency_s": NON_NEGATIVE for link in LINKS}
    | {"h2d.line_rate_Bps": RATE, "d2h.line_rate_Bps": RATE}
    | {"price.usd_per_hour": POSITIVE},
    required=frozenset(
        {"title", "basis", "compute.fp32_FLOPps", "compute.fp16_FLOPps", "compute.cpu_fp32_FLOPps"}
        | {"memory.gpu_capacity_B", "memory.host_capacity_B"}
        | {f"{link}.{key}" for link in LINKS for key in ("bandwidth_Bps", "latency_s")}
    ),
    texts=frozenset({"title", "basis", "device", "date", "price.date"}),
    lists=frozenset({"aliases", "notes"}),
    choices={"basis": ("datasheet", "measured")},
    together=(
        frozenset(TENSOR_PEAK),
        frozenset({"price.usd_per_hour", "price.date"}),
        frozenset({"device", "date"}),
    ),
)

STACK_NUMBERS: Mapping[str, tuple[str, Number]] = {
    "time.launch_s": ("launch", NON_NEGATIVE),
    "time.gap_s": ("gap", NON_NEGATIVE),
    "time.layer_s": ("layer", NON_NEGATIVE),
    "time.packed_layer_s": ("packed_layer", NON_NEGATIVE),
    "time.offloaded_layer_s": ("offloaded_layer", NON_NEGATIVE),
    "time.step_s": ("step", NON_NEGATIVE),
    "time.sequence_s": ("sequence", NON_NEGATIVE),
    "time.sync_s": ("sync", NON_NEGATIVE),
    "time.id_list_s": ("id_list", NON_NEGATIVE),
    "time.qr_s": ("qr", NON_NEGATIVE),
    "time.tile_s": ("tile", NON_NEGATIVE),
    "time.pointwise_launches": ("pointwise_launches", NON_NEGATIVE),
    "time.pointwise_passes": ("pointwise_passes", NON_NEGATIVE),
    "cache.append_passes": ("append_passes", NON_NEGATIVE),
    "cache.score_bytes": ("score_bytes", NON_NEGATIVE),
    "cache.unpack_bytes": ("unpack_bytes", NON_NEGATIVE),
    "cache.plain_passes": ("plain_passes", NON_NEGATIVE),
    "cache.merge_token_s": ("merge_token", NON_NEGATIVE),
    "cache.packed_passes": ("packed_passes", AT_LEAST_ONE),
    "cache.merge_passes": ("merge_passes", NON_NEGATIVE),
    "cache.resident_layers": ("resident_layers", WHOLE),
    "copies.overlap": ("overlap", SHARE),
    "copies.gather_row_s": ("gather_row", NON_NEGATIVE),
    "copies.split_achieved": ("split_achieved", SHARE),
    "copies.split_prompt": ("split_prompt", SHARE),
    "copies.index_bytes": ("index_bytes", POSITIVE),
    "sums.direct_share": ("direct_share", SHARE),
    "sums.direct_s": ("direct", NON_NEGATIVE),
    "sums.direct_hop_s": ("direct_hop", NON_NEGATIVE),
    "sums.direct_second_s": ("direct_second", NON_NEGATIVE),
    "sums.ring_s": ("ring", NON_NEGATIVE),
    "sums.ring_hop_s": ("ring_hop", NON_NEGATIVE),
    "sums.ring_share": ("ring_share", EFFICIENCY),
    "weights.unpack_ops": ("unpack_ops", NON_NEGATIVE),
    "memory.context_memory_B": ("context_memory", NON_NEGATIVE),
    "memory.weight_copies": ("weight_copies", AT_LEAST_ONE),
    "memory.cache_overhead": ("cache_overhead", AT_LEAST_ONE),
    "memory.prefill_chunk_tokens": ("prefill_chunk", AT_LEAST_ONE),
    "memory.packed_chunk_tokens": ("packed_chunk", NON_NEGATIVE),
    "memory.activation_passes": ("activation_passes", NON_NEGATIVE),
    "memory.logit_bytes": ("logit_bytes", POSITIVE),
}
STACK_FLAGS = {
    "cache.static_cache": "static_cache",
    "cache.repeat_kv": "repeat_kv",
    "cache.repeat_packed": "repeat_packed",
    "cache.flash_prompt": "flash_prompt",
    "copies.across_steps": "across_steps",
    "copies.blocking_store": "blocking_store",
    "copies.store_layer": "store_layer",
    "copies.tile_sync": "tile_sync",
    "copies.gather_sync": "gather_sync",
    "copies.one_shot_sum": "one_shot_sum",
    "memory.prompt_logits": "prompt_logits",
    "memory.old_cache": "old_cache",
}
KERNEL_NUMBERS = {
    "memory": ("memory", EFFICIENCY),
    "compute": ("compute", EFFICIENCY),
    "floor_s": ("floor", NON_NEGATIVE),
    "half_size": ("half_size", NON_NEGATIVE),
    "half_columns": ("half_columns", NON_NEGATIVE),
    "added": ("added", SHARE),
    "input_passes": ("input_passes", AT_LEAST_ONE),
    "traffic": ("traffic", NON_NEGATIVE),
    "narrow": ("narrow", POSITIVE),
    "wide": ("wide", POSITIVE),
    "ungrouped": ("ungrouped", POSITIVE),
    "padding": ("padding", NON_NEGATIVE),
    "split_s": ("split", NON_NEGATIVE),
}

STACK_FILE = Schema(
    numbers={key: rule for key, (_, rule) in STACK_NUMBERS.items()}
    | {
        f"kernel.{kernel}.{key}": rule
        for kernel in (*KERNELS, *STANDS_FOR)
        for key, (_, rule) in KERNEL_NUMBERS.items()
    },
    required=frozenset({"title", "basis", "error"}),
    texts=frozenset({"title", "basis", "error", "extends", "fit", "device", "date"}),
    flags=frozenset(STACK_FLAGS),
    choices={"basis": ("datasheet", "carried over", "calibrated")},
    together=(frozenset({"device", "date"}),),
)
