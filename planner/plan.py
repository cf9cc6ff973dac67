"""``kvsim plan``: the option table, the choice, its replay, and what would change it."""

from dataclasses import dataclass, replace

import numpy as np

from kvsim.errors import InfeasibleError, InputError
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Link
from kvsim.planner.choose import Choice, choose, nearest, within
from kvsim.planner.options import GIB, Options, Workload, between, elsewhere, measures, tabulate
from kvsim.prediction.generate import Prediction
from kvsim.techniques.base import Technique
from kvsim.techniques.full import Full

OBJECTIVES = ("throughput", "latency", "cost")
REFINEMENTS = 2  # each divides the distance between neighbouring batches by nine
MARGIN = 0.01  # how far the table's sum over the context may be off, relative
REPLAYS = 64  # rows within the margin that are computed exactly, at most
REPLAYED_TOKENS = 200_000  # and fewer of them where each generates many tokens
MORE_LINK = 1.1
SHOWN = 3  # alternatives of either kind


@dataclass(frozen=True)
class Limits:
    """What a plan must stay within; infinite where the user set nothing."""

    gpu_memory: float  # per GPU [B]
    host_memory: float  # [B]
    ttft: float = np.inf  # [s]
    tpot: float = np.inf  # [s]
    loss: float = 0.0  # 0: same tokens as full-precision KV; 1: any technique
    assumed: float = 0.0  # 0: nothing rests on an acceptance rate that nobody measured

    def finite(self, without: str = "") -> dict[str, float]:
        """The limits that are set, by column."""
        return {k: v for k, v in vars(self).items() if np.isfinite(v) and k != without}

    def hard(self) -> dict[str, float]:
        """Those that memory and time set, not what the user is willing to accept."""
        return {k: v for k, v in self.finite().items() if k not in ("loss", "assumed")}


@dataclass(frozen=True)
class Plan:
    """The answer: a replayed choice, what it is compared with, and what holds it back."""

    objective: str
    limits: Limits
    choice: Prediction
    baseline: Prediction | None  # full KV at its own best batch; None if it does not fit
    alternatives: list[tuple[Prediction, bool]]  # best of other techniques; whether allowed
    binding: dict[str, float]  # limit -> relative gain of the objective without it
    prices: dict[str, float]  # change of hardware -> relative gain of the objective
    solver: Choice
    table: Options  # every option, for reports


def make_plan(
    d: Deployment,
    w: Workload,
    objective: str,
    limits: Limits,
    candidates: list[Technique],
) -> Plan:
    """Choose technique, settings and batch for a workload.

    Raises
    ------
    InputError
        For an unknown objective, and for costs on hardware without a price.
    InfeasibleError
        If nothing is within the limits; says which ones stand in the way, and by how much.
    """
    check_objective(objective, d)
    sizes = (limits.gpu_memory, limits.gpu_memory + GIB)
    table = tabulate(candidates, d, w, sizes, limits.host_memory)
    if not table.technique:
        raise InfeasibleError(_explain(table, limits))
    table = _refined(table, d, w, objective, limits)
    choice, replay = _replayed(table, d, w, objective, limits)
    binding = {
        name: _gain(replay, table, objective, limits.finite(without=name))
        for name in limits.finite()
    }
    more_memory = replace(limits, gpu_memory=limits.gpu_memory + GIB).finite()
    link = _faster_link(d)
    faster = _refined(elsewhere(table, link, w), link, w, objective, limits)
    return Plan(
        objective=objective,
        limits=limits,
        choice=replay,
        baseline=_baseline(table, d, w, objective, limits),
        alternatives=_alternatives(table, d, w, objective, limits, replay.technique.name),
        binding={k: v for k, v in binding.items() if v > 1e-6},
        prices={
            "one more GiB of GPU memory": _gain(replay, table, objective, more_memory),
            "10 % more host link bandwidth": _gain(
                replay, faster, objective, limits.finite(), link
            ),
        },
        solver=choice,
        table=table,
    )


def check_objective(objective: str, d: Deployment) -> None:
    """Refuse what is no objective, and costs on hardware without a price."""
    if objective not in OBJECTIVES:
        expected = ", ".join(OBJECTIVES)
        raise InputError(f"--objective: got {objective[:40]!r}; expected one of {expected}")
    if objective == "cost" and d.hardware.price is None:
        raise InputError(
            f"--objective cost: {d.hardware.name} has no price; expected a GPU with USD/h in "
            f"`kvsim gpus`, or a profile with price.usd_per_hour"
        )


def _refined(table: Options, d: Deployment, w: Workload, objective: str, limits: Limits) -> Options:
    """The table with finer batches around the best row of each technique."""
    for _ in range(REFINEMENTS):
        for name in dict.fromkeys(t.name for t in table.technique):
            best = _best(table, objective, limits.hard(), name)
            if best is not None:
                extra = between(table, best, d, w)
                if extra.technique:
                    table.add(extra)
    return table


def _best(table: Options, objective: str, limits: dict[str, float], name: str = "") -> int | None:
    """The best row within the limits, of one technique if named."""
    rows = within(table.columns[objective], table.columns, limits)
    if name:
        rows = np.intersect1d(rows, table.rows_of(name))
    return int(rows[np.argmin(table.columns[objective][rows])]) if rows.size else None


def _replayed(
    table: Options, d: Deployment, w: Workload, objective: str, limits: Limits
) -> tuple[Choice, Prediction]:
    """The best row by exact replay.

    The table sums over few points of the context. Rows that this may have kept from being the
    best are replayed first, and what the replays say replaces what the table said.
    """
    replays: dict[int, Prediction] = {}
    left = max(1, min(REPLAYS, REPLAYED_TOKENS // w.generate))
    while True:
        rows = [r for r in _contenders(table, objective, limits) if r not in replays][:left]
        if not rows:
            try:
                choice = choose(table.columns[objective], table.columns, limits.finite())
            except InfeasibleError:
                raise InfeasibleError(_explain(table, limits)) from None
            if choice.row in replays:
                return choice, replays[choice.row]
            rows = [choice.row]
        for row in rows:
            replays[row] = _replay(table, row, d, w)
            for name, value in measures(replays[row]).items():
                table.columns[name][row] = value[0]
        left -= len(rows)


def _contenders(table: Options, objective: str, limits: Limits) -> list[int]:
    """Rows that the error of the table may have kept from being the best, best first."""
    goal = table.columns[objective]
    wide = replace(limits, tpot=limits.tpot * (1 + MARGIN)).finite()
    rows = within(goal, table.columns, wide)
    best = _best(table, objective, limits.finite())
    if best is not None:
        rows = rows[goal[rows] <= goal[best] + MARGIN * abs(goal[best])]
    return [int(row) for row in rows[np.argsort(goal[rows], kind="stable")]]


def _replay(table: Options, row: int, d: Deployment, w: Workload) -> Prediction:
    return Prediction(table.technique[row], d, table.batch[row : row + 1], w.prompt, w.generate)


def _explain(table: Options, limits: Limits) -> str:
    """Which limits stand in the way, and by how much, at the option that comes nearest."""
    if not table.technique:
        return "no technique can run this model, batch and hardware; see `kvsim techniques`"
    allowed = np.flatnonzero(_allowed(table, limits))
    set_limits = limits.hard()
    if not allowed.size:
        return "no lossless technique can run here; --lossy admits the others"
    columns = {k: table.columns[k][allowed] for k in set_limits}
    row, excess = nearest(columns, set_limits)
    near = table.technique[allowed[row]]
    missing = "; ".join(
        f"{LABELS[k]} would have to be {_amount(k, set_limits[k] + v)} instead of "
        f"{_amount(k, set_limits[k])}"
        for k, v in excess.items()
    )
    batch = table.batch[allowed[row]]
    return f"no plan meets the limits: {missing} (nearest: {near} at batch {batch:.0f})"


def _allowed(table: Options, limits: Limits) -> np.ndarray:
    """Rows that the user's limits on quality and on assumptions admit."""
    columns = table.columns
    return (columns["loss"] <= limits.loss) & (columns["assumed"] <= limits.assumed)


LABELS = {
    "gpu_memory": "GPU memory",
    "host_memory": "host memory",
    "ttft": "TTFT",
    "tpot": "TPOT",
    "loss": "lossless techniques only",
    "assumed": "no unmeasured acceptance rates",
}


def _amount(name: str, value: float) -> str:
    return f"{value / GIB:.2f} GiB" if name.endswith("memory") else f"{value * 1e3:.4g} ms"


def _gain(
    replay: Prediction,
    table: Options,
    objective: str,
    limits: dict[str, float],
    d: Deployment | None = None,
) -> float:
    """Relative improvement of the objective under other limits, or on other hardware."""
    row = _best(table, objective, limits)
    if row is None:
        return 0.0
    w = Workload(replay.prompt, replay.generate)
    other = measures(_replay(table, row, d or replay.deployment, w))[objective][0]
    value = measures(replay)[objective][0]
    return max(0.0, float(value / other - 1 if value > 0 else other / value - 1))


def _faster_link(d: Deployment) -> Deployment:
    links = {
        name: Link(link.bandwidth * MORE_LINK, link.latency) if name in ("h2d", "d2h") else link
        for name, link in d.hardware.links.items()
    }
    return replace(d, hardware=replace(d.hardware, links=links))


def _baseline(
    table: Options, d: Deployment, w: Workload, objective: str, limits: Limits
) -> Prediction | None:
    """Full KV in the same memory whatever its latency, at its best batch if not at the given."""
    memory = {k: v for k, v in limits.finite().items() if k.endswith("memory")}
    row = _best(table, objective, memory, Full.name)
    if row is None and w.batch is not None:
        any_batch = replace(w, batch=None)
        table = tabulate([Full()], d, any_batch, [limits.gpu_memory], limits.host_memory)
        row = _best(table, objective, memory, Full.name) if table.technique else None
    return None if row is None else _replay(table, row, d, w)


def _alternatives(
    table: Options, d: Deployment, w: Workload, objective: str, limits: Limits, chosen: str
) -> list[tuple[Prediction, bool]]:
    """The best option of other techniques: three that are allowed, three that are not yet."""
    allowed = _allowed(table, limits)
    found: dict[bool, list[tuple[float, int]]] = {True: [], False: []}
    for name in dict.fromkeys(t.name for t in table.technique):
        row = _best(table, objective, limits.finite(), name)
        if row is None:
            row = _best(table, objective, limits.hard(), name)
        if row is not None and name != chosen:
            found[bool(allowed[row])].append((table.columns[objective][row], row))
    return [
        (_replay(table, row, d, w), ok)
        for ok, options in found.items()
        for _, row in sorted(options)[:SHOWN]
    ]
