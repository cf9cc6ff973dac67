"""``kvsim capacity``: the fleet, in a few sentences, and all that stands beside it."""

from collections.abc import Sequence
from dataclasses import replace
from math import isinf
from typing import Any

import numpy as np

from kvsim.planner.fleet.answer import STRETCH, CapacityAnswer
from kvsim.planner.fleet.demand import FleetTargets
from kvsim.planner.fleet.play import Played
from kvsim.report import capacity_tables as tables
from kvsim.report import evidence
from kvsim.report.answer import MAX_VERDICT_WORDS, Answer, verdict
from kvsim.report.capacity_fields import (
    list_assumptions,
    make_fields,
    name_replicas,
    price_per_million,
)
from kvsim.report.capacity_tables import format_wait
from kvsim.report.json import Row
from kvsim.report.plan import paste_blocks
from kvsim.report.result import Result
from kvsim.report.terminal import BLANK, Block, Heading
from kvsim.report.units import likelihood, percent, usd


def make_result(
    answer: CapacityAnswer, trace: str, command: str = "", engines: Sequence[Sequence[Row]] = ()
) -> Result[CapacityAnswer]:
    """Make the answer of ``kvsim capacity``.

    Parameters
    ----------
    trace
        The trace as it was named.
    engines
        For each kind of replica settings to paste, as ``--emit`` asks for them.
    """
    fields = make_fields(answer, trace, describe_fleet(answer))
    for replica, settings in zip(fields["fleet"], engines, strict=True):
        replica["settings"] = list(settings)
    ground = evidence.describe_basis(fields["basis"])
    more = (
        ("Other loads, and a loss", tables.load_table(fields)),
        ("Other fleets", tables.alternative_table(fields)),
        ("What limits and targets cost", tables.limit_table(fields)),
        ("What other loads need", tables.other_load_table(fields)),
    )
    details = (
        ("Who serves which requests", tables.class_table(fields)),
        ("Every replica that was considered", tables.considered_table(fields)),
    )
    pastes = [row for settings in engines for row in settings]
    some = [answer.fleet.kinds[j].costs.deployment for j in answer.used]

    def draw() -> Any:
        from kvsim.report.capacity_charts import draw_fleet

        return draw_fleet(fields, answer)

    return Result(
        command,
        f"Cheapest fleet of {fields['model']} for {trace}: {_describe_targets(answer)}",
        write_answer(fields),
        fields,
        answer,
        fields["fleet"],
        tables=[tables.fleet_table(fields), *(replace(t, title=title) for title, t in more)],
        blocks=[*_list_blocks(fields), *paste_blocks(pastes)],
        more=_list_more(fields),
        draw=draw,
        details=[replace(table, title=title) for title, table in details],
        remarks=_list_remarks(fields, answer),
        notes=fields["assumed"],
        data=evidence.newest_measurement(some),
        foot=[ground],
        pastes=[row["text"] for row in pastes],
    )


def _list_blocks(fields: Row) -> list[Block]:
    """The decision, the fleet, what it is compared with, and how sure it is."""
    shown = [tables.fleet_table(fields), *tables.schedule_tables(fields), tables.case_table(fields)]
    lines = [
        *tables.describe_robustness(fields),
        *tables.describe_prefixes(fields),
        *fields["assumed"],
        *tables.describe_sellers(fields),
        tables.describe_power(fields),
        tables.describe_reserved(fields),
        tables.describe_certainty(fields),
    ]
    return [
        Heading(fields["answer"]),
        *tables.describe_shortfall(fields),
        tables.describe_question(fields),
        *tables.describe_classes(fields),
        *(block for table in shown if table.rows for block in (BLANK, table)),
        BLANK,
        *filter(None, lines),
    ]


def _list_more(fields: Row) -> list[Block]:
    """What a terminal adds with --verbose."""
    shown = [tables.load_table(fields), tables.other_load_table(fields),
             tables.alternative_table(fields), tables.limit_table(fields)]  # fmt: skip
    return [
        *(block for table in shown if table.rows for block in (BLANK, table)),
        BLANK,
        *tables.describe_prices(fields),
        tables.describe_search(fields),
    ]


def write_answer(row: Row) -> Answer:
    """State the fleet, how sure it is, and what falls short.

    Parameters
    ----------
    row
        Fields of the answer.

    Returns
    -------
    Answer
        Verdict and what follows it.
    """
    said, short = (
        verdict([row["answer"]], tables.describe_shortfall(row)),
        tables.describe_shortfall(row),
    )
    return Answer(
        verdict=said,
        figures=_figures(row),
        changes=[x for x in short if x not in said],  # where the verdict has no room for it
        evidence=[x for x in [tables.describe_certainty(row)] if x],
    )


def _figures(row: Row) -> Row:
    """The numbers of the verdict under their contract names."""
    times = row.get("simulated", {})
    paid = {k: row[k] for k in ("gpus", "usd_per_hour", "usd_per_million_tokens") if k in row}
    times = {key: times[key] for key in ("ttft_s", "tpot_s") if key in times}
    return paid | times | {"probability": row["certainty"]["both_met"]}


def _describe_targets(answer: CapacityAnswer) -> str:
    """The targets, and for how many requests."""
    t = answer.targets
    some = [("TTFT", t.ttft), ("TPOT", t.tpot)]
    said = [f"{name} {format_wait(value)}" for name, value in some if np.isfinite(value)]
    share = f"{100 * t.share:g} % of requests"
    return f"{' and '.join(said)} for {share}" if said else f"{share} finish"


def _list_remarks(row: Row, answer: CapacityAnswer) -> list[str]:
    """What the page says under the pictures."""
    return [
        *tables.describe_classes(row),
        _demand_note(answer),
        f"Time to first token: {_waits_note(row, 'ttft_s')}.",
        f"Time per token: {_waits_note(row, 'tpot_s')}.",
        *tables.describe_prefixes(row),
        *tables.describe_prices(row),
        *_assumptions(row, answer),
    ]


def _demand_note(answer: CapacityAnswer) -> str:
    demand = answer.question.traffic.demand
    total = demand.rate.sum(axis=1)
    if not answer.question.traffic.requests.duration:
        return "All requests come at once."
    if len(total) == 1:
        return f"{total[0]:.3g} requests per second over {60 * demand.hours[0]:.3g} minutes."
    return (
        f"{total.mean():.3g} requests per second on average, {total.max():.3g} in the busiest of "
        f"{len(total)} windows of {60 * demand.hours[0]:.3g} minutes."
    )


def _waits_note(row: Row, name: str) -> str:
    times = row["simulated"][name]
    known = {k: v for k, v in times.items() if k != "at_target" and v is not None}
    return ", ".join(f"{k} {format_wait(v)}" for k, v in known.items())


def _assumptions(row: Row, answer: CapacityAnswer) -> list[str]:
    """What the answer rests on, with where it comes from."""
    memory = ", ".join(sorted({f"{100 * r['gpu_memory_utilization']:.0f} %" for r in row["fleet"]}))
    return [
        tables.describe_search(row),
        *filter(
            None,
            [
                tables.describe_certainty(row),
                tables.describe_reserved(row),
                tables.describe_power(row),
            ],
        ),
        *list_assumptions(answer),
        f"Among replicas of a kind, requests are routed {row['fleet'][0]['route']}.",
        f"Engines use {memory} of GPU memory; a pass holds at most "
        f"{row['fleet'][0]['max_tokens']} tokens.",
        *tables.describe_sellers(row),
        "Not modelled: time to load a model, failures while serving, and networks between "
        "replicas, "
        "except for KV caches that are transferred.",
    ]


def describe_fleet(answer: CapacityAnswer) -> str:
    """State the decision, how sure it is and what it does, in at most 60 words.

    Where replicas have long names, what would be surer and whose times differ are in the tables.

    Parameters
    ----------
    answer
        Answer of the capacity planner.

    Returns
    -------
    str
        Verdict.
    """
    q = answer.question
    fleet = tables.shorten(answer.fleet.name)
    reached = answer.played.reached(answer.targets.share)
    p = f"p{100 * reached.share:g}"
    times = f"TTFT {p} {format_wait(reached.ttft)}, TPOT {p} {format_wait(reached.tpot)}"
    if answer.targets.longer:
        times = f"each class of prompts within its targets, all of them with {times}"
    part = "" if answer.load == 1 else f" {100 * answer.load:.0f} % of"
    rate = float(q.traffic.demand.mean.sum())
    each = price_per_million(answer)
    million = "" if each is None else f", {usd(each)} per million output tokens"
    meets = "would serve" if answer.shortfall else "serves"
    paid = f"{usd(answer.fleet.cost)} per hour{million}."
    some, gpus = answer.fleet.replicas, int(answer.fleet.total("gpus"))
    whole = f"{gpus} GPUs, {fleet}" if gpus > some.sum() else fleet
    rent = f"Rent {'' if q.schedule is None else 'up to '}{whole}: {paid}"
    tabled = f"Rent the {some.sum()} replicas of {(some > 0).sum()} kinds in the table: {paid}"
    who = describe_slower(answer.played, answer.targets, name_replicas(answer))
    sure, safer = _describe_likelihood(answer)
    what = f"the trace's {rate:.3g} requests per second"
    if not q.traffic.requests.duration:
        what = "the trace, which arrives all at once,"
    does = f"In simulation it {meets}{part} {what} with {times}."
    ways = (
        [rent, who, f"{sure}{safer}."],
        [rent, who, f"{sure}."],
        [rent, "The targets are met over all requests together." if who else "", f"{sure}."],
        [tabled, "The targets are met over all requests together." if who else "", f"{sure}."],
    )
    fit = next(
        way for way in ways if way is ways[-1] or len(" ".join(way).split()) <= MAX_VERDICT_WORDS
    )
    return verdict(fit, [does])


def _describe_likelihood(answer: CapacityAnswer) -> tuple[str, str]:
    """How likely the targets are kept, and what rents more certainty where that is little."""
    if all(isinf(x.ttft) and isinf(x.tpot) for x in answer.targets.each):
        return "No targets were given", ""
    both = answer.sure.likely["both"]
    said = f"Probability of meeting the targets: {likelihood(both)}"
    stretch = next((a.fleet for a in answer.alternatives if a.label == STRETCH), None)
    if stretch is None or stretch.cost >= answer.fleet.cost:
        return said, ""
    return said, (
        f". If predictions were exact, {tables.shorten(stretch.name)} ({usd(stretch.cost)} per "
        "hour) would be enough for this trace"
    )


def describe_slower(played: Played, targets: FleetTargets, names: list[str]) -> str:
    """Name the requests whose own replicas miss a target that the whole fleet keeps.

    A percentile of all requests allows a cheap kind of replica to be late with most of those that
    may be late; whoever rents it should know who waits.

    Parameters
    ----------
    played
        Simulated fleet.
    targets
        Targets of the fleet.
    names
        Kinds of replica by their number.

    Returns
    -------
    str
        One sentence; empty where every kind of replica keeps the targets.
    """
    said = []
    for kind in np.unique(played.kind):
        mine = played.kind == kind
        if mine.all() or played.meets(targets, mine):
            continue
        reached = played.reached(targets.share, mine)
        p = f"p{100 * targets.share:g}"
        times = [
            f"{name} {p} {format_wait(value)}"
            for name, value, most in (
                ("TTFT", reached.ttft, targets.ttft),
                ("TPOT", reached.tpot, targets.tpot),
            )
            if value > most or targets.longer
        ]
        said.append(
            f"the {percent(float(mine.mean()))} on {tables.shorten(names[kind])} have "
            f"{' and '.join(times)}"
        )
    return f"The targets are met over all requests: {'; '.join(said)}." if said else ""
