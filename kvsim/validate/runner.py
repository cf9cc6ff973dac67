"""Scheduling of timed work by priority within the available time.

Calibrating, validating and the minutes that a GPU is rented for are all a list of units. What is
left is planned anew after each unit, by how long those before it took on this machine.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from math import inf
from statistics import median
from time import monotonic
from typing import Literal

from kvsim.frozen import frozen

Form = Literal["short", "long"]

BY_USE = (
    "full", "fp8", "kivi", "snapkv", "offload", "kvpr", "quantspec", "specache", "zipcache",
    "kcache",
)  # fmt: skip
"""Techniques by use, to which time goes first; others come after them."""
GIVEN_UP = 2  # times that a unit may fail before it is left alone
PACE = (0.2, 5.0)
"""Least and most that the time of units on this machine corrects the estimates of others."""
RETRY_FACTOR = 1.5
"""What a unit that was ended early needs at least, over the time that it was given."""
LEAST_BEGUN = 1.0  # a unit that resumes is begun with no less than this left [s]
SOON = 90  # longer is told in minutes [s]


@frozen
class Past:
    """How a unit has gone on this machine so far.

    Attributes
    ----------
    form
        Form that is complete, if any.
    took
        Duration of that form. [s]
    failures
        Number of times that the unit failed.
    ended
        By form, the time after which it was stopped because the time was up. [s]
    """

    form: Form | None = None
    took: float | None = None
    failures: int = 0
    ended: Mapping[str, float] = field(default_factory=dict)


NEVER = Past()


@frozen
class Unit:
    """A piece of timed work, which may have a short and a long form.

    Attributes
    ----------
    name
        Name of the unit, whose first word is its kind.
    seconds
        Estimated time of the long form, or of the only one. [s]
    short
        Estimated time of the short form; None if there is none. [s]
    needs
        Names of units that must be complete before it starts.
    most
        Time after which it counts as failed. [s]
    resumes
        Whether it keeps its results when it is stopped early, and continues from them.
    required
        Whether it is run even if the time is up, because other units depend on it.
    rank
        Priority: time is allotted to lower ranks first, whatever the order in which units run.
    """

    name: str
    seconds: float
    short: float | None = None
    needs: tuple[str, ...] = ()
    most: float = 600.0
    resumes: bool = False
    required: bool = False
    rank: float = 0.0

    @property
    def kind(self) -> str:
        """The first word of its name; units of a kind correct each other's estimates."""
        return self.name.split(maxsplit=1)[0]

    @property
    def shortest(self) -> Form:
        """The short form if there is one, else the only form."""
        return "long" if self.short is None else "short"

    def estimate(self, form: Form) -> float:
        """Return the estimated time of a form. [s]"""
        return self.short if form == "short" and self.short is not None else self.seconds

    def is_complete(self, past: Past) -> bool:
        """Return whether its longest form is complete."""
        return past.form == "long" or (past.form is not None and self.short is None)


@frozen
class Chosen:
    """A unit of a plan, and the form in which it will run.

    Attributes
    ----------
    unit
        The unit.
    form
        The form in which it runs.
    seconds
        Estimated time on this machine. [s]
    spare
        Time that it may take beyond the estimate. [s]
    """

    unit: Unit
    form: Form
    seconds: float
    spare: float = 0.0


class Runner:
    """Iterate over units that fit in the remaining time.

    The body of the loop runs each unit, and the time until the next iteration is recorded as its
    duration.

    Parameters
    ----------
    units
        Units in the order in which they run; time is allotted to the lowest ranks first.
    seconds
        Time available; infinite if all units are to run. [s]
    past
        How units went in earlier sessions, by name.
    clock
        Function that returns the time; kept as ``now``. [s]
    """

    def __init__(
        self,
        units: Sequence[Unit],
        seconds: float = inf,
        past: Mapping[str, Past] | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.units, self.past = tuple(units), dict(past or {})
        self.passed: set[str] = set()  # not tried again now
        self.now, self._end = clock, clock() + seconds
        self._begun = clock()
        self._remaining = 0.0  # of the plan, when the unit in progress began [s]

    def __iter__(self) -> Iterator[Chosen]:
        """Yield what is next until nothing fits.

        A unit is done when the loop comes back, unless the loop has said otherwise in ``past``.
        """
        while plan := self.plan():
            chosen, before = plan[0], self.past.get(plan[0].unit.name)
            self._begun, self._remaining = self.now(), sum(one.seconds for one in plan)
            yield chosen
            if self.past.get(chosen.unit.name) is before and chosen.unit.name not in self.passed:
                took = self.now() - self._begun
                self.past[chosen.unit.name] = Past(chosen.form, took)

    @property
    def time_left(self) -> float:
        """Time that remains. [s]"""
        return self._end - self.now()

    @property
    def remaining(self) -> str:
        """Approximate time of the remaining plan, in words; empty before a unit is done."""
        if not any(past.took for past in self.past.values()):
            return ""
        return duration(max(0.0, self._remaining - (self.now() - self._begun)))

    def expected(self, unit: Unit, form: Form, pace: float = 1.0) -> float:
        """Estimate how long a unit takes; longer than its last limit if it was stopped. [s]"""
        ended = self.past.get(unit.name, NEVER).ended.get(form, 0.0)
        return max(pace * unit.estimate(form), RETRY_FACTOR * ended)

    def paces(self) -> dict[str, float]:
        """Compare the time that units took with their estimates.

        Returns
        -------
        dict of str to float
            Median ratio by kind, within ``PACE``; under ``""`` that of all units if they took
            longer than estimated, else 1.
        """
        ratios: dict[str, list[float]] = {}
        for unit in self.units:
            past = self.past.get(unit.name, NEVER)
            if past.took is not None and past.form:
                ratio = past.took / self.expected(unit, past.form)
                ratios.setdefault(unit.kind, []).append(min(max(ratio, PACE[0]), PACE[1]))
        found = {kind: median(some) for kind, some in ratios.items()}
        every = [ratio for some in ratios.values() for ratio in some]
        return found | {"": max(1.0, median(every)) if every else 1.0}

    def plan(self) -> list[Chosen]:
        """Plan the rest of the time.

        Every unit is planned in its shortest form first, as far as they fit; the remaining time
        goes to long forms. If all units are done, one that is not complete is planned in its long
        form.

        Returns
        -------
        list of Chosen
            Units in the order in which they run; empty if nothing fits.
        """
        pace, time = self.paces(), self.time_left
        budget = time
        done = {u.name: self.past.get(u.name, NEVER) for u in self.units}
        coming = {name for name, past in done.items() if past.form}
        by_rank = sorted(self.units, key=lambda u: u.rank)
        open_ = [
            u for u in by_rank if u.name not in self.passed and done[u.name].failures < GIVEN_UP
        ]

        def expect(unit: Unit, form: Form) -> float:
            return self.expected(unit, form, pace.get(unit.kind, pace[""]))

        planned: dict[str, Chosen] = {}
        for unit in open_:
            if unit.name in coming or not coming.issuperset(unit.needs):
                continue
            needed = expect(unit, unit.shortest)
            goes_on = unit.resumes and budget > LEAST_BEGUN
            if needed <= budget or goes_on or unit.required:
                planned[unit.name] = Chosen(unit, unit.shortest, needed)
                coming.add(unit.name)
                budget -= needed
        for name, one in planned.items():
            if one.form == "short" and not done[name].failures:
                more = expect(one.unit, "long") - one.seconds
                if more <= budget:
                    budget -= more
                    planned[name] = Chosen(one.unit, "long", one.seconds + more)
        if not planned:
            for unit in open_:
                needed = expect(unit, "long")
                goes_on = unit.name in coming and not unit.is_complete(done[unit.name])
                if goes_on and needed <= budget:
                    return [Chosen(unit, "long", needed)]
            return []
        spare = max(0.0, budget) / len(planned) if time < inf else 0.0
        inside = (planned[u.name] for u in self.units if u.name in planned)
        return [Chosen(one.unit, one.form, one.seconds, spare) for one in inside]


def duration(seconds: float) -> str:
    """Describe approximately how long something takes, as the end of a sentence."""
    return f", about {seconds:.0f} s" if seconds < SOON else f", about {seconds / 60:.0f} min"


class Progress:
    """Progress of a number of runs, and the estimated time left.

    Parameters
    ----------
    total : runs in all.
    """

    def __init__(self, total: int) -> None:
        self._total, self._done, self._begin = total, 0, monotonic()

    def line(self, what: str) -> str:
        """Describe the next run.

        Returns
        -------
        str
            Its number, the estimated minutes left, and its name.
        """
        left, rest = self._total - self._done, ""
        if self._done and left:
            rest = duration((monotonic() - self._begin) / self._done * left)
        self._done += 1
        rest = f"{rest} left" if rest.endswith("min") else ""
        return f"{self._done} of {self._total}{rest}: {what}"
