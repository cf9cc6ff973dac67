"""Keys, units and bounds of the files of hardware profiles and software stacks."""

import re
from collections.abc import Mapping

from kvsim.machines.hardware import ARITHMETIC_DTYPES, KERNEL_CLASSES, STANDS_FOR
from kvsim.machines.schema import (
    AT_LEAST_ONE,
    BYTE_SIZE,
    COUNT,
    EFFICIENCY,
    NON_NEGATIVE,
    POSITIVE,
    RATE,
    SHARE_NUMBER,
    WHOLE_NUMBER,
    Number,
    Schema,
)

LINK_NAMES = ("hbm", "dram", "h2d", "d2h", "link")
"""What bytes move through: GPU and host memory, the host link's two directions, GPU to GPU."""

DRIVE = ("disk.capacity_B", "disk.read_Bps", "disk.write_Bps")
"""A drive behind the host, which most machines' files leave to ``--disk``."""

TENSOR_PEAK = ("compute.sm", "compute.clock_Hz", "compute.tensor_FLOP_per_clock_sm")
"""What the fp16 rate is checked against."""

UNIT_SUFFIX = re.compile("_(s|B|Bps|tokens)$")
"""Units that the keys of a stack carry and its fields do not."""

HARDWARE_FILE = Schema(
    numbers={f"compute.{dtype}_FLOPps": RATE for dtype in ARITHMETIC_DTYPES}
    | {"compute.cpu_fp32_FLOPps": RATE}
    | dict.fromkeys(TENSOR_PEAK, POSITIVE)
    | {
        "memory.gpu_capacity_B": BYTE_SIZE,
        "memory.host_capacity_B": BYTE_SIZE,
        "memory.l2_B": POSITIVE,
    }
    | {f"{link}.bandwidth_Bps": RATE for link in LINK_NAMES}
    | {f"{link}.latency_s": NON_NEGATIVE for link in LINK_NAMES}
    | {"h2d.line_rate_Bps": RATE, "d2h.line_rate_Bps": RATE}
    | dict(zip(DRIVE, (BYTE_SIZE, RATE, RATE), strict=True))
    | {
        "compute.half_accumulation_gain": AT_LEAST_ONE,
        "link.gpus": COUNT,
        "price.usd_per_hour": POSITIVE,
        "power.rated_W": POSITIVE,
    },
    required=frozenset(
        {"title", "basis", "compute.fp32_FLOPps", "compute.fp16_FLOPps", "compute.cpu_fp32_FLOPps"}
        | {"memory.gpu_capacity_B", "memory.host_capacity_B"}
        | {f"{link}.{key}" for link in LINK_NAMES for key in ("bandwidth_Bps", "latency_s")}
    ),
    texts=frozenset({"title", "basis", "extends", "device", "date", "price.date"}),
    lists=frozenset({"aliases", "notes"}),
    choices={"basis": ("datasheet", "measured")},
    together=(
        frozenset(TENSOR_PEAK),
        frozenset(DRIVE),
        frozenset({"price.usd_per_hour", "price.date"}),
        frozenset({"device", "date"}),
    ),
)

HOST_FILE = Schema(
    numbers={
        "cpu.cores": COUNT,
        "cpu.clock_Hz": POSITIVE,
        "cpu.FLOP_per_clock": POSITIVE,
        "memory.channels": COUNT,
        "memory.rate_Tps": RATE,
        "memory.share": EFFICIENCY,
        "memory.capacity_B": BYTE_SIZE,
        "sockets.count": COUNT,
    },
    required=frozenset(
        {"title", "cpu.cores", "cpu.clock_Hz", "cpu.FLOP_per_clock", "memory.channels"}
        | {"memory.rate_Tps", "memory.share", "memory.capacity_B"}
    ),
    texts=frozenset({"title"}),
    lists=frozenset({"aliases"}),
)
"""What a host's profile says: cores, channels and capacity are of each socket."""

STACK_NUMBERS: Mapping[str, Number] = {
    "time.launch_s": NON_NEGATIVE,
    "time.gap_s": NON_NEGATIVE,
    "time.layer_s": NON_NEGATIVE,
    "time.routing_s": NON_NEGATIVE,
    "time.latent_s": NON_NEGATIVE,
    "time.step_s": NON_NEGATIVE,
    "time.sampling_s": NON_NEGATIVE,
    "time.sequence_s": NON_NEGATIVE,
    "time.beside_step_s": NON_NEGATIVE,
    "time.beside_sequence_s": NON_NEGATIVE,
    "time.quantise_s": NON_NEGATIVE,
    "time.sync_s": NON_NEGATIVE,
    "time.prompt_pass_tokens": NON_NEGATIVE,
    "time.stage_s": NON_NEGATIVE,
    "time.stage_overlap": SHARE_NUMBER,
    "time.pointwise_launches": NON_NEGATIVE,
    "time.wide_norm_launches": NON_NEGATIVE,
    "time.pointwise_passes": NON_NEGATIVE,
    "server.token_s": NON_NEGATIVE,
    "server.prompt_s": NON_NEGATIVE,
    "cache.append_passes": NON_NEGATIVE,
    "cache.overhead": AT_LEAST_ONE,
    "attention.score_bytes": NON_NEGATIVE,
    "attention.score_memory_B": POSITIVE,
    "packed_cache.layer_s": NON_NEGATIVE,
    "packed_cache.unpack_ops": NON_NEGATIVE,
    "packed_cache.unpack_bytes": NON_NEGATIVE,
    "packed_cache.passes": AT_LEAST_ONE,
    "packed_cache.plain_passes": NON_NEGATIVE,
    "packed_cache.merge_token_s": NON_NEGATIVE,
    "packed_cache.chunk_tokens": NON_NEGATIVE,
    "packed_cache.qr_s": NON_NEGATIVE,
    "selection.gather_row_s": NON_NEGATIVE,
    "selection.index_bytes": POSITIVE,
    "selection.id_list_s": NON_NEGATIVE,
    "offload.layer_s": NON_NEGATIVE,
    "offload.overlap": SHARE_NUMBER,
    "offload.stream_tokens": NON_NEGATIVE,
    "offload.pageable_Bps": NON_NEGATIVE,
    "offload.second_socket": SHARE_NUMBER,
    "offload.weight_buffers": AT_LEAST_ONE,
    "offload.resident_layers": WHOLE_NUMBER,
    "offload.tile_s": NON_NEGATIVE,
    "offload.merge_passes": NON_NEGATIVE,
    "offload.split_achieved": SHARE_NUMBER,
    "offload.split_prompt": SHARE_NUMBER,
    "sums.direct_share": SHARE_NUMBER,
    "sums.direct_s": NON_NEGATIVE,
    "sums.direct_hop_s": NON_NEGATIVE,
    "sums.direct_second_s": NON_NEGATIVE,
    "sums.ring_s": NON_NEGATIVE,
    "sums.ring_hop_s": NON_NEGATIVE,
    "sums.ring_share": EFFICIENCY,
    "drafts.draft_s": NON_NEGATIVE,
    "drafts.round_s": NON_NEGATIVE,
    "drafts.tree_s": NON_NEGATIVE,
    "drafts.sequence_s": NON_NEGATIVE,
    "drafts.shared_experts": SHARE_NUMBER,
    "drafts.widest": NON_NEGATIVE,
    "sums.exchange_s": NON_NEGATIVE,
    "sums.sorted_out": SHARE_NUMBER,
    "sums.popularity": AT_LEAST_ONE,
    "sums.skew": NON_NEGATIVE,
    "weights.unpack_ops": NON_NEGATIVE,
    "weights.unpack_bytes": NON_NEGATIVE,
    "weights.unpack_rows": NON_NEGATIVE,
    "weights.copies": AT_LEAST_ONE,
    "memory.context_memory_B": NON_NEGATIVE,
    "memory.prefill_chunk_tokens": AT_LEAST_ONE,
    "memory.activation_passes": NON_NEGATIVE,
    "memory.logit_bytes": POSITIVE,
    "memory.reserved_sequences": NON_NEGATIVE,
    "memory.sampling_bytes": NON_NEGATIVE,
}
STACK_FLAGS = (
    "time.counted_launches",
    "time.asynchronous",
    "cache.keeps_old",
    "cache.static",
    "attention.flash_prompt",
    "attention.repeat_kv",
    "packed_cache.repeat_kv",
    "packed_cache.unpack_each",
    "packed_cache.scored_prompt",
    "selection.gather_sync",
    "offload.across_steps",
    "offload.blocking_store",
    "offload.store_layer",
    "offload.tile_sync",
    "sums.one_shot",
    "weights.gguf",
    "weights.half_accumulation",
    "weights.int8_products",
    "memory.prompt_logits",
    "memory.share_of_free",
    "memory.share_is_static",
)
MOVED_KEYS = {
    "time.overlapped_sequence_s": "server.token_s",
    "time.overlapped_prompt_s": "server.prompt_s",
    "time.packed_layer_s": "packed_cache.layer_s",
    "time.offloaded_layer_s": "offload.layer_s",
    "time.id_list_s": "selection.id_list_s",
    "time.qr_s": "packed_cache.qr_s",
    "time.tile_s": "offload.tile_s",
    "cache.static_cache": "cache.static",
    "cache.score_bytes": "attention.score_bytes",
    "cache.flash_prompt": "attention.flash_prompt",
    "cache.repeat_kv": "attention.repeat_kv",
    "cache.unpack_ops": "packed_cache.unpack_ops",
    "cache.unpack_bytes": "packed_cache.unpack_bytes",
    "cache.plain_passes": "packed_cache.plain_passes",
    "cache.merge_token_s": "packed_cache.merge_token_s",
    "cache.packed_passes": "packed_cache.passes",
    "cache.repeat_packed": "packed_cache.repeat_kv",
    "cache.merge_passes": "offload.merge_passes",
    "cache.resident_layers": "offload.resident_layers",
    "copies.overlap": "offload.overlap",
    "copies.store_layer": "offload.store_layer",
    "copies.across_steps": "offload.across_steps",
    "copies.blocking_store": "offload.blocking_store",
    "copies.tile_sync": "offload.tile_sync",
    "copies.split_achieved": "offload.split_achieved",
    "copies.split_prompt": "offload.split_prompt",
    "copies.gather_row_s": "selection.gather_row_s",
    "copies.gather_sync": "selection.gather_sync",
    "copies.index_bytes": "selection.index_bytes",
    "copies.one_shot_sum": "sums.one_shot",
    "memory.old_cache": "cache.keeps_old",
    "memory.cache_overhead": "cache.overhead",
    "memory.weight_copies": "weights.copies",
    "memory.packed_chunk_tokens": "packed_cache.chunk_tokens",
}
"""Former names of a stack's keys, and today's."""

KERNEL_NUMBERS = {
    "memory": ("memory", EFFICIENCY),
    "compute": ("compute", EFFICIENCY),
    "floor_s": ("floor", NON_NEGATIVE),
    "host_s": ("host", NON_NEGATIVE),
    "half_size": ("half_size", NON_NEGATIVE),
    "tile_rows": ("tile", NON_NEGATIVE),
    "tile_columns": ("tile_columns", NON_NEGATIVE),
    "unit_Bps": ("unit_rate", NON_NEGATIVE),
    "half_columns": ("half_columns", NON_NEGATIVE),
    "expert_s": ("expert", NON_NEGATIVE),
    "added": ("added", SHARE_NUMBER),
    "input_passes": ("input_passes", NON_NEGATIVE),
    "traffic": ("traffic", NON_NEGATIVE),
    "narrow": ("narrow", POSITIVE),
    "wide": ("wide", POSITIVE),
    "ungrouped": ("ungrouped", POSITIVE),
    "padding": ("padding", NON_NEGATIVE),
    "split_s": ("split", NON_NEGATIVE),
    "unpack_ops": ("unpacking", NON_NEGATIVE),
    "walk_s": ("walk", NON_NEGATIVE),
}

CHECKED_KINDS = ("ttft", "tpot", "latency")
CHECKED_FIGURES = ("median", "p90", "low", "high")
CHECKED_NUMBERS = {"checked.rows": COUNT} | {
    f"checked.{kind}_{figure}": NON_NEGATIVE if figure in ("median", "p90") else POSITIVE
    for kind in CHECKED_KINDS
    for figure in CHECKED_FIGURES
}
"""What a run of its card said of a stack: errors, and factors that hold 80 % of measured times."""

STACK_FILE = Schema(
    numbers=dict(STACK_NUMBERS)
    | CHECKED_NUMBERS
    | {
        f"kernel.{kernel}.{key}": rule
        for kernel in (*KERNEL_CLASSES, *STANDS_FOR)
        for key, (_, rule) in KERNEL_NUMBERS.items()
    },
    required=frozenset({"title", "basis", "error"}),
    texts=frozenset({"title", "basis", "error", "extends", "fit", "device", "date", "version"})
    | {"checked.device", "checked.model", "checked.technique"},
    flags=frozenset(STACK_FLAGS),
    lists=frozenset({"near", "releases", "measured"}),
    choices={"basis": ("datasheet", "carried over", "calibrated")},
    together=(
        frozenset({"device", "date"}),
        frozenset({"checked.rows", "checked.device", "checked.model", "checked.technique"}),
    ),
    moved=MOVED_KEYS,
)


def mechanism_of(key: str) -> tuple[str, str]:
    """Split a key into the group of ``Stack`` and its field.

    Parameters
    ----------
    key
        Key of a stack's file, as ``time.launch_s``.

    Returns
    -------
    tuple[str, str]
        Group and field without its unit, as "time" and "launch".
    """
    group, _, name = key.partition(".")
    return group, UNIT_SUFFIX.sub("", name)
