"""Where an engine's own kernels make an answer slow, beside other engines' on the same card."""

from functools import cache

import numpy as np

from kvsim.engine.roofline import all_ops, seconds
from kvsim.errors import InputError
from kvsim.graph import Step
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Stack
from kvsim.machines.profiles import load_stack
from kvsim.prediction.generate import Prediction
from kvsim.prediction.memory import decode_point, prefill_point
from kvsim.report import units

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
TOLD = 0.1  # share of a pass that another engine's kernels must save to be told
CLEAR = 1.3  # times that a kernel class must be slower: errors of classes reach 10 to 25 %
SPOKEN = {
    "gemm": "products in 16 bits",
    "gemm-fp8": "products in fp8",
    "gemm-fp8-block": "products in fp8 with a scale per block",
    "gemm-int8": "products with int8 weights",
    "gemm-int4": "products with 4-bit weights",
    "experts": "experts in 16 bits",
    "experts-fp8": "experts in fp8",
    "experts-fp8-block": "experts in fp8 with a scale per block",
    "experts-int4": "experts in 4 bits",
    "attention": "decode attention",
    "attention-fp8": "decode attention over an fp8 cache",
    "latent": "decode attention over latents (MLA)",
    "latent-fp8": "decode attention over fp8 latents (MLA)",
    "prompt": "attention of prompts",
    "allreduce": "sums between GPUs",
}
"""Kernel classes of which engines have measured rows."""


def slower_kernels(prediction: Prediction) -> list[str]:
    """The class of kernels that another engine's are most ahead in, in a sentence, if any is.

    Both engines' kernels must have been measured on this card, and the difference must be a
    ``TOLD`` share of a decoding round, or of the prompts' pass where one token is generated.
    """
    d = prediction.deployment
    own, _, card = d.stack.name.partition("@")
    if own not in ENGINES or card != d.hardware.name:
        return []
    mine = _by_class(prediction, d)
    whole = sum(mine.values())
    best: tuple[float, str] | None = None
    for other in ENGINES.keys() - {own}:
        stack = _beside(f"{other}@{card}")
        if stack is None:
            continue
        theirs = _by_class(prediction, _with(d, stack))
        for name, took in mine.items():
            saved = took - theirs.get(name, took)
            told = name in SPOKEN and _measured(d.stack, name) and _measured(stack, name)
            if told and saved > TOLD * whole and took > CLEAR * (took - saved):
                sentence = _sentence(prediction, own, other, name, (took, took - saved, whole))
                best = max(best or (0.0, ""), (saved, sentence))
    return [best[1]] if best else []


def _sentence(
    prediction: Prediction, own: str, other: str, name: str, took: tuple[float, float, float]
) -> str:
    mine, theirs, whole = (units.seconds(x) for x in took)
    what = "decoding round" if prediction.generate > 1 else "pass over the prompts"
    card = prediction.deployment.hardware.name
    return (
        f"Of the {whole} that kernels take in a {what}, {mine} are {ENGINES[own]}'s "
        f"{SPOKEN[name]}; {ENGINES[other]}'s, measured on {card} too, would take {theirs} "
        f"(--stack {other})."
    )


def _by_class(prediction: Prediction, deployment: Deployment) -> dict[str, float]:
    """GPU time of each class of kernels at the middle of the generation. [s]"""
    p, t = prediction, prediction.technique
    batch = float(p.batch[0])
    steps: tuple[Step, ...]
    if p.generate > 1:
        middle = decode_point(batch, p.prompt, p.generate, p.generate // 2)
        steps = t.cycle(deployment, middle).steps
    else:
        steps = (t.prefill(deployment, prefill_point(batch, p.prompt, p.generate)),)
    found: dict[str, float] = {}
    for step in steps:
        for op, count in all_ops(step):
            if op.stream == "gpu":
                took = count * float(np.ravel(seconds(op, deployment))[0])
                found[op.kernel] = found.get(op.kernel, 0.0) + took
    return found


def _measured(stack: Stack, name: str) -> bool:
    """Whether a stack's class of kernels was fitted to rows of its card."""
    key = "sums." if name == "allreduce" else f"kernel.{name}."
    card = stack.name.partition("@")[2]
    return any(
        line.startswith(key) and f" on {card} " in line for line in stack.source.splitlines()
    )


@cache
def _beside(name: str) -> Stack | None:
    try:
        return load_stack(name)
    except InputError:  # an engine without rows on this card
        return None


def _with(deployment: Deployment, stack: Stack) -> Deployment:
    d = deployment
    return Deployment(d.model, d.hardware, stack, d.weights, d.tp, d.pp, d.dp, d.ep)
