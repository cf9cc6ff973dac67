"""Every setting of every technique at every sensible batch, as one table of plain arrays.

The columns are what limits and objectives are about, all to be small. Batches are a geometric grid
up to the largest that fits, made finer around the best rows; the sum over the growing context takes
a few points, and what decides is replayed at every generated token. The choice is the simplest row
that is as good as the best within the known error.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import InfeasibleError
from kvsim.planner.question import Question, does_nothing, relative_gain, simplicity_rank
from kvsim.prediction.generate import Prediction
from kvsim.prediction.memory import MOST_SEQUENCES
from kvsim.quality.evidence import Evidence
from kvsim.techniques.technique import Technique

# choosing rows

T = TypeVar("T")
Column = NDArray[np.floating]
Rows = NDArray[np.intp]
LIMIT_SLACK = 1e-9  # relative slack of a limit: rounding, far below what any prediction means


def distinct(values: Column) -> Column:
    """Each number once, in order; ``np.unique`` would import masked arrays, which takes longer."""
    ordered = np.sort(values)
    return ordered[np.diff(ordered, prepend=-np.inf) > 0]


def rows_within(
    objective: Column,
    columns: Mapping[str, Column],
    limits: Mapping[str, float],
    among: Rows | None = None,
) -> Rows:
    """Find the rows that no limit excludes and that have an objective at all.

    Parameters
    ----------
    objective : to be small; not finite where there is none. (n,)
    columns : what limits are about, by name. (n,) each
    limits : the most of some columns.
    among : rows that are considered; all if None.

    Returns
    -------
    Their places, in order.
    """
    kept = np.isfinite(objective)
    for name, limit in limits.items():
        kept &= columns[name] <= limit * (1 + LIMIT_SLACK)
    return np.flatnonzero(kept) if among is None else among[kept[among]]


def best_row(
    objective: Column,
    columns: Mapping[str, Column],
    limits: Mapping[str, float],
    among: Rows | None = None,
) -> int | None:
    """Find the first row with the smallest objective within the limits, if there is one.

    Parameters are those of `rows_within`.
    """
    rows = rows_within(objective, columns, limits, among)
    if not rows.size:
        return None
    least = float(objective[rows].min())
    return int(rows[objective[rows] <= least + LIMIT_SLACK * abs(least)][0])


def rows_as_good(objective: Column, rows: Rows, value: float, error: float) -> Rows:
    """Those rows whose objective is no worse than a value by more than a relative error."""
    return rows[objective[rows] <= value + error * abs(value)]


def as_good_as_best(
    some: Iterable[T], goal: Callable[[T], float], margin: Callable[[T, T], float]
) -> list[T]:
    """Those options that are no worse than the best by more than a margin.

    Parameters
    ----------
    some : at least one option.
    goal : of an option, to be small.
    margin : by how much of its goal the best must beat an option to be preferred to it.
    """
    every = list(some)
    best = min(every, key=goal)
    top = goal(best)
    return [
        x
        for x in every
        if goal(x) <= top + max(margin(x, best), LIMIT_SLACK) * abs(top) or x is best
    ]


def simplest_row(
    objective: Column,
    latency: Column,
    groups: Sequence[Hashable],
    rank: Callable[[int], tuple[int, ...]],
    size: Column,
    rows: Rows,
    between: Callable[[int, int], float],
    inside: float,
) -> int:
    """Choose the simplest of the rows that are as good as the best within the prediction error.

    Groups within the error of the best compete. Those with the lowest rank win. Among them the
    group wins whose smallest size has clearly the smallest latency, or else the best one. Within
    that group, the smallest size that is as good wins.

    Parameters
    ----------
    objective : value by row; the smallest is best.
    latency : latency by row, which decides between groups of equal rank.
    groups : group of each row; errors within a group nearly cancel.
    rank : function that returns a row's complexity, equal within a group; lower is simpler.
    size : size by row, such as the batch, in which the rows of a group differ.
    rows : rows that compete.
    between : function that returns the relative error between the groups of two rows.
    inside : relative error within a group.

    Returns
    -------
    int
        The chosen row.
    """
    members: dict[Hashable, list[int]] = {}
    for row in rows:
        members.setdefault(groups[row], []).append(int(row))
    tops = [min(some, key=lambda row: float(objective[row])) for some in members.values()]
    near = []
    for top in as_good_as_best(tops, lambda row: float(objective[row]), between):
        mine = np.array(members[groups[top]])
        good = rows_as_good(objective, mine, float(objective[top]), inside)
        near.append(int(min(good, key=lambda r: (size[r], latency[r], objective[r]))))
    lowest = min(map(rank, near))
    left = [row for row in near if rank(row) == lowest]
    fastest = min(float(latency[row]) for row in left)
    quick = [row for row in left if latency[row] <= fastest * CLEARLY_SLOWER]
    return min(quick, key=lambda row: float(objective[row]))


CLEARLY_SLOWER = 1.1  # times a latency: what is slower than this is slower


def nearest_row(
    columns: Mapping[str, Column], limits: Mapping[str, float]
) -> tuple[int, dict[str, float]]:
    """The row that exceeds the limits least, by the sum of relative excesses, and by how much.

    Raises
    ------
    InfeasibleError
        If no row has a value for every limit.
    """
    finite = np.flatnonzero(np.all([np.isfinite(columns[k]) for k in limits], axis=0))
    if not finite.size:
        raise InfeasibleError("no option meets every limit")
    excess = [np.maximum(columns[k] - v, 0.0) / (v or 1.0) for k, v in limits.items()]
    goal = np.sum(excess, axis=0)
    least = float(goal[finite].min())
    row = int(finite[goal[finite] <= least + LIMIT_SLACK * least][0])
    over = {k: float(columns[k][row]) - limit for k, limit in limits.items()}
    return row, {k: v for k, v in over.items() if v > LIMIT_SLACK * abs(limits[k])}


def relax_limits(columns: Mapping[str, Column], limits: Mapping[str, float]) -> dict[str, float]:
    """The smallest value of each limit that, all others kept, leaves a row; those that can."""
    found = {}
    for name in limits:
        others = {k: v for k, v in limits.items() if k != name}
        rows = rows_within(columns[name], columns, others)
        if rows.size:
            found[name] = float(columns[name][rows].min())
    return found


# the table

SAMPLED_CONTEXTS = 4  # points of the sum over the generated tokens; the choice is replayed with all
BATCH_GROWTH = 1.35  # ratio of neighbouring batches before refinement


@dataclass
class Options:
    """A table: one row per technique, settings and batch."""

    technique: list[Technique] = field(default_factory=list)
    name: NDArray[np.str_] = field(default_factory=lambda: np.zeros(0, dtype=np.str_))
    evidence: list[Evidence] = field(default_factory=list)
    batch: Column = field(default_factory=lambda: np.zeros(0))
    columns: dict[str, Column] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.technique)

    def copy(self) -> "Options":
        """A table that grows and is replayed by itself."""
        columns = {name: values.copy() for name, values in self.columns.items()}
        return replace(
            self,
            technique=list(self.technique),
            evidence=list(self.evidence),
            columns=columns,
        )

    def add(self, other: "Options") -> None:
        """Append the rows of another table."""
        if not len(other):  # it has no columns either
            return
        self.technique += other.technique
        self.name = np.concatenate([self.name, other.name])
        self.evidence += other.evidence
        self.batch = np.concatenate([self.batch, other.batch])
        self.columns = {
            name: np.concatenate([self.columns.get(name, np.zeros(0)), values])
            for name, values in other.columns.items()
        }

    def rows_of(self, name: str) -> Rows:
        """Rows of one technique."""
        return np.flatnonzero(self.name == name)

    @property
    def names(self) -> list[str]:
        """The names of all techniques, each once."""
        return list(dict.fromkeys(self.name.tolist()))


def evaluate(question: Question, technique: Technique, batch: Column) -> Options:
    """Evaluate all settings of an array-valued technique at all batches, in one evaluation.

    Parameters
    ----------
    batch : (b,) [sequences]

    Returns
    -------
    A row per setting and batch.
    """
    w, d = question.workload, question.deployment
    return list_rows(question, w.predict(technique, d, batch, SAMPLED_CONTEXTS))


def list_rows(question: Question, prediction: Prediction) -> Options:
    """Return a row for each setting and batch of a prediction."""
    q, admission, batch = question, question.admission, prediction.batch
    settings = prediction.technique.rows()
    shape = (len(settings), batch.size)
    known = [admission.evidence(s, q.deployment, q.workload.length) for s in settings]
    judged = {
        "loss": [admission.loss(e) for e in known],
        "harm": [admission.harm(e) for e in known],
        "assumed": [float(bool(s.assumes)) for s in settings],
        "idle": [float(does_nothing(s)) for s in settings],
        "idealised": [float(bool(s.needs_kernel(q.deployment.stack.name))) for s in settings],
    }
    columns: dict[str, Column] = {
        k: (np.zeros(shape) + v).ravel() for k, v in measures(prediction).items()
    }
    columns |= {k: np.repeat(v, batch.size) for k, v in judged.items()}
    return Options(
        [s for s in settings for _ in range(batch.size)],
        np.full(len(settings) * batch.size, prediction.technique.name),
        [e for e in known for _ in range(batch.size)],
        np.tile(batch, len(settings)),
        columns,
    )


def measures(prediction: Prediction) -> dict[str, Column]:
    """What limits and objectives are about, all to be small."""
    return {
        "gpu_memory": prediction.given_bytes,
        "host_memory": prediction.host_bytes,
        "disk": prediction.disk_bytes,
        "ttft": prediction.ttft_s,
        "tpot": np.nan_to_num(prediction.tpot_s),
        "latency": prediction.request_s,
        "throughput": -prediction.output_tok_s / prediction.deployment.gpus,
        "cost": prediction.usd_per_million(),
    }


def candidate_batches(
    question: Question, technique: Technique, gpu: Sequence[float] = ()
) -> Column:
    """Choose batches worth evaluating: a geometric grid, and the largest that memories allow.

    The grid ends above the largest, so that what a larger memory would bring is known, but for the
    most that can be evaluated.

    Parameters
    ----------
    gpu : memories of a GPU; that of the limits if empty. [B]

    Returns
    -------
    In order; none where the technique cannot divide the batch that is asked for, which is a cap
    where requests keep coming. [sequences]
    """
    workload, limits = question.workload, question.limits
    asked, parts = workload.batch, technique.tiles()
    if asked is not None and not workload.service:
        return np.array([float(asked)]) if asked % parts == 0 else np.zeros(0)
    largest = [
        workload.largest(technique, question.deployment, size, limits.host_memory)
        for size in gpu or (limits.gpu_memory,)
    ]
    if asked is not None:  # a service's cap: requests beyond what fits wait
        able = np.concatenate([np.minimum(np.ravel(b), asked) for b in largest])
        return distinct(able[able > 0] // parts * parts)
    top = max(float(np.max(b)) for b in largest)
    steps = np.arange(0, np.log(max(top / parts, 1)) / np.log(BATCH_GROWTH) + 2)
    grid = np.ceil(parts * BATCH_GROWTH**steps / parts) * parts
    every = np.concatenate([grid, *(np.ravel(b) for b in largest)])
    return distinct(every[(every > 0) & (every <= MOST_SEQUENCES)])


def tabulate(question: Question, names: tuple[str, ...] = ()) -> Options:
    """Evaluate all settings of all techniques that can run there.

    Parameters
    ----------
    names : of the techniques, if not all that the question admits.
    """
    q = question
    table, lengths = Options(), (q.workload.prompt, q.workload.generate)
    for technique in q.admission.candidates():
        if names and technique.name not in names:
            continue
        drafts = "gamma" in technique.settings  # which settings with an acceptance may be able to
        if not drafts and technique.refuses(q.deployment):
            continue
        for t in q.admission.settings(technique, q.deployment, *lengths):
            if drafts and t.refuses(q.deployment):
                continue
            batches = candidate_batches(q, t)
            if batches.size:
                table.add(evaluate(q, t, batches))
    return table


def tabulate_settings(
    question: Question, settings: Iterable[Technique], gpu: Sequence[float] = ()
) -> Options:
    """Evaluate some techniques with their settings as they are.

    Parameters
    ----------
    gpu : memories of a GPU whose largest batches count too; that of the limits if empty. [B]
    """
    table = Options()
    for t in settings:
        batches = candidate_batches(question, t, gpu)
        if batches.size and not t.refuses(question.deployment):
            table.add(evaluate(question, t, batches))
    return table


def batches_between(question: Question, table: Options, row: int) -> Options:
    """Evaluate the batches between a row's neighbours, for the same settings."""
    t, batch = table.technique[row], table.batch[row]
    same = [i for i, other in enumerate(table.technique) if other is t]
    known = np.sort(table.batch[same])
    lower = known[known < batch][-1:]
    upper = known[known > batch][:1]
    edges = np.concatenate([lower, [batch], upper])
    parts = t.tiles()
    finer = np.concatenate(
        [np.linspace(a, b, 10)[1:-1] for a, b in pairwise(edges)] or [np.zeros(0)]
    )
    finer = distinct(np.round(finer / parts) * parts)
    finer = finer[~(finer[:, None] == known).any(axis=1)]
    if question.workload.batch is not None or not finer.size:
        return Options()
    refined = evaluate(question, t, finer)
    return replace(refined, technique=[t] * finer.size)


# what has been replayed of it

FAR_BEHIND = 1.0  # behind the best: batches of what is slower need not be finer
REFINEMENTS = 2  # each divides the distance between neighbouring batches by nine
MAX_SHOWN = 3  # techniques that are not the choice, of either kind
MAX_REPLAYS = 32  # rows that are computed at every token, at most
SETTINGS_ERROR = 0.005
"""Relative error between two settings of one technique: they share nearly all of it."""


class TableSearch:
    """A table with what has been replayed of it; replays replace what the table said."""

    def __init__(self, q: Question, table: Options) -> None:
        self.q, self.table = q, table
        self._replays: dict[int, Prediction] = {}

    def under(self, **limits: float) -> "TableSearch":
        """The same options under other limits, with what has been replayed of them."""
        other = TableSearch(self.q.with_limits(**limits), self.table.copy())
        other._replays = dict(self._replays)
        return other

    def refine(self) -> None:
        """Finer batches around the best row of each technique that the plan may be about."""
        for _ in range(REFINEMENTS):
            for row in self._worth_refining():
                extra = batches_between(self.q, self.table, row)
                if extra.technique:
                    self.table.add(extra)

    def _worth_refining(self) -> list[int]:
        """The best rows of techniques: all near the best, but few that may not be chosen.

        What the user does not accept is only shown, the best of each kind of reason.
        """
        hard, finite = self.q.limits.hard(), self.q.limits.finite()
        top = self.best(hard)
        if top is None:
            return []
        found: list[int] = []
        barred: dict[str, list[int]] = {name: [] for name in finite if name not in hard}
        for name in self.table.names:
            row = self.best(hard, name)
            if row is None or not self._near(row, top):
                continue
            reason = next((k for k in barred if self.table.columns[k][row] > finite[k]), "")
            (barred[reason] if reason else found).append(row)
        goal = self.table.columns[self.q.objective]
        for rows in barred.values():
            found += sorted(rows, key=lambda row: float(goal[row]))[:MAX_SHOWN]
        return found

    def drafts(self) -> None:
        """Fewer and more drafts per round, as long as they are better."""
        q = self.q
        for name in self.table.names:
            drafting = any(self.table.technique[row].drafts for row in self.table.rows_of(name))
            known = {str(self.table.technique[row]) for row in self.table.rows_of(name)}
            while drafting and (row := self.best(q.limits.hard(), name)) is not None:
                t = self.table.technique[row]
                near = q.admission.neighbours(t, q.deployment, q.workload.length)
                some = [x for x in near if str(x) not in known]
                if not some:
                    break
                known |= set(map(str, some))
                self.table.add(tabulate_settings(q, some))

    def _near(self, row: int, top: int) -> bool:
        """Whether finer batches may make a row's technique matter."""
        goal = self.table.columns[self.q.objective]
        return relative_gain(float(goal[row]), float(goal[top])) < FAR_BEHIND

    def best(self, limits: dict[str, float], name: str = "") -> int | None:
        """The best row within the limits, of one technique if named."""
        if not len(self.table):
            return None
        among = self.table.rows_of(name) if name else None
        limits = limits if name else self._of_kernels(limits)
        return best_row(self.table.columns[self.q.objective], self.table.columns, limits, among)

    def _of_kernels(self, limits: dict[str, float]) -> dict[str, float]:
        """The limits without what needs a kernel that its engine has not, if that leaves a row.

        Widths by layer that the user measured are asked for, whatever runs them.
        """
        if self.q.admission.layered:
            return limits
        columns, measured = self.table.columns, limits | {"idealised": 0.0}
        rows = rows_within(columns[self.q.objective], columns, measured)
        return measured if rows.size else limits

    def chosen(self, limits: dict[str, float]) -> int | None:
        """The simplest row as good as the best, by exact replay of all that decides."""
        return self._settled(limits, exact=False)

    def optimum(self, limits: dict[str, float]) -> int | None:
        """The best row, by exact replay."""
        return self._settled(limits, exact=True)

    def _settled(self, limits: dict[str, float], exact: bool) -> int | None:
        objective, columns = self.q.objective, self.table.columns
        row: int | None = None
        for _ in range(MAX_REPLAYS if len(self.table) else 0):
            rows = rows_within(columns[objective], columns, self._of_kernels(limits))
            if not rows.size:
                return None
            row = self.best(limits) if exact else self._simplest(rows)
            assert row is not None
            if row in self._replays:
                return row
            self.replay(row)
        return row

    def _simplest(self, rows: np.ndarray) -> int:
        t, columns = self.table, self.table.columns
        return simplest_row(
            columns[self.q.objective],
            columns["latency"],
            [(name, x.exact) for name, x in zip(t.name.tolist(), t.technique, strict=True)],
            self._rank,
            t.batch,
            rows,
            lambda row, best: self.q.between(t.technique[best], t.technique[row]),
            SETTINGS_ERROR if self.q.error is None else min(SETTINGS_ERROR, self.q.error),
        )

    def _rank(self, row: int) -> tuple[int, ...]:
        """How simple a row is; of lossy ones those whose loss is known come first."""
        known = self.table.evidence[row]
        return *simplicity_rank(self.table.technique[row]), int(known.unknown)

    def include(self, found: Prediction) -> int:
        """A row for a technique that the table has not, already replayed."""
        self.table.add(list_rows(self.q, found))
        row = len(self.table) - 1
        self._replays[row] = found
        return row

    def replay(self, row: int) -> Prediction:
        """A row at every token."""
        if row not in self._replays:
            t, batch = self.table.technique[row], self.table.batch[row : row + 1]
            found = self.q.workload.predict(t, self.q.deployment, batch)
            self._replays[row] = found
            for name, value in measures(found).items():
                self.table.columns[name][row] = value[0]
        return self._replays[row]

    def value(self, row: int) -> float:
        """The objective of a row, replayed."""
        self.replay(row)
        return float(self.table.columns[self.q.objective][row])
