"""``kvsim validate``: what real runs counted beside what was predicted, op by op."""

from collections.abc import Iterable, Sequence

from kvsim.report.answer import Answer
from kvsim.report.answer import verdict as paragraph
from kvsim.report.json import Row, number
from kvsim.report.names import list_settings, short_names
from kvsim.report.pictures import DOWNWARDS, Chart
from kvsim.report.result import Result
from kvsim.report.table import Table, cells_table
from kvsim.report.terminal import BLANK, Block, Heading
from kvsim.report.units import DASH, format_number
from kvsim.validate.counts.check import LOGIT_TOLERANCE, CannotRun, CheckedTechnique
from kvsim.validate.counts.compare import CHANNELS, Buffer, Line
from kvsim.validate.counts.measured import MeasuredBytes

EXACT = 15  # digits: counts are shown whole
SHADES = {"equal": ("#26866a", ""), "explained": ("#8a7413", "/"), "DIFFER": ("#c0453f", "x")}
KEY = (
    f"exact: gives full KV's tokens; its fp32 logits must be within {LOGIT_TOLERANCE:g} of them. "
    "Rows are what was counted, over all layers and passes. equal: predicted to the last "
    "digit; explained: it differs for the reason given, and the prediction is below it. "
    "bytes seen: ops whose kernels were measured to move the bytes that the op names."
)
"""What the words in the tables mean."""


def make_result(
    found: Sequence[CheckedTechnique],
    title: str,
    about: Row,
    refused: Sequence[CannotRun] = (),
    command: str = "",
) -> Result[Sequence[CheckedTechnique]]:
    """Make the answer of ``kvsim validate``.

    Parameters
    ----------
    title
        Model, weights, device and sizes in words.
    about
        The same as fields.
    refused
        Techniques that could not run.
    """
    answer, key = _write_answer(found), [str(o.technique) for o in found]
    names = short_names(key)
    labels = [names[text] for text in key]
    settings, summary = list_settings(names), _summary_table(found)
    passed = all(o.passed for o in found) and not refused
    fields = about | {
        "techniques": [_technique_fields(o) for o in found],
        "left_out": [{"technique": str(f.technique), "reason": f.reason} for f in refused],
        "passed": passed,
        "answer": answer.row(),
    }
    blocks: list[Block] = [Heading(title), *answer.head(), summary, *settings]
    full = next((o.comparison.lines for o in found if o.technique.name == "full"), ())
    for label, o in zip(labels, found, strict=True):
        blocks += [BLANK, Heading(label), *_list_blocks(o, full)]
    details = []
    for label, o in zip(labels, found, strict=True):
        details.append(_line_table(o.comparison.lines, f"{label}: ops"))
        details.append(_buffer_table(o.comparison.buffers, f"{label}: buffers"))
        details.append(_measured_table(o.comparison.measured, f"{label}: bytes as measured"))
    items = [x for o in found for x in _list_items(o)]
    explained = [f"{', '.join(what)}: {why}." for why, what in _reasons(items).items()]
    return Result(
        command,
        title,
        answer,
        fields,
        found,
        passed=passed,
        tables=[summary],
        blocks=[*blocks, BLANK, KEY],
        draw=lambda: [_draw_bars(found, labels)],
        details=[table for table in details if table.rows],
        remarks=[*explained, KEY, *settings],
    )


def _list_blocks(found: CheckedTechnique, full: Iterable[Line]) -> list[Block]:
    """One technique's counts; ops that are full KV's are only named."""
    known = {(line.phase, line.op): line for line in full}
    every = found.comparison.lines
    lines = [x for x in every if found.technique.name == "full" or not _as_full(x, known)]
    blocks: list[Block] = [_line_table(lines)]
    for phase in dict.fromkeys(line.phase for line in every if line not in lines):
        same = [line.op for line in every if line not in lines and line.phase == phase]
        blocks.append(f"{phase} as full: {', '.join(same)}")
    blocks.append(_buffer_table(found.comparison.buffers))
    for reason, about in _reasons([*lines, *found.comparison.buffers]).items():
        blocks.append(f"explained: {', '.join(about)}: {reason}")
    return blocks


def _list_items(found: CheckedTechnique) -> list[Line | Buffer]:
    """List all that was counted of a technique."""
    return [*found.comparison.lines, *found.comparison.buffers]


def _technique_fields(found: CheckedTechnique) -> Row:
    """Collect one technique's checks under their contract names."""
    return {
        "technique": str(found.technique),
        "exact": found.must_agree,
        "same_tokens": found.same_tokens,
        "logit_difference": number(found.logit_difference),
        "ops": [_op(line) for line in found.comparison.lines],
        "buffers": [_buffer(buffer) for buffer in found.comparison.buffers],
        "measured": [_measured(one) for one in found.comparison.measured],
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


def _measured(one: MeasuredBytes) -> Row:
    return {
        "phase": one.phase,
        "op": one.op,
        "stated_bytes": one.stated,
        "measured_bytes": one.measured,
        "reason": one.reason,
    }


def verdict(item: Line | Buffer) -> str:
    """Say how a count compares with its prediction.

    Parameters
    ----------
    item
        Op or buffer with both.

    Returns
    -------
    str
        "equal", "explained" or "DIFFERS".
    """
    return "equal" if item.equal else "explained" if item.holds else "DIFFERS"


def _write_answer(found: Sequence[CheckedTechnique]) -> Answer:
    """State whether real runs agree with predictions."""
    failed = [str(o.technique) for o in found if not o.passed]
    items = [x for o in found for x in _list_items(o)]
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


def _summary_table(found: Sequence[CheckedTechnique]) -> Table:
    """Make the table of counts, tokens and logits, a line per technique."""
    names = short_names([str(o.technique) for o in found])
    summary = [
        [
            names[str(o.technique)],
            "yes" if o.must_agree else "no",
            _counts(o),
            "passed" if o.passed else "FAILED",
            f"{100 * o.same_tokens:.0f} %",
            f"{o.logit_difference:.1e}",
            _measured_ops(o),
        ]
        for o in found
    ]
    heads = ("technique", "exact", "counts", "", "tokens of full", "logits off", "bytes seen")
    return cells_table(heads, summary, 4, "0100234")


def _measured_ops(o: CheckedTechnique) -> str:
    """Of how many ops the bytes that were measured are those that the op names."""
    measured = o.comparison.measured
    return f"{sum(one.equal for one in measured)}/{len(measured)}" if measured else DASH


def _line_table(lines: Sequence[Line], title: str = "") -> Table:
    """Make the table of ops as counted, and below as predicted where that differs."""
    rows = [row for line in lines for row in _cells(line)]
    heads = ["phase", "op", "", "FLOP", *(f"{channel.upper()} B" for channel in CHANNELS)]
    kept = [i for i in range(len(heads)) if i < 4 or any(row[i] for row in rows)]
    ranks = "".join("2" if i >= 4 else "0" for i in kept)
    cells = [[row[i] for i in kept] for row in rows]
    return cells_table([heads[i] for i in kept], cells, 3, ranks, title)


def _as_full(line: Line, known: dict[tuple[str, str], Line]) -> bool:
    """Whether full KV does the same there."""
    full = known.get((line.phase, line.op))
    return full is not None and (line.predicted, line.counted) == (full.predicted, full.counted)


def _kinds(compared: CheckedTechnique) -> dict[str, int]:
    """Count what is equal, what differs for a known reason, and what differs."""
    verdicts = [verdict(item) for item in _list_items(compared)]
    return {
        "equal": verdicts.count("equal"),
        "explained": verdicts.count("explained"),
        "DIFFER": verdicts.count("DIFFERS"),
    }


def _counts(o: CheckedTechnique) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in _kinds(o).items() if n)


def _cells(line: Line) -> list[list[str]]:
    """What was counted, and below it what was predicted where that differs."""
    numbers = [
        [
            format_number(n, EXACT) if n else ""
            for n in (w.flops, *(w.bytes.get(c, 0.0) for c in CHANNELS))
        ]
        for w in (line.counted, line.predicted)
    ]
    first = [line.phase, line.op, verdict(line), *numbers[0]]
    return [first] if line.equal else [first, ["", "  predicted", "", *numbers[1]]]


def _buffer_table(buffers: Sequence[Buffer], title: str = "") -> Table:
    """Make the table of what buffers held, and below as predicted where that differs."""
    cells = [row for buffer in buffers for row in _buffer_cells(buffer)]
    return cells_table(("phase", "tier", "buffer", "", "B"), cells, 4, title=title)


def _measured_table(measured: Sequence[MeasuredBytes], title: str = "") -> Table:
    """Make the table of ops whose kernels were seen to move other bytes than the op names."""
    cells = [
        [one.phase, one.op, f"{one.stated:,}", f"{one.measured:,}", one.reason]
        for one in measured
        if not one.equal
    ]
    return cells_table(("phase", "op", "named B", "measured B", "why"), cells, 2, "", title)


def _buffer_cells(buffer: Buffer) -> list[list[str]]:
    sizes = [format_number(float(n), EXACT) for n in (buffer.counted, buffer.predicted)]
    first = [buffer.phase, buffer.tier, buffer.name, verdict(buffer), sizes[0]]
    return [first] if buffer.equal else [first, ["", "", "  predicted", "", sizes[1]]]


def _reasons(items: Sequence[Line | Buffer]) -> dict[str, list[str]]:
    """Group what differs for a known reason by its reason."""
    found: dict[str, list[str]] = {}
    for item in items:
        name = item.op if isinstance(item, Line) else item.name
        if verdict(item) == "explained" and name not in found.setdefault(item.reason, []):
            found[item.reason].append(name)
    return found


def _draw_bars(found: Sequence[CheckedTechnique], labels: Sequence[str]) -> Chart:
    title = "Counts of ops and buffers, by how they stand beside the prediction"
    chart = Chart(
        title,
        "counts",
        height=130 + 30 * len(found),
        yaxis=DOWNWARDS,
        barmode="stack",
        legend_traceorder="normal",
    )
    for kind, (colour, pattern) in SHADES.items():
        look = {"color": colour, "pattern": {"shape": pattern}}
        counts = [_kinds(o)[kind] for o in found]
        chart.bars(kind.lower(), counts, labels, look, hovertemplate="%{x} counts<extra></extra>")
    return chart
