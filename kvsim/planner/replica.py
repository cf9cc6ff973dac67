"""How much of a trace a replica can carry with which techniques, as a mixed-integer programme.

Requests stand in classes, alike in prompt and generated tokens. A replica goes round: in each lap
every lane (a technique with the classes of requests it serves) makes one decoding round, and the
prompts that arrived are read. A lap of L seconds carries phi times the trace's rates if

    decoding     a class of d tokens/s keeps phi L d / (tokens per round) sequences in the batch
    time         sum over lanes of the fixed time of a round
                 + phi L (sum over classes of prompts' and sequences' seconds per second) <= L
    memory       sequences x bytes of one <= capacity, on the GPU and on the host
    seats        sequences <= max_seqs
    TPOT         L / (tokens per round) <= target
    TTFT         prompts that take longer even alone <= 1 in 10

Divided by phi L, with laps t = 1 / (phi L) and load l = 1 / phi, everything is linear:

    l = sum over lanes of fixed t + sum over classes of seconds per second

so the largest load is the smallest l, and the fastest decoding that carries the trace (phi = 1,
l <= 1) has the largest t.
"""

import time
from dataclasses import field

import numpy as np
from numpy.typing import NDArray

from kvsim import solver
from kvsim.errors import InfeasibleError, InputError
from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.machines.deployment import Deployment
from kvsim.planner.question import Admission, PlanLimits, does_nothing
from kvsim.serving.costs import StepCosts, simple_pass_seconds
from kvsim.serving.outcome import QUANTILES, Targets
from kvsim.serving.rules import Rules
from kvsim.traces.requests import Requests

# classes of requests

CLASSES_PER_AXIS = 3  # classes by prompt, and of each of those by generated tokens


@frozen
class Classes:
    """Mean lengths and rates of the classes of a trace.

    Attributes
    ----------
    prompt, generate
        Mean lengths. (c,) [tokens]
    per_s
        Requests per second over the whole trace. (c,) [1/s]
    of, prompts
        The class of each request, and its prompt. (n,) [tokens]
    """

    prompt: Array
    generate: Array
    per_s: Array
    of: NDArray[np.int64]
    prompts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.per_s)

    @property
    def decoded_per_s(self) -> Array:
        """Tokens per second after the first of each request. (c,) [tokens/s]"""
        return self.per_s * (self.generate - 1)


def group_requests(requests: Requests, per_axis: int = CLASSES_PER_AXIS) -> Classes:
    """Prompts in parts of equally many tokens, and each part again by generated tokens.

    The rates are those of the trace's duration; requests that all arrive at once count as
    arriving within one second.
    """
    prompts = _token_parts(requests.prompt, per_axis)
    of = np.zeros(len(requests), np.int64)
    for part in range(per_axis):
        rows = np.flatnonzero(prompts == part)
        of[rows] = part * per_axis + _token_parts(requests.generate[rows], per_axis)
    _, of = np.unique(of, return_inverse=True)
    count = np.bincount(of)
    duration = requests.duration or 1.0
    return Classes(
        prompt=np.bincount(of, requests.prompt) / count,
        generate=np.bincount(of, requests.generate) / count,
        per_s=count / duration,
        of=of.astype(np.int64),
        prompts=requests.prompt,
    )


def _token_parts(lengths: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Parts 0, 1, ... of equally many tokens, the shortest first; equal lengths stay together."""
    if not lengths.size:
        return np.zeros(0, np.int64)
    ordered = np.sort(lengths)
    share = np.cumsum(ordered) / ordered.sum()
    first = np.searchsorted(ordered, lengths, side="left")
    before = np.where(first > 0, share[first - 1], 0.0)
    return np.minimum((before * count).astype(np.int64), count - 1)


# settings


def list_step_costs(
    deployment: Deployment,
    requests: Requests,
    limits: PlanLimits,
    rules: Rules,
    admission: Admission,
) -> list[StepCosts]:
    """Step costs of all settings that the user admits and that leave room for a cache.

    Raises
    ------
    InputError
        If weights leave none.
    InfeasibleError
        If no technique is admitted.
    """
    mean = round(float(requests.prompt.mean())), max(round(float(requests.generate.mean())), 2)
    found: list[StepCosts] = []
    reason: InputError | None = None
    longest = int((requests.prompt + requests.generate).max())
    admission.check(deployment)
    for t in admission.candidates():
        if t.refuses(deployment):
            continue
        for some in admission.settings(t, deployment, *mean, differ=True):
            for settings in some.rows():
                if does_nothing(settings) and not admission.only:
                    continue
                known = admission.evidence(settings, deployment, longest)
                if admission.loss(known) > limits.loss or (settings.assumes and limits.assumed < 1):
                    continue
                costs = StepCosts(
                    technique=settings,
                    deployment=deployment,
                    rules=rules,
                    longest=longest,
                    longest_prompt=int(requests.prompt.max()),
                    gpu_memory=limits.gpu_memory,
                )
                try:
                    assert costs.capacity > 0
                except InputError as error:
                    reason = error
                    continue
                found.append(costs)
    if not found and reason is not None:
        raise reason
    if not found:
        raise InfeasibleError("no lossless technique can run here; --lossy admits the others")
    return found


# what a setting costs each class

NODES_PER_OCTAVE = 2  # nodes per octave of the estimate's step costs


@frozen
class Loads:
    """What each option (o,) costs each class (c,) at the trace's rates.

    Attributes
    ----------
    fixed
        The fixed time of a round: weights, launches. (o,) [s]
    work
        Seconds per second: prompts, and sequences in rounds. (c, o)
    seats, gpu, host
        Sequences, and bytes of caches, that a lap of one second needs. (c, o) [1/s, B/s, B/s]
    room, host_room
        Memory for caches. (o,) [B]
    tokens
        Tokens per round and sequence. (o,)
    longest
        Cache of the longest request. (o,) [B]
    late
        Share of all requests whose prompt takes longer than the TTFT target even alone. (c, o)
    """

    fixed: Array
    work: Array
    seats: Array
    gpu: Array
    host: Array
    room: Array
    host_room: Array
    tokens: Array
    longest: Array
    late: Array

    def only(self, options: list[int]) -> "Loads":
        """The same with some of the options."""
        return Loads(**{name: values[..., options] for name, values in vars(self).items()})


def load_coefficients(options: list[StepCosts], classes: Classes, ttft: float = np.inf) -> Loads:
    """Coefficients from the engine's own step costs, straight lines in the batch.

    The line of a round goes through a batch of one and the largest that memory and rules allow.

    Parameters
    ----------
    ttft : the target. [s]
    """
    lengths = np.unique(classes.prompts)
    timed = (costs.with_density(NODES_PER_OCTAVE, work=False) for costs in options)
    columns = [_option_load(costs, classes, lengths, ttft) for costs in timed]
    names = vars(columns[0])
    return Loads(**{k: np.stack([getattr(x, k) for x in columns], axis=-1) for k in names})


def _option_load(
    costs: StepCosts, classes: Classes, lengths: NDArray[np.int64], target: float
) -> Loads:
    t = costs.tables
    middle = classes.prompt + classes.generate / 2
    blocks = np.ceil(middle / costs.rules.block_tokens).astype(np.int64)
    gpu, host = t.gpu_bytes[blocks].astype(float), t.host_bytes[blocks].astype(float)
    weight = classes.decoded_per_s / max(classes.decoded_per_s.sum(), 1e-300)
    fit = min(
        costs.capacity / max(float(weight @ gpu), 1.0),
        costs.room.host_capacity / max(float(weight @ host), 1.0),
    )
    most = int(np.clip(fit, 2, max(costs.rules.max_seqs, 2)))
    few, many = 1, min(most, t.costs.round.shape[0] - 1)
    at_few = simple_pass_seconds(t, batch=few, context=middle)
    at_many = simple_pass_seconds(t, batch=many, context=middle)
    each = np.maximum(at_many - at_few, 0.0) / max(many - few, 1)
    fixed = max(float(weight @ (at_few - each)), 0.0)
    ttft = _prompt_seconds(costs, classes.prompt)
    seats = classes.decoded_per_s / costs.rate
    return Loads(
        fixed=np.array(fixed),
        work=classes.per_s * ttft / t.lanes + seats * each,
        seats=seats,
        gpu=seats * gpu,
        host=seats * host,
        room=np.array(float(costs.capacity)),
        host_room=np.array(float(max(costs.room.host_capacity, 1))),
        tokens=np.array(costs.rate),
        longest=np.array(float(max(t.gpu_bytes[-1], t.prompt_bytes[-1]))),
        late=_late_shares(costs, classes, lengths, target),
    )


def _late_shares(
    costs: StepCosts, classes: Classes, lengths: NDArray[np.int64], target: float
) -> Array:
    """Share of all requests that are of a class and whose prompt alone exceeds the target. (c,)

    ``lengths`` are those of the prompts, each once and in order.
    """
    late = lengths[_prompt_seconds(costs, lengths.astype(float)) > target]
    if not late.size:
        return np.zeros(len(classes))
    exceeds = classes.of[classes.prompts >= late[0]]
    return np.bincount(exceeds, minlength=len(classes)) / classes.of.size


def _prompt_seconds(costs: StepCosts, prompts: Array) -> Array:
    """Each of some prompts alone, in the parts that the rules make of it. (n,) [s]"""
    chunked = costs.rules.prefill == "chunked"
    part = costs.rules.max_tokens // costs.tables.lanes
    size = float(part) if chunked else max(float(prompts.max()), 1.0)
    parts = np.maximum(np.ceil(prompts / size), 1).astype(np.int64)
    of = np.repeat(np.arange(prompts.size), parts)
    place = np.arange(of.size) - np.repeat(np.cumsum(parts) - parts, parts)
    last = place == parts[of] - 1
    start = place * size
    took = simple_pass_seconds(
        costs.tables,
        tokens=np.round(np.minimum(size, prompts[of] - start)),
        start=start,
        finished=last,
        after=np.where(last, prompts[of], 0.0),
    )
    return np.bincount(of, weights=took, minlength=prompts.size).astype(float)


# the programme

ATTAINED = "p90"  # of requests must be within the targets
SHORTEST_LAP = 1e-3  # shorter laps are not looked for [s]
SOLVER_GAPS = {
    True: 1e-6,
    False: 1e-3,
}  # of one lane, whose settings may differ by little; of several
Lanes = tuple[int, int]
ONE_LANE: Lanes = (1, 1)
Variables = dict[tuple[int, int], solver.Variable]


@frozen
class ReplicaTargets(Targets):
    """What a choice for one replica must respect: the targets of a good request, and its batch."""

    max_seqs: int = field(kw_only=True)  # [sequences]

    @property
    def times(self) -> dict[str, float]:
        """Those of the two times that are set. [s]"""
        both = {"ttft": self.ttft, "tpot": self.tpot}
        return {name: limit for name, limit in both.items() if np.isfinite(limit)}


@frozen
class ReplicaCapacity:
    """A solution: which option serves each class, and how much of the trace that carries."""

    option_of: tuple[int, ...]  # by class
    laps: float  # per second of trace carried [1/s]
    load: float  # replicas that the trace needs at this efficiency; 1 / phi
    seconds: float  # of the solver

    @property
    def options(self) -> tuple[int, ...]:
        """The options in use, each once."""
        return tuple(dict.fromkeys(self.option_of))


def build_replica_programme(
    loads: Loads,
    targets: ReplicaTargets,
    lanes: Lanes = ONE_LANE,
    fastest: bool = False,
    cuts: tuple[ReplicaCapacity, ...] = (),
) -> tuple[solver.Problem, Variables, solver.Variable, solver.Expression]:
    """The programme; ``fastest`` for the fastest decoding that carries the trace.

    Parameters
    ----------
    lanes : techniques on the replica, at least and at most.
    cuts : solutions whose set of options is not to be chosen again.
    """
    problem = solver.create_problem("trace")
    allowed = _allowed(loads, targets)
    classes = len(loads.work)
    used = sorted({o for _, o in allowed})
    top = _most_laps(loads, targets, allowed, fastest)
    take = {(c, o): problem.add_variable(f"take_{c}_{o}", cat=solver.BINARY) for c, o in allowed}
    use = {o: problem.add_variable(f"use_{o}", cat=solver.BINARY) for o in used}
    rounds = {o: problem.add_variable(f"rounds_{o}", lowBound=0) for o in used}
    laps = problem.add_variable("laps", lowBound=0, upBound=top)

    def over_classes(values: Array) -> solver.Expression:
        return solver.add_up(float(values[c, o]) * v for (c, o), v in take.items())

    load = solver.add_up(float(loads.fixed[o]) * r for o, r in rounds.items()) + over_classes(
        loads.work
    )
    for c in range(classes):
        problem.addConstraint(
            solver.add_up(v for (i, _), v in take.items() if i == c) == 1, f"one_{c}"
        )
    for (c, o), v in take.items():
        problem.addConstraint(v <= use[o], f"lane_{c}_{o}")
    problem.addConstraint(solver.add_up(use.values()) >= lanes[0], "least_lanes")
    problem.addConstraint(solver.add_up(use.values()) <= lanes[1], "most_lanes")
    for o in used:
        served = solver.add_up(v for (_, i), v in take.items() if i == o)
        problem.addConstraint(use[o] <= served, f"used_{o}")
        problem.addConstraint(rounds[o] >= laps - top * (1 - use[o]), f"round_{o}")
        if np.isfinite(targets.tpot):
            most = targets.tpot * float(loads.tokens[o])
            slack = _most_load(loads, top)
            problem.addConstraint(load <= most * laps + slack * (1 - use[o]), f"tpot_{o}")
    if np.isfinite(targets.ttft):
        problem.addConstraint(over_classes(loads.late) <= 1 - QUANTILES[ATTAINED], "ttft")
    problem.addConstraint(over_classes(loads.gpu / loads.room) <= laps, "memory")
    problem.addConstraint(over_classes(loads.host / loads.host_room) <= laps, "host_memory")
    problem.addConstraint(over_classes(loads.seats / targets.max_seqs) <= laps, "seats")
    longest = solver.add_up(float(loads.longest[o] / loads.room[o]) * use[o] for o in used)
    problem.addConstraint(longest <= 1, "longest")
    for i, cut in enumerate(cuts):
        again = [use[o] for o in cut.options]
        others = solver.add_up(v for o, v in use.items() if o not in cut.options)
        problem.addConstraint(solver.add_up(again) - others <= len(again) - 1, f"cut_{i}")
    if fastest:
        problem.addConstraint(load <= 1, "carries")
        problem.setObjective(-_add_speeds(problem, loads, take, laps, top))
    else:
        problem.setObjective(load)
    return problem, take, laps, load


def _add_speeds(
    problem: solver.Problem, loads: Loads, take: Variables, laps: solver.Variable, top: float
) -> solver.Expression:
    """Tokens per second of one sequence, the mean of all, over its greatest value."""
    weight = (
        loads.seats
        * loads.tokens
        / max(float((loads.seats * loads.tokens).sum(axis=0).max()), 1e-300)
    )
    parts = []
    for (c, o), v in take.items():
        speed = problem.add_variable(f"speed_{c}_{o}", lowBound=0)
        problem.addConstraint(speed <= top * v, f"taken_{c}_{o}")
        problem.addConstraint(speed <= laps, f"slowest_{c}_{o}")
        parts.append(float(weight[c, o] * loads.tokens[o] / (top * loads.tokens.max())) * speed)
    return solver.add_up(parts)


def _allowed(loads: Loads, targets: ReplicaTargets) -> list[tuple[int, int]]:
    """Classes and options whose fixed time of a round is within the TPOT target."""
    ok = (loads.fixed / loads.tokens < targets.tpot) & (loads.longest <= loads.room)
    return [(c, int(o)) for c in range(len(loads.work)) for o in np.flatnonzero(ok)]


def _most_laps(
    loads: Loads, targets: ReplicaTargets, allowed: list[tuple[int, int]], fastest: bool
) -> float:
    """Laps per second that no solution exceeds."""
    shortest = max(float(np.min(loads.fixed, initial=np.inf)), SHORTEST_LAP)
    if fastest:  # a lap takes at least its fixed time, and carries the whole trace
        return 1.0 / shortest
    needed = [loads.gpu / loads.room, loads.host / loads.host_room, loads.seats / targets.max_seqs]
    used = sorted({o for _, o in allowed})
    most = sum(float(np.max(n[:, used], initial=0)) for n in needed)
    room = np.maximum(targets.tpot * loads.tokens - loads.fixed, SHORTEST_LAP)
    in_time = float(np.max(loads.work.sum(axis=0) / room)) if np.isfinite(targets.tpot) else 0.0
    return max(len(loads.work) * most, 1.0 / shortest, in_time)


def _most_load(loads: Loads, top: float) -> float:
    return float(top * loads.fixed.sum() + loads.work.max(axis=1).sum())


def solve_replica(
    loads: Loads,
    targets: ReplicaTargets,
    lanes: Lanes = ONE_LANE,
    fastest: bool = False,
    cuts: tuple[ReplicaCapacity, ...] = (),
) -> ReplicaCapacity:
    """Solve the programme.

    Raises
    ------
    InfeasibleError
        If no options serve all classes within the targets.
    """
    started = time.perf_counter()
    if not _allowed(loads, targets):
        raise InfeasibleError("no technique's rounds are within the targets")
    problem, take, laps, load = build_replica_programme(loads, targets, lanes, fastest, cuts)
    if not solver.solve(problem, SOLVER_GAPS[lanes == ONE_LANE]).has_values:
        raise InfeasibleError("no techniques carry the trace within the targets")
    chosen = {c: o for (c, o), v in take.items() if (v.value() or 0) > 0.5}
    return ReplicaCapacity(
        option_of=tuple(chosen[c] for c in range(len(loads.work))),
        laps=float(laps.value() or 0),
        load=solver.evaluate(load),
        seconds=time.perf_counter() - started,
    )
