"""Simulated runs that differ in one option: what each value brings, as a verdict and as columns."""

from collections.abc import Sequence

from kvsim.report import units
from kvsim.report.answer import verdict
from kvsim.report.json import Row
from kvsim.report.names import NAME_END, short_names
from kvsim.report.table import Column, words
from kvsim.techniques.axes.settings import plain

HEADINGS = {
    "req_s": "offered req/s",
    "rate": "rate",
    "replicas": "replicas",
    "host_cache": "host tier GiB",
    "nvme_cache": "NVMe tier GiB",
    "prefix_load": "prefix load",
}
WAITING = 1.0  # median queue beyond which the load is more than the machine serves [s]
MOST = 0.9  # share of the gain that makes a size enough
HALF = 0.5  # share of that from which a smaller size is worth a word
FASTER = 0.05  # relative difference of mean TTFT that is worth a word


def axis(rows: Sequence[Row]) -> str:
    """The one option in which the runs of one technique differ; empty otherwise."""
    varied = list(rows[0].get("case", {}))
    alone = len(varied) == 1 and len({row["technique"] for row in rows}) == 1
    return varied[0] if alone and len(rows) > 1 else ""


def columns(rows: Sequence[Row]) -> list[Column]:
    """A column per option in which runs differ."""

    def column(key: str) -> Column:
        if any(isinstance(row["case"][key], str) for row in rows):
            return words(HEADINGS[key], lambda row: str(row["case"][key]))
        return Column(
            HEADINGS[key], lambda row: f"{plain(row['case'][key]):,}", lambda row: row["case"][key]
        )

    return [column(key) for key in rows[0].get("case", {})]


def run_names(rows: Sequence[Row]) -> list[str]:
    """A name per run: its technique without settings, and what it has otherwise."""
    names = short_names([row["technique"] for row in rows])
    one = len(names) == 1
    found = []
    for row in rows:
        case = [f"{HEADINGS[k]} {plain(v)}" for k, v in row.get("case", {}).items()]
        own = names[row["technique"]]
        found.append(", ".join(case if one and case else [own, *case]))
    return found


def said(rows: Sequence[Row], where: str, trace: str, best: Row, targets: str) -> str:
    """The verdict on runs of one technique that differ in one option."""
    if axis(rows) in ("req_s", "rate"):
        return loads(rows, where, trace, targets)
    if axis(rows) in ("host_cache", "nvme_cache"):
        return tiers(rows, where, trace)
    if axis(rows) == "prefix_load":
        return prefixes(rows, where, trace)
    return ways(rows, where, trace, best, targets)


def loads(rows: Sequence[Row], where: str, trace: str, targets: str) -> str:
    """How much memory each load takes, and which are more than the machine serves."""
    key = axis(rows)
    unit = "requests per second" if key == "req_s" else "times the trace's rate"
    at = listed([_at(row, key) for row in rows])
    held = listed([units.size(row["kv_peak_bytes"]) for row in rows])
    shares = listed([units.percent(row["kv_peak_share"]) for row in rows])
    pool = units.size(rows[0]["kv_capacity_bytes"])
    ttft = listed([units.seconds(row["ttft_s"]["p99"]) for row in rows])
    late = [row for row in rows if (row["queue_s"]["p50"] or 0.0) > WAITING]
    over = ""
    if late:
        first, served = late[0], [row for row in rows if row not in late]
        carried = f"It serves {listed([_at(row, key) for row in served])}. " if served else ""
        over = (
            f"{carried}{_at(first, key)} is more than it serves: it finishes "
            f"{units.rate(first['request_per_s'])} per second, and requests queue for "
            f"{units.seconds(first['queue_s']['p50'])} (median)."
        )
    name = NAME_END.split(rows[0]["technique"])[0]
    return verdict(
        [
            f"At {at} {unit} of {trace}, {name} on {where} holds at most {held} of KV cache: "
            f"{shares} of its {pool}.",
            over,
        ],
        [_met(rows, targets), f"TTFT p99: {ttft}."],
    )


def _at(row: Row, key: str) -> str:
    return f"{plain(row['case'][key]):,}"


def tiers(rows: Sequence[Row], where: str, trace: str) -> str:
    """Which size of a tier is enough, and what each brings."""
    key = axis(rows)
    kind = "host tier" if key == "host_cache" else "NVMe tier"
    ranked = sorted(rows, key=lambda row: row["case"][key])
    least, best = ranked[0], min(_ttft(row) for row in ranked)
    enough = next(r for r in ranked if _ttft(least) - _ttft(r) >= MOST * (_ttft(least) - best))
    sizes, ttft = listed([_size(r, key) for r in ranked]), listed([_mean(r) for r in ranked])
    hits = listed([units.percent(row["prefix_hit_share"] or 0.0) for row in ranked])
    if best > _ttft(least) * (1 - FASTER):
        told = f"A {kind} brings {trace} on {where} next to nothing."
    else:
        start = "without it" if least["case"][key] == 0 else f"with {_size(least, key)} GiB"
        gain = units.percent(1 - _ttft(enough) / _ttft(least))
        told = (
            f"Take a {kind} of {_size(enough, key)} GiB for {trace} on {where}: mean TTFT is "
            f"{gain} shorter than {start}."
        )
        whole = _ttft(least) - _ttft(enough)
        half = next(r for r in ranked if _ttft(least) - _ttft(r) >= HALF * whole)
        if half is not enough:
            share = units.percent((_ttft(least) - _ttft(half)) / whole)
            told += f" {_size(half, key)} GiB bring {share} of that."
    return verdict(
        [told, f"At {sizes} GiB mean TTFT is {ttft}."],
        [f"Prompt tokens from the cache: {hits}."],
    )


def prefixes(rows: Sequence[Row], where: str, trace: str) -> str:
    """Whether stored prefixes are loaded or computed again."""
    best = min(rows, key=_ttft)
    by = {row["case"]["prefix_load"]: row for row in rows}
    told = "; ".join(f"{name}: {_mean(row)}" for name, row in by.items())
    hits = units.percent(best["prefix_hit_share"] or 0.0)
    if "recompute" in by and _ttft(best) < (1 - FASTER) * _ttft(by["recompute"]):
        start = f"Load stored prefixes of {trace} on {where}, do not compute them again"
    elif "recompute" in by:
        start = f"Loading stored prefixes of {trace} on {where} brings next to nothing"
    else:
        start = f"{best['case']['prefix_load']} serves {trace} on {where} best"
    return verdict([f"{start}: mean TTFT is {told}."], [f"{hits} of prompt tokens are stored."])


def ways(rows: Sequence[Row], where: str, trace: str, best: Row, targets: str) -> str:
    """Which value serves best, and how the others compare."""
    key = axis(rows)
    told = "; ".join(f"{plain(row['case'][key]):,}: {_mean(row)}" for row in rows)
    return verdict(
        [
            f"Best for {trace} on {where} is {HEADINGS[key]} {plain(best['case'][key]):,}.",
            f"Mean TTFT: {told}.",
            _met(rows, targets),
        ]
    )


def _met(rows: Sequence[Row], targets: str) -> str:
    if not targets:
        return ""
    shares = listed([units.percent(row["good_share"]) for row in rows])
    return f"{shares} of requests meet {targets}."


def _ttft(row: Row) -> float:
    return float(row["ttft_s"]["mean"] or 0.0)


def _mean(row: Row) -> str:
    return units.seconds(row["ttft_s"]["mean"])


def _size(row: Row, key: str) -> str:
    return f"{plain(row['case'][key]):,}"


def listed(texts: Sequence[str]) -> str:
    """Texts as a list in a sentence."""
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))
