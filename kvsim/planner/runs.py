"""Layers whose batch passes in halves, so that CPU and GPU alternate, beside layers on the GPU.

A layer on the GPU begins when the CPU has answered for both halves, so a mix alternates between
*runs* of layers that the CPU answers for and of layers on the GPU. What the streams' work alone
does not say, and every order of the layers obeys:

- At the beginning of every run the CPU waits for a half layer's products and their copy.
- A copy of weights is issued while the layer before, of those that load, begins, and it queues
  behind the answers before that. Where all layers load it therefore runs beside the CPU's work for
  one half at most: none where the layer before is on the GPU. The other copies take their time
  beside the CPU's work, not within it.
- Two buffers hold copies, so that a half's copy begins when the CPU has attended for the half
  before the last one: in a run, two halves take at least one half's copy, products and attention.

An engine's head, and the first layer of the next step, do not wait for the CPU's last half: once
in every step the wait at the end of a run may fall away.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import pulp
from numpy.typing import NDArray

from kvsim import solver
from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.planner.halves import Halves

if TYPE_CHECKING:
    from kvsim.planner.programme import Programme, Variables

GROWTH = 1.15  # from one end to the next of the ranges that a streamed share is within
LEAST = 0.03  # end of the first range, about


@frozen
class Runs:
    """Variables of the runs, by shape of a layer and range of the share of weights it streams.

    Attributes
    ----------
    first, behind
        Runs by their first layer, and by the layer on the GPU behind them.
    ends
        Of the ranges. (r, 2)
    idle
        Layers of each shape that the CPU answers for and that load no weights.
    long
        Copies beside the CPU's work in such layers, one at a time: by option, shape and range.
    some_stay
        At least 1 where some layers on the GPU load no weights, and where some of the CPU's do not.
    """

    first: Mapping[tuple[int, int], pulp.LpVariable]
    behind: Mapping[tuple[int, int], pulp.LpVariable]
    ends: NDArray[np.float64]
    idle: Mapping[int, pulp.LpVariable]
    long: Mapping[tuple[int, int, int], pulp.LpVariable]
    some_stay: tuple[pulp.LpAffineExpression, pulp.LpAffineExpression]


def add_runs(
    problem: pulp.LpProblem,
    programme: Programme,
    counts: Variables,
    corners: Variables,
    streamed: Variables,
    passes: list[pulp.LpVariable],
    unit: float,
) -> None:
    """The rows of a programme whose counts are whole; ``unit`` is that of its times. [s]"""
    h = programme.halves
    if h is None or len(programme.names) < 2:
        return
    runs = _runs(problem, programme, h, counts, streamed)
    for i in np.flatnonzero(h.attention.max(axis=1) > 0).tolist():
        phase = _Phase(problem, programme, h, i, unit, runs)
        phase.add(counts, corners, streamed, passes[i])


def _runs(problem: pulp.LpProblem, p: Programme, h: Halves, n: Variables, w: Variables) -> Runs:
    shapes, most = range(p.layers.size), int(p.layers.sum())
    (gpu,) = (o for o in range(len(p.names)) if o != h.option)
    ends = _ranges(p, h) if w else np.array([[0.0, 1.0]])
    every: dict[str, dict[tuple[int, int], pulp.LpVariable]] = {}
    stays: list[pulp.LpAffineExpression] = []
    idle: dict[int, pulp.LpVariable] = {}
    long: dict[tuple[int, int, int], pulp.LpVariable] = {}
    least = -1
    for name, o in (("first", h.option), ("behind", gpu)):
        some = problem.add_variable(f"some_{name}", 0, 1, pulp.LpInteger)
        problem.addConstraint(pulp.lpSum(n[o, k] for k in shapes) <= most * some, f"some_{name}")
        least = least + some
        stay: list[pulp.LpVariable] = []
        every[name] = {}
        for k in shapes:
            layers = int(p.layers[k])
            mine = [problem.add_variable(f"{name}_{k}_{r}", 0, layers) for r in range(len(ends))]
            every[name] |= {(k, r): x for r, x in enumerate(mine)}
            problem.addConstraint(pulp.lpSum(mine) <= n[o, k], f"{name}_{k}")
            if w:
                none, inside = _share(problem, f"{name}_{k}", ends, mine, n[o, k], w[o, k], layers)
                stay.append(none)
                for r, z in enumerate(inside):
                    long[o, k, r] = problem.add_variable(f"long_{name}_{k}_{r}", 0)
                    most_long = layers * z if o == h.option else mine[r]
                    problem.addConstraint(long[o, k, r] <= most_long, f"long_{name}_{k}_{r}")
            if w and o == h.option:
                idle[k] = problem.add_variable(f"idle_{k}", 0)
                problem.addConstraint(idle[k] <= n[o, k], f"idle_{k}_some")
                problem.addConstraint(idle[k] <= layers * stay[-1], f"idle_{k}_none")
        stays.append(pulp.lpSum(stay))
        for k in np.flatnonzero(h.others).tolist():  # between each two of a run are others of it
            others = pulp.lpSum(n[o, i] for i in shapes if i != k) / int(h.others[k])
            row = n[o, k] - others - pulp.lpSum(every[name].values()) <= 0
            problem.addConstraint(row, f"{name}_{k}_others")
    runs = pulp.lpSum(every["first"].values())
    problem.addConstraint(runs == pulp.lpSum(every["behind"].values()), "runs")
    problem.addConstraint(runs >= least, "runs_least")
    if w:
        problem.addConstraint(pulp.lpSum(long.values()) <= pulp.lpSum(idle.values()), "long")
    return Runs(every["first"], every["behind"], ends, idle, long, (stays[1], stays[0]))


def _share(
    problem: pulp.LpProblem, name: str, ends: NDArray[np.float64], runs: list[pulp.LpVariable],
    count: pulp.LpVariable, streamed: pulp.LpVariable, layers: int,
) -> tuple[pulp.LpVariable, list[pulp.LpVariable]]:  # fmt: skip
    """Whether some layers stream nothing, and in which range the share is that they stream."""
    none = problem.add_variable(f"{name}_none", 0, 1, pulp.LpInteger)
    problem.addConstraint(none <= count, f"{name}_none_some")
    problem.addConstraint(streamed + layers * none <= layers, f"{name}_none_streamed")
    inside = []
    for r, (low, high) in enumerate(ends.tolist()):
        z = problem.add_variable(f"{name}_in_{r}", 0, 1, pulp.LpInteger)
        inside.append(z)
        problem.addConstraint(runs[r] <= layers * z, f"{name}_{r}_runs")
        if low:
            problem.addConstraint(
                low * count - streamed + low * layers * z <= low * layers, f"{name}_{r}_low"
            )
        if high < 1:
            room = (1 - high) * layers
            problem.addConstraint(streamed - high * count + room * z <= room, f"{name}_{r}_high")
    problem.addConstraint(pulp.lpSum(inside) == 1, f"{name}_one")
    return none, inside


def _ranges(p: Programme, h: Halves) -> NDArray[np.float64]:
    """Ranges of a share; one ends where a half's copy takes as long as the CPU's work for it."""
    moved = p.streaming.seconds[:, p.resources.index("h2d")]
    some = h.attention > 0
    even = 2 * float((h.attention[some] / moved[some]).min()) if some.any() else 1.0
    first, last = np.log(np.array([LEAST, 1 / GROWTH]) / even) / np.log(GROWTH)
    inside = even * GROWTH ** np.arange(np.ceil(first), last)
    highs = np.concatenate([inside, [1.0]])
    return np.stack([np.concatenate([[0.0], highs[:-1]]), highs], axis=1)


@frozen
class _Phase:
    """Rows of one phase; times in ``unit``."""

    problem: pulp.LpProblem
    p: Programme
    h: Halves
    phase: int
    unit: float
    runs: Runs

    def _in_units(self, values: Array) -> Array:
        found: Array = values[self.phase] / self.unit
        return found

    def add(self, n: Variables, y: Variables, w: Variables, t: pulp.LpVariable) -> None:
        p, h, q = self.p, self.h, self.p.phases[self.phase]
        shapes = range(p.layers.size)
        (gpu,) = (o for o in range(len(p.names)) if o != h.option)
        attend, spared = self._in_units(h.attention), float(self._in_units(h.spared))
        before, until = self._in_units(h.before), t / self.unit
        chain = self._in_units(p.seconds[:, p.resources.index("chain")])
        here = pulp.lpSum(
            float(chain[v, k]) * x for (v, k), x in y.items() if p.option_of[v] == gpu
        )
        answers = pulp.lpSum(2 * float(attend[k]) * n[h.option, k] for k in shapes)
        waits = pulp.lpSum(float(before[k]) * x for (k, _), x in self.runs.first.items())
        self.problem.addConstraint(here + answers + waits - until <= spared, f"runs_{q}")
        if not w:
            return
        moved = self._in_units(p.streaming.seconds[:, p.resources.index("h2d")])
        loads = pulp.lpSum(float(moved[k]) * x for (_, k), x in w.items())
        hidden = self._hidden(n, w, gpu, moved)
        self.problem.addConstraint(answers + loads - hidden - until <= 0, f"beside_{q}")
        each = attend + self._in_units(h.around)
        pairs = pulp.lpSum(
            float(each[k]) * n[h.option, k] + float(moved[k] / 2) * w[h.option, k] for k in shapes
        )
        # the first copy of a run is not between two attentions, but the CPU then has two in turn
        less = np.maximum(np.outer(moved / 2, self.runs.ends[:, 1]) - attend[:, None], 0.0)
        first = pulp.lpSum(float(less[key]) * x for key, x in self.runs.first.items() if less[key])
        most = float(((each + moved / 2 + chain.max(axis=0)) * p.layers).sum())
        row = here + pairs - first - most * self.runs.some_stay[1] - until <= spared
        self.problem.addConstraint(row, f"buffers_{q}")
        # where all load, what is behind a run and loads waits for the run's last answer
        none = most * pulp.lpSum(self.runs.some_stay)
        ranges = self.runs.ends.tolist()
        starts = pulp.lpSum(float(attend[k]) * x for (k, _), x in self.runs.first.items())
        other = pulp.lpSum(float(moved[k]) * w[gpu, k] for k in shapes)
        copied = pulp.lpSum(
            float(moved[k]) * ranges[r][1] * x for (k, r), x in self.runs.behind.items()
        )
        turn = self._in_units(p.seconds[:, p.resources.index("turn")])
        turns = pulp.lpSum(
            float(turn[v, k]) * x for (v, k), x in y.items() if p.option_of[v] == h.option
        )
        # copies for layers on the GPU wait for the answers of a run, but for one behind it
        self.problem.addConstraint(turns + other - copied - until <= 0, f"copied_{q}")
        row = pairs + starts + other - copied - none - until <= 0
        self.problem.addConstraint(row, f"loads_{q}")
        # the copy for a run's first layer waits until the layer before the last has attended
        top = float(chain[[v for v, o in enumerate(p.option_of) if o == gpu]].max())
        ready = pulp.lpSum(
            (float(moved[k] / 2) * ranges[r][0] - 2 * top) * x
            for (k, r), x in self.runs.first.items()
        )
        row = here + answers + ready - none - until <= top
        self.problem.addConstraint(row, f"ready_{q}")

    def _hidden(
        self, n: Variables, w: Variables, gpu: int, moved: Array
    ) -> pulp.LpAffineExpression:
        """Copies that run beside the CPU's work, at most."""
        p, h, q, runs = self.p, self.h, self.p.phases[self.phase], self.runs
        longest = self._in_units(h.longest)
        top, found, behind = float(longest.max()), [], solver.weigh([])
        gpu_stays = runs.some_stay[0]
        # each copy beside the CPU's work in layers that load nothing, whatever that takes
        long = {
            key: float(moved[key[1]] * runs.ends[key[2], 1]) * (0.5 if key[0] == h.option else 1.0)
            for key in runs.long
        }

        def longer(o: int, k: int) -> pulp.LpAffineExpression:
            return pulp.lpSum(long[o, k, r] * runs.long[o, k, r] for r in range(len(runs.ends)))

        for k in range(p.layers.size):
            size, layers = float(moved[k]), int(p.layers[k])
            second, lead, other = (
                self.problem.add_variable(f"{name}_{q}_{k}", 0)
                for name in ("second", "lead", "other")
            )
            found += [second, lead, other]
            ranges = range(len(runs.ends))
            low, high = size * runs.ends[:, 0], size * runs.ends[:, 1]
            streamed = size / 2 * w[h.option, k]
            starts = pulp.lpSum(runs.first[k, r] for r in ranges)
            least = pulp.lpSum(float(low[r] / 2) * runs.first[k, r] for r in ranges)
            copied = pulp.lpSum(float(high[r]) * runs.behind[k, r] for r in ranges)
            beside = pulp.lpSum(float(min(high[r], top)) * runs.behind[k, r] for r in ranges)
            rows = {  # the second half's copy runs beside the first half's answer
                "second": second <= streamed,
                "second_cpu": second <= float(longest[k]) * n[h.option, k],
                # that of the first half beside the answer before; none behind a layer on the GPU
                "lead": lead <= streamed,
                "lead_runs": lead - streamed + least <= size / 2 * layers * gpu_stays,
                "lead_cpu": lead - top * n[h.option, k] + top * starts - longer(h.option, k)
                <= size / 2 * layers * gpu_stays,
                # of the layers on the GPU only that of the first one behind a run
                "other": other <= size * w[gpu, k],
                "other_runs": other <= copied,
                "other_cpu": other - beside - longer(gpu, k) <= 0,
            }
            behind += lead + other
            for name, row in rows.items():
                self.problem.addConstraint(row, f"{name}_{q}_{k}")
        # a copy may take all of the CPU's work for layers that load nothing, or of one half
        idle = pulp.lpSum(float(longest[k]) * x for k, x in runs.idle.items())
        halves = pulp.lpSum(float(longest[k]) * n[h.option, k] for k in range(p.layers.size))
        more = pulp.lpSum(long[key] * x for key, x in runs.long.items())
        self.problem.addConstraint(behind - halves + idle - more <= 0, f"copies_{q}")
        self.problem.addConstraint(behind - halves - idle <= 0, f"answers_{q}")
        return pulp.lpSum(found)
