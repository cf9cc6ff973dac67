"""``kvsim plan`` for equal requests: its answer as rows, on the terminal, and as a page."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from kvsim.frozen import frozen
from kvsim.machines.basis import basis
from kvsim.planner.alternatives import LABELS, Advice
from kvsim.planner.plan import ChosenPlan
from kvsim.prediction.generate import Prediction
from kvsim.quality.evidence import Evidence
from kvsim.report import evidence
from kvsim.report.answer import Answer, show_rest, show_verdict
from kvsim.report.grounds import NOT_MODELLED, grounds, noted
from kvsim.report.json import Row, number
from kvsim.report.names import deployment, label, params, settings, spec
from kvsim.report.plan_answer import answered
from kvsim.report.predict import prediction
from kvsim.report.quantities import legend
from kvsim.report.result import Result
from kvsim.report.screen import Screen
from kvsim.report.table import Column, Table, of, words
from kvsim.report.units import percent, seconds, times
from kvsim.techniques.technique import Technique

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


@frozen
class Planned(Result):
    """A plan for equal requests.

    Attributes
    ----------
    plan
        What the planner found.
    row
        All of it under its contract names, as ``--json`` has it.
    """

    plan: ChosenPlan
    row: Row

    @property
    def title(self) -> str:
        """What the plan is for, in words."""
        return asked(deployment(self.plan.choice.deployment), self.row)

    @property
    def fields(self) -> Row:
        """The command's own fields as ``--json`` has them."""
        return self.row

    @property
    def notes(self) -> list[str]:
        """What a reader should know before using the plan."""
        told = dict.fromkeys(note for _, row in entries(self.row) for note in row["notes"])
        return [*told, *self.remarks]

    @property
    def data(self) -> str | None:
        """Date of the newest measurement that the plan stands on."""
        return evidence.newest_measurement([self.plan.choice.deployment])

    @property
    def tables(self) -> list[Table]:
        """The choice and what it is compared with."""
        return [table(self.row)]

    def figures(self) -> list[tuple[str, "Figure"]]:
        """The pictures of the page with their titles."""
        from kvsim.report import plan_charts

        return plan_charts.pictures(self.plan)

    @property
    def remarks(self) -> list[str]:
        """What the page says under the pictures."""
        return [f"Not modelled: {'; '.join(self.row['not_modelled'])}."]


def planned(result: ChosenPlan, command: str = "") -> Planned:
    """A plan as a result."""
    row = plan(result)
    rows = [entry | {"standing": standing} for standing, entry in entries(row)]
    return Planned(command, Answer(**row["answer"]), rows, result, row)


def plan(result: ChosenPlan) -> Row:
    """The answer of ``kvsim plan``."""
    q, full = result.question, result.baseline

    def row(found: Prediction) -> Row:
        """A prediction beside full KV."""
        ratio = float(found.output_tok_s[0] / full.output_tok_s[0]) if full else None
        return prediction(found) | {"vs_full": ratio}

    chosen = row(result.choice)
    spec = {"technique": chosen["technique"], "params": chosen["params"]}
    layers = _layers(result.choice)
    solver, waves = result.solver, result.waves
    return {
        "answer": answered(result, chosen["bound_by"]).row(),
        "choice": {**spec, "batch": chosen["batch"], "layers": layers},
        "objective": result.objective,
        "service": q.workload.service,
        "predicted": chosen,
        "quality": quality(result.evidence),
        "baseline": chosen if full is result.choice else row(full) if full else None,
        "alternatives": [
            {
                **row(a.prediction),
                "lossless": a.prediction.technique.exact,
                "allowed": a.allowed,
                "in_time": a.in_time,
                "needs": list(a.needs),
                "quality": quality(a.evidence),
                "reason": a.reason,
            }
            for a in result.alternatives
        ],
        "likely": {
            "kept": dict(result.likely.kept),
            "safer": None if result.likely.safer is None else brief(result.likely.safer),
        },
        "knees": [{"given_up": k.given_up, **brief(k.prediction)} for k in result.knees],
        "waves": waves
        and {
            "count": waves.count,
            **brief(waves.prediction),
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
        "others": [brief(p) for p in result.others],
        "solver": {
            "status": solver.status,
            "bound_s": None if solver.bound is None else number(solver.bound),
            "replay_s": number(solver.replay),
            "gap": None if solver.gap is None else number(solver.gap),
            "solves": solver.solves,
            "replays": solver.replays,
            "options": solver.options,
            "optimum": brief(solver.optimum),
            "given_up": solver.given_up,
        },
        "basis": basis(result.choice.deployment),
        "not_modelled": list(NOT_MODELLED),
    }


def quality(found: Evidence) -> Row:
    """The evidence of a setting's loss."""
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


def advice(advised: Advice) -> Row:
    """A change of the question, and what it would bring."""
    return {
        "option": advised.option,
        "what": advised.what,
        "gain": number(advised.gain),
        "caution": advised.caution,
        "words": str(advised),
        "predicted": advised.prediction and brief(advised.prediction),
    }


def brief(prediction: Prediction) -> Row:
    """The figures of a prediction that a comparison needs."""
    d = prediction.deployment
    return {
        "gpu": d.hardware.name,
        **{name: n for name, n in asdict(d.parallelism).items() if n > 1 or name == "tp"},
        "weights": d.weights,
        "technique": label(prediction.technique),
        "params": params(prediction.technique),
        "batch": number(prediction.batch),
        "prompt": prediction.prompt,
        "ttft_s": number(prediction.ttft_s),
        "tpot_s": number(prediction.tpot_s),
        "output_tok_s": number(prediction.output_tok_s),
        "usd_per_million_tokens": number(prediction.usd_per_million()),
        "gpu_bytes": number(prediction.gpu_bytes),
        "host_bytes": number(prediction.host_bytes),
    }


def entries(answer: Row) -> list[tuple[str, Row]]:
    """What ``kvsim plan`` shows side by side, each with its standing; none of it twice."""
    chosen, base = answer["predicted"], answer["baseline"]
    shown = [("choice", chosen)]
    if base and base["technique"] != chosen["technique"]:
        shown.append(("full KV", base))
    for row in answer["alternatives"]:
        if base is None or spec(row) != spec(base) or row["batch"] != base["batch"]:
            open_to = "or" if row["in_time"] else "too slow"
            shown.append((f"needs {' '.join(row['needs'])}" if row["needs"] else open_to, row))
    return shown


def _layers(prediction: Prediction) -> list[Row]:
    """What ranges of layers do, as ``kvsim.techniques.parse`` reads it back."""
    count = prediction.deployment.model.layers
    if prediction.technique.uniform:
        t = prediction.technique
        return [
            {
                "first": 0,
                "count": count,
                "technique": t.name,
                "params": params(t),
                "notation": str(t),
            }
        ]
    rows = []
    for some in prediction.technique.layers:
        last = count - 1 if some.last is None else some.last
        t = Technique((replace(some, first=0, last=None),))
        rows.append({"first": some.first, "count": last - some.first + 1, "technique": t.name,
                     "params": params(t), "notation": str(t)})  # fmt: skip
    return rows


def searched(solver: Row) -> str:
    """How the choice was found, and how much better another placement could be."""
    text = f"Compared {solver['options']:,} options"
    count = solver["solves"]
    if count:
        text += f", solved {count} placement programme{'s' if count > 1 else ''}"
    if solver["bound_s"] is None:
        return f"{text}."
    return (
        f"{text}. No placement serves this batch in less than {seconds(solver['bound_s'])}; the "
        f"choice takes {seconds(solver['replay_s'])} (gap {percent(solver['gap'])})."
    )


def table(answer: Row) -> Table:
    """The choice and what it is compared with."""
    rows = [row | {"standing": standing} for standing, row in entries(answer)]
    ratio = Column("vs full", lambda row: times(row["vs_full"]), lambda row: row["vs_full"], rank=2)
    against = [ratio] if answer["baseline"] else []
    columns = [
        words("", lambda row: row["standing"]),
        words("technique", lambda row: row["technique"]),
        of("batch", 1),
        of("ttft_s"),
        of("tpot_s"),
        of("output_tok_s"),
        *against,
        *([of("usd_per_million_tokens", 1)] if answer["objective"] == "cost" else []),
        of("gpu_bytes", 3),
        of("host_bytes", 4),
    ]
    return Table(
        columns, rows, below=settings, marked=lambda row: row["standing"] == "choice",
        note=legend(["output_tok_s"]),
    )  # fmt: skip


def asked(heading: str, answer: Row) -> str:
    """The deployment, the requests and the objective that a plan is for."""
    chosen = answer["predicted"]
    sizes = f"prompt {chosen['prompt']:,}, generate {chosen['generate']:,}"
    return f"{heading}, {sizes}, best {answer['objective']}"


def show(heading: str, answer: Row) -> None:
    """The verdict, what was compared, and what follows."""
    out, said = Screen(), Answer(**answer["answer"])
    chosen = answer["predicted"]
    out.title(asked(heading, answer))
    show_verdict(out, said)
    out.table(table(answer))
    out.blank()
    show_rest(out, said)
    for line in noted([(row["technique"], row) for _, row in entries(answer)]):
        out.say(line)
    out.say(grounds(chosen["basis"]))
    out.say(f"Not modelled: {'; '.join(answer['not_modelled'])}.")
    solver = answer["solver"]
    out.say(searched(solver))
