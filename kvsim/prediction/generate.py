"""Predictions for a batch: TTFT, TPOT, throughput, memory and the largest batch.

A batch of equal prompts is read at once and generates its tokens in lockstep. Prefill yields the
first token, so a generation of g tokens decodes g - 1; every decoded token is charged the share
of the round that starts at its own context.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvsim.engine.timeline import makespan, steady_seconds
from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.graph import Array, Buffers, Number, Point, Step, Tier
from kvsim.machines.deployment import Deployment
from kvsim.options import OPTION_RANGES
from kvsim.prediction.memory import (
    TIERS,
    ZERO,
    decode_point,
    given_memory,
    largest_batch,
    phases,
    prefill_point,
    tier_bytes,
)
from kvsim.techniques.technique import Technique

POINTS_AT_ONCE = (
    2**14
)  # operating points evaluated at once: intermediate arrays stay in the CPU's cache


def check_workload(batch: Array, prompt: int, generate: int) -> None:
    """Refuse workload sizes outside any plausible range.

    Parameters
    ----------
    batch
        Sequences in the batch. [sequences]
    prompt
        Tokens of each prompt. [tokens]
    generate
        Tokens generated for each sequence. [tokens]

    Raises
    ------
    InputError
        For counts that are not whole, not positive, or absurdly large.
    """
    for name, values in (("--prompt", prompt), ("--generate", generate), ("--batch", batch)):
        most = int(OPTION_RANGES[name].most)
        numbers = np.asarray(values, dtype=float)
        wrong = ~((numbers >= 1) & (numbers <= most) & (numbers == np.floor(numbers)))
        if numbers.size == 0 or wrong.any():
            got = f"{numbers[wrong].flat[0]:.15g}" if wrong.any() else "nothing"
            raise InputError(f"{name}: got {got}; expected whole numbers from 1 to {most}")


def round_seconds(technique: Technique, deployment: Deployment, point: Point) -> Number:
    """Compute the time per token of decoding rounds that start at the point's context.

    Parameters
    ----------
    technique
        The KV-cache technique.
    deployment
        Model, machine and software stack.
    point
        The pass, or arrays of passes.

    Returns
    -------
    Number
        Time of a round over the tokens that it yields. [s]
    """
    cycle = technique.cycle(deployment, point)
    total: Number = 0.0
    for step in cycle.steps:
        total = total + steady_seconds(step, deployment)
    return total / cycle.tokens


@frozen
class Prediction:
    """The prediction for one technique at several batch sizes, with equal prompts.

    Results have the shape (n,), or (options, n) where the technique's settings are arrays of shape
    (options, 1, 1).

    Attributes
    ----------
    technique
        The KV-cache technique.
    deployment
        Model, machine and software stack.
    batch
        Sequences in the batch. (n,) [sequences]
    prompt
        Tokens of each prompt. [tokens]
    generate
        Tokens generated for each sequence. [tokens]
    contexts
        Context lengths at which decoding is evaluated and then summed; 0 for every generated token.
    """

    technique: Technique
    deployment: Deployment
    batch: Array
    prompt: int
    generate: int
    contexts: int = 0

    def __post_init__(self) -> None:
        check_workload(self.batch, self.prompt, self.generate)
        reason = self.technique.refuses(self.deployment)
        if reason:
            raise InputError(f"{self.technique.name} cannot run here: {reason}")
        settled = self.technique.for_batches(self.batch)
        object.__setattr__(self, "technique", settled)
        parts = settled.tiles()
        uneven = self.batch[self.batch % parts != 0]
        if uneven.size:
            raise InputError(
                f"{self.technique.name}: batch {uneven[0]:.0f} does not divide into {parts} parts; "
                f"choose multiples of {parts}" + _fewer_parts(self.technique)
            )

    @property
    def _column(self) -> Array:
        return self.batch[:, None]

    def _squeeze(self, values: Number) -> Array:
        """Drop the axis of contexts and spread over the batches."""
        array = np.asarray(values, dtype=float)
        return self._spread(array if array.ndim < 2 else array[..., 0])

    def _spread(self, values: Array) -> Array:
        """The same value for every batch where it does not depend on it."""
        if values.shape and values.shape[-1] == self.batch.size:
            return values
        return np.broadcast_to(values, (*values.shape[:-1], self.batch.size))

    @cached_property
    def prefill_s(self) -> Array:
        """Time of the pass over the prompts. [s]"""
        p = prefill_point(self._column, self.prompt, self.generate)
        return self._squeeze(makespan(self.technique.prefill(self.deployment, p), self.deployment))

    @property
    def load(self) -> str:
        """How requests arrive: all together ("batch"), or sent by clients over time ("served")."""
        return "batch"

    @property
    def ttft_s(self) -> Array:
        """Time to the first token of a batch that starts on an idle GPU. [s]"""
        return self.prefill_s

    @cached_property
    def decode_s(self) -> Array:
        """Time of all tokens after the first. [s]"""
        decoded = self.generate - 1
        total = self.between_s * (decoded > 0)
        for tokens, weight in self._steps(decoded):
            p = decode_point(self._column, self.prompt, self.generate, tokens)
            each = np.asarray(round_seconds(self.technique, self.deployment, p))
            each = np.broadcast_to(each, np.broadcast_shapes(each.shape, (1, tokens.size)))
            total = total + self._spread((each * weight).sum(axis=-1))
        return total

    @cached_property
    def between_s(self) -> Array:
        """Time of one-off work between prefill and the first decoding round. [s]"""
        p = decode_point(self._column, self.prompt, self.generate, 0.0)
        total: Array = np.zeros(self.batch.size)
        for step in self.technique.predecoding(self.deployment, p):
            total = total + self._squeeze(makespan(step, self.deployment))
        return total

    def _steps(self, decoded: int) -> Iterator[tuple[Array, Array]]:
        """Decoded tokens and their weights in the sum: all of them, or a quadrature."""
        if self.contexts and decoded > self.contexts:
            edges = np.linspace(0, decoded, self.contexts + 1)
            yield (
                np.floor((edges[:-1] + edges[1:]) / 2),
                np.full(self.contexts, decoded / self.contexts),
            )
            return
        size = max(1, POINTS_AT_ONCE // self.batch.size)
        for start in range(0, decoded, size):
            tokens = np.arange(start, min(start + size, decoded), dtype=float)
            yield tokens, np.ones(tokens.size)

    @property
    def tpot_s(self) -> Array:
        """Mean time per token after the first; NaN when only one is generated. [s]"""
        return self.decode_s / (self.generate - 1) if self.generate > 1 else self.decode_s * np.nan

    @property
    def decode_tok_s(self) -> Array:
        """Tokens per second of the whole batch while decoding. [tokens/s]"""
        return self.batch / self.tpot_s

    @property
    def rate_tok_s(self) -> Array:
        """Rate by which techniques are compared. [tokens/s]

        The decoding rate, or for a single generated token that of the whole generation.
        """
        return self.decode_tok_s if self.generate > 1 else self.output_tok_s

    @property
    def request_s(self) -> Array:
        """Time from arrival to the last token. [s]"""
        return self.prefill_s + self.decode_s

    @property
    def output_tok_s(self) -> Array:
        """Generated tokens per second, prefill included. [tokens/s]"""
        return self.batch * self.generate / self.request_s

    @cached_property
    def buffers(self) -> Buffers:
        """Resident bytes by memory tier and buffer. [B]

        The buffers of each tier are those of the phase, prefill or decoding, that needs most of it.
        """
        both = phases(self.technique, self.deployment, self._column, self.prompt, self.generate)
        merged: dict[Tier, Mapping[str, Number]] = {}
        for tier in TIERS:
            tables = [
                {name: self._squeeze(size) for name, size in phase.get(tier, {}).items()}
                for phase in both
            ]
            last = self._squeeze(tier_bytes(both[1], tier) - tier_bytes(both[0], tier)) >= 0
            names = dict.fromkeys([*tables[1], *tables[0]])
            if tier == "disk" and not names:
                continue
            merged[tier] = {
                name: np.where(last, *(t.get(name, ZERO) for t in tables[::-1])) for name in names
            }
        return merged

    @property
    def gpu_bytes(self) -> Array:
        """Peak memory of each GPU. [B]"""
        return self._spread(tier_bytes(self.buffers, "gpu"))

    @property
    def given_bytes(self) -> Array:
        """Memory of each GPU that the engine must be allowed to use. [B]"""
        return self._spread(given_memory(self.deployment, self.buffers))

    @property
    def host_bytes(self) -> Array:
        """Peak host memory of the replica. [B]"""
        return self.deployment.gpus * self._spread(tier_bytes(self.buffers, "host"))

    @property
    def disk_bytes(self) -> Array:
        """Peak space of the replica on its host's drive. [B]"""
        return self.deployment.gpus * self._spread(tier_bytes(self.buffers, "disk"))

    @property
    def fits(self) -> NDArray[np.bool]:
        """Whether the buffers fit in the memories of GPU, host and drive. (n,)"""
        hardware = self.deployment.hardware
        behind = self.host_bytes <= hardware.host_memory
        return (
            (self.gpu_bytes <= hardware.gpu_memory)
            & behind
            & (self.disk_bytes <= hardware.disk_memory)
        )

    @cached_property
    def max_batch(self) -> Array:
        """Largest batch that fits, 0 if none does. [sequences]"""
        t, d = self.technique, self.deployment
        return self._squeeze(
            largest_batch(
                t, d, self.prompt, self.generate, d.hardware.gpu_memory, d.hardware.host_memory
            )
        )

    def passes(self) -> list[tuple[Step, float]]:
        """Return the passes that determine the bottleneck, at the first batch size.

        Returns
        -------
        list of tuple[Step, float]
            Passes of a round in the middle of the generation, or the pass over the prompts if only
            one token is generated; each with the number of its repetitions.
        """
        if self.generate == 1:
            read = prefill_point(float(self.batch[0]), self.prompt, 1)
            return [(self.technique.prefill(self.deployment, read), 1.0)]
        return [(step, 1.0) for step in self.middle_round]

    @cached_property
    def middle_round(self) -> tuple[Step, ...]:
        """Passes of a decoding round in the middle of the generation, at the first batch size."""
        middle = decode_point(float(self.batch[0]), self.prompt, self.generate, self.generate // 2)
        return self.technique.cycle(self.deployment, middle).steps

    def usd_per_million(self) -> Array:
        """Return the price of a million generated tokens at each batch size.

        Returns
        -------
        array
            Price; NaN if that of the GPU is unknown. (n,) [USD]
        """
        price = self.deployment.hardware.price
        hourly = np.nan if price is None else price * self.deployment.gpus
        return hourly / 3600 / self.output_tok_s * 1e6


def _fewer_parts(technique: Technique) -> str:
    return f" or set {technique.name}:parts" if "parts" in technique.settings else ""


def at_batch(prediction: Prediction, index: int) -> Prediction:
    """Select one batch size of a prediction.

    Parameters
    ----------
    prediction
        The prediction, of several batch sizes.
    index
        Index in ``batch``, from 0.

    Returns
    -------
    Prediction
        The prediction with this batch size only.
    """
    return replace(prediction, batch=prediction.batch[index : index + 1])
