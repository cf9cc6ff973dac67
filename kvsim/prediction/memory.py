"""Peak memory of a generation, and the largest batch that fits."""

import numpy as np

from kvsim.graph import Array, Buffers, Number, Point, Tier
from kvsim.machines.deployment import Deployment
from kvsim.options import OPTION_RANGES
from kvsim.search import last_within
from kvsim.techniques.technique import Technique

TIERS: tuple[Tier, ...] = ("gpu", "host", "disk")
MOST_SEQUENCES = int(OPTION_RANGES["--batch"].most)
ZERO: Array = np.zeros(())
WEIGHT_BUFFERS = ("weights", "embedding")
"""How buffers are named that hold weights."""
PASS_BUFFERS = ("workspace", "context")
"""Those of passes and of the runtime, which engines take before they share out memory."""


def prefill_point(batch: Number, prompt: Number, generate: Number) -> Point:
    """Describe the forward pass that reads the prompts.

    Parameters
    ----------
    batch
        Sequences in the batch. [sequences]
    prompt
        Tokens of each prompt. [tokens]
    generate
        Tokens generated for each sequence, for which the cache needs space. [tokens]

    Returns
    -------
    Point
        The pass.
    """
    return Point(batch, 0.0, prompt, prompt, prompt + generate, prefill=True)


def decode_point(batch: Number, prompt: Number, generate: Number, decoded: Number) -> Point:
    """Describe the forward pass that follows after some tokens have been decoded.

    Parameters
    ----------
    batch
        Sequences in the batch. [sequences]
    prompt
        Tokens of each prompt. [tokens]
    generate
        Tokens generated for each sequence in all. [tokens]
    decoded
        Tokens of each sequence decoded before this pass. [tokens]

    Returns
    -------
    Point
        The pass, with one new token per sequence.
    """
    return Point(batch, prompt + decoded, 1.0, prompt, prompt + generate)


def phases(
    technique: Technique, deployment: Deployment, batch: Number, prompt: Number, generate: Number
) -> tuple[Buffers, Buffers]:
    """Compute resident bytes while the prompts are read and when the last token is decoded.

    Parameters
    ----------
    technique
        The KV-cache technique.
    deployment
        Model, machine and software stack.
    batch
        Sequences in the batch. [sequences]
    prompt
        Tokens of each prompt. [tokens]
    generate
        Tokens generated for each sequence. [tokens]

    Returns
    -------
    tuple[Buffers, Buffers]
        Buffers of the two phases. [B]
    """
    last = decode_point(batch, prompt, generate, generate - 1.0)
    return technique.resident(
        deployment, prefill_point(batch, prompt, generate)
    ), technique.resident(deployment, last)


def served_buffers(
    technique: Technique, deployment: Deployment, batch: Number, prompt: Number, generate: Number
) -> Buffers:
    """Compute the peak size of each buffer while a server decodes and reads prompts together.

    All sequences have their full length while a group of prompts is read; a group is as many
    prompts as the technique divides a batch into parts.

    Parameters
    ----------
    technique
        The KV-cache technique.
    deployment
        Model, machine and software stack.
    batch
        Sequences in the batch. [sequences]
    prompt
        Tokens of each prompt. [tokens]
    generate
        Tokens generated for each sequence. [tokens]

    Returns
    -------
    Buffers
        Resident bytes by memory tier and buffer name. [B]
    """
    read = _reading(technique, deployment, prompt, generate)
    return _served(technique, deployment, batch, prompt, generate, read)


def _reading(
    technique: Technique, deployment: Deployment, prompt: Number, generate: Number
) -> Buffers:
    """Resident bytes of the pass that reads a group of prompts, besides running sequences. [B]"""
    point = prefill_point(float(technique.tiles() * deployment.dp), prompt, generate)
    asked = "reading", prompt, generate
    return technique.cached(deployment, asked, lambda: technique.resident(deployment, point))


def _served(
    technique: Technique,
    deployment: Deployment,
    batch: Number,
    prompt: Number,
    generate: Number,
    read: Buffers,
) -> Buffers:
    """Each buffer at its largest, given what the prompts' pass holds. [B]"""
    last = technique.resident(deployment, decode_point(batch, prompt, generate, generate - 1.0))
    merged: dict[Tier, dict[str, Number]] = {}
    for tier in TIERS:
        here, there = last.get(tier, {}), read.get(tier, {})
        if tier == "disk" and not (here or there):
            continue
        merged[tier] = {
            name: np.maximum(here.get(name, 0.0), there.get(name, 0.0))
            for name in dict.fromkeys([*here, *there])
        }
    return merged


def tier_bytes(buffers: Buffers, tier: Tier) -> Array:
    """Sum a tier's named buffers.

    Parameters
    ----------
    buffers
        Resident bytes by tier and buffer name. [B]
    tier
        GPU, host or disk.

    Returns
    -------
    Array
        Resident bytes on the tier. [B]
    """
    total = ZERO
    for size in buffers.get(tier, {}).values():
        total = total + size
    return total


def weights_bytes(buffers: Buffers) -> float:
    """Return the size of the weights and embeddings on one GPU, including those of a draft model.

    Parameters
    ----------
    buffers
        Resident bytes by tier and buffer name. [B]

    Returns
    -------
    float
        Size; the largest if the buffers are arrays over several points. [B]
    """
    return float(np.max(held_beside(buffers)[0]))


def left_for_caches(deployment: Deployment, usable: float, beside: float, weights: float) -> float:
    """Return the memory of each GPU that is left for KV caches.

    Parameters
    ----------
    deployment
        Model, machine and software stack; the stack says what an engine's memory share covers.
    usable
        GPU memory that the engine may use. [B]
    beside
        Memory of weights, workspace and context. [B]
    weights
        Part of ``beside`` that is weights and embeddings. [B]

    Returns
    -------
    float
        Memory for caches; negative if the weights do not fit. [B]
    """
    whole, memory = deployment.hardware.gpu_memory, deployment.stack.memory
    if memory.share_of_free and beside < whole:
        return usable / whole * (whole - beside)
    if memory.share_is_static:
        return min(usable - weights, max(usable, whole) - beside)
    return usable - beside


def given_memory(deployment: Deployment, buffers: Buffers) -> Array:
    """Compute the GPU memory that an engine must be given so that some buffers fit.

    It is the amount for which ``left_for_caches`` returns the size of the caches among the buffers.

    Parameters
    ----------
    deployment
        Model, machine and software stack; the stack says what an engine's memory share covers.
    buffers
        Resident bytes by tier and buffer name. [B]

    Returns
    -------
    Array
        Memory of each GPU. [B]
    """
    whole, memory = deployment.hardware.gpu_memory, deployment.stack.memory
    total = tier_bytes(buffers, "gpu")
    if not (memory.share_of_free or memory.share_is_static):
        return total
    weights, beside = held_beside(buffers)
    if memory.share_of_free:
        free = whole - beside
        return np.where(free > 0, (total - beside) * whole / np.where(free > 0, free, 1.0), total)
    return np.maximum(total - beside + weights, np.where(total > whole, total, 0.0))


def held_beside(buffers: Buffers) -> tuple[Array, Array]:
    """Compute the memory of each GPU besides the KV cache.

    Parameters
    ----------
    buffers
        Resident bytes by tier and buffer name. [B]

    Returns
    -------
    tuple[Array, Array]
        Weights alone, and weights with workspace and CUDA context. [B]
    """
    here = buffers.get("gpu", {})
    weights = tier_bytes(
        {"gpu": {k: v for k, v in here.items() if k.endswith(WEIGHT_BUFFERS)}}, "gpu"
    )
    passes = tier_bytes({"gpu": {k: v for k, v in here.items() if k.endswith(PASS_BUFFERS)}}, "gpu")
    return weights, weights + passes


def largest_batch(
    technique: Technique,
    deployment: Deployment,
    prompt: int,
    generate: int,
    gpu: float,
    host: float,
    served: bool = False,
) -> Array:
    """Return the largest batch whose buffers fit in all memories.

    Memory grows with the batch, so that the batch is found by bracketing.

    Parameters
    ----------
    technique
        The KV-cache technique; the batch is a multiple of the number of parts it divides one into.
    deployment
        Model, machine and software stack.
    prompt
        Tokens of each prompt. [tokens]
    generate
        Tokens generated for each sequence. [tokens]
    gpu
        Memory of each GPU that the engine may use. [B]
    host
        Host memory. [B]
    served
        Whether requests keep coming, so that prompts are read while others decode; otherwise all
        start together.

    Returns
    -------
    array
        The batch; 0 if not even the smallest one fits. [sequences]
    """

    read = _reading(technique, deployment, prompt, generate) if served else {}
    disk = deployment.hardware.disk_memory

    def excess(parts: Array) -> Array:
        """Largest excess over a memory's capacity; nearly affine in the batch."""
        worst: Array = np.full((), -1.0)
        batch = parts * technique.tiles()
        tables = (
            (_served(technique, deployment, batch, prompt, generate, read),)
            if served
            else phases(technique, deployment, batch, prompt, generate)
        )
        for phase in tables:
            worst = np.maximum(worst, given_memory(deployment, phase) / gpu - 1)
            worst = np.maximum(worst, deployment.gpus * tier_bytes(phase, "host") / host - 1)
            if disk:
                worst = np.maximum(worst, deployment.gpus * tier_bytes(phase, "disk") / disk - 1)
        return worst

    none, most = np.zeros((1, 1)), np.full((1, 1), float(MOST_SEQUENCES // technique.tiles()))
    return last_within(excess, none, most) * technique.tiles()
