"""What an engine is to serve: model, technique, limits and memory, for any engine."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.frozen import frozen
from kvsim.machines.deployment import Deployment, HostLayers
from kvsim.machines.hardware import GIB
from kvsim.machines.parallel import Parallelism
from kvsim.models.configs import stand_in
from kvsim.prediction.memory import decode_point, held_beside, left_for_caches, weights_bytes
from kvsim.serving.rules import Rules
from kvsim.techniques.axes.base import Term
from kvsim.techniques.technique import Technique

if TYPE_CHECKING:  # numba, which only simulated replicas need
    from kvsim.prediction.generate import Prediction
    from kvsim.serving.costs import StepCosts

GB = 1e9
PERCENT_ROUNDING = 1e-6  # of a percent: what floating point loses
CHECKPOINTS = {
    "fp8-block": "an FP8 checkpoint with scales per block",
    "int8": "a W8A16 checkpoint",
    "int4": "a GPTQ or AWQ checkpoint",
    "awq": "an AWQ checkpoint",
    "int4-g32": "a checkpoint quantised in groups of 32",
    "mxfp4": "an MXFP4 checkpoint",
    "nvfp4": "an NVFP4 checkpoint",
}
"""Formats of weights that no engine makes while it loads a model, and what has them."""


@frozen
class Served:
    """One replica as an engine should run it.

    Attributes
    ----------
    model
        Name at Hugging Face, or path, of the checkpoint to load.
    base
        Name of the published model, for which draft heads are trained.
    weights
        Format of the weights, in the notation of ``--weights``.
    released
        Whether the model's published checkpoint has them in that format.
    spread
        Degrees of parallelism of the replica.
    max_model_len
        Longest sequence, prompt and generated tokens. [tokens]
    max_seqs, max_tokens, block_tokens
        Limits of each rank on running sequences and on tokens of a pass; tokens per KV block.
    utilisation
        Share of each GPU's memory that the engine uses.
    weights_bytes, cache_bytes, gpu_bytes
        Weights, KV cache and total memory of each GPU. [B]
    nodes
        Machines that hold the replica's GPUs.
    share_of_free
        Whether ``utilisation`` is a share of the memory that weights and the largest pass leave.
    prefix_caching
        Whether prompts share blocks.
    host_cache, nvme_cache
        Host memory and NVMe space for evicted blocks, of the whole replica. [B]
    host, layers
        Layers with weights in host memory, and the number of layers of the model.
    cache_tokens
        Tokens that the cache holds, of all sequences together. [tokens]
    apart
        Number of engines that only prefill and that only decode; None if each does both.
    role
        ``prefill`` or ``decode`` if this engine does only that, else empty.
    gpu
        Name of its card.
    replicas
        Equal replicas that are started.
    route
        How requests find one of them, as `--route` takes it; empty where nothing is assumed.
    draft_model
        A method of drafting and the head for it that the user named; empty for the published one.
    expert_columns
        Width of an expert's part on each GPU; 0 without experts.
    ubatch
        Prompt tokens of one pass in an engine with passes of a fixed size; 0 in others.
    fitting
        Sequences of the mean length that fit in the cache; 0 where no mean is known.
    state_tokens
        Cached tokens that take as much memory as the state of one sequence. [tokens]
    """

    model: str
    technique: Technique
    weights: str
    spread: Parallelism
    max_model_len: int
    max_seqs: int
    max_tokens: int
    block_tokens: int
    utilisation: float
    weights_bytes: float
    cache_bytes: float
    gpu_bytes: float
    prefix_caching: bool = False
    host_cache: float = 0.0
    released: bool = False
    nvme_cache: float = 0.0
    apart: tuple[int, int] | None = None
    role: str = ""
    share_of_free: bool = False
    nodes: int = 1
    host: HostLayers = HostLayers()
    layers: int = 0
    cache_tokens: int = 0
    gpu: str = ""
    replicas: int = 1
    route: str = ""
    draft_model: tuple[str, str] = ("", "")
    base: str = ""
    expert_columns: int = 0
    ubatch: int = 0
    fitting: int = 0
    state_tokens: float = 0.0

    @property
    def drafts(self) -> int:
        """Number of tokens drafted per round; 0 without speculative decoding."""
        return int(self.technique.drafts)

    @property
    def terms(self) -> dict[str, Term]:
        """Techniques that ``technique`` is composed of, by their names."""
        return {term.name: term for term in self.technique.terms}

    @property
    def host_gib(self) -> float:
        """Host memory for the KV cache per copy of attention. [GiB]"""
        return round(self.host_cache / self.spread.dp / GIB, 2)

    @property
    def host_gb_each(self) -> int:
        """Host memory for the KV cache per GPU, in whole GB."""
        return round(self.host_cache / self.spread.gpus / GB)

    @property
    def host_gib_each(self) -> float:
        """Host memory for the KV cache per GPU. [GiB]"""
        return round(self.host_cache / self.spread.gpus / GIB, 2)

    @property
    def nvme_gib_each(self) -> float:
        """NVMe space for the KV cache per GPU. [GiB]"""
        return round(self.nvme_cache / self.spread.gpus / GIB, 2)

    @property
    def nvme_gb(self) -> int:
        """NVMe space in whole GB."""
        return round(self.nvme_cache / GB)

    def with_role(self, role: str) -> "Served":
        """Return the settings of the engines for one role, if prefill and decode are disaggregated.

        Parameters
        ----------
        role
            ``"prefill"`` or ``"decode"``; only prefill engines cache prefixes.
        """
        if role == "prefill":
            return replace(self, role=role, apart=None)
        without: dict[str, Any] = {"prefix_caching": False, "host_cache": 0.0, "nvme_cache": 0.0}
        return replace(self, role=role, apart=None, **without)

    @property
    def static_share(self) -> float:
        """Weights and KV cache as a share of GPU memory (0 to 1), rounded down to two decimals."""
        return _round_down((self.weights_bytes + self.cache_bytes) / self.gpu_bytes)

    @property
    def free_share(self) -> float:
        """KV cache as a share (0 to 1) of the GPU memory that is free before it is allocated.

        This is ``utilisation`` where ``share_of_free`` is true; otherwise it is rounded down to two
        decimals.
        """
        if self.share_of_free:
            return self.utilisation
        others = self.gpu_bytes * self.utilisation - self.cache_bytes
        return _round_down(self.cache_bytes / max(self.gpu_bytes - others, 1.0))


def _round_down(share: float) -> float:
    """Round a share down to two decimals."""
    return int(100 * share + PERCENT_ROUNDING) / 100


def _deployed(d: Deployment) -> dict[str, Any]:
    """What a deployment says of a replica, whatever is played or predicted on it."""
    return {
        "model": _model(d),
        "weights": d.weights,
        "base": d.model.repository or d.model.name,
        "released": bool(d.model.checkpoint(d.weights)),
        "expert_columns": d.model.expert_ffn // d.parallelism.slices,
        "spread": d.parallelism,
        "host": d.host,
        "ubatch": int(d.stack.time.prompt_pass),
        "layers": d.model.layers,
        "gpu": d.hardware.name,
        "draft_model": d.draft_model,
        "nodes": -(-d.gpus // d.domain),
        "gpu_bytes": d.hardware.gpu_memory,
        "share_of_free": d.stack.memory.share_of_free,
    }


def serve_costs(
    costs: "StepCosts",
    utilisation: float,
    apart: tuple[int, int] | None = None,
    fitting: int = 0,
) -> Served:
    """Describe a simulated replica by the settings with which an engine runs it.

    Parameters
    ----------
    costs
        Cost model of the replica.
    utilisation
        Share of GPU memory that the engine may use, 0 to 1.
    apart
        Numbers of prefill and of decode engines; None if each engine does both.
    fitting
        Number of sequences of the mean length that fit in the cache; 0 if the mean is unknown.

    Returns
    -------
    Served
        The replica, from which flags of engines are written.
    """
    rules, d = costs.rules, costs.deployment
    held = int(costs.capacity / costs.room.block_bytes) * rules.block_tokens
    one, two = (float(x) for x in costs.room.decode_bytes[[1, -1]])
    block = (two - one) / max(len(costs.room.decode_bytes) - 2, 1)
    return Served(
        **_deployed(d),
        technique=costs.technique,
        max_model_len=rules.max_model_len
        or round_up_length(costs.longest, min(held, d.model.max_context)),
        cache_tokens=held,
        fitting=fitting,
        state_tokens=rules.block_tokens * (one / block - 1.0) if d.model.state_bytes else 0.0,
        max_seqs=-(-rules.max_seqs // d.dp),
        max_tokens=max(rules.max_tokens // d.lanes, -(-rules.max_seqs // d.dp)),
        block_tokens=rules.block_tokens,
        utilisation=utilisation,
        weights_bytes=_weights(costs.technique, d, costs.longest),
        cache_bytes=float(costs.capacity),
        prefix_caching=rules.prefix_caching,
        host_cache=rules.host_cache,
        nvme_cache=rules.nvme_cache,
        apart=apart,
    )


def round_up_length(longest: int, most: int) -> int:
    """Round the length of the longest request up to a power of two, as later ones may be longer.

    Parameters
    ----------
    longest
        Length of the longest simulated request. [tokens]
    most
        Limit from the model's context and the cache. [tokens]
    """
    return min(1 << max(longest - 1, 0).bit_length(), most)


def serve_prediction(prediction: "Prediction", utilisation: float) -> Served:
    """Describe the deployment of a predicted batch for engines.

    Parameters
    ----------
    prediction
        The prediction, of which the first batch is used.
    utilisation
        Share of GPU memory that the engine may use.
    """
    d, rules, batch = prediction.deployment, Rules(), int(prediction.batch[0])
    weights, beside = (float(np.max(x)) for x in held_beside(prediction.buffers))
    room = left_for_caches(d, utilisation * d.hardware.gpu_memory, beside, weights)
    return Served(
        **_deployed(d),
        technique=prediction.technique,
        max_model_len=min(prediction.prompt + prediction.generate, d.model.max_context),
        cache_tokens=batch * (prediction.prompt + prediction.generate),
        max_seqs=-(-batch // d.dp),
        max_tokens=max(rules.max_tokens, -(-batch // d.dp)),
        block_tokens=rules.block_tokens,
        utilisation=utilisation,
        weights_bytes=weights,
        cache_bytes=max(room, 0.0),
    )


def _weights(technique: Technique, deployment: Deployment, tokens: int) -> float:
    """Weights and embeddings on each GPU. [B]"""
    point = decode_point(1.0, np.array(float(tokens - 1)), 1.0, 0.0)
    return weights_bytes(technique.resident(deployment, point))


def _model(deployment: Deployment) -> str:
    """Name of the checkpoint to load: at Hugging Face where the catalogue has it.

    Where it has to be quantised first, a placeholder that says so.
    """
    d, name = deployment, deployment.model.name
    published, full = d.model.checkpoint(d.weights), d.model.repository or name
    if d.weights in CHECKPOINTS and not published:
        return stand_in(full, d.weights)
    return published or full
