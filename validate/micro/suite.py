"""Running the suite: progress with the time left, every benchmark kept as soon as it is done."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from time import monotonic

import torch

from kvsim.errors import brief
from kvsim.evidence.machine.samples import Log, Sample
from kvsim.validate import micro
from kvsim.validate.machine import refusals
from kvsim.validate.micro.place import Place, Work
from kvsim.validate.micro.timing import Timer, measure, timers

LIMIT = {True: 60.0, False: 360.0}
"""What the timing of the quick and of the full suite may take, start and fit left aside. [s]"""
LEAST = 0.01  # what the runs of a work may take even when time is up [s]
SHARE = 0.6  # of a work's time that its runs take; the rest is allocation and warm-up


@torch.inference_mode()
def run_suite(place: Place, log: Log, say: Callable[[str], None]) -> None:
    """Measure what the log does not hold yet.

    Parameters
    ----------
    say : told what is being measured and how long the rest will take.
    """
    todo = [(name, works) for name, works in micro.plan(place) if works and name not in log.done]
    clocks = timers(place.device)
    left = sum(len(works) for _, works in todo)
    total, begin = left, monotonic()
    for name, works in todo:
        say(f"{name}: {len(works)} of {left} measurements left{_time_left(begin, total, left)}")
        samples = []
        for work in works:
            remains = LIMIT[place.quick] - (monotonic() - begin)
            budget = max(LEAST, SHARE * remains / left)
            sample = _measured(name, work, clocks, budget, say)
            samples += [sample] if sample else []
            left -= 1
        log.append(name, samples)
    for name, runs in micro.RUNS.items():
        if name not in log.done:
            log.append(name, list(runs(place, say)))


def _measured(
    name: str, work: Work, clocks: Mapping[str, Timer], budget: float, say: Callable[[str], None]
) -> Sample | None:
    """One work's sample; none where this device or build of PyTorch lacks the kernel."""
    try:
        with work.make() as calls:
            runs = measure(clocks[work.clock], calls, budget)
    except refusals() as problem:
        say(f"{name}: skipped {dict(work.case)}: {brief(problem, 80)}")
        return None
    return Sample(name, dict(work.case), replace(work.op, bytes=dict(work.op.bytes)), runs)


def _time_left(begin: float, total: int, left: int) -> str:
    done = total - left
    if not done:
        return ""
    seconds = (monotonic() - begin) / done * left
    return f", about {seconds:.0f} s" if seconds < 90 else f", about {seconds / 60:.0f} min"
