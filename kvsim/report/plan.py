"""``kvsim plan`` for equal requests: its rows, what is compared, the front and the breakpoints."""

from collections.abc import Sequence
from dataclasses import asdict, replace

from kvsim.machines.basis import basis
from kvsim.machines.deployment import Deployment
from kvsim.planner.alternatives import LABELS, Advice, NoPlanError
from kvsim.planner.plan import ChosenPlan
from kvsim.planner.sensitivity import BREAKPOINT_FACTORS, Breakpoint
from kvsim.prediction.generate import Prediction
from kvsim.quality.evidence import Evidence
from kvsim.report import evidence, names, plan_answer
from kvsim.report.answer import BRIEF, SENTENCE, add_command_line, verdict
from kvsim.report.json import Row, number
from kvsim.report.names import chosen_settings, label, params, settings, spec
from kvsim.report.plan_charts import draw_plan
from kvsim.report.predict import prediction
from kvsim.report.result import Result
from kvsim.report.suitability import list_engines
from kvsim.report.table import Table, quantity_columns, text_column
from kvsim.report.terminal import BLANK, Block, Heading, Verbatim
from kvsim.report.units import percent, rounded, seconds, usd
from kvsim.techniques.technique import Technique

MIN_THROUGHPUT_STEP = 1.02  # times the throughput, from which on another plan is worth a line
FRONT = "Between the lowest TPOT and the highest throughput:"
NO_FLIP = (
    f"The choice stays the same with {max(BREAKPOINT_FACTORS):g} times more or less of any of "
    "these "
    f"alone: prompt, batch where one was asked for, host link bandwidth, host memory bandwidth."
)


def make_result(
    plan: ChosenPlan,
    command: str = "",
    engines: Sequence[Row] = (),
    pareto: bool = False,
    explain: bool = False,
    jobs: int = 0,
) -> Result[ChosenPlan]:
    """Make the answer of ``kvsim plan`` for equal requests.

    Parameters
    ----------
    engines
        Settings of engines to paste, as ``--emit`` asks for them.
    pareto
        Whether plans between the lowest TPOT and the highest throughput are listed.
    explain
        Whether it is said where another technique would be chosen.
    jobs
        Requests to finish; 0 where that was not asked.
    """
    fields = plan_fields(plan)
    chosen = fields["predicted"]
    answer = plan_answer.write_answer(plan, chosen["bound_by"])
    if jobs:
        hours = plan.hours_for(jobs)
        fields["jobs"] = {"count": jobs, "hours": hours, "usd": plan.usd_for(hours)}
        told = _describe_jobs(fields["jobs"])
        answer = replace(answer, verdict=verdict([told, *SENTENCE.split(answer.verdict)[:1]],
                                                 SENTENCE.split(answer.verdict)[1:]))  # fmt: skip
    if engines:
        answer = add_command_line(answer, engines)
        fields["settings"] = list(engines)
    fields = {"answer": answer.row(), **fields}
    compared = entries(fields)
    shown, brief = table(compared, fields), table(_runnable_first(compared), fields)
    notes = evidence.merge_notes([(row["technique"], row) for row in compared])
    ground = evidence.describe_basis(chosen["basis"])
    not_modelled = f"Not modelled: {'; '.join(fields['not_modelled'])}."
    title = (
        f"{names.describe_deployment(plan.choice.deployment)}, prompt {chosen['prompt']:,}, "
        f"generate {chosen['generate']:,}, best {fields['objective']}"
    )
    blocks: list[Block] = [
        *(Heading(title), *answer.head(), brief, BLANK, *answer.body(BRIEF)),
        *(f"Note{note}" for note in notes),
    ]
    more = [*answer.rest(BRIEF), ground, not_modelled, searched(fields["solver"])]
    if pareto:
        fields["pareto"] = front = [_summarize_prediction(p) for p in plan.front()]
        blocks += [BLANK, FRONT, _front_table(front)]
    if explain:
        fields["flips"] = flips = [{**vars(f), "words": _flipped(f, plan)} for f in plan.flips()]
        blocks += [row["words"] for row in flips] or [NO_FLIP]

    return Result(
        command,
        title,
        answer,
        fields,
        plan,
        rows=compared,
        tables=[shown],
        blocks=[*blocks, *paste_blocks(engines)],
        more=more,
        draw=lambda: draw_plan(plan),
        remarks=[not_modelled],
        notes=[*(note.lstrip(": ") for note in notes), not_modelled],
        data=evidence.newest_measurement([plan.choice.deployment]),
        foot=[ground],
    )


def _describe_jobs(jobs: Row) -> str:
    """Say how long jobs take and what that costs."""
    price = "" if jobs["usd"] is None else f" and cost {usd(jobs['usd'])}"
    return f"{jobs['count']:,} such requests take {seconds(3600 * jobs['hours'])}{price}."


def make_empty_result(
    none: NoPlanError, deployment: Deployment, command: str = ""
) -> Result[NoPlanError]:
    """Make the answer of ``kvsim plan`` where nothing is within the limits.

    Parameters
    ----------
    none
        Why there is no plan, and what would allow one.
    deployment
        Deployment that was asked for.
    command
        Command line that gives the same.

    Returns
    -------
    Result
        Answer with advice and no choice.
    """
    answer = plan_answer.write_empty_answer(none)
    advised = [advice(a) for a in none.advice]
    rows = [row["predicted"] | {"option": row["option"]} for row in advised if row["predicted"]]
    columns = [
        text_column("change", "option"),
        text_column("technique", "technique"),
        *quantity_columns(batch=1, ttft_s=0, tpot_s=0, output_tok_s=0, gpu_bytes=3, host_bytes=4),
    ]
    fields = {
        "answer": answer.row(),
        "choice": None,
        "reason": str(none),
        "relaxations": {k: number(v) for k, v in none.relaxations.items()},
        "advice": advised,
    }
    return Result(
        command,
        names.describe_deployment(deployment),
        answer,
        fields,
        none,
        rows,
        tables=[Table(columns, rows, below=settings)] if rows else [],
    )


def paste_blocks(engines: Sequence[Row]) -> list[Block]:
    """Lay out settings of engines for the terminal, below an answer.

    Parameters
    ----------
    engines
        An engine's settings each.

    Returns
    -------
    list of Block
        Blocks with empty lines between them.
    """
    return [block for row in engines for block in (BLANK, Verbatim(row["text"]))]


def plan_fields(result: ChosenPlan) -> Row:
    """Collect what ``--json`` has of a plan, but for the answer in words.

    Parameters
    ----------
    result
        Plan that was chosen.

    Returns
    -------
    Row
        Fields under their contract names.
    """
    q, full = result.question, result.baseline

    def row(found: Prediction) -> Row:
        """A prediction beside full KV."""
        ratio = float(found.output_tok_s[0] / full.output_tok_s[0]) if full else None
        return prediction(found) | {"vs_full": ratio, "engines": list_engines(found)}

    chosen = row(result.choice)
    spec = {"technique": chosen["technique"], "params": chosen["params"]}
    layers = layers_of(result.choice)
    solver, waves = result.solver, result.waves
    return {
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
            "safer": None
            if result.likely.safer is None
            else _summarize_prediction(result.likely.safer),
        },
        "knees": [
            {"given_up": k.given_up, **_summarize_prediction(k.prediction)} for k in result.knees
        ],
        "waves": waves
        and {
            "count": waves.count,
            **_summarize_prediction(waves.prediction),
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
        "others": [_summarize_prediction(p) for p in result.others],
        "solver": {
            "status": solver.status,
            "bound_s": None if solver.bound is None else number(solver.bound),
            "replay_s": number(solver.replay),
            "gap": None if solver.gap is None else number(solver.gap),
            "solves": solver.solves,
            "replays": solver.replays,
            "options": solver.options,
            "optimum": _summarize_prediction(solver.optimum),
            "given_up": solver.given_up,
        },
        "basis": basis(result.choice.deployment),
        "not_modelled": list(evidence.NOT_MODELLED),
    }


def quality(found: Evidence) -> Row:
    """Make the row of a setting's evidence of loss.

    Parameters
    ----------
    found
        Evidence on the model.

    Returns
    -------
    Row
        Loss with its interval, unit and source.
    """
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
    """Make the row of a change of the question, and what it would bring.

    Parameters
    ----------
    advised
        Change of one option.

    Returns
    -------
    Row
        Option, gain, caution and the prediction with it, if there is one.
    """
    return {
        "option": advised.option,
        "what": advised.what,
        "gain": number(advised.gain),
        "caution": advised.caution,
        "words": str(advised),
        "predicted": advised.prediction and _summarize_prediction(advised.prediction),
    }


def _summarize_prediction(prediction: Prediction) -> Row:
    """Select the figures of a prediction that a comparison needs."""
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


def entries(answer: Row) -> list[Row]:
    """List what ``kvsim plan`` shows side by side, each with its standing.

    Parameters
    ----------
    answer
        Fields of a plan.

    Returns
    -------
    list of Row
        The choice, full KV and the alternatives; none of them twice.
    """
    base = answer["baseline"]
    shown = [answer["predicted"] | {"standing": "choice"}]
    if base and base["technique"] != answer["predicted"]["technique"]:
        shown.append(base | {"standing": "full KV"})
    for row in answer["alternatives"]:
        if base is None or spec(row) != spec(base) or row["batch"] != base["batch"]:
            open_to = "or" if row["in_time"] else "too slow"
            needs = f"needs {' '.join(row['needs'])}" if row["needs"] else open_to
            shown.append(row | {"standing": needs})
    return shown


def _runnable_first(rows: Sequence[Row]) -> list[Row]:
    """Leave out what no engine runs, but for the best lossless and the best lossy of it."""
    seen: set[bool] = set()
    shown = []
    for row in rows:
        lossless = row.get("lossless", True)
        if row["engines"] or row["standing"] in ("choice", "full KV") or lossless not in seen:
            shown.append(row)
        if not row["engines"]:
            seen.add(lossless)
    return shown


def layers_of(prediction: Prediction) -> list[Row]:
    """List what ranges of layers do, as ``kvsim.techniques.parse`` reads it back.

    Parameters
    ----------
    prediction
        A prediction.

    Returns
    -------
    list of Row
        First layer, count, technique and settings of each range.
    """
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
    """Say how the choice was found, and how much better another placement could be.

    Parameters
    ----------
    solver
        The plan's field ``solver``.

    Returns
    -------
    str
        One or two sentences.
    """
    text = f"Compared {solver['options']:,} options"
    count = solver["solves"]
    if count:
        text += f", solved {count} placement problem{'s' if count > 1 else ''}"
    if solver["bound_s"] is None:
        return f"{text}."
    return (
        f"{text}. No placement serves this batch in less than {seconds(solver['bound_s'])}; the "
        f"choice takes {seconds(solver['replay_s'])} (gap {percent(solver['gap'])})."
    )


def table(rows: Sequence[Row], answer: Row) -> Table:
    """Make the table of the choice and what it is compared with.

    Parameters
    ----------
    rows
        Rows with their standing, as :func:`entries` returns them.
    answer
        Fields of the plan.

    Returns
    -------
    Table
        A line per row, with settings below; the choice is marked.
    """
    columns = [
        text_column("", "standing"),
        text_column("technique", "technique"),
        *quantity_columns(batch=1, ttft_s=0, tpot_s=0, output_tok_s=0),
        *(quantity_columns(vs_full=2) if answer["baseline"] else []),
        *(quantity_columns(usd_per_million_tokens=1) if answer["objective"] == "cost" else []),
        *quantity_columns(gpu_bytes=3, host_bytes=4),
    ]
    return Table(
        columns,
        rows,
        below=_below,
        marked=lambda row: row["standing"] == "choice",
    )


def _below(row: Row) -> str:
    """Settings of a row, and that no engine runs it, if so."""
    given = {**row, "params": chosen_settings(row["technique"], row["params"])}
    return "; ".join(filter(None, [settings(given), "" if row["engines"] else "runs in no engine"]))


def _front_table(rows: Sequence[Row]) -> Table:
    columns = [
        text_column("technique", "technique"),
        *quantity_columns(batch=1, ttft_s=0, tpot_s=0, output_tok_s=0, gpu_bytes=3),
    ]
    return Table(columns, thin_out(rows), below=settings)


def thin_out(rows: Sequence[Row]) -> list[Row]:
    """Drop plans that are hardly faster than the one before, but for the first and last.

    Parameters
    ----------
    rows
        Plans by rising throughput.

    Returns
    -------
    list of Row
        Plans whose throughputs differ by a factor of ``MIN_THROUGHPUT_STEP`` or more.
    """
    shown: list[Row] = []
    for row in rows[:-1]:
        if not shown or row["output_tok_s"] >= MIN_THROUGHPUT_STEP * shown[-1]["output_tok_s"]:
            shown.append(row)
    if (
        len(shown) > 1
        and rows[-1]["output_tok_s"] < MIN_THROUGHPUT_STEP * shown[-1]["output_tok_s"]
    ):
        shown.pop()
    return [*shown, *rows[-1:]]


def _flipped(f: Breakpoint, result: ChosenPlan) -> str:
    start = "Above" if f.factor > 1 else "Below"
    value = float(f"{f.value:.2g}")
    unit = {"prompt": f"{value:,.0f} tokens", "batch": f"{value:,.0f}"}
    amount = unit.get(f.what, f"{value / 1e9:.3g} GB/s")
    instead = f"{f.technique} is chosen" if f.technique else "nothing here meets the limits"
    times = rounded(f.factor, 2)
    return f"{start} a {f.what} of about {amount} ({times} times this one), {instead}."
