"""From steps to what a user sees: TTFT, TPOT, throughput, memory and the largest batch.

A batch of equal prompts is read at once and generates its tokens in lockstep. Prefill yields the
first token, so a generation of g tokens decodes g - 1; every decoded token is charged the share
of the round that starts at its own context.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvsim.deployment import Deployment
from kvsim.errors import InputError
from kvsim.evaluate import all_ops, overhead_seconds, resource_seconds, seconds
from kvsim.graph import Array, Buffers, Number, Point, Step, Tier
from kvsim.search import last_within
from kvsim.techniques.base import Technique
from kvsim.timeline import makespan, steady

CHUNK = 2**14  # operating points evaluated at once: intermediate arrays stay in the CPU's cache
MOST_TOKENS = 10**7  # longer than any context in use; guards against typing errors
MOST_SEQUENCES = 10**6
TIERS: tuple[Tier, ...] = ("gpu", "host")
ZERO: Array = np.zeros(())


def check_workload(batch: Array, prompt: int, generate: int) -> None:
    """Refuse sizes no system could mean.

    Raises
    ------
    InputError
        For counts that are not whole, not positive, or absurdly large.
    """
    for name, values, most in (
        ("--prompt", prompt, MOST_TOKENS),
        ("--generate", generate, MOST_TOKENS),
        ("--batch", batch, MOST_SEQUENCES),
    ):
        numbers = np.asarray(values, dtype=float)
        wrong = ~((numbers >= 1) & (numbers <= most) & (numbers == np.floor(numbers)))
        if numbers.size == 0 or wrong.any():
            got = numbers[wrong].flat[0] if wrong.any() else "nothing"
            raise InputError(f"{name}: got {got:.15g}; expected whole numbers from 1 to {most}")


def round_seconds(t: Technique, d: Deployment, p: Point) -> Number:
    """Time per token of decoding rounds that start at the point's context. [s]"""
    cycle = t.cycle(d, p)
    total: Number = 0.0
    for step in cycle.steps:
        total = total + steady(step, d)
    return total / cycle.tokens


def prefill_point(batch: Number, prompt: Number, generate: Number) -> Point:
    """The pass over the prompt."""
    return Point(batch, 0.0, prompt, prompt, prompt + generate, prefill=True)


def decode_point(batch: Number, prompt: Number, generate: Number, decoded: Number) -> Point:
    """The pass that follows after ``decoded`` tokens have been decoded."""
    return Point(batch, prompt + decoded, 1.0, prompt, prompt + generate)


def grid_chunks(
    t: Technique, d: Deployment, batch: Array, context: Array
) -> Iterator[tuple[slice, slice, Array]]:
    """Time per token over a grid of any size, part by part in bounded memory. [s]

    Yields rows, columns and the values of that part, shape (rows, columns).
    """
    height, width = _tiling(batch.size, context.size)
    for i in range(0, batch.size, height):
        for j in range(0, context.size, width):
            b, c = batch[i : i + height, None], context[None, j : j + width]
            took = round_seconds(t, d, Point(b, c, 1.0, c, c + 1.0))
            shape = (b.size, c.size)
            yield slice(i, i + height), slice(j, j + width), np.broadcast_to(took, shape)


def grid_seconds(t: Technique, d: Deployment, batch: Array, context: Array) -> Array:
    """Time per token over a whole grid, shape (batches, contexts). [s]"""
    out = np.empty((batch.size, context.size))
    for rows, columns, took in grid_chunks(t, d, batch, context):
        out[rows, columns] = took
    return out


def _tiling(rows: int, columns: int) -> tuple[int, int]:
    """Chunk shape with at most ``CHUNK`` points, as square as the grid allows."""
    side = int(CHUNK**0.5)
    height = min(rows, max(side, CHUNK // columns))
    return height, min(columns, max(1, CHUNK // height))


@dataclass(frozen=True)
class Prediction:
    """What one technique does at a column of batch sizes.

    Batch has the shape (n, 1) and array-valued settings (options, 1, 1), so that results have
    the shape (n,) or (options, n).
    """

    technique: Technique
    deployment: Deployment
    batch: Array  # (n,)
    prompt: int
    generate: int
    contexts: int = 0  # 0: every generated token; otherwise that many points of the sum

    def __post_init__(self) -> None:
        check_workload(self.batch, self.prompt, self.generate)
        reason = self.technique.refuses(self.deployment)
        if reason:
            raise InputError(f"{self.technique.name} cannot run here: {reason}")
        parts = self.technique.tiles()
        uneven = self.batch[self.batch % parts != 0]
        if uneven.size:
            raise InputError(
                f"{self.technique.name}: batch {uneven[0]:.0f} does not divide into {parts} parts; "
                f"choose a multiple of {parts}" + _fewer_parts(self.technique)
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
        return np.broadcast_to(values, (*values.shape[:-1], self.batch.size))

    @cached_property
    def prefill_s(self) -> Array:
        """Time of the pass over the prompts. [s]"""
        p = prefill_point(self._column, self.prompt, self.generate)
        return self._squeeze(makespan(self.technique.prefill(self.deployment, p), self.deployment))

    @property
    def ttft_s(self) -> Array:
        """Time to the first token of a batch that starts on an idle GPU. [s]"""
        return self.prefill_s

    @cached_property
    def decode_s(self) -> Array:
        """Time of all tokens after the first. [s]"""
        decoded = self.generate - 1
        total: Array = np.zeros(self.batch.size)
        for step in self._between():
            total = total + self._squeeze(step) * (decoded > 0)
        for tokens, weight in self._steps(decoded):
            p = decode_point(self._column, self.prompt, self.generate, tokens)
            each = np.asarray(round_seconds(self.technique, self.deployment, p))
            each = np.broadcast_to(each, np.broadcast_shapes(each.shape, (1, tokens.size)))
            total = total + self._spread((each * weight).sum(axis=-1))
        return total

    def _between(self) -> Iterator[Number]:
        p = decode_point(self._column, self.prompt, self.generate, 0.0)
        for step in self.technique.between(self.deployment, p):
            yield makespan(step, self.deployment)

    def _steps(self, decoded: int) -> Iterator[tuple[Array, Array]]:
        """Decoded tokens and their weights in the sum: all of them, or a quadrature."""
        if self.contexts and decoded > self.contexts:
            edges = np.linspace(0, decoded, self.contexts + 1)
            yield (
                np.floor((edges[:-1] + edges[1:]) / 2),
                np.full(self.contexts, decoded / self.contexts),
            )
            return
        size = max(1, CHUNK // self.batch.size)
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
    def request_s(self) -> Array:
        """Time from arrival to the last token. [s]"""
        return self.prefill_s + self.decode_s

    @property
    def output_tok_s(self) -> Array:
        """Generated tokens per second, prefill included. [tokens/s]"""
        return self.batch * self.generate / self.request_s

    @cached_property
    def buffers(self) -> Buffers:
        """Resident bytes by tier and buffer, each tier in the phase that needs most of it. [B]"""
        phases = _phases(self.technique, self.deployment, self._column, self.prompt, self.generate)
        merged: dict[Tier, Mapping[str, Number]] = {}
        for tier in TIERS:
            tables = [
                {name: self._squeeze(size) for name, size in phase.get(tier, {}).items()}
                for phase in phases
            ]
            last = self._squeeze(_total(phases[1], tier) - _total(phases[0], tier)) >= 0
            names = dict.fromkeys([*tables[1], *tables[0]])
            merged[tier] = {
                name: np.where(last, *(t.get(name, ZERO) for t in tables[::-1])) for name in names
            }
        return merged

    @property
    def gpu_bytes(self) -> Array:
        """Peak memory of each GPU. [B]"""
        return self._spread(_total(self.buffers, "gpu"))

    @property
    def host_bytes(self) -> Array:
        """Peak host memory of the replica. [B]"""
        return self.deployment.tp * self._spread(_total(self.buffers, "host"))

    @property
    def fits(self) -> NDArray[np.bool]:
        """Whether both memories suffice."""
        hardware = self.deployment.hardware
        return (self.gpu_bytes <= hardware.gpu_memory) & (self.host_bytes <= hardware.host_memory)

    @cached_property
    def max_batch(self) -> Array:
        """Largest batch that fits, 0 if none does. [sequences]"""
        t, d = self.technique, self.deployment
        return self._squeeze(
            largest_batch(
                t, d, self.prompt, self.generate, d.hardware.gpu_memory, d.hardware.host_memory
            )
        )

    def usd_per_million(self) -> Array:
        """Price of a million generated tokens; NaN without a price. [USD]"""
        price = self.deployment.hardware.price
        hourly = np.nan if price is None else price * self.deployment.tp
        return hourly / 3600 / self.output_tok_s * 1e6


def _fewer_parts(t: Technique) -> str:
    return f" or set {t.name}:parts" if "parts" in t.settings else ""


def _phases(
    t: Technique, d: Deployment, batch: Number, prompt: Number, generate: Number
) -> tuple[Buffers, Buffers]:
    """Resident bytes while the prompt is read, and when the last token is decoded."""
    last = decode_point(batch, prompt, generate, generate - 1.0)
    return t.resident(d, prefill_point(batch, prompt, generate)), t.resident(d, last)


def _total(buffers: Buffers, tier: Tier) -> Array:
    total = ZERO
    for size in buffers.get(tier, {}).values():
        total = total + size
    return total


def largest_batch(
    t: Technique, d: Deployment, prompt: int, generate: int, gpu: float, host: float
) -> Array:
    """Largest batch whose buffers fit in both memories, a multiple of the technique's parts.

    Memory grows with the batch, so the batch is bracketed; 0 where not even one part fits.

    Parameters
    ----------
    gpu, host : memory of each GPU and of the host. [B]
    """

    def excess(parts: Array) -> Array:
        """Above 0 where some memory overflows; nearly affine in the batch."""
        worst: Array = np.full((), -1.0)
        for phase in _phases(t, d, parts * t.tiles(), prompt, generate):
            worst = np.maximum(worst, _total(phase, "gpu") / gpu - 1)
            worst = np.maximum(worst, d.tp * _total(phase, "host") / host - 1)
        return worst

    none, most = np.zeros((1, 1)), np.full((1, 1), float(MOST_SEQUENCES))
    return last_within(excess, none, most) * t.tiles()


def breakdown(steps: Iterable[Step], d: Deployment) -> dict[str, Number]:
    """Time of each op over all layers of some passes, whether overlapped or not. [s]"""
    total: dict[str, Number] = {}
    for step in steps:
        for op, count in all_ops(step):
            total[op.name] = total.get(op.name, 0.0) + count * seconds(op, d)
    return total


def bound_by(t: Technique, d: Deployment, p: Point) -> str:
    """What the busiest stream of a decoding round spends most of its time on (scalar point)."""
    busy: dict[str, dict[str, float]] = {"host": {"kernel launches": 0.0}}
    for step in t.cycle(d, p).steps:
        for op, count in all_ops(step):
            took = float(np.ravel(seconds(op, d))[0])
            if took == 0.0:
                continue
            needs = {k: float(np.ravel(v)[0]) for k, v in resource_seconds(op, d).items()}
            needs["fixed time"] = float(np.ravel(overhead_seconds(op, d))[0])
            limit = LIMITS.get(max(needs, key=needs.__getitem__), "fixed time")
            on = busy.setdefault(op.stream, {})
            on[limit] = on.get(limit, 0.0) + count * took
            if op.stream == "gpu":
                busy["host"]["kernel launches"] += count * op.launches * d.stack.launch
    busiest = max(busy.values(), key=lambda limits: sum(limits.values()))
    return max(busiest, key=busiest.__getitem__)


LIMITS = {
    "hbm": "GPU memory bandwidth",
    "dram": "host memory bandwidth",
    "h2d": "host-to-GPU link",
    "d2h": "GPU-to-host link",
    "link": "GPU-to-GPU link",
    "compute": "arithmetic",
}


def one(prediction: Prediction, index: int) -> Prediction:
    """The prediction at one of its batches."""
    return replace(prediction, batch=prediction.batch[index : index + 1])
