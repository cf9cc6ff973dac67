"""Results of ``kvsim validate``: measured counts, quality and plans compared with predictions."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from math import isfinite

import numpy as np

from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.quality.layers import CACHE_SIDES, Z_95, LayerLosses, Widths
from kvsim.quality.measured import PERPLEXITY
from kvsim.quality.planfile import PlanFile
from kvsim.report.answer import Answer
from kvsim.report.answer import verdict as paragraph
from kvsim.report.json import Row, number, pick
from kvsim.report.names import join_words, list_settings, short_names
from kvsim.report.pictures import DOWNWARDS, RED, Chart
from kvsim.report.result import Result
from kvsim.report.table import Column, Table, cells_table, text_column
from kvsim.report.terminal import BLANK, Block, Heading
from kvsim.report.units import DASH, format_number, gib, percent, seconds, times
from kvsim.traces.attention import GAMMAS, Acceptance, AttentionTrace, Quality, TopK, record
from kvsim.validate.counts.check import LOGIT_TOLERANCE, CannotRun, CheckedTechnique
from kvsim.validate.counts.compare import CHANNELS, Buffer, Line
from kvsim.validate.counts.expected import RandomPrompts
from kvsim.validate.planned import MeasuredLoss
from kvsim.validate.times.compared import Measured

EXACT = 15  # digits: counts are shown whole
SHADES = {"equal": ("#26866a", ""), "explained": ("#8a7413", "/"), "DIFFERS": (RED, "x")}
"""Verdicts on a count: its colour and pattern."""
KEY = (
    f"exact: generates the same tokens as full KV, with fp32 logits within {LOGIT_TOLERANCE:g}. "
    "Rows are counts over all layers and passes. equal: predicted to the last digit; "
    "explained: differs for the reason given, with the prediction below it. "
    "bytes seen: operations whose kernels were measured to move the bytes that were counted."
)
"""What the words in the tables mean."""


def make_result(
    found: Sequence[CheckedTechnique],
    title: str,
    about: Row,
    refused: Sequence[CannotRun] = (),
) -> Result[Sequence[CheckedTechnique]]:
    """Make the result of ``kvsim validate``, which compares counts with predictions.

    Parameters
    ----------
    title
        Model, weights, device and sizes.
    about
        The same as fields of the JSON output.
    refused
        Techniques that could not run.
    """
    fields = about | {
        "techniques": [_technique_fields(o) for o in found],
        "left_out": [{"technique": str(f.technique), "reason": f.reason} for f in refused],
        "passed": all(o.passed for o in found) and not refused,
    }
    rows: Sequence[Row] = fields["techniques"]
    answer, names = _write_answer(rows), short_names([row["technique"] for row in rows])
    labels = [names[row["technique"]] for row in rows]
    settings, summary = list_settings(names), _summary_table(rows, labels)
    blocks: list[Block] = [Heading(title), *answer.head(), summary, *settings]
    full = next((row for row in rows if row["technique"] == "full"), None)
    details = []
    for label, row in zip(labels, rows, strict=True):
        blocks += [BLANK, Heading(label), *_list_blocks(row, full)]
        details.append(_op_table(row["ops"], f"{label}: ops"))
        details.append(_buffer_table(row["buffers"], f"{label}: buffers"))
        details.append(_measured_table(row["measured"], f"{label}: bytes as measured"))
    explained = _reasons([item for row in rows for item in _list_items(row)]).items()
    return Result(
        title,
        answer,
        fields | {"answer": answer.row()},
        found,
        passed=fields["passed"],
        tables=[summary],
        blocks=[*blocks, BLANK, KEY],
        draw=lambda: [_draw_bars(rows, labels)],
        details=[table for table in details if table.rows],
        remarks=[
            *(f"{join_words(what)}: {why}." for why, what in explained),
            KEY,
            *settings,
        ],
    )


def _technique_fields(found: CheckedTechnique) -> Row:
    """One technique's checks under their contract names."""
    compared = found.comparison
    return {
        "technique": str(found.technique),
        "exact": found.must_agree,
        "same_tokens": found.same_tokens,
        "logit_difference": number(found.logit_difference),
        "ops": [_op(line) for line in compared.lines],
        "buffers": [
            {"phase": b.phase, "tier": b.tier, "buffer": b.name}
            | {"predicted_bytes": b.predicted, "counted_bytes": b.counted}
            | _judge(b)
            for b in compared.buffers
        ],
        "measured": [
            {"phase": one.phase, "op": one.op, "stated_bytes": one.stated}
            | {"measured_bytes": one.measured, "reason": one.reason}
            for one in compared.measured
        ],
        "passed": found.passed,
    }


def _op(line: Line) -> Row:
    row: Row = {"phase": line.phase, "op": line.op}
    both = {"predicted": line.predicted, "counted": line.counted}.items()
    row |= {f"{key}_flop": float(work.flops) for key, work in both}
    for key, work in both:
        row[f"{key}_bytes"] = {c: float(work.bytes.get(c, 0.0)) for c in CHANNELS}
    return row | {"launches": int(line.counted.launches), **_judge(line)}


def _judge(item: Line | Buffer) -> Row:
    """How a count compares with its prediction."""
    verdict = "equal" if item.equal else "explained" if item.holds else "DIFFERS"
    return {"verdict": verdict, "reason": "" if item.equal else item.reason}


def _list_items(row: Row) -> list[Row]:
    """All that was counted of a technique."""
    return [*row["ops"], *row["buffers"]]


def _count_verdicts(row: Row) -> Counter[str]:
    return Counter(item["verdict"] for item in _list_items(row))


def _list_blocks(row: Row, full: Row | None) -> list[Block]:
    """One technique's counts; ops that are full KV's are only named."""
    same = [] if row is full or full is None else [op for op in row["ops"] if op in full["ops"]]
    others = [op for op in row["ops"] if op not in same]
    blocks: list[Block] = [_op_table(others)]
    for phase in dict.fromkeys(op["phase"] for op in same):
        names = [op["op"] for op in same if op["phase"] == phase]
        blocks.append(f"{phase} as full: {', '.join(names)}")
    blocks.append(_buffer_table(row["buffers"]))
    for reason, about in _reasons([*others, *row["buffers"]]).items():
        blocks.append(f"explained: {', '.join(about)}: {reason}")
    return blocks


def _reasons(items: Sequence[Row]) -> dict[str, list[str]]:
    """What differs for a known reason, by its reason."""
    found: dict[str, dict[str, None]] = {}
    for item in items:
        if item["verdict"] == "explained":
            found.setdefault(item["reason"], {})[item.get("op") or item["buffer"]] = None
    return {reason: list(names) for reason, names in found.items()}


def _write_answer(rows: Sequence[Row]) -> Answer:
    """State whether real runs agree with predictions."""
    failed = [row["technique"] for row in rows if not row["passed"]]
    counts = sum(map(_count_verdicts, rows), Counter[str]())
    told = f"{len(rows) - len(failed)} of {len(rows)} techniques agree with their predictions"
    explained = counts["explained"]
    return Answer(
        verdict=paragraph(
            [
                f"{'No' if failed else 'Yes'}: {told}; {counts['equal']:,} of {counts.total():,} "
                f"counts of operations and buffers are exactly equal.",
                f"{explained:,} differ for the reasons below." if explained else "",
                f"These do not: {', '.join(failed[:3])}." if failed else "",
            ]
        ),
        figures={"techniques": len(rows), "failed": len(failed), "counts": counts.total()},
    )


def _summary_table(rows: Sequence[Row], labels: Sequence[str]) -> Table:
    """Counts, tokens and logits, which are compared with full KV's, a line per technique."""

    def write_counts(row: Row) -> str:
        counts = _count_verdicts(row)
        return ", ".join(f"{counts[v]} {v.removesuffix('S')}" for v in SHADES if counts[v])

    def write_seen(measured: Sequence[Row]) -> str:
        equal = sum(one["stated_bytes"] == one["measured_bytes"] for one in measured)
        return f"{equal}/{len(measured)}" if measured else DASH

    columns = [
        text_column("technique", "label"),
        text_column("exact", lambda row: "yes" if row["exact"] else "no", 1),
        text_column("counts", write_counts),
        text_column("", lambda row: "passed" if row["passed"] else "FAILED"),
        Column("tokens of full", "same_tokens", lambda share: f"{100 * share:.0f} %", 2),
        Column("logits off", "logit_difference", lambda x: DASH if x is None else f"{x:.1e}", 3),
        Column("bytes seen", "measured", write_seen, 4),
    ]
    named = [{**row, "label": label} for row, label in zip(rows, labels, strict=True)]
    return Table(columns, named)


def _with_predicted(items: Sequence[Row], *sizes: str) -> Iterator[Row]:
    """Rows as counted, and below each as predicted where that differs."""
    for item in items:
        yield item | {size: item[f"counted_{size}"] for size in sizes}
        if item["verdict"] != "equal":
            empty = dict.fromkeys(("phase", "tier", "verdict"), "")
            predicted = {size: item[f"predicted_{size}"] for size in sizes}
            yield {**empty, "op": "  predicted", "buffer": "  predicted", **predicted}


def _exact(value: float) -> str:
    return format_number(value, EXACT) if value else ""


def _op_table(ops: Sequence[Row], title: str = "") -> Table:
    """FLOP of ops, and bytes by channel where there are any."""
    rows = list(_with_predicted(ops, "flop", "bytes"))
    columns = [
        text_column("phase", "phase"),
        text_column("op", "op"),
        text_column("", "verdict"),
        Column("FLOP", "flop", _exact),
        *(
            Column(f"{channel.upper()} B", f"bytes.{channel}", _exact, 2)
            for channel in CHANNELS
            if any(row["bytes"][channel] for row in rows)
        ),
    ]
    return Table(columns, rows, title)


def _buffer_table(buffers: Sequence[Row], title: str = "") -> Table:
    """What buffers held, by phase and tier."""
    columns = [
        text_column("phase", "phase"),
        text_column("tier", "tier"),
        text_column("buffer", "buffer"),
        text_column("", "verdict"),
        Column("B", "bytes", lambda size: format_number(size, EXACT)),
    ]
    return Table(columns, list(_with_predicted(buffers, "bytes")), title)


def _measured_table(measured: Sequence[Row], title: str = "") -> Table:
    """Ops whose kernels were seen to move other bytes than the op names."""
    columns = [
        text_column("phase", "phase"),
        text_column("op", "op"),
        Column("named B", "stated_bytes", lambda size: f"{size:,}"),
        Column("measured B", "measured_bytes", lambda size: f"{size:,}"),
        Column("why", "reason"),
    ]
    differing = [one for one in measured if one["stated_bytes"] != one["measured_bytes"]]
    return Table(columns, differing, title)


def _draw_bars(rows: Sequence[Row], labels: Sequence[str]) -> Chart:
    title = "Counts of operations and buffers, compared with the prediction"
    height = 130 + 30 * len(rows)
    chart = Chart(title, "counts", height=height, yaxis=DOWNWARDS, barmode="stack")
    chart.figure.update_layout(legend_traceorder="normal")
    for verdict, (colour, pattern) in SHADES.items():
        look = {"color": colour, "pattern": {"shape": pattern}}
        counts = [_count_verdicts(row)[verdict] for row in rows]
        name = verdict.removesuffix("S").lower()
        chart.bars(name, counts, labels, look, hovertemplate="%{x} counts<extra></extra>")
    return chart


def make_trace_result(trace: AttentionTrace) -> Result[AttentionTrace]:
    """Make the result of ``kvsim validate quality``: quality, attention and acceptance of drafts.

    Parameters
    ----------
    trace
        The measurements on a text.
    """
    blocks: list[Block] = [
        Heading(f"{trace.model}, {trace.layers} layers: {trace.tokens:,} tokens read"),
        f"weights {trace.weights}",
        f"text {trace.text}",
        trace.settings,
        f"perplexity with full-precision KV {format_number(trace.perplexity)}",
    ]
    if trace.quality:
        heads = ["technique", "perplexity", "of full", "KL nat/token"]
        heads += ["facts found"] if trace.retrieval else []
        rows = [_loss(q, trace.perplexity)[: len(heads)] for q in trace.quality]
        blocks += [BLANK, cells_table(heads, rows)]
    if trace.retrieval:
        share, facts = _percent(trace.retrieval.found), trace.retrieval.facts
        blocks.append(f"Full-precision KV finds {share} of the {facts} facts planted in the text.")
    if trace.top_k:
        heads = ["pairs kept per query head", *map(str, trace.top_k.k)]
        blocks += [BLANK, cells_table(heads, _masses(trace.top_k))]
    if trace.prefetch:
        rows = [
            [f"k={p.k}, {p.bits}-bit keys", *_mean_and_least(p.pairs), *_mean_and_least(p.mass)]
            for p in trace.prefetch
        ]
        heads = ["prefetched by SpeCache", "of the oracle's pairs", "least layer"]
        blocks += [BLANK, cells_table([*heads, "of their mass", "least layer"], rows)]
    if trace.saliency:
        rows = []
        for s in trace.saliency:
            name = f"{_percent(s.salient)} salient, {_percent(s.probe)} probes"
            rows.append([name, *_mean_and_least(s.overlap)])
        heads = ["ZipCache", "of the truly salient found", "least layer"]
        blocks += [BLANK, cells_table(heads, rows)]
    for drafted in trace.acceptance:
        reached = (f"at least {place}" for place in GAMMAS)
        heads = ["gamma", "tokens per round", *reached]
        blocks += [BLANK, _drafts(drafted), cells_table(heads, _rounds(drafted), 0)]
    return Result(trace.model, Answer(""), record(trace), trace, blocks=blocks)


def _loss(found: Quality, full: float) -> list[str]:
    facts = "" if found.found is None else _percent(found.found)
    ratio = f"{format_number(found.perplexity / full)}x"
    numbers = [format_number(found.perplexity), ratio, format_number(found.kl, 2), facts]
    return [found.technique.replace(",", ", "), *numbers]


def _masses(top: TopK) -> list[list[str]]:
    both = [_mean_and_least(column) for column in zip(*top.mass, strict=True)]
    mean, least = zip(*both, strict=True)
    return [["mass, mean of layers", *mean], ["least layer", *least]]


def _drafts(found: Acceptance) -> str:
    how = f"drawn at temperature {found.temperature:g}" if found.temperature else "greedy"
    name = found.technique.replace(",", ", ")
    return f"{name}: {how}, {found.rounds} or more rounds each"


def _rounds(found: Acceptance) -> list[list[str]]:
    return [
        [str(gamma), f"{found.tokens(gamma):.2f}", *map(_percent, row)]
        + [""] * (len(GAMMAS) - gamma)
        for gamma, row in zip(GAMMAS, found.reached, strict=True)
    ]


def _mean_and_least(shares: tuple[float, ...]) -> list[str]:
    return [_percent(sum(shares) / len(shares)), _percent(min(shares))]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


@frozen
class Executed:
    """A run of an assignment of bits to layers, with its loss in each window of text."""

    bits: float
    widths: Widths  # (2, layers), indices
    measured: Array  # (windows,) [nat per token]

    @property
    def error(self) -> float:
        """Standard error of the mean loss. [nat per token]"""
        return float(self.measured.std(ddof=1) / np.sqrt(self.measured.size))


def _layer_fields(found: LayerLosses, plan: Executed | None) -> Row:
    """As ``--json`` has it."""
    each = found.alone.mean(axis=-1)
    row: Row = {
        "model": found.model,
        "text": found.text,
        "settings": found.settings,
        "bits": list(found.bits),
        "factor": found.growth[0],
        "power": found.growth[1],
        "kl_alone": {side: each[i].tolist() for i, side in enumerate(CACHE_SIDES)},
        "kl_uniform": found.uniform.mean(axis=-1).tolist(),
        "plan": None,
    }
    if plan is not None:
        mean, low, high = found.expected(plan.widths)
        row["plan"] = {
            "bits": plan.bits,
            "technique": found.notation(plan.widths),
            "kl_expected": mean,
            "kl_low": low,
            "kl_high": high,
            "kl_measured": float(plan.measured.mean()),
            "kl_error": plan.error,
        }
    return row


def make_layer_result(found: LayerLosses, plan: Executed | None) -> Result[LayerLosses]:
    """Make the result of ``kvsim validate layers``.

    Parameters
    ----------
    found
        Losses of quantising one layer at a time.
    plan
        A run of the assignment of bits to layers, if one was requested.
    """
    each = found.alone.mean(axis=-1)
    heads = [f"{side}, {bits} bits" for side in CACHE_SIDES for bits in found.bits]
    alone = each.reshape(-1, each.shape[-1]).T  # keys at every width, then values
    rows = [[str(layer), *(format_number(x, 2) for x in row)] for layer, row in enumerate(alone)]
    blocks: list[Block] = [
        Heading(f"{found.model}: KL divergence [nat per token] of each layer quantised alone"),
        found.settings,
        cells_table(("layer", *heads), rows, 0),
    ]
    sums = each.sum(axis=(0, 2))
    for b, bits in enumerate(found.bits):
        whole = found.uniform[b].mean()
        blocks.append(
            f"All layers at {bits} bits: {format_number(whole, 3)}, "
            f"{whole / sums[b]:.2f} of their sum."
        )
    if plan is not None:
        mean, low, high = found.expected(plan.widths)
        measured = float(plan.measured.mean())
        expected, low_end, high_end = (format_number(x, 3) for x in (mean, low, high))
        inside = "inside" if low <= measured <= high else "outside"
        blocks += [
            BLANK,
            f"At {plan.bits:g} bits on average: {found.notation(plan.widths)}",
            f"Expected {expected} ({low_end} to {high_end}), measured "
            f"{format_number(measured, 3)} \u00b1 {format_number(Z_95 * plan.error, 2)}: {inside} "
            f"the interval; all layers at {found.bits[0]} bits lose "
            f"{format_number(found.uniform[0].mean(), 3)}.",
        ]
    fields = _layer_fields(found, plan)
    return Result(found.model, Answer(""), fields, found, blocks=blocks)


MAX_ROUNDING_LOSS = 1e-3  # nat per token: rounding of sums in another order is below
MEASURED: dict[str, tuple[str, Callable[[float], str]]] = {
    "ttft_s": ("TTFT", seconds),
    "tpot_s": ("TPOT", seconds),
    "speedup": ("speed over full KV", times),
    "resident_B": ("resident [GiB]", gib),
}
"""What a run of a plan measures: its title, and how it is written."""


@frozen
class PlanRun:
    """A plan that was run.

    Attributes
    ----------
    plan
        The plan.
    title
        Model, weights, device and sizes in words.
    work
        The workload that was run.
    loss
        Measured quality loss; None if it was not measured.
    times
        Measured times and memory, beside the predictions.
    left_out
        What was not compared, with one reason each.
    """

    plan: PlanFile
    title: str
    work: RandomPrompts
    loss: MeasuredLoss | None
    times: Sequence[Measured]
    left_out: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool | None:
        """Whether the measured loss lies in the predicted interval; None if it has another unit."""
        if self.loss is None:
            return None
        if self.plan.technique.exact:
            return self.loss.divergence <= MAX_ROUNDING_LOSS
        if self.plan.unit != PERPLEXITY or self.plan.high is None:
            return None
        return self.loss.relative <= self.plan.high


def make_plan_result(found: PlanRun) -> Result[PlanRun]:
    """Make the result of ``kvsim validate plan``.

    Parameters
    ----------
    found
        The plan and the measurements of its run.
    """
    plan, loss, answer = found.plan, found.loss, write_answer(found)
    fields = {
        "answer": answer.row(),
        "technique": str(plan.technique),
        "model": plan.model,
        "title": found.title,
        **pick(found.work, "batch", "prompt", "generate"),
        "loss": {
            "evidence": plan.evidence,
            "unit": plan.unit,
            "expected": plan.loss,
            "low": plan.low,
            "high": plan.high,
            "measured_relative_perplexity": loss and number(loss.relative),
            "measured_kl_nat": loss and number(loss.divergence),
            "holds": found.holds,
        },
        "times": [pick(m, "name", "predicted", "measured", "noise") for m in found.times],
        "left_out": found.left_out,
    }
    rows = []
    for m in found.times:
        title, write = MEASURED[m.name]
        known = isfinite(m.predicted)
        predicted, off = (write(m.predicted), f"{100 * m.error:+.1f} %") if known else ("-", "-")
        rows.append([title, predicted, write(m.measured), off])
    if loss is not None:
        inside = plan.unit == PERPLEXITY and plan.loss is not None
        expected = "0 %" if plan.technique.exact else percent(plan.loss) if inside else "-"
        rows.append(["loss of perplexity", expected, percent(loss.relative), "-"])
        rows.append(["KL [nat/token]", "-", f"{loss.divergence:.2g}", "-"])
    table = cells_table(("", "predicted", "measured", "error"), rows)
    blocks = [Heading(found.title), *answer.head(), BLANK, table, *answer.body()]
    held = found.holds is not False
    shown = [table]
    return Result(found.title, answer, fields, found, tables=shown, blocks=blocks, passed=held)


def write_answer(found: PlanRun) -> Answer:
    """Write the verdict on a plan that was run.

    Parameters
    ----------
    found
        The plan and the measurements of its run.
    """
    told = {m.name: m for m in found.times}
    faster = told.get("speedup")
    sentences = [_describe_loss(found)]
    if faster is not None:
        known = isfinite(faster.predicted)
        beside = f"; the plan expects {times(faster.predicted)}" if known else ""
        sentences.append(f"It decodes {times(faster.measured)} as fast as full KV here{beside}.")
    return Answer(
        verdict=paragraph(sentences),
        figures={name: number(m.measured) for name, m in told.items()},
        left_out=found.left_out,
    )


def _describe_loss(found: PlanRun) -> str:
    name, loss = str(found.plan.technique), found.loss
    if loss is None:
        return f"{name} was run for its times; its loss was not measured."
    measured = f"{percent(loss.relative)} of perplexity"
    if found.plan.technique.exact:
        kept = "keeps" if found.holds else "does NOT keep"
        return f"{name} {kept} full KV's tokens: {loss.divergence:.2g} nat per token apart."
    if found.holds is None:
        return (
            f"{name} loses {measured}; the plan's evidence is another quantity "
            f"({found.plan.unit or 'none'}) and is not compared."
        )
    held = f"{'within' if found.holds else 'ABOVE'} the {percent(found.plan.high)}"
    return f"{name} loses {measured}, {held} that the plan allows for."
