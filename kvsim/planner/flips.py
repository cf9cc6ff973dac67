"""Where another plan would be chosen - longer prompts, other batches and links - and the front."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kvsim.frozen import frozen
from kvsim.planner.advice import on
from kvsim.planner.mixed import with_mixes
from kvsim.planner.options import Options, settled
from kvsim.planner.outlook import faster
from kvsim.planner.question import Question, Search, rank, spoken
from kvsim.techniques.technique import Technique

FACTORS = (2.0, 4.0, 8.0, 0.5, 0.25, 0.125)
ROUNDED = 1e-6  # of a TPOT or a throughput: what differs by less is equal
NARROWED = 4  # halvings of the interval in which the choice changes


@frozen
class Flip:
    """A change beyond which another technique is chosen.

    Attributes
    ----------
    what
        In words: "prompt", "host link bandwidth".
    factor
        Times the value asked about.
    value
        That value; tokens, sequences, or a rate. [tokens, sequences, B/s]
    technique
        What is chosen there, one name for all mixes of places; nothing where nothing fits.
    """

    what: str
    factor: float
    value: float
    technique: str


def flips(question: Question, search: Search, chosen: Technique) -> list[Flip]:
    """The nearest change of each kind, up or down, at which the choice changes.

    The best settings of every technique compete, each at its own best batch, and mixes of places as
    the programme gives them.
    """
    rivals = _rivals(search)
    w, d = question.workload, question.deployment
    kinds: list[tuple[str, float, Callable[[float], Question]]] = [
        ("prompt", w.prompt, lambda x: _with_prompt(question, x)),
        ("host link bandwidth", d.bandwidth["h2d"],
         lambda x: on(question, faster(d, ("h2d", "d2h"), x))),
        ("host memory bandwidth", d.hardware.links["dram"].bandwidth,
         lambda x: on(question, faster(d, ("dram",), x))),
    ]  # fmt: skip
    if w.batch is not None:
        batch = w.batch
        kinds.append(("batch", batch, lambda x: _with_batch(question, max(1, round(batch * x)))))
    found = []
    for what, value, ask in kinds:
        for direction in (FACTORS[:3], FACTORS[3:]):
            flip = _first(ask, direction, rivals, spoken(chosen))
            if flip is not None:
                factor, name = flip
                found.append(Flip(what, factor, value * factor, name))
    return found


def _first(
    ask: Callable[[float], Question], factors: tuple[float, ...], rivals: list[Technique], name: str
) -> tuple[float, str] | None:
    """The factor nearest to 1 in one direction with another choice, and that choice."""
    near = 1.0
    for far in factors:
        other = _winner(ask(far), rivals)
        if other != name:
            for _ in range(NARROWED):
                middle = float(np.sqrt(near * far))
                tried = _winner(ask(middle), rivals)
                if tried == name:
                    near = middle
                else:
                    far, other = middle, tried
            return far, other
        near = far
    return None


def _winner(q: Question, rivals: list[Technique]) -> str:
    """What is chosen of some techniques and of mixes of places, by name."""
    room = (q.limits.gpu_memory,), q.limits.host_memory
    search = Search(q, settled(rivals, q.deployment, q.workload, *room, q.admission))
    with_mixes(q, search, roughly=True)
    row = search.chosen(q.limits.finite())
    return "" if row is None else spoken(search.table.technique[row])


def _rivals(search: Search) -> list[Technique]:
    """The best settings of every technique that the user admits."""
    limits, found = search.q.limits, []
    for name in search.table.names:
        row = search.best(limits.finite(), name)
        if row is not None:
            found.append(search.table.technique[row])
    return found


def _with_prompt(q: Question, factor: float) -> Question:
    prompt = max(1, round(q.workload.prompt * factor))
    return replace(q, workload=replace(q.workload, prompt=prompt))


def _with_batch(q: Question, batch: int) -> Question:
    return replace(q, workload=replace(q.workload, batch=batch))


def front(table: Options, limits: dict[str, float]) -> list[int]:
    """Rows within the limits that nothing beats in both TPOT and throughput, the fastest first.

    Of rows that are equal but for rounding, the simplest.
    """
    columns = table.columns
    ok = np.ones(len(table), dtype=bool)
    for name, limit in limits.items():
        ok &= columns[name] <= limit * (1 + 1e-9)
    rows = np.flatnonzero(ok)
    tpot, goal = columns["tpot"], columns["throughput"]
    found: list[int] = []
    for row in rows[np.lexsort((goal[rows], tpot[rows]))].tolist():
        last = found[-1] if found else None
        if last is None or goal[row] < goal[last] - ROUNDED * abs(goal[last]):
            equal = last is not None and tpot[row] <= tpot[last] * (1 + ROUNDED)
            found[len(found) - equal :] = [row]
        elif goal[row] <= goal[last] + ROUNDED * abs(goal[last]) and (
            tpot[row] <= tpot[last] * (1 + ROUNDED)
            and rank(table.technique[row]) < rank(table.technique[last])
        ):
            found[-1] = row
    return found
