"""``kvsim capacity``: the fleet, in a few sentences, and all that stands beside it."""

from collections.abc import Sequence
from dataclasses import replace
from math import isinf
from typing import Any

import numpy as np

from kvsim.planner.fleet.answer import CapacityAnswer
from kvsim.planner.fleet.comparisons import ROBUST
from kvsim.planner.fleet.demand import FleetTargets
from kvsim.planner.fleet.play import Played
from kvsim.report import capacity_tables as tables
from kvsim.report import evidence
from kvsim.report.answer import MAX_VERDICT_WORDS, Answer, verdict
from kvsim.report.capacity_fields import (
    list_assumptions,
    make_fields,
    name_fleet,
    name_replicas,
    price_per_million,
)
from kvsim.report.capacity_tables import format_wait
from kvsim.report.json import Row
from kvsim.report.plan import paste_blocks
from kvsim.report.result import Result
from kvsim.report.terminal import BLANK, Block, Heading
from kvsim.report.units import likelihood, percent, usd

MIN_LIKELIHOOD = 0.9  # likelihood below which a fleet is near its limit


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
    some = [answer.market.configurations[j].costs.deployment for j in answer.used]

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
    shown = [tables.fleet_table(fields), *tables.schedule_tables(fields), tables.load_table(fields)]
    others = fields["fleet_at_load"].values()
    if any(x["fleet"] not in (None, tables.name_fleet(fields)) for x in others):
        shown.append(tables.other_load_table(fields))
    shown += [tables.alternative_table(fields), tables.limit_table(fields)]
    lines = [
        *tables.describe_prefixes(fields),
        *tables.describe_prices(fields),
        *fields["assumed"],
        tables.describe_reserved(fields),
        tables.describe_certainty(fields),
        tables.describe_power(fields),
        tables.describe_search(fields),
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
        changes=[x for x in short if x not in said],  # where the verdict has no room for it
        evidence=[x for x in [tables.describe_certainty(row)] if x],
    )


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
        _saving(row),
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


def _saving(row: Row) -> str:
    dearer = [a for a in row["alternatives"] if a["usd_per_hour"] is not None]
    single = next((a for a in dearer if a["name"] == "one kind of replica"), None)
    bound = row["solver"]["relaxation_usd_per_hour"]
    said = f"No fleet of parts of replicas is cheaper than {bound:.2f} USD per hour."
    if single is not None and single["dearer"] > 1e-9:
        said += f" One kind of replica alone costs {100 * single['dearer']:.0f} % more."
    return said


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
        "Requests go to a kind of replica by their class and among those to the least loaded, or "
        "where most of their prefix is.",
        f"Engines use {memory} of GPU memory; a pass holds at most "
        f"{row['fleet'][0]['max_tokens']} tokens.",
        "Prices are those of the hardware profiles or of the command line; see kvsim gpus --json.",
        "Not modelled: time to load a model, failures while serving, and networks between replicas "
        "but for caches that are handed over.",
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
    fleet = name_fleet(answer.found, answer.market.configurations)
    reached = answer.fleet.played.reached(answer.targets.share)
    p = f"p{100 * reached.share:g}"
    times = f"TTFT {p} {format_wait(reached.ttft)}, TPOT {p} {format_wait(reached.tpot)}"
    if answer.targets.longer:
        times = f"each class of prompts within its targets, all of them with {times}"
    part = "" if answer.load == 1 else f" {100 * answer.load:.0f} % of"
    rate = float(q.traffic.demand.mean.sum())
    each = price_per_million(answer)
    million = "" if each is None else f", {usd(each)} per million generated tokens"
    meets = "would carry" if answer.shortfall else "carries"
    paid = f"{usd(answer.fleet.cost)} per hour{million}."
    rent = f"Rent {'' if q.schedule is None else 'up to '}{fleet}: {paid}"
    some = answer.fleet.replicas
    tabled = f"Rent the {some.sum()} replicas of {(some > 0).sum()} kinds in the table: {paid}"
    who = describe_slower(answer.fleet.played, answer.targets, name_replicas(answer))
    sure, safer = _describe_likelihood(answer)
    what = f"the trace's {rate:.3g} requests per second"
    if not q.traffic.requests.duration:
        what = "the trace, all of which comes at once,"
    does = f"In simulation it {meets}{part} {what} with {times}."
    ways = (
        [rent, who, f"{sure}{safer}."],
        [rent, who, f"{sure}."],
        [rent, "Targets hold for all requests together." if who else "", f"{sure}."],
        [tabled, "Targets hold for all requests together." if who else "", f"{sure}."],
    )
    fit = next(
        way for way in ways if way is ways[-1] or len(" ".join(way).split()) <= MAX_VERDICT_WORDS
    )
    return verdict(fit, [does])


def _describe_likelihood(answer: CapacityAnswer) -> tuple[str, str]:
    """How likely the targets are kept, and what rents more certainty where that is little."""
    if all(isinf(x.ttft) and isinf(x.tpot) for x in answer.targets.each):
        return "There are no targets to keep", ""
    both = answer.sure.likely["both"]
    said = f"It keeps the targets with a likelihood of {likelihood(both)}"
    safer = next((a for a in answer.alternatives if a.label == ROBUST), None)
    if both >= MIN_LIKELIHOOD or safer is None:
        return said, ""
    if safer.found is None:
        return said, "; no fleet within the limits was found that keeps them with 95 %"
    more = name_fleet(safer.found, safer.configurations)
    return said, f"; for 95 % rent {more}, {usd(safer.found.fleet.cost)} per hour"


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
                ("TTFT", reached.ttft, targets.ttft), ("TPOT", reached.tpot, targets.tpot)
            )
            if value > most or targets.longer
        ]  # fmt: skip
        said.append(
            f"the {percent(float(mine.mean()))} on {names[kind]} have {' and '.join(times)}"
        )
    return f"Targets hold for all requests together: {'; '.join(said)}." if said else ""
