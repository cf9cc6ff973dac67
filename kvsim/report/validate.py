"""``kvsim validate``: what real runs counted beside what was predicted, op by op."""

from collections import Counter
from collections.abc import Iterator, Sequence

from kvsim.report.answer import Answer
from kvsim.report.answer import verdict as paragraph
from kvsim.report.json import Row, number
from kvsim.report.names import list_settings, short_names
from kvsim.report.pictures import DOWNWARDS, RED, Chart
from kvsim.report.result import Result
from kvsim.report.table import Column, Table, text_column
from kvsim.report.terminal import BLANK, Block, Heading
from kvsim.report.units import DASH, format_number
from kvsim.validate.counts.check import LOGIT_TOLERANCE, CannotRun, CheckedTechnique
from kvsim.validate.counts.compare import CHANNELS, Buffer, Line

EXACT = 15  # digits: counts are shown whole
SHADES = {"equal": ("#26866a", ""), "explained": ("#8a7413", "/"), "DIFFERS": (RED, "x")}
"""Verdicts on a count: its colour and pattern."""
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
    fields = about | {
        "techniques": [_technique_fields(o) for o in found],
        "left_out": [{"technique": str(f.technique), "reason": f.reason} for f in refused],
        "passed": all(o.passed for o in found) and not refused,
    }
    rows: Sequence[Row] = fields["techniques"]
    answer, names = _write_answer(rows), short_names([row["technique"] for row in rows])
    labels = [names[row["technique"]] for row in rows]
    settings, summary = list_settings(names), _summary_table(rows, labels)
    blocks: list[Block] = [Heading(title), *answer.head(), summary, *settings]
    full = next((row for row in rows if row["technique"] == "full"), None)
    details = []
    for label, row in zip(labels, rows, strict=True):
        blocks += [BLANK, Heading(label), *_list_blocks(row, full)]
        details.append(_op_table(row["ops"], f"{label}: ops"))
        details.append(_buffer_table(row["buffers"], f"{label}: buffers"))
        details.append(_measured_table(row["measured"], f"{label}: bytes as measured"))
    explained = _reasons([item for row in rows for item in _list_items(row)]).items()
    return Result(
        command,
        title,
        answer,
        fields | {"answer": answer.row()},
        found,
        passed=fields["passed"],
        tables=[summary],
        blocks=[*blocks, BLANK, KEY],
        draw=lambda: [_draw_bars(rows, labels)],
        details=[table for table in details if table.rows],
        remarks=[
            *(f"{', '.join(what)}: {why}." for why, what in explained),
            KEY,
            *settings,
        ],
    )


def _technique_fields(found: CheckedTechnique) -> Row:
    """One technique's checks under their contract names."""
    compared = found.comparison
    return {
        "technique": str(found.technique),
        "exact": found.must_agree,
        "same_tokens": found.same_tokens,
        "logit_difference": number(found.logit_difference),
        "ops": [_op(line) for line in compared.lines],
        "buffers": [
            {
                "phase": buffer.phase,
                "tier": buffer.tier,
                "buffer": buffer.name,
                "predicted_bytes": buffer.predicted,
                "counted_bytes": buffer.counted,
                **_judge(buffer),
            }
            for buffer in compared.buffers
        ],
        "measured": [
            {
                "phase": one.phase,
                "op": one.op,
                "stated_bytes": one.stated,
                "measured_bytes": one.measured,
                "reason": one.reason,
            }
            for one in compared.measured
        ],
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
        **_judge(line),
    }


def _judge(item: Line | Buffer) -> Row:
    """How a count compares with its prediction."""
    verdict = "equal" if item.equal else "explained" if item.holds else "DIFFERS"
    return {"verdict": verdict, "reason": "" if item.equal else item.reason}


def _list_items(row: Row) -> list[Row]:
    """All that was counted of a technique."""
    return [*row["ops"], *row["buffers"]]


def _count_verdicts(row: Row) -> Counter[str]:
    return Counter(item["verdict"] for item in _list_items(row))


def _list_blocks(row: Row, full: Row | None) -> list[Block]:
    """One technique's counts; ops that are full KV's are only named."""
    same = [] if row is full or full is None else [op for op in row["ops"] if op in full["ops"]]
    others = [op for op in row["ops"] if op not in same]
    blocks: list[Block] = [_op_table(others)]
    for phase in dict.fromkeys(op["phase"] for op in same):
        names = [op["op"] for op in same if op["phase"] == phase]
        blocks.append(f"{phase} as full: {', '.join(names)}")
    blocks.append(_buffer_table(row["buffers"]))
    for reason, about in _reasons([*others, *row["buffers"]]).items():
        blocks.append(f"explained: {', '.join(about)}: {reason}")
    return blocks


def _reasons(items: Sequence[Row]) -> dict[str, list[str]]:
    """What differs for a known reason, by its reason."""
    found: dict[str, dict[str, None]] = {}
    for item in items:
        if item["verdict"] == "explained":
            found.setdefault(item["reason"], {})[item.get("op") or item["buffer"]] = None
    return {reason: list(names) for reason, names in found.items()}


def _write_answer(rows: Sequence[Row]) -> Answer:
    """State whether real runs agree with predictions."""
    failed = [row["technique"] for row in rows if not row["passed"]]
    counts = sum(map(_count_verdicts, rows), Counter[str]())
    told = f"{len(rows) - len(failed)} of {len(rows)} techniques agree with their predictions"
    explained = counts["explained"]
    return Answer(
        verdict=paragraph(
            [
                f"{'No' if failed else 'Yes'}: {told}; {counts['equal']:,} of {counts.total():,} "
                f"counts of operations and buffers are exactly equal.",
                f"{explained:,} differ for a reason given below." if explained else "",
                f"These do not: {', '.join(failed[:3])}." if failed else "",
            ]
        ),
        figures={"techniques": len(rows), "failed": len(failed), "counts": counts.total()},
    )


def _summary_table(rows: Sequence[Row], labels: Sequence[str]) -> Table:
    """Counts, tokens and logits, which are compared with full KV's, a line per technique."""
    columns = [
        text_column("technique", "label"),
        text_column("exact", lambda row: "yes" if row["exact"] else "no", 1),
        text_column("counts", _write_counts),
        text_column("", lambda row: "passed" if row["passed"] else "FAILED"),
        Column("tokens of full", "same_tokens", lambda share: f"{100 * share:.0f} %", 2),
        Column("logits off", "logit_difference", lambda x: DASH if x is None else f"{x:.1e}", 3),
        Column("bytes seen", "measured", _write_measured, 4),
    ]
    return Table(
        columns, [{**row, "label": label} for row, label in zip(rows, labels, strict=True)]
    )


def _write_counts(row: Row) -> str:
    counts = _count_verdicts(row)
    return ", ".join(f"{counts[v]} {v.removesuffix('S')}" for v in SHADES if counts[v])


def _write_measured(measured: Sequence[Row]) -> str:
    """Of how many ops the bytes that were measured are those that the op names."""
    equal = sum(one["stated_bytes"] == one["measured_bytes"] for one in measured)
    return f"{equal}/{len(measured)}" if measured else DASH


def _with_predicted(items: Sequence[Row], *sizes: str) -> Iterator[Row]:
    """Rows as counted, and below each as predicted where that differs."""
    for item in items:
        yield item | {size: item[f"counted_{size}"] for size in sizes}
        if item["verdict"] != "equal":
            empty = dict.fromkeys(("phase", "tier", "verdict"), "")
            predicted = {size: item[f"predicted_{size}"] for size in sizes}
            yield {**empty, "op": "  predicted", "buffer": "  predicted", **predicted}


def _exact(value: float) -> str:
    return format_number(value, EXACT) if value else ""


def _op_table(ops: Sequence[Row], title: str = "") -> Table:
    """FLOP of ops, and bytes by channel where there are any."""
    rows = list(_with_predicted(ops, "flop", "bytes"))
    columns = [
        text_column("phase", "phase"),
        text_column("op", "op"),
        text_column("", "verdict"),
        Column("FLOP", "flop", _exact),
        *(
            Column(f"{channel.upper()} B", f"bytes.{channel}", _exact, 2)
            for channel in CHANNELS
            if any(row["bytes"][channel] for row in rows)
        ),
    ]
    return Table(columns, rows, title)


def _buffer_table(buffers: Sequence[Row], title: str = "") -> Table:
    """What buffers held, by phase and tier."""
    columns = [
        text_column("phase", "phase"),
        text_column("tier", "tier"),
        text_column("buffer", "buffer"),
        text_column("", "verdict"),
        Column("B", "bytes", lambda size: format_number(size, EXACT)),
    ]
    return Table(columns, list(_with_predicted(buffers, "bytes")), title)


def _measured_table(measured: Sequence[Row], title: str = "") -> Table:
    """Ops whose kernels were seen to move other bytes than the op names."""
    columns = [
        text_column("phase", "phase"),
        text_column("op", "op"),
        Column("named B", "stated_bytes", lambda size: f"{size:,}"),
        Column("measured B", "measured_bytes", lambda size: f"{size:,}"),
        Column("why", "reason"),
    ]
    differing = [one for one in measured if one["stated_bytes"] != one["measured_bytes"]]
    return Table(columns, differing, title)


def _draw_bars(rows: Sequence[Row], labels: Sequence[str]) -> Chart:
    title = "Counts of operations and buffers, compared with the prediction"
    height = 130 + 30 * len(rows)
    chart = Chart(title, "counts", height=height, yaxis=DOWNWARDS, barmode="stack")
    chart.figure.update_layout(legend_traceorder="normal")
    for verdict, (colour, pattern) in SHADES.items():
        look = {"color": colour, "pattern": {"shape": pattern}}
        counts, name = [_count_verdicts(row)[verdict] for row in rows], verdict.lower()
        name = name.removesuffix("s") if verdict == "DIFFERS" else name
        chart.bars(name, counts, labels, look, hovertemplate="%{x} counts<extra></extra>")
    return chart
