"""Charts of predictions: speed, one decoding round, roofline, memory and break-even points."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from kvsim.engine.roofline import all_ops, seconds
from kvsim.engine.timeline import OpSpan, op_spans
from kvsim.graph import Point
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import GIB
from kvsim.prediction.breakeven import AXIS_TITLES, BreakEven, break_evens
from kvsim.prediction.generate import Prediction, round_seconds
from kvsim.prediction.memory import decode_point
from kvsim.prediction.service import Service
from kvsim.report import units
from kvsim.report.colours import PALETTE, bar_style, mark
from kvsim.report.json import Row
from kvsim.report.names import distinct_names, short_names, spec, technique_fields
from kvsim.report.pictures import DASHES, DOWNWARDS, GREY, RED, Chart
from kvsim.report.units import QUANTITIES, comparison_key
from kvsim.techniques.papers.full import Full
from kvsim.techniques.technique import Technique, compose

STREAM_TITLES = {
    "gpu": "GPU",
    "h2d": "host to GPU",
    "d2h": "GPU to host",
    "cpu": "CPU",
    "disk_read": "disk to host",
    "disk_write": "host to disk",
}
TRIED_ROUNDS = 33  # of a generation, to find a typical one
MAX_DRAWN_OPS, MAX_OUTLINED_OPS = 400, 120  # ops of a step that are drawn; that are outlined boldly
ROOF_MARGIN = 4.0  # a roof's ends from the ops' intensities and from its ridge, as a factor
ONE_SPOT = 0.1  # relative distance of ops that a roofline does not tell apart
MAX_DRAWN_ROWS = 8  # of a picture of memory
MAX_COMPARED = 5  # techniques compared
BREAK_EVENS = {
    "prompt": "Break-even by context",
    "batch": "Break-even by batch",
    "acceptance": "Break-even by acceptance",
    "link": "Break-even by speed of the host link",
}
AMOUNTS = {
    "prompt": units.integer,
    "batch": units.integer,
    "acceptance": lambda share: f"{share:.2f}",
    "link": units.times,
}


def draw_predictions(rows: Sequence[Row], found: Sequence[Prediction]) -> list[Chart]:
    """Draw the charts of ``kvsim predict``.

    Parameters
    ----------
    rows
        The row of each prediction.
    found
        The predictions, in the same order.
    """
    at = max(range(len(rows)), key=lambda i: (rows[i]["fits"], rows[i][comparison_key(rows[i])]))
    name = f"{rows[at]['technique']}, batch {rows[at]['batch']:,}"
    pictures = [_draw_speed(rows)] if len(rows) > 1 else []
    pictures += [*draw_round(found[at], name), *draw_memory(rows, found[at].deployment)]
    full = next((p.technique for p in found if p.technique.name == "full"), None)
    if full is None and any(p.technique.drafts for p in found):
        full = compose(Full())  # where drafts turn into a loss is asked of them alone
    if full is not None:
        first = {str(p.technique): p for p in reversed(found)}
        pictures += draw_break_evens(list(first.values())[::-1], full)
    return pictures


def draw_round(prediction: Prediction, name: str) -> list[Chart]:
    """Draw the timeline and the roofline of one decoding round.

    Parameters
    ----------
    prediction
        A prediction for one batch.
    name
        Name of the technique in the titles.

    Returns
    -------
    list of Chart
        Two charts; none if only one token is generated.
    """
    if prediction.generate == 1:
        return []
    return [_draw_lanes(prediction, name), _draw_roofline(prediction, name)]


def draw_memory(rows: Sequence[Row], deployment: Deployment) -> list[Chart]:
    """Draw memory use by buffer against capacity, with a chart for each memory that is used.

    Parameters
    ----------
    rows
        Rows of predictions, which have a ``breakdown``.
    deployment
        The deployment, for the capacities.
    """
    behind = [t for t in ("host", "disk") if any(row.get(f"{t}_bytes") for row in rows)]
    tiers = ["gpu", *behind]
    return [_draw_tier(rows, deployment, tier) for tier in tiers]


def _draw_speed(rows: Sequence[Row]) -> Chart:
    """Draw throughput against TPOT (or TTFT) for the rows that fit in memory."""
    labels = short_names([spec(row) for row in rows])
    time = "tpot_s" if any(row["tpot_s"] for row in rows) else "ttft_s"
    rate = comparison_key(max(rows, key=lambda row: int(row["generate"])))
    across, up = (QUANTITIES[key].heading for key in (time, rate))
    title = "Speed and latency of every point"
    if _has_several(rows, "prompt", "batch"):
        title += ", a line for each prompt"
    chart = Chart(title, f"{across} [ms]", up, 420, log="xy")
    hover = "%{text}<br>%{x:.3g} ms, %{y:.4g} tok/s"
    for text, name in labels.items():
        some = [r for r in rows if spec(r) == text and r["fits"] and r[time] and r[rate]]
        points = _by_prompt(some)
        x, y = [r and 1e3 * r[time] for r in points], [r and r[rate] for r in points]
        said = "batch {batch}, prompt {prompt}<br>{bound_by}"
        told = [r and said.format(**r) for r in points]
        chart.line(name, x, y, mark(name), text=told, hovertemplate=hover)
    return chart


def _by_prompt(rows: Sequence[Row]) -> list[Row | None]:
    """Insert a gap where the prompt changes, so that lines connect batches of one prompt."""
    if not _has_several(rows, "prompt", "batch"):
        return [*rows]
    points: list[Row | None] = []
    for row in rows:
        if points and points[-1] is not None and points[-1]["prompt"] != row["prompt"]:
            points.append(None)
        points.append(row)
    return points


def _has_several(rows: Sequence[Row], *keys: str) -> bool:
    """Whether rows differ in each of some quantities."""
    return all(len({row[key] for row in rows}) > 1 for key in keys)


def _typical_round(prediction: Prediction) -> Point:
    """Find the round whose time per token is nearest to the mean of all."""
    batch, generate = float(prediction.batch[0]), prediction.generate
    tokens = np.unique(np.linspace(0, generate - 2, TRIED_ROUNDS).round())
    p = decode_point(batch, prediction.prompt, generate, tokens[None, :])
    took = np.broadcast_to(
        round_seconds(prediction.technique, prediction.deployment, p), (1, tokens.size)
    )
    mean = float(prediction.decode_s[0] - prediction.between_s[0]) / (generate - 1)
    chosen = float(tokens[np.argmin(np.abs(took[0] - mean))])
    return decode_point(batch, prediction.prompt, generate, chosen)


def _round_spans(prediction: Prediction) -> tuple[list[OpSpan], float, float]:
    """Schedule the ops of a typical decoding round."""
    d = prediction.deployment
    cycle = prediction.technique.cycle(d, _typical_round(prediction))
    found: list[OpSpan] = []
    start = 0.0
    for step in cycle.steps:
        here = op_spans(step, d)
        start -= min(min(span.begin for span in here), 0.0)
        found += [OpSpan(s.stream, s.name, start + s.begin, start + s.end) for s in here]
        start += max(span.end for span in here)
    return found, start, float(cycle.tokens)


def _critical(found: Sequence[OpSpan]) -> list[OpSpan]:
    """Trace the chain of ops that decides when the round ends, back from its end."""
    last = max(found, key=lambda span: span.end)
    chain = [last]
    while True:
        before = [s for s in found if s.end <= chain[-1].begin + 1e-12 and s is not chain[-1]]
        if not before:
            return chain[::-1]
        chain.append(max(before, key=lambda span: span.end))


def _time_outside_rounds(prediction: Prediction) -> tuple[str, float]:
    """Name what TPOT contains besides decoding rounds, and its time per token. [s]"""
    if isinstance(prediction, Service):
        return "others' prompts", float(prediction.tpot_s[0] - prediction.round_s[0])
    once = float(prediction.between_s[0]) / (prediction.generate - 1)
    return "what follows the prompt once", once


def _draw_lanes(prediction: Prediction, name: str) -> Chart:
    """Draw the operations of a round, a lane per stream, or their sums if there is one stream."""
    found, total, tokens = _round_spans(prediction)
    path = {(s.stream, s.name, s.begin) for s in _critical(found)}
    more, waits = _time_outside_rounds(prediction)
    several = f" for {tokens:.2f} tokens" if tokens != 1 else ""
    others = f" with its share of {more}" if waits else ""
    told, drawn = units.seconds(total + waits * tokens), "critical path outlined"
    cost: dict[str, float] = {}
    for s in found:
        cost[s.name] = cost.get(s.name, 0.0) + s.end - s.begin
    names = sorted(cost, key=lambda name: -cost[name])
    if len({span.stream for span in found}) == 1:
        drawn = "summed by op"
        found = _sum_by_op(found[0], {name: cost[name] for name in names}, total)
        cost = {s.name: s.end - s.begin for s in found}
        path, names = set(), list(cost)
    title = f"One decoding round of {name}{others}: {told}{several}, {drawn}"
    height = 190 + 50 * len({s.stream for s in found})
    chart = Chart(title, "ms", height=height, yaxis=DOWNWARDS, barmode="overlay", bargap=0.3)
    shown = found[:MAX_DRAWN_OPS]
    thick = 1.5 if len(shown) <= MAX_OUTLINED_OPS else 0.4
    if waits:
        look = {"color": GREY, "pattern": {"shape": "."}}
        hover = f"%{{x:.4g}} ms on average: {more}"
        lane, begin, lasts = [STREAM_TITLES["gpu"]], [1e3 * total], [1e3 * waits * tokens]
        chart.bars(more, lasts, lane, look, base=begin, hovertemplate=hover)
    for i, op in enumerate(names):
        bars = [s for s in shown if s.name == op]
        widths = [thick if (s.stream, s.name, s.begin) in path else 0 for s in bars]
        if bars:
            chart.bars(
                op,
                [1e3 * (s.end - s.begin) for s in bars],
                [STREAM_TITLES.get(s.stream, s.stream) for s in bars],
                {**bar_style(i), "line": {"color": GREY, "width": widths}},
                base=[1e3 * s.begin for s in bars],
                customdata=[[1e3 * cost[op], 100 * cost[op] / total]] * len(bars),
                hovertemplate="%{x:.4g} ms from %{base:.4g} ms<br>all of it %{customdata[0]:.4g} "
                "ms, %{customdata[1]:.3g} % of the round",
            )
    return chart


def _sum_by_op(first: OpSpan, cost: Mapping[str, float], total: float) -> list[OpSpan]:
    """Sum the operations by name, longest first, and append the idle time."""
    idle = total - sum(cost.values())
    spans, begin = [], 0.0
    for name, took in [*cost.items(), *([("idle", idle)] if idle > 1e-3 * total else [])]:
        spans.append(replace(first, name=name, begin=begin, end=begin + took))
        begin += took
    return spans


def _draw_roofline(prediction: Prediction, name: str) -> Chart:
    """Draw the operations of a round under the bandwidth and arithmetic limits of the GPU."""
    d = prediction.deployment
    work: dict[str, np.ndarray] = {}
    for step in prediction.technique.cycle(d, _typical_round(prediction)).steps:
        for op, count in all_ops(step):
            took, flops = (float(np.ravel(v)[0]) for v in (seconds(op, d), op.flops))
            moved = float(np.ravel(op.bytes.get("hbm", 0.0))[0])
            if op.stream == "gpu" and took > 0 and flops > 0 and moved > 0:
                total = work.setdefault(op.name, np.zeros(3))
                total += count * np.array([flops, moved, took])
    peak, band = d.flops("fp16"), d.bandwidth["hbm"]
    ridge = peak / band
    ends = [ridge, *(w[0] / w[1] for w in work.values())]
    low, high = min(ends) / ROOF_MARGIN, max(ends) * ROOF_MARGIN
    title = f"Roofline of its operations ({name})"
    chart = Chart(title, "FLOP per byte of GPU memory", "FLOP/s", 420, log="xy")
    roof = [low * band, peak, peak]
    chart.line("the card's roof", [low, ridge, high], roof, hoverinfo="skip")
    for i, (names, (flops, moved, took)) in enumerate(_merge_near(work)):
        op_name = ", ".join(names)
        chart.dots(
            op_name,
            [flops / moved],
            [flops / took],
            {"color": PALETTE[i % len(PALETTE)], "symbol": i % 40, "size": 11},
            hovertemplate=f"{op_name}<br>{units.format_number(flops / 1e9, 3)} GFLOP, "
            f"{units.size(moved)}, {units.seconds(took)}<br>"
            f"{units.percent(moved / took / band)} of the bandwidth, "
            f"{units.percent(flops / took / peak)} of the arithmetic<extra></extra>",
        )
    return chart


def _merge_near(work: Mapping[str, np.ndarray]) -> list[tuple[list[str], np.ndarray]]:
    """Merge operations whose points in the roofline would coincide."""
    merged: list[tuple[list[str], np.ndarray]] = []
    for name, own in work.items():
        place = np.log([own[0] / own[1], own[0] / own[2]])
        for i, (names, sums) in enumerate(merged):
            there = np.log([sums[0] / sums[1], sums[0] / sums[2]])
            if np.all(np.abs(place - there) < ONE_SPOT):
                merged[i] = ([*names, name], sums + own)
                break
        else:
            merged.append(([name], own))
    return merged


def _draw_tier(rows: Sequence[Row], deployment: Deployment, tier: str) -> Chart:
    """Draw the buffers of one memory, a bar per technique, with its capacity."""
    some = [row for row in _select_rows(rows) if row[f"{tier}_bytes"]]
    names = short_names([spec(row) for row in some])
    labels = [f"{names[spec(r)]}, {r['batch']:,} x {r['prompt']:,}" for r in some]
    what = {"gpu": "GPU memory", "host": "Host memory", "disk": "Disk"}[tier]
    title = f"{what} by buffer, against what there is"
    chart = Chart(title, "GiB", height=170 + 44 * len(some), yaxis=DOWNWARDS, barmode="stack")
    chart.figure.update_layout(legend_traceorder="normal")
    for i, name in enumerate(dict.fromkeys(n for r in some for n in _buffers_of_tier(r, tier))):
        held = [_buffers_of_tier(r, tier).get(name, 0.0) / GIB for r in some]
        chart.bars(name, held, labels, bar_style(i), hovertemplate="%{x:.3f} GiB")
    most = float(getattr(deployment.hardware, f"{tier}_memory"))
    tick = {"symbol": "line-ns-open", "size": 18, "color": RED, "line": {"width": 3}}
    return chart.dots("capacity", [most / GIB] * len(some), labels, tick)


def _buffers_of_tier(row: Row, tier: str) -> Mapping[str, float]:
    """Return buffer sizes of a replica; host buffers are shared by its GPUs. [B]"""
    scale = 1 if tier == "gpu" else row["tp"]
    held = row["breakdown"].get(f"{tier}_bytes", {})
    return {name: scale * size for name, size in held.items()}


def _select_rows(rows: Sequence[Row]) -> list[Row]:
    """Select the first row of each technique, at most ``MAX_DRAWN_ROWS``."""
    first = {spec(row): row for row in reversed(rows)}
    chosen = list(first.values())[::-1] if len(first) > 1 else list(rows)
    return chosen[:MAX_DRAWN_ROWS]


def draw_break_evens(found: Sequence[Prediction], full: Technique) -> list[Chart]:
    """Draw decoding speed relative to the full cache, against batch, context, acceptance and link.

    Parameters
    ----------
    found
        Predictions; those of the full cache, or of one generated token, are skipped.
    full
        The full cache.
    """
    others = [p for p in found if p.technique.name != "full" and p.generate > 1][:MAX_COMPARED]
    rows = [technique_fields(p.technique) for p in others]
    lines = [
        (name, p.technique.name, list(break_evens(p, full)))
        for name, p in zip(distinct_names(rows), others, strict=True)
    ]
    drawn = []
    for axis, title in BREAK_EVENS.items():
        here = [(n, t, b) for n, t, every in lines for b in every if b.axis == axis]
        if here:
            told = _break_even_title(title, axis, others[0], here)
            drawn.append(_draw_break_even(told, axis, here))
    return drawn


def _break_even_title(
    title: str, axis: str, prediction: Prediction, lines: Sequence[tuple[str, str, BreakEven]]
) -> str:
    """Write a chart's title: the fixed inputs, and where each technique breaks even."""
    point = {"batch": float(prediction.batch[0]), "prompt": float(prediction.prompt)}
    stays = ", ".join(f"{k} {units.integer(v)}" for k, v in point.items() if k != axis)
    told = [
        f"{name} at {' and '.join(map(AMOUNTS[axis], found.crossings))}"
        for name, _, found in lines
        if found.crossings
    ]
    where = "; ".join(told) or "none within these bounds"
    return f"{title} ({stays}): {where}"


def _draw_break_even(title: str, axis: str, lines: Sequence[tuple[str, str, BreakEven]]) -> Chart:
    log, up = "" if axis == "acceptance" else "x", "decode tok/s, full KV = 1"
    chart = Chart(title, AXIS_TITLES[axis], up, 360, log=log, yaxis={"rangemode": "tozero"})
    for i, (name, technique, found) in enumerate(lines):
        look = mark(technique)
        again = [other for _, other, _ in lines[:i]].count(technique)
        dash = {"color": look.colour, "dash": DASHES[again % 3], "width": 1.5}
        hover = f"{name}<br>%{{x:,.4g}}: %{{y:.3g}} x full KV<extra></extra>"
        chart.line(name, found.values, found.ratio, look, line=dash, hovertemplate=hover)
    known = np.concatenate([found.values[np.isfinite(found.ratio)] for _, _, found in lines])
    line = {"color": GREY, "width": 1.5, "dash": "dot"}
    return chart.line("full KV", [known.min(), known.max()], [1, 1], line=line, hoverinfo="skip")
