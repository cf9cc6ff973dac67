"""Predictions for a whole run: times, memory, copied bytes, and times of ops.

Nothing but drawing prompts needs PyTorch: what a session has measured is compared with it anywhere.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from statistics import fmean

import numpy as np

from kvsim.engine.ops import FP16_BYTES
from kvsim.engine.roofline import all_ops, seconds
from kvsim.engine.timeline import steady_seconds, stream_seconds
from kvsim.frozen import frozen
from kvsim.graph import Number, Op, Step
from kvsim.machines.deployment import Deployment
from kvsim.prediction.generate import Prediction
from kvsim.prediction.memory import decode_point, phases, prefill_point
from kvsim.techniques.technique import Technique

TIMED_GENERATED = 9  # tokens per sequence of a timed run
BEFORE = ("weights", "embedding", "context")  # there before the run
DECODER = ("weights", "embedding", "workspace", "context")  # not the technique's buffers


@frozen
class RandomPrompts:
    """Random prompts of one length, and tokens to generate."""

    batch: int
    prompt: int
    generate: int
    seed: int = 0

    def prompts(self, vocab: int) -> list[list[int]]:
        """Draw the prompts.

        Returns
        -------
        list of list of int
            Tokens of each prompt; the same for the same seed.
        """
        import torch

        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randint(vocab, (self.batch, self.prompt), generator=generator)
        prompts: list[list[int]] = drawn.tolist()
        return prompts


@frozen
class Replay:
    """Work of one round that is replayed as a CUDA graph."""

    decoded: int  # generated tokens before it, as far as attention reads [tokens]
    op_shares: Mapping[str, float] = field(default_factory=dict)  # share of each op that it runs
    """How much of an op it does; 1 for those that are not named."""


def predict(deployment: Deployment, technique: Technique, work: RandomPrompts) -> Prediction:
    """Predict the times and the memory use of a workload."""
    batch = np.array([float(work.batch)])
    return Prediction(technique, deployment, batch, work.prompt, work.generate)


def resident_bytes(deployment: Deployment, technique: Technique, work: RandomPrompts) -> float:
    """Predict the memory of a technique after the last round, without the decoder's tensors.

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
    """Predict the peak memory apart from weights. [B]

    It includes the memory of the last round, which is allocated before prefill.

    Parameters
    ----------
    on_gpu
        Whether to count only GPU memory; a CPU holds both tiers.
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
    """Predict the bytes copied over the host link, from prefill to the last token. [B]

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
    """Predict the compute time per token, without waits. [s]"""
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


def replayed_seconds(
    deployment: Deployment, technique: Technique, work: RandomPrompts, replays: Sequence[Replay]
) -> float:
    """Predict the time per token of replayed rounds, each of which yields one token. [s]

    Parameters
    ----------
    replays
        The rounds, with the share of each op that they run.
    """
    return fmean(_round_seconds(deployment.replayed, technique, work, one) for one in replays)


def _round_seconds(
    d: Deployment, technique: Technique, work: RandomPrompts, replay: Replay
) -> float:
    def duration(op: Op, deployment: Deployment) -> Number:
        return seconds(op, deployment) * replay.op_shares.get(op.name, 1.0)

    point = decode_point(work.batch, work.prompt, work.generate, float(replay.decoded))
    (step,) = technique.cycle(d, point).steps
    return float(np.ravel(steady_seconds(step, d, duration))[0])


def phase_steps(
    deployment: Deployment, technique: Technique, work: RandomPrompts
) -> dict[str, Step]:
    """Return the step of prefill, and the middle decoding round if rounds have a single pass."""
    sizes = (work.batch, work.prompt, work.generate)
    steps = {"prefill": technique.prefill(deployment, prefill_point(*sizes))}
    rounds = technique.cycle(deployment, decode_point(*sizes, work.generate / 2)).steps
    return steps | ({"decode": rounds[0]} if len(rounds) == 1 else {})


def op_seconds(
    deployment: Deployment, technique: Technique, work: RandomPrompts
) -> dict[str, float]:
    """Predict the time of GPU ops in prefill, and in rounds with a single pass.

    Returns
    -------
    dict of str to float
        Time over all layers, by phase and op such as ``decode attn``. [s]
    """
    found = {}
    for phase, step in phase_steps(deployment, technique, work).items():
        for name, (op, times) in ops_by_name(step).items():
            if op.stream == "gpu":
                alone = float(np.ravel(seconds(op, deployment))[0])
                found[f"{phase} {name}"] = times * (alone + _on_gpu_beside(op, deployment))
    return found


def _on_gpu_beside(op: Op, deployment: Deployment) -> float:
    """Return the fixed GPU time of an op, which ``ops_by_name`` leaves out. [s]"""
    if op.name == "pointwise":
        floor = deployment.stack.kernel("pointwise").floor
        return max(float(op.launches) - 1.0, 0.0) * floor
    return deployment.stack.time.sampling if op.name == "sample" else 0.0


def predictions(
    deployment: Deployment,
    technique: Technique,
    work: RandomPrompts,
    on_gpu: bool,
    replays: Sequence[Replay] = (),
) -> dict[str, float]:
    """Predict all quantities that a timed run measures, by their names in ``Measured``.

    Parameters
    ----------
    on_gpu
        Whether the peak is that of a GPU's memory; a CPU holds both tiers.
    replays
        The rounds that were replayed as CUDA graphs; empty if kernels were launched one by one.
    """
    whole = predict(deployment, technique, work)
    tpot = float(whole.tpot_s[0])
    if replays:
        tpot = replayed_seconds(deployment, technique, work, replays)
    found = {
        "ttft_s": float(whole.ttft_s[0]),
        "tpot_s": tpot,
        "computing_s": computing_seconds(deployment, technique, work),
        "resident_B": resident_bytes(deployment, technique, work),
        "peak_B": peak_bytes(deployment, technique, work, on_gpu),
    }
    found |= {f"{way}_B": copied_bytes(deployment, technique, work, way) for way in ("h2d", "d2h")}
    ops = op_seconds(deployment, technique, work)
    return found | {f"{name}_s": took for name, took in ops.items()}


def ops_by_name(step: Step) -> dict[str, tuple[Op, int]]:
    """Return the ops of a step by name, with the number of times that each runs.

    Ops that differ between layers are left out, as they can only be timed together.
    """
    ops: dict[str, tuple[Op, int]] = {}
    mixed = set()
    for op, times in all_ops(step):
        plain = _scalar(op)
        if not (plain.flops or any(plain.bytes.values())):
            continue
        known, before = ops.get(op.name, (plain, 0))
        mixed |= {op.name} if known != plain else set()
        ops[op.name] = known, before + times
    return {name: pair for name, pair in ops.items() if name not in mixed}


def _scalar(op: Op) -> Op:
    def scalar(n: Number) -> float:
        return float(np.ravel(n)[0])

    moved = {channel: scalar(n) for channel, n in op.bytes.items()}
    return replace(
        op,
        flops=scalar(op.flops),
        bytes=moved,
        rows=scalar(op.rows),
        size=scalar(op.size),
        launches=scalar(op.launches),
        unpacked=scalar(op.unpacked),
        fixed=0.0,
        after=(),
        prefetch=False,
        sync=False,
    )
