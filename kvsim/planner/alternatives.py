"""What a plan is compared with, and what else would do.

Compared: full KV, the best of other techniques with the reason each lost, smaller batches in turn,
an earlier first token. What else: other weights, more GPUs, looser limits, a shorter context.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from shlex import quote
from typing import TYPE_CHECKING

import numpy as np

from kvsim.errors import InfeasibleError, InputError
from kvsim.frozen import frozen
from kvsim.machines.deployment import Deployment
from kvsim.planner.load import Carried
from kvsim.planner.question import (
    PUBLISHED,
    Admission,
    Question,
    format_number,
    format_seconds,
    narrower_formats,
    needed_option,
    relative_gain,
    simplicity_rank,
    technique_label,
)
from kvsim.planner.table import (
    MAX_SHOWN,
    TableSearch,
    rows_as_good,
    rows_within,
    tabulate,
)
from kvsim.prediction.explain import binding
from kvsim.prediction.generate import Prediction
from kvsim.quality.evidence import KNOWN_BAD, Evidence, weights_evidence
from kvsim.techniques import TECHNIQUES, parse
from kvsim.techniques.released import FULL, READ, engines_running

if TYPE_CHECKING:
    from kvsim.planner.service import PlayedOption

LABELS = {
    "gpu_memory": "GPU memory",
    "host_memory": "host memory",
    "disk": "disk space",
    "ttft": "TTFT",
    "tpot": "TPOT",
    "loss": "lossless techniques only",
    "assumed": "no unmeasured acceptance rates",
}


# options that would admit a row


def admitting_options(question: Question, search: TableSearch, row: int) -> Iterator[str]:
    """Options of the command line that would admit a row."""
    if search.table.columns["loss"][row] > question.limits.loss:
        yield needed_option(search.table.evidence[row])
    if search.table.columns["assumed"][row] > question.limits.assumed:
        yield "--acceptance"


# other techniques

WORTH_A_ROW = 0.01  # relative gain in the objective for which an alternative is shown
WORTH_OF_TIME = 0.1  # the same in TTFT or TPOT
NEGLIGIBLE = 5e-4  # relative difference below which two are as good
KNEE_SHARES = (0.01, 0.05, 0.10)  # of the objective given up for an earlier first token


@frozen
class Alternative:
    """The best setting of another technique, and why it is not the choice.

    Attributes
    ----------
    prediction
        Prediction for that setting at its batch size.
    evidence
        Evidence for the setting's loss of quality.
    allowed
        Whether the user's limits on loss and on assumed acceptance admit the setting.
    in_time
        Whether the setting is within the hard limits, TTFT and TPOT among them; if not, no
        setting of the technique that is worth a row is.
    needs
        Command-line options that would admit the setting; empty if it is allowed.
    reason
        Why the choice is preferred, as a phrase for the report.
    """

    prediction: Prediction
    evidence: Evidence
    allowed: bool
    in_time: bool
    needs: tuple[str, ...]
    reason: str


@frozen
class Knee:
    """The setting with the earliest first token among those close to the best objective.

    Attributes
    ----------
    given_up
        Largest share of the best objective that may be given up, from 0 to 1.
    prediction
        Prediction for the setting.
    """

    given_up: float
    prediction: Prediction


@frozen
class Waves:
    """A given batch that runs as several smaller batches (waves) one after another.

    Attributes
    ----------
    prediction
        Prediction for one wave.
    count
        Number of waves.
    output_tok_s
        Generated tokens per second over all waves. [tokens/s]
    """

    prediction: Prediction  # of one wave
    count: int
    output_tok_s: float


def find_baseline(question: Question, search: TableSearch) -> Prediction | None:
    """Full KV in the same memory whatever its latency, at its best batch if not at the given."""
    memory = {k: v for k, v in question.limits.finite().items() if k.endswith("memory")}
    if FULL in search.table.names:
        row = search.best(question.limits.hard(), FULL)
        row = search.best(memory, FULL) if row is None else row
        if row is not None:
            return search.replay(row)
    free = replace(question, workload=replace(question.workload, batch=None))
    free = replace(free, admission=Admission((parse(FULL),)))
    other = TableSearch(free, tabulate(free))
    row = other.best(memory) if other.table.technique else None
    return None if row is None else other.replay(row)


def find_alternatives(question: Question, search: TableSearch, chosen: int) -> list[Alternative]:
    """The best of other techniques, three that are allowed and three that are not yet.

    Those that an engine runs come first.
    """
    table, limits = search.table, question.limits
    allowed = (table.columns["loss"] <= limits.loss) & (table.columns["assumed"] <= limits.assumed)
    best: dict[tuple[bool, str], tuple[bool, float, int]] = {}
    worth = {"ttft": WORTH_OF_TIME, "tpot": WORTH_OF_TIME} | {question.objective: WORTH_A_ROW}
    for name in table.names:
        row = _row_shown(search, name)
        if row is None or name == table.technique[chosen].name:
            continue
        columns = ((table.columns[k], 1 - gain) for k, gain in worth.items())
        if all(column[row] >= column[chosen] * share for column, share in columns):
            continue  # better at nothing
        t = table.technique[row]
        kind = t.name if t.uniform else ""  # of mixed layers one is enough
        entry = not _in_time(search, row), float(table.columns[question.objective][row]), row
        key = bool(allowed[row]), kind
        best[key] = min(best.get(key, entry), entry)
    shown = []
    for admitted in (True, False):
        some = sorted(entry for (okay, _), entry in best.items() if okay == admitted)
        shown += [row for *_, row in some[:MAX_SHOWN]]
    # what no engine runs never stands above what one does
    shown.sort(key=lambda row: not engines_running(table.technique[row].name, question.deployment))
    return [
        Alternative(
            prediction=search.replay(row),
            evidence=table.evidence[row],
            allowed=bool(allowed[row]),
            in_time=_in_time(search, row),
            needs=tuple(admitting_options(question, search, row)),
            reason=explain_loss(question, search, chosen, row),
        )
        for row in shown
    ]


def _row_shown(search: TableSearch, name: str) -> int | None:
    """The best row of a technique that is worth a line: within the limits, or nearest to them.

    Not what is known to lose much, nor settings that another technique has under its own name.
    """
    limits, mild = search.q.limits, {"harm": KNOWN_BAD, "idle": 0.0}
    memory = {k: v for k, v in limits.hard().items() if k.endswith("memory")}
    for some in (limits.finite(), limits.hard(), memory):
        row = search.best(some | mild, name)
        if row is not None:
            return row
    return None


def _in_time(search: TableSearch, row: int) -> bool:
    return all(bool(search.table.columns[k][row] <= v) for k, v in search.q.limits.hard().items())


def explain_loss(question: Question, search: TableSearch, chosen: int, row: int) -> str:
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
            return f"its {LABELS[name]} is {format_seconds(value)}, above {format_seconds(limit)}"
    lacking = t.needs_kernel(mine.deployment.stack.name)
    if lacking and not table.technique[chosen].needs_kernel(mine.deployment.stack.name):
        return lacking
    best, value = search.value(chosen), search.value(row)
    behind, ahead = relative_gain(value, best), relative_gain(best, value)
    if behind >= NEGLIGIBLE:
        return f"{describe_gap(question.objective, behind)}; bound by {binding(mine)}"
    known, own = (bool(table.evidence[i].missing) for i in (row, chosen))
    why = "loses an unknown share" if known > own else describe_cost(mine, search.replay(chosen))
    if ahead < NEGLIGIBLE:
        return f"is as good, but {why}"
    error = question.between(t, table.technique[chosen])
    words = {
        "throughput": f"gives {100 * ahead / (1 + ahead):.1f} % less",
        "latency": f"takes {100 * ahead:.1f} % longer",
        "cost": f"costs {100 * ahead:.1f} % more",
    }
    given_up = f"the choice {words[question.objective]}, within the known error"
    return f"{given_up} of {100 * error:.0f} %, but this one {why}"


def describe_gap(objective: str, behind: float) -> str:
    """Describe by how many percent one option is behind another.

    Parameters
    ----------
    objective
        ``throughput``, ``cost``, or a time.
    behind
        Difference to the other option, as a share of what this one gives or takes itself.

    Returns
    -------
    str
        A phrase such as ``takes 12 % longer``.
    """
    if objective == "throughput":
        return f"is {100 * behind / (1 + behind):.0f} % slower"
    return (
        f"costs {100 * behind:.0f} % more"
        if objective == "cost"
        else (f"takes {100 * behind:.0f} % longer")
    )


def describe_cost(other: Prediction, chosen: Prediction) -> str:
    """What a technique costs that is as good as the chosen one, in a clause."""
    t, mine = other.technique, chosen.technique
    if simplicity_rank(t)[0] > simplicity_rank(mine)[0]:
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


def best_runnable(question: Question, search: TableSearch, chosen: int) -> Prediction | None:
    """The best that a released engine runs, where none runs the choice."""
    d = question.deployment
    able = {name for name in search.table.names if engines_running(name, d)}
    if search.table.technique[chosen].name in able:
        return None
    limits, goal = question.limits.finite(), search.table.columns[question.objective]
    rows = [search.best(limits, name) for name in search.table.names if name in able]
    known = [row for row in rows if row is not None]
    return search.replay(min(known, key=lambda row: float(goal[row]))) if known else None


def find_knees(question: Question, search: TableSearch, chosen: int) -> list[Knee]:
    """The earliest first token of the chosen technique within shares of its best."""
    table = search.table
    same = table.rows_of(table.technique[chosen].name)
    objective = table.columns[question.objective]
    rows = rows_within(objective, table.columns, question.limits.finite(), same)
    top = float(objective[rows].min())
    found = []
    for share in KNEE_SHARES:
        some = rows_as_good(objective, rows, top, share)
        row = int(min(some, key=lambda r: (table.columns["ttft"][r], objective[r])))
        found.append(Knee(share, search.replay(row)))
    return found


def find_waves(question: Question, choice: Prediction) -> Waves | None:
    """Find the smaller batches that finish a given batch earliest, one after another.

    Parameters
    ----------
    question
        The question, whose workload states the batch.
    choice
        The prediction for the whole batch at once.

    Returns
    -------
    Waves or None
        The best waves; None if none is over 2 % faster, or the question states no batch.
    """
    w = question.workload
    if w.batch is None or w.batch < 2:
        return None
    free = replace(question, workload=replace(w, batch=None))
    names = {FULL, choice.technique.name} & set(TECHNIQUES)
    search = TableSearch(free, tabulate(free, tuple(names)))
    if not len(search.table):
        return None
    rows = rows_within(
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


# other deployments

ADVICE_GAIN = 1.2  # times the objective: a change that gains less is not worth a line
GPUS_PER_REPLICA = (1, 2, 4, 8)
QUICK_TECHNIQUES = (FULL, "offload")  # what a first look at another deployment tries


@frozen
class PlanRemedy:
    """A change of the question, and what it would bring.

    Attributes
    ----------
    changes
        Options of the command line with their values.
    what
        In words: "int4 weights".
    gives
        The plan with it for equal requests, or what a service then carries.
    gain
        Of the objective over the plan without it, relative; NaN where there is none.
    caution
        What the change itself costs.
    evidence
        Of the loss of quality with it; None where nothing is lost by the change.
    """

    changes: Mapping[str, str]
    what: str
    gives: Prediction | Carried
    gain: float = float("nan")
    caution: str = ""
    evidence: Evidence | None = None

    @property
    def option(self) -> str:
        """The options as they are typed."""
        said = {f"--{k.replace('_', '-')}": v for k, v in self.changes.items()}
        return " ".join(f"{name} {quote(v)}" if v else name for name, v in said.items())

    @property
    def prediction(self) -> Prediction:
        """The plan for equal requests.

        Raises
        ------
        LookupError
            If the remedy is of a service.
        """
        if isinstance(self.gives, Carried):
            raise LookupError(f"{self.option} is of a service")
        return self.gives

    def __str__(self) -> str:
        """The options, and what they give."""
        return f"With {self.option}: {self.outcome}"

    @property
    def outcome(self) -> str:
        """What the change gives, in words."""
        p = self.gives
        if isinstance(p, Carried):
            on = f" on {p.gpus} GPUs" if p.gpus > 1 else ""
            return f"{format_number(p.per_s)} requests/s{on}"
        times = f"TTFT {format_seconds(float(p.ttft_s[0]))}"
        if p.generate > 1:
            times += f", TPOT {format_seconds(float(p.tpot_s[0]))}"
        batch, rate = float(p.batch[0]), format_number(float(p.output_tok_s[0]))
        name = "full KV" if p.technique.name == FULL else technique_label(p.technique)
        count = f" on {p.deployment.gpus} GPUs" if p.deployment.gpus > 1 else ""
        return f"{name} at batch {batch:.0f}, {times}, {rate} tok/s{count}"


class NoPlanError(InfeasibleError):
    """Nothing is within the limits; the message has a line for each change that would help.

    Attributes
    ----------
    reason
        What is in the way.
    remedies
        Changes that would do, the gentlest first.
    deployment
        What was asked for first.
    relaxations
        The smallest value of each limit that, all others kept, would do; as stored in limits.
    asked
        What a service was asked to keep, and for which requests, in sentences.
    nearest
        What a service carries with the change that is nearest to what was asked for.
    """

    def __init__(
        self,
        text: str,
        remedies: Sequence[PlanRemedy],
        deployment: Deployment,
        relaxations: Mapping[str, float] | None = None,
        asked: str = "",
        nearest: "PlayedOption | None" = None,
    ) -> None:
        head = [text, *([asked] if asked else []), *(["A plan exists with:"] if remedies else [])]
        super().__init__("\n".join([*head, *(f"- {one}" for one in remedies)]))
        self.reason = text
        self.remedies, self.deployment = list(remedies), deployment
        self.relaxations = dict(relaxations or {})
        self.asked, self.nearest = asked, nearest


def quick_plan(question: Question, some: tuple[str, ...] = QUICK_TECHNIQUES) -> Prediction | None:
    """The plan that a few techniques allow, if they allow one."""
    every = tuple(t.name for t in question.admission.candidates())
    names = tuple(name for name in every if name in some) or every
    search = TableSearch(question, tabulate(question, names))
    if not search.table.technique:
        return None
    row = search.chosen(question.limits.finite())
    return None if row is None else search.replay(row)


def ask_on(question: Question, deployment: Deployment) -> Question:
    """The same question on another deployment, with the same share of its memory."""
    before, after = question.deployment.hardware, deployment.hardware
    share = question.limits.gpu_memory / before.gpu_memory
    host = question.limits.host_memory if before is after else after.host_memory
    return replace(question, deployment=deployment).with_limits(
        gpu_memory=share * after.gpu_memory, host_memory=host
    )


def deployment_changes(question: Question) -> Iterator[PlanRemedy]:
    """Other weights and more GPUs, the gentlest first, where they allow a plan.

    Both together where no weights do alone: on the fewest GPUs, if those are fewer than without.
    """
    d = question.deployment
    formats, counts = narrower_weights(question), larger_tp(d)
    alone = False
    for name, caution in formats.items():
        found = _try_deployment(question, replace(d, weights=name))
        if found is not None:
            alone = True
            yield PlanRemedy({"weights": name}, f"{name} weights", found, caution=caution)
    more = _first_plan(question, [(n, d.weights) for n in counts])
    if not alone:
        room = [n for n in counts if more is None or n < more.deployment.gpus]
        gentlest = _first_plan(question, [(n, name) for name in formats for n in room])
        fewest = _first_plan(question, [(n, name) for n in room for name in formats])
        both = {
            (x.deployment.gpus, x.deployment.weights): x
            for x in (gentlest, fewest)
            if x is not None
        }
        for (n, name), found in both.items():
            what = f"{name} weights on {n} GPUs"
            both_changed = {"weights": name, "tp": str(n)}
            yield PlanRemedy(both_changed, what, found, caution=formats[name])
    if more is not None:
        n = more.deployment.gpus
        yield PlanRemedy({"tp": str(n)}, f"{n} GPUs", more)


def narrower_weights(question: Question) -> dict[str, str]:
    """Narrower formats that the engine asked for reads, the gentlest first, with their costs."""
    deployment, engine = question.deployment, question.admission.engine
    own = PUBLISHED.get(deployment.model.family)
    return {
        name: AS_PUBLISHED if name == own else _loss_of_weights(deployment, name)
        for name in narrower_formats(deployment)
        if not engine or name in READ[engine]
    }


def _loss_of_weights(deployment: Deployment, name: str) -> str:
    known = weights_evidence(deployment.model, name)
    if known.unknown:
        return NARROW
    return f"{known.unit.removeprefix('relative ')} at most {100 * known.column:.1f} % worse"


def larger_tp(deployment: Deployment) -> list[int]:
    """Larger numbers of GPUs that the model can be split over."""
    d = deployment
    return [n for n in GPUS_PER_REPLICA if n > d.tp == d.gpus and not d.model.heads % n]


AS_PUBLISHED = "the weights as they were published"
NARROW = "narrower weights change the output; kvsim has no evidence of how much"


def _first_plan(question: Question, tried: list[tuple[int, str]]) -> Prediction | None:
    """The plan of the first of some numbers of GPUs, with a format of weights, that allows one."""
    for count, weights in tried:
        d = replace(question.deployment, tp=count, weights=weights)
        found = _try_deployment(question, d)
        if found is not None:
            return found
    return None


def _try_deployment(q: Question, deployment: Deployment) -> Prediction | None:
    try:
        asked = ask_on(q, deployment)
        return quick_plan(asked, (FULL,)) or quick_plan(
            asked
        )  # offloading where nothing else would do
    except (InputError, InfeasibleError):
        return None


def drop_dominated(question: Question, every: Iterable[PlanRemedy]) -> Iterator[PlanRemedy]:
    """Changes, but no narrower weights that bring less than wider ones."""
    most = 0.0
    for advice in every:
        if advice.caution not in ("", AS_PUBLISHED):
            value = score(question, advice.prediction)
            if value <= most:
                continue
            most = value
        yield advice


def find_advice(question: Question, choice: Prediction) -> list[PlanRemedy]:
    """Changes of weights or GPUs that would bring much more, per GPU, or meet what is missed.

    Where no engine runs the choice, also those that bring less.
    """
    found = []
    value = score(question, choice)
    runs = engines_running(choice.technique.name, choice.deployment)
    least = ADVICE_GAIN * value if runs else 0.0
    for advice in drop_dominated(question, deployment_changes(question)):
        other = score(question, advice.prediction)
        if other > least:
            found.append(replace(advice, gain=other / value - 1))
    return found


def score(question: Question, prediction: Prediction) -> float:
    """The objective of a prediction, more is better; throughput and cost are per GPU."""
    if question.objective == "latency":
        return 1 / float(prediction.request_s[0])
    if question.objective == "cost":
        return 1 / float(prediction.usd_per_million()[0])
    return float(prediction.output_tok_s[0]) / prediction.deployment.gpus
