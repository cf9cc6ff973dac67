"""The page of fidelity: what measured runs say of kvsim, for truth.py."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.truth_intervals import SHARE, Coverage
from benchmarks.truth_weights import Held
from kvsim.evidence.ledger import WEIGHTS

PAGE = Path("docs/fidelity.md")
END = "## Published tables of techniques"
COLUMNS = ("rows", "said/meas.", "median", "p90", "inside", "width")
PRINTED = ("asked", "engine, version, source", "ratios of pairs")
Tables = Mapping[str, Mapping[str, Mapping[str, float]]]
Intervals = Mapping[str, Mapping[str, Coverage]]

TEXT = """# Fidelity

This page says how far predictions can be trusted, as measured. `python -m benchmarks.truth SHARED
--page` writes it from public measurements of whole runs ({rows:,} numbers of engines, cards and
models that others published); kvsim holds fitted numbers and their sources, not the rows.

## In three minutes

- **Speeds of engines in public tables** ({e[rows]:.0f} numbers: vLLM 0.6 to 0.19, SGLang 0.5,
  TensorRT-LLM 0.5 to 1.2, Transformers, AutoAWQ, TinyChat, gpt-fast): off by {e[median]:.1f} % at
  the median and {e[p90]:.0f} % for nine in ten.
- **Load tests of dense models**: request latency off by {s[median]:.1f} % at the median,
  {s[p90]:.0f} % for nine in ten; of models with experts {x[median]:.0f} and {x[p90]:.0f} %; with
  4-bit floats {f[median]:.0f} and {f[p90]:.0f} %.
- **Peak memory** of Transformers: {m[median]:.1f} and {m[p90]:.0f} %.
- **Formats, engines or numbers of GPUs against each other on one machine**: a ratio is off by
  {r[median]:.1f} % at the median and {r[p90]:.0f} % for nine in ten, and on the right side of 1 in
  {right} of {clear} pairs that differ by 5 % or more. Comparisons are safer than levels: what a
  machine's clock, client or host does to both cancels. Engines against each other under load are
  the exception, with {g[median]:.0f} and {g[p90]:.0f} % over {g[rows]:.0f} pairs.
- **Trust least**: the time to the first token under load. Load tests are
  simulated as their clients ran them, all at once, and measured times are {t[said/meas.]:.1f}
  times the predicted ones at the median. Disaggregated serving and many short prompts on an A100
  are next.

**What an interval means.** A time is printed with the range that holds it with 80 % probability.
The range is a range of quantiles over the errors of all measured runs, each of which counts the
more mechanisms it shares with the answer: engine, kind of number, card, load, format of weights,
experts or none, one GPU or several, model. The answer itself counts as {own:g} runs whose error may
be any, so the range reaches further out where few runs share its mechanisms; where none is of its
model on its card with its engine, {unseen:.0f} % are added as an independent error. One set of
weights is for all; no width is chosen per group.

The weights were chosen on runs whose own lines the ledger lacked. To judge them, they were chosen
again without a part of the sources, of the engines' versions or of the models, and used on that
part: first with a ledger that has half of a page's runs and is judged on the other half, then with
one that has none of them.

| left out of the choice | ledger without | numbers inside | width | with the weights that ship |
| --- | --- | --- | --- | --- |
{judged}

The weights that ship were chosen on all of these runs, so the last column is no test of them, nor
is the next table; its first line is of runs whose own lines are in the ledger.

| intervals with the weights that ship | numbers inside, runs counting alike | width |
| --- | --- | --- |
{whole}

By group of engine, version and source, {outside} of {groups} lie further from 80 % than two
binomial standard errors with the ledger that ships (the second table), {outside_half} of
{groups_half} with one that has half of a page's runs, and about a third where it has none of them:
runs of one source err alike, so that most of them are inside or most are outside.

**What was fitted.** Host time per pass and per sequence for each engine's generation of versions,
from single streams and from pairs of runs with and without asynchronous scheduling; products,
attention and sums per card, from measured kernels; MI300X from its whole runs, held out by model.
A number's line under `[source]` in its stack's file names the rows. Rows that a fit saw are among
those below; errors held out by card, model or length are in [errors.md](errors.md) and in the
stacks' files.

**What does not fit**, and was not made to: SGLang's gpt-oss-20b on an A100 (6.2 s per token), a
single H100 that three engines alike found slow (levels of `gpustack`, of which only ratios
count), Qwen2.5's runs at 129,024 tokens in quantised formats, which were run with other settings,
and batches of Mixtral under TensorRT-LLM and DeepSpeed-MII of 2024: 16 sequences take less time
than reading all experts would, as if all had the same text.

## Tables

Said over measured is of speeds: above 1, kvsim says too fast. Inside: share of the numbers within
their 80 % interval; width: upper end over lower end, at the median.
"""


def write_page(
    tables: Tables, intervals: Intervals, judged: Sequence[tuple[Held, Held]], rows: int,
    signs: tuple[int, int],
) -> None:  # fmt: skip
    """Write the page's first part; the sections on published tables stay.

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
    said = TEXT.format(
        rows=rows, e=asked["speeds of engines.csv that count"], s=asked["serving latency"],
        x=asked["serving_experts latency"], f=asked["serving_fp4 latency"],
        m=asked["memory HF transformers"], r=pairs["all pairs"], g=pairs["engine against engine"],
        right=signs[0], clear=signs[1],
        t=asked["serving ttft"], own=WEIGHTS["own"], unseen=100 * WEIGHTS["unseen"],
        groups=len(groups), outside_half=judged[0][1].outside, groups_half=judged[0][1].groups,
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
        head = f"| {title} | " + " | ".join(COLUMNS) + " |"
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
