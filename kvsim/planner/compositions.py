"""The best composition of techniques: what is kept, how it is stored, where it lives, who drafts.

A local search with restarts. It begins with the best single techniques, and takes a term more, a
term less, another term, or another value of a setting as long as that is better. Settings have the
full range of their technique where the evidence of quality reaches; where nothing is known of a
loss, and that is welcome, only the settings that its authors used.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from itertools import chain, combinations, product
from math import floor
from typing import Any

import numpy as np

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.planner.question import Question, does_nothing
from kvsim.planner.table import (
    SAMPLED_CONTEXTS,
    TableSearch,
    best_row,
    candidate_batches,
    measures,
)
from kvsim.prediction.generate import Prediction
from kvsim.quality.evidence import KNOWN_BAD, Evidence
from kvsim.techniques import parse
from kvsim.techniques.axes.base import Term
from kvsim.techniques.released import FULL
from kvsim.techniques.technique import Technique, compose

FACTORS = (0.25, 0.5, 0.8, 0.95, 1.05, 1.25, 2.0, 4.0)  # of a setting, to its next value
STARTS = 6  # techniques from which a search begins
PARTNERS = 10  # techniques that are tried beside others, the best first
PLACED = (0, 0.5, 1)  # shares of the cache and of the weights on the host
BETTER = 1e-4  # relative: what is less than that is no step
MOST_EVALUATED, SHOWN = 300, 3  # compositions of a question
Limits = Callable[[Technique], Mapping[str, float]]


@frozen
class FoundComposition:
    """A composition at its best batch.

    Attributes
    ----------
    goal
        The objective, to be small.
    """

    technique: Technique
    batch: float
    goal: float
    evidence: Evidence


class CompositionSearch:
    """Compositions for one question.

    Parameters
    ----------
    limits
        Of memory and time, by technique; what loses too much is not in the space.
    most
        Compositions that are evaluated at most.
    """

    def __init__(self, question: Question, limits: Limits, most: int) -> None:
        self.q, self.limits, self.most, self.tried = question, limits, most, 0
        self._found: dict[str, FoundComposition | None] = {}
        self._known: dict[str, Evidence] = {}
        self._options: dict[str, set[str]] = {}
        self._arrays: list[Technique] = []
        w = question.workload
        self._lengths = w.prompt, w.generate

    # the space

    def evidence(self, technique: Technique) -> Evidence:
        """The evidence of a composition's loss."""
        key = str(technique)
        if key not in self._known:
            w, d = self.q.workload, self.q.deployment
            self._known[key] = self.q.admission.evidence(technique, d, w.length)
        return self._known[key]

    def admits(self, technique: Technique) -> bool:
        """Whether a composition may be chosen, by what is known of its loss."""
        known, admission = self.evidence(technique), self.q.admission
        if technique.assumes and self.q.limits.assumed < 1:
            return False
        if admission.loss(known) > self.q.limits.loss or admission.harm(known) > KNOWN_BAD:
            return False
        return not known.unknown or all(map(self._as_published, technique.terms))

    def _as_published(self, term: Term) -> bool:
        return compose(term).exact or str(term) in self._options.get(term.name, ())

    def singles(self) -> list[Technique]:
        """Every technique alone with the settings that its authors used."""
        q, d, found = self.q, self.q.deployment, []
        for technique in q.admission.candidates():
            drafts = "gamma" in technique.settings
            if technique.name == FULL or (not drafts and technique.refuses(d)):
                continue
            options = q.admission.settings(technique, d, *self._lengths)
            self._arrays += options
            some = [x for t in options for x in t.rows() if not does_nothing(x)]
            for t in some:
                for term in t.terms:
                    self._options.setdefault(term.name, set()).add(str(term))
            found += [t for t in some if self.admits(t) and not t.refuses(d)]
        return found

    def draw(self, random: np.random.Generator, singles: list[Technique]) -> Technique | None:
        """Draw a composition with settings anywhere in their range; None where none is admitted."""
        chosen: list[Term] = []
        for _ in range(int(random.integers(1, 4))):
            term = singles[int(random.integers(len(singles)))].terms[0]
            for name in self._ranges(term):
                some = [term, *self._values(term, name)]
                term = some[int(random.integers(len(some)))]
            chosen = [*chosen, term]
        with suppress(InputError):
            t = _join(chosen)
            return t if self.admits(t) and not t.refuses(self.q.deployment) else None
        return None

    # neighbours

    def neighbours(
        self, technique: Technique, partners: list[Technique]
    ) -> Iterator[list[Technique]]:
        """A term more, less or otherwise, one by one; then the values of each setting together."""
        terms = technique.terms
        if not technique.uniform:
            return
        if len(terms) > 1:
            yield from ([_join(terms[:i], terms[i + 1 :])] for i in range(len(terms)))
        for partner in partners:
            (other,) = partner.terms
            for kept in (terms, *(terms[:i] + terms[i + 1 :] for i in range(len(terms)))):
                if kept and other.name not in {t.name for t in kept}:
                    with suppress(InputError):
                        yield [_join(kept, (other,))]
        for i, term in enumerate(terms):
            for name in self._ranges(term):
                alike = []
                for changed in self._values(term, name):
                    with suppress(InputError):
                        alike.append(_join(terms[:i], (changed,), terms[i + 1 :]))
                yield alike
            for drafted in self.q.admission.neighbours(
                compose(term), self.q.deployment, self.q.workload.length
            ):
                with suppress(InputError):
                    yield [_join(terms[:i], drafted.terms, terms[i + 1 :])]

    def _ranges(self, term: Term) -> list[str]:
        """Settings that have a range; those of a draft belong to its acceptance."""
        return [] if "gamma" in term.settings else [f.name for f in fields(term)]

    def _values(self, term: Term, name: str) -> Iterator[Term]:
        """The term with other values of one setting."""
        about = next(f.metadata for f in fields(term) if f.name == name)
        now: object = getattr(term, name)
        values = [v for v in about["choices"] if v != now]
        if isinstance(now, int | float) and not isinstance(now, bool) and not about["choices"]:
            values = _around(now, about)
            if name.endswith("_layers"):  # no more than there are
                layers = self.q.deployment.model.layers
                values = [v for v in dict.fromkeys(min(v, layers) for v in values) if v != now]
        for value in values:
            with suppress(InputError):
                yield replace(term, **{name: value})

    def places(self) -> list[Technique]:
        """Parts of the cache and of the weights on the host, where placements are considered."""
        names = {t.name for t in self.q.admission.candidates()}
        if self.q.admission.engine or self.q.workload.service:
            return []
        if not self.q.deployment.single_pass or "offload" not in names:
            return []
        shares = product(PLACED, PLACED)
        return [parse(f"place:host_share={h},weights_host={w}") for h, w in shares if h or w]

    # the search

    @property
    def scored(self) -> list[FoundComposition]:
        """Compositions that were evaluated and are within the limits."""
        return [found for found in self._found.values() if found is not None]

    def score(self, technique: Technique) -> FoundComposition | None:
        """A composition at its best batch within the limits; None where there is none."""
        key = str(technique)
        if key not in self._found:
            self._found[key] = self._evaluate(technique)
        return self._found[key]

    def _evaluate(self, technique: Technique) -> FoundComposition | None:
        if not self.admits(technique) or technique.refuses(self.q.deployment):
            return None
        self.tried += 1
        (found,) = self._at_best_batches(technique, [technique])
        return found

    def _score_settings(self, technique: Technique) -> None:
        """All settings of an array-valued technique in one evaluation."""
        d, rows = self.q.deployment, technique.rows()
        if len(rows) > 1 and any(self.admits(t) and not t.refuses(d) for t in rows):
            self.tried += 1
            for t, found in zip(rows, self._at_best_batches(technique, rows), strict=True):
                able = found is not None and self.admits(t) and not t.refuses(d)
                self._found[str(t)] = found if able else None

    def _at_best_batches(
        self, technique: Technique, rows: list[Technique]
    ) -> list[FoundComposition | None]:
        """Each of a technique's settings at its best batch within the limits."""
        q = self.q
        try:
            batches = candidate_batches(q, technique)
            if not batches.size:
                return [None] * len(rows)
            found = q.workload.predict(technique, q.deployment, batches, SAMPLED_CONTEXTS)
            columns = measures(found)
        except InputError:
            return [None] * len(rows)
        shape, limits = (len(rows), batches.size), self.limits(technique)
        columns = {k: np.broadcast_to(v, shape) for k, v in columns.items()}
        best: list[FoundComposition | None] = []
        for i, t in enumerate(rows):
            mine = {k: v[i] for k, v in columns.items()}
            row = best_row(mine[q.objective], mine, limits)
            best.append(None)
            if row is not None:
                goal = float(mine[q.objective][row])
                best[-1] = FoundComposition(t, float(batches[row]), goal, self.evidence(t))
        return best

    def solve(self, others: Iterable[Technique] = ()) -> list[FoundComposition]:
        """Where the best starts lead, the best first.

        Parameters
        ----------
        others
            Techniques beside those of the question, such as placements that were searched.
        """
        every = [*self.singles(), *others]
        for t in self._arrays:
            self._score_settings(t)
        alone = [x for t in every if (x := self.score(t)) is not None]
        ranked = sorted(alone, key=lambda x: x.goal)
        best: dict[str, FoundComposition] = {}
        for found in ranked:
            best.setdefault(found.technique.name, found)
        # what does not fit alone may fit with others
        named = {t.name: t for t in reversed(every)} | {k: x.technique for k, x in best.items()}
        alone_first = sorted(named, key=lambda k: best[k].goal if k in best else np.inf)
        partners = [named[k] for k in alone_first if len(named[k].terms) == 1][:PARTNERS]
        for one, other in [*combinations(partners, 2), *product(partners, self.places())]:
            with suppress(InputError):
                pair = self.score(_join(one.terms, other.terms))
                known = best.get(pair.technique.name) if pair else None
                if pair and (known is None or pair.goal < known.goal):
                    best[pair.technique.name] = pair
        starts = sorted(best.values(), key=lambda x: x.goal)
        ends = [self._climb(x, partners) for x in starts[:STARTS]]
        distinct = {str(x.technique): x for x in ends}
        return sorted(distinct.values(), key=lambda x: x.goal)

    def _climb(self, start: FoundComposition, partners: list[Technique]) -> FoundComposition:
        """Take the first better neighbour until none is, or enough was tried."""
        best, moved = start, True
        while moved and self.tried < self.most:
            moved = False
            for alike in self.neighbours(best.technique, partners):
                if self.tried >= self.most:
                    break
                scored = [found for other in alike if (found := self.score(other)) is not None]
                found = min(scored, key=lambda x: x.goal, default=best)
                if found.goal < best.goal - BETTER * abs(best.goal):
                    best, moved = found, True
                    break
        return best

    def predict(self, found: FoundComposition) -> Prediction:
        """A composition at every generated token."""
        batch = np.array([found.batch])
        return self.q.workload.predict(found.technique, self.q.deployment, batch)


def add_compositions(
    question: Question, search: TableSearch, others: Iterable[Technique] = ()
) -> None:
    """Add the best compositions to the rows of a table, where there is anything to compose.

    Parameters
    ----------
    question
        The question.
    search
        Its table, which gets the rows.
    others
        Placements that were searched.
    """
    lossy = question.limits.loss > 0 or question.admission.unmeasured
    table, limits = search.table, question.limits.hard()
    if not len(table):
        return
    assumed = table.columns["assumed"] <= question.limits.assumed
    drafts = any(t.drafts for t, known in zip(table.technique, assumed, strict=True) if known)
    if not (lossy or drafts):  # placements alone have been searched
        return
    together = CompositionSearch(question, lambda _: limits, MOST_EVALUATED)
    for found in together.solve(others)[:SHOWN]:
        if len(found.technique.terms) > 1:
            search.include(together.predict(found))


def _join(*terms: Iterable[Term]) -> Technique:
    """Compose terms in the order of their names.

    Raises
    ------
    InputError
        If two set the same axis, or are the same.
    """
    every = sorted(chain(*terms), key=lambda term: term.name)
    if len({term.name for term in every}) < len(every):
        raise InputError("a term twice")
    return compose(*every)


def _around(now: float, about: Mapping[str, Any]) -> list[float]:
    """Other values of a number: factors of it, and its next whole ones."""
    low, high = about["low"], about["high"]
    share = about["share"] and 0 < now < 1
    found = [now * f for f in FACTORS] or [low]
    if about["whole"] and not share:
        found = [float(floor(x)) for x in (*found, now - 1, now + 1)]
    else:
        found = [float(f"{x:.3g}") for x in found]  # settings that a person reads and types
        found += [] if about["whole"] else [low, 1.0 if now < 1 <= high else low]
    top = 1.0 if share else high
    inside = [x for x in found if (0 < x < top if share else low <= x <= top)]
    return [int(x) if isinstance(now, int) else x for x in dict.fromkeys(inside) if x != now]
