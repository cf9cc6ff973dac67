"""``kvsim plan --trace``: its rows, what is compared, and the verdict."""

from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING

import numpy as np

from kvsim.emit.engines import emit
from kvsim.emit.served import serve_costs
from kvsim.machines.basis import basis
from kvsim.planner.alternatives import AS_GOOD, describe_gap
from kvsim.planner.replica import ATTAINED
from kvsim.planner.trace import Simulated, TracePlan
from kvsim.report import evidence, names, units
from kvsim.report.answer import Answer, verdict
from kvsim.report.json import Row, number
from kvsim.report.names import params, spec
from kvsim.report.plan import paste_blocks
from kvsim.report.result import Result
from kvsim.report.table import Table, quantity_column, text_column
from kvsim.report.terminal import BLANK, Heading
from kvsim.report.units import rounded

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

CURVES = 6  # entries whose distributions the page draws
CURVE_POINTS = 200  # of each


def make_result(
    plan: TracePlan, trace: str, command: str = "", engines: Sequence[Row] = ()
) -> Result[TracePlan]:
    """Make the answer of ``kvsim plan --trace``.

    Parameters
    ----------
    trace
        The trace as it was named.
    engines
        Settings of engines to paste, as ``--emit`` asks for them.
    """
    answer, own, deployment = write_answer(plan), plan_fields(plan), plan.choice.lanes[0].deployment
    fields = {"answer": answer.row(), **own} | ({"settings": list(engines)} if engines else {})
    heading, compared = names.describe_deployment(deployment), entries(own)
    requests, solver = own["simulated"]["requests"], own["solver"]
    shown, remarks = table(compared), _describe_figures(own)
    ground = evidence.describe_basis(own["basis"])
    return Result(
        command,
        f"{heading}: {trace}, best {plan.objective}",
        answer,
        fields,
        plan,
        rows=compared,
        tables=[shown],
        blocks=[
            Heading(heading),
            f"{trace}: {requests:,} requests, best {plan.objective} on one replica",
            *(BLANK, *answer.head(), shown, *answer.body(), *remarks, ground),
            f"Solver: of {solver['options']} settings the {solver['simulations']} most promising "
            f"were simulated on the whole trace",
            *paste_blocks(engines),
        ],
        draw=lambda: _draw(compared, plan),
        remarks=remarks,
        notes=remarks,
        data=evidence.newest_measurement([deployment]),
        foot=[ground],
    )


def plan_fields(result: TracePlan) -> Row:
    """Collect what ``--json`` has of a plan, but for the answer in words.

    Parameters
    ----------
    result
        Plan for a trace.

    Returns
    -------
    Row
        Fields under their contract names.
    """
    c, choice = result.classes, result.choice
    full = result.baseline
    return {
        "choice": _lanes(choice) | {"max_seqs": choice.max_seqs},
        "objective": result.objective,
        "simulated": choice.outcome.summary(),
        "baseline": _entry(full) if full else None,
        "alternatives": [_entry(s) for s in result.others],
        "limits": {k: number(v) for k, v in vars(result.limits).items()},
        "attained_by": ATTAINED,
        "classes": [
            {
                "prompt": float(c.prompt[i]),
                "generate": float(c.generate[i]),
                "request_per_s": float(c.per_s[i]),
                "lane": choice.lane_of_class[i],
            }
            for i in range(len(c))
        ],
        "solver": {
            "status": "optimal",
            "options": result.options,
            "simulations": result.simulations,
        },
        "basis": basis(choice.lanes[0].deployment),
    }


def _lanes(s: Simulated) -> Row:
    """One technique, or the one of each lane."""
    lanes: list[Row] = [{"technique": t.name, "params": params(t)} for t in s.techniques]
    load = {"estimated_load": s.estimate.load}
    return (lanes[0] if len(lanes) == 1 else {"lanes": lanes}) | load


def _entry(s: Simulated) -> Row:
    return _lanes(s) | {"max_seqs": s.max_seqs, "simulated": s.outcome.summary()}


def _names(entry: Row) -> str:
    return " + ".join(spec(lane) for lane in entry.get("lanes", [entry]))


def entries(answer: Row) -> list[Row]:
    """List the simulated choice and what it is compared with, each with its standing.

    Parameters
    ----------
    answer
        Fields of the plan.

    Returns
    -------
    list of Row
        Figures of each run.
    """
    choice = answer["choice"] | {"simulated": answer["simulated"]}
    shown = [("choice", choice)]
    for entry in answer["alternatives"]:
        shown.append(("full KV" if entry.get("technique") == "full" else "or", entry))
    return [
        entry["simulated"]
        | {"standing": label, "names": _names(entry), "max_seqs": entry["max_seqs"]}
        for label, entry in shown
    ]


def table(rows: Sequence[Row]) -> Table:
    """Make the table of the choice beside the others.

    Parameters
    ----------
    rows
        Rows as :func:`entries` returns them.

    Returns
    -------
    Table
        A line per run.
    """
    columns = [
        text_column("", "standing"),
        text_column("technique", lambda row: row["names"].partition(" ")[0]),
        quantity_column("ttft_s", part="p50"),
        quantity_column("ttft_s", 2, part="p90"),
        quantity_column("tpot_s", part="p50"),
        quantity_column("tpot_s", 3, part="p90"),
        quantity_column("output_tok_s", 4),
        quantity_column("goodput_per_s"),
        quantity_column("max_seqs", 1),
    ]
    return Table(
        columns,
        rows,
        below=lambda row: row["names"].partition(" ")[2],
        marked=lambda row: row["standing"] == "choice",
    )


def _describe_figures(answer: Row) -> list[str]:
    """What the figures are, how much load is left, and who serves which requests."""
    lines = [
        "All figures are simulated. Goodput: finished requests per second within the targets; "
        "max seqs: the engine's limit on sequences in a batch (--max-seqs)."
    ]
    choice = answer["choice"]
    if answer["simulated"]["refused"]:
        lines.append(f"{answer['simulated']['refused']} requests are larger than the KV cache.")
    for i, lane in enumerate(choice.get("lanes", [])):
        served = [c for c in answer["classes"] if c["lane"] == i]
        told = ", ".join(f"{c['prompt']:.0f}+{c['generate']:.0f}" for c in served)
        lines.append(f"{lane['technique']} serves requests of about {told} tokens.")
    return lines


def _draw(rows: Sequence[Row], plan: TracePlan) -> "list[tuple[str, Figure]]":
    """The distributions of the first entries, full KV among them."""
    ranked = sorted(range(len(rows)), key=lambda i: i > 0 and rows[i]["standing"] != "full KV")
    simulated = [plan.choice, *plan.others]
    drawn = {rows[i]["names"]: simulated[i] for i in sorted(ranked[:CURVES])}
    return [
        ("Time to first token", _curves(drawn, "ttft_s", plan.limits.ttft)),
        ("Time per token", _curves(drawn, "tpot_s", plan.limits.tpot)),
        ("Whole request", _curves(drawn, "latency_s", np.inf)),
    ]


def _curves(shown: dict[str, Simulated], name: str, limit: float) -> "Figure":
    """Share of requests within a time, one line per entry."""
    from plotly.graph_objects import Figure

    from kvsim.report.charts import LOG, finish_figure
    from kvsim.report.colours import mark

    figure = Figure()
    share = np.linspace(0, 1, CURVE_POINTS)
    for label, s in shown.items():
        values = getattr(s.outcome, name)
        known = values[np.isfinite(values)]
        if known.size:
            x, look = 1e3 * np.quantile(known, share), mark(label)
            line = {"color": look.colour, "dash": look.dash}
            label = label.partition(" ")[0]
            figure.add_scatter(x=x, y=100 * share, mode="lines", name=label, line=line)
    if np.isfinite(limit):
        line, label = {"dash": "dot", "color": "#888888"}, f"target {units.seconds(limit)}"
        figure.add_scatter(x=[1e3 * limit] * 2, y=[0, 100], mode="lines", name=label, line=line)
    return finish_figure(figure, 360, "ms", "% of requests", xaxis=LOG)


def write_answer(result: TracePlan) -> Answer:
    """Write the answer of ``kvsim plan --trace``.

    Parameters
    ----------
    result
        Plan for a trace.

    Returns
    -------
    Answer
        Verdict and what follows it.
    """
    s, full = result.choice, result.baseline
    d, o = s.lanes[0].deployment, s.outcome.summary()
    names = " and ".join(t.name if t.name != "full" else "full KV" for t in s.techniques)
    times = ", ".join(
        f"{key[:4].upper()} p90 {units.seconds(o[key]['p90'])}"  # type: ignore[index]
        for key in ("ttft_s", "tpot_s")
    )
    good = f"{units.percent(o['good_share'])} of requests {_name_targets(result)}"  # type: ignore[arg-type]
    gpus = f"{d.gpus} x " if d.gpus > 1 else ""
    needed = [
        f"Run {names} on one replica of {gpus}{d.hardware.name}, --max-num-seqs {s.max_seqs}: "
        f"{times}, {units.rate(o['output_tok_s'])} output tok/s, {good}."  # type: ignore[arg-type]
    ]
    if full is not None and full is not s:
        base = full.outcome.summary()
        good = units.percent(base["good_share"])  # type: ignore[arg-type]
        needed.append(f"With full KV, {good} of them are.")
    others = [other for other in result.others if other is not s]
    return Answer(
        verdict=verdict(needed, [_load(result), "Figures are simulated on the whole trace."]),
        figures={"technique": " + ".join(map(str, s.techniques)), "max_seqs": s.max_seqs}
        | {key: o[key] for key in ("ttft_s", "tpot_s", "output_tok_s", "goodput_per_s")},
        runner_up=_runner_up(result, others[0]) if others else "",
        settings=_settings(result),
        evidence=[
            *evidence.list_measurements(d, s.techniques[0].name),
            *evidence.describe_parallelism(d),
        ],
        assumed=evidence.list_assumptions_of_techniques(d, s.techniques),
    )


def _load(result: TracePlan) -> str:
    """How much of such load one replica carries, by the estimate that ranks throughput."""
    load = result.choice.estimate.load
    if result.objective == "latency" or not load > 0:
        return ""
    share = f"{100 / load:.0f} % of" if load > 1 else f"{rounded(1 / load, 2)} times"
    return f"By estimate, it carries about {share} this trace's load."


def _name_targets(result: TracePlan) -> str:
    """What a share of the requests does."""
    limits = result.limits
    some = [("TTFT", limits.ttft), ("TPOT", limits.tpot)]
    said = [f"{name} {units.seconds(value)}" for name, value in some if np.isfinite(value)]
    return f"within {' and '.join(said)}" if said else "finish"


def _settings(result: TracePlan) -> list[str]:
    """vLLM's command where one lane runs what it has a setting for."""
    s = result.choice
    share = result.limits.gpu_memory / s.lanes[0].deployment.hardware.gpu_memory
    found = emit("vllm", serve_costs(s.lanes[0], share))
    return [f"vLLM: {found.line}"] if len(s.lanes) == 1 and not found.missing else []


def _runner_up(result: TracePlan, s: Simulated) -> str:
    """What comes second, and why it is not the choice."""
    o, choice, objective = s.outcome.summary(), result.choice, result.objective
    names = " and ".join(map(str, s.techniques))
    good = units.percent(o["good_share"])  # type: ignore[arg-type]
    mine, value = (x.measures()[objective] for x in (choice, s))
    behind = value / mine - 1 if mine and isfinite(value) else 0.0
    if behind >= AS_GOOD:
        why = describe_gap(objective, behind)
    elif choice.exact and not s.exact:
        why = "is no better by more than the known error, and loses quality"
    else:
        why = "is no better by more than the known error, and less simple"
    targets = _name_targets(result)
    return f"{names} at --max-seqs {s.max_seqs}: {good} of requests {targets}; {why}."
