"""Results of ``kvsim calibrate``: a measured machine, or a stack fitted to measurements."""

from collections.abc import Mapping, Sequence
from datetime import date
from math import isfinite
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import numpy as np

from kvsim.evidence.leastsquares import Fit
from kvsim.evidence.logs import MeasuredRun
from kvsim.evidence.machine.fit import Calibration
from kvsim.evidence.machine.profile import Machine, find_datasheet, profile_number, shortfalls
from kvsim.evidence.machine.solve import Known
from kvsim.evidence.stackfile import fitted_text, measure_errors
from kvsim.files import replace_text
from kvsim.frozen import frozen
from kvsim.machines.deployment import Deployment
from kvsim.machines.schema import CHECKED_KINDS
from kvsim.report import units
from kvsim.report.answer import Answer, verdict
from kvsim.report.colours import bar_style
from kvsim.report.json import Row, number
from kvsim.report.names import join_words
from kvsim.report.pictures import Chart, draw_bars, draw_distribution
from kvsim.report.result import Result
from kvsim.report.table import Column, Table, percent_column, text_column
from kvsim.report.terminal import Heading, Verbatim
from kvsim.report.units import format_number
from kvsim.serving.rules import Rules
from kvsim.techniques.technique import Technique

if TYPE_CHECKING:
    from kvsim.evidence.runfit import RunFit

WORSE = 0.005  # increase of an error that is worth a word
METRIC_TITLES = {
    "ttft_mean": "mean TTFT",
    "ttft_p50": "median TTFT",
    "tpot_mean": "mean TPOT",
    "latency_p90": "E2E p90",
}
"""Statistics of a run that predictions are compared in."""

MEANINGS = {
    "memory": "share of the memory bandwidth that these kernels reach",
    "compute": "share of the arithmetic rate that these kernels reach",
    "step_s": "time of a pass outside its kernels",
    "sequence_s": "time of a pass outside its kernels, per sequence",
}
"""Of what a run can tell of a stack, by the last part of a key."""


def make_machine_result(found: "FittedMachine", out: Path) -> Result[Row]:
    """Make the result of ``kvsim calibrate --device``.

    Parameters
    ----------
    found
        The fitted profile and stack.
    out
        Path of the profile that the user asked for.
    """
    answer, notes = found.fields(out), found.machine.notes
    title, table = f"{answer['device']}: {answer['samples']:,} samples", _number_table(answer)
    beside = [n for n in answer["numbers"] if n["datasheet"]]
    unknown = "No data sheet of this device is shipped."
    return Result(
        title,
        _write_machine_answer(answer),
        answer,
        answer,
        tables=[table],
        blocks=[
            Heading(f"{answer['device']}: {answer['samples']} samples"),
            table,
            *([unknown] if answer["datasheet"] is None else []),
            *(f"Suspicious: {text}." for text in answer["suspicious"]),
            f"Written: {answer['out']}, with the stack and the samples next to it.",
        ],
        draw=lambda: [_draw_beside_sheet(beside)] if beside else [],
        remarks=notes,
        notes=notes,
    )


@frozen
class FittedMachine:
    """A fitted hardware profile and stack, which have been written to files.

    Attributes
    ----------
    out
        Path of the profile.
    machine
        The measured machine.
    fit
        The fitted numbers.
    samples
        Number of measured samples.
    suspicions
        Irregularities during the measurement.
    on_gpu
        Whether a GPU was measured, which may have a data sheet to compare with.
    day
        Date of the measurement.
    """

    out: Path
    machine: Machine
    fit: Calibration
    samples: int
    suspicions: Sequence[str]
    on_gpu: bool
    day: str

    def fields(self, out: Path) -> Row:
        """Collect the fields of the JSON output.

        Parameters
        ----------
        out
            Path of the profile that the user asked for.
        """
        one, found = self.machine, self.fit
        sheet = find_datasheet(one.name, one.gpu_memory) if self.on_gpu else None
        every: Mapping[str, Mapping[str, Known]] = {
            "hardware": found.hardware,
            "stack": found.stack,
            "rate": found.rates,
        }
        return {
            "device": one.name,
            "out": str(out),
            "samples": self.samples,
            "datasheet": sheet.name if sheet else None,
            "numbers": [
                {
                    "kind": kind,
                    "key": key,
                    "value": known.value,
                    "error": known.error if isfinite(known.error) else None,
                    "residual": known.residual,
                    "samples": known.samples,
                    "benchmark": known.benchmark,
                    "verdict": known.verdict or "identified",
                    "datasheet": profile_number(sheet, key) if kind == "hardware" else None,
                }
                for kind, numbers in every.items()
                for key, known in numbers.items()
            ],
            "suspicious": [*self.suspicions, *shortfalls(found.hardware, sheet)],
        }


def _write_machine_answer(answer: Row) -> Answer:
    """What was measured, in words."""
    known = [n for n in answer["numbers"] if n["verdict"] == "identified"]
    beside = [n for n in answer["numbers"] if n["datasheet"]]
    told = (
        f"{answer['device']} was measured: {len(known)} of {len(answer['numbers'])} numbers "
        f"are identified by {answer['samples']:,} samples."
    )
    shares = {n["key"]: units.percent(n["value"] / n["datasheet"]) for n in beside[:2]}
    said = verdict(
        [told, *(f"Suspicious: {text}." for text in answer["suspicious"][:1])],
        [f"{key} reaches {share} of the data-sheet value." for key, share in shares.items()],
    )
    return Answer(said, settings=[f"Use it with --gpu {quote(answer['out'])}."])


def _number_table(answer: Row) -> Table:
    """The numbers with their errors, beside the data sheet."""

    def beside_sheet(n: Row) -> str:
        if not n["datasheet"]:
            return units.DASH
        return f"{format_number(n['datasheet'])} ({100 * n['value'] / n['datasheet']:.0f} %)"

    columns = (
        text_column("parameter", "key"),
        Column("measured", "value", lambda value: f"{value:.4g}"),
        percent_column("± %", "error", ".2g", 2),
        percent_column("samples off %", "residual", ".2g", 3),
        Column("data sheet", "datasheet", rank=1, write=beside_sheet),
        text_column("", lambda n: "" if n["verdict"] == "identified" else n["verdict"]),
    )
    return Table(columns, answer["numbers"])


def _draw_beside_sheet(numbers: list[Row]) -> Chart:
    shares = {n["key"]: 100 * n["value"] / n["datasheet"] for n in numbers}
    across = "% of the data sheet"
    return draw_bars("Measured, of the data sheet", shares, across, downwards=True)


def make_table_result(fields: Row, out: str) -> Result[Row]:
    """Make the result of a fit to a table of kernels or of load tests.

    Parameters
    ----------
    fields
        The fields of the JSON output.
    out
        Path of the written stack.
    """
    title = f"{fields['engine']}: {fields['rows']:,} rows fitted, written to {out}"
    lines = [title]
    if "classes" not in fields:
        errors = _format_errors(fields).replace(" and", ",")
        lines += [*_list_numbers(fields["numbers"]), f"held out by model: {errors}"]
    for row in fields.get("classes", ()):
        told = "nothing held out"
        if row["median_error"] is not None:
            told = f"{_format_errors(row)} on held-out shapes"
        lines.append(f"{row['class']}: {row['rows']:,} rows, {told}")
        lines += _list_numbers(row["numbers"])
    return Result(title, Answer(""), fields, fields, blocks=[Verbatim("\n".join(lines))])


def _format_errors(row: Row) -> str:
    median, p90 = (format_number(100 * row[f"{k}_error"], 2) for k in ("median", "p90"))
    return f"{median} % (median) and {p90} % (90th percentile)"


def _list_numbers(numbers: Mapping[str, Row]) -> list[str]:
    lines = []
    for key, found in numbers.items():
        spread = "unknown" if found["error"] is None else f"{found['error']:.2g}"
        note = "" if found["known"] else "  not determined by these rows"
        lines.append(f"  {key:34s} {found['value']:10.4g} +- {spread}{note}")
    return lines


def calibrate_from_run(
    run: MeasuredRun,
    technique: Technique,
    deployment: Deployment,
    rules: Rules,
    first: int,
    stack: str,
    out: Path | None,
) -> Result[Row]:
    """Fit a stack to a run's first requests, check it on the others, and write it if asked.

    Parameters
    ----------
    stack
        The name of the stack that is fitted, which the written file extends.

    Returns
    -------
    ``found`` has times to the first token of unseen requests: measured, and predicted before and
    after the fit. [s]

    Raises
    ------
    InputError
        If there are too few requests, or the place cannot be written.
    """
    from kvsim.evidence import runfit  # a machine is measured where Numba is missing

    fit = runfit.fit_run(run, technique, deployment, rules, first)
    late, count = slice(first, None), len(run.requests)
    seen = runfit.errors(run, fit.after, slice(0, first))
    unseen, before = (runfit.errors(run, found, late) for found in (fit.after, fit.before))
    if out is not None:
        errors = ", ".join(f"{name} {100 * value:+.1f} %" for name, value in unseen.items())
        rows = f"the first {first} of {count} requests"
        told = f"on the other {count - first} requests of the run: {errors}"
        used = {} if fit.refused else {k: fit.numbers[k] for k in fit.moved}
        kept = Fit(used, {k: fit.errors[k] for k in used}, np.empty(0), ())
        ratios = dict(zip(CHECKED_KINDS, 1 / runfit.ratios(run, fit.after, late), strict=True))
        ratios = {kind: each[np.isfinite(each)] for kind, each in ratios.items()}
        where = deployment.hardware.name, deployment.model.name, technique.name
        base, today, checked = deployment.stack, str(date.today()), measure_errors(ratios, where)
        replace_text(out, fitted_text(base, stack, kept, rows, told, today, checked))
    row: Row = {
        "fitted_requests": first,
        "checked_requests": count - first,
        "numbers": {
            key: {
                "value": value,
                "error": number(fit.errors[key]),
                "known": fit.verdicts[key] != "not told",
                "verdict": "refused" if fit.refused and key in fit.moved else fit.verdicts[key],
            }
            for key, value in fit.numbers.items()
        },
        "refused": fit.refused,
        "confused": [list(pair) for pair in fit.confused],
        "error_fitted": seen,
        "error_not_seen": unseen,
        "error_before": before,
        "model": deployment.model.name,
        "gpu": deployment.hardware.name,
        "stack": stack,
    }
    curves = {
        "measured": run.first[late] - run.requests.arrival[late],
        "after the fit": fit.after.ttft_s[late],
        "before the fit": fit.before.ttft_s[late],
    }
    times = {name: np.quantile(v, np.linspace(0, 1, 101)).tolist() for name, v in curves.items()}
    answer = _write_run_answer(row, deployment, "" if out is None else str(out))
    tables = _run_tables(row)
    confused = [f"The run does not separate {a} from {b}." for a, b in fit.confused]
    verdicts = [*_write_verdicts(fit), *confused]
    return Result(
        f"{stack} fitted to a run of {deployment.model.name} on {deployment.hardware.name}",
        answer,
        row | {"answer": answer.row()},
        times,
        [row],
        tables=tables,
        blocks=[*answer.head(), *tables, *verdicts, *answer.body(), f"Written to {out}."],
        draw=lambda: [
            _draw_errors(row),
            draw_distribution("Time to first token of those requests", times),
        ],
    )


def _write_verdicts(fit: "RunFit") -> list[str]:
    """Which numbers stay as they were, and why."""
    words = {
        "agrees": "The run agrees with these numbers, so they keep their shipped values",
        "not told": "The run does not determine these numbers, so they keep their shipped values",
    }
    found = [f"Refused: {fit.refused}."] if fit.refused else []
    for verdict_, said in words.items():
        keys = [key for key, each in fit.verdicts.items() if each == verdict_]
        if keys:
            more = " A run with varying load and prompt lengths would determine them."
            found.append(f"{said}: {', '.join(keys)}.{more if verdict_ == 'not told' else ''}")
    return found


def _run_tables(row: Row) -> list[Table]:
    """Fitted numbers, and the errors on seen and unseen requests."""
    numbers = [{"key": key} | found for key, found in row["numbers"].items()]
    columns = [
        text_column("parameter", "key"),
        Column("value", "value", write=lambda n: _written(n, "value")),
        Column("±", "error", write=lambda n: _written(n, "error")),
        text_column("means", lambda n: MEANINGS[n["key"].rpartition(".")[2]], rank=1),
        text_column("", lambda n: n["verdict"].replace("not told", "undetermined")),
    ]
    unseen, before = row["error_not_seen"], row["error_before"]
    errors = [
        {"key": key, "fitted": value, "unseen": unseen[key], "before": before[key]}
        for key, value in row["error_fitted"].items()
    ]
    heads = (
        text_column("predicted / measured − 1", lambda n: METRIC_TITLES[n["key"]]),
        percent_column("fitted requests %", "fitted"),
        percent_column("other requests %", "unseen"),
        percent_column("other requests, before the fit %", "before"),
    )
    return [Table(columns, numbers), Table(heads, errors)]


def _written(row: Row, part: str) -> str:
    """A fitted number or its error: a time with its unit, else a share."""
    value = row[part]
    if value is None:
        return units.DASH
    return units.seconds(value) if row["key"].endswith("_s") else f"{value:.4f}"


def _write_run_answer(row: Row, deployment: Deployment, place: str) -> Answer:
    unseen, before = row["error_not_seen"], row["error_before"]
    now, was = (100 * float(np.mean(np.abs(list(x.values())))) for x in (unseen, before))
    moved = [key for key, n in row["numbers"].items() if n["verdict"] == "moved"]
    many, card = f"{row['checked_requests']:,}", deployment.hardware.name
    others = f"the {many} requests on {card} that the fit did not see"
    used = "the fitted numbers" if moved and not row["refused"] else f"{row['stack']}'s numbers"
    if row["refused"]:
        done = f"The fit is refused: {row['stack']}'s own numbers predict {others} better."
    elif moved:
        done = f"The fit changed {', '.join(moved)}; it was checked on {many} requests on {card} "
        done += "that it had not seen."
    else:
        done = f"The run does not improve on {row['stack']}'s numbers, which are kept."
    done += f" Predicted TTFT, TPOT and latency of those requests are off by {now:.1f} % "
    done += f"on average (before the fit: {was:.1f} %)."
    worse = [
        f"{METRIC_TITLES[key]} ({100 * before[key]:+.1f} % before, {100 * value:+.1f} % after)"
        for key, value in unseen.items()
        if abs(value) > abs(before[key]) + WORSE
    ]
    if worse:
        done += f" Worse than before: {join_words(worse)}."
    use = f"--stack {quote(place)} predicts with {used}; this error sets its prediction interval"
    first = f"The fit saw the first {row['fitted_requests']:,} requests."
    return Answer(
        verdict([done, f"{use} on {card}." if place else ""], [first]),
        figures={"error_not_seen": unseen, "error_before": before},
    )


def _draw_errors(row: Row) -> Chart:
    title = "Predicted over measured minus one, requests that the fit did not see"
    chart = Chart(title, up="%", height=320)
    some = {"before the fit": row["error_before"], "after the fit": row["error_not_seen"]}
    for i, (name, errors) in enumerate(some.items()):
        titles, off = [METRIC_TITLES[key] for key in errors], [100 * v for v in errors.values()]
        hover = "%{y:+.1f} %<extra></extra>"
        chart.bars(name, titles, off, bar_style(i), orientation="v", hovertemplate=hover)
    return chart
