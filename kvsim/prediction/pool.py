"""The KV pool as engines print it (tokens, blocks, concurrency), and the longest prompt."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil

import numpy as np

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.graph import Array, Point
from kvsim.machines.deployment import Deployment, move_fewest
from kvsim.machines.hardware import RELEASED
from kvsim.machines.profiles import load_stack
from kvsim.options import ENGINE_SHARE
from kvsim.prediction.generate import Prediction
from kvsim.prediction.memory import (
    TIERS,
    decode_point,
    left_for_caches,
    phases,
    tier_bytes,
    weights_bytes,
)
from kvsim.search import last_within
from kvsim.techniques.technique import Technique

POOL_BLOCK_TOKENS = 16
TOKEN_ROUNDING = 1e-6  # tokens that a mean over layers may be above a whole number
MAX_PROMPT = 2**24  # prompt beyond which no question is expected [tokens]


@frozen
class KvPool:
    """Memory of one GPU that is left for caches after weights, workspace and context.

    Attributes
    ----------
    share
        Share of the GPU's memory that the engine may use, from 0 to 1.
    bytes
        Memory for caches. [B]
    tokens
        Cached tokens that fit if all sequences have the given length. [tokens]
    length
        Prompt and generated tokens of one sequence. [tokens]
    kept
        Tokens of one sequence that the technique keeps in its cache, as a mean over the layers.
        [tokens]
    """

    share: float
    bytes: float
    tokens: int
    length: int
    kept: int

    @property
    def blocks(self) -> int:
        """KV blocks of 16 tokens, as vLLM's ``# GPU blocks``."""
        return self.tokens // POOL_BLOCK_TOKENS

    @property
    def concurrency(self) -> float:
        """Number of sequences of ``length`` tokens that fit at once, as vLLM reports it.

        It counts whole blocks per sequence, and need not be a whole number.
        """
        return self.blocks / -(-self.kept // POOL_BLOCK_TOKENS)


def pool(
    technique: Technique,
    deployment: Deployment,
    prompt: int,
    generate: int,
    share: float = ENGINE_SHARE,
) -> KvPool:
    """Compute the KV pool of a technique for sequences of one length.

    Parameters
    ----------
    technique
        The KV-cache technique.
    deployment
        Model, machine and software stack.
    prompt
        Tokens of a sequence's prompt. [tokens]
    generate
        Tokens generated for a sequence. [tokens]
    share
        Share of the GPU's memory that the engine is given.

    Returns
    -------
    KvPool
        Its tokens are 0 for techniques that keep no cache on the GPU.
    """
    parts, length = technique.tiles(), prompt + generate
    both = [
        technique.resident(deployment, _last_point(parts * n, prompt, generate)) for n in (1, 2)
    ]
    one, two = (float(tier_bytes(buffers, "gpu")) for buffers in both)
    each = (two - one) / parts
    usable, beside = share * deployment.hardware.gpu_memory, one - parts * each
    free = max(0.0, left_for_caches(deployment, usable, beside, weights_bytes(both[0])))
    share_kept = technique.kept_share(deployment, _last_point(parts, prompt, generate))
    kept = max(1, ceil(float(np.max(share_kept)) * length - TOKEN_ROUNDING))
    tokens = int(free / each * kept) if each > 0 else 0
    return KvPool(share, free, tokens, length, kept)


def _last_point(batch: float, prompt: int, generate: int) -> Point:
    return decode_point(float(batch), prompt, generate, generate - 1.0)


def usual_share(deployment: Deployment) -> float:
    """Return the share of GPU memory that an engine uses by default; 1 for other stacks.

    Parameters
    ----------
    deployment
        Model, machine and software stack.
    """
    return ENGINE_SHARE if deployment.stack.family in ("vllm", "sglang", "trtllm") else 1.0


def count_held(prediction: Prediction) -> int:
    """Count the sequences that an engine holds at once in the memory that it uses by default.

    Parameters
    ----------
    prediction
        The prediction, of which the first batch is used.

    Returns
    -------
    int
        At most what fits in all of the memory. [sequences]
    """
    most, d = int(prediction.max_batch[0]), prediction.deployment
    share = usual_share(d)
    if share == 1:
        return most
    room = pool(prediction.technique, d, prediction.prompt, prediction.generate, share)
    if not room.tokens:  # no memory is left, or the technique keeps no cache on the GPU
        return most if room.bytes else 0
    return min(most, int(room.concurrency))


def longest_prompt(
    technique: Technique, deployment: Deployment, batch: int, generate: int, share: float = 1.0
) -> int:
    """Find the longest prompt whose batch fits in GPU and host memory, and on the drive.

    Parameters
    ----------
    technique
        The KV-cache technique.
    deployment
        Model, machine and software stack.
    batch
        Sequences in the batch. [sequences]
    generate
        Tokens generated for each sequence. [tokens]
    share
        Share of each GPU's memory that the engine may use.

    Returns
    -------
    int
        0 if none fits. [tokens]
    """
    sequences = np.full((1, 1), float(batch))
    limits = {
        "gpu": share * deployment.hardware.gpu_memory,
        "host": deployment.hardware.host_memory / deployment.gpus,
        "disk": deployment.hardware.disk_memory / deployment.gpus,
    }

    def excess(prompt: Array) -> Array:
        """Bytes by which the tighter memory overflows."""
        both = phases(technique, deployment, sequences, np.maximum(prompt, 1.0), generate)
        over = [tier_bytes(phase, tier) - limits[tier] for phase in both for tier in TIERS]
        worst: Array = np.max(np.broadcast_arrays(*over), axis=0)
        return worst

    none, most = np.zeros((1, 1)), np.full((1, 1), float(MAX_PROMPT))
    return int(last_within(excess, none, most).min())


ADVISED_WEIGHTS = ("fp8", "int8", "int4")
ADVISED_GPUS = (2, 4, 8)
LAYER_WEIGHTS = "q4_k_m"  # that is advised where a part of a model runs on the CPU


@frozen
class Remedy:
    """A change of options that makes a workload fit.

    Attributes
    ----------
    option
        Command-line options to change, as text.
    prediction
        The prediction with the change.
    """

    option: str
    prediction: Prediction


def remedies(prediction: Prediction) -> Iterator[Remedy]:
    """Find changes after which a batch fits in memory, the smallest change of each kind.

    Parameters
    ----------
    prediction
        A prediction, of one batch size, that does not fit.

    Yields
    ------
    Remedy
        Fewer sequences, shorter prompts, narrower weights, more GPUs, or experts on the CPU.
    """
    d, batch = prediction.deployment, int(prediction.batch[0])
    most = count_held(prediction) or int(prediction.max_batch[0])
    if 0 < most < batch:
        yield Remedy(f"--batch {most}", replace(prediction, batch=np.array([float(most)])))
    prompt = longest_prompt(prediction.technique, d, batch, prediction.generate, usual_share(d))
    prompt = min(prompt, d.model.max_context - prediction.generate)
    if 0 < prompt < prediction.prompt:
        yield Remedy(f"--prompt {prompt}", replace(prediction, prompt=prompt))
    narrower = next(_try_each(prediction, ADVISED_WEIGHTS, (0,)), None)
    if narrower:
        yield narrower
    more = next(_try_each(prediction, ("",), ADVISED_GPUS), None)
    if more:
        yield more
    if narrower is None:
        both = next(_try_each(prediction, ADVISED_WEIGHTS, ADVISED_GPUS), None)
        if both and (more is None or both.prediction.deployment.tp < more.prediction.deployment.tp):
            yield both
    if not d.model.experts and not d.host and d.gpus == 1 and narrower is None:
        yield from _move_layers(prediction)
    every = frozenset(range(d.model.layers))
    if d.model.experts and d.host.experts != every and not (d.host.mlps or d.host.layers):
        other = {} if d.host else {"stack": load_stack("llamacpp")}  # its CPU takes the experts
        weights = RELEASED if d.weights == d.model.released else d.weights
        host = replace(d.host, experts=every)
        found = _try_change(prediction, host=host, weights=weights, **other)
        if found is not None:
            yield Remedy(f"{'--stack llamacpp ' if other else ''}--n-cpu-moe all", found)


def _try_each(
    prediction: Prediction, weights: Sequence[str], counts: Sequence[int]
) -> Iterator[Remedy]:
    """Changes of the weights' format and of the number of GPUs that make a batch fit."""
    for count in counts:
        for kind in weights:
            change: dict[str, object] = {"weights": kind} if kind else {}
            change |= {"tp": count} if count else {}
            found = _try_change(prediction, **change)
            if found is not None:
                yield Remedy(" ".join(f"--{key} {value}" for key, value in change.items()), found)


def _move_layers(prediction: Prediction) -> Iterator[Remedy]:
    """As few whole layers on the CPU as possible, with llama.cpp and its usual format."""
    here = prediction.deployment
    try:
        where = replace(here, stack=load_stack("llamacpp"), weights=LAYER_WEIGHTS)
        hosted = move_fewest(
            where, "layers", lambda d: bool(replace(prediction, deployment=d).fits[0])
        )
    except InputError:
        return
    if hosted is not None:
        kept = here.model.layers - len(hosted.host.layers)
        option = f"--stack llamacpp --weights {LAYER_WEIGHTS} --n-gpu-layers {kept}"
        yield Remedy(option, replace(prediction, deployment=hosted))


def _try_change(prediction: Prediction, **change: object) -> Prediction | None:
    """The prediction with a change of the deployment, if it can run and fits."""
    d = prediction.deployment
    if change.get("weights") in ADVISED_WEIGHTS and (
        d.weights != "fp16" or (change["weights"] == "fp8" and "fp8" not in d.hardware.flops)
    ):
        return None
    if "tp" in change and int(str(change["tp"])) <= d.tp:
        return None
    try:
        other = replace(prediction, deployment=replace(d, **change))  # type: ignore[arg-type]
        return other if bool(other.fits[0]) else None
    except InputError:
        return None
