"""``kvsim plan`` for equal requests: its answer as rows, on the terminal, and as a page."""

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvsim.machines.basis import basis
from kvsim.machines.hardware import GIB
from kvsim.planner.advice import Advice, NoPlanError
from kvsim.planner.outlook import LABELS
from kvsim.planner.plan import Plan
from kvsim.prediction.generate import Prediction
from kvsim.quality.evidence import Evidence
from kvsim.report import page
from kvsim.report.answer import Answer, show_rest, show_verdict
from kvsim.report.grounds import NOT_MODELLED, grounds, noted
from kvsim.report.json import Row, number
from kvsim.report.names import params, settings, spec
from kvsim.report.plan_answer import answered, unanswered
from kvsim.report.predict import prediction
from kvsim.report.quantities import legend
from kvsim.report.screen import Screen
from kvsim.report.table import Column, Table, of, words
from kvsim.report.units import times

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


def plan(result: Plan) -> Row:
    """The answer of ``kvsim plan``."""
    chosen, q = prediction(result.choice), result.question
    spec = {"technique": chosen["technique"], "params": chosen["params"]}
    layers = [{**spec, "first": 0, "count": result.choice.deployment.model.layers}]
    solver, waves = result.solver, result.waves
    return {
        "answer": answered(result, chosen["bound_by"]).row(),
        "choice": {**spec, "batch": chosen["batch"], "layers": layers},
        "objective": result.objective,
        "service": q.workload.service,
        "predicted": chosen,
        "quality": quality(result.evidence),
        "baseline": prediction(result.baseline) if result.baseline else None,
        "alternatives": [
            {
                **prediction(a.prediction),
                "lossless": a.prediction.technique.exact,
                "allowed": a.allowed,
                "needs": list(a.needs),
                "quality": quality(a.evidence),
                "reason": a.reason,
            }
            for a in result.alternatives
        ],
        "knees": [{"given_up": k.given_up, **_brief(k.prediction)} for k in result.knees],
        "waves": waves
        and {
            "count": waves.count,
            **_brief(waves.prediction),
            "output_tok_s": number(waves.output_tok_s),
        },
        "limits": {k: number(v) for k, v in vars(result.limits).items()},
        "binding": [
            {
                "limit": b.limit,
                "means": LABELS[b.limit],
                "gain_without": number(b.gain_without),
                "technique": b.technique,
            }
            for b in result.binding
        ],
        "prices": result.prices,
        "advice": [advice(a) for a in result.advice],
        "others": [_brief(p) for p in result.others],
        "solver": {
            "options": solver.options,
            "seconds": solver.seconds,
            "optimum": _brief(solver.optimum),
            "given_up": solver.given_up,
        },
        "basis": basis(result.choice.deployment),
        "not_modelled": list(NOT_MODELLED),
    }


def no_plan(none: NoPlanError) -> Row:
    """What ``kvsim plan`` says where nothing is within the limits."""
    return {
        "answer": unanswered(none).row(),
        "choice": None,
        "reason": str(none),
        "relaxations": {k: number(v) for k, v in none.relaxations.items()},
        "advice": [advice(a) for a in none.advice],
    }


def quality(found: Evidence) -> Row:
    """What is known of a setting's loss."""
    return {
        "evidence": found.kind,
        "loss": number(found.loss),
        "low": number(found.low),
        "high": number(found.high),
        "unit": found.unit,
        "worst": found.worst,
        "source": found.source,
        "missing": found.missing,
        "words": str(found),
    }


def advice(a: Advice) -> Row:
    """A change of the question, and what it would bring."""
    return {
        "option": a.option,
        "what": a.what,
        "gain": number(a.gain),
        "caution": a.caution,
        "words": str(a),
        "predicted": a.prediction and _brief(a.prediction),
    }


def _brief(p: Prediction) -> Row:
    """The figures of a prediction that a comparison needs."""
    d = p.deployment
    return {
        "gpu": d.hardware.name,
        "tp": d.tp,
        "weights": d.weights,
        "technique": p.technique.name,
        "params": params(p.technique),
        "batch": number(p.batch),
        "prompt": p.prompt,
        "ttft_s": number(p.ttft_s),
        "tpot_s": number(p.tpot_s),
        "output_tok_s": number(p.output_tok_s),
        "usd_per_million_tokens": number(p.usd_per_million()),
        "gpu_bytes": number(p.gpu_bytes),
        "host_bytes": number(p.host_bytes),
    }


def entries(answer: Row) -> list[tuple[str, Row]]:
    """What ``kvsim plan`` shows side by side, each with its standing; none of it twice."""
    chosen, base = answer["predicted"], answer["baseline"]
    shown = [("choice", chosen)]
    if base and base["technique"] != chosen["technique"]:
        shown.append(("full KV", base))
    for row in answer["alternatives"]:
        if base is None or spec(row) != spec(base) or row["batch"] != base["batch"]:
            shown.append((f"needs {' '.join(row['needs'])}" if row["needs"] else "or", row))
    return shown


def table(answer: Row) -> Table:
    """The choice and what it is compared with."""
    base = answer["baseline"]
    rows = [
        row | {
            "standing": standing,
            "vs_full": row["output_tok_s"] / base["output_tok_s"] if base else None,
        }
        for standing, row in entries(answer)
    ]  # fmt: skip
    columns = [
        words("", lambda row: row["standing"]),
        words("technique", lambda row: row["technique"]),
        of("batch", 1),
        of("ttft_s"),
        of("tpot_s"),
        of("output_tok_s"),
        Column("vs full", lambda row: times(row["vs_full"]), lambda row: row["vs_full"], rank=2),
        of("gpu_bytes", 3),
        of("host_bytes", 4),
    ]
    return Table(columns, rows, below=settings, marked=lambda row: row["standing"] == "choice")


def show(heading: str, answer: Row) -> None:
    """The verdict, what was compared, and what follows."""
    out, said = Screen(), Answer(**answer["answer"])
    chosen, base = answer["predicted"], answer["baseline"]
    out.title(
        f"{heading}, prompt {chosen['prompt']:,}, generate {chosen['generate']:,}, best "
        f"{answer['objective']}"
    )
    show_verdict(out, said)
    out.table(table(answer))
    out.say(legend(["output_tok_s"]))
    if not base:
        out.say("Full KV does not fit on this GPU at any batch.")
    out.blank()
    show_rest(out, said)
    for line in noted([(row["technique"], row) for _, row in entries(answer)]):
        out.say(line)
    out.say(grounds(chosen["basis"]))
    out.say(f"Not modelled: {'; '.join(answer['not_modelled'])}.")
    solver = answer["solver"]
    out.say(f"Compared {solver['options']:,} options in {solver['seconds']:.2f} s.")


def write_page(path: Path, heading: str, answer: Row, result: Plan) -> None:
    """The page of ``kvsim plan``."""
    from plotly.io import to_html

    shown = entries(answer)
    bars = [(label if i == 0 else row["technique"], row) for i, (label, row) in enumerate(shown)]
    sections = [
        ("Every option", _frontier(result)),
        ("GPU memory", _bars(bars, "gpu_bytes", GIB, "GiB")),
        ("Work in one decoding round, overlapped or not", _bars(bars, "round_s", 1e-3, "ms")),
    ]
    said = Answer(**answer["answer"])
    rest = f"{escape(grounds(answer['basis']))}<br>Not modelled: "
    rest += escape("; ".join(answer["not_modelled"]))
    parts = [
        f"<h1>{escape(heading)}</h1>",
        said.html(),
        page.table(table(answer)),
        f'<p class="basis">{rest}.</p>',
    ]
    for i, (title, figure) in enumerate(sections):
        chart = to_html(figure, full_html=False, include_plotlyjs="inline" if i == 0 else False)
        parts.append(f"<h2>{escape(title)}</h2>{chart}")
    page.write(path, "kvsim plan", "\n".join(parts))


def _frontier(result: Plan) -> "Figure":
    """Throughput over TPOT of every option that fits, the choice marked."""
    from plotly import graph_objects as go

    table, limits = result.table, result.limits
    columns = table.columns
    fits = (columns["gpu_memory"] <= limits.gpu_memory) & (
        columns["host_memory"] <= limits.host_memory
    )
    figure = go.Figure()
    for name in dict.fromkeys(t.name for t in table.technique):
        rows = table.rows_of(name)
        rows = rows[fits[rows]]
        if not rows.size:
            continue
        labels = [f"{table.technique[i]}<br>batch {table.batch[i]:.0f}" for i in rows]
        figure.add_scatter(
            x=1e3 * columns["tpot"][rows], y=-columns["throughput"][rows], mode="markers",
            name=name, text=labels, marker={"size": 5, "opacity": 0.6},
            hovertemplate="%{text}<br>%{x:.1f} ms, %{y:.1f} tok/s<extra></extra>",
        )  # fmt: skip
    figure.add_scatter(
        x=1e3 * result.choice.tpot_s, y=result.choice.output_tok_s, mode="markers", name="choice",
        marker={"size": 16, "symbol": "star", "color": "black"},
    )  # fmt: skip
    if np.isfinite(limits.tpot):
        shown = -columns["throughput"][fits]
        page.mark_limit(figure, 1e3 * limits.tpot, [shown.min(), shown.max()], "TPOT limit")
    figure.update_xaxes(title="TPOT [ms]", type="log")
    figure.update_yaxes(title="generated tokens per second, prefill included", type="log")
    figure.update_layout(template="plotly_white", height=520)
    return figure


def _bars(shown: list[tuple[str, Row]], part: str, unit: float, label: str) -> "Figure":
    """Stacked bars of one part of the breakdown, one bar per entry."""
    from plotly import graph_objects as go

    names = dict.fromkeys(n for _, row in shown for n in row["breakdown"][part])
    figure = go.Figure()
    for name in names:
        values = [row["breakdown"][part].get(name, 0) / unit for _, row in shown]
        figure.add_bar(x=[label for label, _ in shown], y=values, name=name)
    figure.update_layout(barmode="stack", template="plotly_white", height=420)
    figure.update_yaxes(title=label)
    return figure
