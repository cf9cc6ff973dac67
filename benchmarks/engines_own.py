"""Numbers of engines that no measured row tells, with where each comes from: for engines.py."""

import csv
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvsim.evidence import loadtests
from kvsim.evidence.ops.fit import ROUTED_POPULARITY, SORTED_OUT
from kvsim.evidence.ops.rows import OpRows
from kvsim.machines.hardware import Stack
from kvsim.machines.profiles import load_stack, with_numbers

OWN: dict[str, tuple[float, str]] = {
    "kernel.allreduce.memory": (1.0, "sums.*_share hold what sums reach"),
    "kernel.allreduce.floor_s": (0.0, "sums.* hold it"),
    "sums.sorted_out": (
        SORTED_OUT,
        "0.3 to 0.7 fit rows of experts spread over GPUs alike (aic-core-0.12.0)",
    ),
    "sums.popularity": (
        ROUTED_POPULARITY,
        "as in measured kernels, whose routing follows a power law: 5,047 rows of experts are off "
        "by 8.9 % at the median with uniform routing, 8.0 % with 30 (aic-core-0.12.0)",
    ),
    "sums.skew": (
        0.1,
        "fitted on 2026-11-26 to load tests with experts spread over 4, 8 and 16 GPUs "
        "(MiniMax-M2.5, Qwen3-235B, DeepSeek-V3; h100, h200): each model left out, the others "
        "choose 0.05 to 0.15. Kernels are measured with a power law, where it is 0.2 "
        "(aic-core-0.12.0)",
    ),
}
"""Numbers of every engine that no row tells."""

WALK = "kernel.prompt.walk_s"
SPLITS = "assumed: the back end that vLLM chooses on this card ({}) splits long caches; no row"
WALKS: dict[tuple[str, str], dict[str, tuple[float | bool, str]]] = {
    ("vllm", "a100-80g"): {WALK: (36e-9, "carried over from 26.6 ns on an H100 by their clocks, "
        "1.98 and 1.41 GHz, rounded: FlashAttention 2 takes as many cycles per cached token "
        "(LLMServingSim 5daddb2, vLLM's kernels of 2024)")},
    ("vllm", "a40"): {WALK: (48e-9, "fitted on 2026-11-23 to 277 rows of vLLM's kernels of 2024 on "
        "an A6000 (LLMServingSim 5daddb2)")},
    ("vllm", "h100"): {WALK: (0.0, SPLITS.format("FlashAttention 3"))},
    ("vllm", "h200"): {WALK: (0.0, SPLITS.format("FlashAttention 3"))},
    ("vllm", "b200"): {WALK: (0.0, SPLITS.format("FlashInfer"))},
}  # fmt: skip
"""What one block of queries takes per cached token where no row of the engine and card tells."""

SUSTAINED = {"h100": 0.65, "h200": 0.65, "b200": 0.56}
"""Share of a card's peak that products hold where they follow one another for long. Kernels timed
one at a time reach more, up to 0.86, before the power limit lowers the clock. Read off the time to
the first token of load tests with prompts of 7,372 tokens (Llama-3.1-70B in fp8, 4 and 16 clients),
or of Llama-3.1-8B in 16 bits (H100, TensorRT-LLM 1.0): vLLM alone would say 0.64, 0.62 and 0.48,
TensorRT-LLM alone 0.68, 0.64 and 0.57."""


def held_down(card: str, numbers: Mapping[str, float]) -> dict[str, tuple[float, str]]:
    """Compute shares of products above what the card sustains, brought down to it."""
    most = SUSTAINED.get(card, 1.0)
    return {
        key: (most, f"{value:.3g} where kernels were timed one at a time; load tests of two "
            "engines show what the card holds when products follow one another")
        for key, value in numbers.items()
        if key.startswith("kernel.gemm") and key.endswith(".compute") and value > most
    }  # fmt: skip


MARLIN_EXPERTS: dict[str, tuple[float | bool, str]] = {
    "kernel.experts-mxfp4.compute": (
        0.2,
        "fitted on 2026-11-27 to TTFT and time per token of 94 "
        "load tests of gpt-oss-120b in vLLM 0.18 on h100 and h200; either card and 1, 2, 4 and 8 "
        "GPUs alone choose 0.18 to 0.22. The kernel of 0.24, timed alone with whole tiles, reaches "
        "0.54 to 0.55 (aic-core-0.12.0)",
    ),
    "kernel.experts-mxfp4.half_size": (16.0, "counted: Marlin's smallest tile has 16 rows"),
}
"""mxfp4 experts of vLLM on Hopper, as whole runs show them."""
WHOLE_RUNS = {("vllm", "h100"): MARLIN_EXPERTS, ("vllm", "h200"): MARLIN_EXPERTS}
"""Numbers of kernels that whole runs tell, in place of those of kernels timed alone."""

TUNED = {"trtllm": ("gemm-nvfp4",)}
"""Classes whose rows are of one kernel where the engine's server times several at its start and
takes the quickest (TensorRT-LLM's AutoTuner over CUTLASS, cuBLASLt and its own nvfp4 products): the
rows take up to 2.5 times those of the same library's kernels in the other engines."""

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


def quickest(rows: OpRows, others: Iterable[OpRows]) -> OpRows:
    """Rows with the least time that any engine's kernel of the class takes for the shape."""
    least = dict(zip(zip(*rows.shape.values(), strict=True), rows.took, strict=True))
    for other in others:
        if (other.kind, other.dtype) == (rows.kind, rows.dtype):
            for shape, took in zip(
                zip(*other.shape.values(), strict=True), other.took, strict=True
            ):
                if shape in least:
                    least[shape] = min(least[shape], took)
    return replace(rows, took=np.array(list(least.values())))


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
