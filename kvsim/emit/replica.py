"""A planned replica as what an engine is asked to run."""

from typing import TYPE_CHECKING

import numpy as np

from kvsim.emit.engines import QUANTISED
from kvsim.emit.served import Served
from kvsim.machines.deployment import Deployment
from kvsim.models.configs import catalogue_entry, model_names
from kvsim.prediction.generate import Prediction
from kvsim.prediction.memory import (
    decode_point,
    held_beside,
    left_for_caches,
    weights_bytes,
)
from kvsim.serving.rules import Rules
from kvsim.techniques.base import Technique

if TYPE_CHECKING:
    from kvsim.serving.costs import StepCosts


def of_costs(
    costs: "StepCosts", utilisation: float, apart: tuple[int, int] | None = None
) -> Served:
    """A replica of a simulated fleet.

    Parameters
    ----------
    utilisation : share of each GPU's memory that the engine uses.
    apart : engines that only read prompts, and that only decode.
    """
    rules, d = costs.rules, costs.deployment
    return Served(
        model=_model(d),
        technique=costs.technique,
        weights=d.weights,
        released=d.weights == d.model.released,
        spread=d.parallelism,
        nodes=-(-d.gpus // d.domain),
        max_model_len=costs.longest,
        max_seqs=-(-rules.max_seqs // d.dp),
        max_tokens=max(rules.max_tokens // d.lanes, -(-rules.max_seqs // d.dp)),
        block_tokens=rules.block_tokens,
        utilisation=utilisation,
        weights_bytes=_weights(costs.technique, d, costs.longest),
        cache_bytes=float(costs.capacity),
        gpu_bytes=d.hardware.gpu_memory,
        prefix_caching=rules.prefix_caching,
        host_cache=rules.host_cache,
        nvme_cache=rules.nvme_cache,
        apart=apart,
        share_of_free=d.stack.memory.share_of_free,
    )


def of_prediction(prediction: Prediction, utilisation: float) -> Served:
    """A plan for equal requests: its batch and lengths, and the engines' usual budget of tokens."""
    d, rules, batch = prediction.deployment, Rules(), int(prediction.batch[0])
    longest = prediction.prompt + prediction.generate
    weights, beside = (float(np.max(x)) for x in held_beside(prediction.buffers))
    return Served(
        model=_model(d),
        technique=prediction.technique,
        weights=d.weights,
        released=d.weights == d.model.released,
        spread=d.parallelism,
        nodes=-(-d.gpus // d.domain),
        max_model_len=longest,
        max_seqs=-(-batch // d.dp),
        max_tokens=max(rules.max_tokens, -(-batch // d.dp)),
        block_tokens=rules.block_tokens,
        utilisation=utilisation,
        weights_bytes=weights,
        cache_bytes=max(
            left_for_caches(d, utilisation * d.hardware.gpu_memory, beside, weights), 0.0
        ),
        gpu_bytes=d.hardware.gpu_memory,
        share_of_free=d.stack.memory.share_of_free,
    )


def _weights(technique: Technique, deployment: Deployment, tokens: int) -> float:
    """Weights and embeddings on each GPU. [B]"""
    point = decode_point(1.0, np.array(float(tokens - 1)), 1.0, 0.0)
    return weights_bytes(technique.resident(deployment, point))


def _model(deployment: Deployment) -> str:
    """The model's name at Hugging Face where the catalogue has it.

    Where the published checkpoint has other weights and no engine makes these of it while loading,
    a name that says what to put there.
    """
    d, name = deployment, deployment.model.name
    full = str(catalogue_entry(name)["hf_id"]) if name in model_names() else name
    if d.weights in QUANTISED and d.weights != d.model.released:
        form = d.weights.upper().replace("-", "_")
        return f"{form}_CHECKPOINT_OF_{full.rpartition('/')[2]}"
    return full
