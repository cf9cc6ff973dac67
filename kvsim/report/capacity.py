"""The result of ``kvsim capacity``: the fleet, its alternatives and the fields of the JSON."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import isfinite, isinf
from textwrap import wrap

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import InfeasibleError
from kvsim.graph import Array
from kvsim.machines.deployment import basis
from kvsim.machines.hardware import GIB
from kvsim.planner.fleet.answer import (
    FULL_KV,
    NO_MEMORY,
    NONE,
    STRETCH,
    CapacityAnswer,
    NoFleetError,
    OtherFleet,
    WhatIf,
)
from kvsim.planner.fleet.demand import FleetTargets
from kvsim.planner.fleet.milp import scheduled_cost
from kvsim.planner.fleet.offers import Configuration, count_replicas, find_unadmitted
from kvsim.planner.fleet.play import Played
from kvsim.report import evidence
from kvsim.report.answer import MAX_VERDICT_WORDS, Answer, verdict
from kvsim.report.colours import PALETTE
from kvsim.report.json import Row, number
from kvsim.report.names import join_words, ranks
from kvsim.report.phrases import change_command, paste_blocks
from kvsim.report.pictures import DOWNWARDS, GREY, RED, Chart, draw_arrivals, draw_distribution
from kvsim.report.result import Result
from kvsim.report.table import Column, Table, text_column
from kvsim.report.terminal import BLANK, Block, Heading, Verbatim
from kvsim.report.units import format_number, integer, likelihood, percent, rounded, seconds, usd
from kvsim.serving.outcome import spread
from kvsim.serving.records import MEMORIES
from kvsim.serving.servable import describe_left_out

LINE = 97  # of a command in several lines [characters]
NO_BREAK = "\0"  # stands for a space within a word
ROUTED = {
    "round-robin": "each replica in turn",
    "least-loaded": "the replica with the fewest unfinished ones",
    "prefix-aware": "the replica that holds most of their prefix",
    "cache-and-load": "the replica where the fewest prompt tokens are to be read before them, "
    "without those found there",
}
"""Where each router sends requests."""
EXACT = "Without the margin for prediction errors"
MAX_ROWS, MIN_CASES = 4, 1  # of all that a terminal shows; other fleets among them
SCHEDULE = (
    "from: since the first request of the trace, in hours, minutes and seconds; below the kinds of "
    "replica, how many of each run"
)
FULL = re.compile(r" full(?= \+ | \(|,|;|$)")
DRAFTING = re.compile(r"\b([\w-]+):\S*?\bgamma=(\d+)[\w.,=-]*")
DRAFTED = re.compile(r" ([\w-]+) with (\d+) drafts")  # in a fleet, as DRAFTING writes it
DISAGGREGATED_NOTE = (
    "1 prefill + 1 decode: one engine computes prompts and transfers their KV "
    "caches to one that decodes"
)
MEMORY_NAMES = {"gpu": "GPU memory", "host": "host memory", "nvme": "NVMe", "remote": "the store"}


def make_result(
    answer: CapacityAnswer,
    trace: str,
    engines: Sequence[Sequence[Row]] = (),
    play: str = "",
) -> Result[CapacityAnswer]:
    """Make the result of ``kvsim capacity``.

    Parameters
    ----------
    answer
        The fleet that was found, with its simulation and alternatives.
    trace
        Name of the trace.
    engines
        For each kind of replica, configurations of the engines named by ``--emit``.
    play
        Command line that simulates the fleet; empty if there is none.
    """
    fields = make_fields(answer, trace, describe_fleet(answer)) | {"simulate": play}
    for replica, settings in zip(fields["fleet"], engines, strict=True):
        replica["settings"] = list(settings)
    ground = evidence.describe_basis(fields["basis"])
    loads = replace(_load_table(fields), title="Other loads, and a loss")
    fleets = replace(
        _fleets_table(_list_cases(fields)),
        title="Other fleets, loads and limits",
    )
    details = {
        "Who serves which requests": _class_table(fields),
        "Every replica that was considered": _considered_table(fields),
    }
    pastes = [row for settings in engines for row in settings]
    some = [answer.fleet.kinds[j].costs.deployment for j in answer.used]

    return Result(
        f"Cheapest fleet of {fields['model']} for {trace}: {_describe_asked_targets(answer)}",
        write_answer(fields),
        fields,
        answer,
        fields["fleet"],
        tables=[_fleet_table(fields), loads, fleets],
        blocks=[*_list_blocks(fields), *_write_check(play, fields), *paste_blocks(pastes)],
        more=[
            *_separate([replace(table, title="") for table in (loads, fleets)]),
            BLANK,
            *(line for line in _list_lines(fields) if line not in _list_first(fields)),
            *filter(None, [_describe_certainty(fields)]),
            *_describe_break_even(fields),
            _describe_search(fields),
        ],
        draw=lambda: draw_fleet(fields, answer),
        details=[replace(table, title=title) for title, table in details.items()],
        remarks=_list_remarks(fields, answer),
        notes=fields["assumed"],
        data=evidence.newest_measurement(some),
        foot=[ground],
        pastes=[*(row["text"] for row in pastes), *filter(None, [play])],
    )


def make_empty_result(none: InfeasibleError, command: str) -> Result[InfeasibleError]:
    """Make the result of ``kvsim capacity`` where there is no fleet.

    Parameters
    ----------
    none
        The reason; a `NoFleetError` has the targets that a fleet meets.
    command
        The command line, which they are added to.
    """
    advice, reason = list[Row](), str(none)
    if isinstance(none, NoFleetError) and none.option:
        changed = change_command(command, none.changes) if none.changes else None
        advice.append({"option": none.option, "command": changed})
    answer = Answer(f"{reason[0].upper()}{reason[1:]}.")
    fields = {"answer": answer.verdict, "choice": None, "reason": reason, "advice": advice}
    return Result("No fleet", answer, fields, none, advice, command=command)


def _write_check(play: str, fields: Row) -> list[Block]:
    """The command that plays the fleet, in lines that a shell reads as one."""
    if not play:
        return []
    whole = shlex.join(word.replace(" ", NO_BREAK) for word in shlex.split(play))
    lines = wrap(whole, LINE, break_long_words=False, break_on_hyphens=False)
    text = " \\\n  ".join(lines).replace(NO_BREAK, " ")
    judged = ", judged by the longest target of any class" if fields["class_targets"] else ""
    return [BLANK, Verbatim(f"# Simulate this fleet{judged}:\n{text}")]


def _list_blocks(fields: Row) -> list[Block]:
    """The decision, the fleet, what it is compared with, and how sure it is."""
    told = EXACT in fields["answer"]  # the fleet for exact predictions, in the verdict
    cases = [x for x in _dearer_cases(fields) if not (told and x["name"] == STRETCH)]
    schedule = _schedule_tables(fields)
    taken = [fields["fleet"], fields["assumed"][:1], 2 * fields["class_targets"]]
    taken += [2 * _describe_shortfall(fields)]
    taken += [table.rows for table in schedule]
    left = max(MAX_ROWS - sum(map(len, taken)), MIN_CASES)
    shown = [_fleet_table(fields), *schedule, _fleets_table(cases[:left])]
    return [
        Heading(fields["answer"]),
        *_describe_shortfall(fields),
        _describe_question(fields),
        *_describe_classes(fields),
        *_separate(shown),
        BLANK,
        *_describe_robustness(fields),
        *_list_first(fields),
    ]


def _list_lines(fields: Row) -> list[str]:
    """What the fleet rests on, which its page says, too."""
    lines = [
        *_describe_prefixes(fields),
        *fields["assumed"],
        _describe_power(fields),
        _describe_reserved(fields),
        _describe_routes(fields),
    ]
    return [line for line in lines if line]


def _list_first(fields: Row) -> list[str]:
    """Of these lines what a terminal shows unless asked for more: what changes the decision."""
    assumed = [x for x in fields["assumed"] if x.startswith("Assumed")]
    reserved, prices = _describe_reserved(fields), _describe_prices(fields)
    sure = fields["certainty"]
    asked = sure["ttft_met"] is not None or sure["tpot_met"] is not None
    return [
        *(x for x in fields["assumed"] if x not in assumed[1:]),
        *filter(None, [reserved, prices, f"Evidence: {sure['source']}." if asked else ""]),
    ]


def _separate(tables: Sequence[Table]) -> list[Block]:
    """Tables that have rows, each after an empty line."""
    return [block for table in tables if table.rows for block in (BLANK, table)]


def write_answer(row: Row) -> Answer:
    """Write the verdict on a fleet, with its probability and shortfall.

    Parameters
    ----------
    row
        A row with the fields of ``kvsim capacity --json``.

    Returns
    -------
    Answer
        The verdict and its evidence.
    """
    short = _describe_shortfall(row)
    said = verdict([row["answer"]], short)
    return Answer(
        verdict=said,
        figures=_figures(row),
        changes=[x for x in short if x not in said],  # where the verdict has no room for it
        evidence=[x for x in [_describe_certainty(row)] if x],
    )


def _figures(row: Row) -> Row:
    """The numbers of the verdict under their contract names."""
    every = {**row.get("simulated", {}), **row, "probability": row["certainty"]["both_met"]}
    keys = "gpus", "usd_per_hour", "usd_per_million_tokens", "ttft_s", "tpot_s", "probability"
    return {key: every[key] for key in keys if key in every}


def _describe_asked_targets(answer: CapacityAnswer) -> str:
    """The targets, and for how many requests."""
    t = answer.targets
    some = {"TTFT": t.ttft, "TPOT": t.tpot}
    said = [f"{name} {_format_wait(value)}" for name, value in some.items() if isfinite(value)]
    share = f"{100 * t.share:g} % of requests"
    return f"{' and '.join(said)} for {share}" if said else f"{share} finish"


def _list_remarks(row: Row, answer: CapacityAnswer) -> list[str]:
    """What the page says under the pictures."""
    memory = ", ".join(sorted({f"{100 * r['gpu_memory_utilization']:.0f} %" for r in row["fleet"]}))
    first, waits = row["fleet"][0], []
    for title, key in (("Time to first token", "ttft_s"), ("Time per token", "tpot_s")):
        times = row["simulated"][key].items()
        known = [f"{k} {_format_wait(v)}" for k, v in times if k != "at_target" and v is not None]
        waits.append(f"{title}: {', '.join(known)}.")
    return [
        *_describe_classes(row),
        _demand_note(answer),
        *waits,
        *_list_lines(row),
        _describe_prices(row),
        *_describe_break_even(row),
        _describe_search(row),
        f"Engines use {memory} of GPU memory; a pass holds at most {first['max_tokens']} tokens.",
        "Not modelled: time to load a model, failures while serving, and networks between "
        "replicas, except for KV caches that are transferred.",
    ]


def _demand_note(answer: CapacityAnswer) -> str:
    traffic = answer.question.traffic
    total = traffic.rate.sum(axis=1)
    if not answer.question.traffic.requests.duration:
        return "All requests come at once."
    each = f"{format_number(60 * traffic.hours[0], 3)} minutes"
    mean, most = format_number(total.mean(), 3), format_number(total.max(), 3)
    if len(total) == 1:
        return f"{mean} requests per second over {each}."
    return (
        f"{mean} requests per second on average, {most} in the busiest of "
        f"{len(total)} windows of {each}."
    )


def describe_fleet(answer: CapacityAnswer) -> str:
    """Write the recommendation: the fleet, its price, and how surely it meets the targets.

    Details are left out, longest first, until it has at most 60 words.

    Parameters
    ----------
    answer
        The fleet that was found.

    Returns
    -------
    str
        The verdict.
    """
    q = answer.question
    fleet = _shorten(answer.fleet.name)
    reached = answer.played.reached(answer.targets.share)
    p = f"p{100 * reached.share:g}"
    times = f"TTFT {p} {_format_wait(reached.ttft)}"
    if reached.tpot:  # 0 where every answer is a single token
        times += f", TPOT {p} {_format_wait(reached.tpot)}"
    if answer.targets.longer:
        times = f"each class of prompts within its targets, all of them with {times}"
    part = "" if answer.load == 1 else f" {100 * answer.load:.0f} % of"
    rate = float(q.traffic.mean.sum())
    each = price_per_million(answer)
    million = "" if each is None else f", {usd(each)} per million output tokens"
    meets = "would serve" if answer.shortfall else "serves"
    paid = f"{_describe_doubt(answer)}: {usd(answer.fleet.cost)} per hour{million}."
    some, gpus = answer.fleet.replicas, int(answer.fleet.total("gpus"))
    whole = f"{gpus} GPUs, {fleet}" if gpus > some.sum() else fleet
    always = ", always running" if q.start_up is not None and not answer.fleet.changes else ""
    each_of = ", with" if some.sum() == 1 else ", each with"
    whole = DRAFTED.sub(rf"{each_of} \1 and \2 drafts", whole)
    rent = f"Rent {'up to ' if answer.fleet.changes else ''}{whole}{always}{paid}"
    tabled = f"Rent the {some.sum()} replicas of {(some > 0).sum()} kinds in the table{paid}"
    who = describe_slower(answer.played, answer.targets, [x.name for x in answer.fleet.kinds])
    sure, safer = _describe_likelihood(answer)
    what = f"{format_number(rate, 3)} requests per second"
    if not q.traffic.requests.duration:
        what = "requests that arrive all at once"
    does = f"In simulation the recommended fleet {meets}{part} {what} with {times}."
    whole = "The targets are met over all requests together." if who else ""
    ways = [[rent, who, f"{sure}{safer}."], [rent, who, f"{sure}."], [rent, whole, f"{sure}."]]
    short = (way for way in ways if len(" ".join(way).split()) <= MAX_VERDICT_WORDS)
    fit = next(short, [tabled, whole, f"{sure}."])
    plain = len(answer.used) == 1 and not answer.shortfall and not answer.targets.longer
    return verdict(fit, [] if plain else [does])  # the lines below say it of a plain fleet


def _describe_likelihood(answer: CapacityAnswer) -> tuple[str, str]:
    """How likely the targets are kept, and what rents more certainty where that is little."""
    if all(isinf(x.ttft) and isinf(x.tpot) for x in answer.targets.classes):
        return "No targets were given", ""
    least, most = answer.sure.interval
    low, high = map(likelihood, (least, most))
    likely = f"at least {low}" if most > 0.99 >= least else f"{low.removesuffix(' %')} to {high}"
    likely = low if low == high else likely
    said = f"Probability of meeting the targets: {likely}"
    stretch = next((a.fleet for a in answer.alternatives if a.label == STRETCH), None)
    if stretch is None or stretch.cost >= answer.fleet.cost:
        return said, ""
    return said, (
        f". {EXACT}, {'up to ' if stretch.changes else ''}{_shorten(stretch.name)} "
        f"({usd(stretch.cost)} per hour) would be enough"
    )


def _describe_doubt(answer: CapacityAnswer) -> str:
    """Say that a fleet may be less sure than asked, by the days that did not choose it."""
    asked, (_, most) = answer.question.sure, answer.sure.interval
    if answer.shortfall or answer.sure.likely["both"] >= asked:
        return ""
    return f", {'' if most < asked else 'perhaps '}less sure than the {100 * asked:g} % asked"


def describe_slower(played: Played, targets: FleetTargets, names: list[str]) -> str:
    """Name the kinds of replica whose own requests miss the targets too often.

    The fleet as a whole can meet the targets while a kind of replica that serves few requests
    misses them for most of its own.

    Parameters
    ----------
    played
        The simulated fleet.
    targets
        The targets.
    names
        Name of each kind of replica.

    Returns
    -------
    str
        One sentence; empty if every kind meets the targets.
    """
    said = []
    for kind in np.unique(played.kind):
        mine = played.kind == kind
        if mine.all() or played.meets(targets, mine):
            continue
        good = played.good_share(targets, mine)
        share = percent(float(mine.mean()))
        said.append(f"of the {share} that {_shorten(names[kind])} serves, only {percent(good)} do")
    if not said:
        return ""
    everyone = percent(played.good_share(targets))
    return f"{everyone} of all requests meet the targets, but {join_words(said)}."


def _describe_shortfall(answer: Row) -> list[str]:
    """Say why the answer is not what was asked for, if it is not."""
    return [] if answer["met"] else [f"The request could not be met: {answer['shortfall']}."]


def _name_fleet(answer: Row) -> str:
    """Name the fleet as other fleets are named."""
    return " + ".join(count_replicas(r["replicas"], r["name"]) for r in answer["fleet"])


def _describe_question(answer: Row) -> str:
    """State the targets and the traffic that were asked for, in one sentence."""
    goal = answer["planned_for"]
    keys = {"TTFT": "ttft_s", "TPOT": "tpot_s"}.items()
    some = [f"{name} {_format_wait(goal[key])}" for name, key in keys if goal[key]]
    asked = f"{goal['percentile']:g} % of requests within"
    some = [f"{asked} {'both ' * (len(some) > 1)}{' and '.join(some)}"] if some else []
    if answer["class_targets"]:
        some.append("longer prompts have targets of their own")
    several = answer["requests"] > 1
    count = f"{answer['requests']:,} request{'s' * several}"
    if answer["rate_per_s"] is not None:
        count += f", {rounded(answer['rate_per_s'], 3)} per second"
    elif several:
        count += " at once"
    return f"{answer['model']}, {answer['trace']}: {count}; {', '.join(some) or 'no targets'}."


def _describe_certainty(answer: Row) -> str:
    """State the likelihood of each target, and where it comes from."""
    sure = answer["certainty"]
    met = {"TTFT": sure["ttft_met"], "TPOT": sure["tpot_met"]}
    each = [f"{name} {likelihood(share)}" for name, share in met.items() if share is not None]
    if not each:
        return ""
    days = f"{sure['days']} simulated days that did not choose the fleet"
    return (
        f"Probability of meeting each target: {', '.join(each)} (over {days} and the error of "
        f"predicted times). Predicted times: {sure['source']}."
    )


def _describe_prices(answer: Row) -> str:
    """Say whose prices these are, of when, and the cheapest fleet at another seller."""
    found = answer["sellers"]
    by_terms: dict[str, tuple[list[str], dict[str, None]]] = {}
    for gpu, x in found["prices"].items():
        terms, _, date = x["source"].rpartition(", ")
        prices, dates = by_terms.setdefault(terms, ([], {}))
        prices.append(f"{gpu} {usd(x['usd_per_gpu_hour'])}")
        dates[date] = None
    listed = (
        f"{', '.join(prices)} ({', '.join(filter(None, [terms, join_words(list(dates))]))})"
        for terms, (prices, dates) in by_terms.items()
    )
    told = f"Prices per GPU-hour: {', '.join(listed)}"
    if found["others"]:
        other = min(found["others"], key=lambda x: x["usd_per_hour"])
        told += f"; {other['seller']}: {_shorten(other['name'])}, {usd(other['usd_per_hour'])}/h"
    elif len({terms.partition(",")[0] for terms in by_terms if terms}) > 1:  # none: a given price
        told += "; no seller offers all of them"
    return f"{told}."


def _describe_power(answer: Row) -> str:
    """State what the GPUs draw at most by their data sheets, and what a token takes of it."""
    rated, each = answer["rated_power_w"], answer["joules_per_token"]
    if rated is None:
        return ""
    tokens = "" if each is None else f", {rounded(each, 3)} J per generated token"
    gpus = f"{answer['gpus']} GPUs" if answer["gpus"] > 1 else "GPU"
    kilowatts = rounded(rated / 1e3, 3)
    return f"Rated power of the {gpus}: {kilowatts} kW{tokens}, without hosts and cooling."


def _describe_reserved(answer: Row) -> str:
    """List the replicas that are paid always, at the lower price."""
    some = [count_replicas(r["reserved"], r["name"]) for r in answer["fleet"] if r["reserved"]]
    return f"Reserved (paid whether or not they run): {', '.join(some)}." if some else ""


def _describe_search(answer: Row) -> str:
    """Say what no fleet undercuts, and how the answer was found."""
    search = answer["search"]
    return (
        f"Lower bound, with every replica always busy: {usd(search['bound_usd_per_hour'])} per "
        f"hour. {search['plays']:,} fleets were simulated."
    )


def _fleet_table(answer: Row) -> Table:
    """A line per kind of replica: its price, its share of requests and what they wait."""
    several = len(answer["fleet"]) > 1
    columns = [
        text_column("kind of replica", lambda r: _shorten(r["name"])),
        Column("replicas", "replicas"),
        Column("USD/h", "usd_per_hour", usd),
        *([Column("requests", "share_of_requests", percent)] if several else []),
        Column("max-num-seqs", "max_seqs", integer, 1),
        Column("tokens / pass", "max_tokens", integer, 1),
        *_wait_columns("simulated", f" p{answer['planned_for']['percentile']:g}"),
    ]
    note = DISAGGREGATED_NOTE if any(r["engines"] for r in answer["fleet"]) else ""
    return Table(columns, answer["fleet"], note=note)


def _wait_columns(where: str = "", which: str = "") -> list[Column]:
    """Both times that the asked share of requests keeps."""

    def column(name: str) -> Column:
        key = f"{where}.{name}.at_target".removeprefix(".")
        return Column(
            f"{name[:4].upper()}{which}",
            key,
            write=lambda row: _wait_of(row[where] if where else row, name),
        )

    return [column("ttft_s"), column("tpot_s")]


def _describe_prefixes(answer: Row) -> list[str]:
    """Say where prompts found their prefixes, if anywhere."""
    said = []
    for r in answer["fleet"]:
        found = {MEMORY_NAMES[k]: v for k, v in r["prefix_hits"].items() if v > 0}
        if found:
            parts = ", ".join(f"{percent(v)} in {k}" for k, v in found.items())
            said.append(f"Prompt tokens found on {r['name']}: {parts}.")
    return said


def _describe_routes(answer: Row) -> str:
    """Which replica requests go to, as the router in front of them must do; empty for one each."""
    routes = dict.fromkeys(r["route"] for r in answer["fleet"] if r["replicas"] > 1)
    said = [f"{ROUTED[route]} ({route})" for route in routes]
    return f"Requests go to {' or '.join(said)}." if said else ""


def _load_table(answer: Row) -> Table:
    """The fleet at other loads and after losses, and what a fleet for such a load costs."""
    part = answer["planned_for"]["load"]
    name = "the trace" if part == 1 else f"{100 * part:.0f} % of the trace"
    both = answer["certainty"]["both_met"]
    sure = bool(answer["certainty"]["asked"])
    whole = {"case": name, "needs": answer["usd_per_hour"], "probability": both}
    rows = [{**answer["simulated"], **whole}]
    for load, times in answer["at_load"].items():
        label = f"{load} times {'its' if part == 1 else 'that'} load"
        needs = answer["fleet_at_load"][load]["usd_per_hour"] or "none found"
        rows.append({**times, "case": label, "needs": needs})
    for name, times in answer["after_loss"].items():
        rows.append({**times, "case": f"without {_name_one(name)}", "needs": ""})
    columns = [
        text_column("this fleet with", "case"),
        *_wait_columns(),
        Column("within both", "good_share", lambda share: percent(share, 3)),
        Column("targets", "met", lambda met: "met" if met else "missed"),
        *([Column("probability", "probability", likelihood)] if sure else []),
        Column(
            "USD/h it needs", "needs", lambda paid: paid if isinstance(paid, str) else usd(paid)
        ),
    ]
    asked = f"{100 * answer['certainty']['asked']:g} %"
    met = f"met: with a probability of at least {asked}; times: on this trace, as predicted"
    return Table(
        columns, rows, note="; ".join(filter(None, [met if sure else "", _needed(answer)]))
    )


def _needed(answer: Row) -> str:
    """What else a fleet for another load must do, where something was asked."""
    more, lost = answer["headroom"], answer["failures"]
    asked = [f"with {percent(more)} more load"] if more else []
    lost = f"{lost} replicas" if lost > 1 else lost and "replica"
    asked += [f"after the loss of any {lost}"] if lost else []
    return f"USD/h it needs, with the targets also met {' and '.join(asked)}" if asked else ""


def _list_cases(answer: Row) -> list[Row]:
    """Other fleets: of other GPUs, for other loads, and without a limit."""
    return [*answer["alternatives"], *answer["fleet_at_load"].values(), *answer["limits"]]


def _dearer_cases(answer: Row) -> list[Row]:
    """The other fleets that differ from this one, without those for a part of the load."""
    told = {(_name_fleet(answer), answer["usd_per_hour"])}
    rows = []
    parts = [case for load, case in answer["fleet_at_load"].items() if float(load) < 1]
    for case in _list_cases(answer):
        if case in parts:
            continue
        same = case["fleet"], case["usd_per_hour"]
        if case["fleet"] is None or same not in told:
            rows.append(case)
        told.add(same)
    return rows


def _describe_robustness(answer: Row) -> list[str]:
    """Say at which loads, and after which losses, this fleet still meets the targets."""
    loads = answer["at_load"].items()
    losses = {f"if {_name_one(name)} fails": x for name, x in answer["after_loss"].items()}
    cases = {f"at {load} times": x for load, x in loads} | losses
    met = [load for load, x in loads if x["met"] and float(load) >= 1]  # less is no news
    kept = [f"at {join_words(met)} times"] if met else []
    kept += [name for name, x in losses.items() if x["met"]]
    missed = {name: x for name, x in cases.items() if not x["met"]}
    whole = "Without headroom or losses besides, the" if _needed(answer) else "The"
    told = [f"{whole} fleet still meets the targets {join_words(kept)}."] if kept else []
    likely = {n: p for n, x in missed.items() if (p := x["probability"]) is not None}
    if likely:
        each = [f"{likelihood(p)} {name}" for name, p in likely.items()]
        besides = "Without headroom or losses besides: p" if _needed(answer) and not kept else "P"
        told.append(f"{besides}robability of meeting the targets: {', '.join(each)}.")
    elif missed:
        misses = []
        for name, x in missed.items():
            waits = f" (TTFT {_wait_of(x, 'ttft_s')}, TPOT {_wait_of(x, 'tpot_s')})"
            misses.append(f"{name}{'' if x['within'] else waits}")
        told.append(
            f"{'It' if kept else whole + ' fleet'} misses the targets {join_words(misses)}."
        )
    return [" ".join(told).replace(" times", " times the load", 1)] if told else []


def _wait_of(times: Row, name: str) -> str:
    """Write the time that the asked share of requests is within; a dash where none has one."""
    value = times[name]["at_target"]
    return "-" if value is None and not times["refused"] else _format_wait(value)


def _shorten(name: str) -> str:
    """Leave out of fleets and replicas that their KV cache is full, and how drafts are made."""
    return DRAFTING.sub(r"\1 with \2 drafts", FULL.sub("", name))


def _name_one(name: str) -> str:
    """A single replica, as one that is lost."""
    return f"one{count_replicas(1, _shorten(name))[1:].removeprefix(' x')}"


def _describe_break_even(answer: Row) -> list[str]:
    """Say at which price another GPU would be chosen."""
    said = [
        f"{p['gpu']} at {usd(p['as_cheap_at'])} (now {usd(p['usd_per_gpu_hour'])})"
        for p in answer["prices"]
        if p["as_cheap_at"] < p["usd_per_gpu_hour"] * (1 - 1e-9)
    ]
    return [f"Break-even prices per GPU and hour: {'; '.join(said)}."] if said else []


def _fleets_table(rows: list[Row]) -> Table:
    """Other fleets and how much dearer they are.

    A plainer one of the same price was passed over as it carries larger loads less surely.
    """

    def name(row: Row) -> str:
        plainer = row["name"] in (NO_MEMORY, FULL_KV) and round(row.get("dearer", 1.0), 6) == 0
        return _shorten(row["fleet"] or row["reason"]) + (", carries less" if plainer else "")

    columns = [
        text_column("instead", "name"),
        text_column("fleet", name),
        Column("USD/h", "usd_per_hour", usd),
        Column("cost", "dearer", lambda x: "" if x is None else f"{round(100 * x) + 0:+d} %"),
    ]
    return Table(columns, rows)


def _class_table(answer: Row) -> Table:
    """Who serves which requests."""

    def served(row: Row) -> str:
        return "; ".join(f"{100 * part:.0f} % {name}" for name, part in row["served_by"].items())

    columns = [
        text_column("served by", served),
        Column("prompt", "prompt", format_number),
        Column("generated", "generate", format_number),
        Column("requests/s", "rate_per_s", lambda rate: format_number(rate, 3)),
        Column("prefix seen before", "reuse", percent),
    ]
    return Table(columns, answer["classes"])


def _considered_table(answer: Row) -> Table:
    """Every configuration that was measured, the cheapest for the trace first."""
    columns = [
        text_column("replica", "name"),
        Column("USD/h each", "usd_per_hour", usd),
        Column("KV tokens", "kv_cache_tokens", integer),
        Column("replicas kept busy by the trace", "replicas_alone", lambda n: format_number(n, 3)),
        Column("USD/h for them", "usd_per_hour_alone", usd),
    ]
    rows = sorted(
        answer["considered"],
        key=lambda c: (c["usd_per_hour_alone"] is None, c["usd_per_hour_alone"]),
    )
    return Table(columns, rows)


def _schedule_tables(answer: Row) -> list[Table]:
    """What runs when, in as few rows as there are changes; none if all replicas always run."""
    if answer["schedule"] is None:
        return []
    names = [r["name"] for r in answer["fleet"]]
    rows: list[Row] = []
    begin = 0.0
    for window in answer["schedule"]:
        counts = {name: window["replicas"].get(name, 0) for name in names}
        if rows and rows[-1]["counts"] == counts:
            begin = rows.pop()["begin"]  # what ran before runs longer
        rows.append({"begin": begin, "end": window["until_h"], "counts": counts})
        begin = window["until_h"]

    def count(name: str) -> Column:
        return Column(_shorten(name), lambda row: row["counts"][name])

    if len(rows) == 1:
        return []
    when = text_column("from", lambda row: f"{_clock(row['begin'])} to {_clock(row['end'])}")
    return [Table([when, *map(count, names)], rows, note=SCHEDULE)]


def _clock(hours: float) -> str:
    """A time of the trace, as 0:29:10."""
    seconds = round(3600 * hours)
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _describe_classes(answer: Row) -> list[str]:
    """Say how each class of prompts is served."""
    found = []
    p = f"p{answer['planned_for']['percentile']:g}"
    for row in answer["class_targets"]:
        goal = row["targets"]
        times = " and ".join(
            f"{name} {p} {_format_wait(row[key])}"
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


def _format_wait(value: float | None) -> str:
    """Write a time that requests wait."""
    return seconds(value) if value is not None and np.isfinite(value) else "never"


SAMPLE_POINTS = 400  # of a curve


def draw_fleet(row: Row, answer: CapacityAnswer) -> list[Chart]:
    """Draw the charts of ``kvsim capacity``.

    Parameters
    ----------
    row
        A row with the fields of ``kvsim capacity --json``.
    answer
        The fleet that was found.
    """
    return [
        _draw_demand("Demand over the trace", answer),
        _draw_costs(row),
        _draw_waits("Time to first token", answer, "ttft"),
        _draw_waits("Time per token", answer, "tpot"),
        _draw_sensitivity(row, 100 * answer.targets.share),
    ]


def _draw_demand(title: str, answer: CapacityAnswer) -> Chart:
    """Requests per second by class, and with a schedule the replicas that run."""
    traffic = answer.question.traffic
    rates = traffic.rate
    start = np.concatenate([[0.0], np.cumsum(traffic.hours)])[:-1]
    if len(start) == 1:
        return draw_arrivals(title, traffic.requests.arrival)
    across, up = "hours from the first request", "requests per second"
    chart = Chart(title, across, up, 360, barmode="stack")
    for c in range(traffic.classes):
        turn, place = divmod(c, len(PALETTE))
        look = {"color": PALETTE[place], "opacity": 1 - 0.45 * turn}
        name = f"{traffic.prompt[c]:.0f} + {traffic.generate[c]:.0f} tokens"
        width, rate = traffic.hours, rates[:, c]
        chart.bars(name, start, rate, look, orientation="v", width=width, offset=0)
    if answer.question.start_up is not None:
        step = {"shape": "hv", "color": GREY}
        chart.line("replicas", start, answer.fleet.running.sum(axis=1), yaxis="y2", line=step)
        every = -(-int(answer.fleet.replicas.sum()) // 5)
        chart.second_axis("replicas", tickmode="linear", tick0=0, dtick=every)
    return chart


def _draw_costs(row: Row) -> Chart:
    rows = [{"name": "this fleet", "usd_per_hour": row["usd_per_hour"], "fleet": ""}]
    rows += [a for a in row["alternatives"] if a["usd_per_hour"] is not None]
    names, paid = [a["name"] for a in rows], [a["usd_per_hour"] for a in rows]
    title = "Cost of the fleet, of alternatives, and of replicas that are always busy"
    chart = Chart(title, "USD per hour", height=80 + 36 * len(rows), yaxis=DOWNWARDS)
    look = {"color": [PALETTE[2], *[PALETTE[5]] * (len(rows) - 1)]}
    told = {"text": [f"{usd:.2f}" for usd in paid], "customdata": [a["fleet"] for a in rows]}
    hover = "%{y}: %{x:.2f} USD/h<br>%{customdata}<extra></extra>"
    chart.bars(None, paid, names, look, hovertemplate=hover, showlegend=False, **told)
    least = [row["search"]["bound_usd_per_hour"]] * len(rows)
    bound = {"dash": "dot", "color": PALETTE[1], "width": 3}
    return chart.line("always busy", least, names, line=bound)


def _draw_waits(title: str, answer: CapacityAnswer, name: str) -> Chart:
    """Share of requests within a time, of the whole trace and of each kind of replica."""
    played, times = answer.played, getattr(answer.played, name)
    parts = {"all requests": times}
    if len(answer.used) > 1:
        parts |= {answer.fleet.kinds[j].name: times[played.kind == j] for j in answer.used}
    known = {label: values[np.isfinite(values)] for label, values in parts.items()}
    share = np.linspace(0, 1, SAMPLE_POINTS)
    quantiles = {label: np.quantile(x, share) for label, x in known.items() if x.size}
    return draw_distribution(title, quantiles, target=getattr(answer.targets, name))


def _draw_sensitivity(row: Row, percentile: float) -> Chart:
    """Share of requests within both targets at other loads, and what such a load costs."""
    loads = {1.0: row["simulated"]} | {float(k): v for k, v in row["at_load"].items()}
    costs = {1.0: row["usd_per_hour"]}
    costs |= {float(k): v["usd_per_hour"] for k, v in row["fleet_at_load"].items()}
    some, paid = sorted(loads), sorted(k for k, usd in costs.items() if usd)
    met, load = "requests within both targets", "load, in times of the trace's"
    title, up = f"Other loads: {met}, and cost", f"% of {met}"
    chart = Chart(title, load, up, yaxis={"range": [0, 101]})
    kept = [100 * loads[x]["good_share"] for x in some]
    chart.line("within both targets", some, kept, PALETTE[0], mode="lines+markers")
    name, line = "USD/h of the cheapest fleet", {"color": PALETTE[1], "dash": "dash"}
    dollars = [costs[x] for x in paid]
    chart.line(name, paid, dollars, mode="lines+markers", yaxis="y2", line=line)
    dotted, place = {"dash": "dot", "color": RED}, "bottom left"
    told = f"target {percentile:g} %"
    chart.figure.add_hline(percentile, line=dotted, annotation_text=told, annotation_position=place)
    return chart.second_axis("USD/h", tickmode="auto")


SHORT_TRACE = 60.0  # of a trace, below which it says little of queues [s]


def make_fields(answer: CapacityAnswer, trace: str, said: str) -> Row:
    """Collect the fields of the JSON output; times are in seconds, prices in USD per hour.

    Parameters
    ----------
    answer
        The fleet that was found.
    trace
        Name of the trace.
    said
        The verdict.
    """
    q, fleet = answer.question, answer.fleet
    mean, deployment = q.traffic.mean, q.rentable[0].deployment
    tokens = sum(g.tokens for g in answer.played.groups)
    power = number(fleet.total("power"))
    return {
        "model": deployment.model.name,
        "trace": trace,
        "requests": len(q.traffic.requests),
        "refused_by": {"context": q.left_out, "cache": answer.played.refused},
        "trace_s": q.traffic.requests.duration,
        "rate_per_s": float(mean.sum()) if q.traffic.requests.duration else None,
        "headroom": q.limits.headroom,
        "failures": q.limits.failures,
        "targets": _target_row(q.targets),
        "met": not answer.shortfall,
        "shortfall": answer.shortfall,
        "planned_for": {**_target_row(answer.targets), "load": answer.load},
        "answer": said,
        "fleet": [_replicas(answer, j) for j in answer.used],
        "usd_per_hour": fleet.cost,
        "usd_per_million_tokens": price_per_million(answer),
        "gpus": int(fleet.total("gpus")),
        "rated_power_w": power,
        "joules_per_token": power * answer.played.duration / tokens if tokens and power else None,
        "schedule": _schedule(answer),
        "simulated": _times_row(answer.played, answer.targets),
        "class_targets": _class_rows(answer.played, answer.targets),
        "at_load": {f"{load:g}": _case(x, answer.targets) for load, x in answer.at_load.items()},
        "after_loss": {
            fleet.kinds[j].name: _case(x, answer.targets) for j, x in answer.after_loss.items()
        },
        "alternatives": [_alternative(a, fleet.cost) for a in answer.alternatives],
        "limits": [_alternative(a, fleet.cost) for a in answer.limits],
        "fleet_at_load": {
            f"{load:g}": _alternative(a, fleet.cost) for load, a in answer.at_other_loads.items()
        },
        "prices": _prices(answer),
        "sellers": _sellers(answer),
        "assumed": list_assumptions(answer),
        "certainty": _certainty(answer),
        "classes": _classes(answer),
        "considered": [
            {
                "name": kind.choices[0].name,
                "usd_per_hour": kind.rent,
                "replicas_alone": number(alone),
                "usd_per_hour_alone": number(alone * kind.rent),
                "kv_cache_tokens": _kv_tokens(kind.choices[0]),
            }
            for kind, alone in zip(answer.kinds, answer.alone, strict=True)
        ],
        "search": {"bound_usd_per_hour": answer.bound, "plays": answer.plays},
        "basis": basis(deployment),
    }


def _replicas(answer: CapacityAnswer, j: int) -> Row:
    """One kind of replica of the fleet."""
    fleet, played = answer.fleet, answer.played
    x = fleet.kinds[j]
    d, groups = x.costs.deployment, [g for g in played.groups if g.kind == j]
    found = [(g.hits, g.requests) for g in groups]
    mine = played.kind == j
    asked = len(answer.question.traffic.requests)
    return {
        "name": x.name,
        "replicas": int(fleet.replicas[j]),
        "reserved": int(fleet.reserved[j]),
        "gpu": x.gpu,
        **ranks(d),
        "weights": d.weights,
        "technique": x.technique,
        "max_seqs": x.costs.rules.max_seqs,
        "max_tokens": x.costs.rules.max_tokens,
        "route": x.route,
        "max_model_len": x.costs.longest,
        "gpu_memory_utilization": answer.question.utilisation,
        "kv_cache_tokens": _kv_tokens(x),
        "host_cache_bytes": x.costs.rules.host_cache,
        "nvme_cache_bytes": x.costs.rules.nvme_cache,
        "engines": {"prefill": x.apart.prefill, "decode": x.apart.decode} if x.apart else None,
        "usd_per_hour": _paid(answer, j),
        "share_of_requests": float(mine.sum() / asked),
        "busy_share": _mean([(g.busy, g.count) for g in groups]),
        "most_running": max((g.most_running for g in groups), default=0),
        "prefix_hit_share": _mean([(sum(hits.values()), n) for hits, n in found]),
        "prefix_hits": {name: _mean([(hits[name], n) for hits, n in found]) for name in MEMORIES},
        "simulated": _times_row(played, answer.targets, mine),
    }


def _paid(answer: CapacityAnswer, j: int) -> float:
    """What the replicas of one kind cost; with a schedule the mean of the day. [USD/h]"""
    q, fleet = answer.question, answer.fleet
    if q.start_up is None:
        return float(fleet.replicas[j] * fleet.kinds[j].rent)
    mine = np.arange(fleet.running.shape[1]) == j
    running, reserved = fleet.running * mine, fleet.reserved * mine
    return scheduled_cost(fleet.kinds, q.traffic.hours, q.start_up, running, reserved)


def _kv_tokens(configuration: Configuration) -> int:
    """Count the tokens that a replica's KV cache holds, as engines print on start."""
    costs = configuration.costs
    return int(costs.capacity / costs.room.block_bytes) * costs.rules.block_tokens


def _mean(weighted: list[tuple[float, int]]) -> float:
    total = sum(weight for _, weight in weighted)
    return sum(value * weight for value, weight in weighted) / total if total else 0.0


def _schedule(answer: CapacityAnswer) -> list[Row] | None:
    """Replicas by window; None if they always run."""
    if answer.question.start_up is None:
        return None
    hours = np.cumsum(answer.question.traffic.hours)
    known = [x.name for x in answer.fleet.kinds]
    return [
        {
            "until_h": float(hours[w]),
            "replicas": {known[j]: int(n) for j, n in enumerate(running) if n},
        }
        for w, running in enumerate(answer.fleet.running)
    ]


def _alternative(a: OtherFleet, cost: float) -> Row:
    if a.fleet is None:
        return {"name": a.label, "fleet": None, "usd_per_hour": None, "reason": NONE}
    return {
        "name": a.label,
        "fleet": a.fleet.name,
        "usd_per_hour": a.fleet.cost,
        "dearer": a.fleet.cost / cost - 1,
    }


def list_assumptions(answer: CapacityAnswer) -> list[str]:
    """List what the result assumes about contexts, host memory, drives and networks.

    Parameters
    ----------
    answer
        The fleet that was found.

    Returns
    -------
    list of str
        Sentences.
    """
    extras, said = answer.question.extras, []
    some = [answer.fleet.kinds[j] for j in answer.used]
    rules = [x.costs.rules for x in some if x.costs.rules.tiers]
    model, most = some[0].costs.deployment.model, some[0].costs.rules.max_model_len
    lasts = answer.question.traffic.requests.duration
    if 0 < lasts < SHORT_TRACE:
        said.append(
            f"The trace lasts only {seconds(lasts)}: longer queues are not seen, so the same "
            "rate over a longer time may need more replicas."
        )
    left_out = answer.question.left_out
    if left_out:
        total = left_out + len(answer.question.traffic.requests)
        clause, caution = describe_left_out(left_out, total, model, most)
        said.append(caution or f"Requests that the engine would refuse: {clause.lstrip(', ')}.")
    said += [f"Left out: {reason.partition(';')[0]}." for reason in answer.left_out.values()]
    for name, option in find_unadmitted(answer.question).items():
        said.append(f"{name}, named with --only, was not considered: {option} would admit it.")
    if any(r.host_cache for r in rules):
        said.append(
            f"Assumed: {extras.host / GIB:.0f} GiB of host memory for prefix blocks per GPU "
            "(--host-cache), free of charge."
        )
    of_hosts = evidence.list_assumptions_of_techniques
    told = [
        line
        for c in (x.costs for x in some)
        for line in of_hosts(c.deployment, [c.technique], bool(c.rules.host_cache))
    ]
    said += [f"Assumed: {line}." for line in dict.fromkeys(told)]
    for one in [r for r in rules if r.nvme_cache][:1]:
        said.append(
            f"Assumed: one NVMe drive per replica, {one.nvme_read / 1e9:g} GB/s read and "
            f"{one.nvme_write / 1e9:g} written (--nvme-read, --nvme-write), free of charge."
        )
    if any(x.apart for x in some):
        said.append(
            f"Assumed: KV caches move at {extras.nic / 1e9:g} GB/s per engine (--nic), at no load "
            "on the receiver."
        )
    return said


def _sellers(answer: CapacityAnswer) -> Row:
    """Whose prices these are, and the cheapest fleet at those of every other seller."""
    asked = {
        x.gpu: {"usd_per_gpu_hour": number(x.price / x.deployment.gpus), "source": x.source}
        for x in answer.question.rentable
    }
    return {
        "prices": asked,
        "others": [
            {"seller": seller, "name": fleet.name, "usd_per_hour": fleet.cost}
            for seller, fleet in answer.at_sellers.items()
        ],
    }


def _prices(answer: CapacityAnswer) -> list[Row]:
    """For every GPU alone, the price of one GPU at which it would be as cheap as the fleet.

    None with a schedule, as GPUs are not paid all the time then.
    """
    found: list[Row] = []
    used = [(int(answer.fleet.replicas[j]), answer.fleet.kinds[j]) for j in answer.used]
    for a in answer.alternatives if answer.question.start_up is None else []:
        gpu, alone = a.label.removesuffix(" alone"), a.fleet
        if alone is None or gpu == a.label:
            continue
        rest = sum(n * x.rent for n, x in used if x.gpu != gpu)
        more = alone.total("gpus") - sum(n * x.gpus for n, x in used if x.gpu == gpu)
        if rest > 0 and more > 0:
            now = float(alone.cost / alone.total("gpus"))
            found.append({"gpu": gpu, "usd_per_gpu_hour": now, "as_cheap_at": rest / more})
    return found


def _certainty(answer: CapacityAnswer) -> Row:
    sure, targets = answer.sure, answer.targets.classes
    asked = [name for name in ("ttft", "tpot") if any(isfinite(getattr(x, name)) for x in targets)]
    return {
        "asked": answer.question.sure,
        "spread": sure.spread.sigma,
        "source": sure.spread.source,
        "days": sure.days,
        "ttft_met": sure.likely["ttft"] if "ttft" in asked else None,
        "tpot_met": sure.likely["tpot"] if "tpot" in asked else None,
        "both_met": sure.likely["both"],
        "both_between": list(sure.interval),
    }


def _classes(answer: CapacityAnswer) -> list[Row]:
    traffic, share = answer.question.traffic, answer.fleet.share.mean(axis=0)
    known = [x.name for x in answer.fleet.kinds]
    return [
        {
            "prompt": float(traffic.prompt[c]),
            "generate": float(traffic.generate[c]),
            "reuse": float(traffic.reuse[c]),
            "rate_per_s": float(traffic.mean[c]),
            "served_by": {known[j]: float(s) for j, s in enumerate(share[c]) if s > 1e-9},
        }
        for c in range(traffic.classes)
    ]


def _target_row(targets: FleetTargets) -> Row:
    """Make the row of the targets of all requests."""
    return {
        "ttft_s": number(targets.ttft),
        "tpot_s": number(targets.tpot),
        "percentile": 100 * targets.share,
    }


def _case(case: WhatIf, targets: FleetTargets) -> Row:
    """Make the row of the fleet at another load; met: as surely as asked."""
    times = _times_row(case.played, targets)
    return {**times, "within": times["met"], "met": case.met, "probability": case.likely}


def _times_row(played: Played, targets: FleetTargets, rows: NDArray[np.bool_] | None = None) -> Row:
    """Make the row of what requests waited, and whether that is within the targets."""
    some = slice(None) if rows is None else rows
    reached = played.reached(targets.share, rows)
    ttft, tpot = played.ttft[some], played.tpot[some]

    def within(values: Array, value: float) -> float | None:
        return None if np.isnan(values).all() else number(value)

    return {
        "met": played.meets(targets, rows),
        "ttft_s": {**spread(ttft), "at_target": within(ttft, reached.ttft)},
        "tpot_s": {**spread(tpot), "at_target": within(tpot, reached.tpot)},
        "latency_s": spread(played.latency[some]),
        "good_share": played.good_share(targets, rows),
        "refused": int(np.isinf(ttft).sum()),
    }


def _class_rows(played: Played, targets: FleetTargets) -> list[Row]:
    """Make a row for each class of prompts with targets of its own."""
    if not targets.longer:
        return []
    found, bounds = [], [x.above for x in targets.classes]
    longest = dict(pairwise(bounds))
    for rows, target in played.by_class(targets):
        reached = played.reached(targets.share, rows)
        found.append(
            {
                "prompt_above": target.above,
                "prompt_up_to": longest.get(target.above),
                "requests": int(rows.sum()),
                "targets": {"ttft_s": number(target.ttft), "tpot_s": number(target.tpot)},
                "ttft_s": number(reached.ttft),
                "tpot_s": number(reached.tpot),
                "met": played.meets(targets, rows),
            }
        )
    return found


def price_per_million(answer: CapacityAnswer) -> float | None:
    """Compute the price of a million generated tokens.

    Parameters
    ----------
    answer
        The fleet that was found.

    Returns
    -------
    float or None
        The price; None if nothing was generated. [USD]
    """
    tokens = sum(g.tokens for g in answer.played.groups)
    hours = answer.played.duration / 3600
    return answer.fleet.cost * hours / tokens * 1e6 if tokens else None
