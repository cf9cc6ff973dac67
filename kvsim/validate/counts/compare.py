"""Comparison of predicted and counted FLOPs, bytes by channel, and resident bytes.

The prediction is the technique's own statement in ``kvsim/techniques``, under stack ``kvsim``; the
count comes from the tensors of a real run.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from kvsim.engine.roofline import all_ops
from kvsim.frozen import frozen
from kvsim.graph import Channel, Number, Step, Tier
from kvsim.machines.deployment import Deployment
from kvsim.prediction.memory import decode_point, phases, prefill_point
from kvsim.techniques.technique import Technique
from kvsim.validate.counter import Count, OpCounter
from kvsim.validate.run import Generation

ONE_KERNEL = "stated as kernels that hand a tensor on, or read one again; measured as one"
LINKS: tuple[Channel, ...] = ("h2d", "d2h")
MORE_MEASURED = {
    "weights of norms and the rotations of positions are read too": "any: pointwise sample",
    "the run gathers rows into a tensor of its own and writes or packs them from there": (
        "any: compact; gear: quantise; kivi: quantise; quantspec: quantise; specache: quantise"
    ),
    "small tables beside the numbers are read or written too": (
        "cachegen: decode_stream; mikv: balance; streamingllm: turn; turboquant: attn quantise "
        "rotate"
    ),
    "sums are kept, read and written in fp32": (
        "expected-attention: query_spread expect; flexprefill: rank_blocks; h2o: graduate "
        "lowest scores; infinigen: partial_keys; mikv: rank scores; xattention: antidiagonals "
        "rank_blocks; zipcache: probe"
    ),
    "the calling thread gathers or hands over rows without a lane that is measured": (
        "fastdecode: h2d d2h; kcache: h2d; shadowkv: h2d"
    ),
    "the run fetches for a round that does not come": (
        "flexgen: h2d; infinigen: h2d; kvpr: h2d; offload: h2d"
    ),
    "each row of blocks reads its keys again, and its output is joined to the others": (
        "flexprefill: attn; xattention: attn"
    ),
    "a tensor is handed from one op of the run to the next, which one kernel would keep": (
        "gear: attn correct; h2o: attn; kcache: scores; kvquant: outliers quantise; kvzip: "
        "repeat; mikv: attn; shadowkv: restore_keys; zipcache: attn"
    ),
    "scores of every query head are read; one per KV head is stated": (
        "h2o: select; infinigen: topk; quest: topk; shadowkv: topk"
    ),
    "rows are gathered into one buffer and copied to another": "infinigen: h2d; specache: h2d",
    "each query head gathers rows of its own; those of a KV head are stated once": ("kcache: attn"),
    "packed attention leaves its kernel in fp32, and small tables are read": (
        "kivi: attn; kvquant: attn; quantspec: attn; specache: attn attn_again"
    ),
    "rows are read, widened and written one by one as tokens are pushed down": ("mikv: quantise"),
    "queries attend over all keys behind masks, as PyTorch has no kernel for diagonals": (
        "minference: attn"
    ),
    "partial outputs in fp32 are handed to the kernel that joins them": "think: attn",
}
"""Why more is measured than stated, and of which technique's ops (``any``: of all techniques')."""


def _by_op() -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], list[str]] = {}
    for reason, where in MORE_MEASURED.items():
        for technique, ops in (text.split(": ") for text in where.split("; ")):
            for op in ops.split():
                found.setdefault((technique.removeprefix("any"), op), []).append(reason)
    return {key: "; ".join(reasons) for key, reasons in found.items()}


DIFFERENCES = _by_op()
"""The same by technique (none: all of them) and op; a test keeps it to what is."""


@frozen
class MeasuredBytes:
    """Bytes that an op moved in a phase, over all layers, as stated and as measured."""

    phase: str
    op: str
    stated: int  # bytes stated by the implementation [B]
    measured: int  # bytes measured [B]
    reason: str  # why they differ, if they do and the reason is known

    @property
    def equal(self) -> bool:
        """Whether stated and measured bytes are equal."""
        return self.stated == self.measured


def measured_bytes(technique: str, counter: OpCounter) -> Iterator[MeasuredBytes]:
    """Compare the bytes that ops stated with those that were measured.

    Parameters
    ----------
    counter
        Counter of a run on a CPU, where every kernel is PyTorch's own.

    Yields
    ------
    MeasuredBytes
        The bytes by phase and op, for copies by direction.
    """
    counted = _counted(counter)
    every = [(p, op, count) for p, ops in counted.items() for op, count in ops.items()]
    rows = [(phase, op, count.stated, count.measured) for phase, op, count in every]
    for way in LINKS:
        said = sum(int(count.bytes.get(way, 0)) for *_, count in every)
        rows.append(("", way, said, counter.links.get(way, 0)))
    for phase, op, stated, measured in rows:
        if stated or measured:
            named = DIFFERENCES.get((technique, op)) or DIFFERENCES.get(("", op), "")
            less = ONE_KERNEL if measured < stated and op not in LINKS else ""
            reason = "" if measured == stated else named or less
            yield MeasuredBytes(phase, op, stated, measured, reason)


PHASES = ("prefill", "between", "decode")
CHANNELS: tuple[Channel, ...] = ("hbm", "dram", "h2d", "d2h")
"""Every channel one GPU and its host have."""


@frozen
class Line:
    """Predicted and counted work of one op in one phase."""

    phase: str
    op: str
    predicted: Count
    counted: Count
    reason: str  # why bytes differ, if they may

    @property
    def equal(self) -> bool:
        """Whether FLOPs and bytes are equal, up to rounding."""
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
        """Whether all is equal, or only bytes differ, for a known reason."""
        return self.equal or (bool(self.reason) and self.same_flops)


@frozen
class Buffer:
    """Predicted and counted size of one buffer in one phase.

    Attributes
    ----------
    phase, tier, name
        Phase of the run, memory tier, and name of the buffer.
    predicted, counted
        Sizes. [B]
    reason
        Why they differ, if they do and the reason is known.
    """

    phase: str
    tier: Tier
    name: str
    predicted: float
    counted: int
    reason: str

    @property
    def equal(self) -> bool:
        """Whether predicted and counted sizes are equal."""
        return _nearly_equal(self.predicted, self.counted)

    @property
    def holds(self) -> bool:
        """Whether both are equal, or differ for a known reason."""
        return self.equal or bool(self.reason)


SHARED: dict[str, str] = {
    "pointwise": "element-wise ops: the stack uses one average for all models",
}
"""Ops of every technique whose bytes may differ, and why."""
WINDOWED = "sliding windows are masked: tokens that left one are still kept, moved and read"
WINDOWED_OPS = ("attn", "scores", "topk", "load_kv", "fetch_v")
WINDOWED_BUFFERS = ("kv", "kv buffers", "keys", "values", "value buffers")
WITH_WINDOWS = dict.fromkeys((*WINDOWED_OPS, *WINDOWED_BUFFERS), WINDOWED)
"""Ops and buffers that differ where a context is longer than a layer's window."""
UNEVEN = dict.fromkeys(
    ("attn", "load_kv", "store_kv", "dequantise"),
    "sequences that accept different numbers of drafts are read and moved up to the longest",
)
"""Ops that differ where the sequences of a batch do."""


NO_SHARES: Mapping[str, float] = MappingProxyType({})


def _nearly_equal(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-9 * max(abs(a), abs(b))


@frozen
class Comparison:
    """Comparison of predicted and counted work of one technique on one workload."""

    technique: Technique
    lines: tuple[Line, ...]
    buffers: tuple[Buffer, ...]
    measured: tuple[MeasuredBytes, ...] = ()  # bytes of a run on a CPU, if they were measured

    @property
    def holds(self) -> bool:
        """Whether every op and buffer is as predicted, or differs for a known reason."""
        return all(x.holds for x in self.lines) and all(x.holds for x in self.buffers)


def compare(deployment: Deployment, run: Generation, counter: OpCounter) -> Comparison:
    """Compare a run with the predictions of its technique.

    Parameters
    ----------
    deployment
        The model that ran, in fp16 or bf16.
    run
        The complete run, with prompts of one length.
    """
    technique = as_run(run)
    stated = _stated_work(technique, deployment, run)
    counted = _counted(counter)
    windows = [shape.window for shape in run.impl.shapes if shape.window]
    outgrown = bool(windows) and min(windows) < run.prompt + run.generate
    uneven = any(min(cached) < max(cached) for cached in run.rounds)
    reasons = SHARED | (WITH_WINDOWS if outgrown else {}) | (UNEVEN if uneven else {})
    reasons = reasons | run.impl.differences
    lines = []
    for phase in PHASES:
        for op in {**stated[phase], **counted[phase]}:
            predicted, work = (side[phase].get(op, Count()) for side in (stated, counted))
            lines.append(Line(phase, op, predicted, work, reasons.get(op, "")))
    on_cpu = counter.watched and run.decoder.device.type == "cpu"
    measured = tuple(measured_bytes(technique.name, counter)) if on_cpu else ()
    buffers = tuple(_buffers(technique, deployment, run, reasons))
    return Comparison(technique, tuple(lines), buffers, measured)


def as_run(run: Generation) -> Technique:
    """Return the technique with the acceptance of the run, if acceptance is one of its settings."""
    t = run.impl.technique
    gamma = t.drafts
    yielded = [n for counts in run.yielded for n in counts]
    if not gamma or not yielded:
        return t
    return t.with_rounds(acceptance=float((np.mean(yielded) - 1) / gamma))


def _stated_work(
    technique: Technique, deployment: Deployment, run: Generation
) -> dict[str, dict[str, Count]]:
    """Work by phase; a round whose sequences differ in length is the mean over their lengths."""
    sizes = run.batch, run.prompt, run.generate
    start = decode_point(*sizes, 0)
    decode: dict[str, Count] = {}
    for cached, round_as in zip(run.rounds, _rounds_as(technique, run), strict=True):
        cycle = round_as.cycle(deployment, replace(start, context=np.array(cached, float)))
        _add(decode, cycle.steps, run.impl.op_shares(cached))
    return {
        "prefill": _add({}, [technique.prefill(deployment, prefill_point(*sizes))]),
        "between": _add({}, technique.predecoding(deployment, start)),
        "decode": decode,
    }


def _rounds_as(technique: Technique, run: Generation) -> list[Technique]:
    """Return the technique as each round ran it; a full buffer may limit a round's drafts."""
    drafted: list[int] | None = getattr(run.impl, "drafted", None)
    return (
        [technique] * len(run.rounds)
        if not drafted
        else [technique.with_rounds(g) for g in drafted]
    )


def _add(
    total: dict[str, Count], steps: Iterable[Step], shares: Mapping[str, float] = NO_SHARES
) -> dict[str, Count]:
    """Add the work of steps by op, the mean over points; ops without work are never launched.

    Parameters
    ----------
    shares
        How much of an op is done, by its name; all of those that are not listed.
    """
    for step in steps:
        for op, times in all_ops(step):
            done = times * shares.get(op.name, 1.0)
            flops = done * _mean(op.flops)
            moved = {c: done * _mean(n) for c, n in op.bytes.items()}
            if flops or any(moved.values()):
                work = Count(flops, moved, launches=done * _mean(op.launches))
                total.setdefault(op.name, Count()).add(work)
    return total


def _counted(counter: OpCounter) -> dict[str, dict[str, Count]]:
    phases: dict[str, dict[str, Count]] = {phase: {} for phase in PHASES}
    for one in counter.passes:
        phase = phases[one.kind if one.kind in phases else "decode"]
        for name, count in one.ops.items():
            phase.setdefault(name, Count()).add(count)
    return phases


def _buffers(
    technique: Technique, deployment: Deployment, run: Generation, reasons: Mapping[str, str]
) -> Iterable[Buffer]:
    """Yield the buffers of both sides, during prefill and after the last round.

    What does not change in between was reserved for the whole generation.
    """
    reading, last = phases(technique, deployment, run.batch, run.prompt, run.generate)
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
