"""What would change a plan: prices of memory, bandwidth and limits, and the limits that bind."""

from dataclasses import replace

import numpy as np

from kvsim.frozen import frozen
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Link
from kvsim.planner.alike import again
from kvsim.planner.choose import as_good, within
from kvsim.planner.improve import Placements
from kvsim.planner.improved import Improved
from kvsim.planner.mixed import Mixed, with_mixes
from kvsim.planner.needs import needs
from kvsim.planner.options import settled
from kvsim.planner.question import Question, Search, gain, rank, spoken
from kvsim.planner.shares import ALONE
from kvsim.planner.workload import GIB
from kvsim.quality.evidence import KNOWN_BAD
from kvsim.techniques.technique import Technique

MORE = 1.1  # times a bandwidth or a time
REACH = 1.25  # techniques this far behind may win where something changes by a tenth
PAYS = 1e-3  # a gain below this is none
BESIDE = (0.9, 1.0, 1.04, 1.08, 1.12, 1.17, 1.23)  # times a batch: what a tenth more may allow
EQUAL = 5e-3  # relative difference below which the simpler of two is named
UNLIMITED = 64.0  # times the memory, where its limit is taken away

LABELS = {
    "gpu_memory": "GPU memory",
    "host_memory": "host memory",
    "ttft": "TTFT",
    "tpot": "TPOT",
    "loss": "lossless techniques only",
    "assumed": "no unmeasured acceptance rates",
}


@frozen
class Binding:
    """A limit that holds the plan back."""

    limit: str
    gain_without: float  # of the objective, relative, as solved without the limit
    technique: str  # what would then be chosen
    option: str = ""  # of the command line, which takes the limit away


def prices(question: Question, search: Search, row: int, mixed: Mixed) -> dict[str, float]:
    """Relative gain of the objective for a little more of each thing, as solved again.

    Limits change nothing of what the engine says, so that what is known under one is known under
    another; links do. Shares of mixes of placements that are the best, or may be, are solved again.
    """
    leaders, limits = near(search, row), question.limits
    known = _tabled(question, leaders, limits.gpu_memory + GIB)
    known.refine()
    refined = _best(known)
    value = search.value(row) if refined is None else min(search.value(row), refined)
    placements = mixed.placements
    mixes = [x for x in placements.contenders(search.value(row)) if x.arrangement.blocks > 1]
    starts = mixed.starts(search.value(row))
    asked = {"one more GiB of GPU memory": known.under(gpu_memory=limits.gpu_memory + GIB)}
    more = question.with_limits(host_memory=limits.host_memory + 16 * GIB)
    uses_host = bool(known.table.columns["host_memory"].any())
    asked["16 GiB more host memory"] = _tabled(more, leaders) if uses_host else known
    for name, label in (("ttft", "a 10 % looser TTFT"), ("tpot", "a 10 % looser TPOT")):
        limit = getattr(limits, name)
        if np.isfinite(limit):
            asked[label] = known.under(**{name: MORE * limit})
    for label, links in (
        ("10 % more host link bandwidth", ("h2d", "d2h")),
        ("10 % more host memory bandwidth", ("dram",)),
        ("10 % more GPU memory bandwidth", ("hbm",)),
    ):
        d = faster(question.deployment, links)
        asked[label] = _tabled(replace(question, deployment=d), leaders)
    d = quicker(question.deployment)
    asked["10 % faster arithmetic on the GPU"] = _tabled(replace(question, deployment=d), leaders)
    found: dict[str, float] = {}
    for label, other in asked.items():
        other.refine()
        for prediction in again(other.q, starts, placements.streams).best:
            other.include(prediction)
        for mix in mixes:
            _include_solved(other, mix)
        better = _best(other)
        found[label] = 0.0 if better is None else gain(value, better)
    return found


def _tabled(q: Question, leaders: list[Technique], *gpu: float) -> Search:
    """Some techniques at every batch that the limits, or these GPU memories, allow. [B]"""
    sizes = (q.limits.gpu_memory, *gpu)
    w, host = q.workload, q.limits.host_memory
    return Search(q, settled(leaders, q.deployment, w, sizes, host, q.admission))


def _include_solved(search: Search, mix: Improved) -> None:
    """Solve the shares of a mix again, at batches near its own, and include the best."""
    q, own = search.q, float(mix.prediction.batch[0])
    some = np.ceil(own * np.array(BESIDE)) if q.workload.batch is None else np.array([own])
    found = Placements(q, only=tuple(some.tolist()), families=(mix.family,)).near(mix)
    if found is not None:
        search.include(found.prediction)


def _best(search: Search) -> float | None:
    """The best objective within the limits."""
    row = search.optimum(search.q.limits.finite())
    return None if row is None else search.value(row)


def bindings(
    question: Question,
    search: Search,
    row: int,
    found: dict[str, float],
    mixed: Mixed,
) -> list[Binding]:
    """Limits whose price is not zero, with what taking them away would bring."""
    value, limits = search.value(row), []
    cheap = {"gpu_memory": "one more GiB of GPU memory", "host_memory": "16 GiB more host memory",
             "ttft": "a 10 % looser TTFT", "tpot": "a 10 % looser TPOT"}  # fmt: skip
    for name, label in cheap.items():
        if found.get(label, 0.0) > PAYS:
            limits.append(_without(question, search, row, name, mixed))
    for name in ("loss", "assumed"):
        other = search.optimum(question.limits.finite(without=name) | {"harm": KNOWN_BAD})
        if other is None:
            continue
        technique = spoken(search.table.technique[other])
        error = question.between(search.table.technique[other], search.table.technique[row])
        if gain(value, search.value(other)) > max(PAYS, error):
            option = " ".join(needs(question, search, other))
            limits.append(Binding(name, gain(value, search.value(other)), technique, option))
    return limits


def _without(q: Question, search: Search, row: int, name: str, mixed: Mixed) -> Binding:
    """Solved without a limit; where memory is unlimited, batches grow with it."""
    free = q.with_limits(**{name: np.inf})
    if name.endswith("memory"):
        larger = q.with_limits(**{name: UNLIMITED * getattr(q.limits, name)})
        other = _tabled(larger, near(search, row))
        other.refine()
    else:
        other = search.under(**{name: np.inf})
    limits, value = free.limits.finite(), search.value(row)
    for prediction in again(other.q, mixed.starts(value), mixed.placements.streams).best:
        other.include(prediction)
    mix = mixed.rows.get(row)
    if mix is not None:
        known = other.optimum(limits)
        families = ALONE if any(mix.family <= f for f in ALONE) else (mix.family,)
        placements = Placements(other.q, families=families)
        least = value if known is None else other.value(known)
        for better in placements.better_than(least, placements.bounds(least), most=1):
            other.include(better.prediction)
    elif not name.endswith("memory"):  # a longer time may pay for other places
        with_mixes(other.q, other, roughly=True, known=mixed.placements)
    found = other.optimum(limits)
    if found is None:
        return Binding(name, 0.0, "")
    best = other.value(found)
    return Binding(name, gain(value, best), spoken(_simplest(other, limits, best)))


def _simplest(search: Search, limits: dict[str, float], best: float) -> Technique:
    """The simplest technique that is as good as the best but for ``EQUAL``."""
    goal, table = search.table.columns[search.q.objective], search.table
    rows = as_good(goal, within(goal, table.columns, limits), best, EQUAL)
    some: list[Technique] = [table.technique[row] for row in rows]
    return min(some, key=rank)


def near(search: Search, row: int) -> list[Technique]:
    """The best settings of techniques that a change by a tenth may make the best."""
    value, limits = search.value(row), search.q.limits.finite()
    goal, found = search.table.columns[search.q.objective], {row: None}
    for name in search.table.names:
        best = search.best(limits, name)
        if best is not None and gain(float(goal[best]), value) < REACH - 1:
            found[best] = None
    return [search.table.technique[i] for i in found]


def faster(deployment: Deployment, links: tuple[str, ...], factor: float = MORE) -> Deployment:
    """The deployment with some links several times as fast, or a tenth faster."""
    changed = {
        name: Link(link.bandwidth * factor, link.latency) if name in links else link
        for name, link in deployment.hardware.links.items()
    }
    return replace(deployment, hardware=replace(deployment.hardware, links=changed))


def quicker(deployment: Deployment) -> Deployment:
    """The deployment with all number formats of the GPU a tenth faster."""
    rates = {dtype: MORE * rate for dtype, rate in deployment.hardware.flops.items()}
    return replace(deployment, hardware=replace(deployment.hardware, flops=rates))
