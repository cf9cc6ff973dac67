"""What real runs showed, as JSON and as a table by technique and op."""

from typing import Any

from kvsim.report.rows import Row
from kvsim.report.tables import console, short, table
from kvsim.validate.check import TOLERANCE, Outcome
from kvsim.validate.compare import CHANNELS, Buffer, Line


def outcome(found: Outcome) -> Row:
    """One technique's checks under their contract names."""
    return {
        "technique": str(found.technique),
        "exact": found.must_agree,
        "same_tokens": found.same_tokens,
        "logit_difference": _finite(found.logit_difference),
        "ops": [_op(line) for line in found.comparison.lines],
        "buffers": [_buffer(buffer) for buffer in found.comparison.buffers],
        "passed": found.passed,
    }


def _op(line: Line) -> Row:
    both = {"predicted": line.predicted, "counted": line.counted}
    return {
        "phase": line.phase,
        "op": line.op,
        **{f"{key}_flop": work.flops for key, work in both.items()},
        **{
            f"{key}_bytes": {c: work.bytes.get(c, 0.0) for c in CHANNELS}
            for key, work in both.items()
        },
        "launches": line.launches,
        "verdict": verdict(line),
        "reason": "" if line.equal else line.reason,
    }


def _buffer(buffer: Buffer) -> Row:
    return {
        "phase": buffer.phase,
        "tier": buffer.tier,
        "buffer": buffer.name,
        "predicted_bytes": buffer.predicted,
        "counted_bytes": buffer.counted,
        "verdict": verdict(buffer),
        "reason": "" if buffer.equal else buffer.reason,
    }


def verdict(item: Line | Buffer) -> str:
    """How a count stands beside its prediction."""
    return "equal" if item.equal else "named" if item.holds else "DIFFERS"


def print_outcomes(title: str, found: list[Outcome]) -> None:
    """A summary, and every op and buffer."""
    out = console()
    out.print(title, style="bold")
    summary = [
        [
            str(o.technique).replace(",", ", "),
            "yes" if o.must_agree else "no",
            f"{100 * o.same_tokens:.0f} %",
            f"{o.logit_difference:.1e}",
            _counts(o),
            "passed" if o.passed else "FAILED",
        ]
        for o in found
    ]
    columns = {
        "technique": "left", "exact": "left", "tokens of full": "right", "logits off": "right",
        "counts": "left", "": "left",
    }  # fmt: skip
    out.print(table(columns, summary))
    for o in found:
        out.print()
        out.print(str(o.technique), style="bold")
        lines = [_cells(line) for line in o.comparison.lines]
        heading = {
            "phase": "left", "op": "left", "FLOPs": "right", "counted": "right",
            "bytes": "right", "counted ": "right", "": "left",
        }  # fmt: skip
        out.print(table(heading, [*lines, *map(_resident, o.comparison.buffers)]))
        for reason, names in _reasons(o).items():
            out.print(f"named: {', '.join(names)}: {reason}")
    out.print()
    out.print(
        f"exact: gives full KV's tokens; its fp32 logits must be within {TOLERANCE:g} of them"
    )
    out.print("bytes: of all channels (--json has them apart); equal: the same, to the last byte")


def _counts(o: Outcome) -> str:
    items: list[Line | Buffer] = [*o.comparison.lines, *o.comparison.buffers]
    verdicts = [verdict(item) for item in items]
    kinds = {"equal": verdicts.count("equal"), "named": verdicts.count("named")}
    kinds["DIFFER"] = verdicts.count("DIFFERS")
    return ", ".join(f"{n} {kind}" for kind, n in kinds.items() if n)


def _cells(line: Line) -> list[str]:
    flops = [short(line.predicted.flops, 9), short(line.counted.flops, 9)]
    moved = [short(sum(w.bytes.values()), 9) for w in (line.predicted, line.counted)]
    return [line.phase, line.op, *flops, *moved, verdict(line)]


def _resident(buffer: Buffer) -> list[str]:
    sizes = [short(buffer.predicted, 9), short(float(buffer.counted), 9)]
    return [buffer.phase, f"[{buffer.tier}] {buffer.name}", "", "", *sizes, verdict(buffer)]


def _reasons(o: Outcome) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for line in o.comparison.lines:
        if verdict(line) == "named" and line.op not in reasons.setdefault(line.reason, []):
            reasons[line.reason].append(line.op)
    for buffer in o.comparison.buffers:
        if verdict(buffer) == "named" and buffer.name not in reasons.setdefault(buffer.reason, []):
            reasons[buffer.reason].append(buffer.name)
    return reasons


def _finite(value: float) -> Any:
    return value if value < float("inf") else None
