"""The answer of ``kvsim plan --trace``: rows for JSON, a table, and a page."""

from math import isfinite
from typing import TYPE_CHECKING

import numpy as np

from kvsim.emit.engines import emit
from kvsim.emit.served import serve_costs
from kvsim.frozen import frozen
from kvsim.machines.basis import basis
from kvsim.machines.deployment import Deployment
from kvsim.planner.alternatives import AS_GOOD, describe_gap
from kvsim.planner.replica import ATTAINED
from kvsim.planner.trace import Simulated, TracePlan
from kvsim.report import evidence, names, units
from kvsim.report.answer import Answer, show_rest, show_verdict, verdict
from kvsim.report.charts import LOG, finished
from kvsim.report.colours import mark
from kvsim.report.grounds import grounds
from kvsim.report.json import Row, number
from kvsim.report.names import params, spec
from kvsim.report.result import Result
from kvsim.report.screen import Screen
from kvsim.report.table import Table, of, words
from kvsim.report.units import rounded

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

CURVES = 6  # entries whose distributions the page draws
POINTS = 200  # of each


def row(result: TracePlan) -> Row:
    """Everything under its contract name."""
    c, choice = result.classes, result.choice
    full = result.baseline
    return {
        "answer": answered(result).row(),
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


@frozen
class PlannedTrace(Result):
    """A plan for a trace on one replica.

    Attributes
    ----------
    plan
        What the planner found.
    heading
        The machine and model.
    trace
        The trace's name.
    row
        All of it under its contract names, as ``--json`` has it.
    """

    plan: TracePlan
    heading: str
    trace: str
    row: Row

    @property
    def title(self) -> str:
        """What the plan is for, in words."""
        return f"{self.heading}: {self.trace}, best {self.row['objective']}"

    @property
    def fields(self) -> Row:
        """The command's own fields as ``--json`` has them."""
        return self.row

    @property
    def notes(self) -> list[str]:
        """What a reader should know before using the plan."""
        return outlook(self.row)

    @property
    def remarks(self) -> list[str]:
        """What the page says under the pictures."""
        return outlook(self.row)

    @property
    def data(self) -> str | None:
        """Date of the newest measurement that the plan stands on."""
        return evidence.newest_measurement([self.plan.choice.lanes[0].deployment])

    @property
    def tables(self) -> list[Table]:
        """The choice and what it is compared with."""
        return [table(self.row)]

    def figures(self) -> list[tuple[str, "Figure"]]:
        """Distributions of the simulated times, with their titles."""
        drawn = _drawn(entries(self.row), [self.plan.choice, *self.plan.others])
        limits = self.plan.limits
        return [
            ("Time to first token", _curves(drawn, "ttft_s", limits.ttft)),
            ("Time per token", _curves(drawn, "tpot_s", limits.tpot)),
            ("Whole request", _curves(drawn, "latency_s", np.inf)),
        ]


def planned(
    result: TracePlan, deployment: Deployment, trace: str, settings: list[Row] | None, command: str
) -> PlannedTrace:
    """A plan for a trace as a result, with engines' settings if they were asked for."""
    found = row(result)
    if settings is not None:
        found["settings"] = settings
    rows = [entry | {"standing": standing} for standing, entry in entries(found)]
    rows = [rows[0] | {"basis": found["basis"]}, *rows[1:]]
    answer = Answer(**found["answer"])
    return PlannedTrace(command, answer, rows, result, names.deployment(deployment), trace, found)


def _lanes(s: Simulated) -> Row:
    """One technique, or the one of each lane."""
    lanes: list[Row] = [{"technique": t.name, "params": params(t)} for t in s.techniques]
    load = {"estimated_load": s.estimate.load}
    return (lanes[0] if len(lanes) == 1 else {"lanes": lanes}) | load


def _entry(s: Simulated) -> Row:
    return _lanes(s) | {"max_seqs": s.max_seqs, "simulated": s.outcome.summary()}


def _names(entry: Row) -> str:
    return " + ".join(spec(lane) for lane in entry.get("lanes", [entry]))


def entries(answer: Row) -> list[tuple[str, Row]]:
    """The choice and what it is compared with, each with its standing; none of it twice."""
    choice = answer["choice"] | {"simulated": answer["simulated"]}
    shown = [("choice", choice)]
    for entry in answer["alternatives"]:
        shown.append(("full KV" if entry.get("technique") == "full" else "or", entry))
    return shown


def table(answer: Row) -> Table:
    """The choice beside the others, all simulated."""
    rows = [
        entry["simulated"]
        | {"standing": label, "names": _names(entry), "max_seqs": entry["max_seqs"]}
        for label, entry in entries(answer)
    ]
    columns = [
        words("", lambda row: row["standing"]),
        words("technique", lambda row: row["names"].partition(" ")[0]),
        of("ttft_s", part="p50"),
        of("ttft_s", 2, part="p90"),
        of("tpot_s", part="p50"),
        of("tpot_s", 3, part="p90"),
        of("output_tok_s", 4),
        of("goodput_per_s"),
        of("max_seqs", 1),
    ]
    return Table(
        columns, rows, below=lambda row: row["names"].partition(" ")[2],
        marked=lambda row: row["standing"] == "choice",
    )  # fmt: skip


def show(result: PlannedTrace) -> None:
    """The choice beside the others, all simulated."""
    out, answer = Screen(), result.row
    out.title(result.heading)
    s = answer["simulated"]
    out.say(
        f"{result.trace}: {s['requests']:,} requests, best {answer['objective']} on one replica"
    )
    out.blank()
    show_verdict(out, result.answer)
    out.table(table(answer))
    show_rest(out, result.answer)
    for line in outlook(answer):
        out.say(line)
    out.say(grounds(answer["basis"]))
    solver = answer["solver"]
    out.say(
        f"Solver: of {solver['options']} settings the {solver['simulations']} most promising "
        f"were simulated on the whole trace"
    )


def outlook(answer: Row) -> list[str]:
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


def _drawn(shown: list[tuple[str, Row]], simulated: list[Simulated]) -> dict[str, Simulated]:
    """The first entries, full KV among them."""
    ranked = sorted(range(len(shown)), key=lambda i: i > 0 and shown[i][0] != "full KV")
    return {_names(shown[i][1]): simulated[i] for i in sorted(ranked[:CURVES])}


def _curves(shown: dict[str, Simulated], name: str, limit: float) -> "Figure":
    """Share of requests within a time, one line per entry."""
    from plotly import graph_objects as go

    figure = go.Figure()
    share = np.linspace(0, 1, POINTS)
    for label, s in shown.items():
        values = getattr(s.outcome, name)
        known = values[np.isfinite(values)]
        if known.size:
            x, look = 1e3 * np.quantile(known, share), mark(label)
            figure.add_scatter(
                x=x, y=100 * share, mode="lines", name=label.partition(" ")[0],
                line={"color": look.colour, "dash": look.dash},
            )  # fmt: skip
    if np.isfinite(limit):
        figure.add_scatter(
            x=[1e3 * limit] * 2, y=[0, 100], mode="lines", name=f"target {units.seconds(limit)}",
            line={"dash": "dot", "color": "#888888"},
        )  # fmt: skip
    return finished(figure, 360, "ms", "% of requests", xaxis=LOG)


def answered(result: TracePlan) -> Answer:
    """The answer of ``kvsim plan --trace``."""
    s, full = result.choice, result.baseline
    d, o = s.lanes[0].deployment, s.outcome.summary()
    names = " and ".join(t.name if t.name != "full" else "full KV" for t in s.techniques)
    times = ", ".join(
        f"{key[:4].upper()} p90 {units.seconds(o[key]['p90'])}"  # type: ignore[index]
        for key in ("ttft_s", "tpot_s")
    )
    good = f"{units.percent(o['good_share'])} of requests {_kept(result)}"  # type: ignore[arg-type]
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
        evidence=[*evidence.on_card(d, s.techniques[0].name), *evidence.of_spread(d)],
        assumed=evidence.assumed_with(d, s.techniques),
    )


def _load(result: TracePlan) -> str:
    """How much of such load one replica carries, by the estimate that ranks throughput."""
    load = result.choice.estimate.load
    if result.objective == "latency" or not load > 0:
        return ""
    share = f"{100 / load:.0f} % of" if load > 1 else f"{rounded(1 / load, 2)} times"
    return f"By estimate, it carries about {share} this trace's load."


def _kept(result: TracePlan) -> str:
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
    return f"{names} at --max-seqs {s.max_seqs}: {good} of requests {_kept(result)}; {why}."
