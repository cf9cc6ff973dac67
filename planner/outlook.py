"""What would change a plan: prices of memory, bandwidth and limits, and the limits that bind."""

from dataclasses import dataclass, replace

import numpy as np

from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Link
from kvsim.planner.needs import needs
from kvsim.planner.options import settled
from kvsim.planner.question import Question, Search, gain
from kvsim.planner.workload import GIB
from kvsim.quality.evidence import KNOWN_BAD
from kvsim.techniques.base import Technique

MORE = 1.1  # times a bandwidth or a time
REACH = 1.25  # techniques this far behind may win where something changes by a tenth
PAYS = 1e-3  # a gain below this is none
UNLIMITED = 64.0  # times the memory, where its limit is taken away

LABELS = {
    "gpu_memory": "GPU memory",
    "host_memory": "host memory",
    "ttft": "TTFT",
    "tpot": "TPOT",
    "loss": "lossless techniques only",
    "assumed": "no unmeasured acceptance rates",
}


@dataclass(frozen=True)
class Binding:
    """A limit that holds the plan back."""

    limit: str
    gain_without: float  # of the objective, relative, as solved without the limit
    technique: str  # what would then be chosen
    option: str = ""  # of the command line, which takes the limit away


def prices(question: Question, search: Search, row: int) -> dict[str, float]:
    """Relative gain of the objective for a little more of each thing, as solved again."""
    leaders = near(search, row)
    value = reference(question, search, row, leaders)
    more = question.with_limits(gpu_memory=question.limits.gpu_memory + GIB)
    found = {"one more GiB of GPU memory": _again(more, leaders, value)}
    more = question.with_limits(host_memory=question.limits.host_memory + 16 * GIB)
    found["16 GiB more host memory"] = _again(more, leaders, value)
    for name, label in (("ttft", "a 10 % looser TTFT"), ("tpot", "a 10 % looser TPOT")):
        limit = getattr(question.limits, name)
        if np.isfinite(limit):
            found[label] = _again(question.with_limits(**{name: MORE * limit}), leaders, value)
    for label, links in (
        ("10 % more host link bandwidth", ("h2d", "d2h")),
        ("10 % more host memory bandwidth", ("dram",)),
        ("10 % more GPU memory bandwidth", ("hbm",)),
    ):
        d = faster(question.deployment, links)
        found[label] = _again(replace(question, deployment=d), leaders, value)
    return found


def reference(question: Question, search: Search, row: int, leaders: list[Technique]) -> float:
    """The objective to compare with: found with the same batches as what it is compared with."""
    again = _best(question, leaders)
    return search.value(row) if again is None else min(search.value(row), again)


def _again(q: Question, leaders: list[Technique], value: float) -> float:
    """What some techniques gain under another question."""
    better = _best(q, leaders)
    return 0.0 if better is None else gain(value, better)


def _best(q: Question, leaders: list[Technique]) -> float | None:
    """The best objective of some techniques."""
    room = (q.limits.gpu_memory,), q.limits.host_memory
    other = Search(q, settled(leaders, q.deployment, q.workload, *room, q.admission))
    other.refine()
    row = other.optimum(q.limits.finite())
    return None if row is None else other.value(row)


def bindings(
    question: Question, search: Search, row: int, found: dict[str, float]
) -> list[Binding]:
    """Limits whose price is not zero, with what taking them away would bring."""
    value, limits = search.value(row), []
    cheap = {"gpu_memory": "one more GiB of GPU memory", "host_memory": "16 GiB more host memory",
             "ttft": "a 10 % looser TTFT", "tpot": "a 10 % looser TPOT"}  # fmt: skip
    for name, label in cheap.items():
        if found.get(label, 0.0) > PAYS:
            limits.append(_without(question, search, row, name))
    for name in ("loss", "assumed"):
        other = search.optimum(question.limits.finite(without=name) | {"harm": KNOWN_BAD})
        if other is None:
            continue
        technique = _spoken(search.table.technique[other])
        error = question.between(search.table.technique[other], search.table.technique[row])
        if gain(value, search.value(other)) > max(PAYS, error):
            option = " ".join(needs(question, search, other))
            limits.append(Binding(name, gain(value, search.value(other)), technique, option))
    return limits


def _spoken(technique: Technique) -> str:
    return technique.name if technique.uniform else "mixed layers"


def _without(q: Question, search: Search, row: int, name: str) -> Binding:
    """Solved without a limit; where memory is unlimited, batches grow with it."""
    other, free = search, q.with_limits(**{name: np.inf})
    if name.endswith("memory"):
        larger = q.with_limits(**{name: UNLIMITED * getattr(q.limits, name)})
        room = (larger.limits.gpu_memory,), larger.limits.host_memory
        some = near(search, row)
        other = Search(larger, settled(some, q.deployment, q.workload, *room, q.admission))
        other.refine()
    found = other.optimum(free.limits.finite())
    if found is None:
        return Binding(name, 0.0, "")
    better = gain(search.value(row), other.value(found))
    return Binding(name, better, _spoken(other.table.technique[found]))


def near(search: Search, row: int) -> list[Technique]:
    """The best settings of techniques that a change by a tenth may make the best."""
    value, limits = search.value(row), search.q.limits.finite()
    goal, found = search.table.columns[search.q.objective], {row: None}
    for name in search.table.names:
        best = search.best(limits, name)
        if best is not None and gain(float(goal[best]), value) < REACH - 1:
            found[best] = None
    return [search.table.technique[i] for i in found]


def faster(deployment: Deployment, links: tuple[str, ...]) -> Deployment:
    """The deployment with some links a tenth faster."""
    changed = {
        name: Link(link.bandwidth * MORE, link.latency) if name in links else link
        for name, link in deployment.hardware.links.items()
    }
    return replace(deployment, hardware=replace(deployment.hardware, links=changed))
