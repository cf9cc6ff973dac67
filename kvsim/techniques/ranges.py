"""A range of layers and its terms, and the one part of each axis that they make."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.techniques.axes import Drafting, Placement, Selection, Storage
from kvsim.techniques.layers import Parts
from kvsim.techniques.settings import plain
from kvsim.techniques.terms import Part, Term

PLAIN: dict[str, Part] = {
    "selection": Selection(),
    "storage": Storage(),
    "placement": Placement(),
    "drafting": Drafting(),
}
AXIS_WORDS = {
    "selection": "which tokens are kept or read",
    "storage": "how numbers are stored",
    "placement": "where the cache lives",
    "drafting": "who drafts",
}


@frozen
class Layers:
    """The terms of a range of layers, counted from 0; without a last one, up to the model's."""

    terms: tuple[Term, ...]
    first: int = 0
    last: int | None = None

    def __str__(self) -> str:
        """As the notation writes it."""
        return self.written(map(str, self.terms))

    def written(self, terms: Iterable[str]) -> str:
        """The range, if it is not all layers, and its terms."""
        text = " + ".join(terms)
        if self.first == 0 and self.last is None:
            return text
        last = "" if self.last is None else self.last
        return (
            f"{self.first}: {text}" if self.first == self.last else f"{self.first}-{last}: {text}"
        )


def parts_by_range(ranges: Iterable[Layers], whole: Iterable[Term]) -> tuple[Parts, ...]:
    """The parts of each range of layers; those with the very same terms are made once.

    Parameters
    ----------
    whole : terms of all ranges.
    """
    keys = [(tuple(map(id, some.terms)), some.terms) for some in ranges]
    made = {key: parts_of((*terms, *whole)) for key, terms in dict(keys).items()}
    return tuple(made[key] for key, _ in keys)


def parts_of(terms: Iterable[Term]) -> Parts:
    """One part of each axis, the defaults where no term says anything.

    Raises
    ------
    InputError
        If two terms set the same axis.
    """
    found: dict[str, tuple[Part, Term]] = {}
    for term in terms:
        for part in term.says():
            if part.axis in found and found[part.axis][1] is not term:
                other = found[part.axis][1]
                raise InputError(
                    f"{other.name} and {term.name} both set {AXIS_WORDS[part.axis]}; keep one"
                )
            found[part.axis] = part, term
    chosen: dict[str, Any] = {axis: part for axis, (part, _) in found.items()}
    return Parts(**(PLAIN | chosen))


def scalar_rows(
    layers: tuple[Layers, ...], whole: tuple[Term, ...]
) -> list[tuple[tuple[Layers, ...], tuple[Term, ...]]]:
    """Ranges and terms with scalar settings for each row of array-valued ones; none without."""
    terms = [term for some in layers for term in some.terms] + list(whole)
    arrays = [v for t in terms for v in t.settings.values() if isinstance(v, np.ndarray)]
    return [
        (
            tuple(replace(some, terms=_row(some.terms, i)) for some in layers),
            _row(whole, i),
        )
        for i in range(max((np.size(v) for v in arrays), default=0))
    ]


def _row(terms: tuple[Term, ...], row: int) -> tuple[Term, ...]:
    return tuple(
        replace(
            t,
            **{
                k: plain(np.ravel(v)[row if np.size(v) > 1 else 0])
                for k, v in t.settings.items()
                if isinstance(v, np.ndarray)
            },
        )
        for t in terms
    )


def uncovered(ranges: tuple[Layers, ...], layers: int) -> str:
    """Which of a model's layers no range covers or does not exist, or nothing."""
    expected = 0
    for some in ranges:
        if some.first != expected:
            return f"layers {expected} to {some.first - 1} have no technique"
        if some.last is None:
            return "" if some.first < layers else f"the model has {layers} layers"
        expected = some.last + 1
    if expected != layers:
        return f"it says what {expected} layers do, and the model has {layers}"
    return ""
