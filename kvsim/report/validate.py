"""What real runs showed, as JSON and as a table by technique and op."""

from collections.abc import Sequence
from typing import Any

from kvsim.report.answer import Answer, show_verdict
from kvsim.report.answer import verdict as paragraph
from kvsim.report.json import Row
from kvsim.report.names import settings_of, short_names
from kvsim.report.screen import Screen
from kvsim.report.table import Table, of_cells
from kvsim.report.units import short
from kvsim.validate.counts.check import TOLERANCE, CheckedTechnique
from kvsim.validate.counts.compare import CHANNELS, Buffer, Line

EXACT = 15  # digits: counts are shown whole


def outcome(found: CheckedTechnique) -> Row:
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
        "launches": int(line.counted.launches),
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
    """How a count compares with its prediction."""
    return "equal" if item.equal else "explained" if item.holds else "DIFFERS"


def answered(found: list[CheckedTechnique]) -> Answer:
    """Whether real runs agree with predictions, in words."""
    failed = [str(o.technique) for o in found if not o.passed]
    items: list[Line | Buffer] = [x for o in found for x in o.comparison.lines]
    items += [x for o in found for x in o.comparison.buffers]
    equal = sum(item.equal for item in items)
    explained = sum(item.holds and not item.equal for item in items)
    told = f"{len(found) - len(failed)} of {len(found)} techniques agree with their predictions"
    return Answer(
        verdict=paragraph(
            [
                f"{'No' if failed else 'Yes'}: {told}; {equal:,} of {len(items):,} counts of ops "
                f"and buffers are equal to the last digit.",
                f"{explained:,} differ for a reason given below." if explained else "",
                f"These do not: {', '.join(failed[:3])}." if failed else "",
            ]
        ),
        figures={"techniques": len(found), "failed": len(failed), "counts": len(items)},
    )


KEY = (
    f"exact: gives full KV's tokens; its fp32 logits must be within {TOLERANCE:g} of them. "
    "Rows are what was counted, over all layers and passes. equal: predicted to the last "
    "digit; explained: it differs for the reason given, and the prediction is below it."
)
"""What the words in the tables mean."""


def summary_table(found: list[CheckedTechnique]) -> Table:
    """A row per technique: its counts, tokens and logits beside full KV's."""
    names = short_names([str(o.technique) for o in found])
    summary = [
        [
            names[str(o.technique)],
            "yes" if o.must_agree else "no",
            _counts(o),
            "passed" if o.passed else "FAILED",
            f"{100 * o.same_tokens:.0f} %",
            f"{o.logit_difference:.1e}",
        ]
        for o in found
    ]
    heads = ("technique", "exact", "counts", "", "tokens of full", "logits off")
    return of_cells(heads, summary, 4, "010023")


def line_table(lines: Sequence[Line], title: str = "") -> Table:
    """Operations and bytes of ops, as counted, and below as predicted where that differs."""
    rows = [row for line in lines for row in _cells(line)]
    heads = ["phase", "op", "", "FLOP", *(f"{channel.upper()} B" for channel in CHANNELS)]
    kept = [i for i in range(len(heads)) if i < 4 or any(row[i] for row in rows)]
    ranks = "".join("2" if i >= 4 else "0" for i in kept)
    return of_cells([heads[i] for i in kept], [[row[i] for i in kept] for row in rows], 3, ranks,
                    title)  # fmt: skip


def print_outcomes(title: str, found: list[CheckedTechnique]) -> None:
    """The verdict, a summary, then every op and buffer of every technique."""
    out = Screen()
    out.title(title)
    show_verdict(out, answered(found))
    names = short_names([str(o.technique) for o in found])
    out.table(summary_table(found))
    for line in settings_of(names):
        out.say(line)
    full = next((o.comparison.lines for o in found if o.technique.name == "full"), ())
    known = {(line.phase, line.op): line for line in full}
    for o in found:
        lines = [x for x in o.comparison.lines if o.technique.name == "full" or not _as(x, known)]
        out.blank()
        out.title(names[str(o.technique)])
        out.table(line_table(lines))
        as_full = [line for line in o.comparison.lines if line not in lines]
        for phase in dict.fromkeys(line.phase for line in as_full):
            same = ", ".join(line.op for line in as_full if line.phase == phase)
            out.say(f"{phase} as full: {same}")
        held = ("phase", "tier", "buffer", "", "B")
        out.table(of_cells(held, [row for b in o.comparison.buffers for row in resident(b)], 4))
        for reason, about in reasons([*lines, *o.comparison.buffers]).items():
            out.say(f"explained: {', '.join(about)}: {reason}")
    out.blank()
    out.say(KEY)


def _as(line: Line, known: dict[tuple[str, str], Line]) -> bool:
    """Whether full KV does the same there."""
    full = known.get((line.phase, line.op))
    return full is not None and (line.predicted, line.counted) == (full.predicted, full.counted)


def kinds(compared: CheckedTechnique) -> dict[str, int]:
    """How many counts are equal, differ for a reason that is known, or differ."""
    items: list[Line | Buffer] = [*compared.comparison.lines, *compared.comparison.buffers]
    verdicts = [verdict(item) for item in items]
    return {
        "equal": verdicts.count("equal"),
        "explained": verdicts.count("explained"),
        "DIFFER": verdicts.count("DIFFERS"),
    }


def _counts(o: CheckedTechnique) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in kinds(o).items() if n)


def _cells(line: Line) -> list[list[str]]:
    """What was counted, and below it what was predicted where that differs."""
    numbers = [
        [short(n, EXACT) if n else "" for n in (w.flops, *(w.bytes.get(c, 0.0) for c in CHANNELS))]
        for w in (line.counted, line.predicted)
    ]
    first = [line.phase, line.op, verdict(line), *numbers[0]]
    return [first] if line.equal else [first, ["", "  predicted", "", *numbers[1]]]


def resident(buffer: Buffer) -> list[list[str]]:
    """What a buffer held, and below it what was predicted where that differs."""
    sizes = [short(float(n), EXACT) for n in (buffer.counted, buffer.predicted)]
    first = [buffer.phase, buffer.tier, buffer.name, verdict(buffer), sizes[0]]
    return [first] if buffer.equal else [first, ["", "", "  predicted", "", sizes[1]]]


def reasons(items: list[Line | Buffer]) -> dict[str, list[str]]:
    """What differs for a reason that is known, reason by reason."""
    found: dict[str, list[str]] = {}
    for item in items:
        name = item.op if isinstance(item, Line) else item.name
        if verdict(item) == "explained" and name not in found.setdefault(item.reason, []):
            found[item.reason].append(name)
    return found


def _finite(value: float) -> Any:
    return value if value < float("inf") else None
