"""Numbers of engines that no measured row tells, with where each comes from: for engines.py."""

OWN: dict[str, tuple[float, str]] = {
    "kernel.allreduce.memory": (1.0, "sums.*_share hold what sums reach"),
    "kernel.allreduce.floor_s": (0.0, "sums.* hold it"),
}
"""Numbers of every engine that no row tells."""

RESERVED: dict[str, dict[str, tuple[float, str]]] = {
    "vllm": {
        "memory.reserved_sequences": (256.0, "recalled: vLLM's usual max_num_seqs"),
        "memory.sampling_bytes": (30.0, "counted: a bf16 logit 2, its fp32 copy 4, and to sort "
            "them values 4 and indices 8, twice. 985 MB for Llama-3.1; vLLM 0.19 on an RTX 4090 "
            "has 41,408 tokens of cache, 42,713 with this and 50,132 without"),
    },
}  # fmt: skip
"""Memory that an engine keeps free because its largest pass took it, measured at its start."""
