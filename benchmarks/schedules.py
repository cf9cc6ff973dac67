"""`kvsim capacity --schedule` on small days, held against every schedule of up to 3 of a kind.

    python -m benchmarks.schedules [FIRST [LAST]]      # seeds 0 to 29 if not given

Each day has two to four windows and two GPUs that compete. Every schedule that is cheaper than the
answer is simulated, with three divisions of the classes, the cheapest first, until one meets the
targets. Asked: none is cheaper on nine days of ten, none by more than 10 %, and no comparison that
the answer prints is cheaper than it.
"""

import sys
import time

from kvsim.errors import InfeasibleError
from kvsim.planner.fleet.answer import make_capacity
from kvsim.planner.fleet.comparisons import search_of
from kvsim.planner.fleet.offers import CapacityQuestion, Terms, shortlist
from kvsim.planner.fleet.play import Market, measure_market
from tests.support.schedules import cheapest_schedule, day

DAYS = 30


def market_of(question: CapacityQuestion) -> Market:
    """What replicas carry whose batch limits are those that the day gives."""
    q = question
    terms = Terms(q.traffic, q.targets, q.rules, q.admission, q.largest_loss, q.utilisation)
    return measure_market(shortlist(q.rentable, terms), q.traffic, q.targets)


def compare(seed: int) -> float | None:
    """The answer's price over that of the cheapest schedule; None if there is no schedule."""
    question = day(seed)
    began = time.process_time()
    try:
        answer = make_capacity(question)
    except InfeasibleError as problem:
        print(f"day {seed}: {problem}")
        return None
    seconds = time.process_time() - began
    if answer.shortfall:
        print(f"day {seed}: {answer.shortfall}")
        return None
    cost = answer.fleet.cost
    search = search_of(question, market_of(question))
    best = cheapest_schedule(search, below=cost)
    ratio = cost / best[0] if best else 1.0
    lower = [a.label for a in answer.alternatives if a.found and a.found.fleet.cost < cost - 1e-6]
    print(
        f"day {seed}: {answer.fleet.running[:, answer.used].tolist()} of {len(answer.used)} kinds, "
        f"{cost:.2f} USD/h, {ratio:.3f} of the cheapest"
        f"{f' {best[1].tolist()}' if best else ''}; {answer.found.simulations} simulations, "
        f"{seconds:.1f} s; comparisons that are cheaper: {', '.join(lower) or 'none'}",
        flush=True,
    )
    return ratio


def main() -> None:
    bounds = [int(x) for x in sys.argv[1:]]
    first, last = bounds[0] if bounds else 0, bounds[1] if len(bounds) > 1 else DAYS - 1
    ratios = [r for r in map(compare, range(first, last + 1)) if r is not None]
    equal = sum(r <= 1 + 1e-9 for r in ratios)
    print(f"{len(ratios)} days: {equal} at the cheapest, the worst {max(ratios):.3f} of it")


if __name__ == "__main__":
    main()
