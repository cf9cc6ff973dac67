"""The page of fidelity: what measured runs say of kvsim, for truth.py."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.truth_intervals import SHARE, Coverage
from benchmarks.truth_weights import Held
from kvsim.evidence.ledger import WEIGHTS

PAGE = Path("docs/fidelity.md")
END = "## Whole runs held out by mechanism"
COLUMNS = ("rows", "said/meas.", "median", "p90", "inside", "width")
HEADS = {"asked": "measurements", "said/meas.": "predicted/measured"}
PRINTED = ("asked", "engine, version, source", "ratios of pairs")
Tables = Mapping[str, Mapping[str, Mapping[str, float]]]
Intervals = Mapping[str, Mapping[str, Coverage]]

TEXT = Path(__file__).with_suffix(".md")


def write_page(
    tables: Tables, intervals: Intervals, judged: Sequence[tuple[Held, Held]], rows: int,
    signs: tuple[int, int],
) -> None:  # fmt: skip
    """Write the page's first part; the sections below stay.

    Parameters
    ----------
    tables, intervals
        Figures by table and group.
    judged
        What intervals hold with the weights that ship, and with those that never saw the runs.
    rows
        Numbers in all.
    signs
        Pairs that are said on the right side of 1, and those that are clear of it.
    """
    whole, groups = intervals.values()
    asked = tables["asked"]
    pairs = tables["ratios of pairs"]
    said = TEXT.read_text().format(
        rows=rows, e=asked["speeds of engines.csv that count"], s=asked["serving latency"],
        x=asked["serving_experts latency"], f=asked["serving_fp4 latency"],
        m=asked["memory HF transformers"], r=pairs["all pairs"], g=pairs["engine against engine"],
        right=signs[0], clear=signs[1],
        low=100 * min(own.share for _, own in judged),
        high=100 * max(own.share for _, own in judged),
        t=asked["serving ttft"], own=WEIGHTS["own"], unseen=100 * WEIGHTS["unseen"],
        rerun=100 * WEIGHTS["rerun"],
        groups=len(groups), outside_half=judged[0][1].outside, groups_half=judged[0][1].groups,
        outside_none=judged[1][1].outside, groups_none=judged[1][1].groups,
        alike=judged[1][1].alike, outside_alike=judged[1][1].outside_alike,
        judged="\n".join(
            f"| {own.fold} | {own.without} | {100 * own.share:.1f} % | {own.width:.2f} "
            f"| {100 * shipped.share:.1f} %, {shipped.width:.2f} |"
            for shipped, own in judged
        ),
        outside=sum(not c.holds for c in groups.values()),
        whole="\n".join(
            f"| {n} | {100 * c.share:.1f} % | {c.width:.2f} |" for n, c in whole.items()
        ),
    )  # fmt: skip
    parts = [said]
    lines = [
        "| intervals | rows | runs | inside | 80 % and two standard errors | width |",
        "| --- |" + " --- |" * 5,
    ]
    for name, c in groups.items():
        low, high = 100 * (SHARE - c.spread), 100 * min(SHARE + c.spread, 1.0)
        share = f"{100 * c.share:.0f} %" if c.holds else f"**{100 * c.share:.0f} %**"
        lines.append(
            f"| {name} | {c.rows} | {c.runs} | {share} | {low:.0f} to {high:.0f} % "
            f"| {c.width:.2f} |"
        )
    parts.append("\n".join(lines))
    for title in PRINTED:
        head = (
            f"| {HEADS.get(title, title)} | " + " | ".join(HEADS.get(c, c) for c in COLUMNS) + " |"
        )
        lines = [head, "| --- |" + " --- |" * len(COLUMNS)]
        for name, now in tables[title].items():
            cells = (_cell(c, now[c]) for c in COLUMNS)
            lines.append(f"| {name.strip()} | " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    _, mark, rest = PAGE.read_text().partition(END)
    PAGE.write_text("\n".join(f"{part}\n" for part in parts) + "\n" + mark + rest)


def _cell(column: str, value: float) -> str:
    if value != value:  # no interval
        return "–"
    if column == "rows":
        return f"{value:,.0f}"
    return f"{value:.2f}" if column in ("said/meas.", "width") else f"{value:.1f} %"
