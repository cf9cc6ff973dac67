"""A question to the planner, and how its table of options is made, narrowed down and replayed."""

from dataclasses import field, replace

import numpy as np

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.machines.deployment import Deployment
from kvsim.planner.admit import Admission
from kvsim.planner.choose import best, simplest, within
from kvsim.planner.error import between
from kvsim.planner.options import Options, batches_between, measures, settled, tabulate
from kvsim.planner.workload import PlanLimits, Workload
from kvsim.prediction.generate import Prediction
from kvsim.techniques.papers.kvpr import Place
from kvsim.techniques.technique import Technique

OBJECTIVES = ("throughput", "latency", "cost")
FAR = 1.0  # behind the best: batches of what is slower need not be finer
REFINEMENTS = 2  # each divides the distance between neighbouring batches by nine
SHOWN = 3  # techniques that are not the choice, of either kind
MIXED = "mixed placement"
FULL = "full"  # nothing is done to the cache
REPLAYS = 32  # rows that are computed at every token, at most
INSIDE = 0.005
"""Relative error between two settings of one technique: they share nearly all of it."""


@frozen
class Question:
    """The question of a plan: equal requests on one deployment, under limits."""

    deployment: Deployment
    workload: Workload
    objective: str
    limits: PlanLimits
    admission: Admission = field(default_factory=Admission)
    error: float | None = None  # between any two techniques; as the ledger says if None

    def __post_init__(self) -> None:
        check_objective(self.objective, self.deployment)
        self.admission.check(self.deployment)

    def between(self, one: Technique, other: Technique) -> float:
        """Known relative error between two techniques."""
        return between(self.deployment, one, other) if self.error is None else self.error

    def goal(self, seconds: float, batch: float) -> float:
        """Of the objective, from the seconds of one turn of a batch; to be small."""
        d, w = self.deployment, self.workload
        if self.objective == "throughput":
            return -batch * w.generate / seconds / d.gpus
        if self.objective == "cost" and d.hardware.price is not None:
            return d.hardware.price * d.gpus / 3600 * seconds / (batch * w.generate) * 1e6
        return seconds

    def with_limits(self, **changes: float) -> "Question":
        """The same question under other limits."""
        return replace(self, limits=replace(self.limits, **changes))


def check_objective(objective: str, deployment: Deployment) -> None:
    """Refuse what is no objective, and costs on hardware without a price."""
    if objective not in OBJECTIVES:
        expected = ", ".join(OBJECTIVES)
        raise InputError(f"--objective: got {objective[:40]!r}; expected one of {expected}")
    if objective == "cost" and deployment.hardware.price is None:
        raise InputError(
            f"--objective cost: {deployment.hardware.name} has no price; expected a GPU with USD/h "
            f"in `kvsim gpus`, or a profile with price.usd_per_hour"
        )


def tabulate_question(q: Question, names: tuple[str, ...] = ()) -> Options:
    """Every option of a question, or those of some techniques."""
    admission = replace(q.admission, only=names) if names else q.admission
    room = (q.limits.gpu_memory,), q.limits.host_memory
    return tabulate(q.deployment, q.workload, *room, admission)


class Search:
    """A table with what has been replayed of it; replays replace what the table said."""

    def __init__(self, q: Question, table: Options) -> None:
        self.q, self.table = q, table
        self._replays: dict[int, Prediction] = {}

    def under(self, **limits: float) -> "Search":
        """The same options under other limits, with what has been replayed of them."""
        other = Search(self.q.with_limits(**limits), self.table.copy())
        other._replays = dict(self._replays)
        return other

    def refine(self) -> None:
        """Finer batches around the best row of each technique that the plan may be about."""
        q = self.q
        for _ in range(REFINEMENTS):
            for row in self._worth_refining():
                extra = batches_between(self.table, row, q.deployment, q.workload, q.admission)
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
            found += sorted(rows, key=lambda row: float(goal[row]))[:SHOWN]
        return found

    def drafts(self) -> None:
        """Fewer and more drafts per round, as long as they are better."""
        q = self.q
        room = (q.limits.gpu_memory,), q.limits.host_memory
        for name in self.table.names:
            known: set[str] = set()
            while True:
                row = self.best(q.limits.hard(), name)
                t = None if row is None else self.table.technique[row]
                if t is None or str(t) in known:
                    break
                known.add(str(t))
                some = q.admission.neighbours(t, q.deployment, q.workload.length)
                if not some:
                    break
                table = settled(some, q.deployment, q.workload, *room, q.admission)
                self.table.add(table)

    def _near(self, row: int, top: int) -> bool:
        """Whether finer batches may make a row's technique matter."""
        goal = self.table.columns[self.q.objective]
        return gain(float(goal[row]), float(goal[top])) < FAR

    def best(self, limits: dict[str, float], name: str = "") -> int | None:
        """The best row within the limits, of one technique if named."""
        if not len(self.table):
            return None
        among = self.table.rows_of(name) if name else None
        return best(self.table.columns[self.q.objective], self.table.columns, limits, among)

    def chosen(self, limits: dict[str, float]) -> int | None:
        """The simplest row as good as the best, by exact replay of all that decides."""
        return self._settled(limits, exact=False)

    def optimum(self, limits: dict[str, float]) -> int | None:
        """The best row, by exact replay."""
        return self._settled(limits, exact=True)

    def _settled(self, limits: dict[str, float], exact: bool) -> int | None:
        objective, columns = self.q.objective, self.table.columns
        row: int | None = None
        for _ in range(REPLAYS if len(self.table) else 0):
            rows = within(columns[objective], columns, limits)
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
        return simplest(
            columns[self.q.objective],
            columns["latency"],
            [(name, x.exact) for name, x in zip(t.name.tolist(), t.technique, strict=True)],
            self._rank,
            t.batch,
            rows,
            lambda first, row: self.q.between(t.technique[first], t.technique[row]),
            INSIDE if self.q.error is None else min(INSIDE, self.q.error),
        )

    def _rank(self, row: int) -> tuple[int, ...]:
        """How simple a row is; of lossy ones those whose loss is known come first."""
        known = self.table.evidence[row]
        return *rank(self.table.technique[row]), int(known.kind == "none" or bool(known.missing))

    def include(self, found: Prediction) -> int:
        """A row for a technique that the table has not, already replayed."""
        t, admission = found.technique, self.q.admission
        known = admission.evidence(t, self.q.deployment, self.q.workload.length)
        columns = measures(found)
        columns |= {"loss": np.array([admission.loss(known)]), "assumed": np.zeros(1)}
        columns |= {"harm": np.array([admission.harm(known)])}
        name = np.array([t.name])
        self.table.add(Options([t], name, [known], found.batch, columns, [(t, found.batch)]))
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


SIMPLEST = (0, 0)  # full KV


def rank(technique: Technique) -> tuple[int, ...]:
    """How simple a technique is: lossless before lossy, nothing done to the cache before one."""
    several = not technique.uniform or len(technique.terms) > 1
    return (0 if technique.exact else 1, 0 if technique.name == FULL else 2 if several else 1)


def does_nothing(technique: Technique) -> bool:
    """Recomputes or drafts nothing: offload or full KV by another name."""
    s = technique.settings
    return (technique.name == "kvpr" and s["split"] == 0) or (
        "gamma" in s and not technique.drafts and technique.exact
    )


def spoken(technique: Technique) -> str:
    """A name, one for all mixed placements."""
    return technique.name if technique.uniform and technique.name != Place.name else MIXED


def gain(before: float, after: float) -> float:
    """Relative improvement of an objective, which is negative where more is better."""
    return max(0.0, float(before / after - 1 if before > 0 else after / before - 1))
