"""What microbenchmarks found: numbers beside the data sheet, and what looks wrong."""

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from shlex import quote

from kvsim.evidence.machine.datasheet import shortfalls, stated
from kvsim.evidence.machine.fit import Calibration
from kvsim.evidence.machine.profile import Machine
from kvsim.evidence.machine.solve import Known
from kvsim.machines.hardware import Hardware
from kvsim.report import units
from kvsim.report.answer import Answer, verdict
from kvsim.report.json import Row
from kvsim.report.screen import Screen
from kvsim.report.table import Column, Table, words
from kvsim.report.units import short


def row(
    found: Calibration,
    machine: Machine,
    sheet: Hardware | None,
    suspicions: Sequence[str],
    samples: int,
    out: Path,
) -> Row:
    """A calibration under its contract names."""
    every: Mapping[str, Mapping[str, Known]] = {
        "hardware": found.hardware, "stack": found.stack, "rate": found.rates,
    }  # fmt: skip
    return {
        "device": machine.name,
        "out": str(out),
        "samples": samples,
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
                "datasheet": stated(sheet, key) if kind == "hardware" else None,
            }
            for kind, numbers in every.items()
            for key, known in numbers.items()
        ],
        "notes": list(machine.notes),
        "suspicious": [*suspicions, *shortfalls(found.hardware, sheet)],
    }


def answered(answer: Row) -> Answer:
    """What was measured, in words."""
    known = [n for n in answer["numbers"] if n["verdict"] == "identified"]
    beside = [n for n in answer["numbers"] if n["datasheet"]]
    said = verdict(
        [
            f"{answer['device']} was measured: {len(known)} of {len(answer['numbers'])} numbers "
            f"are identified by {answer['samples']:,} samples.",
            *[f"Suspicious: {text}." for text in answer["suspicious"][:1]],
        ],
        [
            f"{n['key']} reaches {units.percent(n['value'] / n['datasheet'])} of the data sheet."
            for n in beside[:2]
        ],
    )
    return Answer(said, settings=[f"Use it with --gpu {quote(str(answer['out']))}."])


def number_table(answer: Row) -> Table:
    """The numbers with their errors, beside the data sheet."""
    columns = (
        words("parameter", lambda n: n["key"]),
        Column("measured", lambda n: f"{n['value']:.4g}", lambda n: n["value"]),
        Column("± %", lambda n: "-" if n["error"] is None else f"{100 * n['error']:.2g}", rank=2),
        Column("samples off %", lambda n: f"{100 * n['residual']:.2g}", rank=3),
        Column("data sheet", _beside_sheet, rank=1),
        words("", lambda n: "" if n["verdict"] == "identified" else n["verdict"]),
    )
    return Table(columns, answer["numbers"])


def show(answer: Row) -> None:
    """The numbers as a table, then what looks wrong."""
    out = Screen()
    out.title(f"{answer['device']}: {answer['samples']} samples")
    out.table(number_table(answer))
    if answer["datasheet"] is None:
        out.say("No data sheet of this device is shipped.")
    for text in answer["suspicious"]:
        out.say(f"Suspicious: {text}.")
    out.say(f"Written: {answer['out']}, the stack and the samples beside it.")


def _beside_sheet(n: Row) -> str:
    if not n["datasheet"]:
        return "-"
    return f"{short(n['datasheet'])} ({100 * n['value'] / n['datasheet']:.0f} %)"
