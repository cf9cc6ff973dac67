"""Targets of a fleet and how it keeps them, as JSON rows and in words."""

from itertools import pairwise
from typing import Any

import numpy as np

from kvsim.planner.fleet.demand import FleetTargets
from kvsim.planner.fleet.play import Played
from kvsim.report.json import Row, number
from kvsim.report.units import percent, seconds
from kvsim.serving.outcome import spread


def target_row(targets: FleetTargets) -> Row:
    """Targets of all requests; infinite ones are null."""
    return {
        "ttft_s": number(targets.ttft),
        "tpot_s": number(targets.tpot),
        "percentile": 100 * targets.share,
    }


def times_row(played: Played, targets: FleetTargets, rows: Any = None) -> Row:
    """Percentiles of what requests waited, and whether that is within the targets."""
    some = slice(None) if rows is None else rows
    reached = played.reached(targets.share, rows)
    return {
        "met": played.meets(targets, rows),
        "ttft_s": {**spread(played.ttft[some]), "at_target": number(reached.ttft)},
        "tpot_s": {**spread(played.tpot[some]), "at_target": number(reached.tpot)},
        "latency_s": spread(played.latency[some]),
        "good_share": played.good_share(targets) if rows is None else None,
        "refused": int(np.isinf(played.ttft[some]).sum()),
    }


def slower(played: Played, targets: FleetTargets, names: list[str]) -> str:
    """The requests whose own replicas miss a target that the whole fleet keeps, in words.

    A percentile of all requests allows a cheap kind of replica to be late with most of those that
    may be late; whoever rents it should know who waits.
    """
    said = []
    for kind in np.unique(played.kind):
        mine = played.kind == kind
        if mine.all() or played.meets(targets, mine):
            continue
        reached = played.reached(targets.share, mine)
        p = f"p{100 * targets.share:g}"
        times = [
            f"{name} {p} {wait(value)}"
            for name, value, most in (
                ("TTFT", reached.ttft, targets.ttft), ("TPOT", reached.tpot, targets.tpot)
            )
            if value > most or targets.longer
        ]  # fmt: skip
        said.append(
            f"the {percent(float(mine.mean()))} on {names[kind]} have {' and '.join(times)}"
        )
    return f"Targets hold for all requests together: {'; '.join(said)}." if said else ""


def class_rows(played: Played, targets: FleetTargets) -> list[Row]:
    """Each class of prompts with targets of its own, and what it reaches; empty for one class."""
    if not targets.longer:
        return []
    found, bounds = [], [x.above for x in targets.each]
    longest = dict(pairwise(bounds))
    for rows, target in played.by_class(targets):
        reached = played.reached(targets.share, rows)
        found.append({
            "prompt_above": target.above,
            "prompt_up_to": longest.get(target.above),
            "requests": int(rows.sum()),
            "targets": {"ttft_s": number(target.ttft), "tpot_s": number(target.tpot)},
            "ttft_s": number(reached.ttft),
            "tpot_s": number(reached.tpot),
            "met": played.meets(targets, rows),
        })  # fmt: skip
    return found


def class_lines(answer: Row) -> list[str]:
    """How each class of prompts is served, in a sentence each."""
    found = []
    p = f"p{answer['planned_for']['percentile']:g}"
    for row in answer["class_targets"]:
        goal = row["targets"]
        times = " and ".join(
            f"{name} {p} {_said(row[key])}"
            + (f" of at most {seconds(goal[key])}" if goal[key] is not None else "")
            for name, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"))
        )
        met = "" if row["met"] else "; missed"
        found.append(f"{_prompts(row)} tokens ({row['requests']:,} requests): {times}{met}.")
    return found


def _prompts(row: Row) -> str:
    """Which prompts a class has."""
    above, most = row["prompt_above"], row["prompt_up_to"]
    if most is None:
        return f"Prompts above {above:,}"
    return f"Prompts of {above + 1:,} to {most:,}" if above else f"Prompts up to {most:,}"


def _said(value: float | None) -> str:
    return "never" if value is None else seconds(value)


def wait(value: float) -> str:
    """A time that requests wait; without end for those that fit nowhere."""
    return seconds(value) if np.isfinite(value) else "never"
