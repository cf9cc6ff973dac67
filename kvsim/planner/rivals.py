"""What a plan is compared with: full KV, what else comes close, waves, and smaller batches."""

from dataclasses import replace
from math import ceil

import numpy as np

from kvsim.frozen import frozen
from kvsim.planner.admit import Admission
from kvsim.planner.choose import as_good, within, within_of
from kvsim.planner.engines import runners
from kvsim.planner.needs import needs
from kvsim.planner.outlook import LABELS
from kvsim.planner.question import (
    FULL,
    SHOWN,
    Question,
    Search,
    does_nothing,
    gain,
    rank,
    tabulate_question,
)
from kvsim.prediction.explain import binding
from kvsim.prediction.generate import Prediction
from kvsim.quality.evidence import KNOWN_BAD, Evidence
from kvsim.techniques import TECHNIQUES, parse

EQUAL = 5e-4  # relative difference below which two are as good
KNEES = (0.01, 0.05, 0.10)  # of the objective given up for an earlier first token


@frozen
class Rival:
    """The best of another technique, and why it is not the choice."""

    prediction: Prediction
    evidence: Evidence
    allowed: bool  # by what the user accepts: loss, assumed acceptance
    in_time: bool  # within the targets; if not, nothing of that technique is
    needs: tuple[str, ...]  # options of the command line that would admit it
    reason: str


@frozen
class Knee:
    """The earliest first token within some share of the best."""

    given_up: float  # at most, of the objective
    prediction: Prediction


@frozen
class Waves:
    """A given batch run as smaller batches one after another."""

    prediction: Prediction  # of one wave
    count: int
    output_tok_s: float  # of all waves together [tokens/s]


def baseline(question: Question, search: Search) -> Prediction | None:
    """Full KV in the same memory whatever its latency, at its best batch if not at the given."""
    memory = {k: v for k, v in question.limits.finite().items() if k.endswith("memory")}
    if FULL in search.table.names:
        row = search.best(question.limits.hard(), FULL)
        row = search.best(memory, FULL) if row is None else row
        if row is not None:
            return search.replay(row)
    free = replace(question, workload=replace(question.workload, batch=None))
    free = replace(free, admission=Admission((parse(FULL),)))
    other = Search(free, tabulate_question(free))
    row = other.best(memory) if other.table.technique else None
    return None if row is None else other.replay(row)


def alternatives(question: Question, search: Search, chosen: int) -> list[Rival]:
    """The best of other techniques: three that are allowed, three that are not yet."""
    table, limits = search.table, question.limits
    allowed = (table.columns["loss"] <= limits.loss) & (table.columns["assumed"] <= limits.assumed)
    best: dict[tuple[bool, str], tuple[bool, float, int]] = {}
    for name in table.names:
        row = _shown(search, name)
        if row is None or name == table.technique[chosen].name:
            continue
        t = table.technique[row]
        kind = t.name if t.uniform else ""  # of mixed layers one is enough
        entry = not _in_time(search, row), float(table.columns[question.objective][row]), row
        key = bool(allowed[row]), kind
        best[key] = min(best.get(key, entry), entry)
    shown = []
    for admitted in (True, False):
        some = sorted(entry for (okay, _), entry in best.items() if okay == admitted)
        shown += [row for *_, row in some[:SHOWN]]
    return [
        Rival(
            prediction=search.replay(row),
            evidence=table.evidence[row],
            allowed=bool(allowed[row]),
            in_time=_in_time(search, row),
            needs=tuple(needs(question, search, row)),
            reason=reason(question, search, chosen, row),
        )
        for row in shown
    ]


def _shown(search: Search, name: str) -> int | None:
    """The best row of a technique that is worth a line: within the limits, or nearest to them.

    Not what is known to lose much, nor settings that another technique has under its own name.
    """
    limits, mild = search.q.limits, {"harm": KNOWN_BAD}
    memory = {k: v for k, v in limits.hard().items() if k.endswith("memory")}
    for some in (limits.finite(), limits.hard(), memory):
        row = search.best(some | mild, name)
        if row is not None:
            return None if does_nothing(search.table.technique[row]) else row
    return None


def _in_time(search: Search, row: int) -> bool:
    return all(bool(search.table.columns[k][row] <= v) for k, v in search.q.limits.hard().items())


def reason(question: Question, search: Search, chosen: int, row: int) -> str:
    """Why a row lost, in one clause: the first reason that applies."""
    table, mine = search.table, search.replay(row)
    t = mine.technique
    if table.columns["assumed"][row] > question.limits.assumed:
        return f"its speed rests on {t.assumes}"
    if table.columns["loss"][row] > question.limits.loss:
        return str(table.evidence[row])
    for name in ("ttft", "tpot"):
        value, limit = float(table.columns[name][row]), getattr(question.limits, name)
        if value > limit:
            return f"its {LABELS[name]} is {spoken(value)}, above {spoken(limit)}"
    best, value = search.value(chosen), search.value(row)
    behind, ahead = gain(value, best), gain(best, value)
    if behind >= EQUAL:
        return f"{worse(question.objective, behind)}; bound by {binding(mine)}"
    known, own = (bool(table.evidence[i].missing) for i in (row, chosen))
    why = "loses an unknown share" if known > own else dearer(mine, search.replay(chosen))
    if ahead < EQUAL:
        return f"is as good, but {why}"
    error = question.between(t, table.technique[chosen])
    words = {"throughput": f"gives {100 * ahead / (1 + ahead):.1f} % less",
             "latency": f"takes {100 * ahead:.1f} % longer",
             "cost": f"costs {100 * ahead:.1f} % more"}  # fmt: skip
    given_up = f"the choice {words[question.objective]}, within the known error"
    return f"{given_up} of {100 * error:.0f} %, but this one {why}"


def worse(objective: str, behind: float) -> str:
    """How far something is behind, which is relative to what it gives or takes itself."""
    if objective == "throughput":
        return f"is {100 * behind / (1 + behind):.0f} % slower"
    return (
        f"costs {100 * behind:.0f} % more"
        if objective == "cost"
        else (f"takes {100 * behind:.0f} % longer")
    )


def dearer(other: Prediction, chosen: Prediction) -> str:
    """What a technique costs that is as good as the chosen one, in a clause."""
    t, mine = other.technique, chosen.technique
    if rank(t)[0] > rank(mine)[0]:
        return "loses quality"
    if not t.uniform and mine.uniform:
        return "has layers that differ"
    if t.drafts and not mine.drafts:
        return "drafts tokens"
    if mine.name == FULL:
        return "moves parts of the cache"
    if float(other.request_s[0]) > float(chosen.request_s[0]):
        return "takes longer per request"
    return "takes more memory" if other.gpu_bytes[0] > chosen.gpu_bytes[0] else "is no simpler"


def spoken(seconds: float) -> str:
    """A time with the unit that people would say."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 120 else f"{seconds / 60:.3g} min"


def runnable(question: Question, search: Search, chosen: int) -> Prediction | None:
    """The best that a released engine runs, where none runs the choice."""
    d = question.deployment
    able = {name for name in search.table.names if runners(name, d)}
    if search.table.technique[chosen].name in able:
        return None
    limits, goal = question.limits.finite(), search.table.columns[question.objective]
    rows = [search.best(limits, name) for name in search.table.names if name in able]
    known = [row for row in rows if row is not None]
    return search.replay(min(known, key=lambda row: float(goal[row]))) if known else None


def knees(question: Question, search: Search, chosen: int) -> list[Knee]:
    """The earliest first token of the chosen technique within shares of its best."""
    table = search.table
    same = table.rows_of(table.technique[chosen].name)
    objective = table.columns[question.objective]
    rows = within_of(objective, table.columns, question.limits.finite(), same)
    top = float(objective[rows].min())
    found = []
    for share in KNEES:
        some = as_good(objective, rows, top, share)
        row = int(min(some, key=lambda r: (table.columns["ttft"][r], objective[r])))
        found.append(Knee(share, search.replay(row)))
    return found


def waves(question: Question, choice: Prediction) -> Waves | None:
    """Where smaller batches in turn finish a given batch earlier: the best of them."""
    w = question.workload
    if w.batch is None or w.service or w.batch < 2:
        return None
    free = replace(question, workload=replace(w, batch=None))
    names = {FULL, choice.technique.name} & set(TECHNIQUES)
    search = Search(free, tabulate_question(free, tuple(names)))
    if not len(search.table):
        return None
    rows = within(
        search.table.columns[question.objective], search.table.columns, question.limits.finite()
    )
    rows = rows[search.table.batch[rows] < w.batch]
    if not rows.size:
        return None
    counts = np.ceil(w.batch / search.table.batch[rows])
    total = counts * search.table.columns["latency"][rows]
    row, count = int(rows[np.argmin(total)]), int(counts[np.argmin(total)])
    t = search.table.technique[row]
    even = ceil(ceil(w.batch / count) / t.tiles()) * t.tiles()  # no wave larger than it must be
    one = w.predict(t, question.deployment, np.array([float(even)]))
    rate = w.batch * w.generate / (count * float(one.request_s[0]))
    return Waves(one, count, rate) if rate > 1.02 * float(choice.output_tok_s[0]) else None
