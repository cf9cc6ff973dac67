"""The answer of ``kvsim capacity`` in a few sentences."""

from math import isinf

from kvsim.planner.fleet.answer import CapacityAnswer
from kvsim.planner.fleet.comparisons import ROBUST
from kvsim.planner.fleet.offers import Configuration
from kvsim.planner.fleet.search import SearchResult
from kvsim.report.answer import WORDS, verdict
from kvsim.report.capacity_times import slower, wait
from kvsim.report.units import likelihood, usd

NEAR = 0.9  # likelihood below which a fleet is near its limit


def in_words(answer: CapacityAnswer) -> str:
    """The decision, how sure it is and what it does, in at most 60 words.

    Where replicas have long names, what would be surer and whose times differ are in the tables.
    """
    q = answer.question
    fleet = fleet_in_words(answer.found, answer.market.configurations)
    reached = answer.fleet.played.reached(answer.targets.share)
    p = f"p{100 * reached.share:g}"
    times = f"TTFT {p} {wait(reached.ttft)}, TPOT {p} {wait(reached.tpot)}"
    if answer.targets.longer:
        times = f"each class of prompts within its targets, all of them with {times}"
    part = "" if answer.load == 1 else f" {100 * answer.load:.0f} % of"
    rate = float(q.traffic.demand.mean.sum())
    each = per_million(answer)
    million = "" if each is None else f", {usd(each)} per million generated tokens"
    meets = "would carry" if answer.shortfall else "carries"
    paid = f"{usd(answer.fleet.cost)} per hour{million}."
    rent = f"Rent {'' if q.schedule is None else 'up to '}{fleet}: {paid}"
    some = answer.fleet.replicas
    tabled = f"Rent the {some.sum()} replicas of {(some > 0).sum()} kinds in the table: {paid}"
    who = slower(answer.fleet.played, answer.targets, names(answer))
    sure, safer = _sure(answer)
    what = f"the trace's {rate:.3g} requests per second"
    if not q.traffic.requests.duration:
        what = "the trace, all of which comes at once,"
    does = f"In simulation it {meets}{part} {what} with {times}."
    ways = (
        [rent, who, f"{sure}{safer}."],
        [rent, who, f"{sure}."],
        [rent, "Targets hold for all requests together." if who else "", f"{sure}."],
        [tabled, "Targets hold for all requests together." if who else "", f"{sure}."],
    )
    fit = next(way for way in ways if way is ways[-1] or len(" ".join(way).split()) <= WORDS)
    return verdict(fit, [does])


def names(answer: CapacityAnswer) -> list[str]:
    """Every kind of replica that was measured."""
    return [x.name for x in answer.market.configurations]


def _sure(answer: CapacityAnswer) -> tuple[str, str]:
    """How likely the targets are kept, and what rents more certainty where that is little."""
    if all(isinf(x.ttft) and isinf(x.tpot) for x in answer.targets.each):
        return "There are no targets to keep", ""
    both = answer.sure.likely["both"]
    said = f"It keeps the targets with a likelihood of {likelihood(both)}"
    safer = next((a for a in answer.alternatives if a.label == ROBUST), None)
    if both >= NEAR or safer is None:
        return said, ""
    if safer.found is None:
        return said, "; no fleet within the limits was found that keeps them with 95 %"
    more = fleet_in_words(safer.found, safer.configurations)
    return said, f"; for 95 % rent {more}, {usd(safer.found.fleet.cost)} per hour"


def fleet_in_words(found: SearchResult, configurations: list[Configuration]) -> str:
    """Replicas and what runs on them."""
    return " + ".join(
        f"{n} x {configurations[j].name}" for j, n in enumerate(found.fleet.replicas) if n
    )


def per_million(answer: CapacityAnswer) -> float | None:
    """Price of a million generated tokens in the trace; None if there are none. [USD]"""
    tokens = sum(g.tokens for g in answer.fleet.played.groups)
    hours = answer.fleet.played.duration / 3600
    return answer.fleet.cost * hours / tokens * 1e6 if tokens else None
