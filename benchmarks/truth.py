"""Predictions beside every public measurement of a whole run, today and at the last stored commit.

    python -m benchmarks.truth ../shared            # the table; figures of the last store beside
    python -m benchmarks.truth ../shared --rows     # every row, and those that cannot be predicted
    python -m benchmarks.truth ../shared --store    # and store today's figures with the commit
    python -m benchmarks.truth ../shared --ledger   # and the ledger's lines of whole runs
    python -m benchmarks.truth ../shared --page     # and docs/fidelity.md
    python -m benchmarks.truth ../shared --weights  # choose weights of intervals, and store them
    python -m benchmarks.truth ../shared --against fused  # errors of engines' own stacks beside

Rows: ``measured/engines.csv``, ``splitwise_a100.csv`` and ``argonne_a100.csv``, and
``ops/serving*.csv`` of the folder. Nothing is fitted here: a row says what ran, and kvsim what it
would say of it with the engine's stack. "said / measured" is of speeds, so that above 1 kvsim is
too fast; memory and speed-ups are as they are.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from benchmarks.entries import MIN_SPREAD_ROWS, entry_of
from benchmarks.truth_intervals import (
    HOLD_OUTS,
    SUSPECT,
    Coverage,
    Mechanisms,
    Pair,
    by_group,
    counts,
    held_out,
    mechanisms_of,
    of_group,
)
from benchmarks.truth_page import write_page
from benchmarks.truth_rows import Row, read_rows
from benchmarks.truth_runs import Said, predict_rows
from benchmarks.truth_weights import choose_all, judge, print_judged
from kvsim.evidence import ledger

HERE = Path(__file__).parent
STORED = HERE / "truth.json"
LEDGER = Path("kvsim/evidence/ledger.csv")
CLEAR = 0.05  # a ratio this far from 1 has a side
FEWEST, ALLOWED = 10, 2.0  # rows of a compared group, and points that a stack may be worse by
Figures = dict[str, float]
HEAD = ("rows", "said/meas.", "median", "p90", "inside", "width")


def figures(pairs: Sequence[Pair]) -> Figures:
    """Summarise rows: their number, median ratio, errors, and what their intervals hold.

    Parameters
    ----------
    pairs
        Rows with what kvsim says of them.
    """
    ratio = np.array([s.value / r.value for r, s in pairs])
    off = np.abs(ratio - 1)
    known = [(r, s) for r, s in pairs if s.low and s.high]
    inside = [s.low <= r.value <= s.high for r, s in known]
    speed = np.array([r.faster for r, _ in pairs])
    return {
        "rows": len(pairs),
        "said/meas.": float(np.median(np.where(speed, ratio, 1 / ratio))),
        "median": 100 * float(np.median(off)),
        "p90": 100 * float(np.quantile(off, 0.9)),
        "inside": 100 * float(np.mean(inside)) if inside else float("nan"),
        "width": float(np.median([s.high / s.low for _, s in known])) if known else float("nan"),
    }


def grouped(pairs: Iterable[Pair], key: Callable[[Row], str]) -> dict[str, list[Pair]]:
    """Sort pairs into groups by a key of their rows."""
    found: dict[str, list[Pair]] = {}
    for row, said in pairs:
        found.setdefault(key(row), []).append((row, said))
    return dict(sorted(found.items()))


def judged(row: Row) -> bool:
    """Whether a level of engines.csv counts: not llama.cpp's, not a doubtful card's."""
    doubtful = (row.source, row.card, row.gpus) in SUSPECT
    left_out = doubtful or row.listed or row.engine == "llama.cpp"
    return row.file == "engines" and row.table == "speed" and not left_out


def ratios(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    """Pairs of rows that differ in one thing alone, as a ratio measured and a ratio said."""
    kinds = {
        "format against format": ("weights", "technique", "kv"),
        "engine against engine": ("engine", "version", "max_seqs", "max_tokens"),
        "tp against tp": ("tp", "gpus"),
    }
    found: dict[str, list[Pair]] = {}
    for name, free in kinds.items():
        for alike in grouped(pairs, lambda r, free=free: r.key(free)).values():  # type: ignore[misc]
            first, *others = alike
            for row, said in others:
                value, base = row.value / first[0].value, said.value / first[1].value
                one = row.as_ratio(value)
                if row.compared(first[0], free):
                    found.setdefault(name, []).append((one, Said(base)))
    return {**found, "all pairs": [pair for some in found.values() for pair in some]}


def signs(pairs: Sequence[Pair]) -> tuple[int, int]:
    """Count the ratios that are said on the right side of 1, of those measured further from it."""
    clear = [(r, s) for r, s in pairs if abs(r.value - 1) > CLEAR]
    return sum((r.value - 1) * (s.value - 1) > 0 for r, s in clear), len(clear)


def print_table(title: str, groups: dict[str, Figures], before: dict[str, Figures]) -> None:
    """Print figures by group, with those of the last store beside them."""
    print(f"\n{title:58s}" + "".join(f"{h:>11s}" for h in HEAD) + "   stored: median, p90, inside")
    for name, now in groups.items():
        cells = "".join(
            f"{now[h]:11.0f}" if h == "rows" else f"{now[h]:11.2f}" if h in HEAD[1::4]
            else f"{now[h]:10.1f}%" for h in HEAD
        )  # fmt: skip
        old = before.get(name)
        told = "" if old is None else "   " + ", ".join(f"{old[h]:.1f}" for h in HEAD[2:5])
        print(f"{name[:58]:58s}{cells}{told}")


def print_against(pairs: Sequence[Pair], others: Sequence[Said | str], name: str) -> None:
    """Print errors of the engines' own stacks and of another one on the same rows at full load."""
    both = [
        (row, said.value / row.value - 1, other.value / row.value - 1)
        for (row, said), other in zip(pairs, others, strict=True)
        if isinstance(other, Said) and row.table == "speed" and row.load != "batch"
    ]
    groups: dict[str, list[tuple[Row, float, float]]] = {"all at full load": both}
    for each in both:
        row = each[0]
        if row.asked not in ("ttft", "tpot"):
            groups.setdefault(f"{row.engine} {row.version} {row.card} {row.source}", []).append(
                each
            )
    print(f"\n{'median error at full load':72s} {'rows':>5s} {'own':>8s} {name:>8s}")
    for title, rows in groups.items():
        if len(rows) >= FEWEST:
            own, other = (100 * np.median(np.abs([r[i] for r in rows])) for i in (1, 2))
            worse = "  worse" if own > other + ALLOWED else ""
            print(f"{title[:72]:72s} {len(rows):5d} {own:7.1f}% {other:7.1f}%{worse}")


def summarise(pairs: Sequence[Pair]) -> dict[str, dict[str, Figures]]:
    """All tables: what is asked, then by run, card and weights, then pairs of rows."""
    chosen = [p for p in pairs if judged(p[0])]
    own = [p for p in pairs if p[0].table == "speed" and not p[0].drafts]
    asked = {"speeds of engines.csv that count": chosen}
    asked |= {f"  engine {k}": v for k, v in grouped(chosen, lambda r: r.engine).items()}
    asked |= grouped([p for p in pairs if p[0].file != "engines"], lambda r: f"{r.file} {r.asked}")
    rest = [p for p in pairs if p[0].table in ("speedup", "memory")]
    asked |= grouped(rest, lambda r: f"{r.table} {'drafts' if r.drafts else r.engine}")
    tables = {
        "asked": asked,
        "engine, version, source": grouped(own, lambda r: f"{r.engine} {r.version} {r.source}"),
        "card": grouped(own, lambda r: f"{r.engine} {r.card}"),
        "weights": grouped(own, lambda r: f"{r.engine} {r.weights} {r.kv or 'kv16'}"),
        "ratios of pairs": ratios([p for p in own if p[0].file == "engines"]),
    }
    return {t: {k: figures(v) for k, v in groups.items() if v} for t, groups in tables.items()}


def write_ledger(pairs: Sequence[Pair]) -> None:
    """Put the errors of whole runs into the ledger, a line per mechanism and model of a source."""
    found: dict[Mechanisms, list[Pair]] = {}
    for row, said in pairs:
        if counts(row):
            found.setdefault(mechanisms_of(row), []).append((row, said))
    lines = []
    for own, some in found.items():
        if len(some) < MIN_SPREAD_ROWS:
            continue
        ratio = np.array([s.value / r.value for r, s in some])
        faster = np.array([r.metric.endswith("tok_s") for r, _ in some])
        lines.append(entry_of(
            np.where(faster, 1 / ratio, ratio), np.ones(ratio.size), held_out=ledger.HELD_OUT_RUN,
            **asdict(own),
        ))  # fmt: skip
    renewed = {line.engine for line in lines}
    kept = [
        e for e in ledger.shipped() if e.held_out != ledger.HELD_OUT_RUN or e.engine not in renewed
    ]
    LEDGER.write_text(ledger.format_ledger([*kept, *lines]))


def intervals_of(pairs: Sequence[Pair]) -> dict[str, dict[str, Coverage]]:
    """Coverage of all rows, with and without lines of the ledger like theirs, and by group."""
    known = [(r, s) for r, s in pairs if counts(r)]
    whole = {"with the ledger that ships": of_group(known)}
    for name, shared in HOLD_OUTS.items():
        whole[f"without {name}"] = of_group(held_out(known, shared))
    return {"all rows, intervals": whole, "engine, version, source": by_group(known)}


def print_intervals(tables: dict[str, dict[str, Coverage]]) -> None:
    """Print the share of numbers within their intervals, and whether it is what is said."""
    for title, groups in tables.items():
        print(f"\n{title:58s}   rows   runs   inside    within     width")
        for name, c in groups.items():
            low, high = 100 * (0.8 - c.spread), 100 * min(0.8 + c.spread, 1.0)
            told = "" if c.holds else "  outside"
            print(
                f"{name[:58]:58s}{c.rows:7d}{c.runs:7d}{100 * c.share:8.1f}%"
                f"{low:6.0f}-{high:3.0f}%{c.width:9.2f}{told}"
            )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("shared", type=Path)
    options.add_argument("--rows", action="store_true", help="print every row")
    options.add_argument("--store", action="store_true", help="store the figures")
    options.add_argument("--only", default="", help="rows whose engine or source contains this")
    options.add_argument("--stack", default="", help="predict every row with this stack")
    options.add_argument("--against", default="", help="compare with this stack at full load")
    options.add_argument("--ledger", action="store_true", help="write the ledger's lines of runs")
    options.add_argument("--weights", action="store_true", help="choose and store weights")
    options.add_argument("--page", action="store_true", help="write docs/fidelity.md")
    chosen = options.parse_args()
    if chosen.only and chosen.ledger:
        options.error("--ledger replaces all lines of runs; omit --only")
    wanted = chosen.only.lower()
    rows = [r for r in read_rows(chosen.shared) if wanted in f"{r.engine} {r.source}".lower()]
    traces = chosen.shared / "measured" / "traces"
    said = predict_rows(rows, traces, chosen.stack)
    pairs = [(r, s) for r, s in zip(rows, said, strict=True) if isinstance(s, Said)]
    stored = json.loads(STORED.read_text()) if STORED.exists() else {"commit": "", "tables": {}}
    tables = summarise(pairs)
    if stored["commit"]:
        print(f"stored figures: {stored['commit']}")
    for title, groups in tables.items():
        print_table(title, groups, stored["tables"].get(title, {}))
    found = ratios([p for p in pairs if p[0].table == "speed" and p[0].file == "engines"
                    and not p[0].drafts])  # fmt: skip
    right, clear = signs(found["all pairs"])
    print(
        f"\nof pairs measured more than {CLEAR:.0%} apart, {right} of {clear} have the right sign"
    )
    intervals = intervals_of(pairs)
    print_intervals(intervals)
    if chosen.weights:
        stored["weights"] = choose_all(pairs)
        STORED.write_text(json.dumps(stored, indent=1) + "\n")
        print("chosen on all:", stored["weights"]["all"])
    judged = judge(pairs, stored["weights"]) if "weights" in stored and not wanted else []
    print_judged(judged)
    left: dict[str, int] = {}
    for row, reason in zip(rows, said, strict=True):
        if not isinstance(reason, Said):
            told = f"{row.source}, {row.model}: {reason}"
            left[told] = left.get(told, 0) + 1
    print(f"\nnot predicted: {sum(left.values())} rows")
    for told, count in left.items():
        print(f"  {count:4d}  {told}")
    if chosen.against:
        others = predict_rows([r for r, _ in pairs], traces, chosen.against)
        print_against(pairs, others, chosen.against)
    if chosen.rows:
        for row, s in pairs:
            print(
                f"{s.value / row.value:7.3f} {s.low / row.value:6.2f} {s.high / row.value:6.2f}  "
                f"{row}"
            )
    if chosen.page:
        write_page(tables, intervals, judged, len(pairs), (right, clear))
    if chosen.ledger:
        write_ledger(pairs)
    if chosen.store:
        commit = subprocess.run(
            ["git", "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        STORED.write_text(
            json.dumps({**stored, "commit": commit, "tables": tables}, indent=1) + "\n"
        )
        print(f"stored as {commit}", file=sys.stderr)


if __name__ == "__main__":
    main()
