"""The result of ``kvsim plan`` for a service: the request rate within targets, and alternatives."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING

from kvsim.emit.served import serve_costs
from kvsim.machines.deployment import Deployment, basis
from kvsim.planner.alternatives import NoPlanError
from kvsim.planner.load import Carried
from kvsim.planner.question import (
    DEFAULT_TPOT,
    DEFAULT_TTFT,
    Admission,
    Question,
    narrower_formats,
    needed_option,
)
from kvsim.planner.remedies import Otherwise
from kvsim.planner.service import (
    MATTERS,
    MAX_ALTERNATIVES,
    ClassPlan,
    PlayedOption,
    ServicePlan,
    compare_options,
    full_weights,
)
from kvsim.prediction.pool import KvPool, pool
from kvsim.quality.evidence import Evidence
from kvsim.report import evidence, names, phrases, units
from kvsim.report.answer import BRIEF, MAX_CHANGES, MAX_VERDICT_WORDS, Answer, verdict
from kvsim.report.json import Row, number, pick
from kvsim.report.predict import prediction
from kvsim.report.result import Result
from kvsim.report.suitability import WITH_CONFIDENCE, join_titles, phrase_loss
from kvsim.report.table import Column, Table, quantity_column, quantity_columns, text_column
from kvsim.report.terminal import BLANK, Block, Command, Heading, count_lines
from kvsim.techniques.released import ENGINES

if TYPE_CHECKING:
    from kvsim.emit.served import Served
    from kvsim.report.pictures import Chart

MAX_LINES = 25  # of an answer on a terminal
BRIEF_ROWS = 3  # of the choice and its alternatives that a terminal shows unless asked for more
RUN_IT = "To see this plan in full, run:"
DRAFTERS = ("mtp", "eagle3")  # that a plan says why it does without
MAX_MISSING = 4  # layouts that are named where nothing meets the targets
NO_GAIN = 0.02  # relative gain below which nothing is gained: rates are found to a hundredth


def make_result(
    plan: ServicePlan,
    engines: Sequence[Row] = (),
    curve: bool = False,
    classes: Sequence[ClassPlan] = (),
    turns: Sequence[Otherwise] = (),
) -> Result[ServicePlan]:
    """Make the result of ``kvsim plan`` for a service.

    Parameters
    ----------
    plan
        The plan that was found.
    engines
        Configurations of the engines named by ``--emit``.
    curve
        Whether to list latencies at lower request rates.
    classes
        Plans for requests of each class of prompt lengths alone (``--per-class``).
    turns
        Plans with one input changed (``--explain``).
    """
    chosen = plan.choice
    d, base = chosen.carried.deployment, prediction(plan.prediction)
    rows = list(_rows(plan))
    fields: Row = {
        "choice": {
            **{key: base[key] for key in ("technique", "params", "batch")},
            "layers": phrases.layers_of(plan.prediction),
            **_settings(chosen.carried),
        },
        "objective": plan.question.objective,
        "service": True,
        "load": _load_fields(plan),
        "predicted": base,
        "quality": phrases.quality(chosen.candidate.evidence),
        "alternatives": rows[1:],
        "limits": {k: number(v) for k, v in chosen.candidate.question.limits.stated().items()},
        "usd_per_gpu_hour": number(d.hardware.price),
        "prices": plan.prices,
        "barely_met": plan.barely and pick(plan.barely, "target", "alone", "roomier", "per_s"),
        "narrower_weights": plan.narrower and _figures(plan.narrower.carried),
        "basis": basis(d),
        "solver": {"options": plan.considered, "plays": plan.plays},
        "not_modelled": list(evidence.NOT_MODELLED_SERVING),
    }
    answer, not_modelled = _answer(plan), f"Not modelled: {'; '.join(fields['not_modelled'])}."
    if classes:
        told = [_describe_class(one) for one in classes]
        answer = replace(answer, changes=[*answer.changes, *told])
        fields["classes"] = [
            {"least": one.least, "most": one.most, "share": number(one.share)}
            | {"carried": one.plan and _figures(one.plan.choice.carried)}
            for one in classes
        ]
    if turns:
        answer = replace(answer, changes=[*_describe_turns(turns), *answer.changes])
        fields["turns"] = [
            {"option": one.option, "carried": one.choice and _figures(one.choice.carried)}
            for one in turns
        ]
    if engines:
        fields["settings"] = list(engines)
    fields = {"answer": answer.row(), **fields}
    shown = _table(rows, plan)
    load = plan.question.load.words
    title = names.describe_deployment(d) + ("" if load in answer.verdict else f", {load}")
    ground = evidence.describe_basis(fields["basis"])
    played = (
        f"Compared {plan.considered:,} settings analytically; "
        f"{plan.plays} simulations of {len(plan.question.load.requests):,} requests."
    )
    cards = {row.get("gpu", d.hardware.name) for row in rows}
    asked = {q.deployment.weights for q in plan.question.deployments}
    compared = len(cards) > 1 or len(asked) > 1  # by the user, of which no row is to be cut
    fewest = BRIEF_ROWS if compared else BRIEF_ROWS - 1
    ways = [(BRIEF_ROWS, BRIEF, MAX_CHANGES), (BRIEF_ROWS, 1, MAX_CHANGES)]
    ways += [(fewest, 1, changes) for changes in range(MAX_CHANGES, 0, -1)]
    blocks: list[Block] = []
    for most, sentences, changes in ways:  # the fullest that fits on a screen
        brief = shown if len(rows) <= most else _shorten_table(rows, plan, most)
        body = answer.body(sentences, changes, command=not engines)
        blocks = [Heading(title), *answer.head(), brief, BLANK, *body]
        blocks += phrases.paste_blocks(engines)
        if count_lines(blocks) <= MAX_LINES:
            break
    more: list[Block] = [*answer.rest(sentences, changes), ground, not_modelled, played]
    if brief is not shown:
        more = [BLANK, shown, BLANK, *more]
    tables = [shown]
    if curve:
        fields["curve"] = points = list(plan.curve())
        kept = Column("kept", "kept_share", units.percent)
        rate = Column("requests/s", "requests_per_s", lambda x: units.format_number(x, 3))
        tables.append(Table([rate, kept, *_time_columns()], points))
        blocks += [BLANK, "Times by request rate, without the error margin:", tables[-1]]

    def draw() -> "list[Chart]":
        from kvsim.report.plan_charts import draw_service  # loaded where a page is asked for

        return draw_service(plan)

    return Result(
        title,
        answer,
        fields,
        plan,
        rows=rows,
        tables=tables,
        blocks=blocks,
        more=more,
        draw=draw,
        remarks=[not_modelled],
        data=evidence.newest_measurement([d]),
        foot=[ground],
    )


def _shorten_table(rows: Sequence[Row], plan: ServicePlan, most: int) -> Table:
    """The choice and what it is first compared with.

    That is techniques that were named, a layout that carries more, other cards and weights that
    were named, advice on weights, another layout, and full KV.
    """
    only = plan.choice.candidate.question.admission.only

    def order(row: Row) -> tuple[bool, ...]:
        spread = any(row.get(key) != rows[0].get(key) for key in ("tp", "pp", "dp", "ep"))
        as_many, key = row["gpus"] == rows[0]["gpus"], (row["gpu"], row["weights"])
        better = spread and as_many and row["requests_per_s"] > rows[0]["requests_per_s"]
        new = key not in seen
        seen.add(key)
        changed = (new and row[name] != rows[0][name] for name in ("gpu", "weights"))
        named = row["technique"] in only and row["technique"] not in techniques
        techniques.add(row["technique"])
        first = (row is rows[0], named, better, *changed, spread, row["technique"] == "full")
        return tuple(not x for x in first)

    techniques = {rows[0]["technique"]}
    seen: set[tuple[str, str]] = {(rows[0]["gpu"], rows[0]["weights"])}
    some = [row for _, row in sorted(zip(map(order, rows), rows, strict=True), key=lambda x: x[0])]
    some = [row for row in rows if row in some[:most]]
    at = _price(plan)
    note = count_hidden(len(rows) - most) + (f" Price of the choice: {at}." if at else "")
    return replace(_table(some, plan), note=note, below=_write_settings)


def count_hidden(rows: int) -> str:
    """Say how many rows of a table only ``--verbose`` shows, if any."""
    return f"{rows} more {'row' if rows == 1 else 'rows'} with --verbose." if rows > 0 else ""


def make_empty_result(none: NoPlanError, command: str = "") -> Result[NoPlanError]:
    """Make the result of ``kvsim plan`` for a service where nothing meets the targets.

    Parameters
    ----------
    none
        The reason, and changes that would help.
    command
        The command line, which changes are added to.
    """
    remedies = [
        {
            "option": r.option,
            "command": phrases.change_command(command, r.changes),
            "caution": r.caution,
            "loss": r.evidence and phrase_loss(r.evidence),
            **_figures(r.gives),
        }
        for r in none.remedies
        if isinstance(r.gives, Carried)
    ]
    near = none.nearest
    told = [] if near is None else [_nearest(near, none.remedies[0].option)]
    changes = [
        f"`{row['option']}`: {_rate(row['requests_per_s'])} requests/s"
        + (f" on {row['gpus']} GPUs" if row["gpus"] > 1 else "")
        + (f"; {row['loss']}" if row["loss"] else "")
        for row in remedies[1:]
    ]
    plan = [] if near is None else [RUN_IT, Command(str(remedies[0]["command"]))]
    run = [] if near is None else list(_how_to_run(near))
    said = verdict(["No plan meets the targets.", *told])
    answer = Answer(verdict=said, changes=changes, settings=run)
    fields = {"answer": answer.row(), "choice": None, "reason": none.reason, "advice": remedies}
    columns = [
        text_column("change", "option"),
        Column("requests/s", "requests_per_s", lambda rate: units.format_number(rate, 3)),
        *_time_columns(),
    ]
    return Result(
        names.describe_deployment(none.deployment),
        answer,
        fields,
        none,
        remedies,
        tables=[Table(columns, remedies)] if remedies else [],
        blocks=[none.asked, *told, *plan, *answer.body()],
        notes=[none.asked] if none.asked else [],
        command=command,
    )


MARGIN = " (which allows for prediction errors)"  # why a target is longer than the times predicted


def _nearest(near: PlayedOption, option: str) -> str:
    """The plan that is nearest to what was asked for, in a sentence."""
    c = near.carried
    times = [
        f"{name} {units.seconds(found['p50'])} (p90 {units.seconds(found['p90'])})"
        for name, found in (("TTFT", c.ttft), ("TPOT", c.tpot))
        if found["p90"]
    ]
    found = near.candidate.evidence
    limits = {"TTFT": c.asked.ttft, "TPOT": c.asked.tpot}
    kept = [f"{name} {units.seconds(x)}" for name, x in limits.items() if isfinite(x)]
    within = f" within {' and '.join(kept)}" if kept else ""
    run = f"{_run(c)} serves at least {_rate(c.per_s)} requests/s{within}"
    loss = "" if found.kind == "lossless" else f"; {phrase_loss(found)}"
    of_target = option.startswith(("--ttft", "--tpot")) and c.asked.sure > 0.5
    margin = MARGIN if of_target else ""
    return f"Nearest plan, with {option}{margin}: {run}; {', '.join(times)}{loss}."


def _answer(plan: ServicePlan) -> Answer:
    c, found = plan.choice.carried, plan.choice.candidate.evidence
    d, technique, money = c.deployment, names.label(c.technique), [_money(plan)]
    exact = f"Without the error margin: {_rate(plan.stretch)} requests/s."
    asked = plan.question.objective == "cost"
    said = verdict(
        [_sentence(plan), plan.question.load.caution, _refused(plan), *(money if asked else [])],
        [_trace(plan), exact if plan.stretch > c.per_s * 1.005 else "", *([] if asked else money)],
    )
    return Answer(
        verdict=said,
        figures={
            **_figures(c),
            "stretch_requests_per_s": number(plan.stretch),
            "probability": plan.question.asked.sure,
            "ranges": evidence.time_ranges(d, technique, c.ttft["p90"], c.tpot["p90"]),
        },
        changes=list(_changes(plan)),
        settings=list(_how_to_run(plan.choice)),
        evidence=[
            *evidence.list_measurements(d, technique),
            *([] if found.kind == "lossless" else [f"Quality: {found}."]),
        ],
        assumed=evidence.list_assumptions(d.hardware, float(plan.prediction.host_bytes[0]), ""),
        left_out=[] if plan.question.research else list(_left_out(plan)),
    )


def _sentence(plan: ServicePlan) -> str:
    """The decision: what to run, the rate it serves, with what probability, at what quality.

    Of the ways to say it, the fullest that leaves room in the paragraph.
    """
    c, asked = plan.choice.carried, plan.question.asked
    usual, raised = {"ttft": DEFAULT_TTFT, "tpot": DEFAULT_TPOT}, plan.question.raised
    given = plan.question.given
    own = {x for x, limit in usual.items() if x not in given and getattr(asked, x) == limit}
    last = next((name for name in reversed(usual) if name in raised), "")
    idle = f" (raised: twice an idle server's p{100 * asked.share:g}, margin included)"
    targets = [
        f"{name.upper()} {units.seconds(getattr(asked, name))}"
        + (" (default)" if own == {name} else "")
        + (idle if name == last else "")
        for name in usual
        if isfinite(getattr(asked, name))
    ]
    kept = "served"
    if targets:
        both = " (defaults)" if len(own) > 1 else ""
        kept = f"within {' and '.join(targets)}{both} for {100 * asked.share:g} % of requests"
        kept += f" (probability {100 * asked.sure:g} %)" if asked.sure > 0.5 else ""
    lead = "Run" if plan.choice.candidate.engines else "Best, but no engine runs it:"
    what = f"{lead} {_run(c)}: {_rate(c.per_s)} requests/s"
    tokens = f" ({units.rate(c.output_tok_s)} output tok/s)"
    load, found = plan.question.load.words, plan.choice.candidate.evidence
    loss = phrase_loss(found)
    brief = _loss(found)
    ways = (
        f"{what}{tokens} {kept}; {load}; {loss}.",
        f"{what} {kept}; {load}; {loss}.",
        f"{what} {kept}; {load}; {brief}.",
        f"{what} {kept}; {brief}.",
        f"{what}; {brief}.",
    )
    room = MAX_VERDICT_WORDS - len(plan.question.load.caution.split())
    fits = (way for way in ways if len(way.split()) <= room)
    return next(fits, f"{what}.")


def _refused(plan: ServicePlan) -> str:
    """How many requests the choice cannot hold, in a sentence; empty if none."""
    share = _share_refused(plan.choice)
    return (
        f"{units.percent(share)} of requests exceed its KV cache and are refused." if share else ""
    )


def _share_refused(option: PlayedOption) -> float:
    """Share of requests that are larger than an option's KV cache, none of which count as kept."""
    return option.carried.refused / len(option.carried.load.requests)


def _run(found: Carried) -> str:
    """A technique on its GPUs, with layout and weights of all replicas."""
    d = found.deployment
    spread = d.parallelism.words()
    each = f"{d.gpus} x " if d.gpus > 1 else ""
    many = f"{found.replicas} replicas, each " if found.replicas > 1 else ""
    layout = f" ({spread})" if spread else ""
    where = f"{many}{each}{d.hardware.name}{layout} with {d.weights} weights"
    return f"{names.phrase_technique(found.technique)} on {where}"


def _rate(per_s: float | None) -> str:
    if per_s is None:
        return units.DASH
    return units.rounded(per_s, 3) if per_s < 100 else f"{per_s:,.0f}"


def _trace(plan: ServicePlan) -> str:
    """How much of a trace one replica carries, and how many carry it."""
    rate = plan.question.load.per_s
    if not rate:
        return ""
    share = plan.choice.carried.each_per_s / rate
    if not plan.replicas:
        return f"That is {units.format_number(share, 2)} times the trace's rate."
    if plan.replicas == 1 and share < 1:  # of few requests at once
        return "One replica serves the trace."
    if plan.replicas == 1:
        return f"One replica serves {units.format_number(share, 2)} times the trace's rate."
    return f"{plan.replicas} such replicas serve the trace."


def _describe_class(one: ClassPlan) -> str:
    """What serves prompts of some lengths best."""
    of = f"{units.percent(one.share)} of requests, prompts of {one.least:,} to {one.most:,} tokens"
    if one.plan is None:
        return f"Alone, {of}: nothing meets the targets."
    c = one.plan.choice.carried
    tokens = _settings(c)["max_tokens"]
    return f"Alone, {of}: {_run(c)}, {tokens:,} tokens per pass, {_rate(c.per_s)} requests/s."


def _describe_turns(turns: Sequence[Otherwise]) -> Iterator[str]:
    """What is chosen where one input differs, those together for which it is the same."""
    same: dict[str, list[str]] = {}
    for one in turns:
        if one.choice is None:
            same.setdefault("Nothing here meets the targets", []).append(f"with {one.option}")
        else:
            c = one.choice.carried
            same.setdefault(_run(c), []).append(f"{_rate(c.per_s)} with {one.option}")
    for what, told in same.items():
        rates = ", requests/s: " if what[0] != "N" else " "
        yield f"{what[0].upper()}{what[1:]}{rates}{names.join_words(told, 'and')}."


def _money(plan: ServicePlan) -> str:
    usd = plan.choice.carried.usd_per_request
    if usd is None:
        return ""
    million = usd / plan.question.load.generate * 1e6
    return f"{units.usd(million)} per million output tokens."


def _changes(plan: ServicePlan) -> Iterator[str]:
    """What would bring more, each played."""
    asked, barely = plan.question.asked, plan.barely
    if barely is not None:
        name = barely.target.upper()
        yield (
            f"{name} {units.seconds(getattr(asked, barely.target))} leaves almost no room for "
            f"load: the p{100 * asked.share:g} request alone takes {units.seconds(barely.alone)}, "
            f"margin included. Nearest target with room: {name} {units.seconds(barely.roomier)}, "
            f"{_rate(barely.per_s)} requests/s."
        )
    gains = [
        (what, gain)
        for what, gain in plan.prices.items()
        if gain > NO_GAIN and not (barely and what.endswith(barely.target.upper()))
    ]
    if gains:
        told = []
        for what, gain in gains:
            name = what.split()[-1]  # of "a 10 % looser TTFT" or "twice the TTFT"
            limit = (2.0 if what.startswith("twice") else 1.1) * getattr(asked, name.lower())
            told.append(f"by {units.percent(gain)} with {name} {units.seconds(limit)}")
        looser = "A looser target" if len(told) == 1 else "Looser targets"
        yield f"{looser} would raise the rate: {', '.join(sorted(told, key=_by_target))}."
    if plan.fills_cache:
        yield (
            "Long requests fill the KV cache at times: more GPUs, or narrower weights or caches, "
            "would raise the rate."
        )
    elif not (gains or barely or plan.narrower):
        most = plan.choice.candidate.question.workload.batch
        cause, larger = "the speed of the GPUs", ""
        if most is not None:
            cause, larger = f"{cause} or by --batch {most}", " or a larger batch"
        yield (
            f"The rate is limited by {cause}: neither longer targets nor more memory would raise "
            f"it much; more or faster GPUs{larger} would."
        )
    unfit = [q for q in plan.missing if full_weights(q.deployment) > q.limits.gpu_memory]
    late = [q.deployment for q in plan.missing if q not in unfit]
    if unfit:
        size = units.size(min(full_weights(q.deployment) for q in unfit))
        some = [replace(q.deployment, ep=1) for q in unfit]  # which hold as much with any ep
        chosen = replace(plan.choice.carried.deployment, ep=1)
        said = _name_missing(plan, chosen, some)
        yield f"The weights ({size} per GPU or more) do not fit with {said}."
    if late:
        said = _name_missing(plan, plan.choice.carried.deployment, late)
        yield f"No plan meets the targets with {said}."
    layout = plan.layout
    if layout is not None and layout.value > (1 + MATTERS) * plan.choice.value:
        yield f"Another layout would raise the rate: {_describe_layout(plan, layout)}."


def _name_missing(plan: ServicePlan, chosen: Deployment, others: Sequence[Deployment]) -> str:
    """Name deployments by the options in which they differ from the choice."""
    cards = {q.deployment.hardware.name for q in plan.question.deployments}
    named = []
    for other in others:
        card, options = f"--gpu {other.hardware.name}", phrases.differing_options(chosen, other)
        named.append(options if card in options or len(cards) == 1 else f"{card} {options}")
    named = list(dict.fromkeys(named))
    more = len(named) - MAX_MISSING
    shown = [*named[:MAX_MISSING], *([f"{more} more"] if more > 0 else [])]
    return names.join_words(shown, "or")


def _by_target(told: str) -> str:
    """Sorts gains by the target that they are of: TPOT before TTFT."""
    return told.partition(" with ")[2][:4]


def _how_to_run(chosen: PlayedOption) -> Iterator[str]:
    """The command of the engine, or that none runs it."""
    able = chosen.candidate.engines
    if not able:
        yield "No engine runs it; `kvsim validate` runs kvsim's own implementation."
        return
    asked = chosen.candidate.question.admission.engine
    engine = asked if asked in able else able[0]
    served, many = serve_choice(chosen), chosen.carried.replicas
    stack = chosen.carried.deployment.stack.name
    yield from phrases.describe_command(engine, served, stack, many)
    yield _describe_concurrency(chosen)


def serve_choice(chosen: PlayedOption) -> "Served":
    """Describe a replica of a chosen option for engines."""
    room = _kv_pool(chosen)
    return serve_costs(chosen.carried.costs, room.share, fitting=int(room.concurrency))


def _kv_pool(chosen: PlayedOption) -> KvPool:
    """The KV pool of a replica for requests of the mean lengths."""
    c = chosen.carried
    share = chosen.candidate.question.limits.gpu_memory / c.deployment.hardware.gpu_memory
    prompt, generate = round(c.load.prompt), round(c.load.generate)
    return pool(c.technique, c.deployment, prompt, generate, share)


def _describe_concurrency(chosen: PlayedOption) -> str:
    """How many requests run at once, and how many the cache could hold."""
    c, asked = chosen.carried, chosen.candidate.question.workload.batch
    room = _kv_pool(chosen)
    each = " per replica" if c.replicas > 1 else ""
    fit = ""
    if room.tokens:
        fit = f"; {_rate(room.concurrency)} of mean length fit in the KV cache "
        fit += f"({phrases.describe_pool(room, c.deployment.dp)})"
    given = f"; --batch {asked} allows no more than {asked}" if asked is not None else ""
    return (
        f"Requests at once{each}: {_rate(c.running)} in prefill or decode on average{fit}{given}."
    )


def _left_out(plan: ServicePlan) -> Iterator[str]:
    """What users ask about that the choice does not use, with one reason each."""
    found, d = plan.choice.candidate.question, plan.choice.carried.deployment
    asked = found.admission
    if plan.question.load.reuses:
        yield "prefixes from host memory (`kvsim simulate --host-cache` compares sizes)"
    else:
        yield "prefix caching (no reuse stated: --turns, --cached, --hit-rate)"
    shown = [plan.choice, *(a.option for a in plan.alternatives)]
    drafted = any(o.carried.technique.drafts for o in shown)
    questions = plan.question.deployments
    told = {o.carried.deployment.weights for o in shown} | {
        x.deployment.weights for x in plan.missing
    }
    for name in dict.fromkeys(q.deployment.weights for q in questions if not q.weights_lose):
        if name not in told:
            of_it = [q for q in questions if q.deployment.weights == name]
            fit = any(full_weights(q.deployment) <= q.limits.gpu_memory for q in of_it)
            # with --total-gpus, ``missing`` is not known
            less = "carry less or miss the targets" if plan.question.total_gpus else "carry less"
            yield f"{name} weights (they {less if fit else 'do not fit'})"
    yield from list_unused(asked, d, drafted, questions, plan.narrower is not None)


def list_unused(
    asked: Admission,
    deployment: Deployment,
    drafted: bool,
    questions: Sequence[Question],
    advised: bool,
) -> Iterator[str]:
    """List features that users ask about but that a plan does not use, with one reason each.

    Parameters
    ----------
    asked
        Features that the plan may consider.
    deployment
        The chosen deployment.
    drafted
        Whether speculation is shown.
    questions
        The deployments that were asked for.
    advised
        Whether other weights are shown.
    """
    drafting = [t for t in asked.candidates() if t.name in DRAFTERS and t.name in ENGINES["vllm"]]
    if drafting and not drafted:
        able = [t.name for t in drafting if asked.has_drafter(t, deployment)]
        no = "no MTP module; EAGLE-3 acceptance was measured on other models only: --acceptance"
        yield f"speculation ({f'{able[0]} serves fewer requests/s' if able else no})"
    formats = {q.deployment.weights for q in questions}
    lossy = {q.deployment.weights: q.weights_evidence for q in questions if q.weights_lose}
    narrower = [name for name in narrower_formats(deployment) if name not in formats]
    for name, known in lossy.items():
        yield f"{name} weights ({_loss(known)}; {needed_option(known)} admits them)"
    if not lossy and narrower and len(formats) == 1 and not advised:
        yield f"{names.join_words(narrower, 'or')} weights (--weights auto compares them)"


def _settings(c: Carried) -> Row:
    """Limits of each rank, as the engine's options have them."""
    d, rules = c.deployment, c.costs.rules
    return {
        "max_seqs": -(-rules.max_seqs // d.dp),
        "max_tokens": rules.max_tokens // d.lanes,
        "replicas": c.replicas,
        "gpus": c.gpus,
    }


def _figures(c: Carried) -> Row:
    """What is carried, under contract names."""
    usd = c.usd_per_request
    return {
        **names.technique_fields(c.technique),
        "gpu": c.deployment.hardware.name,
        **names.ranks(c.deployment),
        "weights": c.deployment.weights,
        **_settings(c),
        "requests_per_s": number(c.per_s),
        "requests_per_s_per_gpu": number(c.per_s / c.gpus),
        "output_tok_s": number(c.output_tok_s),
        "output_tok_s_per_user": number(1 / c.tpot["p50"] if c.tpot["p50"] else 0.0),
        "running": number(c.running),
        "ttft_s": {k: number(v) for k, v in c.ttft.items()},
        "tpot_s": {k: number(v) for k, v in c.tpot.items()},
        "kept_share": number(c.share),
        "usd_per_request": number(usd),
        "usd_per_million_tokens": None if usd is None else number(usd / c.load.generate * 1e6),
        "prefix_hits": number(c.hits),
        "slower": pick(c.slower, "prefill", "decode"),
    }


def _load_fields(plan: ServicePlan) -> Row:
    q = plan.question
    return {
        "words": q.load.words,
        **pick(q.load, "prompt", "generate"),
        "longest": q.load.longest,
        "refused_by": {"context": q.load.left_out, "cache": plan.choice.carried.refused},
        "ttft_s": number(q.asked.ttft),
        "tpot_s": number(q.asked.tpot),
        "share": q.asked.share,
        "sure": q.asked.sure,
        "stretch_requests_per_s": number(plan.stretch),
        "trace_requests_per_s": number(q.load.per_s) if q.load.per_s else None,
        "trace_replicas": plan.replicas or None,
        **_figures(plan.choice.carried),
    }


def _rows(plan: ServicePlan) -> Iterator[Row]:
    """The choice, at most five alternatives, and the best of what no engine runs."""
    chosen = plan.choice.carried.deployment
    yield _row(plan.choice, "choice", "")
    extra = 0
    if plan.narrower is not None:
        option = f"--weights {plan.narrower.carried.deployment.weights}"
        more = compare_options(plan.question, plan.choice, plan.narrower)
        told = f"{option}: {more}; {_loss(plan.narrower.candidate.evidence)}"
        yield _row(plan.narrower, f"needs {option}", told)
        extra += 1
    if plan.layout is not None:
        yield _row(plan.layout, "or", _describe_layout(plan, plan.layout))
        extra += 1
    for a in plan.alternatives[: MAX_ALTERNATIVES - extra]:
        needs, d = a.option.candidate.needs, a.option.carried.deployment
        where = phrases.differing_options(chosen, d)
        told = f"{where}: {a.reason}" if where else a.reason
        as_many = a.option.carried.gpus == plan.choice.carried.gpus
        if as_many and d.parallelism != chosen.parallelism:
            told = _describe_layout(plan, a.option)
        known, guessed = a.option.candidate.evidence, needs == "--acceptance"
        if needs:
            admitted = f"{_loss(known)}, which {needs} allows"
            told += f", but needs {needs}: {_loss(known)}" if guessed else f"; {admitted}"
        elif known.kind != "lossless":
            told += f"; {_loss(known)}"
        if a.option.carried.refused != plan.choice.carried.refused:
            share = _share_refused(a.option)
            told += f"; refuses {f'{units.percent(share)} of requests' if share else 'none'}"
        yield _row(a.option, f"needs {needs}" if needs else "or", told)
    if plan.research is not None:
        more = compare_options(plan.question, plan.choice, plan.research)
        lost = phrase_loss(plan.research.candidate.evidence)
        told = f"{more}, but only --research considers it; {lost}"
        gain = number(plan.research.value / plan.choice.value - 1)
        yield _row(plan.research, "no engine", told) | {"gain": gain}


def _describe_layout(plan: ServicePlan, other: PlayedOption) -> str:
    """Another division of as many GPUs, and how it compares."""
    c = other.carried
    where = phrases.differing_options(plan.choice.carried.deployment, c.deployment)
    if c.replicas > 1:
        where = f"{c.replicas} replicas with {c.deployment.parallelism.words() or 'a GPU each'}"
    return f"{where}: {compare_options(plan.question, plan.choice, other)}"


def _loss(found: Evidence) -> str:
    """A loss in a line, without what it was not tested on, which the choice's sentence says."""
    return phrase_loss(found).partition("; not tested on")[0].replace(WITH_CONFIDENCE, "")


def _row(option: PlayedOption, standing: str, reason: str) -> Row:
    found, able = option.candidate.evidence, option.candidate.engines
    runs = f"runs in {join_titles(able)}" if able else "runs in no engine"
    loss = phrase_loss(found)
    return {
        "standing": standing,
        **_figures(option.carried),
        "engines": able,
        "quality": phrases.quality(found),
        "reason": f"{reason}; {runs}" if reason and not able else reason or f"{loss}; {runs}",
    }


def _time_columns() -> list[Column]:
    """Medians and 90th percentiles of both times."""
    parts, keys = (("p50", 2), ("p90", 1)), ("ttft_s", "tpot_s")
    return [quantity_column(key, rank, part) for key in keys for part, rank in parts]


def _table(rows: Sequence[Row], plan: ServicePlan) -> Table:
    formats = len({r["weights"] for r in rows}) > 1
    at = _price(plan)
    columns = [
        text_column("", lambda r: r["standing"].partition(" --")[0]),
        text_column("technique", "technique"),
        Column("GPUs", "gpus"),
        *([text_column("weights", "weights", rank=4)] if formats else []),
        Column("requests/s", "requests_per_s", _rate),
        *quantity_columns(output_tok_s=1),
        *_time_columns(),
        Column("running", "running", _rate, 5),  # which the answer states for the choice
        *(quantity_columns(usd_per_million_tokens=3) if at else []),
    ]

    def is_choice(row: Row) -> bool:
        return bool(row["standing"] == "choice")

    def write_below(row: Row) -> str:
        return "; ".join(filter(None, [_write_settings(row), at if is_choice(row) else ""]))

    return Table(columns, rows, below=write_below, marked=is_choice)


def _price(plan: ServicePlan) -> str:
    """What a GPU of the choice costs, or nothing where that is not known."""
    hardware = plan.choice.carried.deployment.hardware
    if hardware.price is None:
        return ""
    several = len({q.deployment.hardware.name for q in plan.question.deployments}) > 1
    more = "; --seller any: each card where it is cheapest" if several else ""
    return f"{names.describe_price(hardware)}{more}"


def _write_settings(row: Row) -> str:
    """Settings and the reason of a row."""
    words = [f"{k}={v}" for k, v in names.chosen_settings(row["technique"], row["params"]).items()]
    return "; ".join(filter(None, [", ".join(words), row["reason"]]))
