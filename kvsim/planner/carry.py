"""How much of a trace a replica can carry with which techniques, as a mixed-integer programme.

A replica goes round: in each lap every lane (a technique with the classes of requests it serves)
makes one decoding round, and the prompts that arrived are read. A lap of L seconds carries phi
times the trace's rates if

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
import pulp

from kvsim import solver
from kvsim.errors import InfeasibleError
from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.planner.load import Loads
from kvsim.serving.outcome import QUANTILES, Targets

ATTAINED = "p90"  # of requests must be within the targets
SHORTEST_LAP = 1e-3  # shorter laps are not looked for [s]
GAPS = {True: 1e-6, False: 1e-3}  # of one lane, whose settings may differ by little; of several
Lanes = tuple[int, int]
ONE: Lanes = (1, 1)
Variables = dict[tuple[int, int], pulp.LpVariable]


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
class Carried:
    """A solution: which option serves each class, and how much of the trace that carries."""

    option_of: tuple[int, ...]  # by class
    laps: float  # per second of trace carried [1/s]
    load: float  # replicas that the trace needs at this efficiency; 1 / phi
    seconds: float  # of the solver

    @property
    def options(self) -> tuple[int, ...]:
        """The options in use, each once."""
        return tuple(dict.fromkeys(self.option_of))


def build(
    loads: Loads,
    targets: ReplicaTargets,
    lanes: Lanes = ONE,
    fastest: bool = False,
    cuts: tuple[Carried, ...] = (),
) -> tuple[pulp.LpProblem, Variables, pulp.LpVariable, pulp.LpAffineExpression]:
    """The programme; ``fastest`` for the fastest decoding that carries the trace.

    Parameters
    ----------
    lanes : techniques on the replica, at least and at most.
    cuts : solutions whose set of options is not to be chosen again.
    """
    problem = pulp.LpProblem("trace", pulp.LpMinimize)
    allowed = _allowed(loads, targets)
    classes = len(loads.work)
    used = sorted({o for _, o in allowed})
    top = _most_laps(loads, targets, allowed, fastest)
    take = {(c, o): problem.add_variable(f"take_{c}_{o}", cat=pulp.LpBinary) for c, o in allowed}
    use = {o: problem.add_variable(f"use_{o}", cat=pulp.LpBinary) for o in used}
    rounds = {o: problem.add_variable(f"rounds_{o}", lowBound=0) for o in used}
    laps = problem.add_variable("laps", lowBound=0, upBound=top)

    def over_classes(values: Array) -> pulp.LpAffineExpression:
        return pulp.lpSum(float(values[c, o]) * v for (c, o), v in take.items())

    load = pulp.lpSum(float(loads.fixed[o]) * r for o, r in rounds.items()) + over_classes(
        loads.work
    )
    for c in range(classes):
        problem.addConstraint(
            pulp.lpSum(v for (i, _), v in take.items() if i == c) == 1, f"one_{c}"
        )
    for (c, o), v in take.items():
        problem.addConstraint(v <= use[o], f"lane_{c}_{o}")
    problem.addConstraint(pulp.lpSum(use.values()) >= lanes[0], "least_lanes")
    problem.addConstraint(pulp.lpSum(use.values()) <= lanes[1], "most_lanes")
    for o in used:
        served = pulp.lpSum(v for (_, i), v in take.items() if i == o)
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
    longest = pulp.lpSum(float(loads.longest[o] / loads.room[o]) * use[o] for o in used)
    problem.addConstraint(longest <= 1, "longest")
    for i, cut in enumerate(cuts):
        again = [use[o] for o in cut.options]
        others = pulp.lpSum(v for o, v in use.items() if o not in cut.options)
        problem.addConstraint(pulp.lpSum(again) - others <= len(again) - 1, f"cut_{i}")
    if fastest:
        problem.addConstraint(load <= 1, "carries")
        problem.setObjective(-_speed(problem, loads, take, laps, top))
    else:
        problem.setObjective(load)
    return problem, take, laps, load


def _speed(
    problem: pulp.LpProblem, loads: Loads, take: Variables, laps: pulp.LpVariable, top: float
) -> pulp.LpAffineExpression:
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
    return pulp.lpSum(parts)


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


def carry(
    loads: Loads,
    targets: ReplicaTargets,
    lanes: Lanes = ONE,
    fastest: bool = False,
    cuts: tuple[Carried, ...] = (),
) -> Carried:
    """Solve the programme.

    Raises
    ------
    InfeasibleError
        If no options serve all classes within the targets.
    """
    started = time.perf_counter()
    if not _allowed(loads, targets):
        raise InfeasibleError("no technique's rounds are within the targets")
    problem, take, laps, load = build(loads, targets, lanes, fastest, cuts)
    if not solver.solve(problem, GAPS[lanes == ONE]).found:
        raise InfeasibleError("no techniques carry the trace within the targets")
    chosen = {c: o for (c, o), v in take.items() if (v.value() or 0) > 0.5}
    return Carried(
        option_of=tuple(chosen[c] for c in range(len(loads.work))),
        laps=float(laps.value() or 0),
        load=solver.evaluate(load),
        seconds=time.perf_counter() - started,
    )
