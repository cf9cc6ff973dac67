"""The result of ``kvsim plan --offline``: the plan of a batch and its alternatives."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING

from kvsim.emit.served import serve_prediction
from kvsim.machines.deployment import Deployment, basis
from kvsim.planner.alternatives import LABELS, NARROW, NoPlanError, PlanRemedy, score
from kvsim.planner.plan import ChosenPlan
from kvsim.planner.question import MIXED, needed_option, technique_label
from kvsim.planner.sensitivity import BREAKPOINT_FACTORS, LIKELY_ENOUGH, Binding, Breakpoint
from kvsim.prediction.generate import Prediction
from kvsim.report import caveats, evidence, names, units
from kvsim.report.answer import BRIEF, MAX_CHANGES, SENTENCE, Answer, verdict
from kvsim.report.json import Row, number, pick, resident_bytes
from kvsim.report.names import (
    SPOKEN,
    chosen_settings,
    label,
    notation,
    params,
    phrase_technique,
    ranks,
    settings,
    spec,
    technique_fields,
)
from kvsim.report.phrases import (
    change_command,
    describe_command,
    describe_times,
    differing_options,
    explain_limit,
    layers_of,
    paste_blocks,
    quality,
)
from kvsim.report.plan_service import BRIEF_ROWS, MAX_LINES, RUN_IT, count_hidden, list_unused
from kvsim.report.predict import figures, prediction
from kvsim.report.result import Result
from kvsim.report.suitability import describe_loss, join_titles, list_engines, phrase_loss
from kvsim.report.table import Table, disk_column, quantity_columns, text_column
from kvsim.report.terminal import BLANK, Block, Command, Heading, count_lines
from kvsim.report.units import rounded, seconds, usd
from kvsim.techniques.released import SERVERS

if TYPE_CHECKING:
    from kvsim.report.pictures import Chart

MIN_THROUGHPUT_STEP = 1.02  # times the throughput, from which on another plan is worth a line
FRONT = "Between the lowest TPOT and the highest throughput:"
NO_FLIP = (
    f"The choice does not change with {max(BREAKPOINT_FACTORS):g} times more or less of any of "
    "these "
    f"alone: prompt, batch (if given), host link bandwidth, host memory bandwidth."
)
OTHERS = 5  # other deployments that are told, best per GPU first
NO_GAIN = 0.005  # relative gain below which nothing is gained
NEARLY_ALL = 1.2  # times a gain of loosening a limit: what lifting it brings is about as much
CERTAIN = 0.99  # chance of keeping a target, from which on an earlier first token is no news
CLAUSES = "is ", "its ", "takes ", "costs ", "the choice "  # that reasons begin with


def make_result(
    plan: ChosenPlan,
    engines: Sequence[Row] = (),
    pareto: bool = False,
    explain: bool = False,
    jobs: int = 0,
) -> Result[ChosenPlan]:
    """Make the result of ``kvsim plan --offline``.

    Parameters
    ----------
    plan
        The plan that was found.
    engines
        Configurations of the engines named by ``--emit``.
    pareto
        Whether to list the plans between the lowest TPOT and the highest throughput.
    explain
        Whether to state at which inputs another technique would be chosen.
    jobs
        Number of requests whose total time and cost are stated; 0 for none.
    """
    fields = plan_fields(plan)
    chosen = fields["predicted"]
    answer = _write_answer(plan, chosen)
    if jobs:
        hours = plan.hours_for(jobs)
        fields["jobs"] = {"count": jobs, "hours": hours, "usd": plan.usd_for(hours)}
        price = "" if fields["jobs"]["usd"] is None else f" and cost {usd(fields['jobs']['usd'])}"
        told = f"{jobs:,} such requests take {seconds(3600 * hours)}{price}."
        first, *others = SENTENCE.split(answer.verdict)
        answer = replace(answer, verdict=verdict([told, first], others))
    if engines:
        fields["settings"] = list(engines)
    fields = {"answer": answer.row(), **fields}
    compared = _entries(fields)
    shown, some = _table(compared, fields), _runnable_first(compared)
    notes = evidence.merge_notes([(row["technique"], row) for row in compared])
    ground = evidence.describe_basis(chosen["basis"])
    not_modelled = f"Not modelled: {'; '.join(fields['not_modelled'])}."
    title = (
        f"{names.describe_deployment(plan.choice.deployment)}, prompt {chosen['prompt']:,}, "
        f"generate {chosen['generate']:,}, best {fields['objective']}"
    )
    hardware = plan.choice.deployment.hardware
    if hardware.price is not None and (jobs or plan.objective == "cost"):
        title += f", {names.describe_price(hardware)}"
    ways = [(len(some), BRIEF), (len(some), 1), (BRIEF_ROWS, 1), (BRIEF_ROWS - 1, 1)]
    below: list[Block] = []
    if pareto:
        fields["pareto"] = front = [_summarize_prediction(p) for p in plan.front()]
        columns = [
            text_column("technique", "technique"),
            *quantity_columns(batch=1, ttft_s=0, tpot_s=0, output_tok_s=0, gpu_bytes=3),
        ]
        below += [BLANK, FRONT, Table(columns, thin_out(front), below=settings)]
    if explain:
        fields["flips"] = flips = [{**vars(f), "words": _flipped(f, plan)} for f in plan.flips()]
        below += [row["words"] for row in flips] or [NO_FLIP]
    below += paste_blocks(engines)
    blocks: list[Block] = []
    # the fullest that fits on a screen
    for most, sentences, changes in [
        *((*way, MAX_CHANGES) for way in ways),
        *((*ways[-1], fewer) for fewer in range(MAX_CHANGES - 1, 0, -1)),
    ]:
        brief = replace(_table(some[:most], fields), note=count_hidden(len(compared) - most))
        body = answer.body(sentences, changes, command=not engines)
        blocks = [Heading(title), *answer.head(), brief, BLANK, *body, *below]
        if count_lines(blocks) <= MAX_LINES:
            break
    more: list[Block] = [shown, BLANK] if brief.note else []
    more += [*(f"Note{note}" for note in notes), *answer.rest(sentences, changes)]
    more += [ground, not_modelled]
    more += [_searched(fields["solver"])]

    def draw() -> "list[Chart]":
        from kvsim.report.plan_charts import draw_plan  # loaded where a page is asked for

        return draw_plan(plan)

    return Result(
        title,
        answer,
        fields,
        plan,
        rows=compared,
        tables=[shown],
        blocks=blocks,
        more=more,
        draw=draw,
        remarks=[not_modelled],
        notes=[*(note.lstrip(": ") for note in notes), not_modelled],
        data=evidence.newest_measurement([plan.choice.deployment]),
        foot=[ground],
    )


def make_empty_result(none: NoPlanError, command: str = "") -> Result[NoPlanError]:
    """Make the result of ``kvsim plan --offline`` where no plan meets the limits.

    Parameters
    ----------
    none
        The reason, and changes that would help.
    command
        The command line, which changes are added to.

    Returns
    -------
    Result
        The changes, each with a command line.
    """
    told = [_describe_nearest(none.remedies[0])] if none.remedies else []
    answer = Answer(
        verdict=verdict(["No plan meets the limits."], told),
        changes=[f"`{a.option}`: {a.outcome}." for a in none.remedies[1:]],
    )
    advised = [_advice(a) | {"command": change_command(command, a.changes)} for a in none.remedies]
    rows = [row["predicted"] | {"option": row["option"]} for row in advised]
    columns = [
        text_column("change", "option"),
        text_column("technique", "technique"),
        *quantity_columns(batch=1, ttft_s=0, tpot_s=0, output_tok_s=0, gpu_bytes=3, host_bytes=4),
    ]
    fields = {
        "answer": answer.row(),
        "choice": None,
        "reason": none.reason,
        "relaxations": {k: number(v) for k, v in none.relaxations.items()},
        "advice": advised,
    }
    return Result(
        names.describe_deployment(none.deployment),
        answer,
        fields,
        none,
        rows,
        tables=[Table(columns, rows, below=settings)] if rows else [],
        blocks=[*told, RUN_IT, Command(advised[0]["command"]), *answer.body()] if told else [],
        command=command,
    )


def plan_fields(result: ChosenPlan) -> Row:
    """Collect the fields of the JSON output for a plan, without the verdict.

    Parameters
    ----------
    result
        The plan.

    Returns
    -------
    Row
        Choice, predictions, alternatives, limits and advice.
    """
    full = result.baseline

    def row(found: Prediction) -> Row:
        """Make the row of a prediction, with its speed relative to the full cache."""
        ratio = float(found.output_tok_s[0] / full.output_tok_s[0]) if full else None
        return prediction(found) | {"vs_full": ratio, "engines": list_engines(found)}

    chosen = row(result.choice)
    solver, waves = result.solver, result.waves
    return {
        "choice": {
            **{key: chosen[key] for key in ("technique", "params", "batch")},
            "layers": layers_of(result.choice),
        },
        "objective": result.objective,
        "service": False,
        "predicted": chosen,
        "quality": quality(result.evidence),
        "baseline": chosen if full is result.choice else row(full) if full else None,
        "alternatives": [
            {
                **row(a.prediction),
                "lossless": a.prediction.technique.exact,
                **pick(a, "allowed", "in_time"),
                "needs": list(a.needs),
                "quality": quality(a.evidence),
                "reason": a.reason,
            }
            for a in result.alternatives
        ],
        "likely": {
            "kept": dict(result.likely.kept),
            "safer": result.likely.safer and _summarize_prediction(result.likely.safer),
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
        "limits": {k: number(v) for k, v in result.limits.stated().items()},
        "binding": [
            {
                "limit": b.limit,
                "means": LABELS[b.limit],
                "gain_without": number(b.gain_without),
                "technique": b.technique,
            }
            for b in result.binding
        ],
        "usd_per_gpu_hour": number(result.choice.deployment.hardware.price),
        "prices": result.prices,
        "advice": [_advice(a) for a in result.advice],
        "others": [_summarize_prediction(p) for p in result.others],
        "solver": {
            **pick(solver, "solves", "replays", "options"),
            "optimum": _summarize_prediction(solver.optimum),
            "given_up": solver.given_up,
        },
        "basis": basis(result.choice.deployment),
        "not_modelled": list(evidence.NOT_MODELLED),
    }


def _advice(advised: PlanRemedy) -> Row:
    """Make the row of a change of the question, and what it would bring."""
    return {
        **pick(advised, "option", "what", "gain", "caution"),
        "words": str(advised),
        "predicted": _summarize_prediction(advised.prediction),
    }


def _summarize_prediction(prediction: Prediction) -> Row:
    """Select the figures of a prediction that a comparison needs."""
    d = prediction.deployment
    return {
        "gpu": d.hardware.name,
        **ranks(d),
        "weights": d.weights,
        **technique_fields(prediction.technique),
        **pick(prediction, "batch", "prompt", "ttft_s", "tpot_s", "output_tok_s"),
        "usd_per_million_tokens": number(prediction.usd_per_million()),
        **resident_bytes(prediction),
    }


def _entries(answer: Row) -> list[Row]:
    """List what ``kvsim plan`` shows side by side, each with its standing."""
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


def _searched(solver: Row) -> str:
    """Say how the choice was found."""
    text = f"Compared {solver['options']:,} options"
    count = solver["solves"]
    if count:
        text += f", solved {count} placement problem{'s' if count > 1 else ''}"
    return f"{text}."


def _table(rows: Sequence[Row], answer: Row) -> Table:
    """Make the table of the choice and what it is compared with."""
    columns = [
        text_column("", "standing"),
        text_column("technique", "technique"),
        *quantity_columns(batch=1, ttft_s=0, tpot_s=0, output_tok_s=0),
        *(quantity_columns(vs_full=2) if answer["baseline"] else []),
        *(quantity_columns(usd_per_million_tokens=1) if answer["objective"] == "cost" else []),
        *quantity_columns(gpu_bytes=3, host_bytes=4, **disk_column(rows)),
    ]
    return Table(
        columns,
        rows,
        below=_write_settings,
        marked=lambda row: row["standing"] == "choice",
    )


def _write_settings(row: Row) -> str:
    """Settings of a row, and that no engine runs it, if so."""
    given = {**row, "params": chosen_settings(row["technique"], row["params"])}
    told = row["engines"] or row["standing"] == "choice"  # of which the verdict says it
    return "; ".join(filter(None, [settings(given), "" if told else "runs in no engine"]))


def thin_out(rows: Sequence[Row]) -> list[Row]:
    """Drop plans that are hardly faster than the previous one, except the first and the last.

    Parameters
    ----------
    rows
        Plans in ascending order of throughput.

    Returns
    -------
    list of Row
        Plans whose throughput increases by at least ``MIN_THROUGHPUT_STEP``.
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


def _write_answer(plan: ChosenPlan, chosen: Row) -> Answer:
    """The answer of ``kvsim plan``, whose choice is a row, too."""
    p, d = plan.choice, plan.choice.deployment
    loses = describe_loss(p.technique, plan.evidence)
    more = [
        _describe_best_other(plan),
        loses,
        "" if list_engines(plan.choice) else "No serving engine runs this.",
        _served(plan),
        _targets(plan),
    ]
    more.append(explain_limit(chosen["bound_by"], p.generate))
    said = verdict([_waves(plan), _run(plan), _against_full(plan), _warn_of_weights(plan)], more)
    return Answer(
        verdict=said,
        figures=figures(chosen),
        changes=[*_list_changes(plan, said), *caveats.slower_kernels(p)],
        runner_up=_runner_up(plan),
        settings=list(_list_settings(plan)),
        evidence=[*evidence.list_measurements(d, label(p.technique)), *_quality(plan)],
        assumed=chosen["assumed"],
        left_out=list(_left_out(plan)),
    )


def _left_out(plan: ChosenPlan) -> Iterator[str]:
    """What users ask about that the choice does not use, with one reason each."""
    asked, d = plan.question.admission, plan.choice.deployment
    if plan.restricted:
        yield "kvsim's own placements, which no engine runs (one --weights considers them)"
    drafted = any(
        p.technique.drafts for p in (plan.choice, *(a.prediction for a in plan.alternatives))
    )
    others = [*(p.deployment for p in plan.others), *plan.impossible]
    told = any("weights" in advice.changes for advice in plan.advice)
    told |= any(other.weights != d.weights for other in others)
    yield from list_unused(asked, d, drafted, [plan.question, *plan.too_lossy], told)


def _describe_nearest(near: PlanRemedy) -> str:
    """The plan that is nearest to what was asked for, in a sentence."""
    p = near.prediction
    what = phrase_technique(p.technique)
    count = f"{p.deployment.gpus} x " if p.deployment.gpus > 1 else ""
    on = f"{count}{p.deployment.hardware.name} with {p.deployment.weights} weights"
    caution = f"; {near.caution}" if near.caution else ""
    also = _behind(p, " with ")
    batch = units.integer(number(p.batch))
    return (
        f"Nearest plan, with {near.option}: {what} on {on} at batch {batch}{also}: "
        f"{_describe_times(p)}{caution}."
    )


def _run(plan: ChosenPlan) -> str:
    p = plan.choice
    d = p.deployment
    used, whole = units.size(number(p.gpu_bytes)), units.size(d.hardware.gpu_memory)
    used = used.removesuffix(" GiB") if whole.endswith(" GiB") else used
    memory = f"{used} of {whole} of GPU memory"
    also = _behind(p, " and ")
    batch = units.integer(number(p.batch))
    name = label(p.technique)
    count = f"{d.gpus} x " if d.gpus > 1 else ""
    machine = f"{count}{d.hardware.name} with {d.weights} weights"
    lead = "Run" if list_engines(p) else "The best is"  # what no engine has cannot simply be run
    lead = "At once, the best is" if plan.waves is not None else lead
    what = f"{lead} {SPOKEN.get(p.technique.name, name)} on {machine} at batch {batch}"
    each = " each" if d.gpus > 1 else ""
    cost = f", {_format_price(p)}" if plan.objective == "cost" else ""
    return f"{what}: {_describe_times(p)}{cost}, {memory}{each}{also}."


def _behind(prediction: Prediction, lead: str) -> str:
    """Host memory that a prediction needs, and space on a drive, or nothing."""
    host, disk = number(prediction.host_bytes), number(prediction.disk_bytes)
    also = f" and {units.size(disk)} of the disk" if disk else ""
    lead = ", " if also and lead == " and " else lead
    return f"{lead}{units.size(host)} of host memory{also}" if host or disk else ""


def _waves(plan: ChosenPlan) -> str:
    """That a given batch is better run as smaller ones in turn, if so."""
    waves = plan.waves
    if waves is None:
        return ""
    size = units.integer(number(waves.prediction.batch))
    faster = units.times(waves.output_tok_s / float(plan.choice.output_tok_s[0]))
    return (
        f"Run {waves.count} waves of {size} with {_name(waves.prediction)}: "
        f"{units.rate(waves.output_tok_s)} output tok/s in all, {faster} one batch's."
    )


def _against_full(plan: ChosenPlan) -> str:
    """How the choice compares with full KV, where it is something else."""
    base, p = plan.baseline, plan.choice
    if base is None:
        share = plan.limits.gpu_memory / p.deployment.hardware.gpu_memory
        within = f" in {share:.2g} of the GPU's memory" if share < 1 and list_engines(p) else ""
        return f"Full KV does not fit{within}."
    if p.technique.name == "full":
        if plan.limits.loss > 0:
            return ""
        better = plan.solver.optimum.technique
        error = units.percent(plan.question.between(better, p.technique))
        more = f" by more than the prediction error ({error})"
        close = plan.solver.given_up > NO_GAIN
        best = "cheaper" if plan.objective == "cost" else "faster"
        return f"No lossless technique is {best}{more if close else ''}."
    if plan.waves is not None:
        return ""
    ratio = float(p.output_tok_s[0]) / float(base.output_tok_s[0])
    batch, asked = number(base.batch), plan.question.workload.batch
    if asked is not None and batch != asked:
        no = f"Full KV does not fit at batch {asked}"
        return f"{no}; at batch {units.integer(batch)} it gives {units.times(1 / ratio)} that."
    if ratio < 1:
        return f"Full KV gives {units.times(1 / ratio)} that, but misses a limit."
    return f"That is {units.times(ratio)} full KV at batch {units.integer(batch)}."


def _warn_of_weights(plan: ChosenPlan) -> str:
    """What weights lose that have fewer bytes than they were published with, if so."""
    found, weights = plan.question.weights_evidence, plan.choice.deployment.weights
    if found.kind == "lossless":
        return ""
    if found.unknown:
        return f"The quality loss of {weights} weights is unknown."
    return f"{weights[0].upper()}{weights[1:]} weights: {phrase_loss(found)}."


def _served(plan: ChosenPlan) -> str:
    """What engines run better with other weights, if none runs the choice."""
    for advice in () if list_engines(plan.choice) else plan.advice:
        p = advice.prediction
        if p is not None and p.deployment.gpus == plan.choice.deployment.gpus and list_engines(p):
            cost = f", {advice.caution}" if advice.caution not in ("", NARROW) else ""
            rate = units.rate(float(p.output_tok_s[0]))
            return f"Instead, {advice.option} gives {rate} tok/s{cost}."
    return ""


def _targets(plan: ChosenPlan) -> str:
    """The targets that the plan was asked to keep, and how sure it keeps them."""
    kept = plan.likely.kept
    asked = [
        f"{name.upper()} {units.seconds(getattr(plan.limits, name))}"
        + (f" ({units.likelihood(kept[name])})" if name in kept else "")
        for name in ("ttft", "tpot")[: min(plan.choice.generate, 2)]
        if isfinite(getattr(plan.limits, name))
    ]
    return f"Targets{' (probability)' if kept else ' met'}: {', '.join(asked)}." if asked else ""


def _quality(plan: ChosenPlan) -> list[str]:
    """Where the loss of a lossy choice is known from."""
    t = plan.choice.technique
    return [] if t.exact else [f"Quality of {label(t)}: {plan.evidence}."]


def _runner_up(plan: ChosenPlan) -> str:
    found = [a for a in plan.alternatives if a.allowed] or list(plan.alternatives)
    if not found:
        return ""
    best = found[0]
    p = best.prediction
    needs = f" (needs {' '.join(best.needs)})" if best.needs else ""
    text = best.reason if best.reason.startswith(CLAUSES) else f"not chosen: {best.reason}"
    batch = units.integer(number(p.batch))
    return f"{_name(p)}{needs} at batch {batch}: {_describe_times(p)}; {text}."


def _describe_best_other(plan: ChosenPlan) -> str:
    """The best of the other deployments that were asked for, against the choice."""
    if plan.others:
        return f"{_compared(plan, max(plan.others, key=lambda other: _worth(plan, other)))}."
    if plan.impossible:
        return f"{_change(plan, plan.impossible[0])} has no plan within the limits."
    return ""


def _compared(plan: ChosenPlan, other: Prediction) -> str:
    """A plan on another deployment, in a clause."""
    ratio = units.times(_worth(plan, other) / _worth(plan, plan.choice))
    several = max(other.deployment.gpus, plan.choice.deployment.gpus) > 1
    if plan.objective == "throughput":
        rate = f"{units.rate(number(other.output_tok_s))} output tok/s"
        told = f"{rate}, {ratio} {'per GPU' if several else 'that'}"
    elif plan.objective == "cost":
        told = f"{_format_price(other)}, {_more_or_less(plan, other)} cost"
    else:
        told = f"{_describe_times(other)}, {_more_or_less(plan, other)} latency"
    also = _behind(other, " with ")
    name = SPOKEN.get(other.technique.name, label(other.technique))
    batch = units.integer(number(other.batch))
    return f"With {_change(plan, other.deployment)}: {name} at batch {batch}{also}, {told}"


def _more_or_less(plan: ChosenPlan, other: Prediction) -> str:
    """How an objective that should be small compares with the choice's."""
    ratio = _worth(plan, plan.choice) / _worth(plan, other)
    return f"{units.percent(abs(ratio - 1))} {'more' if ratio > 1 else 'less'}"


def _format_price(prediction: Prediction) -> str:
    """What a million generated tokens cost."""
    return f"{units.usd(float(prediction.usd_per_million()[0]))} per million output tokens"


def _worth(plan: ChosenPlan, prediction: Prediction) -> float:
    """The objective, more is better; throughput is per GPU."""
    return score(plan.question, prediction)


def _change(plan: ChosenPlan, other: Deployment) -> str:
    return differing_options(plan.choice.deployment, other)


def _list_changes(plan: ChosenPlan, told: str) -> Iterator[str]:
    """What would bring more, each tried, with its figures."""
    if safer := _safer(plan):
        yield safer
    lines = [f"{_change(plan, none)} has no plan within the limits." for none in plan.impossible]
    best = sorted(plan.others, key=lambda p: _worth(plan, p), reverse=True)[:OTHERS]
    lines = [*(f"{_compared(plan, other)}." for other in best), *lines]
    yield from (line for line in lines if line not in told)
    for q in plan.too_lossy:
        yield (
            f"{needed_option(q.weights_evidence)} admits {q.deployment.weights} weights: "
            f"{phrase_loss(q.weights_evidence)}."
        )
    yield from _advised(plan)
    for binding in plan.binding:
        if binding.gain_without > NO_GAIN:
            yield _binding(plan, binding)
    for knee in plan.knees[-1:]:
        p = knee.prediction
        early = float(p.ttft_s[0]) < 0.9 * float(plan.choice.ttft_s[0])
        if early and plan.likely.kept.get("ttft", 0.0) < CERTAIN:
            yield (
                f"Batch {units.integer(number(p.batch))} lowers TTFT to "
                f"{units.seconds(number(p.ttft_s))} and costs at most "
                f"{units.percent(knee.given_up)} of throughput."
            )
    lifted = {f"a 10 % looser {LABELS[b.limit]}": b.gain_without for b in plan.binding}
    for what, gain in plan.prices.items():
        if gain > NO_GAIN and lifted.get(what, float("inf")) > NEARLY_ALL * gain:
            yield f"{what[0].upper()}{what[1:]}: {_describe_gain(plan, gain)}."


def _advised(plan: ChosenPlan) -> Iterator[str]:
    """Other weights and more GPUs, and once what narrower weights cost."""
    for advice in plan.advice:
        told_once = advice.caution in ("", NARROW)
        yield f"{advice}." if told_once else f"{advice}; {advice.caution}."
    if any(advice.caution == NARROW for advice in plan.advice):
        yield f"{NARROW[0].upper()}{NARROW[1:]}."


def _safer(plan: ChosenPlan) -> str:
    """What keeps the targets nearly surely, where the choice may miss one."""
    likely, share = plan.likely, units.likelihood(LIKELY_ENOUGH)
    if likely.sure or plan.question.workload.batch is not None:
        return ""
    if likely.safer is None:
        return f"No batch meets the targets with a probability of {share}."
    p = likely.safer
    batch = units.integer(number(p.batch))
    lost = 1 - float(p.output_tok_s[0]) / float(plan.choice.output_tok_s[0])
    return (
        f"At batch {batch} the probability of meeting the targets is {share}: "
        f"{_describe_times(p)}, {units.percent(lost)} less throughput."
    )


def _describe_gain(plan: ChosenPlan, gain: float) -> str:
    """A gain of the objective, which may be less of it."""
    if plan.objective == "throughput":
        return f"{units.percent(gain)} more throughput"
    return f"{units.percent(gain / (1 + gain))} less {plan.objective}"


def _binding(plan: ChosenPlan, b: Binding) -> str:
    # gains are those of the best plan there is, rows are compared with the choice
    best, name = _worth(plan, plan.solver.optimum) / _worth(plan, plan.choice), b.technique
    more = _describe_gain(plan, (1 + b.gain_without) * best - 1)
    if b.limit == "loss" and b.evidence is not None:
        unknown = "its loss of quality is unknown"
        loss = unknown if b.evidence.unknown else phrase_loss(b.evidence)
        cost = f"cost {more.removesuffix(' cost')}" if plan.objective == "cost" else f"give {more}"
        return f"With {b.option or '--lossy'}, {name} would {cost}; {loss}."
    if b.limit == "assumed":
        return f"Speculation ({name}): {more}; pass --acceptance once you have measured yours."
    option = {"ttft": "--ttft none", "tpot": "--tpot none"}.get(b.limit, "")
    told = f" ({option})" if option else ""
    with_it = SPOKEN.get(name, name)
    return f"Without the limit on {LABELS[b.limit]}{told}: {more}, with {with_it}."


def _name(prediction: Prediction) -> str:
    """A technique with its settings, as the command line takes it."""
    t = prediction.technique
    chosen = chosen_settings(label(t), params(t))
    return "full KV" if t.name == "full" else notation({"technique": label(t), "params": chosen})


def _describe_times(prediction: Prediction) -> str:
    """TTFT, TPOT and throughput with their ranges."""
    row = _summarize_prediction(prediction) | {"generate": prediction.generate}
    return describe_times(row | {"ranges": caveats.time_ranges(prediction)}, "output_tok_s")


def _list_settings(plan: ChosenPlan) -> Iterator[str]:
    """The choice in the form an engine takes, or that none has it."""
    p = plan.choice
    able = list_engines(p)
    if p.technique.streams_weights and p.batch[0] > 1:
        batch = int(p.batch[0])
        yield (
            f"{units.integer(batch)} prompts share each transfer of the weights in closed batches, "
            f"as `kvsim simulate --max-seqs {batch} --max-tokens {batch * p.prompt}` plays them."
        )
    if not able:
        placed = technique_label(p.technique) == MIXED  # its settings are shares, told in words
        name = phrase_technique(p.technique) if placed else p.technique.name
        own = "`kvsim validate` runs kvsim's implementation"
        own = "nor does kvsim's implementation" if p.technique.fills_drive else own
        told, other = f"No serving engine runs {name}; {own}.", plan.engine_best
        if other is not None:
            told += (
                f" {join_titles(list_engines(other))} runs {other.technique.name} at batch "
                f"{units.integer(number(other.batch))}: {units.rate(number(other.output_tok_s))} "
                "output tok/s."
            )
        yield told
        return
    asked = plan.question.admission.engine
    engine = asked if asked in SERVERS else next((e for e in able if e in SERVERS), "")
    if not engine:
        yield f"Runs in {join_titles(able)}."
    else:
        share = plan.question.limits.gpu_memory / p.deployment.hardware.gpu_memory
        yield from describe_command(engine, serve_prediction(p, share), p.deployment.stack.name)
