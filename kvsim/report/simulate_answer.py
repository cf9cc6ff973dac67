"""The verdict on simulated runs: the technique that serves a trace best, or what an option brings.

Runs of one technique that differ in one option are compared by that option: how much each load
takes, which size of a tier is enough, whether prefixes are loaded or computed again.
"""

from collections.abc import Sequence
from shlex import quote

from kvsim.machines.deployment import Deployment
from kvsim.planner.question import engines_running
from kvsim.quality.evidence import evidence as quality
from kvsim.report import caveats, evidence, units
from kvsim.report.answer import MAX_VERDICT_WORDS, Answer, verdict
from kvsim.report.evidence import PROBE_TOKENS
from kvsim.report.json import Row
from kvsim.report.names import NAME_END, label, short_names
from kvsim.report.suitability import describe_loss
from kvsim.report.table import Column, text_column
from kvsim.techniques import parse
from kvsim.techniques.axes.settings import simplify

TIE = 0.01  # relative difference of goodput or throughput that decides nothing
OFTEN = 0.05  # preemptions per request from which they are worth a word
MIN_GOOD_SHARE = 0.9  # share of requests that must be good for the targets to be met
HEADINGS = {
    "req_s": "offered req/s",
    "rate": "rate",
    "replicas": "replicas",
    "max_tokens": "tokens per pass",
    "host_cache": "host tier GiB",
    "nvme_cache": "NVMe tier GiB",
    "prefix_load": "prefix load",
    "max_seqs": "sequences per pass",
    "hit_rate": "share in the cache",
    "prefill_replicas": "replicas for prefill",
}
OVERLOADED = 0.97  # of the requests that arrive; where fewer are served the queue only grows
WAITING = 1.0  # median queue beyond which the load is more than the machine serves [s]
SUFFICIENT_GAIN = 0.9  # share of the gain that makes a size enough
PARTIAL_GAIN = 0.5  # share of that from which a smaller size is worth a word
FASTER = 0.05  # relative difference of mean TTFT that is worth a word


def write_answer(
    rows: Sequence[Row],
    deployment: Deployment,
    trace: str,
    targets: str,
    left_out: Sequence[str],
    played: Sequence[caveats.PlayedRun] = (),
    sought: bool = False,
) -> Answer:
    """Answer in words which run serves a trace best; parameters are those of ``make_result``."""
    best = _select_best(rows, bool(targets))
    if sought:
        best = next((row for row in _order_by_need(rows) if _keeps(row)), best)
    full = next((row for row in rows if _name(row) == "full"), None)
    if sought:
        told = _describe_sought(rows, best, _describe_machines(best, deployment), trace, targets)
    elif varied_option(rows):
        told = _describe_cases(rows, _describe_machines(best, deployment), trace, best, targets)
    else:
        needed = _needed(best, deployment, trace, targets, _arrival_rate(best, rows, played))
        told = verdict(
            [*needed, *_price_of_choice(best, deployment)],
            _list_optional_sentences(rows, best, full),
        )
    return Answer(
        verdict=told,
        figures=_figures(best),
        changes=list(_changes(best, deployment, targets)),
        evidence=[
            *evidence.list_measurements(deployment, _name(best)),
            *evidence.describe_parallelism(deployment),
            *_mixed(best, rows, played),
        ],
        assumed=_assumed(best, deployment),
        left_out=left_out,
    )


def _price_of_choice(best: Row, deployment: Deployment) -> list[str]:
    """What the best technique loses of quality, and that no engine runs it, if so."""
    technique = parse(best["technique"])
    if technique.exact:
        return []
    found = quality(technique, deployment.model, PROBE_TOKENS)
    runs = engines_running(label(technique), deployment)
    return [describe_loss(technique, found), *([] if runs else ["No serving engine runs it."])]


def _arrival_rate(
    best: Row, rows: Sequence[Row], played: Sequence[caveats.PlayedRun]
) -> float | None:
    """Requests that arrive per second; None where that depends on the answers."""
    own = next((run for row, run in zip(rows, played, strict=False) if row is best), None)
    if own is None or own.requests.parent is not None or own.requests.duration <= 0:
        return None
    return len(own.requests) / own.requests.duration


def _mixed(best: Row, rows: Sequence[Row], played: Sequence[caveats.PlayedRun]) -> list[str]:
    own = next((run for row, run in zip(rows, played, strict=False) if row is best), None)
    return caveats.describe_mixed_passes(own, best["mean_batch"] or 0.0) if own else []


def _assumed(row: Row, deployment: Deployment) -> list[str]:
    """What a run that moves its cache to the host or from it takes for granted of the host."""
    moved = max(row["utilisation"]["h2d"], row["utilisation"]["d2h"])
    return evidence.list_assumptions(deployment.hardware, float(moved > 0), "")


def _name(row: Row) -> str:
    return NAME_END.split(row["technique"])[0]


def _figures(row: Row) -> Row:
    keys = ("ttft_s", "tpot_s", "output_tok_s", "goodput_per_s", "good_share", "kv_peak_share",
            "usd_per_million_tokens")  # fmt: skip
    return {"technique": row["technique"], **{key: row[key] for key in keys}}


def _select_best(rows: Sequence[Row], targets: bool) -> Row:
    """Most goodput, or the shortest latency where there are no targets; ties go to the first."""

    def worth(row: Row) -> float:
        if targets:
            return float(row["goodput_per_s"] or 0.0)
        latency = row["latency_s"]["p50"]
        return 1 / latency if latency else 0.0

    most = max(map(worth, rows))
    return next(row for row in rows if worth(row) >= most * (1 - TIE))


def _describe_machines(row: Row, deployment: Deployment) -> str:
    replicas = f"{row['replicas']} x " if row["replicas"] > 1 else ""
    words = deployment.parallelism.words()
    spread = f" with {words}" if words else ""
    return f"{replicas}{deployment.hardware.name}{spread}"


def _needed(
    row: Row, deployment: Deployment, trace: str, targets: str, arrive: float | None = None
) -> list[str]:
    """What is said in any case: whether targets are met, the times, and whether it is too much."""
    where = _describe_machines(row, deployment)
    ttft, tpot = row["ttft_s"]["p99"], row["tpot_s"]["p99"]
    times = f"TTFT p99 {units.seconds(ttft)}, TPOT p99 {units.seconds(tpot)}"
    tok = f"{units.rate(row['output_tok_s'])} output tok/s"
    said = [f"{_name(row)} on {where} serves {trace}: {times}, {tok}."]
    waited = row["queue_s"]["p50"] or 0.0
    taken = row["request_per_s"] or 0.0
    if waited > WAITING and arrive is not None and taken < OVERLOADED * arrive:
        said.append(
            f"Overloaded: the server completes {units.rate(taken)} of {units.rate(arrive)} "
            "requests/s."
        )
    elif waited > WAITING:
        said.append(f"Overloaded: requests queue for {units.seconds(waited)} (median).")
    if targets:
        share = row["good_share"]
        met = "Yes" if share and share >= MIN_GOOD_SHARE else "No"
        said.insert(0, f"{met}: {units.percent(share)} of requests meet {targets}.")
    return said


def _list_optional_sentences(rows: Sequence[Row], best: Row, full: Row | None) -> list[str]:
    said = []
    if full is not None and full is not best and full["output_tok_s"]:
        before, after = full["ttft_s"]["p99"], best["ttft_s"]["p99"]
        said.append(f"Full KV: TTFT p99 {units.seconds(before)} instead of {units.seconds(after)}.")
    hits = best["prefix_hit_share"]
    if hits:
        said.append(f"{units.percent(hits)} of prompt tokens come from the prefix cache.")
    said.append(f"KV memory peaks at {units.percent(best['kv_peak_share'])}.")
    if len(rows) > 1 and full is best:
        said.append("No other technique is better by more than 1 %.")
    return said


def _changes(row: Row, deployment: Deployment, targets: str) -> Sequence[str]:
    """What the run says of its own limits."""
    said = []
    refused = row["refused_by"]
    if refused["context"]:
        said.append(
            f"{refused['context']:,} requests are longer than the context of "
            f"{deployment.model.name}, "
            f"{row['max_model_len']:,} tokens, and were refused: choose a model with a longer one, "
            "or "
            "give --max-model-len if your engine is started with another limit."
        )
    if refused["cache"]:
        said.append(
            f"{refused['cache']:,} requests are larger than the KV cache and were refused: use "
            "more GPUs "
            "(--tp), narrower --weights, or a technique that keeps part of the cache elsewhere."
        )
    if targets and row["good_share"] is not None and row["good_share"] < MIN_GOOD_SHARE:
        said.append(
            f"Find the fleet that meets them: kvsim capacity --gpus "
            f"{quote(deployment.hardware.name)}."
        )
    if row["preemptions"] >= OFTEN * row["requests"]:
        said.append(
            f"{row['preemptions']:,} preemptions because the KV cache was full: --max-seqs (vLLM: "
            f"--max-num-seqs) below {units.integer(row['mean_batch'] * 1.5)} would avoid most."
        )
    return said


def varied_option(rows: Sequence[Row]) -> str:
    """Return the one option in which the runs of one technique differ.

    Parameters
    ----------
    rows
        Rows of runs.

    Returns
    -------
    str
        Key of the option; empty if there are several, or several techniques.
    """
    varied = list(rows[0].get("case", {}))
    alone = len(varied) == 1 and len({row["technique"] for row in rows}) == 1
    return varied[0] if alone and len(rows) > 1 else ""


def case_columns(rows: Sequence[Row]) -> list[Column]:
    """Make a column for each option in which runs differ.

    Parameters
    ----------
    rows
        Rows of runs.

    Returns
    -------
    list of Column
        Columns in the order of the options.
    """

    def column(key: str) -> Column:
        if any(isinstance(row["case"][key], str) for row in rows):
            return text_column(HEADINGS[key], lambda row: str(row["case"][key]))
        return Column(HEADINGS[key], f"case.{key}", lambda x: f"{simplify(x):,}")

    return [column(key) for key in rows[0].get("case", {})]


def name_runs(rows: Sequence[Row]) -> list[str]:
    """Name runs by technique without settings, and by what they have otherwise.

    Parameters
    ----------
    rows
        Rows of runs.

    Returns
    -------
    list of str
        A name per run.
    """
    names = short_names([row["technique"] for row in rows])
    one = len(names) == 1
    found = []
    for row in rows:
        case = [f"{HEADINGS[k]} {simplify(v)}" for k, v in row.get("case", {}).items()]
        own = names[row["technique"]]
        found.append(", ".join(case if one and case else [own, *case]))
    return found


def _describe_cases(rows: Sequence[Row], where: str, trace: str, best: Row, targets: str) -> str:
    """The verdict on runs of one technique that differ in one option."""
    if varied_option(rows) in ("req_s", "rate"):
        return _describe_loads(rows, where, trace, targets)
    if varied_option(rows) in ("host_cache", "nvme_cache"):
        return _describe_tiers(rows, where, trace)
    if varied_option(rows) == "prefix_load":
        return _describe_prefixes(rows, where, trace)
    if varied_option(rows) == "max_tokens":
        return _describe_passes(rows, where, trace, targets)
    return _describe_values(rows, where, trace, best, targets)


def _keeps(row: Row) -> bool:
    """Whether the 99th percentiles of a run are within its targets."""
    pairs = ((row[key]["p99"], row["targets"][key]) for key in ("ttft_s", "tpot_s"))
    within = all(value is None or target is None or value <= target for value, target in pairs)
    return within and not row["refused"] and not row["unfinished"]


def _order_by_need(rows: Sequence[Row]) -> list[Row]:
    """The runs from the one that asks most of the machine, or is best, on."""
    (key,) = rows[0]["case"]
    if key == "prefill_replicas":
        return sorted(rows, key=lambda row: -float(row["goodput_per_s"] or 0.0))
    harder = -1 if key in ("req_s", "rate") else 1
    return sorted(rows, key=lambda row: harder * float(row["case"][key]))


def _describe_sought(rows: Sequence[Row], best: Row, where: str, trace: str, targets: str) -> str:
    """The value that just keeps the targets, and what the next one would bring."""
    (key,) = best["case"]
    value = f"{simplify(best['case'][key]):,}"
    times = "TTFT p99 {ttft}, TPOT p99 {tpot}"

    def measured(row: Row) -> str:
        ttft, tpot = (row[k]["p99"] for k in ("ttft_s", "tpot_s"))
        return times.format(ttft=units.seconds(ttft or 0.0), tpot=units.seconds(tpot or 0.0))

    if not _keeps(best):
        name = HEADINGS[key]
        told = f"No {name} that was tried keeps {targets} (p99) for {trace} on {where}."
        return verdict([told, f"At {name} {value}: {measured(best)}."])
    keep = "keep" if best["replicas"] > 1 else "keeps"
    said = {
        "rate": f"{where} {keep} {targets} (p99) up to {value} times the rate of {trace}",
        "req_s": f"{where} {keep} {targets} (p99) up to {value} requests per second",
        "replicas": f"Take {where}, no fewer, to keep {targets} (p99) for {trace}",
        "hit_rate": f"{where} {keep} {targets} (p99) if at least {value} of each prompt is cached",
        "host_cache": f"{value} GiB of host cache are the least with which {where} keep {targets} "
        f"(p99) for {trace}",
        "prefill_replicas": f"Of {where}, let {value} read prompts: it serves most of {trace} "
        f"within {targets}",
    }[key]
    harder = [row for row in rows if not _keeps(row)]
    other = harder[-1:] if key in ("hit_rate", "host_cache", "replicas") else harder[:1]
    beyond = [
        f"At {simplify(row['case'][key]):,}: {measured(row)}."
        for row in other
        if key != "prefill_replicas"
    ]
    return verdict([f"{said}: {measured(best)}."], beyond)


def _describe_passes(rows: Sequence[Row], where: str, trace: str, targets: str) -> str:
    """What wider passes do to both times."""
    sizes = _join([_format_case_value(row, "max_tokens") for row in rows])
    ttft, tpot = (
        _join([units.seconds(row[key]["p99"]) for row in rows]) for key in ("ttft_s", "tpot_s")
    )
    said = f"At {sizes} tokens per pass, TTFT p99 of {trace} on {where} is {ttft}; TPOT p99 {tpot}."
    return verdict([said], [_met(rows, targets)])


def _describe_loads(rows: Sequence[Row], where: str, trace: str, targets: str) -> str:
    """How much memory each load takes, and which are more than the machine serves."""
    key = varied_option(rows)
    unit = "times the trace's rate" if key == "rate" else "requests per second"
    at = _join([_format_case_value(row, key) for row in rows])
    held = _join([units.size(row["kv_peak_bytes"]) for row in rows])
    shares = _join([units.percent(row["kv_peak_share"]) for row in rows])
    pool = units.size(rows[0]["kv_capacity_bytes"])
    ttft = _join([units.seconds(row["ttft_s"]["p99"]) for row in rows])
    late = [row for row in rows if (row["queue_s"]["p50"] or 0.0) > WAITING]
    over = ""
    if late:
        first, served = late[0], [row for row in rows if row not in late]
        carried = (
            f"It serves {_join([_format_case_value(row, key) for row in served])}. "
            if served
            else ""
        )
        over = (
            f"{carried}{_format_case_value(first, key)} is too much: it completes "
            f"{units.rate(first['request_per_s'])} per second, and requests queue for "
            f"{units.seconds(first['queue_s']['p50'])} (median)."
        )
    name = NAME_END.split(rows[0]["technique"])[0]
    holds = (
        f"At {at} {unit} of {trace}, {name} on {where} holds at most {held} of KV cache: {shares} "
        f"of its {pool}."
    )
    room = len(f"{holds} {over}".split()) <= MAX_VERDICT_WORDS
    return verdict(
        [holds, over] if room else [over],
        [*([] if room else [holds]), _met(rows, targets), f"TTFT p99: {ttft}."],
    )


def _format_case_value(row: Row, key: str) -> str:
    return f"{simplify(row['case'][key]):,}"


def _describe_tiers(rows: Sequence[Row], where: str, trace: str) -> str:
    """Which size of a tier is enough, and what each brings."""
    key = varied_option(rows)
    kind = "host tier" if key == "host_cache" else "NVMe tier"
    ranked = sorted(rows, key=lambda row: row["case"][key])
    least, best = ranked[0], min(_ttft(row) for row in ranked)
    enough = next(
        r for r in ranked if _ttft(least) - _ttft(r) >= SUFFICIENT_GAIN * (_ttft(least) - best)
    )
    sizes, ttft = _join([_size(r, key) for r in ranked]), _join([_mean(r) for r in ranked])
    hits = _join([units.percent(row["prefix_hit_share"] or 0.0) for row in ranked])
    if best > _ttft(least) * (1 - FASTER):
        told = f"A {kind} does not shorten TTFT for {trace} on {where}."
    else:
        start = "without it" if least["case"][key] == 0 else f"with {_size(least, key)} GiB"
        gain = units.percent(1 - _ttft(enough) / _ttft(least))
        told = (
            f"Take a {kind} of {_size(enough, key)} GiB for {trace} on {where}: mean TTFT is "
            f"{gain} shorter than {start}."
        )
        whole = _ttft(least) - _ttft(enough)
        half = next(r for r in ranked if _ttft(least) - _ttft(r) >= PARTIAL_GAIN * whole)
        if half is not enough:
            share = units.percent((_ttft(least) - _ttft(half)) / whole)
            told += f" {_size(half, key)} GiB give {share} of that gain."
    return verdict(
        [told, f"At {sizes} GiB mean TTFT is {ttft}."],
        [f"Prompt tokens from the cache: {hits}."],
    )


def _describe_prefixes(rows: Sequence[Row], where: str, trace: str) -> str:
    """Whether stored prefixes are loaded or computed again."""
    best = min(rows, key=_ttft)
    by = {row["case"]["prefix_load"]: row for row in rows}
    told = "; ".join(f"{name}: {_mean(row)}" for name, row in by.items())
    hits = units.percent(best["prefix_hit_share"] or 0.0)
    if "recompute" in by and _ttft(best) < (1 - FASTER) * _ttft(by["recompute"]):
        start = f"Load stored prefixes of {trace} on {where}, rather than recompute them"
    elif "recompute" in by:
        start = f"Loading stored prefixes of {trace} on {where} is no faster than recomputing them"
    else:
        start = f"{best['case']['prefix_load']} serves {trace} on {where} best"
    return verdict([f"{start}: mean TTFT is {told}."], [f"{hits} of prompt tokens are stored."])


def _describe_values(rows: Sequence[Row], where: str, trace: str, best: Row, targets: str) -> str:
    """Which value serves best, and how the others compare."""
    key = varied_option(rows)
    told = "; ".join(f"{simplify(row['case'][key]):,}: {_mean(row)}" for row in rows)
    return verdict(
        [
            f"Best for {trace} on {where} is {HEADINGS[key]} {simplify(best['case'][key]):,}.",
            f"Mean TTFT: {told}.",
            _met(rows, targets),
        ]
    )


def _met(rows: Sequence[Row], targets: str) -> str:
    if not targets:
        return ""
    shares = _join([units.percent(row["good_share"]) for row in rows])
    return f"{shares} of requests meet {targets}."


def _ttft(row: Row) -> float:
    return float(row["ttft_s"]["mean"] or 0.0)


def _mean(row: Row) -> str:
    return units.seconds(row["ttft_s"]["mean"])


def _size(row: Row, key: str) -> str:
    return f"{simplify(row['case'][key]):,}"


def _join(texts: Sequence[str]) -> str:
    """Texts as a list in a sentence."""
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))
