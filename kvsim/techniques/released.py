"""Techniques and GPUs that released engines support."""

from collections.abc import Mapping
from types import MappingProxyType

from kvsim.machines.deployment import WEIGHT_FORMATS, Deployment
from kvsim.machines.gguf import BASES as GGUF_TYPES
from kvsim.machines.gguf import NEAREST
from kvsim.techniques.papers.cache import is_engine

FULL = "full"  # nothing is done to the cache
CACHE = "cache"  # formats that are one engine's own
PACKED = frozenset(("kivi",))  # caches whose speed is that of one engine's kernels
ENGINES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "vllm": (
            *("full", "fp8"),
            *("eagle", "eagle3", "p-eagle", "dflash", "mtp", "draft", "ngram", "suffix"),
        ),
        "sglang": ("full", "fp8", "eagle", "eagle2", "eagle3", "dflash", "mtp", "draft", "ngram"),
        "trtllm": ("full", "fp8", "eagle", "eagle3", "mtp", "draft", "ngram"),
        "hf": ("full", "offload", "kivi", "draft", "ngram"),
        "llamacpp": ("full", "eagle", "eagle3", "dflash", "mtp", "draft", "ngram"),
        "flexgen": ("full", "offload", "flexgen"),
    }
)
"""Techniques that a released engine runs without changes to its code, as of 2026-11.

Its own formats of the cache are not listed: a stack that has a kernel for one runs it.
"""
ON_LLAMACPP: Mapping[str, tuple[str, ...]] = MappingProxyType(
    dict.fromkeys(("ollama", "ktransformers"), (FULL,))
)
"""What engines run that are built on llama.cpp's kernels; their options have no drafts."""

CHECKPOINTS = WEIGHT_FORMATS.keys() - GGUF_TYPES.keys()
READ: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "vllm": frozenset(WEIGHT_FORMATS),
        "sglang": frozenset(CHECKPOINTS),
        "trtllm": frozenset(CHECKPOINTS),
        "hf": frozenset(CHECKPOINTS - {"nvfp4"}),
        "llamacpp": frozenset((*NEAREST, *GGUF_TYPES)),
        "flexgen": frozenset(("fp16", "int4")),
    }
)
"""Formats of weights that an engine reads, or runs as the nearest type of GGUF file."""


def engine_refusal(engine: str, deployment: Deployment) -> str:
    """Return why an engine does not run a model on a GPU; empty if it does.

    According to their documentation on 2026-11-23: FlexGen's README lists OPT models only.
    TensorRT-LLM's list
    of supported hardware begins with Ampere, the first with bf16. vLLM's page of GPUs asks for
    compute capability 7.5, and for AMD Instinct; profiles of a V100 (7.0), which releases of 2025
    supported, are accepted. SGLang runs from Turing on, and on AMD Instinct from MI300 on.
    Third-party ports to Apple's GPUs (vLLM-Metal) are not considered. FlexGen, llama.cpp and
    generate of
    Hugging Face have neither data-parallel attention nor groups of experts.
    """
    model, hardware = deployment.model, deployment.hardware
    apple, amd = (hardware.title.startswith(maker) for maker in ("Apple", "AMD"))
    if engine == "flexgen" and model.family != "opt":
        return f"FlexGen runs OPT models only, not {model.name}"
    nvidia = {"flexgen": "FlexGen", "trtllm": "TensorRT-LLM"}
    if deployment.weights not in READ[engine]:
        files = "GGUF files, which have " if deployment.weights in GGUF_TYPES else ""
        return f"{engine} does not read {files}{deployment.weights} weights"
    if deployment.host and engine != "llamacpp":
        return f"{engine} does not compute with weights in host memory as llama.cpp does"
    if engine in ("flexgen", "hf", "llamacpp") and max(deployment.dp, deployment.ep) > 1:
        return f"{engine} has no layout with --dp or --ep"
    if (apple or amd) and engine in nvidia:
        return f"{nvidia[engine]} runs on NVIDIA GPUs only, not on {hardware.name}"
    if cut := describe_cut(engine, deployment):
        return cut
    if engine == "trtllm" and "bf16" not in hardware.flops:
        return f"TensorRT-LLM needs Ampere or later, not {hardware.name}"
    if apple and engine in ("vllm", "sglang"):
        return f"{engine} does not run on the GPU of {hardware.name}"
    if engine == "sglang" and ("fp8" if amd else "int8") not in hardware.flops:
        return f"SGLang does not run on {hardware.name}"
    return ""


FP8_BLOCK = 128  # columns that share a scale in published checkpoints
WHOLE_BLOCKS = {"vllm": "vLLM", "sglang": "SGLang"}
"""Engines that refuse a part of a block (vllm#52997, sglang#10852)."""


def describe_cut_block(weights: str, columns: int, stage: int) -> str:
    """Return a message if tensor parallelism cuts blocks of an fp8 checkpoint; else empty.

    Parameters
    ----------
    weights
        Format of the weights.
    columns
        Columns of each expert on a GPU.
    stage
        Number of GPUs per pipeline stage.
    """
    if weights != "fp8-block" or not columns % FP8_BLOCK:
        return ""
    return (
        f"{columns} columns of each expert per GPU, as fp8 blocks have {FP8_BLOCK}: ask for "
        f"--ep {stage}, which keeps experts whole, or for a lower --tp"
    )


def describe_cut(engine: str, deployment: Deployment) -> str:
    """Return why an engine does not load an fp8 checkpoint in this layout; empty if it does.

    Parameters
    ----------
    engine
        The engine.
    deployment
        The model in its layout.
    """
    spread = deployment.parallelism
    columns = deployment.model.expert_ffn // spread.slices
    cut = describe_cut_block(deployment.weights, columns, spread.stage)
    return f"{WHOLE_BLOCKS[engine]} does not load {cut}" if cut and engine in WHOLE_BLOCKS else ""


def engines_running(name: str, deployment: Deployment) -> list[str]:
    """Return the engines in which a plan may run a technique, that of the predicted times first.

    No engine is returned for a packed cache if the predicted times are those of an engine without a
    kernel for it, as they say nothing about another engine's kernel.
    """
    own, terms = deployment.stack.family, set(name.split("+"))
    elsewhere = terms & PACKED if is_engine(deployment.stack.name) else set()
    able = [
        engine
        for engine, names in ENGINES.items()
        if terms <= {*names, *([CACHE] if engine == own else [])}
        and not (elsewhere and engine != own)
        and not engine_refusal(engine, deployment)
    ]
    return sorted(able, key=lambda engine: engine != own)


ALIKE = ("vllm", "sglang", "trtllm")  # engines that run like machines at like speeds


def runs_at_such_speed(name: str, deployment: Deployment) -> bool:
    """Return whether an engine that runs the technique is as fast as the stack predicts.

    The times of llama.cpp, FlexGen or Hugging Face do not apply to a technique that only another
    engine runs.
    """
    family, able = deployment.stack.family, engines_running(name, deployment)
    if family in ON_LLAMACPP:
        return set(name.split("+")) <= set(ON_LLAMACPP[family])
    own = family.partition("-")[0]  # vllm-0.8, hf-sdpa
    return own in able if own in ENGINES and own not in ALIKE else bool(able)


SERVERS = ("vllm", "sglang", "trtllm", "llamacpp")
"""Engines that are meant where none is named."""


def served_by(name: str, deployment: Deployment) -> list[str]:
    """Return the engines that can serve a stream of requests with a technique.

    This is llama.cpp alone if its times are predicted; the three others run at similar speeds on
    similar machines. No engine is returned if that of the predicted times cannot load the weights.
    """
    if describe_cut(deployment.stack.family, deployment):
        return []
    able = [engine for engine in engines_running(name, deployment) if engine in SERVERS]
    alone = "llamacpp"
    return [engine for engine in able if (engine == alone) == (deployment.stack.family == alone)]
