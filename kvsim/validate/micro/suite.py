"""Running the suite: a selection that fits the time, and every benchmark kept once it is done."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic

import torch

from kvsim.errors import InputError, brief
from kvsim.evidence.machine.samples import Log, Sample
from kvsim.validate import micro
from kvsim.validate.machine import refusals
from kvsim.validate.micro.budget import (
    LEAST_REQUIRED,
    Budgeted,
    Cost,
    Speed,
    check_complete,
    select,
)
from kvsim.validate.micro.clocks import Since
from kvsim.validate.micro.device import running
from kvsim.validate.micro.place import Bench, Work
from kvsim.validate.micro.timing import Timer, measure, timers

LIMIT = {True: 60.0, False: 300.0}
"""What the quick and the full suite may take. [s]"""
RUNS_LIMIT = {True: 40.0, False: 240.0}
"""What whole runs may take after it. [s]"""
LEAST = 0.01  # what the runs of a work may take even when time is up [s]
SHARE = 0.6  # of a work's time that its runs take; the rest is allocation and warm-up

Say = Callable[[str], None]


def plan_suite(place: Bench, log: Log) -> Budgeted:
    """What will be measured of what the log does not hold yet.

    Raises
    ------
    InputError
        If something that a profile needs cannot be measured here.
    """
    planned = dict(micro.plan(place))
    check_complete(planned, place)
    todo = {name: works for name, works in planned.items() if works and name not in log.done}
    return select(todo, Cost(place, Speed.of(place)), LIMIT[place.quick])


@torch.inference_mode()
def run_suite(place: Bench, log: Log, say: Say) -> None:
    """Measure what the log does not hold yet.

    Parameters
    ----------
    say : told what will be measured, what is being measured and how long the rest will take.
    """
    with running(place.device) as since:
        _run_suite(place, log, say, since)


def _run_suite(place: Bench, log: Log, say: Say, since: Since) -> None:
    selection = plan_suite(place, log)
    if selection.kept:
        say(selection.said)
    clock = _Clock(place, LIMIT[place.quick], sum(map(len, selection.kept.values())))
    clocks = timers(place.device)
    for name, works in selection.kept.items():
        say(f"{name}: {len(works)} of {clock.left} measurements left{clock.remaining}")
        samples: list[Sample] = []
        refused = ""
        for i, work in enumerate(works):
            if clock.is_late and samples and name not in LEAST_REQUIRED and not _paired(work):
                say(f"{name}: {len(works) - i} left out, as time is up")
                clock.left -= len(works) - i
                break
            sample = _measured(work, name, clocks, clock.budget)
            if isinstance(sample, Sample):
                samples.append(sample)
            else:
                refused = f"{dict(work.case)}: {sample}"
                say(f"{name}: skipped {refused}")
            clock.left -= 1
        check_measured(name, works, samples, refused)
        log.append(name, samples, since())
    deadline = monotonic() + RUNS_LIMIT[place.quick]
    for name, runs in micro.RUNS.items():
        for part, samples in runs(place, log.done, deadline, say):
            log.append(f"{name}: {part}", samples, since())


@dataclass
class _Clock:
    """How much of a suite's time is left."""

    place: Bench
    limit: float  # [s]
    left: int  # measurements

    def __post_init__(self) -> None:
        self.total, self.begin = self.left, monotonic()

    @property
    def is_late(self) -> bool:
        """Whether time is up."""
        return monotonic() - self.begin > self.limit

    @property
    def budget(self) -> float:
        """What the runs of the next work may take. [s]"""
        return max(LEAST, SHARE * (self.limit - (monotonic() - self.begin)) / max(self.left, 1))

    @property
    def remaining(self) -> str:
        """About how long the rest will take, in words; empty at the start."""
        done = self.total - self.left
        if not done:
            return ""
        seconds = (monotonic() - self.begin) / done * self.left
        return f", about {seconds:.0f} s" if seconds < 90 else f", about {seconds / 60:.0f} min"


def _paired(work: Work) -> bool:
    """Whether a work means nothing without the others of its pair."""
    return "pair" in work.case


def check_measured(
    name: str, works: Sequence[Work], samples: Sequence[Sample], refused: str
) -> None:
    """Refuse to go on without a benchmark that every profile needs; nothing of it is kept.

    Parameters
    ----------
    refused : the last work that could not run, and why.

    Raises
    ------
    InputError
        If none of its works outside the cache, or none of a number format, could run.
    """
    if name not in LEAST_REQUIRED:
        return
    wanted = {work.op.dtype for work in works if work.case.get("cached") != "yes"}
    found = {sample.op.dtype for sample in samples if sample.case.get("cached") != "yes"}
    if wanted - found:
        raise InputError(
            f"--device: {name} in {', '.join(sorted(wanted - found))} could not be measured, and "
            f"no profile is without it (skipped {refused}); free memory or mend PyTorch, and run "
            f"the same command again: what is measured is kept"
        )


def _measured(work: Work, name: str, clocks: Mapping[str, Timer], budget: float) -> Sample | str:
    """One work's sample, or why this device or build of PyTorch cannot run it."""
    try:
        with work.make() as calls:
            runs = measure(clocks[work.clock], calls, budget)
    except refusals() as problem:
        return brief(problem, 80)
    return Sample(name, dict(work.case), replace(work.op, bytes=dict(work.op.bytes)), runs)
