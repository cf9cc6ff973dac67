"""How many weights a model has: as its checkpoint counts them, and as one token meets them."""

from typing import TYPE_CHECKING

from kvsim.models.kinds import LayerShape

if TYPE_CHECKING:
    from kvsim.models.model import Model


def parameters(model: "Model") -> int:
    """All weights of the checkpoint. [numbers]"""
    embedding = (model.vocab + model.learned_positions) * model.hidden + model.tables
    head = 0 if model.tied else model.vocab * model.hidden
    return embedding + _layers(model, model.experts) + head + model.head_bias * model.vocab


def active_parameters(model: "Model") -> int:
    """Weights that one token is multiplied with. [numbers]"""
    head = model.vocab * model.hidden + model.head_bias * model.vocab
    return _layers(model, model.experts_active) + head


def mixer_parameters(model: "Model", shape: LayerShape) -> int:
    """Weights of what mixes tokens: matrices, biases, inner norms and sinks. [numbers]"""
    matrices = model.mixer_matrices(shape)
    found = sum(inputs * outputs for inputs, outputs in matrices.values())
    if shape.mixer == "recurrent":
        assert model.recurrence is not None
        return found + model.recurrence.small_parameters
    if not shape.attends:
        return found
    return (
        found
        + model.qkv_bias * matrices["qkv"][1]
        + model.out_bias * model.hidden
        + model.qk_norm
        * (1 if shape.mixer == "shared" else 2)
        * model.head_dim  # shared by the heads
        + model.sinks * model.heads
        + model.latent * (model.q_rank + model.kv_rank)  # norms of the compressed vectors
        + (model.indexer.small_parameters if model.indexer else 0)
    )


def mlp_parameters(model: "Model", shape: LayerShape, experts: int) -> int:
    """Weights of one layer's MLP, of which ``experts`` routed experts count. [numbers]

    The router always counts whole: it scores every expert before it chooses.
    """
    if not shape.mlp:
        return 0
    width = model.expert_ffn if shape.routed else model.ffn
    matrices = model.mlp_matrices(width)
    weights = sum(inputs * outputs for inputs, outputs in matrices.values())
    bias = sum(outputs for _, outputs in matrices.values())
    if not shape.routed:
        return weights + model.mlp_bias * bias
    router = (model.hidden + model.expert_biases + model.router_bias) * model.experts
    expert = weights + model.expert_biases * bias
    return router + (experts + model.shared_experts) * expert + model.shared_gate * model.hidden


def _layers(model: "Model", experts: int) -> int:
    """All layers with ``experts`` routed experts each, and what stands around them. [numbers]"""
    norm = model.hidden * (2 if model.norm_bias else 1)
    around = (1 + model.embedding_norm) * norm + model.once * model.hidden
    each = model.norms * norm + model.side * model.hidden + model.vectors
    for block, count in model.layout:
        for shape in block:
            own = mixer_parameters(model, shape) + mlp_parameters(model, shape, experts)
            around += count * (own + each)
    return around
