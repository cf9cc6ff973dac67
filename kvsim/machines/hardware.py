"""Hardware and software stacks as plain data; see ``kvsim.machines.schema`` for the keys of files.

A profile is one TOML file under ``hwprofiles/``; a software stack one under
``hwprofiles/stacks/``. Keys carry units; every number has a source. ``kvsim.machines.profiles``
reads them.
"""

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from typing import Annotated

from kvsim.frozen import frozen
from kvsim.graph import Number
from kvsim.machines.prices import Price


@frozen
class Condition:
    """A condition on the numbers of a file.

    Attributes
    ----------
    expected
        Description of valid values, for messages.
    holds
        Returns whether a value is valid.
    """

    expected: str
    holds: Callable[[float], bool]


# A number other than 0 stays within these bounds, so that none overflows later.
LOWEST, HIGHEST = 1e-18, 1e18
POSITIVE = Condition("above 0 and at most 1e18", lambda x: LOWEST <= x <= HIGHEST)
NON_NEGATIVE = Condition(
    "of 0 or more and at most 1e18", lambda x: x == 0 or LOWEST <= x <= HIGHEST
)
AT_LEAST_ONE = Condition("of 1 or more and at most 1e18", lambda x: 1 <= x <= HIGHEST)
EFFICIENCY = Condition("above 0 and at most 1", lambda x: LOWEST <= x <= 1)
SHARE = Condition("from 0 to 1", lambda x: 0 <= x <= 1)
WHOLE = Condition("that is whole and from 0 to 1e6", lambda x: 0 <= x <= 1e6 and x % 1 == 0)

# The fields of a stack's mechanisms and kernels: what a key of the file adds to the field's name,
# which is its unit, and what its value must be.
Seconds = Annotated[float, "_s", NON_NEGATIVE]
Tokens = Annotated[float, "_tokens", NON_NEGATIVE]
Bytes = Annotated[float, "_B", NON_NEGATIVE]
Rate = Annotated[float, "_Bps", NON_NEGATIVE]
NonNegative = Annotated[float, "", NON_NEGATIVE]
Positive = Annotated[float, "", POSITIVE]
Factor = Annotated[float, "", AT_LEAST_ONE]
Efficiency = Annotated[float, "", EFFICIENCY]
Share = Annotated[float, "", SHARE]
Whole = Annotated[int, "", WHOLE]


@frozen
class FixedTimes:
    """Times that do not depend on how much is computed, and the small kernels of a layer.

    Attributes
    ----------
    launch
        Time that the host takes to issue one kernel, for which the GPU waits. [s]
    issue
        Time that the host takes to issue one kernel of a pass that reads prompts, where only such
        passes are issued kernel by kernel. The host runs ahead of the GPU, so that the pass takes
        no less than issuing all of its kernels. [s]
    graph
        Largest number of tokens of a pass that is replayed as a CUDA graph and not issued. [tokens]
    gap
        Idle time of the GPU between two kernels. [s]
    layer
        Fixed time per layer. [s]
    routing
        Time per layer to choose the experts of each token from their scores. [s]
    latent
        Additional time of the small kernels in a layer with latent attention. [s]
    step
        Fixed time per forward pass, such as sampling, bookkeeping and launching a graph. [s]
    sampling
        Time that the GPU takes per pass to choose tokens, in addition to reading the logits. [s]
    sequence
        Additional time per forward pass and sequence, such as sampling and detokenising. [s]
    beside_step
        Time that the host works per forward pass while the GPU computes; a pass takes no less. [s]
    beside_sequence
        Such time per sequence of the pass, in addition to ``beside_step``. [s]
    quantise
        Time of the kernel that writes a product's input in 8 bits with a known scale. [s]
    sync
        Time that the host takes for one synchronisation with the GPU. [s]
    prompt_pass
        Most prompt tokens in one pass; longer prompts take several, each of which reads the weights
        again. 0 to read all prompts in one pass. [tokens]
    stage
        Time per pass to hand its hidden states to the next pipeline stage, on another GPU. [s]
    stage_overlap
        Share of the other pipeline stages' work that overlaps with the next pass, from 0 to 1.
    counted_launches
        Whether each op counts as many kernels as kvsim's own implementations launch for it.
    pointwise_launches
        Number of kernels per layer for norms, positions, residuals and activations.
    wide_norm_launches
        Number of additional kernels per layer for norms over all heads, which tensor-parallel GPUs
        compute from the sums of their heads' squares; 0 for engines without this work.
    pointwise_passes
        How often the pointwise kernels of a layer read and write the hidden states.
    asynchronous
        Whether a pass is issued before the tokens of the previous one are known.
    """

    launch: Seconds = 0.0
    issue: Seconds = 0.0
    graph: Tokens = 0.0
    gap: Seconds = 0.0
    layer: Seconds = 0.0
    routing: Seconds = 0.0
    latent: Seconds = 0.0
    step: Seconds = 0.0
    sampling: Seconds = 0.0
    sequence: Seconds = 0.0
    beside_step: Seconds = 0.0
    beside_sequence: Seconds = 0.0
    quantise: Seconds = 0.0
    sync: Seconds = 0.0
    prompt_pass: Tokens = 0.0
    stage: Seconds = 0.0
    stage_overlap: Share = 1.0
    counted_launches: bool = False
    pointwise_launches: NonNegative = 5.0
    wide_norm_launches: NonNegative = 0.0
    pointwise_passes: NonNegative = 1.0
    asynchronous: bool = False


@frozen
class ServerWork:
    """Overheads of an HTTP server and its clients, which an offline run does not have.

    Attributes
    ----------
    token
        Host time per token that is sent to a client. [s]
    prompt
        Host time per prompt of a pass: it is read, tokenised and queued. [s]
    first
        Time from a request until its engine has it, plus that from its first token until the client
        has it; no pass waits for this. [s]
    tokenise
        Time per token of the prompt before its engine has it; no pass waits for this. [s]
    """

    token: Seconds = 0.0
    prompt: Seconds = 0.0
    first: Seconds = 0.0
    tokenise: Seconds = 0.0

    def request_overhead(self, prompt: Number) -> Number:
        """Compute the time that a request spends outside the engine, up to its first token.

        Parameters
        ----------
        prompt
            Length of the prompt. [tokens]

        Returns
        -------
        number
            Time that TTFT and latency contain besides queueing and passes. [s]
        """
        return self.first + self.tokenise * prompt


@frozen
class CacheGrowth:
    """How a sequence's cache grows by a token.

    Ideally a token is written in place. ``torch.cat`` copies the cache in two passes and may keep
    the old one, and a static cache has its full length from the start.

    Attributes
    ----------
    append_passes
        Passes over the cache to append a token; 2 for ``torch.cat``.
    keeps_old
        Whether the caller keeps the old cache during a step.
    static
        Whether every step attends to and copies the cache's full length.
    """

    append_passes: NonNegative = 0.0
    keeps_old: bool = False
    static: bool = False


@frozen
class AttentionPath:
    """Memory traffic of attention besides the cache; ideally, scores stay on the chip.

    Attributes
    ----------
    score_bytes
        Traffic per attention score; 0 if scores stay on the chip. [B]
    score_memory
        Memory per attention score otherwise: fp16, its softmax in fp32, and that in fp16. [B]
    flash_prompt
        Whether the prompt's scores stay on the chip unless a technique needs them.
    repeat_kv
        Whether grouped KV heads are copied to the number of query heads before attention.
    """

    score_bytes: NonNegative = 0.0
    score_memory: Annotated[float, "_B", POSITIVE] = 8.0
    flash_prompt: bool = False
    repeat_kv: bool = False


@frozen
class PackedCache:
    """How a low-bit cache is packed and read; the ideal kernel reads the packed cache directly.

    Attributes
    ----------
    layer
        Additional time per layer for the unpacked tail of a packed cache. [s]
    unpack_ops
        Vector operations per cached number to unpack it in a kernel.
    unpack_each
        Whether the cache is unpacked for every new token, not once for all.
    unpack_bytes
        Traffic per packed number to unpack it outside the kernel. [B]
    passes
        Times that attention reads a packed cache.
    plain_passes
        Additional times that one new token's attention reads a whole fp16 cache.
    merge_token
        Time to join the parts of split attention, per query and packed token. [s]
    repeat_kv
        Whether packed KV heads are copied to the number of query heads, and read so.
    chunk
        ``WorkingMemory.prefill_chunk`` for packed caches whose heads are not grouped; 0 for no
        difference. [tokens]
    scored_prompt
        Whether KIVI attends to prompts with unfused kernels.
    qr
        Time per matrix of a QR decomposition by library calls in a loop; 0 if batched. [s]
    """

    layer: Seconds = 0.0
    unpack_ops: NonNegative = 0.0
    unpack_each: bool = False
    unpack_bytes: NonNegative = 0.0
    passes: Factor = 1.0
    plain_passes: NonNegative = 0.0
    merge_token: Seconds = 0.0
    repeat_kv: bool = False
    chunk: Tokens = 0.0
    scored_prompt: bool = False
    qr: Seconds = 0.0


@frozen
class ChosenTokens:
    """How the tokens that a technique selects are listed and fetched from host memory.

    Attributes
    ----------
    gather_row
        Additional time per row gathered from host memory. [s]
    gather_sync
        Whether the host gathers the rows, so that the GPU's indices must reach it first.
    index_bytes
        Size of a stored token index. [B]
    id_list
        Host time to list one head's salient tokens, for K or V; 0 if done on the GPU. [s]
    """

    gather_row: Seconds = 0.0
    gather_sync: bool = False
    index_bytes: Positive = 4.0
    id_list: Seconds = 0.0


@frozen
class OffloadRuntime:
    """How copies between host and GPU overlap with compute if the cache is in host memory.

    Attributes
    ----------
    layer
        Additional fixed time per layer whose cache is in host memory. [s]
    host
        Host time per such layer to issue its copies. [s]
    overlap
        Share of a copy of the cache that runs beside compute, from 0 to 1.
    across_steps
        Whether the next step's first copies start before this step ends.
    blocking_store
        Whether the host waits for the copies of new tokens to host memory.
    stream
        Tokens of a pass from which on weights in host memory are copied to the GPU; for fewer
        tokens the CPU computes with them. 0 for never. [tokens]
    pageable
        Highest rate of copies of such weights if they are mapped from their file and thus not
        pinned; 0 for pinned weights. [B/s]
    second_socket
        Share of each further CPU socket's memory bandwidth that is used, from 0 to 1.
    weight_buffers
        Buffers on the GPU for streamed weights, each the size of a layer.
    resident_layers
        Number of first layers whose cache stays on the GPU.
    tile_sync
        Whether the whole device synchronises after every layer and part of the batch.
    tile
        Time from such a synchronisation to the next part's first copy. [s]
    merge_passes
        Times that a layer's cache is read or written to join loaded and recomputed parts.
    split_prompt
        Share of the prompt that KVPR recomputes, from 0 to 1; 0 for the optimum.
    """

    layer: Seconds = 0.0
    host: Seconds = 0.0
    overlap: Share = 1.0
    across_steps: bool = True
    blocking_store: bool = False
    stream: Tokens = 0.0
    pageable: Rate = 0.0
    second_socket: Share = 0.0
    weight_buffers: Factor = 2.0
    resident_layers: Whole = 0
    tile_sync: bool = False
    tile: Seconds = 0.0
    merge_passes: NonNegative = 0.0
    split_prompt: Share = 0.0


@frozen
class GpuSums:
    """How GPUs add up hidden states (all-reduce); ideally a ring at the link's rate.

    In direct sums GPUs read each other's memory, in one shot or two. If ``direct_share`` is above
    0, the fastest of one shot, two shots and a ring is used.

    Attributes
    ----------
    one_shot
        Whether every GPU reads the hidden states of all others at once, without a ring.
    direct_share
        Share of the link's rate that direct sums reach; 0 if the engine has none.
    direct
        Least time of a one-shot sum. [s]
    direct_hop
        Additional time per other GPU and shot. [s]
    direct_second
        Additional time of a two-shot sum. [s]
    ring
        Least time of a ring, in addition to the link's latency. [s]
    ring_hop
        Time per transfer of a ring, instead of the link's latency. [s]
    ring_share
        Share of the link's rate that a ring reaches.
    exchange
        Least time to send tokens to the GPUs of their experts, or back. [s]
    sorted_out
        Traffic of a routed token that belongs to another GPU's experts, as a share of that of one
        that does not.
    popularity
        How many times as often the most popular expert is chosen as the least popular one.
    skew
        Growth, per doubling of the GPUs that share the experts, of the tokens of the busiest GPU
        over the average; 0 for an imbalance that does not depend on the number of GPUs.
    """

    one_shot: bool = False
    direct_share: Share = 0.0
    direct: Seconds = 0.0
    direct_hop: Seconds = 0.0
    direct_second: Seconds = 0.0
    ring: Seconds = 0.0
    ring_hop: Seconds = 0.0
    ring_share: Efficiency = 1.0
    exchange: Seconds = 0.0
    sorted_out: Share = 0.0
    popularity: Factor = 1.0
    skew: NonNegative = 0.0


@frozen
class DraftRounds:
    """Costs of a round of speculative decoding besides its passes; zero in the ideal.

    Attributes
    ----------
    draft
        Fixed time per draft pass, to choose a token and prepare the next input; 0 for that of any
        pass. [s]
    round
        Additional time per round, to compare drafts and discard rejected ones. [s]
    tree
        Additional time per round with a tree of drafts, for its mask and best path. [s]
    sequence
        Additional time per round and sequence. [s]
    shared_experts
        Share of a further token's experts that the first token of its sequence in the pass calls
        too; at 0 tokens choose experts independently.
    widest
        Most branches from which a tree may continue; 0 for any number, 1 for chains only.
    """

    draft: Seconds = 0.0
    round: Seconds = 0.0
    tree: Seconds = 0.0
    sequence: Seconds = 0.0
    shared_experts: Share = 0.0
    widest: NonNegative = 0.0


@frozen
class WeightLoading:
    """Costs of weights besides reading them once.

    Attributes
    ----------
    unpack_ops
        Vector operations per packed weight that are not hidden by loading it.
    unpack_bytes
        Traffic per packed weight to widen it before its product. [B]
    unpack_rows
        Rows of a product from which on weights are widened before it; 0 for always.
    copies
        Copies of the weights in memory.
    gguf
        Whether weights are those of a GGUF file.
    half_accumulation
        Whether fp16 products accumulate in fp16.
    int8_products
        Whether products of many rows with packed weights run in int8.
    """

    unpack_ops: NonNegative = 0.0
    unpack_bytes: NonNegative = 0.0
    unpack_rows: NonNegative = 0.0
    copies: Factor = 1.0
    gguf: bool = False
    half_accumulation: bool = False
    int8_products: bool = False


@frozen
class WorkingMemory:
    """Memory that an engine needs in addition to weights and caches.

    Attributes
    ----------
    context_memory
        Memory of the driver, of libraries and of their workspaces. [B]
    prefill_chunk
        Number of prompt tokens whose activations are in memory at once. [tokens]
    activation_passes
        Number of buffers of the size of the hidden states that are in memory together with the
        largest activation.
    prompt_logits
        Whether the LM head computes logits for every token of a prompt, not only for the last one.
    logit_bytes
        Size of a stored logit. [B]
    reserved_sequences
        Number of sequences that are sampled in the pass for which the engine keeps memory free; its
        prompts fill the pass. 0 for engines that do not measure their largest pass at the start.
    sampling_bytes
        Memory per logit of those sequences while they are sampled. [B]
    share_of_free
        Whether the memory share that the user gives is one of the memory that weights and the
        largest pass leave free (TensorRT-LLM), and not of the whole memory (vLLM).
    share_is_static
        Whether that share holds only weights and caches (SGLang), so that passes and the context
        use the rest of the memory.
    """

    context_memory: Bytes = 0.0
    prefill_chunk: Annotated[float, "_tokens", AT_LEAST_ONE] = 1e18
    activation_passes: NonNegative = 1.0
    prompt_logits: bool = False
    logit_bytes: Positive = 4.0
    reserved_sequences: NonNegative = 0.0
    sampling_bytes: NonNegative = 0.0
    share_of_free: bool = False
    share_is_static: bool = False


GIB = 2.0**30  # [B]

NVME_READ_RATE, NVME_WRITE_RATE = 6.8e9, 4.0e9
"""Typical, and assumed where nothing else is given: one PCIe 4.0 x4 drive's sequential rates, as in
the datasheet of Samsung's PM9A3 (6,800 and 4,000 MB/s). [B/s]"""
NODE = 8  # GPUs that an NVSwitch joins, if a profile does not say
RELEASED = "released"  # --weights in the format of the model's published checkpoint
DEFAULT_STACK = "vllm"
"""The stack of an answer that names none: vLLM as measured on the card, on a card near it, or with
typical numbers. On cards left out of its fits it is half as far off as ``fused``."""

ARITHMETIC_DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8", "int4", "fp4")
"""Number formats that a profile may state a rate for."""

HALF_ACCUMULATION = "fp16acc"
"""Products of fp16 that are summed in fp16, which is faster than in fp32 on some cards."""

KERNEL_CLASSES = (
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
    "sparse-prompt": "prompt",
    "index": "attention-fp8",
    "attention-fp8": "attention",
    "attention-masked": "attention",
    "latent": "attention",
    "latent-fp8": "latent",
    "gemm-fp8": "gemm",
    "quantise-input": "pointwise",
    "gemm-fp8-block": "gemm-fp8",
    "gemm-int8": "gemm",
    "gemm-int4": "gemm",
    "gemm-gguf": "gemm-int4",
    "gemm-awq": "gemm-int4",
    "gemm-nvfp4": "gemm-fp8",
    "gemm-mxfp4": "gemm-int4",
    "gemm-mxfp8": "gemm-fp8",
    "experts": "gemm",
    "experts-fp8": "gemm-fp8",
    "experts-fp8-block": "experts-fp8",
    "experts-nvfp4": "gemm-nvfp4",
    "experts-mxfp4": "experts-int4",
    "experts-mxfp8": "experts-fp8",
    "experts-int8": "gemm-int8",
    "experts-int4": "gemm-int4",
    "experts-gguf": "gemm-gguf",
    "host": "cpu",
    "experts-awq": "experts-int4",
    "cache-copy": "attention",
}
"""Classes that a stack need not tell apart, and what stands for them: ``prompt`` is attention of a
prompt's queries, ``sparse-prompt`` that to chosen keys, ``recurrence`` a state's step and ``scan``
its way over a prompt, ``index`` the scores that sparse attention chooses by, ``quantise-input`` the
input of fp8 products without static scales, ``attention-fp8`` decode attention over an 8-bit cache
without scales, ``attention-masked`` that of passes replayed as graphs, whose room is masked,
``latent`` decode attention over cached latents (MLA), ``gemm-*`` products with weights of that
format, ``experts`` the routed experts' products, ``cache-copy`` the copies of a cache that software
makes before it attends (torch.cat, repeat_kv)."""


@frozen
class Link:
    """A memory or link that bytes move through.

    Attributes
    ----------
    bandwidth
        Rate that large transfers reach. [B/s]
    latency
        Time before the first byte of a transfer arrives. [s]
    """

    bandwidth: float
    latency: float = 0.0


@frozen
class Hardware:
    """One GPU, its host and the links between them.

    Attributes
    ----------
    name, title
        Name of the profile, and name in reports.
    flops
        Dense rate by number format, with fp32 accumulation. [FLOP/s]
    cpu_flops
        Rate of the host in fp32. [FLOP/s]
    links
        Memories and links by name: hbm, dram, h2d, d2h, and link (GPU to GPU, one direction).
    gpu_memory
        Memory of the GPU as its driver reports it. [B]
    host_memory
        Memory of the host. [B]
    price
        Price; None if unknown. [USD per GPU hour]
    listed
        Seller whose listed price it is; None if the profile states the price or it is unknown.
    basis
        "datasheet" or "measured".
    sources
        Where each number comes from, by its key in the file.
    notes
        Remarks for the report.
    device
        Name, as its driver has it, of the device that was measured; empty if none was.
    date
        Date of the measurement.
    power
        Rated power of one GPU; None if unknown. [W]
    sockets
        CPU sockets of the host, each with its own memory; the link ``dram`` is all of them
        together.
    host
        Profile of the host, if it is not the card's usual one.
    units
        Number of streaming multiprocessors; 0 if unknown.
    linked
        Number of GPUs that ``link`` joins; beyond these, data crosses the network.
    disk_memory
        Capacity of a drive of the host; 0 for no drive. [B]
    sustained
        Share of the rates of arithmetic that is left under the power limit, which lowers the clock
        of a GPU that computes for longer than ``boost``.
    boost
        Time for which a GPU that was idle computes at its full rates. [s]
    """

    name: str
    title: str
    flops: Mapping[str, float]
    cpu_flops: float
    links: Mapping[str, Link]
    gpu_memory: float
    host_memory: float
    price: float | None
    basis: str
    sources: Mapping[str, str]
    notes: tuple[str, ...] = ()
    device: str = ""
    date: str = ""
    power: float | None = None
    sockets: int = 1
    host: str = ""
    units: float = 0.0
    linked: int = NODE
    disk_memory: float = 0.0
    sustained: float = 1.0
    boost: float = 0.0
    listed: Price | None = None


@frozen
class Kernel:
    """Efficiency of a class of kernels relative to the roofline.

    Attributes
    ----------
    memory
        Share of the memory bandwidth that it reaches.
    compute
        Share of the arithmetic peak that it reaches.
    floor
        Least time, however small the work. [s]
    launch
        Host time per kernel of an op, besides the launch itself; host code that runs kernel by
        kernel. [s]
    half_size
        Rows of a product (attention: new tokens) at which it reaches half of the peak.
    tile_rows
        Rows that a product computes together, to a multiple of which rows are rounded up; 0 for
        none.
    unit_rate
        Highest rate at which one streaming multiprocessor loads; 0 for no limit. [B/s]
    tile_columns
        Columns of a tile of ``tile_rows`` rows; the multiprocessors compute tiles in waves.
    half_columns
        Columns of a product at which it reaches half of every rate. For prompts, tokens by which
        the queries of all heads can be divided over the multiprocessors.
    added
        Share of the faster resources' time that is added to the slowest one's.
    input_passes
        Times that a product reads its input, or a scan the state of each chunk.
    traffic
        Times that routed hidden states are read or written to gather and add them up.
    expert
        Time per expert on a GPU, chosen or not, to count its tokens and list its tiles. [s]
    narrow, wide
        Factor on the time per byte and FLOP at head dimensions of 64 and 256, relative to 128.
    ungrouped
        Factor on the time with one query head per KV head.
    padding
        Tokens per sequence that decode attention takes in addition to the cached ones. [tokens]
    unpack_ops
        Vector operations per cached number that is widened; 0 for ``PackedCache.unpack_ops``.
    split
        Additional least time of decode attention that splits long contexts. [s]
    host
        Host time to issue an op of the class, besides its launches. [s]
    walk
        Least time per cached token, for kernels in which one block of a head's queries reads a
        whole cache; 0 for kernels that split long caches. Of a product, least time per input where
        blocks go through all inputs; of a scan, per token of a sequence. [s]
    unit_blocks
        Blocks of decode attention that a multiprocessor runs at once, for kernels that do not
        split caches once the blocks, one per sequence and KV head, nearly fill the GPU; 0 for
        kernels whose work is always spread evenly.
    """

    memory: Efficiency = 1.0
    compute: Efficiency = 1.0
    floor: Seconds = 0.0
    half_size: NonNegative = 0.0
    tile_rows: NonNegative = 0.0
    unit_rate: Rate = 0.0
    tile_columns: NonNegative = 0.0
    half_columns: NonNegative = 0.0
    added: Share = 0.0
    input_passes: NonNegative = 1.0
    traffic: NonNegative = 0.0
    expert: Seconds = 0.0
    narrow: Positive = 1.0
    wide: Positive = 1.0
    ungrouped: Positive = 1.0
    padding: NonNegative = 0.0
    unpack_ops: NonNegative = 0.0
    split: Seconds = 0.0
    host: Seconds = 0.0
    launch: Seconds = 0.0
    walk: Seconds = 0.0
    unit_blocks: NonNegative = 0.0


@frozen
class Checked:
    """Errors of a stack in a measured run on one card, on requests that the fit did not use.

    Attributes
    ----------
    device
        Name of the GPU's profile.
    model
        Name of the model that ran.
    technique
        Technique that ran.
    rows
        Number of requests or load tests that were compared.
    off
        By kind of number (ttft, tpot, latency): the median and the 90th percentile of the relative
        error, and the two factors on a predicted time between which 80 % of measured times lie.
    """

    device: str
    model: str
    technique: str
    rows: int
    off: Mapping[str, tuple[float, float, float, float]]


@frozen
class Stack:
    """A software stack: the efficiency of its kernels and the costs of its mechanisms.

    The defaults are those of an ideal engine, so a stack's file states only what differs from it.

    Attributes
    ----------
    name, title
        Name of the stack, as ``--stack`` takes it, and its name in reports.
    basis
        Where the numbers come from: "datasheet", "carried over" from other cards, or "calibrated".
    error
        Errors of the stack on measurements that it was not fitted to, in words; empty if unknown.
    source
        Sources of the numbers, one per line.
    fit
        Which measurements the numbers were fitted to and how well, in words.
    device
        Device of the microbenchmarks that it was calibrated with; empty if there were none.
    version
        Version of the engine.
    engine
        Name of the engine, for a stack of one version or card; empty if it is that of the stack.
    unmeasured
        Why the numbers of another version are used; empty if those of the version itself are.
    extends
        Name of the stack whose numbers apply where this one states none.
    checked
        Errors in a measured run on the stack's card; None if there was none.
    near
        GPU profiles without measurements of their own for which these numbers are used.
    cards
        Stacks of the same engine by GPU profile.
    date
        Date of the calibration.
    free
        Lower and upper bounds of the numbers that a fit may change, by key.
    kernels
        Efficiency of each kernel class.
    time, server, cache, attention, packed_cache, selection, offload, sums, drafts, weights, memory
        Costs of the engine's mechanisms.
    """

    name: str
    title: str = ""
    basis: str = "datasheet"
    error: str = ""
    source: str = ""
    fit: str = ""
    device: str = ""
    version: str = ""
    engine: str = ""
    unmeasured: str = ""
    extends: str = ""
    checked: Checked | None = None
    near: tuple[str, ...] = ()
    cards: Mapping[str, "Stack"] = field(default_factory=dict)
    date: str = ""
    free: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    kernels: Mapping[str, Kernel] = field(
        default_factory=lambda: dict.fromkeys(KERNEL_CLASSES, Kernel())
    )
    time: FixedTimes = FixedTimes()
    server: ServerWork = ServerWork()
    cache: CacheGrowth = CacheGrowth()
    attention: AttentionPath = AttentionPath()
    packed_cache: PackedCache = PackedCache()
    selection: ChosenTokens = ChosenTokens()
    offload: OffloadRuntime = OffloadRuntime()
    sums: GpuSums = GpuSums()
    drafts: DraftRounds = DraftRounds()
    weights: WeightLoading = WeightLoading()
    memory: WorkingMemory = WorkingMemory()

    def for_gpu(self, gpu: str) -> "Stack":
        """Return the stack with this engine's numbers for a GPU.

        Parameters
        ----------
        gpu
            Name of the GPU.

        Returns
        -------
        Stack
            Measured there, taken from a card near it, or typical.
        """
        return self.cards.get(gpu, self)

    @property
    def family(self) -> str:
        """Name of the engine, without version and card."""
        return self.engine or self.name.partition("@")[0]

    @property
    def offline(self) -> "Stack":
        """The same stack for offline runs: requests in one process, without a server."""
        return replace(self, server=ServerWork())

    @property
    def eager(self) -> bool:
        """Whether the host launches op by op and waits for a pass's tokens before the next pass."""
        return any(kernel.host > 0 or kernel.launch > 0 for kernel in self.kernels.values())

    def kernel(self, name: str) -> Kernel:
        """Return the efficiency of a kernel class.

        Parameters
        ----------
        name
            Name of the kernel class, one of ``KERNEL_CLASSES``.

        Returns
        -------
        Kernel
            The stack's numbers for it, or for the class that replaces it (``STANDS_FOR``).
        """
        while name not in self.kernels:
            name = STANDS_FOR[name]
        return self.kernels[name]
