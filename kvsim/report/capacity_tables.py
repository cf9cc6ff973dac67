"""What the terminal and the page of ``kvsim capacity`` both show: tables and sentences."""

import re

import numpy as np

from kvsim.report.json import Row
from kvsim.report.table import Table, cells_table
from kvsim.report.units import format_number, integer, likelihood, percent, rounded, seconds, usd

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
    each = [
        f"{name.upper()} {likelihood(sure[f'{name}_met'])}"
        for name in ("ttft", "tpot")
        if sure[f"{name}_met"] is not None
    ]
    if not each:
        return ""
    return (
        f"Probability of meeting each target: {', '.join(each)} (over {sure['days']} simulated "
        f"days and the error of predicted times). Predicted times: {sure['source']}."
    )


def describe_power(answer: Row) -> str:
    """State what the GPUs draw at most by their data sheets, and what a token takes of it.

    Parameters
    ----------
    answer
        Fields of the answer.

    Returns
    -------
    str
        One sentence, without hosts and cooling; empty where no rating is known.
    """
    rated, each = answer["rated_power_w"], answer["joules_per_token"]
    if rated is None:
        return ""
    tokens = "" if each is None else f", {rounded(each, 3)} J per generated token"
    return (
        f"Rated power of the {_gpus(answer['gpus'])}: {rounded(rated / 1e3, 3)} kW{tokens}, "
        f"without hosts and cooling."
    )


def describe_sellers(answer: Row) -> list[str]:
    """Say whose prices these are, and what other sellers' prices would change.

    Parameters
    ----------
    answer
        Fields of the answer.

    Returns
    -------
    list of str
        One or two sentences.
    """
    found = answer["sellers"]
    listed = [
        f"{gpu} {usd(x['usd_per_gpu_hour'])} ({x['source']})" for gpu, x in found["prices"].items()
    ]
    said = [f"Prices per GPU and hour: {'; '.join(listed)}."]
    others = [f"{x['seller']} {x['name']}, {usd(x['usd_per_hour'])}/h" for x in found["others"]]
    if others:
        said.append(f"The cheapest fleet at other sellers: {'; '.join(others)}.")
    return said


def _gpus(count: int) -> str:
    return "GPU" if count == 1 else f"{count} GPUs"


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
    return f"Reserved (paid whether or not they run): {', '.join(some)}." if some else ""


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
    search = answer["search"]
    return (
        f"Lower bound, with every replica always busy: {usd(search['bound_usd_per_hour'])} per "
        f"hour. {search['plays']:,} fleets were simulated."
    )


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
            shorten(r["name"]), str(r["replicas"]), usd(r["usd_per_hour"]),
            percent(r["share_of_requests"]), str(r["max_seqs"]), integer(r["max_tokens"]),
            str(r["most_running"]),
            integer(r["kv_cache_tokens"]), _target_wait(r["simulated"], "ttft_s"),
            _target_wait(r["simulated"], "tpot_s"),
        )
        for r in answer["fleet"]
    ]  # fmt: skip
    p = f"p{answer['planned_for']['percentile']:g}"
    heads = ("kind of replica", "replicas", "USD/h", "requests", "max-num-seqs", "tokens per pass",
             "most running", "KV tokens", f"TTFT {p}", f"TPOT {p}")  # fmt: skip
    note = DISAGGREGATED_NOTE if any(r["engines"] for r in answer["fleet"]) else ""
    return cells_table(heads, rows, ranks="0000112300", note=note)


FULL_KV = re.compile(r" full(?= \+ |,|;|$)")
DISAGGREGATED_NOTE = (
    "1 prefill + 1 decode: one engine computes prompts and transfers their KV "
    "caches to one that decodes"
)
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
    return f"USD/h it needs: with the targets met {' and '.join(asked)} too, as you asked"


MAX_CASES = 7


def case_table(answer: Row) -> Table:
    """Make the one table of other fleets that a terminal shows: those that cost another price.

    Parameters
    ----------
    answer
        Fields of the answer.

    Returns
    -------
    Table
        A line per other GPU, load or limit.
    """
    cases = [*answer["alternatives"], *answer["fleet_at_load"].values(), *answer["limits"]]
    told = {(name_fleet(answer), answer["usd_per_hour"])}
    rows = []
    for case in cases:
        same = case["fleet"], case["usd_per_hour"]
        if case["fleet"] is None or same not in told:
            rows.append(case)
        told.add(same)
    return _fleets_table(rows[:MAX_CASES], "instead")


def describe_robustness(answer: Row) -> list[str]:
    """Say at which loads, and after which losses, this fleet still meets the targets.

    Parameters
    ----------
    answer
        Fields of the answer.

    Returns
    -------
    list of str
        One sentence; empty where nothing else was simulated.
    """
    cases = {f"{load} times the load": x for load, x in answer["at_load"].items()}
    cases |= {f"without one {shorten(name)}": x for name, x in answer["after_loss"].items()}
    met = [name for name, x in cases.items() if x["met"]]
    missed = [
        f"{name} (TTFT {_target_wait(x, 'ttft_s')}, TPOT {_target_wait(x, 'tpot_s')})"
        for name, x in cases.items()
        if not x["met"]
    ]
    said = [f"also meets the targets at {_join(met)}"] if met else []
    said += [f"misses them at {_join(missed)}"] if missed else []
    text = "; ".join(said).replace("at without", "without")
    return [f"This fleet {text}."] if said else []


def _join(cases: list[str]) -> str:
    """Cases as a list in a sentence."""
    return ", ".join(cases[:-1]) + " and " * (len(cases) > 1) + cases[-1]


def shorten(name: str) -> str:
    """Leave out of fleets and replicas that their KV cache is full.

    Parameters
    ----------
    name
        Kind of replica, or a fleet.
    """
    return FULL_KV.sub("", name)


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
        f"{p['gpu']} at {usd(p['as_cheap_at'])} (now {usd(p['usd_per_gpu_hour'])})"
        for p in answer["prices"]
        if p["as_cheap_at"] < p["usd_per_gpu_hour"] * (1 - 1e-9)
    ]
    return [f"Break-even prices per GPU and hour: {'; '.join(said)}."] if said else []


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
            a["name"],
            shorten(a["fleet"] or a["reason"]),
            usd(a["usd_per_hour"]),
            "" if a["usd_per_hour"] is None else f"{round(100 * a['dearer']) + 0:+d} %",
        )
        for a in rows
    ]
    return cells_table((head, "fleet", "USD/h", "cost"), cells, text=2)


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
            format_number(c["prompt"]),
            format_number(c["generate"]),
            format_number(c["rate_per_s"], 3),
            percent(c["reuse"]),
        )
        for c in answer["classes"]
    ]
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
