"""Predicted against counted: FLOPs, bytes by channel and resident bytes, joined by name.

The prediction is the technique's own statement in ``kvsim/techniques``, under stack ``kvsim``; the
count comes from the tensors of a real run.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from kvsim.engine.roofline import all_ops
from kvsim.frozen import frozen
from kvsim.graph import Channel, Number, Step, Tier
from kvsim.machines.deployment import Deployment
from kvsim.prediction.memory import decode_point, phases, prefill_point
from kvsim.techniques.technique import Technique
from kvsim.validate.counter import OpCounter
from kvsim.validate.counts.measured import MeasuredBytes, measured_bytes
from kvsim.validate.run import Generation

PHASES = ("prefill", "between", "decode")
CHANNELS: tuple[Channel, ...] = ("hbm", "dram", "h2d", "d2h")
"""Every channel one GPU and its host have."""


@dataclass
class CountedWork:
    """What an op does over all layers and all passes of a phase."""

    flops: float = 0.0  # [FLOP]
    bytes: dict[Channel, float] = field(default_factory=dict)  # by channel [B]
    launches: float = 0.0  # kernels and copies

    def add(self, flops: float, moved: Mapping[Channel, float], launches: float = 0.0) -> None:
        """Add the work of an op."""
        self.flops += flops
        self.launches += launches
        for channel, n in moved.items():
            self.bytes[channel] = self.bytes.get(channel, 0.0) + n

    def times(self, factor: float) -> "CountedWork":
        """Multiply the work by how often it is done."""
        moved = {channel: factor * n for channel, n in self.bytes.items()}
        return CountedWork(factor * self.flops, moved, factor * self.launches)


@frozen
class Line:
    """One op of one phase."""

    phase: str
    op: str
    predicted: CountedWork
    counted: CountedWork
    reason: str  # why bytes may differ, or nothing

    @property
    def equal(self) -> bool:
        """Whether FLOPs and bytes are the same, but for rounding in fp64."""
        return self.same_flops and all(
            _nearly_equal(self.predicted.bytes.get(c, 0.0), self.counted.bytes.get(c, 0.0))
            for c in CHANNELS
        )

    @property
    def same_flops(self) -> bool:
        """Whether FLOPs are the same."""
        return _nearly_equal(self.predicted.flops, self.counted.flops)

    @property
    def holds(self) -> bool:
        """Equal, or the same FLOPs and a named difference in bytes."""
        return self.equal or (bool(self.reason) and self.same_flops)


@frozen
class Buffer:
    """Resident bytes of one buffer in one phase."""

    phase: str
    tier: Tier
    name: str
    predicted: float  # [B]
    counted: int  # [B]
    reason: str

    @property
    def equal(self) -> bool:
        """Whether both are the same."""
        return _nearly_equal(self.predicted, self.counted)

    @property
    def holds(self) -> bool:
        """Equal, or differing for a reason that is known."""
        return self.equal or bool(self.reason)


SHARED: dict[str, str] = {
    "pointwise": "element-wise ops: the stack uses one average for all models",
}
"""Ops of every technique whose bytes may differ, and why."""
WINDOWED = "sliding windows are masked: tokens that left one are still kept, moved and read"
WITH_WINDOWS = dict.fromkeys(
    [
        "attn",
        "scores",
        "topk",
        "load_kv",
        "fetch_v",
        "kv",
        "kv buffers",
        "keys",
        "values",
        "value buffers",
    ],
    WINDOWED,
)
"""Ops and buffers that differ where a context is longer than a layer's window."""
UNEVEN = dict.fromkeys(
    ("attn", "load_kv", "store_kv", "dequantise"),
    "sequences that accept different numbers of drafts are read and moved up to the longest",
)
"""Ops that differ where the sequences of a batch do."""


def _nearly_equal(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-9 * max(abs(a), abs(b))


@frozen
class Comparison:
    """One technique on one workload."""

    technique: Technique
    lines: tuple[Line, ...]
    buffers: tuple[Buffer, ...]
    measured: tuple[MeasuredBytes, ...] = ()  # of a run on a CPU that was watched

    @property
    def holds(self) -> bool:
        """Whether every op and buffer is as predicted, or differs for a reason that is known."""
        return all(x.holds for x in self.lines) and all(x.holds for x in self.buffers)


def compare(deployment: Deployment, run: Generation, counter: OpCounter) -> Comparison:
    """Compare a run with what its technique states.

    Parameters
    ----------
    deployment
        The model that ran, in fp16 or bf16.
    run
        The complete run, with prompts of one length.

    Returns
    -------
    Comparison
        Predicted and counted work of every op, and bytes of every buffer.
    """
    technique = as_run(run)
    stated = _stated_work(technique, deployment, run)
    counted = _counted(counter)
    windows = [shape.window for shape in run.impl.shapes if shape.window]
    outgrown = bool(windows) and min(windows) < run.longest + run.generate
    uneven = any(min(cached) < max(cached) for cached in run.rounds)
    reasons = SHARED | (WITH_WINDOWS if outgrown else {}) | (UNEVEN if uneven else {})
    reasons = reasons | run.impl.differences
    lines = []
    for phase in PHASES:
        for op in {**stated[phase], **counted[phase]}:
            work = counted[phase].get(op, CountedWork())
            predicted = stated[phase].get(op, CountedWork())
            if phase == "decode" and op in run.impl.op_periods:
                predicted = predicted.times(_as_often(run, run.impl.op_periods[op]))
            lines.append(Line(phase, op, predicted, work, reasons.get(op, "")))
    on_cpu = counter.watched and run.decoder.device.type == "cpu"
    measured = tuple(measured_bytes(technique.name, counter)) if on_cpu else ()
    buffers = tuple(_buffers(technique, deployment, run, reasons))
    return Comparison(technique, tuple(lines), buffers, measured)


def as_run(run: Generation) -> Technique:
    """Set the acceptance that a run really had, where that is a setting."""
    t = run.impl.technique
    gamma = t.drafts
    yielded = [n for counts in run.yielded for n in counts]
    if not gamma or not yielded:
        return t
    return t.with_rounds(acceptance=float((np.mean(yielded) - 1) / gamma))


def _stated_work(
    technique: Technique, deployment: Deployment, run: Generation
) -> dict[str, dict[str, CountedWork]]:
    """Work by phase; a round whose sequences differ in length is the mean over their lengths."""
    batch, prompt, generate = run.batch, run.longest, run.generate
    start = decode_point(batch, prompt, generate, 0)
    decode = [
        step
        for contexts, round_as in zip(run.rounds, _rounds_as(technique, run), strict=True)
        for step in round_as.cycle(
            deployment, replace(start, context=np.array(contexts, float))
        ).steps
    ]
    return {
        "prefill": _sum([technique.prefill(deployment, prefill_point(batch, prompt, generate))]),
        "between": _sum(technique.predecoding(deployment, start)),
        "decode": _sum(decode),
    }


def _as_often(run: Generation, every: int) -> float:
    """How often a run did what the prediction spreads over so many steps, over its even share."""
    steps, first = len(run.rounds), run.longest
    return ((first + steps) // every - first // every) * every / max(steps, 1)


def _rounds_as(technique: Technique, run: Generation) -> list[Technique]:
    """The technique as each round ran it: a full buffer may cut a round's drafts short."""
    drafted: list[int] | None = getattr(run.impl, "drafted", None)
    return (
        [technique] * len(run.rounds)
        if not drafted
        else [technique.with_rounds(g) for g in drafted]
    )


def _sum(steps: Iterable[Step]) -> dict[str, CountedWork]:
    """Work by op, the mean over points; those that have none are never launched."""
    total: dict[str, CountedWork] = {}
    for step in steps:
        for op, times in all_ops(step):
            flops = times * _mean(op.flops)
            moved = {c: times * _mean(n) for c, n in op.bytes.items()}
            if flops or any(moved.values()):
                work = total.setdefault(op.name, CountedWork())
                work.add(flops, moved, times * _mean(op.launches))
    return total


def _counted(counter: OpCounter) -> dict[str, dict[str, CountedWork]]:
    phases: dict[str, dict[str, CountedWork]] = {phase: {} for phase in PHASES}
    for one in counter.passes:
        phase = phases[one.kind if one.kind in phases else "decode"]
        for name, count in one.ops.items():
            phase.setdefault(name, CountedWork()).add(count.flops, count.bytes, count.launches)
    return phases


def _buffers(
    technique: Technique, deployment: Deployment, run: Generation, reasons: Mapping[str, str]
) -> Iterable[Buffer]:
    """Buffers that both sides name, while the prompt is read and after the last round.

    What does not change in between was reserved for the whole generation.
    """
    reading, last = phases(technique, deployment, run.batch, run.longest, run.generate)
    for phase, stated in (("prefill", reading), ("decode", last)):
        for tier, buffers in run.resident[phase].items():
            for name, counted in buffers.items():
                if name in stated.get(tier, {}) or phase == "decode":
                    stays = counted == run.resident["decode"].get(tier, {}).get(name)
                    of = last if stays and name in last.get(tier, {}) else stated
                    predicted = _mean(of.get(tier, {}).get(name, 0.0))
                    yield Buffer(phase, tier, name, predicted, counted, reasons.get(name, ""))


def _mean(number: Number) -> float:
    return float(np.mean(number))
