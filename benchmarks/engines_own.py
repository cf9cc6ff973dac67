"""Numbers of engines that no measured row tells, with where each comes from: for engines.py."""

import csv
import tempfile
from dataclasses import replace
from pathlib import Path

from kvsim.evidence import loadtests
from kvsim.machines.hardware import Stack
from kvsim.machines.profiles import load_stack, with_numbers

OWN: dict[str, tuple[float, str]] = {
    "kernel.allreduce.memory": (1.0, "sums.*_share hold what sums reach"),
    "kernel.allreduce.floor_s": (0.0, "sums.* hold it"),
}
"""Numbers of every engine that no row tells."""

RESERVED: dict[str, dict[str, tuple[float | bool, str]]] = {
    "vllm": {
        "memory.reserved_sequences": (256.0, "recalled: vLLM's usual max_num_seqs"),
        "memory.sampling_bytes": (30.0, "counted: a bf16 logit 2, its fp32 copy 4, and to sort "
            "them values 4 and indices 8, twice. 985 MB for Llama-3.1; vLLM 0.19 on an RTX 4090 "
            "has 41,408 tokens of cache, 42,713 with this and 50,132 without"),
    },
    "trtllm": {
        "memory.share_of_free": (True, "documented: KvCacheConfig.free_gpu_memory_fraction, 0.9 of "
            "what is free once weights are loaded and the largest pass was run"),
    },
    "sglang": {
        "memory.share_is_static": (True, "documented: --mem-fraction-static is the share of "
            "weights and KV cache; activations and CUDA graphs are outside"),
    },
}  # fmt: skip
"""Memory that an engine keeps free because its largest pass took it, measured at its start."""

HOST: dict[str, dict[str, tuple[float, str]]] = {
    "trtllm": {
        "time.step_s": (580e-6, "measured by others: 580 us per pass between decode steps, in "
            "which the GPU waits for the host (Llama-3.1-8B in fp8 on a B200, 64 sequences, "
            "2026-05; NVIDIA/TensorRT-LLM#13957)"),
    },
}  # fmt: skip
"""Host times known before any load test is read. A fit keeps them where its rows do not tell, as
those of large models do not: their kernels' own errors are longer."""

RANGES = {"2026-04-06.csv": "0.8"}
"""Load tests whose lengths vary, by their source: InferenceMAX draws them evenly between 0.8 of isl
and osl and the whole (its README, "Benchmark Client Configuration": RANDOM_RANGE_RATIO 0.8)."""


def load_tests(folder: Path, engine: str) -> list[loadtests.LoadTest]:
    """An engine's load tests with the lengths that their benchmark draws."""
    with (folder / "ops" / "serving.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    with tempfile.TemporaryDirectory() as place:
        own = Path(place) / "serving.csv"
        with own.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0], loadtests.RANGE_COLUMN])
            writer.writeheader()
            writer.writerows({**r, loadtests.RANGE_COLUMN: RANGES.get(r["src"], "")} for r in rows)
        return loadtests.read_load_tests(own, engine)


def before(engine: str) -> Stack:
    """An engine's stack with the host times that are known before its load tests are read."""
    stack = load_stack(engine)
    own = dict.fromkeys(loadtests.HOST_TIMES, 0.0) | {
        k: v for k, (v, _) in HOST.get(engine, {}).items()
    }
    cards = {name: with_numbers(card, own) for name, card in stack.cards.items()}
    return replace(with_numbers(stack, own), cards=cards)
