"""How many weights a model has: as its checkpoint counts them, and as one token meets them."""

from typing import TYPE_CHECKING

from kvsim.models.kinds import LayerShape

if TYPE_CHECKING:
    from kvsim.models.model import Model


def parameters(m: "Model") -> int:
    """All weights. [numbers]"""
    embedding = (m.vocab + m.learned_positions) * m.hidden + m.tables
    head = 0 if m.tied else m.vocab * m.hidden
    return embedding + _layers(m, m.experts) + head + m.head_bias * m.vocab


def active_parameters(m: "Model") -> int:
    """Weights that one token is multiplied with. [numbers]"""
    head = m.vocab * m.hidden + m.head_bias * m.vocab
    return _layers(m, m.experts_active) + head


def mixer_parameters(m: "Model", shape: LayerShape) -> int:
    """Weights of what mixes tokens: matrices, biases, inner norms and sinks. [numbers]"""
    matrices = m.mixer_matrices(shape)
    found = sum(inputs * outputs for inputs, outputs in matrices.values())
    if shape.mixer == "recurrent":
        assert m.recurrence is not None
        return found + m.recurrence.small_parameters
    if not shape.attends:
        return found
    return (
        found
        + m.qkv_bias * matrices["qkv"][1]
        + m.out_bias * m.hidden
        + m.qk_norm * (1 if shape.mixer == "shared" else 2) * m.head_dim  # shared by the heads
        + m.sinks * m.heads
        + m.latent * (m.q_rank + m.kv_rank)  # norms of the compressed vectors
        + (m.indexer.small_parameters if m.indexer else 0)
    )


def mlp_parameters(m: "Model", shape: LayerShape, experts: int) -> int:
    """Weights of one layer's MLP, of which ``experts`` routed experts count. [numbers]

    The router always counts whole: it scores every expert before it chooses.
    """
    if not shape.mlp:
        return 0
    width = m.expert_ffn if shape.routed else m.ffn
    matrices = m.mlp_matrices(width)
    weights = sum(inputs * outputs for inputs, outputs in matrices.values())
    bias = sum(outputs for _, outputs in matrices.values())
    if not shape.routed:
        return weights + m.mlp_bias * bias
    router = (m.hidden + m.expert_biases + m.router_bias) * m.experts
    expert = weights + m.expert_biases * bias
    return router + (experts + m.shared_experts) * expert + m.shared_gate * m.hidden


def _layers(m: "Model", experts: int) -> int:
    """All layers with ``experts`` routed experts each, and what stands around them. [numbers]"""
    norm = m.hidden * (2 if m.norm_bias else 1)
    around = (1 + m.embedding_norm) * norm + m.once * m.hidden
    each = m.norms * norm + m.side * m.hidden + m.vectors
    for block, count in m.layout:
        for shape in block:
            own = mixer_parameters(m, shape) + mlp_parameters(m, shape, experts)
            around += count * (own + each)
    return around
