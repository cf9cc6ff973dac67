"""The result of ``kvsim predict``: a row for each prediction, and a verdict."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from csv import DictWriter
from dataclasses import replace
from io import StringIO
from itertools import product
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from kvsim.console import escape_controls
from kvsim.errors import InputError
from kvsim.evidence.ledger import known_difference
from kvsim.machines.deployment import Deployment, basis
from kvsim.machines.parallel import Parallelism
from kvsim.options import ENGINE_SHARE
from kvsim.prediction.breakeven import break_even_acceptance, gains_by_batch
from kvsim.prediction.explain import binding, breakdown
from kvsim.prediction.generate import Prediction, at_batch
from kvsim.prediction.memory import decode_point, given_memory, prefill_point
from kvsim.prediction.pool import count_held, longest_prompt, pool, remedies, usual_share
from kvsim.report import caveats, evidence, phrases, units
from kvsim.report.answer import Answer, verdict
from kvsim.report.evidence import INTERVAL
from kvsim.report.json import Row, number, pick, resident_bytes
from kvsim.report.names import (
    SPOKEN,
    distinct_names,
    join_words,
    name_row,
    phrase_technique,
    ranks,
    settings,
    short_names,
    spec,
    technique_fields,
)
from kvsim.report.result import Result, flatten
from kvsim.report.suitability import (
    OFFLOAD_NOTE,
    describe_engines,
    describe_offloaded,
    describe_quality,
    name_engines,
    summarize_quality,
)
from kvsim.report.table import Column, Table, disk_column, quantity_columns, text_column
from kvsim.report.terminal import BLANK, Block, Heading, Items
from kvsim.serving.servable import why_refused
from kvsim.techniques.heads import lacks_head
from kvsim.techniques.papers.full import Full
from kvsim.techniques.technique import NEEDS_KERNEL, Technique, compose

if TYPE_CHECKING:
    from kvsim.report.pictures import Chart

AT_SHARE = "at the engines' default share of memory"
BEYOND_SHARE = "needs more GPU memory than engines use by default"
MARKED = f"{BEYOND_SHARE}; it takes"  # begins a note on how much it takes
LOW_BIT = ": the low-bit cache assumes"  # begins a note that says less than a missing kernel
MAX_RANKED = 10  # rows that a terminal shows of all techniques
MAX_ENGINES = 4  # techniques of which a terminal says which engines run them
MAX_POOLS = 3  # techniques of which the KV pool is told
MANY_ROWS = 6  # above which notes and measurements are shown with --verbose only
MAX_FALLBACK = 4  # points of which each is told that only one technique fits
MAX_NOTES = 2  # notes and assumptions that a terminal shows
OF_BATCHES = (
    "TTFT: whole batch, idle GPU; decode tok/s: batch / TPOT; output tok/s: with prefill; "
    "max batch: at the share of GPU memory that engines use by default"
)
OF_CLIENTS = (
    "each client sends its next request at once; TTFT: queueing included; tok/s: of all clients"
)


def predict_points(
    deployment: Deployment,
    techniques: Sequence[Technique],
    batches: Sequence[int],
    prompts: Sequence[int],
    generates: Sequence[int],
    loop: bool = False,
    ranked: bool = False,
) -> Result[list[Prediction]]:
    """Predict every technique at every combination of sizes, and make the result.

    Parameters
    ----------
    deployment
        The deployment.
    techniques
        Techniques to compare; if there are several, those that cannot run are left out.
    batches
        Batch sizes, or numbers of clients if ``loop`` is set. [sequences]
    prompts
        Prompt lengths. [tokens]
    generates
        Numbers of generated tokens per request. [tokens]
    loop
        Whether clients send one request after another to a server (a closed loop).
    ranked
        Whether to sort the rows by speed, those that fit in memory first.

    Returns
    -------
    Result
        A row for each prediction; ``.found`` has the predictions.

    Raises
    ------
    InputError
        If no technique can run, or a size is impossible.
    """
    made = Prediction
    if loop:
        from kvsim.serving.outcome import Clients  # with the compiled simulator

        made = Clients
    left_out = []
    found: list[Prediction] = []
    batches, prompts, generates = (list(dict.fromkeys(x)) for x in (batches, prompts, generates))
    column = np.array(batches, dtype=float)
    for t in techniques:
        reason = t.refuses_released(deployment)
        if reason and len(techniques) == 1:
            raise InputError(f"{phrase_technique(t)} cannot run here: {reason}")
        if reason:
            left_out.append(f"{phrase_technique(t)} cannot run here: {reason}")
            continue
        # each batch is served in as many parts as divide it
        columns = [column] if t.tiles() == 1 else np.split(column, column.size)
        for prompt, generate in product(prompts, generates):
            for some in columns:
                p = made(t, deployment, some, prompt, generate)
                found += [at_batch(p, i) for i in range(some.size)]
    if not found:
        raise InputError(
            f"--technique: none of these techniques can run on this deployment; {left_out[0]}"
        )
    rows = [prediction(p) for p in found]
    for p, row in zip(found, rows, strict=True):
        row["refused"] = why_refused(p.technique, p.deployment, p.prompt, p.generate)
        row["notes"][:0] = _note_share(row, p)
    if ranked:
        order = sorted(
            range(len(rows)), key=lambda i: (not rows[i]["fits"], -phrases.compared_rate(rows[i]))
        )
        found, rows = [found[i] for i in order], [rows[i] for i in order]
    return _make_result(found, rows, left_out, ranked)


def _note_share(row: Row, prediction: Prediction) -> list[str]:
    """Note that a batch fits only beyond the share of memory that engines use by default."""
    d = prediction.deployment
    if not row["fits"] or usual_share(d) == 1:
        return []
    needs = float(np.max(given_memory(d, prediction.buffers))) / d.hardware.gpu_memory
    if row["refused"] == "cache":
        return [
            f"{BEYOND_SHARE}; a server with that refuses such a request, because its KV cache does "
            "not fit next to the weights"
        ]
    if needs <= ENGINE_SHARE:
        return []
    return [f"{MARKED} --gpu-memory-utilization {ceil(100 * needs) / 100:g}"]


def _make_result(
    found: list[Prediction],
    rows: Sequence[Row],
    left_out: Sequence[str],
    ranked: bool,
) -> Result[list[Prediction]]:
    """Make the answer of ``kvsim predict`` from predictions and their rows."""
    gains = draft_gains(found)
    answer, heading, shown = _write_answer(rows, found, left_out, gains), _title(rows), _table(rows)
    labels = short_names([spec(row) for row in rows])
    alone = len({(row["batch"], row["prompt"]) for row in rows}) == 1
    about = [
        (labels[spec(r)] + ("" if alone else f", batch {r['batch']}, prompt {r['prompt']}"), r)
        for r in rows
    ]
    notes, ground = evidence.merge_notes(about), evidence.describe_basis(rows[0]["basis"])
    brief = _shorten(answer, found, gains)
    said = {*brief.settings, *brief.evidence}
    rest = [x for x in (*answer.settings, *answer.evidence) if x not in said]
    reversals, listed = _tabulate_drafts(gains), replace(shown, note=_write_legend(rows))
    lacking = {x.partition(": ")[0] for x in notes if f": {NEEDS_KERNEL}" in x}
    first_notes = [x for x in notes if LOW_BIT not in x or x.partition(": ")[0] not in lacking]
    if len(rows) > 1:  # the table marks them
        first_notes = [x for x in first_notes if not x.partition(": ")[2].startswith(MARKED)]
    told = MAX_NOTES if len(rows) <= MANY_ROWS else 0
    hidden = len(first_notes[told:])
    first_notes = sorted(first_notes, key=lambda x: f": {BEYOND_SHARE}" not in x)[:told]
    if ranked and len(rows) > MAX_RANKED:
        listed = _table(rows[:MAX_RANKED])
        left = len(rows) - MAX_RANKED
        more = f"{left} more row{'s' * (left > 1)} with --verbose"
        listed = replace(listed, note="; ".join(filter(None, [_write_legend(rows), more])))

    further = [shown, *reversals] if len(listed.rows) < len(rows) else reversals
    tables: list[Block] = [block for table in further for block in (BLANK, table)]
    if tables:
        tables.append(BLANK)

    def draw() -> "list[Chart]":
        from kvsim.report.charts import draw_predictions  # loaded where a page is asked for

        return draw_predictions(rows, found)

    return Result(
        heading,
        answer,
        {"rows": list(rows), "answer": answer.row(), **({"drafts": gains} if gains else {})},
        found,
        rows,
        tables=[shown, *reversals],
        blocks=[
            *(Heading(heading), *answer.head(), listed, BLANK),
            *brief.body(),
            *(f"Note{note}" for note in first_notes),
            *([f"{hidden} more note{'s' * (hidden > 1)} with --verbose."] if hidden else []),
        ],
        more=[
            *tables,
            *([shown.note] if further is reversals else []),
            *([Items(rest)] if rest else []),
            *(f"Note{note}" for note in notes if note not in first_notes),
            ground,
        ],
        draw=draw,
        notes=[note.lstrip(": ") for note in notes],
        data=evidence.newest_measurement(p.deployment for p in found),
        foot=[ground],
    )


def _shorten(answer: Answer, found: Sequence[Prediction], gains: Sequence[Row]) -> Answer:
    """The answer as a terminal shows it first: without sources, and what the verdict has."""
    quality = list(describe_quality(found))
    measured = [x for x in answer.evidence[len(quality) :] if not x.startswith(INTERVAL)]
    measured = measured if len(found) <= MANY_ROWS else []
    names = dict.fromkeys(p.technique.name for p in found)
    settings = [line for line in answer.settings[1:] if line != OFFLOAD_NOTE]
    (engines,) = [line for line in describe_engines(found) if line != OFFLOAD_NOTE]
    if len(names) > MAX_ENGINES:
        first = [p for p in found if p.technique.name in list(names)[:MAX_ENGINES]]
        engines = next(describe_engines(first)).removesuffix(".")
        engines += f"; {len(names) - MAX_ENGINES} more with --verbose."
    settings = [engines, *(settings if len(names) == 1 else [])]
    told = [*summarize_quality(found), *measured[:1]]
    return replace(answer, settings=settings, evidence=told, assumed=answer.assumed[:MAX_NOTES])


def prediction(prediction: Prediction) -> Row:
    """Make the row of a prediction.

    Parameters
    ----------
    prediction
        A prediction for one batch.

    Returns
    -------
    Row
        Times [s], throughput [tokens/s], memory [B], intervals, breakdown and notes.
    """
    t, d, batch = prediction.technique, prediction.deployment, float(prediction.batch[0])
    read = prefill_point(batch, prediction.prompt, prediction.generate)
    prefill, rounds, bound = (t.prefill(d, read),), prediction.middle_round, binding(prediction)
    return {
        "model": d.model.name,
        "gpu": d.hardware.name,
        "stack": d.stack.name,
        **ranks(d),
        "weights": d.weights,
        **technique_fields(t),
        "notation": str(t),
        **pick(prediction, "batch"),
        **({"concurrency": number(prediction.batch)} if prediction.load == "served" else {}),
        **pick(prediction, "prompt", "generate", "ttft_s", "tpot_s", "prefill_s", "decode_s"),
        **pick(prediction, "decode_tok_s", "output_tok_s"),
        "usd_per_million_tokens": number(prediction.usd_per_million()),
        **resident_bytes(prediction),
        "fits": bool(prediction.fits[0]),
        "max_batch": count_held(prediction),
        "bound_by": bound,
        "ranges": caveats.time_ranges(prediction, prediction.load)
        | evidence.memory_range(prediction),
        "basis": basis(d),
        "breakdown": {
            "prefill_s": _numbers(breakdown(prefill, d)),
            "round_s": _numbers(breakdown(rounds, d)),
            **{f"{tier}_bytes": _numbers(buffers) for tier, buffers in prediction.buffers.items()},
        },
        "notes": list(_notes(prediction)),
        "assumed": [
            *evidence.list_assumptions(d.hardware, float(np.max(prediction.host_bytes)), bound),
            *caveats.describe_host_link(prediction),
        ],
    }


def _numbers(values: Mapping[str, object]) -> Row:
    return {k: n for k, v in values.items() if (n := number(v))}


def _notes(prediction: Prediction) -> Iterator[str]:
    """Collect what a reader should know about a prediction."""
    d = prediction.deployment
    yield from d.model.notes
    yield from d.parallelism.notes(d.domain, d.stack.sums.skew)
    if prediction.prompt + prediction.generate > d.model.max_context:
        yield (
            f"{prediction.prompt + prediction.generate:,} tokens exceed the context of "
            f"{d.model.name}, {d.model.max_context:,} tokens"
        )
    last = decode_point(
        float(prediction.batch[0]), prediction.prompt, prediction.generate, prediction.generate - 1
    )
    yield from prediction.technique.notes(d, last)
    lacking = lacks_head(prediction.technique, d)
    if lacking:
        yield lacking
    if prediction.technique.assumes:
        yield f"the speed of {prediction.technique.name} assumes {prediction.technique.assumes}"


IN_JSON_ALONE = ("breakdown.", "params.", "notes.", "assumed.")
"""Parts of a row that a CSV file leaves out."""


FORMULAS = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet takes for the beginning of a formula; a quote before it makes it text."""


def csv(rows: Sequence[Row]) -> str:
    """Format rows as CSV, without breakdowns, notes and assumptions.

    Parameters
    ----------
    rows
        Rows of predictions.

    Returns
    -------
    str
        The table with a header. Texts that a spreadsheet would read as formulas are quoted.
    """
    out = StringIO()
    plain = [
        {key: cell for key, cell in flatten(row).items() if not key.startswith(IN_JSON_ALONE)}
        | {"fits": str(row["fits"]).lower()}
        for row in rows
    ]
    columns = dict.fromkeys(key for row in plain for key in row)  # no TPOT without rounds
    writer = DictWriter(out, list(columns), lineterminator="\n")
    writer.writeheader()
    for row in plain:
        for key, cell in row.items():
            if isinstance(cell, str):  # no terminal takes it for a command either
                row[key] = escape_controls(f"'{cell}" if cell.startswith(FORMULAS) else cell, "")
    writer.writerows(plain)
    return out.getvalue()


def _table(rows: Sequence[Row]) -> Table:
    """Make the table of what differs between the rows, and their figures."""
    specs = [spec(row) for row in rows]
    labels = short_names(specs)
    first = {text: id(row) for text, row in reversed(list(zip(specs, rows, strict=True)))}
    counted = "concurrency" if "concurrency" in rows[0] else "batch"
    varying = [key for key in ("prompt", "generate") if len({row[key] for row in rows}) > 1]

    def write_memory(row: Row) -> str:
        size = units.gib(row["gpu_bytes"])
        mark = "" if row["fits"] else " !"
        return f"{size}{' *' if _is_beyond_share(row) else mark}"

    points = {_point(row): row for row in rows if row["technique"] == "full" and row["fits"]}
    drafts = points and any("acceptance" in row["params"] for row in rows)

    def write_ratio(row: Row) -> str:
        full = points.get(_point(row))
        return f"{phrases.speed_ratio(row, full):.2f}" if full and full is not row else ""

    columns = [
        text_column("technique", lambda row: labels[spec(row)]),
        *quantity_columns(**dict.fromkeys((counted, *varying), 0)),
        *quantity_columns(ttft_s=0, tpot_s=0, decode_tok_s=0, output_tok_s=5),
        *([Column("x full", write_ratio, rank=1)] if drafts and len(rows) > len(first) else []),
        Column("GPU GiB", "gpu_bytes", rank=1, write=write_memory),
        *quantity_columns(host_bytes=2, **disk_column(rows), max_batch=3, bound_by=4),
    ]
    note = OF_BATCHES if counted == "batch" else OF_CLIENTS
    return Table(
        columns,
        rows,
        below=lambda row: (
            settings(row).removeprefix(f"format={labels[spec(row)]}")
            if first[spec(row)] == id(row)
            else ""
        ),
        note="; ".join(filter(None, [note, _write_legend(rows)])),
    )


def _write_legend(rows: Sequence[Row]) -> str:
    """What the marks beside the memory of some rows mean."""
    marks = {
        "!: does not fit": not all(row["fits"] for row in rows),
        "*: takes a larger --gpu-memory-utilization": any(map(_is_beyond_share, rows)),
    }
    return "; ".join(said for said, used in marks.items() if used)


def _point(row: Row) -> tuple[int, int, int]:
    return row["batch"], row["prompt"], row["generate"]


def draft_gains(found: Sequence[Prediction]) -> list[Row]:
    """Compute the speed-up from speculative decoding as a function of the batch size.

    Parameters
    ----------
    found
        Predictions for one batch each.

    Returns
    -------
    list of Row
        For each speculative technique, by batch: ``speedup`` over decoding without drafts, and
        ``least_acceptance``, the acceptance rate below which drafts are slower.
    """
    first = {str(p.technique): p for p in reversed(found) if p.technique.drafts}
    rows: list[Row] = []
    for p in reversed(first.values()) if all(p.generate > 1 for p in first.values()) else ():
        gains = gains_by_batch(p, compose(Full()))
        if gains is not None:
            told = zip(gains.values, gains.ratio, strict=True)
            speedup = {str(int(b)): float(r) for b, r in told if np.isfinite(r)}
            tokens = 1 + p.technique.drafting.accepted  # of a round, whose time is tokens / speedup
            least = {b: (tokens / r - 1) / p.technique.drafts for b, r in speedup.items()}
            rows.append(
                {"notation": str(p.technique), "speedup": speedup, "least_acceptance": least}
            )
    return rows


def _tabulate_drafts(gains: Sequence[Row]) -> list[Table]:
    """Tabulate what drafts gain, or lose, by the number of sequences decoded at once."""
    if not gains:
        return []
    labels = short_names([row["notation"] for row in gains])
    rows = []
    for row in gains:
        rows.append({"name": labels[row["notation"]], "batches": row["speedup"]})
        rows.append({"name": "  least acceptance", "batches": row["least_acceptance"]})
    every = sorted({b for row in rows for b in row["batches"]}, key=int)

    def column(batch: str) -> Column:
        rank = int(batch).bit_length() % 2
        return Column(batch, f"batches.{batch}", lambda x: "" if x is None else f"{x:.2f}", rank)

    columns = [text_column("speed-up at batch", lambda row: row["name"]), *map(column, every)]
    note = (
        "decode tok/s with drafts over without; drafts pay above the acceptance in the second line"
    )
    return [Table(columns, rows, note=note)]


def _describe_load(row: Row) -> str:
    """The requests of a row in words."""
    key = "concurrency" if "concurrency" in row else "batch"
    return f"{key} {units.integer(row[key])}"


def _title(rows: Sequence[Row]) -> str:
    """Write what all rows have in common."""
    first = rows[0]
    parts = [f"{first['model']} on {first['gpu']}", f"stack {first['stack']}"]
    spread = Parallelism(**{name: first.get(name, 1) for name in ("tp", "pp", "dp", "ep")})
    parts += [f"{spread.gpus} GPUs{spread.brackets()}"] if spread.gpus > 1 else []
    parts += [f"{first['weights']} weights"]
    for key in ("prompt", "generate"):
        if len({row[key] for row in rows}) == 1:
            parts.append(f"{key} {first[key]:,}")
    return ", ".join(parts)


def _write_answer(
    rows: Sequence[Row],
    found: Sequence[Prediction],
    left_out: Sequence[str],
    gains: Sequence[Row],
) -> Answer:
    """Answer in words what predictions, one per row, say."""
    points = {(row["batch"], row["prompt"], row["generate"]) for row in rows}
    unserved = _list_unserved(found)
    best = _find_fastest(rows, unserved)
    at = rows.index(best)
    changes = _changes(rows, found)
    released = next(filter(None, map(describe_offloaded, found)), "")
    if len(rows) == 1:
        said = _describe_single_point(best, found[at])
    elif len(points) == 1:
        said = _compare_techniques(
            rows,
            best,
            " ".join(filter(None, [_note_break_even(rows, found), *_note_lost_drafts(gains)])),
            _as_good(rows, found, at),
            released,
            unserved,
        )
    else:
        even = _note_break_even(rows, found)
        said = _describe_grid(rows, best, even, released, gains, unserved)
    d, came = found[at].deployment, found[at].load
    fitting = join_words(changes, "or") if changes else ""
    unfit = [f"{_name_unfit_point(rows)} fits with {fitting}."] if changes else []
    beside = {
        row["notation"]: _limits(row, p, name if len(rows) > 1 else "")
        for row, p, name in zip(rows, found, distinct_names(rows), strict=True)
        if all(row[key] == best[key] for key in ("batch", "prompt", "generate"))
    }
    told = beside if len(beside) <= MAX_POOLS else [best["notation"]]
    limits = [  # each told once
        " ".join(x for x in beside[name] if " ".join(x.split()[:2]) not in said) for name in told
    ]
    return Answer(
        verdict=said,
        figures=figures(best),
        changes=[*unfit, *caveats.slower_kernels(found[at])],
        settings=[*describe_engines(found), *filter(None, limits)],
        evidence=[
            *describe_quality(found),
            *evidence.list_measurements(d, best["technique"], came),
        ],
        assumed=best["assumed"],
        left_out=left_out,
    )


def figures(row: Row) -> Row:
    """Select the figures of the verdict from the row of a prediction.

    Parameters
    ----------
    row
        The row.

    Returns
    -------
    Row
        Technique, times, throughput and memory with their intervals.
    """
    times = "ttft_s", "tpot_s", "decode_tok_s", "output_tok_s"
    keys = "batch", *times, "gpu_bytes", "host_bytes", "ranges"
    return {"technique": row["notation"], **{key: row[key] for key in keys}}


def _is_beyond_share(row: Row) -> bool:
    """Whether a row fits only with a larger share of memory than engines use by default."""
    return any(note.startswith(BEYOND_SHARE) for note in row["notes"])


def _find_fastest(rows: Sequence[Row], unserved: Collection[str]) -> Row:
    """The fastest row among those that fit and that an engine runs, as far as there are any.

    The notations of techniques that no engine implements are ``unserved``.
    """
    fit = [row for row in rows if row["fits"]] or list(rows)
    run = [row for row in fit if not _lacks_kernel(row) and row["notation"] not in unserved]
    return max(run or fit, key=phrases.compared_rate)


def _list_unserved(found: Sequence[Prediction]) -> set[str]:
    """Notations of the techniques that no engine implements; none where no engine is predicted."""
    engines = [p for p in found if usual_share(p.deployment) < 1]
    return {str(p.technique) for p in engines if not name_engines(p)}


def _lacks_kernel(row: Row) -> bool:
    """Whether the stack has no kernel for a row's technique, whose speed assumes one."""
    return any(note.startswith(NEEDS_KERNEL) for note in row["notes"])


def _exclude_lacking(rows: Sequence[Row], best: Row, unserved: Collection[str]) -> tuple[str, str]:
    """Say that the fastest is one of those that run, and what a faster one would reach.

    Both texts are empty unless a row without an engine or a kernel is faster than ``best``.
    """
    top = max((row for row in rows if row["fits"]), key=phrases.compared_rate, default=best)
    without, lacks = top["notation"] in unserved, _lacks_kernel(top)
    if not (without or lacks) or best["notation"] in unserved or _lacks_kernel(best):
        return "", ""
    names = dict(zip(map(id, rows), distinct_names(rows), strict=True))
    rate = f"{units.rate(phrases.compared_rate(top))} tok/s at {_describe_load(top)}"
    if without:
        said = f"No engine implements {names[id(top)]}, which would reach {rate}."
        return "Among techniques that engines run, ", said
    among = f"Among techniques that {top['stack']} has kernels for, "
    return among, f"With a kernel, {names[id(top)]} would reach {rate}."


def _describe_single_point(row: Row, prediction: Prediction) -> str:
    what = f"{name_row(row)} on {row['gpu']} at {_describe_load(row)}"
    if row["fits"]:
        limit = phrases.explain_limit(row["bound_by"], row["generate"])
        needed = [f"{what}: {phrases.describe_times(row)}, {phrases.describe_memory(row)}."]
        # engines have no pool of what is kept elsewhere
        limits = _limits(row, prediction)[-1 if row["host_bytes"] else 0 :]
        pooled = bool(limits) and limits[0].startswith("KV pool")  # it tells the sequences
        if row["max_batch"] and "concurrency" not in row and not pooled:
            held, length = units.integer(row["max_batch"]), row["prompt"] + row["generate"]
            share = f" {AT_SHARE}" if usual_share(prediction.deployment) < 1 else ""
            many = "s" * (held != "1")
            needed.append(f"It holds {held} sequence{many} of {length:,} tokens{share}.")
        needed.append(limit)
        return verdict(needed, limits[::-1] or [_note_max_batch(row, prediction)])
    memory = f"{phrases.describe_memory(row)}{_note_memory_size(row, prediction)}"
    needed = [f"{what} does not fit: it needs {memory}."]
    return verdict([*needed, _note_max_batch(row, prediction)])


def _note_memory_size(row: Row, prediction: Prediction) -> str:
    """The capacity of the tier that is too small."""
    hardware = prediction.deployment.hardware
    if row["gpu_bytes"] > hardware.gpu_memory:
        return f" and the GPU has {units.size(hardware.gpu_memory)}"
    if row["host_bytes"] > hardware.host_memory:
        return f" and the host has {units.size(hardware.host_memory)}"
    return f" and the disk has {units.size(hardware.disk_memory)}"


def _note_max_batch(row: Row, prediction: Prediction) -> str:
    """How many sequences fit, at the default share of memory and, if none does, in all of it."""
    held, most = row["max_batch"], int(prediction.max_batch[0])
    if not most:
        return "Not even one such sequence fits."
    count = held or most
    fit = f"such sequence{'s fit' if count > 1 else ' fits'}"
    if not held:
        return f"At most {units.integer(most)} {fit} in all of the memory, none {AT_SHARE}."
    share = f" {AT_SHARE}" if usual_share(prediction.deployment) < 1 else ""
    return f"At most {units.integer(held)} {fit}{share}."


def _note_break_even(rows: Sequence[Row], found: Sequence[Prediction]) -> str:
    """From which acceptance on drafting pays, at the largest batch of the one that drafts."""
    full = next((p.technique for p in found if p.technique.name == "full"), None)
    able = [p for p in found if p.generate > 1 and bool(p.fits[0])]
    drafts = [p for p in able if "acceptance" in p.technique.settings]
    if full is None or len({str(p.technique) for p in drafts}) != 1:
        return ""
    last = max(drafts, key=lambda p: (float(p.batch[0]), p.prompt))
    share = break_even_acceptance(last, full)
    if not share:
        return ""
    gamma, at = last.technique.settings.get("gamma"), units.integer(float(last.batch[0]))
    if share > 1:
        return f"At batch {at}, drafts do not pay at any acceptance rate."
    drafted = ""
    if isinstance(gamma, int | float):
        drafted = f" ({gamma:g} per round)"
    return f"At batch {at}, drafts break even at an acceptance rate of {share:.2f}{drafted}."


def _as_good(rows: Sequence[Row], found: Sequence[Prediction], at: int) -> set[int]:
    """Rows, by identity, whose distance to the fastest is within the known error of the two."""
    top = found[at].technique
    return {
        id(row)
        for row, p in zip(rows, found, strict=True)
        if phrases.compared_rate(rows[at]) / phrases.compared_rate(row) - 1
        < known_difference(p.deployment, p.technique, top)
    }


def _compare_techniques(
    rows: Sequence[Row],
    best: Row,
    accepted: str,
    as_good: set[int],
    released: str,
    unserved: Collection[str],
) -> str:
    """Several techniques at one point: the fastest, against full KV if that is one of them."""
    names = dict(zip(map(id, rows), distinct_names(rows), strict=True))
    full = next((row for row in rows if row["technique"] == "full"), None)
    others = [row for row in rows if row is not best and row is not full]
    at = f"{best['gpu']} at {_describe_load(best)}"
    among, beyond = _exclude_lacking(rows, best, unserved)
    told = f"{among}{names[id(best)]} is fastest on {at}:"
    if not best["fits"]:
        least = min(rows, key=lambda row: float(row["gpu_bytes"]))
        needs = f"{names[id(least)]} needs the least, {phrases.describe_memory(least)}"
        return verdict([f"No technique fits on {at}; {needs}."])
    if full is None or not full["fits"]:
        gone = "Full KV does not fit." if full else ""
        limit = phrases.explain_limit(best["bound_by"], best["generate"])
        return verdict([gone, f"{told} {phrases.describe_times(best)}.", limit], [beyond])

    def compare(row: Row, named: str = "", of: str = " of GPU memory") -> str:
        compared = phrases.compare_with_full(row, full, named)
        return f"{names[id(row)]} {compared}{phrases.describe_saving(row, full, of)}"

    if best is full or phrases.speed_ratio(best, full) < 1 + phrases.EQUAL_SPEED:
        beside = [row for row in rows if row is not full]
        if beyond:  # tells of those that no engine implements
            beside = [row for row in beside if row["notation"] not in unserved] or beside
        close, slow = (
            pick(beside, key=lambda row: phrases.speed_ratio(row, full)) for pick in (max, min)
        )
        best_of = f"{among}full KV" if among else "Full KV"
        needed = [f"{best_of} is the best choice on {at}: {phrases.describe_times(full)}."]
        needed += [f"{compare(row)}." for row in ([close] if slow is close else [close, slow])]
        needed = [needed[0], beyond, *needed[1:], released]
        told = phrases.explain_limit(slow["bound_by"], slow["generate"])
        wanted = [told.replace("Limit:", f"Limit of {name_row(slow)}:", 1)]
        return verdict(needed, [accepted, *wanted])
    ratio, saving = phrases.speed_ratio(best, full), phrases.describe_saving(best, full)
    gain = f"It is {units.times(ratio)} as fast as full KV{saving}."
    error = f"; it differs from {names[id(best)]} by less than the prediction error"
    compared = [f"{compare(r, 'full KV', '')}{error if id(r) in as_good else ''}." for r in others]
    limit = phrases.explain_limit(best["bound_by"], best["generate"])
    return verdict(
        [f"{told} {phrases.describe_times(best)}.", gain, released],
        [beyond, accepted, *compared, limit],
    )


def _describe_grid(
    rows: Sequence[Row],
    best: Row,
    accepted: str,
    released: str,
    gains: Sequence[Row],
    unserved: Collection[str],
) -> str:
    """A grid of points: where full KV is overtaken, and by what."""
    named = dict(zip(map(id, rows), distinct_names(rows), strict=True))
    names = dict.fromkeys(named.values())
    among, beyond = _exclude_lacking(rows, best, unserved)
    fits = sum(row["fits"] for row in rows)
    where = f"batch {units.integer(best['batch'])}, prompt {units.integer(best['prompt'])}"
    some = _all(fits) if fits == len(rows) else f"{fits} of {len(rows)}"
    beyond_share = sum(map(_is_beyond_share, rows))
    more = f", but those marked * {BEYOND_SHARE.replace('needs', 'need', 1)}"
    told = f"{some} points fit{more if beyond_share else ' in memory'}."
    first = told if beyond_share else ""  # before speeds that a server reaches only with more of it
    if not fits:
        least = min(rows, key=lambda row: float(row["gpu_bytes"]))
        return verdict(
            [
                f"No point fits in memory on {best['gpu']}. The smallest, "
                f"{named[id(least)]} at batch {units.integer(least['batch'])}, needs "
                f"{units.gib(least['gpu_bytes'])} GiB per GPU."
            ]
        )
    fastest = f"Highest throughput: {named[id(best)]} at {where}: {phrases.describe_times(best)}."
    if len(names) == 1:
        return verdict([told, fastest], [phrases.explain_limit(best["bound_by"], best["generate"])])
    turn = _turn(rows, named)
    if turn:
        return verdict(
            [first, turn, released, fastest],
            [beyond, accepted, *_note_lost_drafts(gains), *([] if first else [told])],
        )
    points: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        able = row["fits"] and not _lacks_kernel(row) and row["notation"] not in unserved
        if not among or able:
            points.setdefault((row["batch"], row["prompt"], row["generate"]), []).append(row)
    ranked = Counter(
        named[id(_find_fastest(here, unserved))] for here in points.values()
    ).most_common()
    if len(ranked) == 1:
        count = f"{_all(len(points)).lower()} points"
        at = count if len(points) > 1 else "the only point where one of them fits"
        said = f"{among}{ranked[0][0]} is fastest at {at}."
        return verdict(
            [first, said, fastest], [beyond, *_note_lost_drafts(gains), *([] if first else [told])]
        )
    full = next((row for row in rows if row["technique"] == "full"), None)
    fallback = _describe_fallback(points.values(), named) if full and len(names) == 2 else ""
    if fallback:
        return verdict([first, fallback, fastest], [beyond, *([] if first else [told])])
    (fast, most), *others = ranked[:3]
    shares = "".join(f", {name} at {count}" for name, count in others)
    said = f"{among}{fast} is fastest at {most} of {len(points)} points{shares}."
    return verdict(
        [first, said, fastest], [beyond, *_note_lost_drafts(gains), *([] if first else [told])]
    )


def _describe_fallback(points: Collection[Sequence[Row]], named: Mapping[int, str]) -> str:
    """Where full KV is faster while it fits, and the only other technique fits beyond.

    Empty where that is not so, where points differ in two ways, or where they are many.
    """
    sizes = {_point(row) for here in points for row in here}
    varied = [
        key
        for i, key in enumerate(("batch", "prompt", "generate"))
        if len({x[i] for x in sizes}) > 1
    ]
    if len(varied) > 1 or len(sizes) > MAX_FALLBACK:
        return ""

    def name_point(row: Row) -> str:
        key = varied[0]
        return _describe_load(row) if key == "batch" else f"{key} {units.integer(row[key])}"

    both, alone = [], []
    for here in points:
        full = next((row for row in here if row["technique"] == "full"), None)
        other = next((row for row in here if row["technique"] != "full"), None)
        if full is None or other is None:
            return ""
        if full["fits"] and other["fits"]:
            both.append((full, phrases.speed_ratio(full, other)))
        elif other["fits"]:
            alone.append(other)
    if not alone or not both or min(ratio for _, ratio in both) < 1 + phrases.EQUAL_SPEED:
        return ""
    ratios = [f"{units.times(ratio)} as fast at {name_point(row)}" for row, ratio in both]
    where = join_words([name_point(row) for row in alone])
    return f"Full KV is {join_words(ratios)}; at {where}, only {named[id(alone[0])]} fits."


def _note_lost_drafts(gains: Sequence[Row]) -> Iterator[str]:
    """From which batch on drafts are slower than full KV, for each technique that is."""
    names = short_names([row["notation"] for row in gains])
    for row in gains:
        losing = [int(b) for b, r in row["speedup"].items() if r < 1]
        if losing:
            yield f"{names[row['notation']]} is slower than full KV at batch {min(losing):,}."


def _all(count: int) -> str:
    """Write that all of some points are meant."""
    return "Both" if count == 2 else f"All {count}"


def _turn(rows: Sequence[Row], named: Mapping[int, str]) -> str:
    """Where one of two techniques overtakes the other along batch or prompt; empty otherwise."""
    names = list(dict.fromkeys(named.values()))
    axes = [key for key in ("batch", "prompt") if len({row[key] for row in rows}) > 1]
    if len(names) != 2 or len(axes) != 1 or len(rows) != 2 * len({row[axes[0]] for row in rows}):
        return ""
    axis = axes[0]
    base, other = names if names[0] == SPOKEN["full"] else names[::-1]
    speed = {(named[id(r)], r[axis]): phrases.compared_rate(r) for r in rows}
    unfit = {row[axis] for row in rows if not row["fits"]}
    asked = sorted({row[axis] for row in rows} - unfit)
    if not asked:
        return ""
    ratio = {x: speed[other, x] / speed[base, x] for x in asked}
    points = sorted(ratio)
    if len(points) < 2:
        return ""
    ratios = [ratio[x] for x in points]
    ahead = [gain > 1 for gain in ratios]
    turns = [i for i in range(1, len(points)) if ahead[i] != ahead[i - 1]]
    first, last = units.times(ratios[0]), units.times(ratios[-1])
    where = f"{axis} {join_words([f'{x:,}' for x in points])}"
    beyond = ""
    if unfit and axis == "batch":
        beyond = f"; both fit up to {axis} {units.integer(min(row['max_batch'] for row in rows))}"
    elif unfit:
        beyond = f"; at {axis} {min(unfit):,} not both fit"
    if max(abs(gain - 1) for gain in ratios) < phrases.EQUAL_SPEED:
        return f"{other} is as fast as {base} at {where}{beyond}."
    if not turns:
        side = "faster" if ahead[0] else "slower"
        least, most = min(ratios), max(ratios)
        span = f"{units.times(least)} to {units.times(most)}" if most - least >= 0.02 else first
        return f"{other} is {side} than {base} at {where} ({span} its speed){beyond}."
    i = turns[0]
    return (
        f"{other} breaks even with {base} between {axis} {points[i - 1]:,} and {points[i]:,}: "
        f"{first} its speed at {points[0]:,}, {last} at {points[-1]:,}."
    )


def _changes(rows: Sequence[Row], found: Sequence[Prediction]) -> list[str]:
    """What makes the first point that does not fit do so, as clauses."""
    first = next((p for row, p in zip(rows, found, strict=True) if not row["fits"]), None)
    known = remedies(first) if first is not None else []
    return [f"{remedy.option} ({phrases.summarize_times(remedy.prediction)})" for remedy in known]


def _name_unfit_point(rows: Sequence[Row]) -> str:
    """The first point that does not fit, as the start of a sentence."""
    if len(rows) == 1:
        return "It"
    row = next(row for row in rows if not row["fits"])
    prompt = units.integer(row["prompt"])
    return f"{name_row(row)} at {_describe_load(row)}, prompt {prompt}"


def _limits(row: Row, prediction: Prediction, name: str = "") -> list[str]:
    """The KV pool as engines print it, and the longest prompt that fits.

    A name is that of one technique among several.

    A pool on the GPU is not told where other memory is what limits the sequences.
    """
    t, d, generate = prediction.technique, prediction.deployment, prediction.generate
    whose, at = (f" with {name}", f" at {_describe_load(row)}") if name else ("", "")
    room = pool(t, d, prediction.prompt, generate)
    of = f" of {room.length:,} tokens" if name else ""
    if room.kept < room.length:
        of = f" that keep {room.kept:,} of {room.length:,} tokens"
    fitting = longest_prompt(t, d, int(prediction.batch[0]), generate, usual_share(d))
    longest = min(fitting, max(d.model.max_context - generate, 0))
    beyond = f", as the context is {d.model.max_context:,}" if longest < fitting else ""
    told = room.tokens and room.concurrency <= row["max_batch"] + 1
    beside = name and told  # the pool's share of memory is told before it in one line
    share = f" {AT_SHARE}" if row["fits"] and longest < prediction.prompt and not beside else ""
    pools = (
        f"KV pool{whose} at {units.percent(room.share)} of GPU memory: "
        f"{phrases.describe_pool(room, d.dp)}, "
        f"{room.blocks:,} blocks, {units.rounded(room.concurrency, 3)} sequences{of}."
    )
    return [
        *([pools] if told else []),
        *(
            [f"Longest prompt{'' if told else whose}{at}{share}: {longest:,} tokens{beyond}."]
            if longest
            else []
        ),
    ]
