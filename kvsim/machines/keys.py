"""What the files of machines and of software stacks may say: their keys, units and bounds."""

from collections.abc import Mapping

from kvsim.machines.hardware import DTYPES, KERNELS, STANDS_FOR
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
    "weights.unpack_bytes": ("widen_bytes", NON_NEGATIVE),
    "cache.unpack_ops": ("unpack_arithmetic", NON_NEGATIVE),
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
    "host_s": ("host", NON_NEGATIVE),
    "half_size": ("half_size", NON_NEGATIVE),
    "tile_rows": ("tile", NON_NEGATIVE),
    "half_columns": ("half_columns", NON_NEGATIVE),
    "added": ("added", SHARE),
    "input_passes": ("input_passes", AT_LEAST_ONE),
    "traffic": ("traffic", NON_NEGATIVE),
    "narrow": ("narrow", POSITIVE),
    "wide": ("wide", POSITIVE),
    "ungrouped": ("ungrouped", POSITIVE),
    "padding": ("padding", NON_NEGATIVE),
    "split_s": ("split", NON_NEGATIVE),
    "unpack_ops": ("unpacking", NON_NEGATIVE),
}

STACK_FILE = Schema(
    numbers={key: rule for key, (_, rule) in STACK_NUMBERS.items()}
    | {
        f"kernel.{kernel}.{key}": rule
        for kernel in (*KERNELS, *STANDS_FOR)
        for key, (_, rule) in KERNEL_NUMBERS.items()
    },
    required=frozenset({"title", "basis", "error"}),
    texts=frozenset({"title", "basis", "error", "extends", "fit", "device", "date", "version"}),
    flags=frozenset(STACK_FLAGS),
    lists=frozenset({"near"}),
    choices={"basis": ("datasheet", "carried over", "calibrated")},
    together=(frozenset({"device", "date"}),),
)
