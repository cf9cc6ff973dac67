"""Memory for KV caches: capacity of a replica, and needs of sequences by number of KV blocks."""

from collections.abc import Callable
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.graph import Array, Number, Point, Tier
from kvsim.machines.deployment import Deployment
from kvsim.options import ENGINE_SHARE
from kvsim.prediction.memory import (
    decode_point,
    left_for_caches,
    prefill_point,
    tier_bytes,
    weights_bytes,
)
from kvsim.serving.rules import Rules
from kvsim.techniques.technique import Technique
from kvsim.traces.requests import Requests

Bytes = NDArray[np.int64]
Phase = Callable[[float, Array], Point]
"""Sequences and their length to an operating point of prefill or decode."""


@frozen
class Room:
    """GPU and host memory that a technique leaves for KV caches.

    Parameters
    ----------
    technique, deployment, rules
        The technique, the deployment, and the scheduling rules.
    longest
        Length of the longest sequence, prompt and generated tokens. [tokens]
    longest_chunk
        Largest number of prompt tokens of one request in a pass. [tokens]
    gpu_memory
        GPU memory that the engine may use; None for the usual share. [B]
    """

    technique: Technique
    deployment: Deployment
    rules: Rules
    longest: int
    longest_chunk: int
    gpu_memory: float | None = None

    @property
    def blocks_of_longest(self) -> int:
        """Number of KV blocks of the longest sequence."""
        return -(-self.longest // self.rules.block_tokens)

    @cached_property
    def decode_bytes(self) -> Bytes:
        """GPU memory of a decoding sequence by number of blocks; non-decreasing. (b,) [B]"""
        return self._bytes("gpu", _decoding)

    @cached_property
    def prompt_bytes(self) -> Bytes:
        """GPU memory of a sequence during prefill, by number of blocks. (b,) [B]"""
        return np.maximum(self._bytes("gpu", _reading), self.decode_bytes)

    @cached_property
    def host_bytes(self) -> Bytes:
        """Host memory (or equivalent drive space) of a sequence by number of blocks. (b,) [B]"""
        own, hardware = self._bytes("host", _decoding), self.deployment.hardware
        if not hardware.disk_memory:
            return own
        each = hardware.host_memory / hardware.disk_memory
        as_full: Bytes = np.ceil(each * self._bytes("disk", _decoding)).astype(np.int64)
        return np.maximum(own, as_full)

    def _bytes(self, tier: Tier, point: Phase) -> Bytes:
        """Return the cache of one sequence by its number of KV blocks. (b,) [B]"""
        tokens = np.arange(1, self.blocks_of_longest + 1.0) * self.rules.block_tokens
        parts = self.technique.tiles()

        def cached(batch: float) -> Number:
            """All that grows with the batch, but for the workspace of a step."""
            buffers = self.technique.resident(self.deployment, point(batch, tokens))
            return tier_bytes(buffers, tier) - buffers.get(tier, {}).get("workspace", 0.0)

        each = (cached(2.0 * parts) - cached(1.0 * parts)) / parts
        whole = np.ceil(np.broadcast_to(each, tokens.shape) - 1e-6)
        return np.concatenate([[0], np.maximum.accumulate(whole)]).astype(np.int64)

    @property
    def block_bytes(self) -> float:
        """Mean size of a KV block of the longest sequence. [B]"""
        return float(self.decode_bytes[-1] / self.blocks_of_longest)

    @property
    def host_capacity(self) -> int:
        """Host memory per GPU for the caches that a technique keeps there. [B]"""
        return int(self.deployment.hardware.host_memory / self.deployment.gpus)

    @cached_property
    def capacity(self) -> int:
        """Memory of each GPU that is left for caches. [B]

        Raises
        ------
        InputError
            If weights and workspace leave nothing.
        """
        d, rules = self.deployment, self.rules
        if rules.blocks:
            return round(rules.blocks * self.block_bytes)
        tiles = self.technique.tiles()
        needs = max(
            self._get_other_bytes(self.prompt_bytes, _reading, tiles * d.dp, self.longest_chunk),
            self._get_other_bytes(self.decode_bytes, _decoding, tiles * rules.max_seqs, 1),
        )
        usual = ENGINE_SHARE * d.hardware.gpu_memory
        memory = usual if self.gpu_memory is None else self.gpu_memory
        parts = self.technique.resident(d, _decoding(float(tiles), np.array(float(self.longest))))
        left = left_for_caches(d, memory, needs, weights_bytes(parts))
        if left < self.decode_bytes[1]:
            raise InputError(
                f"{d.model.name} on {d.hardware.name}: weights and workspace take "
                f"{needs / 2**30:.1f} of the {memory / 2**30:.1f} GiB that the engine may use and "
                f"leave no KV cache; choose a larger GPU, more of them (--tp) or narrower --weights"
            )
        return int(left)

    def _get_other_bytes(self, own: Bytes, point: Phase, batch: int, length: int) -> float:
        """Return the memory besides the caches of ``batch`` sequences of ``length`` tokens. [B]"""
        p = point(float(batch), np.array(float(length)))
        total = float(tier_bytes(self.technique.resident(self.deployment, p), "gpu"))
        return total - batch * float(own[-(-length // self.rules.block_tokens)])


def _reading(batch: float, length: Array) -> Point:
    """Return the point of ``batch`` sequences of ``length`` tokens in prefill."""
    return prefill_point(batch, length, 1.0)


def _decoding(batch: float, length: Array) -> Point:
    """Return the point of ``batch`` sequences of ``length`` tokens in decoding."""
    return decode_point(batch, length - 1, 1.0, 0.0)


@frozen
class ReplicaMemory:
    """The memory that a replica has for caches: technique, deployment and scheduling rules.

    Parameters
    ----------
    longest : longest sequence, prompt and generated tokens. [tokens]
    longest_prompt : longest prompt. [tokens]
    gpu_memory : memory of each GPU that the engine may use; None for the default share. [B]

    Raises
    ------
    InputError
        If the technique cannot run there, or the model leaves no memory for a cache.
    """

    technique: Technique
    deployment: Deployment
    rules: Rules
    longest: int
    longest_prompt: int
    gpu_memory: float | None = None

    def __post_init__(self) -> None:
        reason = self.technique.refuses(self.deployment)
        if reason:
            raise InputError(f"{self.technique.name} cannot run here: {reason}")

    @classmethod
    def for_requests(
        cls,
        technique: Technique,
        deployment: Deployment,
        rules: Rules,
        requests: Requests,
        gpu_memory: float | None = None,
    ) -> Self:
        """Return the memory of a replica that serves given requests.

        Requests beyond the context count as long as the context.

        Parameters
        ----------
        technique : the technique.
        deployment : model, machine and software.
        rules : scheduling of each replica.
        requests : the requests to serve.
        gpu_memory : memory of each GPU that the engine may use. [B]
        """
        most = rules.max_model_len or deployment.model.max_context
        lengths = (requests.prompt + requests.generate, requests.prompt)
        longest, longest_prompt = (min(int(x.max()), most) for x in lengths)
        return cls(technique, deployment, rules, longest, longest_prompt, gpu_memory)

    @property
    def context(self) -> int:
        """Length of the longest request that the engine accepts. [tokens]"""
        return self.rules.max_model_len or self.deployment.model.max_context

    @cached_property
    def room(self) -> Room:
        """Memory that the replica has for caches."""
        kind = self.technique, self.deployment, self.rules
        return Room(*kind, self.longest, self.longest_chunk, self.gpu_memory)

    @property
    def capacity(self) -> int:
        """Memory of each GPU that is left for caches. [B]

        Raises
        ------
        InputError
            If weights and workspace leave nothing.
        """
        return self.room.capacity

    @property
    def host_capacity(self) -> int:
        """Host memory per GPU for the caches of running sequences. [B]"""
        stored = int(self.rules.host_cache / self.deployment.gpus)
        return max(self.room.host_capacity - stored, 0)

    @property
    def longest_chunk(self) -> int:
        """Largest number of prompt tokens of one request in a pass."""
        chunked = self.rules.prefill == "chunked"
        part = self.rules.max_tokens // self.deployment.lanes
        return min(self.longest_prompt, part) if chunked else self.longest_prompt
