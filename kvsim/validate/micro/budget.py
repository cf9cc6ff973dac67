"""What a suite will cost on a machine, and what is left out where that is too long.

Costs are estimated from three rough rates before anything is measured; while the suite runs, what
it really took corrects them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from math import ceil
from time import perf_counter

import torch

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.validate.micro.place import MOST_TURNS, Bench, Work
from kvsim.validate.micro.timing import FEWEST, GROUP

LEAST = 4  # works that a benchmark keeps, whatever they take
LEAST_REQUIRED: Mapping[str, int] = {
    "memory": 2,
    "host": 1,
    "gemm": 5,
    "host_gemm": 3,
    "h2d": 3,
    "d2h": 3,
}
"""Benchmarks that no profile is without, and the works (or pairs) that each needs at least."""
SETUP = 2e-3  # around each work: allocations, threads that start [s]
LAUNCH = 2e-5  # of an op's kernels on the host [s]
PROBED = 2**25  # bytes that rough rates are taken from

Suite = Mapping[str, Sequence[Work]]


@frozen
class Speed:
    """Rough rates of a place."""

    fill: float  # inputs that are made [B/s]
    moved: float  # what ops read and write [B/s]
    flops: float  # of products in 16 bits [FLOP/s]

    @classmethod
    def of(cls, place: Bench) -> "Speed":
        """Measured in some tenths of a second."""
        numbers = place.random(PROBED // 2)
        wide = min(1024, place.cache)
        x = place.random(256, wide)
        w = place.random(wide, wide)

        def took(work: Callable[[], object]) -> float:
            work()
            _wait(place)
            begin = perf_counter()
            work()
            _wait(place)
            return max(perf_counter() - begin, 1e-7)

        fill = PROBED / took(lambda: place.random(PROBED // 2))
        moved = 2 * PROBED / took(numbers.clone)
        return cls(fill, moved, 2 * 256 * wide**2 / took(lambda: x @ w.t()))


def _wait(place: Bench) -> None:
    if not place.on_cpu:
        torch.cuda.synchronize(place.device)


@frozen
class Cost:
    """Seconds of a work, given rough rates."""

    place: Bench
    speed: Speed

    def __call__(self, work: Work) -> float:
        """Inputs made, one warm-up through all of them, two more calls and the fewest runs. [s]"""
        moved = max((float(n) for n in work.op.bytes.values()), default=0.0)
        flops = float(work.op.flops)
        launches = float(work.op.launches)
        once = moved / self.speed.moved + flops / self.speed.flops + launches * LAUNCH
        sets = max(1, min(ceil(2 * self.place.cache / max(moved, 1.0)), MOST_TURNS))
        made = min(sets * moved, self.place.memory / 2)
        return SETUP + made / self.speed.fill + (sets + 2) * once + FEWEST * max(GROUP, once)


@frozen
class Budgeted:
    """What a suite measures, and what it leaves out."""

    kept: dict[str, list[Work]]
    left_out: dict[str, int] = field(default_factory=dict)  # works by benchmark
    seconds: float = 0.0  # estimated for what is kept

    @property
    def said(self) -> str:
        """One line for people."""
        count = sum(map(len, self.kept.values()))
        text = f"{count} measurements, about {max(1.0, self.seconds):.0f} s"
        if self.left_out:
            listed = ", ".join(f"{n} of {name}" for name, n in self.left_out.items())
            text += f"; left out, as they would take too long: {listed}"
        return text


def select(suite: Suite, cost: Callable[[Work], float], limit: float) -> Budgeted:
    """As many works as fit a limit: the costliest benchmarks lose their costliest works first.

    Works whose case names the same ``pair``, or ways to use the same bytes, stay or go together;
    every number format of a benchmark keeps some.

    Parameters
    ----------
    limit : what all of them may take together. [s]
    """
    parts = {
        (name, dtype): _units([work for work in works if work.op.dtype == dtype])
        for name, works in suite.items()
        for dtype in dict.fromkeys(work.op.dtype for work in works)
    }
    costs = {part: [sum(map(cost, unit)) for unit in units] for part, units in parts.items()}
    kept = {part: list(range(len(units))) for part, units in parts.items()}
    totals = {part: sum(each) for part, each in costs.items()}
    while sum(totals.values()) > limit:
        spare = [part for part in parts if len(kept[part]) > LEAST_REQUIRED.get(part[0], LEAST)]
        if not spare:
            break
        part = max(spare, key=lambda p: totals[p])
        worst = max(kept[part], key=lambda i: costs[part][i])
        kept[part].remove(worst)
        totals[part] -= costs[part][worst]
    chosen: dict[str, list[Work]] = {name: [] for name in suite}
    for part, units in parts.items():
        chosen[part[0]] += [work for i in kept[part] for work in units[i]]
    gone = {name: len(suite[name]) - len(works) for name, works in chosen.items()}
    left_out = {name: count for name, count in gone.items() if count}
    return Budgeted(chosen, left_out, sum(totals.values()))


def _units(works: Sequence[Work]) -> list[list[Work]]:
    found: dict[object, list[Work]] = {}
    for i, work in enumerate(works):
        same = work.case.get("bytes") if "way" in work.case else None
        found.setdefault(work.case.get("pair", same or (i,)), []).append(work)
    return list(found.values())


def check_complete(suite: Suite, place: Bench) -> None:
    """Refuse a suite that no profile could be made of, before anything is measured.

    Raises
    ------
    InputError
        Naming what cannot be measured, and why.
    """
    for name, works in suite.items():
        if name not in LEAST_REQUIRED:
            continue
        if not [w for w in works if w.case.get("cached") != "yes"]:
            raise InputError(
                f"--device: {name} cannot be measured here: the cache holds "
                f"{place.cache / 2**20:.0f} MiB and one benchmark may take "
                f"{place.memory / 2**20:.0f} MiB of the memory that is free; free some memory, or "
                f"raise the container's limit"
            )
