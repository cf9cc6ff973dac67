"""What a technique says of a whole run: memory, copies, and what compute works."""

from collections.abc import Iterable

import numpy as np

from kvsim.engine.ops import FP16_BYTES
from kvsim.engine.roofline import all_ops
from kvsim.engine.timeline import stream_seconds
from kvsim.graph import Step
from kvsim.machines.deployment import Deployment
from kvsim.prediction.generate import Prediction
from kvsim.prediction.memory import decode_point, phases, prefill_point
from kvsim.techniques.technique import Technique
from kvsim.validate.counts.check import RandomPrompts

BEFORE = ("weights", "embedding", "context")  # there before the run
DECODER = ("weights", "embedding", "workspace", "context")  # not the technique's buffers


def predict(deployment: Deployment, technique: Technique, work: RandomPrompts) -> Prediction:
    """Predict a workload: its times, and what it takes of both memories."""
    batch = np.array([float(work.batch)])
    return Prediction(technique, deployment, batch, work.prompt, work.generate)


def resident_bytes(deployment: Deployment, technique: Technique, work: RandomPrompts) -> float:
    """Predict what a technique keeps after the last round, besides the decoder's own tensors.

    Returns
    -------
    float
        Size in both tiers together. [B]
    """
    last = decode_point(work.batch, work.prompt, work.generate, work.generate - 1.0)
    return sum(
        float(np.ravel(size)[0])
        for tier, buffers in technique.resident(deployment, last).items()
        for name, size in buffers.items()
        if not (tier == "gpu" and name in DECODER)
    )


def peak_bytes(
    deployment: Deployment, technique: Technique, work: RandomPrompts, on_gpu: bool
) -> float:
    """Predict what is held at most besides weights. [B]

    Runs reserve what the last round needs before they read the prompt.

    Parameters
    ----------
    on_gpu
        Count the GPU's memory alone; a CPU holds both tiers.
    """
    reading, last = phases(technique, deployment, work.batch, work.prompt, work.generate)
    prompts = work.batch * work.prompt
    alive = max(min(prompts, deployment.stack.memory.prefill_chunk), work.prompt)
    # hidden states of the prompts that wait while others pass through a layer
    totals = [FP16_BYTES * deployment.model.hidden * max(0.0, prompts - alive), 0.0]
    for tier, buffers in reading.items():
        for name, size in buffers.items():
            if name in BEFORE if tier == "gpu" else on_gpu:
                continue
            now, later = (float(np.ravel(n)[0]) for n in (size, last[tier].get(name, 0.0)))
            totals[0] += now if name == "workspace" or not now else max(now, later)
            totals[1] += later
    return max(totals)


def copied_bytes(
    deployment: Deployment, technique: Technique, work: RandomPrompts, way: str
) -> float:
    """Predict what a technique moves through the link, from the prompt to the last token. [B]

    Parameters
    ----------
    way
        Direction: to the device (``h2d``) or to the host (``d2h``).
    """
    sizes = (work.batch, work.prompt, work.generate)
    prompt = prefill_point(*sizes)
    cycle = technique.cycle(deployment, decode_point(*sizes, work.generate / 2 - 1))
    rounds = (work.generate - 1) / cycle.tokens
    once = [
        technique.prefill(deployment, prompt),
        *technique.predecoding(deployment, decode_point(*sizes, 0.0)),
    ]
    return _link_bytes(once, way) + float(np.ravel(rounds)[0]) * _link_bytes(cycle.steps, way)


def computing_seconds(deployment: Deployment, technique: Technique, work: RandomPrompts) -> float:
    """Predict how long compute works per token, waits left out. [s]"""
    point = decode_point(work.batch, work.prompt, work.generate, work.generate / 2 - 1)
    cycle = technique.cycle(deployment, point)
    works = sum(float(np.ravel(stream_seconds(step, deployment)["gpu"])[0]) for step in cycle.steps)
    return works / float(np.ravel(cycle.tokens)[0])


def _link_bytes(steps: Iterable[Step], way: str) -> float:
    moved = [
        times * float(np.ravel(size)[0])
        for step in steps
        for op, times in all_ops(step)
        for channel, size in op.bytes.items()
        if channel == way
    ]
    return sum(moved)
