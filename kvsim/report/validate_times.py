"""Times predicted and measured: JSON, a table by technique, and a page."""

from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.report import units
from kvsim.report.answer import Answer, show_verdict, verdict
from kvsim.report.json import Row
from kvsim.report.screen import Screen
from kvsim.report.table import Table, of_cells

if TYPE_CHECKING:
    from kvsim.validate.times.compared import Compared, Measured, SkippedPoint, Summary

TIMES = ("ttft_s", "tpot_s")
COMPUTING = "computing_s"  # what other jobs on a machine do not move
COPIED = ("h2d_B", "d2h_B")
STREAMS = ("gpu", "h2d", "d2h", "cpu")
SIDES = ("predicted", "measured")
BY_TECHNIQUE = (
    *("technique", "points", "TTFT", "TPOT", "computing", "worst", "noise", "peak", "copied"),
    "overlap",
)
LEGEND = (
    "Errors in %, medians over points: TTFT, TPOT, what compute works of it by a CPU's own clock, "
    "the worst of both times beside the runs' noise, peak memory, bytes copied; then the share of "
    "copies' time that runs beside compute, predicted / measured."
)
WORST = 15  # ops told of


def answer(
    found: Sequence["Compared"], missing: Sequence["SkippedPoint"], summary: "Summary", device: str,
    suspicious: Sequence[str],
) -> Row:  # fmt: skip
    """A validation under its contract names."""
    return {
        "device": device,
        "summary": {key: _finite(getattr(summary, key)) for key in vars(summary)},
        "suspicious": list(suspicious),
        "left_out": [
            {
                "technique": str(m.technique),
                "point": _where(m.model, m.layers, m.batch, m.prompt), "reason": m.reason,
            }
            for m in missing
        ],
        "points": [
            {
                "model": c.model, "layers": c.layers, "batch": c.batch, "prompt": c.prompt,
                "technique": str(c.technique), "rounds_replayed": c.eager is None,
                "rounds_issued_because": c.eager,
                "whole": [_plain(m) for m in c.whole], "ops": [_plain(m) for m in c.ops],
                "overlap": {
                    key: _finite(r.overlap) for key, r in zip(SIDES, c.rounds, strict=False)
                },
            }
            for c in found
        ],
        "rounds": [
            {"technique": str(c.technique), "point": _where(c.model, c.layers, c.batch, c.prompt)}
            | {
                key: [[s.stream, s.name, s.begin, s.end] for s in r.spans]
                for key, r in zip(SIDES, c.rounds, strict=True)
            }
            for c in {c.technique.name: c for c in found if c.rounds}.values()
        ],
    }  # fmt: skip


def _where(model: str, layers: int, batch: int, prompt: int) -> str:
    return f"{model}, {layers} layers, {batch} x {prompt}"


def _plain(m: "Measured") -> Row:
    return {
        "name": m.name, "predicted": m.predicted, "measured": m.measured, "error": m.error,
        "noise": m.noise,
    }  # fmt: skip


def _finite(value: float) -> Any:
    return value if isfinite(value) else None


def show(answer: Row) -> None:
    """Errors by technique, then the worst ops and what the whole amounts to."""
    out = Screen()
    out.title(f"{answer['device']}: predicted against measured")
    show_verdict(out, answered(answer))
    out.say(LEGEND)
    out.table(technique_table(answer))
    out.blank()
    out.table(op_table(answer))
    for text in [*left_out(answer), *answer["suspicious"], *said(answer)]:
        out.say(text)


def technique_table(answer: Row) -> Table:
    """A line of errors per technique."""
    return of_cells(BY_TECHNIQUE, by_technique(answer), 1, "0300415676")


def op_table(answer: Row) -> Table:
    """The ops whose prediction misses most time."""
    heads = ("op", "technique", "point", "predicted ms", "measured ms", "off %")
    return of_cells(heads, worst_ops(answer), 3, "002000", "The ops that cost most in error")


def left_out(answer: Row) -> list[str]:
    """What could not run, in words."""
    return [
        f"left out: {m['technique']} at {m['point']}: {m['reason']}" for m in answer["left_out"]
    ]


def said(answer: Row) -> list[str]:
    """The summary in words."""
    s = answer["summary"]

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.3g} %"

    winner = "no point has a winner"
    if s["same_winner"] is not None:
        winner = f"{percent(s['same_winner'])} of the points have the predicted winner"

    return [
        f"{s['points']} times: median error {percent(s['median'])}, 9 in 10 within "
        f"{percent(s['nine_in_ten'])}; the runs' own noise {percent(s['noise'])}",
        f"Beyond the noise, {winner}, {percent(s['same_order'])} of the pairs have the predicted "
        f"order",
        *_replayed(answer["points"]),
    ]


def _replayed(points: Sequence[Row]) -> list[str]:
    """Whose rounds were CUDA graphs, where some were, and why others were not."""
    names = sorted({p["technique"] for p in points if p["rounds_replayed"]})
    if not names:
        return []
    others: dict[str, set[str]] = {}
    for p in points:
        if not p["rounds_replayed"]:
            others.setdefault(p["rounds_issued_because"], set()).add(p["technique"])
    return [
        f"Rounds of {', '.join(names)} were replayed as CUDA graphs and are predicted so",
        *(f"Rounds of {', '.join(sorted(t))} were not: {why}" for why, t in others.items()),
    ]


def held_out(answer: Row, today: str) -> str:
    """What a stack says of its error on points that nothing was fitted to."""
    names = dict.fromkeys(p["technique"].partition(":")[0] for p in answer["points"])
    return f"held out, {today}, {', '.join(names)}: {said(answer)[0]}"


def by_technique(answer: Row) -> list[list[str]]:
    """A line of errors per technique."""
    lines = []
    names = dict.fromkeys(p["technique"].partition(":")[0] for p in answer["points"])
    for name in names:
        here = [p for p in answer["points"] if p["technique"].partition(":")[0] == name]
        errors = {
            key: np.array([m["error"] for p in here for m in p["whole"] if m["name"] == key])
            for key in (*TIMES, COMPUTING, "peak_B", *COPIED)
        }
        noise = [m["noise"] for p in here for m in p["whole"] if m["name"] in TIMES]
        times, copied = (np.concatenate([errors[key] for key in keys]) for keys in (TIMES, COPIED))
        lines.append(
            [
                name,
                str(len(here)),
                *(_middle(errors[key]) for key in TIMES),
                _middle(errors[COMPUTING]),
                f"{100 * times[np.abs(times).argmax()]:+.2g}",
                f"{100 * np.median(noise):.2g}",
                _middle(errors["peak_B"]),
                _middle(copied),
                _overlaps(here),
            ]
        )
    return lines


def _middle(errors: Any) -> str:
    return f"{100 * np.median(np.abs(errors)):.2g}" if errors.size else "-"


def _overlaps(points: Sequence[Row]) -> str:
    """Medians of the share of copies' time that runs beside compute, predicted and measured."""
    found = [[p["overlap"].get(side) for p in points] for side in SIDES]
    known = [[value for value in side if value is not None] for side in found]
    return " / ".join(f"{100 * np.median(side):.0f}" if side else "-" for side in known)


def worst_ops(answer: Row) -> list[list[str]]:
    """The ops whose prediction misses most time, the worst first."""
    every = [(p, m) for p in answer["points"] for m in p["ops"]]
    every.sort(key=lambda pair: -abs(pair[1]["predicted"] - pair[1]["measured"]))
    return [
        [
            m["name"].removesuffix("_s"),
            p["technique"].partition(":")[0],
            _where(p["model"], p["layers"], p["batch"], p["prompt"]),
            f"{1e3 * m['predicted']:.3g}",
            f"{1e3 * m['measured']:.3g}",
            f"{100 * m['error']:+.2g}",
        ]
        for p, m in every[:WORST]
    ]


def answered(answer: Row) -> Answer:
    """How far times are off on this machine, in words."""
    s = answer["summary"]
    return Answer(
        verdict(
            [
                f"On {answer['device']}, {s['points']} predicted times are off by "
                f"{units.percent(s['median'])} in the median, nine in ten by at most "
                f"{units.percent(s['nine_in_ten'])}; the runs' own noise is "
                f"{units.percent(s['noise'])}."
            ],
            [order(s)],
        ),
        figures={key: s[key] for key in ("points", "median", "nine_in_ten", "noise")},
        left_out=left_out(answer),
    )


def order(row: Row) -> str:
    """Whether the predicted winner wins and the predicted order holds."""
    if row["same_winner"] is None:
        return (
            "No technique is measurably fastest at any point; wherever two differ by more than "
            f"the noise, the predicted order is right in {units.percent(row['same_order'])}."
        )
    return (
        f"The predicted winner wins at {units.percent(row['same_winner'])} of the points; "
        f"{units.percent(row['same_order'])} of the pairs have the predicted order."
    )
