"""Two effects that can make a run slower than predicted, each described in a sentence.

The first is an all-reduce through the host, whose bandwidth differs between machines; the second is
an engine whose kernels are slower than those of another engine on the same GPU.
"""

from dataclasses import replace
from functools import cache

import numpy as np

from kvsim.engine.roofline import all_ops, seconds
from kvsim.errors import InputError
from kvsim.evidence.ledger import WEIGHT_CLASSES
from kvsim.graph import Step
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Stack
from kvsim.machines.profiles import load_stack
from kvsim.prediction.generate import Prediction
from kvsim.prediction.memory import decode_point, prefill_point
from kvsim.report import evidence, units
from kvsim.report.json import Row, number

SLOWEST_SUMS = 2e9
"""The slowest sums measured over PCIe: 8 L40S, 2 GB/s on most hosts and 20 GB/s on one
(aiconfigurator-core 0.12.0). [B/s]"""

ENGINE_TITLES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
MIN_KERNEL_SAVING = 0.1  # share of a pass that another engine's kernels must save to be told
MIN_KERNEL_RATIO = 1.3  # times that a class must be slower: errors of classes reach 10 to 25 %
KERNEL_NAMES = {
    "gemm": "16-bit GEMMs",
    "gemm-fp8": "fp8 GEMMs",
    "gemm-fp8-block": "block-scaled fp8 GEMMs",
    "gemm-int8": "GEMMs with int8 weights",
    "gemm-int4": "GEMMs with 4-bit weights",
    "gemm-awq": "GEMMs with AWQ weights",
    "experts": "16-bit experts",
    "experts-fp8": "fp8 experts",
    "experts-fp8-block": "block-scaled fp8 experts",
    "experts-int4": "4-bit experts",
    "gemm-nvfp4": "nvfp4 GEMMs",
    "experts-nvfp4": "nvfp4 experts",
    "experts-mxfp4": "mxfp4 experts",
    "experts-mxfp8": "mxfp4 experts with 8-bit inputs",
    "attention": "decode attention",
    "attention-fp8": "decode attention over an fp8 cache",
    "latent": "decode attention over latents (MLA)",
    "latent-fp8": "decode attention over fp8 latents (MLA)",
    "prompt": "prefill attention",
    "allreduce": "all-reduces",
}
"""Kernel classes of which engines have measured rows."""

Z80 = 1.2816  # standard deviations between which 80 % of a normal distribution lie


def sums_through_host(deployment: Deployment) -> bool:
    """Return whether the GPUs all-reduce through host memory, at a bandwidth that was not measured.

    Parameters
    ----------
    deployment
        Hardware and degrees of parallelism.

    Returns
    -------
    bool
        True for tensor parallelism where the GPU-to-GPU link is no faster than the host link.
    """
    hardware = deployment.hardware
    links, source = hardware.links, hardware.sources.get("link.bandwidth_Bps", "")
    host = max(links["h2d"].bandwidth, links["d2h"].bandwidth)
    known = source.startswith(("given", "measured"))
    return deployment.tp > 1 and links["link"].bandwidth <= host and not known


def predict_slow_host(prediction: Prediction) -> Prediction:
    """Repeat a prediction with the slowest all-reduce bandwidth measured on any such host.

    Parameters
    ----------
    prediction
        A prediction for GPUs that all-reduce through the host.

    Returns
    -------
    Prediction
        The same with ``SLOWEST_SUMS`` as the bandwidth.
    """
    d = prediction.deployment
    slow = d.with_sums_at(SLOWEST_SUMS, "slowest measured")
    faster = slow.hardware.links["link"].bandwidth >= d.hardware.links["link"].bandwidth
    return replace(prediction, deployment=d if faster else slow)


def time_ranges(prediction: Prediction, load: str = "batch") -> Row:
    """Return the 80 % prediction intervals of TTFT and TPOT.

    Intervals come from the errors of earlier predictions. They are wider where the acceptance of
    drafts is assumed, or where GPUs all-reduce through a host of unknown speed.

    Parameters
    ----------
    prediction
        A prediction for one batch.
    load
        ``"batch"`` for a single batch, or ``"served"`` for a server under load.

    Returns
    -------
    Row
        ``low`` and ``high`` under ``ttft_s`` and ``tpot_s``, if known. [s]
    """
    d, name = prediction.deployment, prediction.technique.name
    times = number(prediction.ttft_s), number(prediction.tpot_s)
    return widen_ranges(evidence.time_ranges(d, name, *times, load=load), prediction)


def widen_ranges(ranges: Row, prediction: Prediction) -> Row:
    """Widen intervals of times for an assumed acceptance and for a slow host.

    Parameters
    ----------
    ranges
        ``low`` and ``high`` of each time. [s]
    prediction
        The prediction for one batch that they belong to.
    """
    spread = Z80 * prediction.technique.drafting.spread
    if ranges and spread and "tpot_s" in ranges:
        ranges = ranges | {"tpot_s": _spread(ranges["tpot_s"], float(prediction.tpot_s[0]), spread)}
    if not ranges or not sums_through_host(prediction.deployment):
        return ranges
    slow = predict_slow_host(prediction)
    times = {"ttft_s": slow.ttft_s, "tpot_s": slow.tpot_s}
    return {
        name: each | {"high": max(each["high"], float(np.ravel(times[name])[0]))}
        for name, each in ranges.items()
    }


def _spread(range_: Row, middle: float, more: float) -> Row:
    """Widen an interval by an independent error with 80 % within exp(-more) to exp(more)."""
    low, high = np.log(middle / range_["low"]), np.log(range_["high"] / middle)
    return range_ | {
        "low": float(middle * np.exp(-np.hypot(low, more))),
        "high": float(middle * np.exp(np.hypot(high, more))),
    }


def describe_host_link(prediction: Prediction) -> list[str]:
    """Describe how the result depends on the all-reduce bandwidth of the host.

    Parameters
    ----------
    prediction
        A prediction for one batch.

    Returns
    -------
    list of str
        One clause with the times on a slow host; empty if nothing goes through the host.
    """
    d = prediction.deployment
    if not sums_through_host(d):
        return []
    slow = predict_slow_host(prediction)
    times = [f"TTFT {units.seconds(float(slow.ttft_s[0]))}"]
    if prediction.generate > 1:
        times.append(f"TPOT {units.seconds(float(slow.tpot_s[0]))}")
    rate = d.hardware.links["link"].bandwidth
    return [
        f"all-reduces through the host at {rate / 1e9:.3g} GB/s. At {SLOWEST_SUMS / 1e9:.0f} GB/s, "
        f"the slowest rate measured: {' and '.join(times)}. Set your rate (busbw of nccl-tests) "
        "with --allreduce-bandwidth"
    ]


def slower_kernels(prediction: Prediction) -> list[str]:
    """Describe the class of kernels in which another engine is furthest ahead on this GPU.

    Only measured kernels are compared. The difference must be at least ``MIN_KERNEL_SAVING`` of a
    decoding round, or of the prefill where one token is generated.

    Parameters
    ----------
    prediction
        A prediction for one batch.

    Returns
    -------
    list of str
        One sentence, or none.
    """
    d = prediction.deployment
    own, _, card = d.stack.name.partition("@")
    if own not in ENGINE_TITLES or card != d.hardware.name:
        return []
    mine = _seconds_by_class(prediction, d)
    whole = sum(mine.values())
    best: tuple[float, str] | None = None
    for other in ENGINE_TITLES.keys() - {own}:
        stack = _find_stack(f"{other}@{card}")
        if stack is None:
            continue
        theirs = _seconds_by_class(prediction, replace(d, stack=stack))
        for name, took in mine.items():
            saved = took - theirs.get(name, took)
            told = name in KERNEL_NAMES and _has_rows(d.stack, name) and _has_rows(stack, name)
            much = saved > MIN_KERNEL_SAVING * whole and took > MIN_KERNEL_RATIO * (took - saved)
            if told and much:
                sentence = _sentence(prediction, own, other, name, (took, took - saved, whole))
                best = max(best or (0.0, ""), (saved, sentence))
    return [best[1]] if best else []


def _sentence(
    prediction: Prediction, own: str, other: str, name: str, took: tuple[float, float, float]
) -> str:
    mine, theirs, whole = (units.seconds(x) for x in took)
    what = "decoding round" if prediction.generate > 1 else "prefill pass"
    card = prediction.deployment.hardware.name
    return (
        f"{ENGINE_TITLES[own]}'s {KERNEL_NAMES[name]} take {mine} of the {whole} of kernel time in "
        f"a {what}. Those of {ENGINE_TITLES[other]}, also measured on {card}, would take {theirs} "
        f"(--stack {other})." + _other_format(prediction, took[2])
    )


def _other_format(prediction: Prediction, whole: float) -> str:
    """Name the weight format of as many bits that the same engine's kernels are faster with."""
    d = prediction.deployment
    bits = WEIGHT_CLASSES.get(d.weights)
    times = {
        name: sum(_seconds_by_class(prediction, replace(d, weights=name)).values())
        for name, alike in WEIGHT_CLASSES.items()
        if alike == bits == "8 bit"
    }
    best = min(times, key=lambda name: times[name], default=d.weights)
    if times.get(best, whole) > whole / MIN_KERNEL_RATIO:
        return ""
    return (
        f" With --weights {best}, for a checkpoint in that format, all kernels together would take "
        f"{units.seconds(times[best])}."
    )


def _seconds_by_class(prediction: Prediction, deployment: Deployment) -> dict[str, float]:
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


def _has_rows(stack: Stack, name: str) -> bool:
    """Whether a class of kernels of a stack was fitted to measurements on its GPU."""
    key = "sums." if name == "allreduce" else f"kernel.{name}."
    card = stack.name.partition("@")[2]
    return any(
        line.startswith(key) and f" on {card} " in line for line in stack.source.splitlines()
    )


@cache
def _find_stack(name: str) -> Stack | None:
    try:
        return load_stack(name)
    except InputError:  # an engine without rows on this card
        return None
