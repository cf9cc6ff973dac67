"""``kvsim capacity``: the fleet for some traffic, what it is compared with, and what limits it.

The answer and all that stands beside it come from one `FleetSolver.solve` with changed questions.
Where the targets cannot be met at all, they are loosened to the nearest that can; where the limits
allow no fleet for the whole load, it is reduced to what they allow.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf, isfinite

import numpy as np

from kvsim.errors import InfeasibleError
from kvsim.frozen import frozen
from kvsim.planner.fleet.demand import FleetTargets, as_time
from kvsim.planner.fleet.milp import scheduled_cost
from kvsim.planner.fleet.offers import CapacityQuestion, Configuration, FleetLimits, ReplicaKind
from kvsim.planner.fleet.play import Fleet, Played
from kvsim.planner.fleet.search import (
    Certainty,
    FleetQuestion,
    FleetSolver,
    costs_as,
)

TARGET_ROOM = 1.2  # a target that cannot be met is replaced by what can, and so much more
TARGET_FACTOR = 2.0  # times as long as a target, to see what it costs
OTHER_LOADS = (0.5, 1.5, 2.0)
PLAYS_TO_ANSWER = 4.0  # of each kind of replica until the fleet is found, about
ANSWER_SHARE = 0.35  # of all time until then, about
TIME_OF, AFTERWARDS = {f"for {x:g} times the load": 4.0 * x for x in OTHER_LOADS}, 3.0
"""Time of comparisons with other loads, and of what follows them, over that of the others."""
NOTICED = 0.2  # of the probabilities at larger loads together: less may be chance
LESS_SURE = (0.75, 0.5, 0.0)  # tried in turn where no fleet is as sure as asked
LOAD_HALVINGS = 7  # of the load that limits allow
NONE = "none meets the targets"
ONE_KIND, FULL_KV, STRETCH = "one kind of replica", "full KV", "this trace, times as predicted"
NO_MEMORY, NO_POOLS = "GPU memory alone for prefixes", "no prefill apart"


@frozen
class OtherFleet:
    """A fleet for a changed question; None if there is none, with the reason."""

    label: str
    fleet: Fleet | None
    reason: str = ""


@frozen
class WhatIf:
    """The fleet at another load, or after a loss.

    Attributes
    ----------
    played
        What it does with the trace, if passes take as long as predicted.
    likely
        Probability of meeting the targets; None where no probability was asked for.
    met
        Whether the targets are met as surely as asked.
    """

    played: Played
    likely: float | None
    met: bool


@frozen
class CapacityAnswer:
    """The fleet and all that is said of it.

    Attributes
    ----------
    shortfall
        Why what was asked is not met; empty if it is. The fleet is then for `targets` and `load`.
    targets, load
        What the fleet meets, and how much of the trace's load.
    kinds, alone
        Every kind of replica that was considered, and how many of each are always busy.
    played, at_load, after_loss
        The fleet on the trace, at other loads that have requests, and without one replica of a
        kind.
    alternatives
        Other fleets: one kind of replica, full KV, each GPU alone, for the trace as it is.
    limits
        Fleets without each limit that was set, and with longer targets.
    at_other_loads
        Fleets that other loads need.
    at_sellers
        The cheapest of all these fleets at the prices of each other seller.
    bound
        Price at which every replica would always be busy. [USD/h]
    """

    question: CapacityQuestion
    shortfall: str
    targets: FleetTargets
    load: float
    kinds: Sequence[ReplicaKind]
    alone: Sequence[float]
    fleet: Fleet
    played: Played
    at_load: dict[float, WhatIf]
    after_loss: dict[int, WhatIf]
    alternatives: list[OtherFleet]
    limits: list[OtherFleet]
    at_other_loads: dict[float, OtherFleet]
    at_sellers: dict[str, Fleet]
    sure: Certainty
    bound: float
    plays: int

    @property
    def used(self) -> list[int]:
        """Kinds of which the fleet has replicas."""
        return [int(j) for j in np.flatnonzero(self.fleet.replicas)]


def make_capacity(
    question: CapacityQuestion, tell: Callable[[str, float], None] = lambda *_: None
) -> CapacityAnswer:
    """Find the cheapest fleet that meets the targets when it plays the trace.

    Where no fleet does, the targets are loosened to the best there is, or the load is reduced to
    what the limits allow, and the answer says so.

    Parameters
    ----------
    question
        What is asked.
    tell
        Is told what is being done, and how much of all work is done; 0: unknown.

    Raises
    ------
    InputError
        If the model fits on none of the GPUs.
    InfeasibleError
        If the limits leave no fleet at all.
    """
    solver = FleetSolver(question, lambda text: tell(text, 0.0))
    share, part, before = 0.0, ANSWER_SHARE, 0  # of all time: what is done, and what comes next
    expected = PLAYS_TO_ANSWER * len(solver.kinds)

    def tell_share(text: str) -> None:
        tell(text, share + part * min((solver.plays - before) / expected, 0.9))

    solver.tell = tell_share
    doubled = (question.targets.times(name, TARGET_FACTOR) for name in ("ttft", "tpot"))
    solver.judged += [x for x in doubled if x != question.targets]
    asked = FleetQuestion(
        question.targets, question.limits, sure=question.sure, schedule=question.schedule
    )
    asked, chosen, shortfall = _answer(solver, asked)
    rows = _changed(solver, asked, chosen)
    solver.judged = list({x.targets for x in (asked, *rows.values())})
    share, answered = ANSWER_SHARE, solver.plays
    total = AFTERWARDS + sum(TIME_OF.get(label, 1.0) for label in rows)
    others = _comparisons(solver, asked)
    for label, changed in rows.items():
        if label in others and label != STRETCH and solver.allows(chosen, changed):
            continue  # the cheapest of all is what is left, too
        part, before = (1 - ANSWER_SHARE) * TIME_OF.get(label, 1.0) / total, solver.plays
        expected = answered * part / ANSWER_SHARE / changed.load
        solver.tell(f"for comparison: {label}")
        solver.solve(changed)
        share += part
    # a fleet that answered a later question may do for an earlier one
    best = solver.cheapest(asked) or chosen
    found = {label: solver.cheapest(changed) for label, changed in rows.items()}
    loads = {_load_label(x): x for x in OTHER_LOADS if _load_label(x) in rows}
    larger: Fleet | None = None
    for label, x in sorted(loads.items(), key=lambda x: -x[1]):  # what carries more carries less
        larger = best if x < 1 else larger
        fleet = found[label]
        if larger is not None and (fleet is None or fleet.cost > larger.cost):
            found[label] = larger
        larger = found[label]
    alone = replace(asked.limits, headroom=0.0, failures=0)
    cases = {x: replace(rows[label], limits=alone) for label, x in loads.items()}
    best = _with_most_headroom(solver, asked, [cases[x] for x in cases if x > 1], best)
    for label, fleet in found.items():  # of equal prices, the one that is advised
        if fleet is not None and costs_as(fleet, best) and solver.allows(best, rows[label]):
            found[label] = best if solver.keeps(best, rows[label]) else fleet
    at_sellers = _reprice(solver, asked, best)
    sure = solver.certainty(best, asked, chosen=True)
    at_load = {x: _try(solver, best, case) for x, case in cases.items()}
    for x, case in at_load.items():
        if x < 1:  # what carries the whole carries a part, whatever days are drawn
            likely = None if case.likely is None else max(case.likely, sure.likely["both"])
            at_load[x] = replace(case, likely=likely, met=True)
    return CapacityAnswer(
        question=question,
        shortfall=shortfall,
        targets=asked.targets,
        load=asked.load,
        kinds=solver.kinds,
        alone=[solver.known_busy(kind) * asked.load for kind in solver.kinds],
        fleet=best,
        played=solver.play(best, asked.load),
        at_load=at_load,
        after_loss=_try_losses(solver, replace(asked, limits=alone), best),
        alternatives=[OtherFleet(x, found[x], NONE) for x in rows if x in others],
        limits=[OtherFleet(x, found[x], NONE) for x in rows if x not in others and x not in loads],
        at_other_loads={x: OtherFleet(y, found[y], NONE) for y, x in loads.items()},
        at_sellers=at_sellers,
        sure=sure,
        bound=solver.bound(asked, best),
        plays=solver.plays,
    )


def _reprice(solver: FleetSolver, asked: FleetQuestion, best: Fleet) -> dict[str, Fleet]:
    """The cheapest of the fleets found for any question, at the prices of each other seller."""
    sellers = solver.question.sellers
    fleets = [x for x in solver.fleets if sellers and solver.allows(x, asked)]
    kept = [x for x in fleets if solver.keeps(x, asked)]
    kept.sort(key=lambda x: (x is not best, x.complexity))  # of equal prices, the first
    return {
        seller: min((_sold(x, prices, solver, asked) for x in kept), key=lambda x: round(x.cost, 9))
        for seller, prices in sellers.items()
        if kept
    }


def _sold(
    fleet: Fleet, prices: Mapping[str, float], solver: FleetSolver, asked: FleetQuestion
) -> Fleet:
    """A fleet at other prices of one GPU."""
    kinds = tuple(replace(x, price=prices.get(x.gpu, inf) * x.gpus) for x in fleet.kinds)
    used = zip(fleet.replicas, kinds, strict=True)
    cost = float(sum(n * x.rent for n, x in used if n))
    if asked.schedule is not None:
        demand = solver.question.traffic.demand
        cost = scheduled_cost(kinds, demand, asked.schedule, fleet.running, fleet.reserved)
    return replace(fleet, kinds=kinds, cost=cost)


def _load_label(times: float) -> str:
    return f"for {times:g} times the load"


def _answer(solver: FleetSolver, asked: FleetQuestion) -> tuple[FleetQuestion, Fleet, str]:
    """The fleet for a question, or for the nearest one that has an answer, and why that."""
    found = solver.solve(asked)
    if found is not None:
        return asked, found, ""
    shortfall = ""
    free = replace(asked, limits=FleetLimits(), schedule=None)
    bound = asked.limits != FleetLimits()
    if not bound or solver.solve(free) is None:
        asked, found, shortfall = _answer_less_surely(solver, asked)
        if found is None:
            targets, shortfall = _reachable_targets(solver, asked)
            asked = replace(asked, targets=targets)
            found = solver.solve(asked)
        if found is None and asked.sure:  # what one day reaches, not every day does
            asked = replace(asked, sure=0.0)
            found = solver.solve(asked)
            shortfall += "; that is for the trace as it is, with times as predicted"
    low, high, best = 0.0, asked.load, found
    for _ in range(LOAD_HALVINGS if best is None else 0):
        middle = (low + high) / 2
        solver.tell(f"within the limits at {100 * middle:.0f} % of the load")
        some = None
        if len(solver.traffic(middle).requests):
            some = solver.solve(replace(asked, load=middle))
        low, high = (middle, high) if some is not None else (low, middle)
        best = some or best
    if best is None:
        names = list(relaxed_limits(asked.limits))
        what = f"even {100 * high:.1f} % of the traffic within the targets"
        raise InfeasibleError(
            f"the limits leave no fleet for {what}; loosen {' or '.join(names)}"
            if names
            else f"no fleet was found for {what}; allow other GPUs, more of them in a "
            "replica (--tp), or longer times"
        )
    if found is None:
        asked = replace(asked, load=low)
        reason = f"the limits allow a fleet for {100 * low:.0f} % of the trace's load"
        shortfall = f"{shortfall}; {reason}" if shortfall else reason
    return asked, best, shortfall


def _answer_less_surely(
    solver: FleetSolver, asked: FleetQuestion
) -> tuple[FleetQuestion, Fleet | None, str]:
    """The fleet where only the probability cannot be met, and why that; None if there is none."""
    some = (k.choices[0] for k in solver.kinds if asked.only(k.choices[0]))
    able = any(solver.at_rest(x).measure_excess(asked.targets).both <= 1 for x in some)
    for sure in (x for x in LESS_SURE if able and x < asked.sure):
        less = replace(asked, sure=sure)
        found = solver.solve(less)
        if found is not None:
            reached = solver.certainty(found, less, chosen=True).likely["both"]
            why = (
                f"no fleet within the limits meets the targets with a probability of "
                f"{100 * asked.sure:g} %; this one reaches {100 * reached:.0f} %"
            )
            return less, found, why
    return asked, None, ""


def _changed(solver: FleetSolver, asked: FleetQuestion, chosen: Fleet) -> dict[str, FleetQuestion]:
    """Every other question whose answer stands beside the fleet, by its label."""
    rows = _comparisons(solver, asked)
    whole = "" if asked.load == 1 else "the whole trace "
    for called, changed in relaxed_limits(asked.limits).items():
        rows[f"{whole}without {called}"] = replace(asked, limits=changed, load=1.0)
    for name in ("ttft", "tpot"):
        target = getattr(asked.targets, name)
        if any(isfinite(getattr(x, name)) for x in asked.targets.classes):
            said = f"{name.upper()} at most {as_time(TARGET_FACTOR * target)}"
            if asked.targets.longer:
                said = f"{name.upper()} {TARGET_FACTOR:g} times as long in every class"
            rows[said] = replace(asked, targets=asked.targets.times(name, TARGET_FACTOR))
    for times in OTHER_LOADS:
        if len(solver.traffic(asked.load * times).requests):
            least = chosen.cost if times > 1 else 0.0
            rows[_load_label(times)] = replace(asked, load=asked.load * times, least=least)
    return rows


def _comparisons(solver: FleetSolver, asked: FleetQuestion) -> dict[str, FleetQuestion]:
    """Questions about other kinds of fleet for the same traffic."""
    rows: dict[str, FleetQuestion] = {}
    if asked.limits.configurations > 1:
        rows[ONE_KIND] = replace(asked, limits=replace(asked.limits, configurations=1))
    some = [k.choices[0] for k in solver.kinds]
    if any(x.technique != "full" for x in some) and any(x.technique == "full" for x in some):
        rows[FULL_KV] = replace(asked, only=lambda x: x.technique == "full")
    if any(x.tiers for x in some):
        rows[NO_MEMORY] = replace(asked, only=lambda x: not x.tiers)
    if any(x.apart for x in some):
        rows[NO_POOLS] = replace(asked, only=lambda x: x.apart is None)
    gpus = list(dict.fromkeys(k.gpu for k in solver.kinds))
    for gpu in gpus if len(gpus) > 1 else ():
        rows[f"{gpu} alone"] = replace(asked, only=_is_on(gpu))
    if asked.sure:
        rows[STRETCH] = replace(asked, sure=0.0)
    return rows


def _is_on(gpu: str) -> Callable[[Configuration], bool]:
    return lambda x: x.gpu == gpu


def relaxed_limits(limits: FleetLimits) -> dict[str, FleetLimits]:
    """List the options that limit a fleet, each with what is left without it.

    Parameters
    ----------
    limits
        What was asked.
    """
    free, found = FleetLimits(), {}
    for name, called in (
        ("gpus", "--max-gpus"),
        ("gpus_of", "--max-gpus"),
        ("host", "--max-host"),
        ("power", "--max-power"),
        ("configurations", "--configurations"),
        ("headroom", "--headroom"),
        ("failures", "--failures"),
    ):
        if getattr(limits, name) != getattr(free, name):
            found[called] = replace(limits, **{name: getattr(free, name)})
    return found


def _reachable_targets(solver: FleetSolver, asked: FleetQuestion) -> tuple[FleetTargets, str]:
    """The nearest targets that some kind of replica meets with hardly any load, and in words."""
    solver.tell("looking for targets that can be met")
    kinds = [k for k in solver.kinds if asked.only(k.choices[0])]
    each = [solver.at_rest(kind.choices[0]) for kind in kinds]
    nearest = min(range(len(kinds)), key=lambda i: each[i].measure_excess(asked.targets).both)
    best, replica = each[nearest], kinds[nearest].choices[0].name
    if best.measure_excess(asked.targets).both == inf:
        r = solver.question.traffic.requests
        raise InfeasibleError(
            "no kind of replica can serve all requests: those of up to "
            f"{int((r.prompt + r.generate).max()):,} tokens are refused, larger than the KV cache; "
            "more GPUs (--tp), larger ones (--gpus) or narrower --weights"
        )
    longest = int(solver.question.traffic.requests.prompt.max())
    said, changed = [], {x.above: x for x in asked.targets.classes}
    for rows, target in best.by_class(asked.targets):
        reached = best.reached(asked.targets.share, rows)
        for name in ("ttft", "tpot"):
            wanted, value = getattr(target, name), getattr(reached, name)
            if value > wanted:
                p = f"p{100 * asked.targets.share:g}"
                above = f" for prompts above {target.above:,} tokens" if target.above else ""
                said.append(
                    f"{name.upper()} {p} of {as_time(wanted)}{above} cannot be met by any fleet "
                    f"(prompts have up to {longest:,} tokens): {replica} comes nearest to all "
                    f"targets with {as_time(value)} and hardly any load"
                )
            mine = changed[target.above]
            longer = max(wanted, TARGET_ROOM * value)
            changed[target.above] = replace(mine, **{name: longer})
    targets = asked.targets.changed(lambda x: changed[x.above])
    beyond = max(best.measure_excess(targets).both, 1.0)  # more may miss either than one
    targets = targets.times("ttft", beyond).times("tpot", beyond)
    why = "; ".join(said) or "no fleet that was tried meets the targets"
    return targets, f"{why}; the targets were relaxed"


def _with_most_headroom(
    solver: FleetSolver, asked: FleetQuestion, larger: Sequence[FleetQuestion], best: Fleet
) -> Fleet:
    """Of the fleets that cost as much, the one that larger loads are likeliest kept by.

    The plainest is taken of those that differ by less than is seen in so few days, and none is
    taken that keeps the load that was asked for less surely than the plainest.
    """
    same = [x for x in solver.fleets if costs_as(x, best) and x is not best]
    same = [best, *(x for x in same if solver.allows(x, asked) and solver.keeps(x, asked))]

    def likely(fleet: Fleet, question: FleetQuestion) -> float:
        if not asked.sure:
            return float(solver.keeps(fleet, question))
        return solver.certainty(fleet, question).likely["both"]

    def headroom(fleet: Fleet) -> float:
        return sum(likely(fleet, x) for x in larger)

    if len(same) == 1:
        return best
    plain = min(same, key=lambda x: x.complexity)
    same = [x for x in same if likely(x, asked) >= likely(plain, asked)]
    return min(same, key=lambda x: (-round(headroom(x) / NOTICED), x.complexity))


def _try(solver: FleetSolver, fleet: Fleet, question: FleetQuestion) -> WhatIf:
    """A fleet that another question is asked of."""
    likely = solver.certainty(fleet, question).likely["both"] if question.sure else None
    return WhatIf(solver.play(fleet, question.load), likely, solver.keeps(fleet, question))


def _try_losses(solver: FleetSolver, asked: FleetQuestion, fleet: Fleet) -> dict[int, WhatIf]:
    """The fleet without one replica of each kind; a fleet of one has none to lose."""
    lost = {}
    for j in np.flatnonzero(fleet.replicas):
        left = fleet.running.copy()
        left[:, j] = np.maximum(left[:, j] - 1, 0)
        if left.any(axis=1).all():
            lost[int(j)] = _try(solver, solver.fleet(fleet.kinds, left, asked), asked)
    return lost
