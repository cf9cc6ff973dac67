"""``kvsim reproduce``: rows, scores, and predicted against published as a page."""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path

from kvsim.evidence.leastsquares import Fit
from kvsim.evidence.published import PublishedRow, fit_stack, predict
from kvsim.evidence.published_errors import by_mechanism
from kvsim.evidence.scores import Score, error
from kvsim.evidence.stackfile import fitted_text
from kvsim.machines.basis import basis
from kvsim.machines.profiles import load_stack
from kvsim.report import units
from kvsim.report.answer import Answer, show_verdict, verdict
from kvsim.report.json import Row as Plain
from kvsim.report.json import number
from kvsim.report.screen import Screen
from kvsim.report.table import Column, Table, of_cells, words
from kvsim.report.units import short

USES = ("fit", "check", "anomaly")
SHOWN = 40  # rows printed; JSON and page have all


def answer(rows: list[PublishedRow], predicted: list[float], scores: list[Score]) -> Plain:
    """The object that ``--json`` prints: answer, rows and tables."""
    return {
        "answer": answered(rows, predicted).row(),
        "rows": [_row(row, value) for row, value in zip(rows, predicted, strict=True)],
        "tables": [_plain_score(s) for s in scores],
        "mechanisms": [
            {"of": of, "which": which, "rows": count, "mean": mean, "worst": worst}
            for (of, which), (count, mean, worst) in _mechanisms(rows, predicted).items()
        ],
    }


def _row(row: PublishedRow, predicted: float) -> Plain:
    return {
        "paper": row.paper, "table": row.table, "model": row.model, "hardware": row.hardware,
        "stack": row.stack, "technique": row.settings, "batch": row.batch, "prompt": row.prompt,
        "generate": row.generate, "metric": row.metric, "use": row.use,
        "published": row.published, "predicted": number(predicted),
        "error": number(error(row, predicted)), "basis": basis(row.deployment())["kind"],
        "note": row.note,
    }  # fmt: skip


def _plain_score(s: Score) -> Plain:
    pairs = ("fitted", "held_out", "with_anomalies")
    plain = {k: v for k, v in asdict(s).items() if k not in pairs}
    for name in pairs:
        mean, worst = getattr(s, name)
        plain |= {f"{name}_mean": number(mean), f"{name}_worst": number(worst)}
    return plain | {"skill": number(s.skill)}


def percent(value: float | None) -> str:
    """An error in percent."""
    return "-" if value is None or value != value else f"{100 * value:.1f}"


def print_answer(rows: list[PublishedRow], predicted: list[float], scores: list[Score]) -> None:
    """The verdict, the rows that miss most, then the scores."""
    out = Screen()
    show_verdict(out, answered(rows, predicted))
    pairs = sorted(zip(rows, predicted, strict=True), key=lambda pair: -abs(error(*pair)))[:SHOWN]
    worst = [_row(row, value) | {"error": error(row, value)} for row, value in pairs]
    columns = (
        words("table", lambda r: f"{r['paper']} {r['table']}"),
        words("technique", lambda r: r["technique"].partition(":")[0]),
        words("model", lambda r: r["model"], 3),
        Column("batch", lambda r: "max" if r["batch"] is None else str(r["batch"]), rank=5),
        Column("prompt", lambda r: str(r["prompt"]), rank=4),
        words("metric", lambda r: r["metric"], 2),
        Column("published", lambda r: short(r["published"])),
        Column("predicted", lambda r: short(r["predicted"])),
        Column("error %", lambda r: f"{100 * r['error']:+.1f}"),
        words("use", lambda r: r["use"], 1),
    )
    title = f"Rows that miss most ({len(worst)} of {len(rows)})"
    out.table(Table(columns, worst, title, lambda r: r["technique"].partition(":")[2]))
    out.blank()
    out.table(score_table(scores))
    table = mechanism_table(rows, predicted)
    if table.rows:
        out.blank()
        out.table(table)


def mechanism_table(rows: list[PublishedRow], predicted: list[float]) -> Table:
    """Errors of held-out times by context length, by grouping of heads and by technique."""
    cells = mechanism_cells(rows, predicted)
    return of_cells(MECHANISM_COLUMNS, cells, 2, "0000", "Held-out times by mechanism, in %")


MECHANISM_COLUMNS = ("held out", "which", "rows", "mean / worst")


def mechanism_cells(rows: list[PublishedRow], predicted: list[float]) -> list[list[str]]:
    """One line per mechanism."""
    return [
        [of, which, str(count), f"{percent(mean)} / {percent(worst)}"]
        for (of, which), (count, mean, worst) in _mechanisms(rows, predicted).items()
    ]


def _mechanisms(
    rows: list[PublishedRow], predicted: list[float]
) -> dict[tuple[str, str], tuple[int, float, float]]:
    return by_mechanism(zip(rows, predicted, strict=True))


SCORE_COLUMNS = (
    *("paper", "table", "metric", "rows", "fitted", "held out", "with anomalies", "skill"),
)


def score_table(scores: list[Score]) -> Table:
    """One line per score."""
    title = "Errors in %, mean / worst"
    return of_cells(SCORE_COLUMNS, score_cells(scores), 3, "00010023", title)


def score_cells(scores: list[Score]) -> list[list[str]]:
    """One line per score."""

    def pair(values: tuple[float, float]) -> str:
        return "-" if values[0] != values[0] else f"{percent(values[0])} / {percent(values[1])}"

    return [
        [
            s.paper, s.table, s.metric, str(s.rows), pair(s.fitted), pair(s.held_out),
            pair(s.with_anomalies), "-" if s.skill != s.skill else f"{s.skill:.2f}",
        ]
        for s in scores
    ]  # fmt: skip


def markdown(columns: Sequence[str], cells: list[list[str]]) -> str:
    """A table as docs/errors.md holds it."""
    lines = [list(columns), ["---"] * len(columns), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def fitted(rows: list[PublishedRow], name: str, source: str) -> str:
    """Fit a stack's free numbers, print how well they are known, and give the file's text."""
    stack = load_stack(name)
    fit = fit_stack(rows, stack)
    print_fit(fit, name)
    told = f"{fit.residuals.size} rows of {source}"
    held = [r for r in rows if r.ran_on(stack) and r.use == "check" and r.metric != "fits"]
    errors = [abs(error(row, predict(row, fit.values))) for row in held]
    known = "no row held out" if not errors else (
        f"mean {percent(sum(errors) / len(errors))} %, worst {percent(max(errors))} % on "
        f"{len(errors)} held-out rows of {source}"
    )  # fmt: skip
    base = str(Path(name).resolve()) if name.endswith(".toml") else name
    return fitted_text(stack, base, fit, told, known, date.today().isoformat())


def print_fit(fit: Fit, stack: str) -> None:
    """Fitted numbers, how well they are known, and what the rows cannot tell."""
    out = Screen()
    rows = [
        {"key": key, "value": value, "error": number(fit.errors[key])}
        for key, value in fit.values.items()
    ]
    columns = (
        words("number", lambda r: r["key"]),
        Column("fitted", lambda r: short(r["value"])),
        Column("standard error", lambda r: short(r["error"], 2)),
    )
    out.table(Table(columns, rows, f"Stack {stack}"))
    if len(fit.values) == fit.residuals.size:
        out.say("As many numbers as rows: nothing tells how well they are known.")
    for key in fit.unknown:
        out.say(f"The rows do not determine {key}.")
    for one, other in fit.confused:
        out.say(f"The rows cannot tell {one} from {other}.")


def answered(rows: list[PublishedRow], predicted: list[float]) -> Answer:
    """How far predictions are off, in words."""
    pairs = [(r, v) for r, v in zip(rows, predicted, strict=True) if r.metric != "fits"]
    errors = {use: [abs(error(r, v)) for r, v in pairs if r.use == use] for use in USES}
    told = []
    for use, said in (("check", "rows that nothing was fitted to"), ("fit", "fitted rows")):
        if errors[use]:
            mean, worst = sum(errors[use]) / len(errors[use]), max(errors[use])
            told.append(
                f"On {len(errors[use])} {said}, predictions are off by {units.percent(mean)} on "
                f"average and {units.percent(worst)} at worst."
            )
    cards = ", ".join(sorted({r.hardware for r in rows}))
    odd = f"{len(errors['anomaly'])} rows contradict themselves or others and are left out of it."
    wanted = [f"They were measured on {cards}.", odd if errors["anomaly"] else ""]
    return Answer(verdict(told or ["No rows about times or sizes."], wanted))
