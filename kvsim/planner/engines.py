"""Which released engine runs which technique, and on which models and GPUs."""

from collections.abc import Mapping
from types import MappingProxyType

from kvsim.machines.deployment import Deployment

ENGINES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "vllm": ("full", "fp8", "eagle", "mtp", "draft", "ngram"),
        "sglang": ("full", "fp8", "eagle", "mtp", "draft", "ngram"),
        "trtllm": ("full", "fp8", "eagle", "mtp", "draft", "ngram"),
        "hf": ("full", "offload", "kivi", "draft", "ngram"),
        "flexgen": ("full", "offload", "flexgen"),
    }
)
"""Techniques that a released engine runs without changes to its code, as of 2026-11."""


def lacks(engine: str, deployment: Deployment) -> str:
    """Why an engine does not run a model on a GPU; empty if it does.

    As their pages said on 2026-11-23: FlexGen's README shows OPT models alone. TensorRT-LLM's list
    of supported hardware begins with Ampere, the first with bf16. vLLM's page of GPUs asks for
    compute capability 7.5, and for AMD Instinct; profiles of a V100 (7.0), which releases of 2025
    ran on, are left to it. SGLang runs from Turing on, and on AMD Instinct from MI300 on. What
    others maintain for Apple's GPUs (vLLM-Metal) is not counted.
    """
    model, hardware = deployment.model, deployment.hardware
    apple, amd = (hardware.title.startswith(maker) for maker in ("Apple", "AMD"))
    if engine == "flexgen" and model.family != "opt":
        return f"FlexGen runs OPT models only, not {model.name}"
    nvidia = {"flexgen": "FlexGen", "trtllm": "TensorRT-LLM"}
    if (apple or amd) and engine in nvidia:
        return f"{nvidia[engine]} runs on NVIDIA GPUs only, not on {hardware.name}"
    if engine == "trtllm" and "bf16" not in hardware.flops:
        return f"TensorRT-LLM needs Ampere or later, not {hardware.name}"
    if apple and engine in ("vllm", "sglang"):
        return f"{engine} does not run on the GPU of {hardware.name}"
    if engine == "sglang" and ("fp8" if amd else "int8") not in hardware.flops:
        return f"SGLang does not run on {hardware.name}"
    return ""


def runners(name: str, deployment: Deployment) -> list[str]:
    """The engines that a plan may give a technique to."""
    return [
        engine
        for engine, names in ENGINES.items()
        if name in names and not lacks(engine, deployment)
    ]
