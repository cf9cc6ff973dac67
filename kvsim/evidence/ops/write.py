"""Fitted classes as stack files: one per card, and one of typical numbers for any card."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from kvsim.evidence.ops.fit import WHY, ClassFit
from kvsim.evidence.ops.rows import OpTable
from kvsim.evidence.stackfile import numbers_text
from kvsim.graph import Array

ALONE = {"attention-fp8": frozenset({"h100", "h200"})}
"""Cards whose kernel of a class runs on no other: FlashAttention 3 over fp8 caches is Hopper's."""
NONE = 1e-12  # a fitted number below this stands at its bound of 0


def errors_of(found: ClassFit) -> Array:
    """Relative errors of a class's rows, each by a fit that did not see its shape."""
    return np.abs(found.held_out / found.rows.took - 1)


def card_text(
    table: OpTable, fits: Sequence[ClassFit], base: str, today: str, near: Sequence[str] = ()
) -> str:
    """TOML of a stack for one card that extends ``base``."""
    numbers: dict[str, float] = {}
    sources: dict[str, str] = {}
    name = f"{table.engine} {table.version}".strip()
    for found in fits:
        rows = f"{len(found.rows)} rows of {name} on {table.device}"
        where = f"{rows} ({', '.join(table.sources)}), {today}"
        for key, value in found.fit.values.items():
            numbers[key] = value
            known = found.fit.errors[key]
            unknown = "; not determined by these rows" if key in found.fit.unknown else ""
            sources[key] = f"fitted to {where}: {value:.4g} +- {known:.2g}{unknown}"
        for key, value in found.fixed.items():
            numbers[key] = value
            sources[key] = f"{WHY[key.rpartition('.')[2]]}, with {where}"
    worst = ", ".join(
        f"{f.name} {100 * np.median(errors_of(f)):.2g} / {100 * np.quantile(errors_of(f), 0.9):.2g}"
        for f in fits
    )
    left = ", ".join(f"{count} {reason}" for reason, count in table.rejected.items())
    head: dict[str, object] = {
        "title": f"{name} on {table.device}, fitted to measured operators",
        "basis": "calibrated",
        "error": f"kernels on shapes that no fit saw, median / 90 % of rows in %: {worst}",
        "extends": base,
        **({"version": table.version} if table.version else {}),
        "device": table.device,
        "date": today,
        "fit": f"{sum(len(f.rows) for f in fits)} measured operators; left out: {left or 'none'}",
    }
    if near:
        head["near"] = list(near)
    return stack_text(head, numbers, sources)


def typical_text(
    head: Mapping[str, object],
    cards: Mapping[str, Mapping[str, float]],
    own: Mapping[str, tuple[float, str]],
    today: str,
) -> str:
    """TOML of an engine's typical numbers: the medians over the cards that state them.

    Parameters
    ----------
    cards : fitted numbers by card.
    own : further numbers with their sources.
    """
    numbers: dict[str, float] = {key: value for key, (value, _) in own.items()}
    sources = {key: text for key, (_, text) in own.items()}
    for key, value in typical(cards).items():
        seen = ", ".join(f"{c} {x:.3g}" for c, x in _stated(cards, key).items())
        numbers[key] = value
        sources[key] = f"median of cards fitted on {today}: {seen}"
    return stack_text(head, numbers, sources)


def typical(cards: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Medians over the cards that state a number and whose kernels other cards may run."""
    keys = dict.fromkeys(key for numbers in cards.values() for key in numbers)
    return {key: float(np.median(list(_stated(cards, key).values()))) for key in keys}


def _stated(cards: Mapping[str, Mapping[str, float]], key: str) -> dict[str, float]:
    """What cards say of a number; those with kernels that no other card runs only if alone."""
    found = {card: numbers[key] for card, numbers in cards.items() if key in numbers}
    alone = ALONE.get(key.split(".")[1], frozenset())
    return {card: x for card, x in found.items() if card not in alone} or found


def stack_text(
    head: Mapping[str, object],
    numbers: Mapping[str, float],
    sources: Mapping[str, str],
    flags: Mapping[str, bool] = MappingProxyType({}),
) -> str:
    """A stack file: its head, its numbers and flags by table, and their sources."""
    grounded = {key: value if value > NONE else 0.0 for key, value in numbers.items()}
    return numbers_text(head, grounded, sources, 5, flags)
