"""What is resident besides caches: weights, embedding, activations, the runtime."""

import numpy as np

from kvsim.engine import attention, ops
from kvsim.graph import Buffers, Number, Point, Tier
from kvsim.machines.deployment import Deployment
from kvsim.models.model import LayerShape

HOST_WEIGHTS = "weights of host layers"


def merge(*parts: Buffers) -> Buffers:
    """Add the buffers of several parts of the system; sizes under the same tier and name add up.

    Parameters
    ----------
    *parts
        Resident bytes by memory tier and buffer name. [B]

    Returns
    -------
    Buffers
        All of them in one mapping. [B]
    """
    total: dict[Tier, dict[str, Number]] = {}
    for part in parts:
        for tier, buffers in part.items():
            into = total.setdefault(tier, {})
            for name, size in buffers.items():
                into[name] = into.get(name, 0.0) + size
    return total


def largest(*parts: Buffers) -> Buffers:
    """Combine buffers that are never in use at the same time: the largest of each name counts.

    Parameters
    ----------
    *parts
        Resident bytes by memory tier and buffer name. [B]

    Returns
    -------
    Buffers
        The largest size under each tier and name. [B]
    """
    total: dict[Tier, dict[str, Number]] = {}
    for part in parts:
        for tier, buffers in part.items():
            into = total.setdefault(tier, {})
            for name, size in buffers.items():
                into[name] = np.maximum(into[name], size) if name in into else size
    return total


def scale(part: Buffers, by: Number) -> Buffers:
    """Multiply every buffer by a factor.

    Parameters
    ----------
    part
        Resident bytes by memory tier and buffer name. [B]
    by
        The factor.

    Returns
    -------
    Buffers
        The scaled sizes. [B]
    """
    return {tier: {k: by * v for k, v in buffers.items()} for tier, buffers in part.items()}


def layer_weights(deployment: Deployment, shape: LayerShape, on_host: bool = False) -> float:
    """Compute the stored weights of one layer of a shard.

    Parameters
    ----------
    deployment
        Model, machine and software stack.
    shape
        Kind of the layer.
    on_host
        Whether only those in host memory count.

    Returns
    -------
    float
        Norms and biases are below 0.1 % and left out. [B]
    """
    m, home = deployment.shard, shape.home
    mixer, mlp = (not on_host or home in kinds for kinds in (("layer",), ("mlp", "layer")))
    size = 0.0
    if mixer:
        matrices = m.mixer_matrices(shape)
        size += sum(deployment.mixer_stored(name).bytes(*x) for name, x in matrices.items())
        size += deployment.stored("side").bytes(m.hidden, m.side) if m.side else 0.0
    if not shape.mlp:
        return size
    if not shape.routed:
        return size + (_mlp_weights(deployment, m.ffn) if mlp else 0.0)
    if mlp or home == "experts":
        size += expert_weights(deployment)
    if mlp:
        width = m.shared_experts * m.expert_ffn
        size += _mlp_weights(deployment, width) if m.shared_experts else 0.0
        size += ops.FP16_BYTES * m.hidden * m.experts
    return size


def expert_weights(deployment: Deployment) -> float:
    """Compute the stored weights of one layer's routed experts.

    Parameters
    ----------
    deployment
        Model, machine and software stack.

    Returns
    -------
    float
        Of the experts that one GPU has, whole or in part. [B]
    """
    width = deployment.expert_width
    return deployment.local_experts * _mlp_weights(deployment, width, "experts_")


def _mlp_weights(deployment: Deployment, width: int, prefix: str = "") -> float:
    matrices = deployment.shard.mlp_matrices(width)
    return sum(deployment.stored(prefix + name).bytes(*x) for name, x in matrices.items())


def sequences_alive(deployment: Deployment, point: Point) -> Number:
    """Count the sequences that are in a pass at once.

    Parameters
    ----------
    deployment
        Model, machine and software stack.
    point
        The pass, or arrays of passes.

    Returns
    -------
    Number
        The batch in decoding; in prefill as many as fit in a part, at least one. [sequences]
    """
    if not point.prefill:
        return point.batch
    return np.minimum(
        point.batch,
        np.maximum(1.0, deployment.stack.memory.prefill_chunk / np.maximum(point.new, 1.0)),
    )


def resident_once(
    deployment: Deployment, part: Point, scratch: Number, packed: bool = False
) -> Buffers:
    """Return the buffers that do not grow with layers: embedding, LM head, activations, runtime.

    Parameters
    ----------
    deployment
        Model, machine and software stack.
    part
        The forward pass of one part of the batch, whose activations are in memory at once.
    scratch
        Memory that attention needs besides queries, keys, values and scores. [B]
    packed
        Whether the prompt's cache is packed.

    Returns
    -------
    Buffers
        Resident bytes of each GPU by memory tier and buffer name. [B]
    """
    m, stack = deployment.shard, deployment.stack
    table, head = (
        deployment.vocabulary_stored(name).bytes(m.hidden, m.vocab)
        for name in ("embedding", "lm_head")
    )
    learned = ops.FP16_BYTES * (m.learned_positions * m.hidden + m.tables + m.once * m.hidden)
    # stages but the first and the last have neither the embedding nor the head
    looked_up = 0.0  # where rows are looked up by the host
    if stack.weights.gguf and deployment.hardware.host_memory > table:
        looked_up, table = table, head if m.tied else 0.0
    embedding = (table if m.tied or deployment.pp > 1 else table + head) + learned
    own = packed and m.queries_per_kv == 1  # code for grouped heads reads prompts in parts
    chunk = (own and stack.packed_cache.chunk) or stack.memory.prefill_chunk
    alive = np.minimum(part.tokens, chunk)
    length = part.max_length if stack.cache.static else part.length
    scored = attention.score_bytes(deployment, part) > 0
    scores = stack.attention.score_memory * m.heads * length if scored else 0.0
    hidden = stack.memory.activation_passes * m.hidden
    attending = ops.FP16_BYTES * (hidden + m.heads * m.head_dim + m.kv_width) + scores
    width = max(m.ffn, m.experts_active * m.expert_ffn)
    mlp = ops.FP16_BYTES * (hidden + (3 if m.gated else 2) * width)
    # cosines and sines, of all positions and of those at hand
    turns = 0.0 if m.learned_positions else 2 * ops.FP16_BYTES * m.head_dim
    turned = turns * (part.max_length + part.new)
    rows = part.batch if part.prefill and not stack.memory.prompt_logits else part.tokens
    layers = np.maximum(alive * attending + scratch, alive * mlp)
    used = np.maximum(layers, rows * m.vocab * stack.memory.logit_bytes)
    return {
        "gpu": {
            "embedding": stack.weights.copies * embedding,
            "workspace": turned + np.maximum(used, _reserved(deployment, chunk * mlp)),
            "context": stack.memory.context_memory,
        },
        **({"host": {HOST_WEIGHTS: looked_up}} if looked_up else {}),
    }


def _reserved(deployment: Deployment, part: float) -> float:
    """Return the memory that an engine reserves for its largest pass. [B]

    Every GPU has all logits when it samples.

    Parameters
    ----------
    part
        Activations of a whole part of prompts. [B]
    """
    memory = deployment.stack.memory
    if not memory.reserved_sequences:
        return 0.0
    logits = memory.reserved_sequences * deployment.model.vocab
    return max(part, logits * memory.sampling_bytes)
