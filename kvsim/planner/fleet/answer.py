"""``kvsim capacity``: the fleet for some traffic, what it is compared with, and what limits it.

The answer and all that stands beside it come from one `FleetSolver.solve` with changed questions.
Where no fleet is as sure as asked, the most certainty that one has is looked for, and where the
limits allow none for the whole load, the largest part of it. Targets that no fleet can meet are
refused with the nearest that one can.
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
from kvsim.planner.fleet.search import NEARLY, Certainty, FleetSolver, costs_as

TARGET_ROOM = 1.2  # times what is reached with hardly any load: a target that a few replicas meet
TARGET_FACTOR = 2.0  # times as long as a target, to see what it costs
OTHER_LOADS = (0.5, 1.5, 2.0)
PLAYS_TO_ANSWER = 4.0  # of each kind of replica until the fleet is found, about
ANSWER_SHARE = 0.35  # of all time until then, about
TIME_OF, AFTERWARDS = {f"for {x:g} times the load": 4.0 * x for x in OTHER_LOADS}, 3.0
"""Time of comparisons with other loads, and of what follows them, over that of the others."""
NOTICED = 0.2  # of the probabilities at larger loads together: less may be chance
HALVINGS = {"sure": 3, "load": 7}  # of what is reduced until some fleet does
NONE = "none meets the targets"
ONE_KIND, FULL_KV, STRETCH = "one kind of replica", "full KV", "this trace, times as predicted"
NO_MEMORY, NO_POOLS = "GPU memory alone for prefixes", "no prefill apart"


class NoFleetError(InfeasibleError):
    """No fleet meets the targets, whatever is rented.

    Attributes
    ----------
    option
        Longer targets that the nearest replica meets, as options; empty if no targets would do.
    changes
        The same by keyword of ``kvsim.api.capacity``; empty where a class of prompts is named.
    """

    def __init__(self, text: str, option: str = "", changes: Mapping[str, str] | None = None):
        super().__init__(text)
        self.option, self.changes = option, dict(changes or {})


@frozen
class OtherFleet:
    """A fleet for a changed question; None if none meets the targets."""

    label: str
    fleet: Fleet | None


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
        Why what was asked is not met; empty if it is. The fleet is then for `load`.
    load
        How much of the trace's load the fleet serves.
    kinds, alone
        Every kind of replica that was considered, and how many of each are always busy.
    left_out
        Why the other GPUs cannot run the model.
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
    load: float
    kinds: Sequence[ReplicaKind]
    alone: Sequence[float]
    left_out: Mapping[str, str]
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
    def targets(self) -> FleetTargets:
        """What the fleet keeps."""
        return self.question.targets

    @property
    def used(self) -> list[int]:
        """Kinds of which the fleet has replicas."""
        return [int(j) for j in np.flatnonzero(self.fleet.replicas)]


def make_capacity(
    question: CapacityQuestion, tell: Callable[[str, float], None] = lambda *_: None
) -> CapacityAnswer:
    """Find the cheapest fleet that meets the targets when it plays the trace.

    Where no fleet is as sure as asked, or the limits allow none for the whole load, the fleet is
    for what can be had, and the answer says so.

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
    NoFleetError
        If no fleet meets the targets.
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
    asked, chosen, shortfall = _answer(solver, question)
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
        if larger and (not fleet or fleet.cost > larger.cost or costs_as(fleet, larger)):
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
    if asked.sure < question.sure:
        unsure = (
            "no fleet within the limits meets the targets with a probability of "
            f"{100 * question.sure:g} %; this one reaches {100 * sure.likely['both']:.0f} %"
        )
        shortfall = f"{unsure}; {shortfall}" if shortfall else unsure
    at_load, most = dict[float, WhatIf](), sure.likely["both"]
    for x, case in cases.items():  # what carries more carries less, whatever days are drawn
        tried = _try(solver, best, case)
        if tried.likely is not None:
            likely = max(tried.likely, most) if x < 1 else min(tried.likely, most)
            tried, most = replace(tried, likely=likely), min(likely, most)
        at_load[x] = replace(tried, met=tried.met or x < 1)
    return CapacityAnswer(
        question=question,
        shortfall=shortfall,
        load=asked.load,
        kinds=solver.kinds,
        alone=[solver.known_busy(kind) * asked.load for kind in solver.kinds],
        left_out=solver.left_out,
        fleet=best,
        played=solver.play(best, asked.load),
        at_load=at_load,
        after_loss=_try_losses(solver, replace(asked, limits=alone), best, sure.likely["both"]),
        alternatives=[OtherFleet(x, found[x]) for x in rows if x in others],
        limits=[OtherFleet(x, found[x]) for x in rows if x not in others and x not in loads],
        at_other_loads={x: OtherFleet(y, found[y]) for y, x in loads.items()},
        at_sellers=at_sellers,
        sure=sure,
        bound=solver.bound(asked, best),
        plays=solver.plays,
    )


def _reprice(solver: FleetSolver, asked: CapacityQuestion, best: Fleet) -> dict[str, Fleet]:
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
    fleet: Fleet, prices: Mapping[str, float], solver: FleetSolver, asked: CapacityQuestion
) -> Fleet:
    """A fleet at other prices of one GPU."""
    kinds = tuple(replace(x, price=prices.get(x.gpu, inf) * x.gpus) for x in fleet.kinds)
    fleet = replace(fleet, kinds=kinds)
    cost = fleet.total("rent")
    if asked.start_up is not None:
        hours = solver.question.traffic.hours
        cost = scheduled_cost(kinds, hours, asked.start_up, fleet.running, fleet.reserved)
    return replace(fleet, cost=cost)


def _load_label(times: float) -> str:
    return f"for {times:g} times the load"


def _answer(solver: FleetSolver, asked: CapacityQuestion) -> tuple[CapacityQuestion, Fleet, str]:
    """The fleet for a question, or for the nearest one that has an answer, and why less load."""
    if _nearest(solver, asked)[1].measure_excess(asked.targets).both > NEARLY:
        raise _describe_unreachable(solver, asked)
    found, shortfall = solver.solve(asked), ""
    if found is not None:
        return asked, found, shortfall
    free = replace(asked, limits=FleetLimits(), start_up=None)
    limited = asked.limits != free.limits
    if not limited or solver.solve(free) is None:
        less = _find_most(solver, free, "sure")
        if less is None:
            raise _describe_unreachable(solver, asked)
        asked = replace(asked, sure=less[0].sure)
        found = solver.solve(asked)
    if found is None:
        part = _find_most(solver, asked, "load")
        if part is None:
            names = list(relaxed_limits(asked.limits))
            raise InfeasibleError(
                "the limits leave no fleet for even "
                f"{100 * asked.load / 2 ** HALVINGS['load']:.1f} % of the traffic within the "
                f"targets; loosen {' or '.join(names)}"
            )
        asked, found = part
        shortfall = f"the limits allow a fleet for {100 * asked.load:.0f} % of the trace's load"
    return asked, found, shortfall


def _find_most(
    solver: FleetSolver, asked: CapacityQuestion, name: str
) -> tuple[CapacityQuestion, Fleet] | None:
    """The largest part of what is asked that some fleet does, by halves; None if none does any.

    Parameters
    ----------
    name
        What is reduced: ``sure``, which may be 0, or ``load``.
    """
    low, high, best = 0.0, getattr(asked, name), None
    if name == "sure":
        least = replace(asked, sure=0.0)
        if (fleet := solver.solve(least)) is None:
            return None
        best = least, fleet
    for _ in range(HALVINGS[name]):
        middle = (low + high) / 2
        solver.tell(f"with {100 * middle:.0f} % of the {'load' if name == 'load' else 'certainty'}")
        some = replace(asked, **{name: middle})
        found = solver.solve(some) if len(solver.traffic(some.load).requests) else None
        if found is None:
            high = middle
        else:
            low, best = middle, (some, found)
    return best


def _changed(
    solver: FleetSolver, asked: CapacityQuestion, chosen: Fleet
) -> dict[str, CapacityQuestion]:
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


def _comparisons(solver: FleetSolver, asked: CapacityQuestion) -> dict[str, CapacityQuestion]:
    """Questions about other kinds of fleet for the same traffic."""
    rows: dict[str, CapacityQuestion] = {}
    if asked.limits.configurations > 1:
        rows[ONE_KIND] = replace(asked, limits=replace(asked.limits, configurations=1))
    some = [k.choices[0] for k in solver.kinds]
    if any(x.technique != "full" for x in some) and any(x.technique == "full" for x in some):
        rows[FULL_KV] = replace(asked, only=lambda x: x.technique == "full")
    if any(x.costs.rules.tiers for x in some):
        rows[NO_MEMORY] = replace(asked, only=lambda x: not x.costs.rules.tiers)
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


def _nearest(solver: FleetSolver, asked: CapacityQuestion) -> tuple[Configuration, Played]:
    """The replica that comes nearest to the targets with hardly any load; the first that does."""
    best, least = None, inf
    for kind in (k for k in solver.kinds if asked.only(k.choices[0])):
        for x in kind.choices:
            played = solver.at_rest(x)
            over = played.measure_excess(asked.targets).both
            if best is None or over < least:
                best, least = (x, played), over
            if least <= 1:
                return x, played
    assert best is not None
    return best


def _describe_unreachable(solver: FleetSolver, asked: CapacityQuestion) -> NoFleetError:
    """Why no fleet meets the targets, with the nearest ones that some fleet meets."""
    replica, played = _nearest(solver, asked)
    over, share = played.measure_excess(asked.targets).both, asked.targets.share
    requests = solver.question.traffic.requests
    if over == inf:
        return NoFleetError(
            "no kind of replica can serve all requests: those of up to "
            f"{int((requests.prompt + requests.generate).max()):,} tokens are refused, larger than "
            "the KV cache; more GPUs (--tp), larger ones (--gpus) or narrower --weights"
        )
    slower = solver.slowest(replica, asked) * TARGET_ROOM
    missed, longer, changes = list[str](), list[str](), dict[str, str]()
    for rows, target in played.by_class(asked.targets):
        reached = played.reached(share, rows)
        above = f" for prompts above {target.above:,} tokens" if target.above else ""
        for name in ("ttft", "tpot"):
            wanted, value = getattr(target, name), getattr(reached, name)
            if value > wanted:
                said = f"{name.upper()} p{100 * share:g} of {as_time(wanted)}{above}"
                missed.append(f"{said} (at least {as_time(value)})")
                reachable = as_time(float(f"{slower * value:.2g}")).replace(" ", "")
                longer.append(f"--{name} {reachable}{above}")
                changes |= {} if above else {name: reachable}
    if not missed:
        return NoFleetError(
            "no fleet that was tried meets the targets; allow other GPUs or longer times"
        )
    return NoFleetError(
        f"no fleet meets {' or '.join(missed)}, which {replica.name} takes with hardly any load; "
        f"try {' '.join(longer)}, or other GPUs",
        " ".join(longer),
        changes if len(changes) == len(longer) else {},
    )


def _with_most_headroom(
    solver: FleetSolver, asked: CapacityQuestion, larger: Sequence[CapacityQuestion], best: Fleet
) -> Fleet:
    """Of the fleets that cost as much, the one that larger loads are likeliest kept by.

    The plainest is taken of those that differ by less than is seen in so few days, and none is
    taken that keeps the load that was asked for less surely than the plainest.
    """
    same = [x for x in solver.fleets if costs_as(x, best) and x is not best]
    same = [best, *(x for x in same if solver.allows(x, asked) and solver.keeps(x, asked))]
    if len(same) == 1:
        return best

    def likely(fleet: Fleet, *questions: CapacityQuestion) -> float:
        """Probabilities of several questions together."""
        if not asked.sure:
            return float(sum(solver.keeps(fleet, x) for x in questions))
        return sum(solver.certainty(fleet, x).likely["both"] for x in questions)

    plain = min(same, key=lambda x: x.complexity)
    same = [x for x in same if likely(x, asked) >= likely(plain, asked)]
    return min(same, key=lambda x: (-round(likely(x, *larger) / NOTICED), x.complexity))


def _try(solver: FleetSolver, fleet: Fleet, question: CapacityQuestion) -> WhatIf:
    """A fleet that another question is asked of."""
    likely = solver.certainty(fleet, question).likely["both"] if question.sure else None
    return WhatIf(solver.play(fleet, question.load), likely, solver.keeps(fleet, question))


def _try_losses(
    solver: FleetSolver, asked: CapacityQuestion, fleet: Fleet, most: float
) -> dict[int, WhatIf]:
    """The fleet without one replica of each kind; a fleet of one has none to lose."""
    lost = {}
    for j in np.flatnonzero(fleet.replicas):
        left = fleet.running.copy()
        left[:, j] = np.maximum(left[:, j] - 1, 0)
        if left.any(axis=1).all():
            tried = _try(solver, solver.fleet(fleet.kinds, left, asked), asked)
            likely = None if tried.likely is None else min(tried.likely, most)
            lost[int(j)] = replace(tried, likely=likely)
    return lost
