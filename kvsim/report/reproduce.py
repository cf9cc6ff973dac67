"""The result of ``kvsim reproduce``: measured values, predictions and errors."""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import date

from kvsim.evidence.predicted import PublishedRow
from kvsim.evidence.published import summarise_mechanisms
from kvsim.evidence.scores import Score, error, score
from kvsim.machines.deployment import basis
from kvsim.report import evidence, units
from kvsim.report.answer import Answer, verdict
from kvsim.report.colours import PALETTE
from kvsim.report.json import Row, number
from kvsim.report.pictures import DOWNWARDS, GREY, RED, Chart
from kvsim.report.result import Result
from kvsim.report.table import Column, Table, percent_column, text_column
from kvsim.report.terminal import BLANK, Block
from kvsim.report.units import format_number

LOOKS = (
    ("fit", GREY, "circle", "fitted"),
    ("check", PALETTE[0], "diamond", "not fitted"),
    ("anomaly", RED, "x", "anomaly"),
)
"""What rows are used for: colour, symbol and name of each use."""
USES = tuple(use for use, *_ in LOOKS)
SHOWN = 40  # rows printed; JSON and page have all
MAX_TABLES_DRAWN = 20  # tables in one picture


def make_result(
    rows: list[PublishedRow], predicted: list[float], source: str
) -> Result[list[Score]]:
    """Make the result of ``kvsim reproduce``.

    Parameters
    ----------
    rows
        The measurements.
    predicted
        The predicted value of each, in the unit of its metric.
    source
        Name of the paper, path of the file, or ``all``, for the title.
    """
    scores, answer = score(rows, predicted), _write_answer(rows, predicted)
    pairs = list(zip(rows, predicted, strict=True))
    plain = [_row(row, value) for row, value in pairs]
    mechanisms = summarise_mechanisms(pairs)
    fields: Row = {
        "answer": answer.row(),
        "rows": plain,
        "tables": [_plain_score(s) for s in scores],
        "mechanisms": [
            {"of": of, "which": which, "rows": count, "mean": mean, "worst": worst}
            for (of, which), (count, mean, worst) in mechanisms.items()
        ],
    }
    by_kind = Table(
        [
            text_column("held out", "of"),
            text_column("which", "which"),
            Column("rows", "rows"),
            Column("mean / worst", "mean", write=lambda row: _pair(row["mean"], row["worst"])),
        ],
        fields["mechanisms"],
        "Held-out times by mechanism, in %",
    )
    tables = [_score_table(fields["tables"]), by_kind]
    blocks: list[Block] = [*answer.head(), _worst_table(pairs), BLANK, tables[0]]
    if by_kind.rows:
        blocks += [BLANK, by_kind]
    return Result(
        f"Predicted against published: {source}",
        answer,
        fields,
        scores,
        plain,
        tables=tables,
        blocks=blocks,
        draw=lambda: [*_draw_errors(rows, predicted), _draw_against(rows, predicted)],
        data=evidence.newest_measurement(row.deployment() for row in rows),
        foot=[f"Rows of {', '.join(sorted({r.paper for r in rows}))}."],
    )


def to_markdown(result: Result[list[Score]]) -> str:
    """Format the tables of errors as Markdown, as in docs/errors.md.

    Parameters
    ----------
    result
        The result of ``kvsim reproduce``.
    """
    scores, mechanisms = result.tables
    source = result.title.partition(": ")[2]
    text = f"# Errors of `kvsim reproduce {source}`, {date.today().isoformat()}\n\n"
    text += f"In %, mean / worst.\n\n{_markdown(scores)}\n"
    if mechanisms.rows:
        told = "Held-out times, by mechanism."
        text += f"\n## By mechanism\n\n{told}\n\n{_markdown(mechanisms)}\n"
    return text


def _markdown(table: Table) -> str:
    heads = [column.heading for column in table.columns]
    cells = ([column.show(row) for column in table.columns] for row in table.rows)
    lines = [heads, ["---"] * len(heads), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _row(row: PublishedRow, predicted: float) -> Row:
    names = "paper", "table", "model", "hardware", "stack"
    sizes = "batch", "prompt", "generate", "metric", "use", "published"
    return {
        **{name: getattr(row, name) for name in names},
        "technique": row.settings,
        **{name: getattr(row, name) for name in sizes},
        "predicted": number(predicted),
        "error": number(error(row, predicted)),
        "basis": basis(row.deployment())["kind"],
        "note": row.note,
    }


def _plain_score(s: Score) -> Row:
    plain = asdict(s)
    for name in ("fitted", "held_out", "with_anomalies"):
        mean, worst = plain.pop(name)
        plain |= {f"{name}_mean": number(mean), f"{name}_worst": number(worst)}
    return plain | {"skill": number(s.skill)}


def _pair(mean: float | None, worst: float | None) -> str:
    if mean is None or worst is None or mean != mean:
        return units.DASH
    return f"{100 * mean:.1f} / {100 * worst:.1f}"


def _worst_table(pairs: Sequence[tuple[PublishedRow, float]]) -> Table:
    """The rows that miss most."""
    most = sorted(pairs, key=lambda pair: -abs(error(*pair)))[:SHOWN]
    worst = [_row(row, value) | {"error": error(row, value)} for row, value in most]
    columns = (
        text_column("table", lambda r: f"{r['paper']} {r['table']}"),
        text_column("technique", lambda r: r["technique"].partition(":")[0]),
        text_column("model", "model", 3),
        Column("batch", "batch", lambda batch: "max" if batch is None else str(batch), 5),
        Column("prompt", "prompt", rank=4),
        text_column("metric", "metric", 2),
        Column("published", "published", format_number),
        Column("predicted", "predicted", format_number),
        percent_column("error %", "error"),
        text_column("use", "use", 1),
    )
    title = f"Rows with the largest errors ({len(worst)} of {len(pairs)})"
    return Table(columns, worst, title, lambda r: r["technique"].partition(":")[2])


def _score_table(scores: Sequence[Row]) -> Table:
    """Errors of published tables, a line per score."""

    def pairs(heading: str, key: str, rank: int) -> Column:
        names = f"{key}_mean", f"{key}_worst"
        return Column(heading, names[0], rank=rank, write=lambda row: _pair(*map(row.get, names)))

    columns = [
        *map(text_column, ("paper", "table", "metric"), ("paper", "table", "metric")),
        Column("rows", "rows", rank=1),
        pairs("fitted", "fitted", 0),
        pairs("held out", "held_out", 0),
        pairs("with anomalies", "with_anomalies", 2),
        Column("skill", "skill", lambda x: units.DASH if x is None else f"{x:.2f}", 3),
    ]
    return Table(columns, scores, "Errors in %, mean / worst")


def _write_answer(rows: list[PublishedRow], predicted: list[float]) -> Answer:
    """State how far predictions are off."""
    pairs = [(r, v) for r, v in zip(rows, predicted, strict=True) if r.metric != "fits"]
    errors = {use: [abs(error(r, v)) for r, v in pairs if r.use == use] for use in USES}
    told = []
    for use, said in (("check", "held-out rows"), ("fit", "fitted rows")):
        if errors[use]:
            mean, worst = sum(errors[use]) / len(errors[use]), max(errors[use])
            both = f"{units.percent(mean)} and the largest {units.percent(worst)}"
            told.append(f"On {len(errors[use])} {said}, the mean error is {both}.")
    cards = ", ".join(sorted({r.hardware for r in rows}))
    odd = f"{len(errors['anomaly'])} rows contradict themselves or other rows and are excluded."
    wanted = [f"GPUs: {cards}.", odd if errors["anomaly"] else ""]
    return Answer(verdict(told or ["The table has no times or sizes."], wanted))


def _draw_errors(rows: list[PublishedRow], predicted: list[float]) -> list[Chart]:
    """Draw the error of every row, a line per table."""
    lines: dict[str, set[str]] = {}
    for r in rows:
        lines.setdefault(r.paper, set()).add(_line(r))
    sheets: list[list[str]] = []
    for paper, own in lines.items():
        taken = sum(len(lines[other]) for other in sheets[-1]) if sheets else MAX_TABLES_DRAWN
        if taken + len(own) > MAX_TABLES_DRAWN:
            sheets.append([])
        sheets[-1].append(paper)
    pairs = list(zip(rows, predicted, strict=True))
    drawn = []
    for papers in sheets:
        title = f"Errors by table: {', '.join(papers)}" if len(sheets) > 1 else "Errors by table"
        height = 140 + 24 * sum(len(lines[paper]) for paper in papers)
        chart = Chart(title, "error [%]", height=height, yaxis=DOWNWARDS)
        here = [(r, v) for r, v in pairs if r.paper in papers and r.metric != "fits" and v > 0]
        points = [(r, 100 * error(r, v), _line(r)) for r, v in here]
        drawn.append(_draw_uses(chart, points, "%{x:.3g} %"))
    return drawn


def _draw_uses(
    chart: Chart, points: Sequence[tuple[PublishedRow, float, object]], hover: str
) -> Chart:
    """Rows as dots at two values, whose shape says what they were used for."""
    for use, colour, symbol, said in LOOKS:
        here = [point for point in points if point[0].use == use]
        chart.dots(
            said,
            [x for _, x, _ in here],
            [y for _, _, y in here],
            {"color": colour, "symbol": symbol, "size": 8},
            text=[
                f"{r.paper} {r.table}, {r.metric}<br>{r.settings}<br>"
                f"batch {r.batch}, prompt {r.prompt}"
                for r, _, _ in here
            ],
            hovertemplate=f"%{{text}}<br>{hover}",
        )
    return chart


def _line(r: PublishedRow) -> str:
    return f"{r.paper} {r.table}: {r.metric}"


def _draw_against(rows: list[PublishedRow], predicted: list[float]) -> Chart:
    """Draw predicted over published values, both logarithmic."""
    chart = Chart("Predicted against published", "published", "predicted", 520, log="xy")
    pairs = [(r, v) for r, v in zip(rows, predicted, strict=True) if v > 0 and r.published > 0]
    if pairs:
        ends = [f(f(r.published, v) for r, v in pairs) for f in (min, max)]
        chart.line("equal", ends, ends)
    points = [(r, r.published, v) for r, v in pairs]
    return _draw_uses(chart, points, "%{x:.4g} published, %{y:.4g} predicted")
