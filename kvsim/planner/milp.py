"""Choices for layers and shares of placement as one mixed-integer programme over plain arrays.

Layers of one shape cost the same time, so time and memory are linear in counts:

    n[o,k]      layers of shape k that do option o, whole numbers
    y[v,k]      those of them at corner v of the option's shares; they sum to n
    w[o,k]      layers' worth of weights that layers of shape k under option o stream, at most n
    z[s]        how much of its weights any layer streams at most, which their buffers cost once
    use[o]      whether any layer does o, which its transient buffers cost once
    T[q]        time of one pass of phase q: prefill, and points of the growing context

For every phase and every stream T is at least the work of all layers, and at least their chains:
what a layer adds if nothing that could be prefetched delays it, or what the CPU takes where it
attends for both halves of a batch in turn, since layers before and after wait for both. Each holds
for every order of the layers, so the optimum is below every mix; which mix, replay decides.

Shares are continuous inside an option: the corners' coefficients are values of a plane that
touches the cost in the middle of the option's shares, below it everywhere.

A layer on the GPU begins when the CPU has answered for both halves of the batch, so a mix
alternates between *runs* of layers that the CPU answers for and of layers on the GPU. What the
streams' work alone does not say, and every order of the layers obeys:

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

from collections.abc import Iterable, Mapping
from dataclasses import field
from itertools import product

import numpy as np
from numpy.typing import NDArray

from kvsim import solver
from kvsim.errors import InfeasibleError
from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.planner.costs import Halves

# coefficients


@frozen
class Tangent:
    """A plane below the seconds of one option's layers of one shape, at the option's corners.

    Attributes
    ----------
    seconds
        By phase, resource and corner. (q, r, v) [s]
    """

    option: int
    shape: int
    seconds: Array


Variables = Mapping[tuple[int, int], solver.Variable]


@frozen
class Streaming:
    """Weights that come from the host in every pass.

    Attributes
    ----------
    seconds
        Of one layer's weights. (q, r, k) [s]
    gpu, host
        Bytes of one layer that leave the GPU's memory and fill the host's. (k,) [B]
    buffers
        GPU memory where some layer streams all of its weights. [B]
    most
        Of a layer's weights; 0 where the user wants none streamed.
    """

    seconds: Array
    gpu: Array
    host: Array
    buffers: float
    most: float = 1.0


@frozen
class Programme:
    """Coefficients: o options, v corners, k shapes of layers, q phases, r resources.

    Attributes
    ----------
    names
        Of options. (o,)
    option_of
        The option of each corner. (v,)
    layers
        Layers of each shape. (k,)
    resources
        Names of what a layer occupies: streams, and ``chain``. (r,)
    phases
        Names of passes. (q,)
    seconds
        Of one layer. (q, r, v, k) [s]
    head
        What a pass takes besides its layers. (q, r) [s]
    weight
        How often a pass counts in the objective. (q,)
    gpu, host
        Memory of one layer, at each time when memory may be fullest. (m, v, k) [B]
    once_gpu, once_host
        Buffers that an option needs once, if any layer does it, and what all layers share, by
        buffer; options share each, so that the largest counts. (m, s, v) [B]
    streaming
        What streaming weights takes.
    limits
        On ``gpu`` and ``host`` [B], and on sums of phases: name -> (weights by phase, bound) [s].
    halves
        Of layers whose batch passes in halves, where there are some.
    tangents
        Further planes below the seconds of an option's layers, of which the highest counts.
    buffered
        Shapes whose layers' shares are those that buffers are of; all if None. A layer with a
        window recomputes less than its corner says. (k,)
    """

    names: tuple[str, ...]
    option_of: NDArray[np.int64]
    layers: NDArray[np.int64]
    resources: tuple[str, ...]
    phases: tuple[str, ...]
    seconds: Array
    head: Array
    weight: Array
    gpu: Array
    host: Array
    once_gpu: Array
    once_host: Array
    streaming: Streaming
    memory: tuple[float, float]
    times: Mapping[str, tuple[Array, float]] = field(default_factory=dict)
    halves: Halves | None = None
    tangents: tuple[Tangent, ...] = ()
    buffered: NDArray[np.bool] | None = None

    def least(self) -> float:
        """What no mix undercuts whatever the memory: each resource at its quickest corners. [s]

        Infinite where even that misses a limit in time, and where no option divides the batch.
        """
        if not self.names:
            return np.inf
        quickest = (self.head + self.seconds.min(axis=2) @ self.layers).max(axis=1)
        late = any(weights @ quickest > limit for weights, limit in self.times.values())
        return np.inf if late else float(self.weight @ quickest)


@frozen
class Built:
    """The programme in PuLP, and its variables."""

    problem: solver.Problem
    n: dict[tuple[int, int], solver.Variable]
    y: dict[tuple[int, int], solver.Variable]
    w: dict[tuple[int, int], solver.Variable]
    t: list[solver.Variable]


# what every pass takes at least

TANGENT_ROUNDING = 1e-9  # of a pass: a tangent that is nowhere higher by more adds nothing


def add_times(
    problem: solver.Problem,
    programme: Programme,
    corners: Variables,
    streamed: Variables,
    passes: list[solver.Variable],
    unit: float,
    apart: bool,
) -> None:
    """A pass takes at least the work of every stream, and at least the chain."""
    p, y, w, t = programme, corners, streamed, passes
    options = p.option_of.tolist()
    groups = [[o] for o in range(len(p.names))] if apart else [list(range(len(p.names)))]
    for i, q in enumerate(p.phases):
        head = p.head[i].max() / unit if apart else p.head[i] / unit
        parts = [problem.add_variable(f"T_{q}_{p.names[o]}", 0) for (o,) in groups] if apart else []
        if apart:
            problem.addConstraint(solver.add_up(parts) - t[i] / unit <= -float(head), f"blocks_{q}")
        for j, r in enumerate(p.resources):
            per_layer, moved = p.seconds[i, j] / unit, p.streaming.seconds[i, j] / unit
            if not (per_layer.any() or p.head[i, j] or (w and moved.any())):
                continue
            bent = _add_planes(problem, p, y, (i, j), unit)
            for g, some in enumerate(groups):
                mine = [
                    (v, k)
                    for v, k in y
                    if per_layer[v, k] and (o := options[v]) in some and (o, k) not in bent
                ]
                work = solver.weigh(
                    [(y[key], float(per_layer[key])) for key in mine]
                    + [(x, float(moved[k])) for (o, k), x in w.items() if moved[k] and o in some]
                    + [(x, 1.0) for (o, k), x in bent.items() if o in some]
                )
                if apart:
                    problem.addConstraint(work <= parts[g], f"{r}_{q}_{p.names[g]}")
                else:
                    problem.addConstraint(work - t[i] / unit <= -float(head[j]), f"{r}_{q}")


def _add_planes(
    problem: solver.Problem, p: Programme, y: Variables, at: tuple[int, int], unit: float
) -> dict[tuple[int, int], solver.Variable]:
    """Seconds of an option's layers of a shape, where there is more than one plane below them."""
    found: dict[tuple[int, int], solver.Variable] = {}
    for i, tangent in enumerate(p.tangents):
        o, k = tangent.option, tangent.shape
        mine = np.flatnonzero(p.option_of == o)
        first, further = p.seconds[at][mine, k] / unit, tangent.seconds[at] / unit
        if (further <= first + TANGENT_ROUNDING * float(np.max(first, initial=0.0))).all():
            continue
        name = f"{p.resources[at[1]]}_{p.phases[at[0]]}_{p.names[o]}_{k}"
        planes: Iterable[tuple[str, Array]] = [(f"{name}_{i}", further)]
        if (o, k) not in found:
            found[o, k] = problem.add_variable(f"bent_{name}", 0)
            planes = [(name, first), *planes]
        for row, plane in planes:
            work = solver.add_up(
                float(x) * y[v, k] for v, x in zip(mine.tolist(), plane, strict=True)
            )
            problem.addConstraint(work <= found[o, k], f"plane_{row}")
    return found


def resource_work(programme: Programme, corners: Array) -> Array:
    """What layers take at least of every resource, without streamed weights. (q, r) [s]"""
    p = programme
    each = np.einsum("qrvk,vk->qrvk", p.seconds, corners)
    total: Array = each.sum(axis=(2, 3)) + p.head
    for o, k in dict.fromkeys((x.option, x.shape) for x in p.tangents):
        mine = np.flatnonzero(p.option_of == o)
        first = each[:, :, mine, k].sum(axis=2)
        some = [x.seconds @ corners[mine, k] for x in p.tangents if (x.option, x.shape) == (o, k)]
        total += np.max([first, *some], axis=0) - first
    return total


# buffers of streamed weights

STREAMED_QUARTERS = (0.25, 0.5, 0.75, 1.0)  # ends of what the layer that streams most streams


def add_weight_buffers(
    problem: solver.Problem,
    programme: Programme,
    counts: Variables,
    streamed: Variables,
    whole: bool,
    decided: Array | None,
) -> solver.Variable | None:
    """The share of a layer's weights that the layer which streams most needs buffers for.

    Exact where counts are decided. Otherwise at least the mean, and where counts are whole, at
    least the lower end of the quarter that it is in.
    """
    if not streamed:
        return None
    widest = problem.add_variable("widest", 0, 1)
    for (o, k), x in streamed.items():
        most = counts[o, k] if decided is None else float(decided[o, k]) * widest
        problem.addConstraint(x <= most, f"streamed_{programme.names[o]}_{k}")
    if decided is not None:
        return widest
    layers = float(programme.layers.sum())
    problem.addConstraint(solver.add_up(streamed.values()) / layers <= widest, "widest_mean")
    if not whole:
        return widest
    z = [
        problem.add_variable(f"z_{i}", 0, 1, solver.INTEGER) for i in range(len(STREAMED_QUARTERS))
    ]
    problem.addConstraint(solver.add_up(z) == 1, "widest_one")
    lower = zip((0.0, *STREAMED_QUARTERS), z, strict=False)
    problem.addConstraint(solver.add_up(low * x for low, x in lower if low) <= widest, "widest_low")
    for (o, k), x in streamed.items():
        for i, high in enumerate(STREAMED_QUARTERS[:-1]):
            room = (1 - high) * int(programme.layers[k]) * (1 - z[i])
            name = f"widest_{i}_{programme.names[o]}_{k}"
            problem.addConstraint(x - high * counts[o, k] <= room, name)
    return widest


# runs of layers that the CPU answers for

RANGE_GROWTH = 1.15  # from one end to the next of the ranges that a streamed share is within
FIRST_RANGE = 0.03  # end of the first range, about


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

    first: Mapping[tuple[int, int], solver.Variable]
    behind: Mapping[tuple[int, int], solver.Variable]
    ends: NDArray[np.float64]
    idle: Mapping[int, solver.Variable]
    long: Mapping[tuple[int, int, int], solver.Variable]
    some_stay: tuple[solver.Expression, solver.Expression]


def add_runs(
    problem: solver.Problem,
    programme: Programme,
    counts: Variables,
    corners: Variables,
    streamed: Variables,
    passes: list[solver.Variable],
    unit: float,
) -> None:
    """The rows of a programme whose counts are whole; ``unit`` is that of its times. [s]"""
    h = programme.halves
    if h is None or len(programme.names) < 2:
        return
    runs = _add_run_variables(problem, programme, h, counts, streamed)
    for i in np.flatnonzero(h.attention.max(axis=1) > 0).tolist():
        phase = _Phase(problem, programme, h, i, unit, runs)
        phase.add(counts, corners, streamed, passes[i])


def _add_run_variables(
    problem: solver.Problem, p: Programme, h: Halves, n: Variables, w: Variables
) -> Runs:
    shapes, most = range(p.layers.size), int(p.layers.sum())
    (gpu,) = (o for o in range(len(p.names)) if o != h.option)
    ends = _share_ranges(p, h) if w else np.array([[0.0, 1.0]])
    every: dict[str, dict[tuple[int, int], solver.Variable]] = {}
    stays: list[solver.Expression] = []
    idle: dict[int, solver.Variable] = {}
    long: dict[tuple[int, int, int], solver.Variable] = {}
    least = -1
    for name, o in (("first", h.option), ("behind", gpu)):
        some = problem.add_variable(f"some_{name}", 0, 1, solver.INTEGER)
        problem.addConstraint(solver.add_up(n[o, k] for k in shapes) <= most * some, f"some_{name}")
        least = least + some
        stay: list[solver.Variable] = []
        every[name] = {}
        for k in shapes:
            layers = int(p.layers[k])
            mine = [problem.add_variable(f"{name}_{k}_{r}", 0, layers) for r in range(len(ends))]
            every[name] |= {(k, r): x for r, x in enumerate(mine)}
            problem.addConstraint(solver.add_up(mine) <= n[o, k], f"{name}_{k}")
            if w:
                none, inside = _add_share(
                    problem, f"{name}_{k}", ends, mine, n[o, k], w[o, k], layers
                )
                stay.append(none)
                for r, z in enumerate(inside):
                    long[o, k, r] = problem.add_variable(f"long_{name}_{k}_{r}", 0)
                    most_long = layers * z if o == h.option else mine[r]
                    problem.addConstraint(long[o, k, r] <= most_long, f"long_{name}_{k}_{r}")
            if w and o == h.option:
                idle[k] = problem.add_variable(f"idle_{k}", 0)
                problem.addConstraint(idle[k] <= n[o, k], f"idle_{k}_some")
                problem.addConstraint(idle[k] <= layers * stay[-1], f"idle_{k}_none")
        stays.append(solver.add_up(stay))
        for k in np.flatnonzero(h.others).tolist():  # between each two of a run are others of it
            others = solver.add_up(n[o, i] for i in shapes if i != k) / int(h.others[k])
            row = n[o, k] - others - solver.add_up(every[name].values()) <= 0
            problem.addConstraint(row, f"{name}_{k}_others")
    runs = solver.add_up(every["first"].values())
    problem.addConstraint(runs == solver.add_up(every["behind"].values()), "runs")
    problem.addConstraint(runs >= least, "runs_least")
    if w:
        problem.addConstraint(solver.add_up(long.values()) <= solver.add_up(idle.values()), "long")
    return Runs(every["first"], every["behind"], ends, idle, long, (stays[1], stays[0]))


def _add_share(
    problem: solver.Problem,
    name: str,
    ends: NDArray[np.float64],
    runs: list[solver.Variable],
    count: solver.Variable,
    streamed: solver.Variable,
    layers: int,
) -> tuple[solver.Variable, list[solver.Variable]]:
    """Whether some layers stream nothing, and in which range the share is that they stream."""
    none = problem.add_variable(f"{name}_none", 0, 1, solver.INTEGER)
    problem.addConstraint(none <= count, f"{name}_none_some")
    problem.addConstraint(streamed + layers * none <= layers, f"{name}_none_streamed")
    inside = []
    for r, (low, high) in enumerate(ends.tolist()):
        z = problem.add_variable(f"{name}_in_{r}", 0, 1, solver.INTEGER)
        inside.append(z)
        problem.addConstraint(runs[r] <= layers * z, f"{name}_{r}_runs")
        if low:
            problem.addConstraint(
                low * count - streamed + low * layers * z <= low * layers, f"{name}_{r}_low"
            )
        if high < 1:
            room = (1 - high) * layers
            problem.addConstraint(streamed - high * count + room * z <= room, f"{name}_{r}_high")
    problem.addConstraint(solver.add_up(inside) == 1, f"{name}_one")
    return none, inside


def _share_ranges(p: Programme, h: Halves) -> NDArray[np.float64]:
    """Ranges of a share; one ends where a half's copy takes as long as the CPU's work for it."""
    moved = p.streaming.seconds[:, p.resources.index("h2d")]
    some = h.attention > 0
    even = 2 * float((h.attention[some] / moved[some]).min()) if some.any() else 1.0
    first, last = np.log(np.array([FIRST_RANGE, 1 / RANGE_GROWTH]) / even) / np.log(RANGE_GROWTH)
    inside = even * RANGE_GROWTH ** np.arange(np.ceil(first), last)
    highs = np.concatenate([inside, [1.0]])
    return np.stack([np.concatenate([[0.0], highs[:-1]]), highs], axis=1)


@frozen
class _Phase:
    """Rows of one phase; times in ``unit``."""

    problem: solver.Problem
    p: Programme
    h: Halves
    phase: int
    unit: float
    runs: Runs

    def _in_units(self, values: Array) -> Array:
        found: Array = values[self.phase] / self.unit
        return found

    def add(self, n: Variables, y: Variables, w: Variables, t: solver.Variable) -> None:
        p, h, q = self.p, self.h, self.p.phases[self.phase]
        shapes = range(p.layers.size)
        (gpu,) = (o for o in range(len(p.names)) if o != h.option)
        attend, spared = self._in_units(h.attention), float(self._in_units(h.spared))
        before, until = self._in_units(h.before), t / self.unit
        chain = self._in_units(p.seconds[:, p.resources.index("chain")])
        here = solver.add_up(
            float(chain[v, k]) * x for (v, k), x in y.items() if p.option_of[v] == gpu
        )
        answers = solver.add_up(2 * float(attend[k]) * n[h.option, k] for k in shapes)
        waits = solver.add_up(float(before[k]) * x for (k, _), x in self.runs.first.items())
        self.problem.addConstraint(here + answers + waits - until <= spared, f"runs_{q}")
        if not w:
            return
        moved = self._in_units(p.streaming.seconds[:, p.resources.index("h2d")])
        loads = solver.add_up(float(moved[k]) * x for (_, k), x in w.items())
        hidden = self._hidden(n, w, gpu, moved)
        self.problem.addConstraint(answers + loads - hidden - until <= 0, f"beside_{q}")
        each = attend + self._in_units(h.around)
        pairs = solver.add_up(
            float(each[k]) * n[h.option, k] + float(moved[k] / 2) * w[h.option, k] for k in shapes
        )
        # the first copy of a run is not between two attentions, but the CPU then has two in turn
        less = np.maximum(np.outer(moved / 2, self.runs.ends[:, 1]) - attend[:, None], 0.0)
        first = solver.add_up(
            float(less[key]) * x for key, x in self.runs.first.items() if less[key]
        )
        most = float(((each + moved / 2 + chain.max(axis=0)) * p.layers).sum())
        row = here + pairs - first - most * self.runs.some_stay[1] - until <= spared
        self.problem.addConstraint(row, f"buffers_{q}")
        # where all load, what is behind a run and loads waits for the run's last answer
        none = most * solver.add_up(self.runs.some_stay)
        ranges = self.runs.ends.tolist()
        starts = solver.add_up(float(attend[k]) * x for (k, _), x in self.runs.first.items())
        other = solver.add_up(float(moved[k]) * w[gpu, k] for k in shapes)
        copied = solver.add_up(
            float(moved[k]) * ranges[r][1] * x for (k, r), x in self.runs.behind.items()
        )
        turn = self._in_units(p.seconds[:, p.resources.index("turn")])
        turns = solver.add_up(
            float(turn[v, k]) * x for (v, k), x in y.items() if p.option_of[v] == h.option
        )
        # copies for layers on the GPU wait for the answers of a run, but for one behind it
        self.problem.addConstraint(turns + other - copied - until <= 0, f"copied_{q}")
        row = pairs + starts + other - copied - none - until <= 0
        self.problem.addConstraint(row, f"loads_{q}")
        # the copy for a run's first layer waits until the layer before the last has attended
        top = float(chain[[v for v, o in enumerate(p.option_of) if o == gpu]].max())
        ready = solver.add_up(
            (float(moved[k] / 2) * ranges[r][0] - 2 * top) * x
            for (k, r), x in self.runs.first.items()
        )
        row = here + answers + ready - none - until <= top
        self.problem.addConstraint(row, f"ready_{q}")

    def _hidden(self, n: Variables, w: Variables, gpu: int, moved: Array) -> solver.Expression:
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

        def longer(o: int, k: int) -> solver.Expression:
            return solver.add_up(long[o, k, r] * runs.long[o, k, r] for r in range(len(runs.ends)))

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
            starts = solver.add_up(runs.first[k, r] for r in ranges)
            least = solver.add_up(float(low[r] / 2) * runs.first[k, r] for r in ranges)
            copied = solver.add_up(float(high[r]) * runs.behind[k, r] for r in ranges)
            beside = solver.add_up(float(min(high[r], top)) * runs.behind[k, r] for r in ranges)
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
        idle = solver.add_up(float(longest[k]) * x for k, x in runs.idle.items())
        halves = solver.add_up(float(longest[k]) * n[h.option, k] for k in range(p.layers.size))
        more = solver.add_up(long[key] * x for key, x in runs.long.items())
        self.problem.addConstraint(behind - halves + idle - more <= 0, f"copies_{q}")
        self.problem.addConstraint(behind - halves - idle <= 0, f"answers_{q}")
        return solver.add_up(found)


# the programme


def build_programme(
    programme: Programme,
    whole: bool = True,
    apart: bool = False,
    counts: Array | None = None,
) -> Built:
    """The programme; with ``whole`` counts are whole numbers, else it is the relaxation.

    Parameters
    ----------
    apart : whether the layers of each option take their own time, as blocks of layers do whose
        copies are no more than one load ahead; otherwise the work of all layers overlaps.
    counts : of layers, where they are decided; buffers are then exact. (o, k)
    """
    problem = solver.create_problem("placement")
    options, corners, shapes = (
        range(len(programme.names)),
        range(len(programme.option_of)),
        range(programme.layers.size),
    )
    kind = solver.INTEGER if whole and counts is None else solver.CONTINUOUS

    def layers_of(name: str, k: int, kind: str) -> solver.Variable:
        return problem.add_variable(name, 0, int(programme.layers[k]), kind)

    n = {
        (o, k): layers_of(f"n_{programme.names[o]}_{k}", k, kind)
        for o, k in product(options, shapes)
    }
    y = {(v, k): layers_of(f"y_{v}_{k}", k, solver.CONTINUOUS) for v, k in product(corners, shapes)}
    w = {}
    if programme.streaming.most:
        w = {(o, k): layers_of(f"w_{programme.names[o]}_{k}", k, solver.CONTINUOUS) for o, k in n}
    t = [problem.add_variable(f"T_{q}", 0) for q in programme.phases]
    most = float(programme.layers.sum())
    once = np.maximum(programme.once_gpu.max(axis=(0, 1)), programme.once_host.max(axis=(0, 1)))
    costly = [o for o in options if once[programme.option_of == o].max() > 0]
    use = {o: problem.add_variable(f"use_{programme.names[o]}", 0, 1, kind) for o in costly}
    unit = float(np.max(programme.seconds.sum(axis=(2, 3)), initial=0.0)) or 1.0
    problem.setObjective(
        solver.add_up(float(c) * x for c, x in zip(programme.weight, t, strict=True))
    )
    for k in shapes:
        total = solver.add_up(n[o, k] for o in options)
        problem.addConstraint(total == int(programme.layers[k]), f"layers_{k}")
    for o, k in product(options, shapes):
        mine = [y[v, k] for v in corners if programme.option_of[v] == o]
        problem.addConstraint(solver.add_up(mine) == n[o, k], f"shares_{programme.names[o]}_{k}")
    decided = {} if counts is None else {key: float(counts[key]) for key in n}
    for key, value in decided.items():
        problem.addConstraint(n[key] == value, f"counted_{programme.names[key[0]]}_{key[1]}")
    add_times(problem, programme, y, w, t, unit, apart)
    if whole and not apart:
        add_runs(problem, programme, n, y, w, t, unit)
    widest = add_weight_buffers(problem, programme, n, w, whole, counts)
    _add_memory(problem, programme, y, w, use, widest, counts)
    for o, x in use.items():
        total = solver.add_up(n[o, k] for k in shapes)
        problem.addConstraint(total <= most * x, f"used_{programme.names[o]}")
        if counts is not None:
            x.lowBound = float(counts[o].sum() > 0)
    for name, (weights, limit) in programme.times.items():
        used = solver.add_up(float(c / limit) * x for c, x in zip(weights, t, strict=True) if c)
        problem.addConstraint(used <= 1, name)
    return Built(problem, n, y, w, t)


def _add_memory(
    problem: solver.Problem,
    p: Programme,
    y: Variables,
    w: Variables,
    use: Mapping[int, solver.Variable],
    widest: solver.Variable | None,
    counts: Array | None,
) -> None:
    """Layers, the largest of the transient buffers, and weights where they are.

    An option's buffers are those of its layers' mean shares. Where the number of layers is not
    decided, at least those of its cheapest corner, and what others need more if all took part;
    and no less than the mean of what layers of one shape need.
    """
    s = p.streaming
    layers = np.full(len(p.names), p.layers.sum()) if counts is None else counts.sum(axis=1)
    shapes = range(p.layers.size) if p.buffered is None else np.flatnonzero(p.buffered).tolist()
    corners = range(len(p.option_of))
    sides = (("gpu", p.gpu, p.once_gpu, -s.gpu), ("host", p.host, p.once_host, s.host))
    for (tier, each, once, moved), limit in zip(sides, p.memory, strict=True):
        scale = limit or 1.0
        for m in range(len(each)):
            used = solver.weigh(
                [(x, float(each[m, v, k]) / scale) for (v, k), x in y.items() if each[m, v, k]]
                + [(x, float(moved[k]) / scale) for (_, k), x in w.items() if moved[k]]
            )
            if widest is not None and tier == "gpu" and s.buffers:
                used += s.buffers / scale * widest
            for b, sizes in enumerate(once[m] / scale):
                if not sizes.any():
                    continue
                largest = problem.add_variable(f"buffer_{tier}_{m}_{b}", 0)
                used += largest
                for k in shapes:  # the largest is no smaller than the mean
                    mean = [(y[v, k], float(sizes[v] / p.layers[k])) for v in corners if sizes[v]]
                    row = solver.weigh(mean) <= largest
                    problem.addConstraint(row, f"{largest.name}_mean_{k}")
                for o, x in use.items():
                    mine = np.flatnonzero(p.option_of == o)
                    least = float(sizes[mine].min())
                    more = {v: float(sizes[v] - least) / max(layers[o], 1) for v in mine.tolist()}
                    part = least * x + solver.add_up(more[v] * y[v, k] for v, k in y if more.get(v))
                    problem.addConstraint(part <= largest, f"{largest.name}_{p.names[o]}")
            problem.addConstraint(used <= limit / scale, f"memory_{tier}_{m}")


# solving


@frozen
class Mix:
    """A solution.

    Attributes
    ----------
    counts
        Layers by option and shape. (o, k)
    corners
        Layers by corner and shape, fractions where shares are between corners. (v, k)
    streamed
        Layers' worth of streamed weights by option and shape. (o, k)
    bound
        Below the objective of every mix, as proved by the solver. [s]
    objective
        Of this solution, which replay will exceed. [s]
    """

    counts: Array
    corners: Array
    streamed: Array
    bound: float
    objective: float


def solve_programme(
    programme: Programme,
    whole: bool = True,
    gap: float = 1e-4,
    seconds: float = 20.0,
    apart: bool = False,
    counts: Array | None = None,
) -> Mix:
    """Solve for the best mix by the bounds.

    Parameters
    ----------
    whole : whether counts are whole numbers; otherwise it is the relaxation.
    gap : of the solver, relative.
    seconds : at most, for the solver. [s]
    apart, counts : as ``build_programme`` has them.

    Raises
    ------
    InfeasibleError
        If no mix is within the limits.
    """
    built = build_programme(programme, whole, apart, counts)
    solution = solver.solve(built.problem, gap, seconds)
    if not solution.has_values:
        raise InfeasibleError(f"no mix of placements is within the limits ({solution.status})")
    options, shapes = len(programme.names), programme.layers.size
    found = np.array([[built.n[o, k].value() for k in range(shapes)] for o in range(options)])
    corners = np.array(
        [[built.y[v, k].value() for k in range(shapes)] for v in range(len(programme.option_of))]
    )
    streamed = np.zeros((options, shapes))
    for key, x in built.w.items():
        streamed[key] = max(x.value(), 0.0)
    bound = objective = solution.objective
    if whole:
        bound = min(solution.bound, objective)
        if not np.isfinite(bound):  # a programme without whole numbers
            bound = objective * (1 - gap)
    return Mix(
        counts=np.abs(np.round(found)) if whole else found,
        corners=np.maximum(corners, 0.0),
        streamed=streamed,
        bound=bound,
        objective=objective,
    )
