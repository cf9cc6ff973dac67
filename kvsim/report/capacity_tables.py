"""What the terminal and the page of ``kvsim capacity`` both show: tables and sentences."""

import numpy as np

from kvsim.evidence.ledger import share_below
from kvsim.report.json import Row
from kvsim.report.table import Table, cells_table
from kvsim.report.units import format_number, integer, likelihood, percent, rounded, seconds, usd

FINEST = 0.005  # of a slowdown, as it is printed
LIKELIHOOD_STEP = 0.02  # of a likelihood: twice the part of the spread that one slowdown stands for
SCHEDULE = (
    "from: since the first request of the trace, in hours, minutes and seconds; below the kinds of "
    "replica, how many of each run"
)


def describe_shortfall(answer: Row) -> list[str]:
    """Say why the answer is not what was asked for, if it is not.

    Parameters
    ----------
    answer
        Fields of the answer.

    Returns
    -------
    list of str
        One sentence; empty where the targets are met.
    """
    return [] if answer["met"] else [f"Not as asked: {answer['shortfall']}."]


def name_fleet(answer: Row) -> str:
    """Name the fleet as other fleets are named.

    Parameters
    ----------
    answer
        Fields of the answer.

    Returns
    -------
    str
        Counts and kinds of replica.
    """
    return " + ".join(f"{r['replicas']} x {r['name']}" for r in answer["fleet"])


def describe_question(answer: Row) -> str:
    """State the targets and the traffic that were asked for, in one sentence.

    Parameters
    ----------
    answer
        Fields of the answer.

    Returns
    -------
    str
        Model, trace, rate and targets.
    """
    goal = answer["planned_for"]
    some = [
        f"{name} p{goal['percentile']:g} at most {format_wait(goal[key])}"
        for name, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"))
        if goal[key]
    ]
    if answer["class_targets"]:
        some.append("longer prompts have targets of their own")
    return (
        f"{answer['model']}, {answer['trace']}: {_requests(answer)}; "
        f"{', '.join(some) or 'no targets'}."
    )


def _requests(answer: Row) -> str:
    """How many, and in what time."""
    count = "1 request" if answer["requests"] == 1 else f"{answer['requests']:,} requests"
    if answer["rate_per_s"] is None:
        return count if answer["requests"] == 1 else f"{count} at once"
    rate = rounded(answer["rate_per_s"], 3)
    return f"{count} in {seconds(answer['trace_s'])}, {rate} per second"


def describe_certainty(answer: Row) -> str:
    """State the likelihood of each target, and where it comes from.

    Parameters
    ----------
    answer
        Fields of the answer.

    Returns
    -------
    str
        Sentences; empty without targets.
    """
    sure = answer["certainty"]
    upto = {name.upper(): x for name, x in sure["slowdown_met_up_to"].items() if x is not None}
    if not upto:
        return ""
    each = [f"{name} with {likelihood(sure[f'{name.lower()}_met'])}" for name in upto]
    said = f"If the trace comes again, {', '.join(each)}".replace(" with", " is met with", 1)
    both = "both" if len(upto) > 1 else next(iter(upto))
    return f"{said} ({sure['source']}). {_slowdowns(sure, min(upto.values()), both)}"


def _slowdowns(sure: Row, lowest: float, both: str) -> str:
    """Up to which slowdown targets are met, and what is to be said of more."""
    longer = f"everything takes {rounded(lowest, 3)} times as long as predicted"
    if sure["both_met"] > 1 - LIKELIHOOD_STEP / 4:
        return f"The fleet meets {both} even when {longer}, the most that was tried."
    if lowest < 1 + FINEST:
        return (
            f"The fleet is at its limit: it meets {both} with times as predicted, and whether it "
            "does with others depends on which bursts meet."
        )
    some = sure["both_met"] - share_below(lowest, sure["spread"]) >= LIKELIHOOD_STEP
    more = ", and by chance at some slowdowns beyond: it depends on which bursts meet"
    return f"The fleet meets {both} until {longer}{more if some else ''}."


def describe_power(answer: Row) -> str:
    """State what the GPUs draw at most by their data sheets.

    Parameters
    ----------
    answer
        Fields of the answer.

    Returns
    -------
    str
        One sentence, without hosts and cooling; empty where no rating is known.
    """
    rated = answer["rated_power_w"]
    if rated is None:
        return ""
    return (
        f"Its {_gpus(answer['gpus'])} rated {rounded(rated / 1e3, 3)} kW in all, without hosts "
        f"and cooling."
    )


def _gpus(count: int) -> str:
    return "GPU is" if count == 1 else f"{count} GPUs are"


def describe_reserved(answer: Row) -> str:
    """List the replicas that are paid always, at the lower price.

    Parameters
    ----------
    answer
        Fields of the answer.

    Returns
    -------
    str
        One sentence; empty if none are reserved.
    """
    some = [f"{r['reserved']} x {r['name']}" for r in answer["fleet"] if r["reserved"]]
    return f"Reserved, and paid whether they run or not: {', '.join(some)}." if some else ""


def describe_search(answer: Row) -> str:
    """Say what no fleet undercuts, and how the answer was found.

    Parameters
    ----------
    answer
        Fields of the answer.

    Returns
    -------
    str
        Two sentences.
    """
    solver = answer["solver"]
    return (
        f"If parts of replicas could be rented, they would cost "
        f"{usd(solver['relaxation_usd_per_hour'])} per hour; whole ones cost "
        f"{_format_extra_cost(solver['gap_to_relaxation'])}. The search simulated the trace "
        f"{_times(solver['simulations'])}, for {solver['proposals']} proposed by the "
        f"programme and what is near{_count_windows(solver['simulated_windows'])}."
    )


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _format_extra_cost(share: float) -> str:
    """How much dearer something is: in percent, or in times from twice as dear."""
    return f"{percent(share)} more" if share < 1 else f"{rounded(1 + share, 2)} times that"


def fleet_table(answer: Row) -> Table:
    """Make the table of the kinds of replica in the fleet.

    Parameters
    ----------
    answer
        Fields of the answer.

    Returns
    -------
    Table
        A line per kind, with its price, share of requests and waits.
    """
    rows = [
        (
            r["name"], str(r["replicas"]), usd(r["usd_per_hour"]),
            percent(r["share_of_requests"]), str(r["max_seqs"]), str(r["most_running"]),
            integer(r["kv_cache_tokens"]), _target_wait(r["simulated"], "ttft_s"),
            _target_wait(r["simulated"], "tpot_s"),
        )
        for r in answer["fleet"]
    ]  # fmt: skip
    p = f"p{answer['planned_for']['percentile']:g}"
    heads = ("kind of replica", "replicas", "USD/h", "requests", "max-num-seqs", "most running",
             "KV tokens", f"TTFT {p}", f"TPOT {p}")  # fmt: skip
    note = LIMITED + (APART if any(r["engines"] for r in answer["fleet"]) else "")
    return cells_table(heads, rows, ranks="000012300", note=note)


LIMITED = (
    "kind of replica: its GPU, x2 where two of them share a copy of the model, and the technique, "
    "where full is the whole KV cache on the GPU; max-num-seqs: where the fleet keeps the targets "
    "it never runs more at once, so a higher limit would change nothing"
)
APART = "; 1 prefill + 1 decode where engines that read prompts hand caches to others that decode"
MEMORY_NAMES = {"gpu": "GPU memory", "host": "host memory", "nvme": "NVMe", "remote": "the store"}


def describe_prefixes(answer: Row) -> list[str]:
    """Say where prompts found their prefixes, if anywhere.

    Parameters
    ----------
    answer
        Fields of the answer.

    Returns
    -------
    list of str
        A sentence for each kind of replica with hits.
    """
    said = []
    for r in answer["fleet"]:
        found = {MEMORY_NAMES[k]: v for k, v in r["prefix_hits"].items() if v > 0}
        if found:
            parts = ", ".join(f"{percent(v)} in {k}" for k, v in found.items())
            said.append(f"Prompt tokens found on {r['name']}: {parts}.")
    return said


def load_table(answer: Row) -> Table:
    """Make the table of the fleet at other loads and after losses.

    Parameters
    ----------
    answer
        Fields of the answer.

    Returns
    -------
    Table
        A line per load or loss, with what a fleet for that load costs.
    """
    part = answer["planned_for"]["load"]
    name = "the trace" if part == 1 else f"{100 * part:.0f} % of the trace"
    rows = [(name, answer["simulated"], answer["usd_per_hour"])]
    for load, times in answer["at_load"].items():
        needs = answer["fleet_at_load"][load]["usd_per_hour"]
        rows.append(
            (f"{load} times {'its' if part == 1 else 'that'} load", times, needs or "none found")
        )
    rows += [(f"without one {name}", times, "") for name, times in answer["after_loss"].items()]
    cells = [
        (
            label, _target_wait(t, "ttft_s"), _target_wait(t, "tpot_s"),
            percent(t["good_share"], 3),
            "met" if t["met"] else "missed", needs if isinstance(needs, str) else usd(needs),
        )
        for label, t, needs in rows
    ]  # fmt: skip
    heads = ("this fleet with", "TTFT", "TPOT", "within both", "targets", "USD/h it needs")
    return cells_table(heads, cells, note=_needed(answer))


def _needed(answer: Row) -> str:
    """What else a fleet for another load must do, where something was asked."""
    more, lost = answer["headroom"], answer["failures"]
    asked = [f"with {percent(more)} more load"] if more else []
    asked += (
        [f"after the loss of any {f'{lost} replicas' if lost > 1 else 'replica'}"] if lost else []
    )
    if not asked:
        return ""
    return f"USD/h it needs: the targets are met {' and '.join(asked)} too, as was asked"


def limit_table(answer: Row) -> Table:
    """Make the table of what every limit and target costs.

    Parameters
    ----------
    answer
        Fields of the answer.

    Returns
    -------
    Table
        A line per limit.
    """
    return _fleets_table(answer["limits"], "what limits cost")


def other_load_table(answer: Row) -> Table:
    """Make the table of the fleets that other loads need.

    Parameters
    ----------
    answer
        Fields of the answer.

    Returns
    -------
    Table
        A line per load.
    """
    rows = list(answer["fleet_at_load"].values())
    if answer["planned_for"]["load"] != 1:
        rows = [{**x, "name": x["name"].replace("the load", "that load")} for x in rows]
    return _fleets_table(rows, "a fleet for")


def describe_prices(answer: Row) -> list[str]:
    """Say at which price another GPU would be chosen.

    Parameters
    ----------
    answer
        Fields of the answer.

    Returns
    -------
    list of str
        One sentence; empty where no lower price changes the fleet.
    """
    said = [
        f"{p['gpu']} below {usd(p['as_cheap_at'])} (now {usd(p['usd_per_gpu_hour'])})"
        for p in answer["prices"]
        if p["as_cheap_at"] < p["usd_per_gpu_hour"] * (1 - 1e-9)
    ]
    return (
        [f"Prices per GPU and hour that would change the fleet: {'; '.join(said)}."] if said else []
    )


def alternative_table(answer: Row) -> Table:
    """Make the table of other fleets for the same question.

    Parameters
    ----------
    answer
        Fields of the answer.

    Returns
    -------
    Table
        A line per fleet, with how much dearer it is.
    """
    return _fleets_table(answer["alternatives"], "for comparison")


def _fleets_table(rows: list[Row], head: str) -> Table:
    """Other fleets and how much dearer they are."""
    cells = [
        (
            a["name"], a["fleet"] or a["reason"], usd(a["usd_per_hour"]),
            "" if a["usd_per_hour"] is None else f"{round(100 * a['dearer']) + 0:+d} %",
        )
        for a in rows
    ]  # fmt: skip
    return cells_table((head, "fleet", "USD/h", "dearer"), cells, text=2)


def class_table(answer: Row) -> Table:
    """Make the table of who serves which requests.

    Parameters
    ----------
    answer
        Fields of the answer.

    Returns
    -------
    Table
        A line per class of requests.
    """
    cells = [
        (
            "; ".join(f"{100 * share:.0f} % {name}" for name, share in c["served_by"].items()),
            format_number(c["prompt"]), format_number(c["generate"]),
            format_number(c["rate_per_s"], 3), percent(c["reuse"]),
        )
        for c in answer["classes"]
    ]  # fmt: skip
    return cells_table(
        ("served by", "prompt", "generated", "requests/s", "prefix seen before"), cells
    )


def considered_table(answer: Row) -> Table:
    """Make the table of every configuration that was measured.

    Parameters
    ----------
    answer
        Fields of the answer.

    Returns
    -------
    Table
        A line per configuration, the cheapest for the trace first.
    """
    some = sorted(
        answer["considered"],
        key=lambda c: (c["usd_per_hour_alone"] is None, c["usd_per_hour_alone"]),
    )
    cells = [
        (
            c["name"], usd(c["usd_per_hour"]), integer(c["kv_cache_tokens"]),
            format_number(c["replicas_alone"], 3), usd(c["usd_per_hour_alone"]),
        )
        for c in some
    ]  # fmt: skip
    heads = (
        "replica",
        "USD/h each",
        "KV tokens",
        "replicas the trace keeps busy",
        "USD/h for them",
    )
    return cells_table(heads, cells)


def _target_wait(times: Row, name: str) -> str:
    return format_wait(times[name]["at_target"])


def schedule_tables(answer: Row) -> list[Table]:
    """Make the table of what runs when, in as few rows as there are changes.

    Parameters
    ----------
    answer
        Fields of the answer.

    Returns
    -------
    list of Table
        One table; none if all replicas always run.
    """
    if answer["schedule"] is None:
        return []
    names = [r["name"] for r in answer["fleet"]]
    rows: list[tuple[float, list[str]]] = []
    for window in answer["schedule"]:
        counts = [str(window["replicas"].get(name, 0)) for name in names]
        if rows and rows[-1][1] == counts:
            rows.pop()  # what ran before runs longer
        rows.append((window["until_h"], counts))
    begins = [0.0, *(until for until, _ in rows)]
    cells = [
        (f"{_clock(begin)} to {_clock(until)}", *counts)
        for begin, (until, counts) in zip(begins, rows, strict=False)
    ]
    return [cells_table(("from", *names), cells, note=SCHEDULE)]


def _count_windows(count: int) -> str:
    """How often a window was simulated alone; empty if never."""
    return f", and {count} times a window of the schedule alone" if count else ""


def _clock(hours: float) -> str:
    """A time of the trace, as 0:29:10."""
    seconds = round(3600 * hours)
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def describe_classes(answer: Row) -> list[str]:
    """Say how each class of prompts is served.

    Parameters
    ----------
    answer
        Fields of the answer.

    Returns
    -------
    list of str
        A sentence for each class with targets of its own.
    """
    found = []
    p = f"p{answer['planned_for']['percentile']:g}"
    for row in answer["class_targets"]:
        goal = row["targets"]
        times = " and ".join(
            f"{name} {p} {format_wait(row[key])}"
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


def format_wait(value: float | None) -> str:
    """Write a time that requests wait.

    Parameters
    ----------
    value
        Time; None or infinity for requests that fit nowhere. [s]

    Returns
    -------
    str
        Time with its unit, or "never".
    """
    return seconds(value) if value is not None and np.isfinite(value) else "never"
